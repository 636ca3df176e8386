"""Several devices in one trial: collective operations between ranks, and the processes that run the ranks.

Every rank runs the same code on its share of each step. Ranks communicate in three places: gradients are all-reduced after
the last micro-batch, losses are summed once per step, and evaluation gathers its sums. Processes are reused between trials,
because starting one takes longer than a short trial.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...spaces.errors import BsearchError, TaskError
from ...spaces.plan import even_parts
from ...spaces.trial import COUNTED, Outcome
from ..loading import user_code_location
from ..machine.environment import environment
from ..noise_scale import NoiseScale

_NO_CONTEXT = nullcontext()

# How long the other ranks may take to notice that one has failed.
_GRACE_S = 2.0
# How long ranks may take to start: the first of a process import torch.
_START_S = 300.0
# What every rank needs besides this module.
_PRELOADED = (f"{__package__.rpartition('.')[0]}.trial", "torch.nn.parallel")


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's view of its trial's ranks. With a single rank, every operation is local."""

    rank: int = 0
    count: int = 1

    @classmethod
    def of(cls, devices: int) -> Ranks:
        """The group of `devices` ranks that this process belongs to.

        Raises:
            TaskError: this process does not belong to such a group.
        """
        if devices == 1:
            return cls()
        if not dist.is_initialized() or dist.get_world_size() != devices:
            raise TaskError(f"expected to run as one of {devices} ranks, got a single process")
        return cls(dist.get_rank(), devices)

    def distributed_loss(self, loss: nn.Module, device: torch.device, noise: NoiseScale) -> nn.Module:
        """The loss in DistributedDataParallel, its gradients summed over ranks; `noise` may measure each rank's own first."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            parallel = DistributedDataParallel(
                loss,
                device_ids=[device] if device.type == "cuda" else None,
                # Running statistics are synchronised before evaluation: `sync_batch_norm_statistics`.
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                # Models may use some parameters in some micro-batches only; finding them costs 35 us a step (docs/log.md).
                find_unused_parameters=True,
            )
        # The default hook averages, but a step's gradient is a sum. The hook's state must not refer to the module: the
        # garbage collector cannot break a reference cycle through the reducer.
        parallel.register_comm_hook(noise, lambda noise, bucket: _sum_hook(noise, bucket))
        return parallel

    def mean_share(self, size: int) -> float:
        """Harmonic mean of the ranks' shares of a batch: the small batch size when squared gradients are averaged over ranks.

        >>> Ranks(0, 2).mean_share(3)
        1.3333333333333333
        """
        return self.count / sum(1 / share for share in even_parts(size, self.count))

    def mean(self, local: Tensor) -> Tensor:
        """The mean over all ranks."""
        if self.count == 1:
            return local
        dist.all_reduce(local)
        return local / self.count

    def sync_context(self, loss: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Context of a micro-batch's forward and backward pass: gradients are all-reduced in the last one only."""
        if last or not isinstance(loss, DistributedDataParallel):
            return _NO_CONTEXT
        return loss.no_sync()

    def begin_sum(self, totals: list[Tensor], denominator: Tensor | float) -> Any:
        """Start summing a step's loss over micro-batches and ranks, overlapping with the last backward pass.

        Args:
            totals: the micro-batches' summed losses, scalars; several are summed in double precision.
        """
        if len(totals) == 1 and self.count == 1:
            return totals[0], denominator
        total = torch.stack(totals).sum(dtype=torch.float64)
        if self.count == 1:
            return total, denominator
        if isinstance(denominator, Tensor):
            denominator = denominator.detach().to(total.device, torch.float64)
        else:
            denominator = torch.full((), denominator, dtype=torch.float64, device=total.device)
        both = torch.stack([total, denominator])
        return both, dist.all_reduce(both, async_op=True)

    def end_sum(self, pending: Any) -> tuple[Tensor, Tensor | float]:
        """Wait for `begin_sum`; returns the sums of losses and of denominators over all ranks."""
        if self.count == 1:
            total, denominator = pending
            return total, denominator
        both, work = pending
        work.wait()
        return both[0], both[1]

    def sync_batch_norm_statistics(self, norms: Iterable[nn.modules.batchnorm._BatchNorm]) -> None:
        """Average running statistics over ranks, which is equivalent to averaging after every micro-batch."""
        if self.count == 1:
            return
        running = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
        if not running:
            return
        with torch.no_grad():
            flat = torch.cat([buffer.flatten().double() for buffer in running])
            means = torch.split(self.mean(flat), [buffer.numel() for buffer in running])
            for buffer, mean in zip(running, means, strict=True):
                buffer.copy_(mean.view_as(buffer))

    def max_over_ranks(self, seconds: float) -> float:
        """The maximum over ranks, so that all of them take the same decision."""
        if self.count == 1:
            return seconds
        longest = torch.tensor(seconds, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return float(longest)

    def all_gathered(self, local: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """The lists of all ranks, concatenated by name."""
        if self.count == 1:
            return dict(local)
        ranks: list[Any] = [None] * self.count
        dist.all_gather_object(ranks, dict(local))
        names = dict.fromkeys(name for one in ranks for name in one)
        return {name: [value for one in ranks for value in one.get(name, [])] for name in names}


def _sum_hook(noise: NoiseScale, bucket: Any) -> torch.futures.Future[Tensor]:
    gradients = bucket.buffer()
    if noise.active:
        noise.add_small_batch([gradients])
    work = dist.all_reduce(gradients, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class RankDiedError(Exception):
    """A rank's process died or did not respond."""


class RankProcesses:
    """Processes that run the same job in parallel, one per device; alive until closed or until one of them fails.

    Args:
        devices: ranks to start.
        kind: `gpu` gives each rank its own GPU and uses nccl; `cpu` uses gloo over the loopback interface.
        cpus: threads of each rank.

    Raises:
        RankDiedError: one did not start.
    """

    def __init__(self, devices: int, kind: Literal["cpu", "gpu"], cpus: int) -> None:
        self.key = (devices, kind, cpus)
        # The ranks' rendezvous: a free port that we already hold, and no file to leave behind.
        self._store = _opened_store()
        # Ranks are forked from a server process that has imported torch, once, and holds no context on any GPU.
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, *_PRELOADED])
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self.alive = True
        # Read when torch is imported. The log level hides DDP's warning that it found no unused parameters.
        with environment({"OMP_NUM_THREADS": str(cpus), "MKL_NUM_THREADS": str(cpus), "TORCH_CPP_LOG_LEVEL": "ERROR"}):
            for rank in range(devices):
                parent_end, child_end = context.Pipe()
                process = context.Process(
                    # Not a daemon: daemons may not have children, such as loader workers.
                    target=_rank_main,
                    args=(child_end, rank, devices, kind, self._store.port),
                    name=f"rank-{rank}",
                )
                process.start()
                child_end.close()
                self._processes.append(process)
                self._pipes.append(parent_end)
        try:
            for _ in self._round("start", timeout_s=_START_S):
                pass
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
        done = False
        try:
            self._send(("run", job, arguments))
            while True:
                messages = dict(self._round("next"))
                failures = {rank: value for rank, (kind, value) in messages.items() if kind in ("failed", "raised")}
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
            if not done:
                self.close()

    def close(self) -> None:
        """Kill the processes at once."""
        if not self.alive:
            return
        self.alive = False
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()

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

    def _round(self, message: Any = None, timeout_s: float | None = None) -> Iterator[tuple[int, tuple[str, Any]]]:
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
                    raise RankDiedError(self._cause_of_death(rank)) from None
                del waiting[rank]
                if reply[0] in ("failed", "raised") and not failed:
                    # The others may fail too, be dead, or wait for this one forever.
                    failed, deadline = True, time.monotonic() + _GRACE_S
                yield rank, reply

    def _cause_of_death(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(_GRACE_S)
        code = process.exitcode
        cause = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with code {code}"
        return f"rank {rank} of {len(self._processes)} {cause}"


_reusable: list[RankProcesses] = []


def rank_processes(devices: int, kind: Literal["cpu", "gpu"], cpus: int) -> RankProcesses:
    """Ranks to run a job on: those of the last job if they are alive and match, else new ones.

    Raises:
        RankDiedError: one did not start.
    """
    for ranks in list(_reusable):
        if ranks.alive and ranks.key == (devices, kind, cpus):
            return ranks
        ranks.shutdown()
        _reusable.remove(ranks)
    _reusable.append(RankProcesses(devices, kind, cpus))
    return _reusable[-1]


def close_ranks() -> None:
    """End the ranks that are kept for the next trial."""
    while _reusable:
        _reusable.pop().shutdown()


# Runs before multiprocessing joins its children at exit, which would wait for idle ranks forever.
Finalize(None, close_ranks, exitpriority=10)


def is_failure(report: Any) -> bool:
    """Whether the other ranks may still wait for this one after the report: an outcome that does not count as a trial's end."""
    return isinstance(report, Outcome) and report.kind not in COUNTED


# Runs in a rank's process


def _rank_main(pipe: Connection, rank: int, count: int, kind: str, port: int) -> None:
    # Ctrl-C goes to the whole process group, but a rank ends when its parent says so or dies.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _exit_with_parent()
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback  # the ranks of a trial run on one machine
    if kind == "gpu":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if kind == "gpu" else "gloo",
        store=dist.TCPStore("127.0.0.1", port, wait_for_workers=False),  # type: ignore[attr-defined]
        rank=rank,
        world_size=count,
        device_id=torch.device("cuda", rank) if kind == "gpu" else None,
    )
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # "start"
        pipe.send(("started", None))
        while True:
            _, job, arguments = pipe.recv()
            _run_job(pipe, job, arguments)
            gc.collect()  # a DistributedDataParallel that outlives its job aborts the process when the group is destroyed
    dist.destroy_process_group()


def _opened_store() -> Any:
    """The ranks' rendezvous store, on a free port of the loopback interface.

    A store that binds by itself listens on every address of the machine. Anyone who reaches it could pose as a rank, and
    ranks exchange pickles.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        return dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )


def _run_job(pipe: Connection, job: Callable[..., Iterator[Any]], arguments: Any) -> None:
    reports = job(*arguments)
    while True:
        if pipe.recv() == "stop":
            reports.close()  # type: ignore[attr-defined]  # a generator
            pipe.send(("ended", None))
            return
        try:
            report = next(reports)
        except StopIteration:
            pipe.send(("ended", None))
            return
        except Exception as error:
            pipe.send(("raised", _picklable(error)))
            return
        if is_failure(report):
            pipe.send(("failed", report))
            reports.close()  # type: ignore[attr-defined]
            return
        pipe.send(("report", report if dist.get_rank() == 0 else None))


def _picklable(error: Exception) -> Exception:
    """The error itself if it can be pickled, else a TaskError with its message."""
    with contextlib.suppress(Exception):
        if isinstance(pickle.loads(pickle.dumps(error)), BsearchError | torch.OutOfMemoryError):  # noqa: S301  # our own bytes
            return error
    return TaskError(f"{type(error).__name__}: {error}{user_code_location(error)}")


def _exit_with_parent() -> None:
    """End this process when its parent is gone, which may be killed without notice."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        # The sentinel is a pipe, which a child of the parent's may keep open; a process that nobody waits for keeps its id.
        while not wait([parent.sentinel], 0.2):
            with contextlib.suppress(PermissionError):
                try:
                    os.kill(parent.pid or 0, 0)
                except ProcessLookupError:
                    break
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
