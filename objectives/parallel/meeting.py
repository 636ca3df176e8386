"""Starts the processes of a trial: forked from a server that has imported what trainings import, and has run nothing.

What a training's code changes in its process, whatever it is, ends with it: each attempt has processes of its own.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import active_children, forkserver, get_context, reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from ...spaces.errors import BsearchError
from ..machine.environment import enter_folder_or_above, environment, working_folder
from ..task_code import task_libraries
from ..task_modules import is_users

LOOPBACK = "127.0.0.1"
_OURS = str(Path(__file__).parents[1])
# Names what the server imports for tasks.
LIBRARIES = "BSEARCH_LIBRARIES"
# Lines of a process's last words.
_LAST_LINES = 30


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one trial find one another.

    Args:
        count: how many there are.
        kind: `gpu` gives each rank its own GPU and uses its backend, such as nccl; `cpu` uses gloo.
        cpus: threads of each rank.
        address: of the machine of rank 0, as the others reach it; the loopback interface if all ranks are on one machine.
        port: of their store there; 0 where one rank is alone.
    """

    count: int
    kind: Literal["cpu", "gpu"]
    cpus: int
    address: str = LOOPBACK
    port: int = 0


class RankDiedError(Exception):
    """A rank's process died or did not respond.

    Attributes:
        machine: the machine is lost, rather than the process alone.
        words: the last that it wrote to stderr.
    """

    def __init__(self, message: str, *, machine: bool = False, words: str = "") -> None:
        super().__init__(message)
        self.machine, self.words = machine, words


class Output:
    """What processes print: passed on by this process, whose own output may have been redirected."""

    def __init__(self) -> None:
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._threads = []
        self._ends = []
        for name in ("stdout", "stderr"):
            read, write = os.pipe()
            self._ends.append(write)
            thread = threading.Thread(target=self._pass_on, args=(read, name), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _pass_on(self, read: int, name: str) -> None:
        with open(read, encoding="utf-8", errors="replace", newline="") as lines:
            for line in lines:
                if name == "stderr":
                    self._last.append(line)
                # A training must not wait for a reader that is gone.
                with suppress(AttributeError, OSError, ValueError):
                    stream = getattr(sys, name)
                    stream.write(line)
                    stream.flush()

    def inherited(self) -> list[Any]:
        """To be passed to a process that is started, as its own."""
        return [_Inherited(end) for end in self._ends]

    def close(self) -> None:
        """Nothing else will be started."""
        while self._ends:
            os.close(self._ends.pop())

    def words(self, within_s: float) -> str:
        """The last lines that the processes, which have ended, wrote to stderr."""
        self.close()
        for thread in self._threads:
            thread.join(within_s)  # a process that they left behind may keep it open
        return "".join(self._last)


class _Inherited:
    """A file descriptor that a child gets with its arguments."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._number),)


def _received(duplicate: Any) -> int:
    number: int = duplicate.detach()
    return number


# What the server imports for tasks, by dotted names; and whether it has, or another is to take its place.
_libraries: set[str] = set()
_lacks = False
_started_with: list[str] = []


def warm(reference: str, cpus: int) -> None:
    """Let the server, before it starts the next process, import what a task's file imports from installed packages."""
    global _lacks
    with suppress(BsearchError):
        known = {"bsearch", "torch", "numpy"}.union(name.partition(".")[0] for name in _libraries)
        found = task_libraries(reference)
        _lacks = _lacks or any(name.partition(".")[0] not in known for name in found)
        _libraries.update(found)
    if forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
        _ensure_server(cpus)


def _ensure_server(cpus: int) -> None:
    """Start the server, if it does not run; meanwhile it imports."""
    global _lacks, _started_with
    get_context("forkserver").set_forkserver_preload([f"{__package__}.preloaded"])
    # Read when torch is imported. The log level hides DDP's warning that it found no unused parameters.
    variables = {
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(cpus)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        LIBRARIES: " ".join(sorted(_libraries)),
    }
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if _lacks and server is not None and not active_children() and hasattr(os, "waitid"):
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # its own waits for it do the rest
        server = None
    _lacks = _lacks and server is not None
    if server is None:
        _started_with = [*os.environ]
    with environment(variables):
        forkserver.ensure_running()


def start_ranks(
    meeting: Meeting, pipes: Sequence[tuple[int, Connection]], output: Output
) -> list[BaseProcess]:
    """Start ranks on this machine, each on a device of its own; the pipes' ends here are theirs from now on.

    Args:
        pipes: the number of each rank, and what it gets its jobs from.
    """
    _ensure_server(meeting.cpus)
    processes: list[BaseProcess] = []
    gone = [name for name in _started_with if name not in os.environ]
    with _without_main():
        for device, (rank, pipe) in enumerate(pipes):
            # Not a daemon: daemons may not have children, such as loader workers.
            process = get_context("forkserver").Process(
                target=_enter,
                args=(pipe, rank, device, meeting, dict(os.environ), gone, output.inherited()),
                name=f"rank-{rank}",
            )
            process.start()
            pipe.close()
            processes.append(process)
    return processes


_folder = ""


@contextmanager
def _without_main() -> Iterator[None]:
    """Context in which a process that is started does not run this one's program again, as multiprocessing has it, and begins
    in its folder, or above where a training has removed that.
    """
    global _folder
    _folder = working_folder() or _folder
    enter_folder_or_above(_folder)
    main = vars(sys.modules["__main__"])
    before: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    for name in before:
        main[name] = None
    try:
        yield
    finally:
        main.update(before)


def _enter(
    pipe: Connection,
    rank: int,
    device: int,
    meeting: Meeting,
    variables: dict[str, str],
    gone: list[str],
    output: list[int],
) -> None:
    for stream, number in zip((sys.stdout, sys.stderr), output, strict=True):
        os.dup2(number, stream.fileno())
        os.close(number)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # The server has those of its start, and what libraries set for themselves.
    for name in gone:
        os.environ.pop(name, None)
    os.environ.update(variables)
    from .rank_main import rank_main

    rank_main(pipe, rank, device, meeting)


def death(process: BaseProcess) -> str:
    """How a process that is dead ended."""
    code = process.exitcode
    if code is None or code >= 0:
        return f"exited with code {code}"
    found = signal.Signals(-code)
    words = ", which the system sends where memory runs out" if found is signal.SIGKILL else ""
    return f"was killed by {found.name}{words}"


def place_in(words: str) -> str:
    """Where the user's code was, by what `faulthandler` has written of a death; empty where it has written nothing.

    >>> place_in('Fatal Python error: Segmentation fault\\n  File "/home/ann/tasks.py", line 7 in loss\\n')
    ' (/home/ann/tasks.py:7)'
    """
    for file, line in re.findall(r'^  File "(.+)", line (\d+) in ', words, re.MULTILINE):
        if is_users(file, "") and not file.startswith(_OURS):
            return f" ({file}:{line})"
    return ""
