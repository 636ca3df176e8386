"""Turn a trainer that calls back with measurements into a generator that yields them.

Third-party trainers run from start to finish and call back. A trial is a generator: its consumer requests one measurement
at a time and stops it by closing it. So the trainer runs in its own thread, and the two threads alternate: one waits while
the other runs, never both at once.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Stopped(BaseException):
    """The generator is closed; not an `Exception`, so that a trainer's own handlers do not catch it."""


class Report(Generic[T]):
    """The callback with which a trainer reports its measurements."""

    def __init__(self) -> None:
        self._values: SimpleQueue[T | _Ended] = SimpleQueue()
        self._requests: SimpleQueue[None] = SimpleQueue()
        self._stopped = False

    def __call__(self, value: T) -> None:
        """Report a value and wait until the next one is requested.

        Raises:
            Stopped: the generator is closed.
        """
        self._values.put(value)
        self._requests.get()
        self.raise_if_stopped()

    def raise_if_stopped(self) -> None:
        """Call at every step in between, so that training also ends between reports, as after Ctrl-C.

        Raises:
            Stopped: the generator is closed.
        """
        if self._stopped:
            raise Stopped


class _Ended:
    """The end of training, with the error it raised, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def as_generator(train: Callable[[Report[T]], object]) -> Iterator[T]:
    """Yield every value that `train` reports; its errors are raised here, with their own traceback.

    Closing the generator stops training at its last report and returns once the thread has ended.

    >>> def train(report):
    ...     for number in range(3):
    ...         report(number)
    >>> list(as_generator(train))
    [0, 1, 2]
    """
    report = Report[T]()
    thread = Thread(
        target=contextvars.copy_context().run,
        args=(_run, train, report, _thread_settings()),
        name="bsearch-training",
        daemon=True,  # so that it never keeps the process alive
    )
    try:
        thread.start()
        while not isinstance(value := _next(report._values), _Ended):
            yield value
            report._requests.put(None)
        if value.error is not None:
            raise value.error
    finally:
        # The name would create a cycle of error and frame, which keeps the failed training's memory until a collection.
        value = None  # type: ignore[assignment]
        report._stopped = True
        report._requests.put(None)
        thread.join()


def _next(values: SimpleQueue[T]) -> T:
    """The next value; polled, because a Ctrl-C just before a wait is only handled when the wait ends."""
    while True:
        with suppress(Empty):
            return values.get(timeout=0.2)


def _run(train: Callable[[Report[T]], object], report: Report[T], apply_settings: Callable[[], None]) -> None:
    error: BaseException | None = None
    try:
        apply_settings()
        train(report)
    except Stopped:
        pass
    except BaseException as raised:
        error = raised
    ended = _Ended(error)
    del error, train  # the last value is all that this thread still holds
    report._values.put(ended)


def _thread_settings() -> Callable[[], None]:
    """A function that applies this thread's torch settings in another: GPU, CPU threads, grad mode."""
    # Asking for it would open a context, also in a study on the CPU.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    threads, grad_enabled = torch.get_num_threads(), torch.is_grad_enabled()

    def apply() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad_enabled)

    return apply
