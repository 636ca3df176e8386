"""The processes of a trial, one for each of its devices, as the process that started them sees them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Literal

from ..state.leaving import LEAVE_SIGNAL, Leaving, asked_to_leave
from .machines import SILENT_S, Machines, RemoteRanks
from .meeting import LOOPBACK, Meeting, Output, RankDiedError, death, place_in, start_ranks

# A signal just before a wait is handled when the wait ends.
_POLLED_S = 0.2
# How long the other ranks may take to notice that one has failed.
_GRACE_S = 2.0
# How long a training on one device may take to clean up where it is stopped.
_CLEANS_UP_S = 30.0
# How long a process that has done its job may take to end, such as a tracker's.
_EXITS_S = 10.0
# How long ranks may take to start: the first of a process import torch.
_START_S = 300.0


class RankProcesses:
    """New processes that run the same job in parallel, one per device; alive until closed or until one of them fails.

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
        for earlier in [ranks for ranks in _running if ranks._deadline]:
            earlier.ended()
        self._deadline: float = 0.0
        self.shares = _first_of((devices,) if machines is None else machines.shares, devices)
        if machines is None or len(self.shares) == 1:
            machines, address = None, LOOPBACK
        else:
            address = machines.address
        # The ranks' rendezvous: a free port that we already hold, and no file to leave behind.
        self._store = _opened_store(address) if devices > 1 else None
        meeting = Meeting(devices, kind, cpus, address, self._store.port if self._store else 0)
        self._remote = None if machines is None else RemoteRanks(machines, self.shares, meeting)
        ends = [Pipe() for _ in range(self.shares[0])]
        self._pipes: list[Connection] = [own for own, _ in ends]
        self._output = Output()
        try:
            self._processes: list[BaseProcess] = start_ranks(
                meeting, [(rank, theirs) for rank, (_, theirs) in enumerate(ends)], self._output
            )
        finally:
            self._output.close()
        self.alive, self._busy = True, False
        _running.append(self)
        try:
            if self._remote is not None:
                self._pipes += self._remote.connected(_START_S)
            for _, (answer, error) in self._round("start", timeout_s=_START_S):
                if answer == "raised":
                    raise error
        except BaseException:
            self.close()
            raise

    def run(self, job: Callable[..., Iterator[Any]] | str, *arguments: Any) -> Iterator[Any]:
        """Run a generator function, or the one named by `module:name`, in every rank, in lockstep; yields what rank 0 yields.

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
                    # Other ranks may be blocked in a collective operation.
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
        except KeyboardInterrupt:
            self._interrupt()
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
        _running.remove(self)
        if self._remote is not None:
            self._remote.close()
        for process in self._processes:
            with suppress(ProcessLookupError):  # each makes itself a group, with what its code has started
                os.killpg(process.pid or 0, signal.SIGKILL)
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
        """Let idle processes exit on their own, so that they clean up. Before others start, `ended` waits for that."""
        for pipe in self._pipes:
            pipe.close()
        self._deadline = time.monotonic() + _EXITS_S

    def ended(self) -> None:
        """Wait for processes that were shut down, and kill what has not ended in time, or was not."""
        for process in self._processes:
            process.join(max(self._deadline - time.monotonic(), 0.0))
        self.close()

    def _stopped(self) -> bool:
        """Stop the job between two reports; False if a rank did not confirm in time."""
        try:
            self._send("stop")
            within_s = _GRACE_S if len(self._pipes) > 1 else _CLEANS_UP_S
            return all(kind == "ended" for _, (kind, _) in self._round(timeout_s=within_s))
        except RankDiedError:
            return False

    def _interrupt(self) -> None:
        """Let the user's code clean up where it is."""
        for process in self._processes:
            process.terminate()
        until = time.monotonic() + _GRACE_S
        for process in self._processes:
            process.join(max(until - time.monotonic(), 0.0))

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
            left = _POLLED_S if deadline is None else min(max(deadline - time.monotonic(), 0.0), _POLLED_S)
            # A process that user code has started may keep a dead rank's pipe open.
            ends = {rank: child.sentinel for rank, child in enumerate(self._processes) if rank in waiting}
            ready = wait([*waiting.values(), *ends.values()], left)
            if not ready and (deadline is None or time.monotonic() < deadline):
                continue
            if not ready:
                if failed:
                    return
                raise RankDiedError(f"rank {min(waiting)} of {len(self._pipes)} did not answer in time")
            for rank, pipe in list(waiting.items()):
                if pipe not in ready:
                    if ends.get(rank) in ready and not pipe.poll():
                        raise self._death(rank)
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
        who = f"rank {rank} of {len(self._pipes)}" if len(self._pipes) > 1 else "its process"
        words = self._output.words(_GRACE_S)
        return RankDiedError(f"{who} {death(process)}{place_in(words)}", words=words)


_running: list[RankProcesses] = []
_machines: Machines | None = None


def spread_ranks(machines: Machines | None) -> None:
    """Tell which machines the ranks of this process's trials are on; None: all on this one."""
    global _machines
    _machines = machines


def shares_of(devices: int) -> tuple[int, ...]:
    """How many of a trial's ranks each of its machines has, this one first."""
    return _first_of((devices,) if _machines is None else _machines.shares, devices)


def over_ranks(
    devices: int,
    kind: Literal["cpu", "gpu"],
    cpus: int,
    job: Callable[..., Iterator[Any]] | str,
    *arguments: Any,
) -> Iterator[Any]:
    """Run a job as `RankProcesses.run`, in processes that end with it.

    Raises:
        RankDiedError: one did not start, or died.
        BsearchError: a rank raised one.
        Leaving: this process was asked to leave while they started.
    """
    ranks = RankProcesses(devices, kind, cpus, _machines)
    try:
        if asked_to_leave():
            raise Leaving
        yield from ranks.run(job, *arguments)
    finally:
        ranks.shutdown()


def ask_ranks_to_leave() -> None:
    """Ask the trainings of this process's ranks to write a checkpoint and end; may be called in a signal handler."""
    for ranks in _running:
        ranks.ask_to_leave()


def _end_ranks() -> None:
    while _running:
        _running[-1].ended()


# Runs before multiprocessing joins its children at exit, which would wait for them forever.
Finalize(None, _end_ranks, exitpriority=10)


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
    import torch.distributed as dist  # what only looks on has no use for torch

    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
