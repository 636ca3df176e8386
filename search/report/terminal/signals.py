"""Ctrl-C, SIGTERM and SIGHUP on the command line: they end the program at any time, with a message; none is lost."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ....spaces.errors import TerminatedError

# A signal that cannot be handled now, or that a finalizer took, arrives again after this time.
_AGAIN_S = 0.05
# Where torch's files are, and what it takes at most to import them.
_TORCH, _IMPORTED_S = f"{os.sep}torch{os.sep}", 10.0

_received: list[int] = []  # by this process


@contextmanager
def handled_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt or TerminatedError, unless a signal is ignored, or handled by a program that calls us.

    By default SIGTERM would end us without a word, and once Ray has started, with a dump of its stacks.
    """
    _received.clear()
    shown = sys.unraisablehook
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        defaults: dict[int, Any] = {
            signal.SIGINT: signal.default_int_handler,
            signal.SIGTERM: signal.SIG_DFL,
            signal.SIGHUP: signal.SIG_DFL,
            # Of schedulers, submitit's too.
            **dict.fromkeys((signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU), signal.SIG_DFL),
        }
        handlers = {number: usual for number, usual in defaults.items() if signal.getsignal(number) is usual}
    # A signal may arrive in the finalizer of a library's object, where Python can only print what it raises.
    sys.unraisablehook = lambda event: _was_signal(event.exc_value) or shown(event)
    for number in handlers:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        sys.unraisablehook = shown
        for number, handler in handlers.items():
            signal.signal(number, handler)


def was_stopped() -> bool:
    """Whether a signal has stopped this process: errors after that, such as a timeout of Ray's, follow from it."""
    return bool(_received)


def is_termination(error: BaseException) -> bool:
    """Whether SIGTERM is what raised an error.

    Ray makes a KeyboardInterrupt of any exception that a handler raises; while it starts, it has a handler of its own.
    """
    by_ray = isinstance(error, SystemExit) and error.code == signal.SIGTERM
    interrupted = isinstance(error, Exception | KeyboardInterrupt) and _received[-1:] == [signal.SIGTERM]
    return isinstance(error, TerminatedError) or by_ray or interrupted


def _stop(number: int, frame: FrameType | None) -> None:
    if number != signal.SIGINT:  # the terminal is gone, or Slurm says that a job's time is nearly over
        number = signal.SIGTERM
    _received.append(number)
    # An exception while torch initialises its C++ modules would abort the process.
    if _imports_torch(frame) and _received.count(number) * _AGAIN_S < _IMPORTED_S:
        _send_again(number)
        return
    raise TerminatedError if number == signal.SIGTERM else KeyboardInterrupt


def _imports_torch(frame: FrameType | None) -> bool:
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return "<frozen importlib._bootstrap>" in files and any(_TORCH in file for file in files)


def _send_again(number: int) -> None:
    threading.Timer(_AGAIN_S, _thread.interrupt_main, [number]).start()


def _was_signal(lost: BaseException | None) -> bool:
    """Whether an uncatchable exception came from a signal; if so, the signal is sent again."""
    if not isinstance(lost, KeyboardInterrupt):
        return False
    _send_again(signal.SIGTERM if isinstance(lost, TerminatedError) else signal.SIGINT)
    return True
