"""Several devices in one trial: what a rank knows of the others, and the processes that ranks live in.

Every rank runs the same code on its share of each step. They talk in three places: a step's last pass (gradients), the sum
of a step's losses, and evaluation. The processes are kept between trials, for starting one costs more than a short trial.
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

from ..spaces.errors import BsearchError, TaskError
from ..spaces.plan import even_parts
from ..spaces.trial import COUNTED, Outcome
from .environment import environment
from .loading import user_code_location
from .noise_scale import NoiseScale

# How long ranks that did not fail may take to notice that another did.
_GRACE_S = 2.0
# How long ranks may take to start: each imports torch.
_START_S = 300.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's view of the ranks of its trial; alone, every question has its plain answer."""

    rank: int = 0
    count: int = 1

    @classmethod
    def of(cls, devices: int) -> Ranks:
        """The ranks this process belongs to.

        Raises:
            TaskError: this process is no rank of so many.
        """
        if devices == 1:
            return cls()
        if not dist.is_initialized() or dist.get_world_size() != devices:
            raise TaskError(f"expected to run as one of {devices} ranks, got a process of its own")
        return cls(dist.get_rank(), devices)

    def data_parallel(self, loss: nn.Module, device: torch.device, noise: NoiseScale) -> nn.Module:
        """The loss whose gradients are added up over the ranks in the pass that talks; `noise` may see each rank's own."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            parallel = DistributedDataParallel(
                loss,
                device_ids=[device] if device.type == "cuda" else None,
                # Running statistics are agreed on where they are used: `sync_batch_norm_statistics`.
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                # Models may use parameters in some passes only; looking for them costs 35 us a step (docs/log.md).
                find_unused_parameters=True,
            )
        # It would average, and a step's gradient is a sum. What the hook holds must not hold the module: no collector of
        # garbage sees through the reducer between them.
        parallel.register_comm_hook(noise, lambda noise, bucket: _seen_and_added(noise, bucket))
        return parallel

    def mean_share(self, size: int) -> float:
        """Samples of a rank's share as means of squared gradients over the ranks know it: the harmonic mean.

        >>> Ranks(0, 2).mean_share(3)
        1.3333333333333333
        """
        return self.count / sum(1 / share for share in even_parts(size, self.count))

    def mean(self, here: Tensor) -> Tensor:
        """The mean over all ranks."""
        if self.count == 1:
            return here
        dist.all_reduce(here)
        return here / self.count

    def sync_context(self, loss: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around a pass, forward and backward: gradients travel in the last one alone."""
        if isinstance(loss, DistributedDataParallel) and not last:
            return loss.no_sync()
        return nullcontext()

    def begin_sum(self, totals: list[Tensor], denominator: Tensor | float) -> Any:
        """Begin to add a step's loss up over passes and ranks, while the last pass's gradients are still being made.

        Args:
            totals: the passes' summed losses, float64 scalars.
        """
        total = totals[0] if len(totals) == 1 else torch.stack(totals).sum()
        if self.count == 1:
            return total, denominator
        if isinstance(denominator, Tensor):
            many = denominator.detach().to(total.device, torch.float64)
        else:
            many = torch.full((), denominator, dtype=torch.float64, device=total.device)
        both = torch.stack([total, many])
        return both, dist.all_reduce(both, async_op=True)

    def end_sum(self, begun: Any) -> tuple[Tensor, Tensor | float]:
        """What `begin_sum` began: the sums over all ranks, of losses and of denominators."""
        if self.count == 1:
            total, denominator = begun
            return total, denominator
        both, work = begun
        work.wait()
        return both[0], both[1]

    def sync_batch_norm_statistics(self, norms: Iterable[nn.modules.batchnorm._BatchNorm]) -> None:
        """Give all ranks the mean of their running statistics, which is what averaging at every pass would have come to."""
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

    def longest(self, seconds: float) -> float:
        """The most of what the ranks measured, so that all decide alike."""
        if self.count == 1:
            return seconds
        most = torch.tensor(seconds, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)

    def gathered(self, found: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """What all ranks found, by name."""
        if self.count == 1:
            return dict(found)
        everyone: list[Any] = [None] * self.count
        dist.all_gather_object(everyone, dict(found))
        names = dict.fromkeys(name for one in everyone for name in one)
        return {name: [value for one in everyone for value in one.get(name, [])] for name in names}


def _seen_and_added(noise: NoiseScale, bucket: Any) -> torch.futures.Future[Tensor]:
    here = bucket.buffer()
    if noise.looks:
        noise.see([here])
    work = dist.all_reduce(here, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class RankDiedError(Exception):
    """A rank's process ended without a word."""


class RankProcesses:
    """Processes that run the same job side by side, one a device; alive until closed or until one of them fails.

    Args:
        devices: ranks to start.
        kind: `gpu` gives each rank a GPU of its own and nccl, `cpu` gloo over the loopback.
        cpus: threads of each rank.

    Raises:
        RankDiedError: one did not start.
    """

    def __init__(self, devices: int, kind: Literal["cpu", "gpu"], cpus: int) -> None:
        self.key = (devices, kind, cpus)
        # Where the ranks find one another: a port that is free now and ours, and nothing on disk to be left behind.
        self._store = _opened_store()
        context = get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._lines: list[Connection] = []
        self.alive = True
        # Read when torch is imported; the log level hides a warning that no parameter was unused.
        with environment({"OMP_NUM_THREADS": str(cpus), "MKL_NUM_THREADS": str(cpus), "TORCH_CPP_LOG_LEVEL": "ERROR"}):
            for rank in range(devices):
                ours, theirs = context.Pipe()
                process = context.Process(
                    # Not daemons, which may have no children: loaders have.
                    target=_rank_main,
                    args=(theirs, rank, devices, kind, self._store.port),
                    name=f"rank-{rank}",
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._lines.append(ours)
        try:
            for _ in self._round("start", timeout_s=_START_S):
                pass
        except BaseException:
            self.close()
            raise

    def run(self, job: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[Any]:
        """Run a generator function in every rank, in step with one another; yields what rank 0 yields.

        Closing it ends the job in every rank. What one rank alone reports as its failure (`is_failure`) is yielded last, and
        the processes are ended: the others wait for it in vain.

        Raises:
            RankDiedError: a rank's process died.
            BsearchError: a rank raised one.
        """
        done = False
        try:
            self._tell(("run", job, arguments))
            while True:
                messages = dict(self._round("next"))
                failures = {rank: value for rank, (kind, value) in messages.items() if kind in ("failed", "raised")}
                if failures:
                    # Some may be left waiting in the middle of a talk: these processes are of no more use.
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
        """End the processes, whatever they are at."""
        if not self.alive:
            return
        self.alive = False
        for process in self._processes:
            process.kill()
        for process, line in zip(self._processes, self._lines, strict=True):
            process.join()
            line.close()

    def dismiss(self) -> None:
        """Let processes that wait for work end by themselves, which leaves nothing of theirs behind."""
        for line in self._lines:
            line.close()
        until = time.monotonic() + _GRACE_S
        for process in self._processes:
            process.join(max(until - time.monotonic(), 0.0))
        self.close()

    def _stopped(self) -> bool:
        """End the job between two reports; False where a rank did not say so in time."""
        try:
            self._tell("stop")
            return all(kind == "ended" for _, (kind, _) in self._round(timeout_s=_GRACE_S))
        except RankDiedError:
            return False

    def _tell(self, message: Any) -> None:
        for line in self._lines:
            try:
                line.send(message)
            except OSError:
                continue  # its death is found when its answer is awaited

    def _round(self, message: Any = None, timeout_s: float | None = None) -> Iterator[tuple[int, tuple[str, Any]]]:
        """One message from every rank; from those that come within a moment, once one has failed."""
        if message is not None:
            self._tell(message)
        open_lines = dict(enumerate(self._lines))
        until = None if timeout_s is None else time.monotonic() + timeout_s
        failed = False
        while open_lines:
            left = None if until is None else max(until - time.monotonic(), 0.0)
            ready = wait(list(open_lines.values()), left)
            if not ready:
                if failed:
                    return
                raise RankDiedError(f"rank {min(open_lines)} of {len(self._lines)} did not answer in time")
            for rank, line in list(open_lines.items()):
                if line not in ready:
                    continue
                try:
                    answer = line.recv()
                except (EOFError, OSError):
                    raise RankDiedError(self._last_words(rank)) from None
                del open_lines[rank]
                if answer[0] in ("failed", "raised") and not failed:
                    # The others may fail alike, be dead, or wait for this one for ever.
                    failed, until = True, time.monotonic() + _GRACE_S
                yield rank, answer

    def _last_words(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(_GRACE_S)
        code = process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return f"rank {rank} of {len(self._processes)} died {how}"


_kept: list[RankProcesses] = []


def rank_processes(devices: int, kind: Literal["cpu", "gpu"], cpus: int) -> RankProcesses:
    """Ranks to run a job on: those of the last one where they still live and are as many, else new ones.

    Raises:
        RankDiedError: one did not start.
    """
    for kept in list(_kept):
        if kept.alive and kept.key == (devices, kind, cpus):
            return kept
        kept.dismiss()
        _kept.remove(kept)
    _kept.append(RankProcesses(devices, kind, cpus))
    return _kept[-1]


def close_ranks() -> None:
    """End the ranks that were kept for a next trial."""
    while _kept:
        _kept.pop().dismiss()


# Before multiprocessing waits for its children at a process's end, which ranks would let it do for ever.
Finalize(None, close_ranks, exitpriority=10)


def is_failure(report: Any) -> bool:
    """A report after which the other ranks may be waiting for this one: an outcome that does not count as a trial's end."""
    return isinstance(report, Outcome) and report.kind not in COUNTED


# What runs in a rank's process


def _rank_main(line: Connection, rank: int, count: int, kind: str, port: int) -> None:
    # Ctrl-C goes to the whole process group; ours is to end when the one who started us says so, or dies.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback  # ranks of a trial live on one machine
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
        line.recv()  # "start"
        line.send(("started", None))
        while True:
            _, job, arguments = line.recv()
            _run_job(line, job, arguments)
            gc.collect()  # no DistributedDataParallel may outlive its job: ending the group under one aborts the process
    dist.destroy_process_group()


def _opened_store() -> Any:
    """The ranks' meeting place, on a free port of the loopback.

    A store that binds by itself listens on every address of the machine, and whoever reaches it may pose as a rank, to whom
    the others send and from whom they take pickles.
    """
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        return dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach()
        )


def _run_job(line: Connection, job: Callable[..., Iterator[Any]], arguments: Any) -> None:
    reports = job(*arguments)
    while True:
        if line.recv() == "stop":
            reports.close()  # type: ignore[attr-defined]  # a generator
            line.send(("ended", None))
            return
        try:
            report = next(reports)
        except StopIteration:
            line.send(("ended", None))
            return
        except Exception as error:
            line.send(("raised", _that_travels(error)))
            return
        if is_failure(report):
            line.send(("failed", report))
            reports.close()  # type: ignore[attr-defined]
            return
        line.send(("report", report if dist.get_rank() == 0 else None))


def _that_travels(error: Exception) -> Exception:
    """The error itself where it can be sent to another process, else its words."""
    with contextlib.suppress(Exception):
        if isinstance(pickle.loads(pickle.dumps(error)), BsearchError | torch.OutOfMemoryError):  # noqa: S301  # our own bytes
            return error
    return TaskError(f"{type(error).__name__}: {error}{user_code_location(error)}")


def _die_with_parent() -> None:
    """End this process when the one that started it is gone; checked often, since it may be killed without a word."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
