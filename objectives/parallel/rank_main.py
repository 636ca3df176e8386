"""What runs in a rank's process: it joins the other ranks, then does one job after another, in lockstep with them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...spaces.errors import BsearchError, TaskError
from ...spaces.trial import Outcome, OutcomeKind
from ..loading import contained, described
from ..machine import accelerator
from ..machine.device_memory import is_out_of_memory
from ..machine.environment import environment
from ..state.leaving import LEAVE_SIGNAL, ask_to_leave, stay

LOOPBACK = "127.0.0.1"
# What every rank needs besides this module.
_PRELOADED = (f"{__package__.rpartition('.')[0]}.trial", "torch.nn.parallel")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one trial find one another.

    Args:
        count: how many there are.
        kind: `gpu` gives each rank its own GPU and uses its backend, such as nccl; `cpu` uses gloo.
        cpus: threads of each rank.
        address: of the machine of rank 0, as the others reach it; the loopback interface if all ranks are on one machine.
        port: of their store there.
    """

    count: int
    kind: Literal["cpu", "gpu"]
    cpus: int
    address: str
    port: int


def start_ranks(meeting: Meeting, pipes: Sequence[tuple[int, Connection]]) -> list[BaseProcess]:
    """Start ranks on this machine, each on a device of its own; the pipes' ends here are theirs from now on.

    Args:
        pipes: the number of each rank, and what it gets its jobs from.
    """
    # Ranks are forked from a server process that has imported torch, once, and holds no context on any GPU.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, *_PRELOADED])
    threads = str(meeting.cpus)
    processes: list[BaseProcess] = []
    # Read when torch is imported. The log level hides DDP's warning that it found no unused parameters.
    with environment(
        {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ):
        for device, (rank, pipe) in enumerate(pipes):
            # Not a daemon: daemons may not have children, such as loader workers.
            process = context.Process(
                target=_rank_main, args=(pipe, rank, device, meeting), name=f"rank-{rank}"
            )
            process.start()
            pipe.close()
            processes.append(process)
    return processes


def death(process: BaseProcess) -> str:
    """How a process that is dead ended."""
    code = process.exitcode
    return (
        f"was killed by {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"exited with code {code}"
    )


class RankDiedError(Exception):
    """A rank's process died or did not respond.

    Attributes:
        machine: the machine is lost, rather than the process alone.
    """

    def __init__(self, message: str, *, machine: bool = False) -> None:
        super().__init__(message)
        self.machine = machine


# Outcomes that all ranks come to at the same step.
_TOGETHER: frozenset[OutcomeKind] = frozenset({"complete", "stopped", "diverged"})


def is_failure(report: Any) -> bool:
    """Whether the other ranks may still wait for this one after the report."""
    return isinstance(report, Outcome) and report.kind not in _TOGETHER


def _rank_main(pipe: Connection, rank: int, device: int, meeting: Meeting) -> None:
    # Ctrl-C goes to the whole process group, but a rank ends when its parent says so or dies.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(LEAVE_SIGNAL, lambda number, frame: ask_to_leave())
    _exit_with_parent()
    try:
        _meet(rank, device, meeting)
    except Exception as error:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()  # "start"
            # The text, since a backend's errors name their cause nowhere else.
            pipe.send(
                (
                    "raised",
                    RankDiedError(f"rank {rank} could not join the others: {type(error).__name__}: {error}"),
                )
            )
        return
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # "start"
        pipe.send(("started", None))
        while True:
            _, job, arguments = pipe.recv()
            stay()
            _run_job(pipe, job, arguments)
            gc.collect()  # a DistributedDataParallel that outlives its job aborts the process when the group is destroyed
    dist.destroy_process_group()


def _meet(rank: int, device: int, meeting: Meeting) -> None:
    """Join the group of all ranks.

    Raises:
        RuntimeError: of the backend.
    """
    # Before the group starts: functions of this module have the group of the time of import for a default argument. They would
    # keep it alive after it is destroyed, and with it gloo's threads, which can abort a process that ends.
    importlib.import_module("torch.distributed.nn")
    _choose_interface(meeting)
    if meeting.kind == "gpu":
        accelerator.set_device(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(accelerator.device_of(meeting.kind)),
        store=dist.TCPStore(meeting.address, meeting.port, wait_for_workers=False),  # type: ignore[attr-defined]
        rank=rank,
        world_size=meeting.count,
        device_id=accelerator.device_of("gpu") if meeting.kind == "gpu" else None,
    )


def _run_job(pipe: Connection, job: Callable[..., Iterator[Any]], arguments: Any) -> None:
    reports = job(*arguments)
    while True:
        if pipe.recv() == "stop":
            reports.close()  # type: ignore[attr-defined]  # a generator
            pipe.send(("ended", None))
            return
        try:
            with contained():
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
    """The error itself if it can be pickled; an out-of-memory error of any library as torch's; else a TaskError of its text."""
    if is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
        return torch.OutOfMemoryError(str(error))
    with contextlib.suppress(Exception):
        if isinstance(pickle.loads(pickle.dumps(error)), BsearchError | torch.OutOfMemoryError):  # noqa: S301  # our own bytes
            return error
    return TaskError(described(error))


def _exit_with_parent() -> None:
    """End this process when its parent is gone, which may be killed without notice."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        # The sentinel is a pipe, which a child of the parent's may keep open; a process that is not waited for keeps its id.
        while not wait([parent.sentinel], 0.2):
            with contextlib.suppress(PermissionError):
                try:
                    os.kill(parent.pid or 0, 0)
                except ProcessLookupError:
                    break
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def _choose_interface(meeting: Meeting) -> None:
    """Let the backends listen on no other interface than the one that leads to the other ranks."""
    if meeting.address == LOOPBACK:
        name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((meeting.address, meeting.port))  # sends nothing
            name = interface_of(way.getsockname()[0])
            # The user's own setting takes precedence, for networks with several interfaces.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}" if name else "")
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface with an IPv4 address; None if there is none, or this is not Linux.

    >>> interface_of("127.0.0.1"), interface_of("192.0.2.1")
    ('lo', None)
    """
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                answer = fcntl.ioctl(asked, 0x8915, name.encode().ljust(40, b"\0"))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
