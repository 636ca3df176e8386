"""The processes that run a trial's ranks: started once and kept, since starting them takes longer than a short trial."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Literal

import torch.distributed as dist

from ..state.leaving import LEAVE_SIGNAL
from .machines import SILENT_S, Machines, RemoteRanks
from .rank_main import LOOPBACK, Meeting, RankDiedError, death, start_ranks

# How long the other ranks may take to notice that one has failed.
_GRACE_S = 2.0
# How long ranks may take to start: the first of a process import torch.
_START_S = 300.0


class RankProcesses:
    """Processes that run the same job in parallel, one per device; alive until closed or until one of them fails.

    Args:
        devices: ranks to start.
        kind: `gpu` gives each rank its own GPU and uses its backend, such as nccl; `cpu` uses gloo.
        cpus: threads of each rank.
        machines: where they run; by default all on this machine, heard on its loopback interface only.

    Raises:
        RankDiedError: one did not start.
    """

    def __init__(
        self, devices: int, kind: Literal["cpu", "gpu"], cpus: int, machines: Machines | None = None
    ) -> None:
        self.key = (devices, kind, cpus, machines)
        self.shares = _first_of((devices,) if machines is None else machines.shares, devices)
        if machines is None or len(self.shares) == 1:
            machines, address = None, LOOPBACK
        else:
            address = machines.address
        # The ranks' rendezvous: a free port that we already hold, and no file to leave behind.
        self._store = _opened_store(address)
        meeting = Meeting(devices, kind, cpus, address, self._store.port)
        self._remote = None if machines is None else RemoteRanks(machines, self.shares, meeting)
        ends = [Pipe() for _ in range(self.shares[0])]
        self._pipes: list[Connection] = [own for own, _ in ends]
        self._processes: list[BaseProcess] = start_ranks(
            meeting, [(rank, theirs) for rank, (_, theirs) in enumerate(ends)]
        )
        self.alive, self._busy = True, False
        try:
            if self._remote is not None:
                self._pipes += self._remote.connected(_START_S)
            for _, (answer, error) in self._round("start", timeout_s=_START_S):
                if answer == "raised":
                    raise error
        except BaseException:
            self.close()
            raise

    def run(self, job: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[Any]:
        """Run a generator function in every rank, in lockstep; yields what rank 0 yields.

        Closing the iterator ends the job in every rank. If a rank reports a failure (`is_failure`), that is yielded last and
        the processes are killed, because the others may wait for that rank forever.

        Raises:
            RankDiedError: a rank's process died.
            BsearchError: a rank raised one.
        """
        done, self._busy = False, True
        try:
            self._send(("run", job, arguments))
            while True:
                messages = dict(self._round("next"))
                failures = {
                    rank: value for rank, (kind, value) in messages.items() if kind in ("failed", "raised")
                }
                if failures:
                    # Other ranks may be blocked in a collective operation: these processes cannot be reused.
                    self.close()
                    done = True
                    first = failures[min(failures)]
                    if isinstance(first, BaseException):
                        raise first
                    yield first
                    return
                kind, value = messages[0]
                if kind == "ended":
                    done = True
                    return
                yield value
        except GeneratorExit:
            done = self._stopped()
            raise
        finally:
            self._busy = False
            if not done:
                self.close()

    def close(self) -> None:
        """Kill the processes at once."""
        if not self.alive:
            return
        self.alive = False
        if self._remote is not None:
            self._remote.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def ask_to_leave(self) -> None:
        """Ask their training to leave, if there is one: rank 0, on which the others agree."""
        if self.alive and self._busy:
            with suppress(ProcessLookupError):
                os.kill(self._processes[0].pid or 0, LEAVE_SIGNAL)

    def shutdown(self) -> None:
        """Let idle processes exit on their own, so that they clean up; kill those that do not."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        self.close()

    def _stopped(self) -> bool:
        """Stop the job between two reports; False if a rank did not confirm in time."""
        try:
            self._send("stop")
            return all(kind == "ended" for _, (kind, _) in self._round(timeout_s=_GRACE_S))
        except RankDiedError:
            return False

    def _send(self, message: Any) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(message)
            except OSError:
                continue  # a dead rank is detected when its reply is read

    def _round(
        self, message: Any = None, timeout_s: float | None = None
    ) -> Iterator[tuple[int, tuple[str, Any]]]:
        """One message from every rank; once a rank has failed, only the messages that arrive within the grace period."""
        if message is not None:
            self._send(message)
        waiting = dict(enumerate(self._pipes))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        failed = False
        while waiting:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready = wait(list(waiting.values()), left)
            if not ready:
                if failed:
                    return
                raise RankDiedError(f"rank {min(waiting)} of {len(self._pipes)} did not answer in time")
            for rank, pipe in list(waiting.items()):
                if pipe not in ready:
                    continue
                try:
                    reply = pipe.recv()
                except (EOFError, OSError):
                    raise self._death(rank) from None
                del waiting[rank]
                if reply[0] in ("failed", "raised") and not failed:
                    # The others may fail too, be dead, or wait for this one forever. Where a machine is lost, a backend may
                    # notice before its connection ends.
                    failed = True
                    deadline = time.monotonic() + (_GRACE_S if self._remote is None else SILENT_S + _GRACE_S)
                yield rank, reply

    def _death(self, rank: int) -> RankDiedError:
        if rank >= len(self._processes):
            assert self._remote is not None
            return self._remote.lost(rank)
        process = self._processes[rank]
        process.join(_GRACE_S)
        return RankDiedError(f"rank {rank} of {len(self._pipes)} {death(process)}")


_reusable: list[RankProcesses] = []
_machines: Machines | None = None


def spread_ranks(machines: Machines | None) -> None:
    """Tell which machines the ranks of this process's trials are on; None: all on this one."""
    global _machines
    _machines = machines


def ranks_here(devices: int) -> int:
    """How many of a trial's ranks would be on this machine."""
    return _first_of((devices,) if _machines is None else _machines.shares, devices)[0]


def rank_processes(devices: int, kind: Literal["cpu", "gpu"], cpus: int) -> RankProcesses:
    """Ranks to run a job on: those of the last job if they are alive and match, else new ones.

    Raises:
        RankDiedError: one did not start.
    """
    for ranks in list(_reusable):
        if ranks.alive and ranks.key == (devices, kind, cpus, _machines):
            return ranks
        ranks.shutdown()
        _reusable.remove(ranks)
    _reusable.append(RankProcesses(devices, kind, cpus, _machines))
    return _reusable[-1]


def ask_ranks_to_leave() -> None:
    """Ask the training of this process's ranks to write a checkpoint and end; may be called in a signal handler."""
    for ranks in _reusable:
        ranks.ask_to_leave()


def close_ranks() -> None:
    """End the ranks that are kept for the next trial."""
    while _reusable:
        _reusable.pop().shutdown()


# Runs before multiprocessing joins its children at exit, which would wait for idle ranks forever.
Finalize(None, close_ranks, exitpriority=10)


def _first_of(shares: Sequence[int], ranks: int) -> tuple[int, ...]:
    """How many of a trial's first ranks each machine has.

    >>> _first_of((8, 8, 4), 12), _first_of((8, 8), 2)
    ((8, 4), (2,))
    """
    kept: list[int] = []
    for share in shares:
        if (left := ranks - sum(kept)) > 0:
            kept.append(min(share, left))
    return tuple(kept)


def _opened_store(address: str) -> Any:
    """The ranks' rendezvous store, on a free port of one interface.

    A store that binds by itself listens on every address of the machine. Anyone who reaches it could pose as a rank, and
    ranks exchange pickles.
    """
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
