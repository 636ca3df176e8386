"""A training that pushes its measurements, turned into a generator that is pulled.

Other people's trainers run from beginning to end and call back; a trial asks for one measurement after the other, and is
stopped by closing its generator. So such a trainer gets a thread of its own, and the two take turns: while one runs the
other waits, and nothing of either ever runs beside the other.
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
    """Nobody waits for measurements any more; no `Exception`, so that a trainer's own handlers let it pass."""


class Tell(Generic[T]):
    """What a trainer is given to hand its measurements over with."""

    def __init__(self) -> None:
        self._told: SimpleQueue[T | _Ended] = SimpleQueue()
        self._asked: SimpleQueue[None] = SimpleQueue()
        self._stopped = False

    def __call__(self, value: T) -> None:
        """Hand one value over and wait until the next one is wanted.

        Raises:
            Stopped: none is wanted any more.
        """
        self._told.put(value)
        self._asked.get()
        self.go_on()

    def go_on(self) -> None:
        """For every step in between: ends a training that nobody waits for, as after Ctrl-C.

        Raises:
            Stopped: it is to end.
        """
        if self._stopped:
            raise Stopped


class _Ended:
    """The end of a training, with what it raised."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def as_generator(train: Callable[[Tell[T]], object]) -> Iterator[T]:
    """Everything that `train` tells, one at a time; what it raises is raised here, with its own traceback.

    Closing the generator ends the training at the value it told last and returns when its thread is gone.

    >>> def train(tell):
    ...     for number in range(3):
    ...         tell(number)
    >>> list(pulled(train))
    [0, 1, 2]
    """
    tell = Tell[T]()
    thread = Thread(
        target=contextvars.copy_context().run,
        args=(_run, train, tell, _settings_of_this_thread()),
        name="bsearch-training",
        daemon=True,  # whatever happens, it keeps no process alive
    )
    try:
        thread.start()
        while not isinstance(told := _next(tell._told), _Ended):
            yield told
            tell._asked.put(None)
        if told.error is not None:
            raise told.error
    finally:
        # A name would hold the error, and it this frame: what failed would keep its memory until the next collection.
        told = None  # type: ignore[assignment]
        tell._stopped = True
        tell._asked.put(None)
        thread.join()


def _next(told: SimpleQueue[T]) -> T:
    """What is told next; looked for again and again, since a Ctrl-C just before a wait begins is heard when it ends."""
    while True:
        with suppress(Empty):
            return told.get(timeout=0.2)


def _run(train: Callable[[Tell[T]], object], tell: Tell[T], settings: Callable[[], None]) -> None:
    error: BaseException | None = None
    try:
        settings()
        train(tell)
    except Stopped:
        pass
    except BaseException as raised:
        error = raised
    ended = _Ended(error)
    del error, train  # what is told last is all that this thread still holds
    tell._told.put(ended)


def _settings_of_this_thread() -> Callable[[], None]:
    """What torch keeps for each thread apart, to be made alike in another: GPU, CPU threads, whether graphs are kept."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    threads, graphs = torch.get_num_threads(), torch.is_grad_enabled()

    def make_alike() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(graphs)

    return make_alike
