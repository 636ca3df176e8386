"""What a third-party loop trains, as a Task, so that its memory is known before the first trial as any task's is.

The user's training function is called as for a trial. Before its loop takes the first step, it yields the model, the optimizer,
the data and the loss instead of training: all of them prepared by the library, as for a trial (its precision and activation
checkpointing). Then the function is closed, as where a trial is stopped.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ...spaces.errors import TaskError
from ...spaces.trial import Parameter, TrialSetup
from ..batches import Fetcher, SampleKeys
from ..task import Data, Loss, Task, TrainFunction
from .as_generator import Report


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What a loop is about to train.

    Args:
        loss: of a model and a batch on its device: the mean loss, with its graph.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Fetcher
    loss: Callable[[nn.Module, Any], Tensor]


_wanted: ContextVar[list[LoopParts] | None] = ContextVar("wanted", default=None)


def hand_over(report: Report[Any], parts: Callable[[], LoopParts]) -> None:
    """Report what a loop is about to train, if that is wanted rather than the training."""
    wanted = _wanted.get()
    if wanted is not None:
        wanted.append(parts())
        report(wanted[-1])


def uses_adapter(function: TrainFunction) -> bool:
    """Whether a training function trains by an adapter of this package, itself or through functions of its module.

    Any other function starts to train when it is called.
    """
    package, seen = __name__.rpartition(".")[0], set[CodeType]()

    def uses(code: CodeType, names: Mapping[str, Any]) -> bool:
        if code in seen:
            return False
        seen.add(code)
        for name in code.co_names:
            value = names.get(name)
            if name.startswith(package) or (getattr(value, "__module__", None) or "").startswith(package):
                return True  # imported in the function, or in its module
            if inspect.ismodule(value) and value.__name__.startswith(package):
                return True
            if inspect.isfunction(value) and value.__globals__ is names and uses(value.__code__, names):
                return True
        return any(isinstance(constant, CodeType) and uses(constant, names) for constant in code.co_consts)

    return uses(function.__code__, function.__globals__)


class LoopTask(Task):
    """The training of a function that uses an adapter: steps with its model, loss, optimizer and batches.

    It has no scores: how a loop evaluates is not known.
    """

    def __init__(self, function: TrainFunction) -> None:
        self.function = function
        self._parts: tuple[dict[str, Parameter], LoopParts] | None = None

    def parts(self, setup: TrialSetup) -> LoopParts:
        """What the function trains with these parameters.

        Raises:
            TaskError: it yields before it trains, or ends without training.
        """
        # The same parameters build the same training, whatever their batch: nothing else is asked of it.
        if self._parts is None or self._parts[0] != dict(setup.parameters):
            self._parts = None  # free the other before this one is built
            wanted: list[LoopParts] = []
            token = _wanted.set(wanted)
            yielded = None
            try:
                with closing(self.function(setup)) as training:  # type: ignore[type-var]  # a generator
                    yielded = next(training, None)
            except Exception:
                if not wanted:  # the function may not know what to do with what its loop yielded
                    raise
            finally:
                _wanted.reset(token)
            if not wanted:
                found = "no training" if yielded is None else f"a {type(yielded).__name__} first"
                raise TaskError(f"{self.function.__name__}: expected to train by train_with, got {found}")
            wanted[0].model.cpu()  # copies are probed
            self._parts = dict(setup.parameters), wanted[0]
        return self._parts[1]

    def data(self, setup: TrialSetup) -> Data:
        batches = _Batches(self.parts(setup).data)
        return Data(batches, batches)

    def model(self, setup: TrialSetup) -> nn.Module:
        return copy.deepcopy(self.parts(setup).model)

    def optimizer(self, parameters: Iterable[nn.Parameter], setup: TrialSetup) -> torch.optim.Optimizer:
        """A copy of the loop's optimizer for the same parameters of another copy of its model."""
        parts = self.parts(setup)
        ours = list(parts.model.parameters())
        same: dict[int, Any] = {id(one): one for one in ours if not one.requires_grad}
        same |= {id(one): other for one, other in zip((one for one in ours if one.requires_grad), parameters, strict=True)}
        return copy.deepcopy(parts.optimizer, same)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        return Loss(self.parts(setup).loss(model, batch), 1.0)


class _Batches(Dataset[Any]):
    """A loop's data, whole micro-batches at a time, as its loader collates them."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __len__(self) -> int:
        return len(self._fetcher.dataset)  # type: ignore[arg-type]

    def fetch(self, keys: SampleKeys) -> Any:
        batch = self._fetcher.fetch(keys)
        return dict(batch) if isinstance(batch, Mapping) else batch  # a tokenizer's own mapping hides its tensors
