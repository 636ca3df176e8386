"""What a third-party loop trains, as a Task, so that its memory is known before the first trial as any task's is.

The user's training function is called as for a trial. Before its loop takes the first step, it yields the model, the optimizer,
the data and the loss instead of training: all of them prepared by the library, as for a trial (its precision and activation
checkpointing). Then the function is closed, as when a trial is stopped.
"""

from __future__ import annotations

import copy
import dis
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ...spaces.errors import TaskError
from ...spaces.laws.examination import Examination
from ...spaces.trial import Parameter, TrialSetup
from ..data.batches import Fetcher, SampleKeys
from ..examination.examine import examined_loop
from ..loop import Loop
from ..task import Data, Loss, Task, TrainFunction
from .as_generator import Report, Stopped
from .coupled_loss import CoupledLoss

# Its functions are made of a `Loop`.
SCRIPTS = "bsearch.objectives.script.script"


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """What a loop is about to train.

    Args:
        loss: of a model and a batch on its device: the loss, with its graph; memory does not depend on what it divides by.
        accumulate: back-propagates a step's micro-batches, pairs of samples and batch as the loader collates it, by the code of
            a trial's step; leaves the step's gradient in the model's parameters and returns its mean loss, a detached scalar.
            To be called while the loop runs. None: the loop is not examined.
        couples_samples: whether the loss compares the samples of a batch, so that no step may be split.
        examination: whether a step equals its splits, found out while the loop was running.
        weights: by which samples are drawn, (samples,) float64; None: each once an epoch.
        coupled_loss: instead of `loss`, one that compares the samples of a batch and is split exactly; `loss` is not called.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Fetcher
    loss: Callable[[nn.Module, Any], Tensor]
    accumulate: Callable[[Sequence[tuple[int, Any]]], Tensor] | None = None
    couples_samples: bool = False
    examination: Examination | None = None
    weights: np.ndarray | None = None
    coupled_loss: CoupledLoss | None = None
    schedules: ClassVar[bool] = True

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]


class NoTrainingError(TaskError):
    """A training function did not come to its loop."""


# Where a profile collects what a loop is about to train.
_collector: ContextVar[list[TrainingParts] | None] = ContextVar("collector", default=None)


def report_parts_if_profiling(
    report: Report[Any],
    parts: Callable[[], TrainingParts],
    where: Callable[[], str] = str,
    setup: TrialSetup | None = None,
) -> None:
    """Call before the first step: a profile gets the loop's parts and their examination, and the training ends.

    Args:
        where: names the loop, for messages; called in a profile alone, since it reads the user's source.

    Raises:
        Stopped: in a profile.
    """
    collector = _collector.get()
    if collector is not None:
        found = parts()
        if found.accumulate is not None and setup is not None:
            found = replace(found, examination=examined_loop(where(), found, setup))
        collector.append(found)
        report(collector[-1])
        raise Stopped  # the user's code asked for more


def uses_adapter(function: TrainFunction) -> bool:
    """Whether a training function trains by an adapter of this package, itself or through functions in files next to its own.

    Any other function starts to train when it is called.
    """
    package = __name__.rpartition(".")[0]

    def matches(name: str, value: Any, code: CodeType) -> bool:
        module = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        return name.startswith(package) or str(module).startswith(package)

    return _refers(function, matches)


def uses_loop(function: TrainFunction) -> bool:
    """Whether a training function is made of a `Loop`, itself or through functions in files next to its own."""

    def matches(name: str, value: Any, code: CodeType) -> bool:
        if getattr(value, "__module__", "") == SCRIPTS:
            return True
        return value is Loop or (
            inspect.ismodule(value) and "Loop" in code.co_names and getattr(value, "Loop", None) is Loop
        )

    return _refers(function, matches)


def _refers(function: TrainFunction, matches: Callable[[str, Any, CodeType], bool]) -> bool:
    """Whether a function's code refers to a global that matches, by name, value and code; also through functions next to it."""
    start = plain(function)
    folder, seen = Path(start.__code__.co_filename).parent, set[CodeType]()

    def uses(code: CodeType, names: Mapping[str, Any]) -> bool:
        if code in seen:
            return False
        seen.add(code)
        for name in _global_names(code):
            value = names.get(name)
            if matches(name, value, code):
                return True
            if (
                inspect.isfunction(value)
                and Path(value.__code__.co_filename).parent == folder
                and uses(value.__code__, value.__globals__)
            ):
                return True
        return any(isinstance(constant, CodeType) and uses(constant, names) for constant in code.co_consts)

    return uses(start.__code__, start.__globals__)


def plain(function: Any) -> Any:
    """The function itself, without arguments that `functools.partial` gave it."""
    while isinstance(function, partial):
        function = function.func
    return function


def _global_names(code: CodeType) -> Iterator[str]:
    """Global names and modules that the code refers to; unlike `co_names`, without those of attributes."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"):
            yield str(instruction.argval)


class LoopTask(Task):
    """The training of a function that uses an adapter: steps with its model, loss, optimizer and batches.

    It has no scores: how a loop evaluates is not known.
    """

    def __init__(self, function: TrainFunction) -> None:
        self.function = function
        self._parts: tuple[dict[str, Parameter], TrainingParts] | None = None

    def parts(self, setup: TrialSetup) -> TrainingParts:
        """What the function trains with these parameters; rate, precision and device are those of the first such setup.

        Raises:
            NoTrainingError: it yields before it trains, or ends without training.
        """
        if self._parts is None or self._parts[0] != dict(setup.parameters):
            self._parts = None
            gc.collect()  # trainers and their callbacks form reference cycles that hold the other model
            collected: list[TrainingParts] = []
            token = _collector.set(collected)
            yielded = None
            try:
                with closing(self.function(setup)) as training:  # type: ignore[type-var]  # a generator
                    yielded = next(training, None)
            except Exception:
                if not collected:  # the function may not know what to do with what its loop yielded
                    raise
            finally:
                _collector.reset(token)
            if not collected:
                found = "no training" if yielded is None else f"a {type(yielded).__name__} first"
                raise NoTrainingError(
                    f"{plain(self.function).__name__}: expected to train by train_with, got {found}"
                )
            collected[0].model.cpu()  # only copies of it run: there it would take memory beside them
            self._parts = dict(setup.parameters), collected[0]
        return self._parts[1]

    def data(self, setup: TrialSetup) -> Data:
        parts = self.parts(setup)
        batches = _Batches(parts.data)
        return Data(batches, batches, weights=parts.weights)

    def model(self, setup: TrialSetup) -> nn.Module:
        return copy.deepcopy(self.parts(setup).model)

    def checkpoint_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """None: the loop decides what its model keeps."""
        return ()

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        """A copy of the loop's optimizer for the same parameters of another copy of its model."""
        parts = self.parts(setup)
        originals = list(parts.model.parameters())
        # For deepcopy: what to put in the place of each object instead of copying it.
        memo: dict[int, Any] = {id(parameter): parameter for parameter in originals}
        memo |= {id(original): copied for original, copied in zip(originals, model.parameters(), strict=True)}
        optimizer = copy.deepcopy(parts.optimizer, memo)
        for name, value in vars(
            parts.optimizer
        ).items():  # an optimizer copies only its groups, state and defaults
            vars(optimizer).setdefault(name, value)
        return optimizer

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        parts = self.parts(setup)
        _set_modes(model, parts)
        return Loss(parts.loss(model, batch), 1.0)

    def prepared(self, setup: TrialSetup) -> LoopTask:
        """This task, or one with `embed` and `batch_loss` where that is what the function trains with these parameters."""
        parts = self.parts(setup)
        # Where the training code takes its own steps, it may leave gradients to the next one, as to a second micro-batch.
        self.couples_samples = parts.couples_samples and not (
            parts.examination and parts.examination.takes_steps
        )
        return self if parts.coupled_loss is None else _CoupledLoopTask(self)


class _CoupledLoopTask(LoopTask):
    """The same with a loss over the embeddings of a whole batch."""

    def __init__(self, task: LoopTask) -> None:
        super().__init__(task.function)
        self._parts = task._parts

    def embed(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        parts = self.parts(setup)
        assert parts.coupled_loss is not None
        _set_modes(model, parts)
        return parts.coupled_loss.embed(model, batch, setup)

    def batch_loss(self, model: nn.Module, embeddings: Any, setup: TrialSetup) -> Tensor:
        parts = self.parts(setup)
        assert parts.coupled_loss is not None
        return parts.coupled_loss.batch_loss(model, embeddings, setup)


_CoupledLoopTask.__name__ = CoupledLoss.__name__  # for messages


def _set_modes(model: nn.Module, parts: TrainingParts) -> None:
    for module, original in zip(model.modules(), parts.model.modules(), strict=True):
        module.training = original.training  # a frozen part may be evaluating


class _Batches(Dataset[Any]):
    """A loop's data, whole micro-batches at a time, as its loader collates them."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __len__(self) -> int:
        return len(self._fetcher.dataset)  # type: ignore[arg-type]

    def fetch(self, keys: SampleKeys) -> Any:
        batch = self._fetcher.fetch(keys)
        # A tokenizer's own mapping would be one leaf to pytree.
        return dict(batch) if isinstance(batch, Mapping) else batch
