"""What runs in a rank's process: it joins the other ranks, if there are any, and does one job in lockstep with them."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ...spaces.errors import BsearchError, TaskError
from ...spaces.trial import Outcome, OutcomeKind
from ..loading import contained, described
from ..machine import accelerator
from ..machine.device_memory import is_out_of_memory
from ..state.leaving import LEAVE_SIGNAL, ask_to_leave, stay
from .meeting import LOOPBACK, Meeting, RankDiedError

# Of fcntl, on Linux: the signal that tells of a change of a descriptor.
_F_SETSIG = 10
# Outcomes that all ranks come to at the same step.
_TOGETHER: frozenset[OutcomeKind] = frozenset({"complete", "stopped", "diverged"})


def is_failure(report: Any) -> bool:
    """Whether the other ranks may still wait for this one after the report."""
    return isinstance(report, Outcome) and report.kind not in _TOGETHER


def rank_main(pipe: Connection, rank: int, device: int, meeting: Meeting) -> None:
    # A group, so that what its code starts can be ended with it, and what that signals to its group goes no further.
    os.setpgid(0, 0)
    # A rank ends when its parent says so or dies.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(LEAVE_SIGNAL, lambda number, frame: ask_to_leave())
    faulthandler.enable(all_threads=False)
    atexit._clear()  # those of the server, which has not ended
    torch.set_num_threads(meeting.cpus)
    _exit_with_parent()
    try:
        if meeting.count > 1:
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
            _run_job(pipe, rank, meeting.count, job, arguments)
            gc.collect()  # a DistributedDataParallel that outlives its job aborts the process when the group is destroyed
    if meeting.count > 1:
        dist.destroy_process_group()
    # Those of the user's code, such as a tracker's: multiprocessing runs none.
    atexit._run_exitfuncs()


def _stop(number: int, frame: FrameType | None) -> None:
    """End what the user's code is doing, by its own way."""
    raise SystemExit


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


def _run_job(
    pipe: Connection, rank: int, count: int, job: Callable[..., Iterator[Any]] | str, arguments: Any
) -> None:
    if isinstance(job, str):
        module, _, name = job.partition(":")
        job = getattr(importlib.import_module(module), name)
    assert callable(job)
    reports, own = job(*arguments), os.getpid()
    while True:
        if pipe.recv() == "stop":
            reports.close()  # type: ignore[attr-defined]  # a generator
            pipe.send(("ended", None))
            return
        try:
            with contained():
                report = next(reports)
            if os.getpid() != own:
                os._exit(0)  # the user's code has forked, and the copy has come here
        except StopIteration:
            pipe.send(("ended", None))
            return
        except Exception as error:
            pipe.send(("raised", _picklable(error)))
            return
        if count > 1 and is_failure(report):
            pipe.send(("failed", report))
            reports.close()  # type: ignore[attr-defined]
            return
        pipe.send(("report", report if rank == 0 else None))


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
    if sys.platform == "linux":
        # By the kernel, where an extension keeps the interpreter from running the thread below.
        import fcntl

        sentinel = int(parent.sentinel)
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(sentinel, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)

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
