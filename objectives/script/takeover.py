"""What a script calls of torch, taken over while it runs: batches come in parts; what is done once a step waits for the last.

A step that is one part is untouched: the script then does what it does without us.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import chain
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader


class Driver(Protocol):
    """What decides which batches a script gets."""

    @property
    def share(self) -> float:
        """What the loss of the current part counts in its step; 1 between steps."""

    @property
    def is_last(self) -> bool:
        """Whether the current part is its step's last; true between steps."""

    @property
    def has_gradients(self) -> bool:
        """Whether earlier parts of the current step have left gradients that have not been stepped with."""

    @property
    def skips(self) -> bool:
        """Whether the script passes over what an earlier attempt has trained."""

    def trains(self, loader: DataLoader[Any]) -> bool:
        """Whether a loader is iterated to train, and not to evaluate."""

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The parts of a pass over a loader that trains."""

    def back_propagated(self) -> None:
        """A part has left gradients."""

    def stepped(self) -> None:
        """An optimizer has stepped."""

    def wrote(self, text: str) -> None:
        """The script has written to its standard output."""


class Made:
    """What a script has made so far, in order; held weakly, as the script may drop it."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[Any]] = []

    def add(self, one: Any) -> None:
        self._all.append(weakref.ref(one))

    def of(self, kind: type) -> list[Any]:
        return [one for ref in self._all if isinstance(one := ref(), kind)]

    def models(self) -> list[nn.Module]:
        """The modules with parameters or buffers that no other module contains."""
        modules = self.of(nn.Module)
        inner = {id(child) for module in modules for child in module.modules() if child is not module}
        return [one for one in modules if id(one) not in inner and any(True for _ in chain(one.parameters(), one.buffers()))]


@contextmanager
def taken_over(driver: Driver, made: Made) -> Iterator[None]:
    """Context in which this thread's script runs."""
    thread, stack = threading.get_ident(), ExitStack()

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in the original's place, for this thread alone."""
        original = getattr(owner, name)
        ours = make(original)

        @wraps(original)
        def chosen(*arguments: Any, **named: Any) -> Any:
            return (ours if threading.get_ident() == thread else original)(*arguments, **named)

        own = name in vars(owner)
        setattr(owner, name, chosen)
        stack.callback(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    def at_last(value: Any = None) -> Callable[[Any], Any]:
        """What is done once a step, after its last part; and not while passing over what was trained before."""

        def waits(original: Any) -> Any:
            return lambda *arguments, **named: original(*arguments, **named) if driver.is_last and not driver.skips else value

        return waits

    def cleared(original: Any) -> Any:
        return lambda *arguments, **named: None if driver.has_gradients else original(*arguments, **named)

    def iterated(original: Any) -> Any:
        return lambda loader: driver.batches(loader) if driver.trains(loader) else original(loader)

    with stack:
        for kind in (nn.Module, LRScheduler, GradScaler):
            replace(kind, "__init__", partial(_noted, made))
        replace(nn.Module, "__setstate__", partial(_noted, made))  # of a copy
        replace(Optimizer, "__init__", partial(_optimizer_made, driver, made))
        replace(DataLoader, "__iter__", iterated)
        replace(Tensor, "backward", partial(_shared, driver))
        replace(Optimizer, "zero_grad", cleared)
        replace(nn.Module, "zero_grad", cleared)
        for kind in _schedulers():
            replace(kind, "step", at_last())
        for name in ("step", "update", "unscale_"):
            replace(GradScaler, name, at_last())
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for owner in (nn.utils, nn.utils.clip_grad):
                replace(owner, name, at_last(torch.zeros(())))
        stack.callback(setattr, sys, "stdout", sys.stdout)
        sys.stdout = _Written(sys.stdout, thread, driver.wrote)
        yield


def _noted(made: Made, original: Any) -> Any:
    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        made.add(self)
        original(self, *arguments, **named)

    return begin


def _optimizer_made(driver: Driver, made: Made, original: Any) -> Any:
    def begin(self: Optimizer, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        made.add(self)
        # On the instance, since subclasses have their own; a method, since schedulers wrap it.
        own = type(self).step

        @wraps(own)
        def step(self: Optimizer, *arguments: Any, **named: Any) -> Any:
            if not driver.is_last:
                return None
            loss = own(self, *arguments, **named)
            driver.stepped()
            return loss

        self.step = MethodType(step, self)  # type: ignore[method-assign]

    return begin


def _shared(driver: Driver, original: Any) -> Any:
    """Back-propagation of a part's share of its step's loss."""
    inside = [False]  # torch calls it by its name again where a function mode is active

    def backward(self: Tensor, gradient: Tensor | None = None, *arguments: Any, **named: Any) -> None:
        if inside[0]:
            original(self, gradient, *arguments, **named)
            return
        if driver.share != 1.0:
            gradient = driver.share * (torch.ones_like(self) if gradient is None else gradient)
        inside[0] = True
        try:
            original(self, gradient, *arguments, **named)
        finally:
            inside[0] = False
        driver.back_propagated()

    return backward


def _schedulers() -> list[Any]:
    """Torch's schedulers that have a step of their own."""
    kinds: list[Any] = [LRScheduler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [kind for kind in dict.fromkeys(kinds) if "step" in vars(kind)]


class _Written:
    """A standard output that gives a thread's lines to a function, and all others' to where they went before."""

    def __init__(self, before: Any, thread: int, wrote: Callable[[str], None]) -> None:
        self._before, self._thread, self._wrote = before, thread, wrote

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            self._wrote(text)
            return len(text)
        return int(self._before.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)
