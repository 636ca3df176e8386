"""Training and evaluation mode of a model's modules: those that a task leaves in evaluation mode stay there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ..data.batches import RandomState


@contextmanager
def untouched(model: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> Iterator[None]:
    """Context of an evaluation, after which modules are in their modes and generators in their states, as before.

    Meanwhile optimizers that have modes, as schedule-free ones do, give the weights that are to be evaluated.
    """
    before, optimizers = [(module, module.training) for module in model.modules()], list(optimizers)
    generators = RandomState.now(device)
    set_optimizers(optimizers, "eval")
    try:
        yield
    finally:
        generators.restore()
        set_optimizers(optimizers, "train")
        for module, training in before:
            module.training = training


def set_optimizers(optimizers: Iterable[Optimizer], mode: Literal["train", "eval"]) -> None:
    """Put optimizers that have modes into one."""
    for optimizer in optimizers:
        if hasattr(optimizer, "eval") and hasattr(optimizer, "train"):
            getattr(optimizer, mode)()


class TrainingModes:
    """The modules that were in evaluation mode when the task returned its model; none if all of it was, as `from_pretrained`
    returns it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.evaluating = (
            [name for name, module in model.named_modules() if not module.training] if model.training else []
        )

    def train(self, model: nn.Module) -> None:
        """Put the model, or a copy of it, into training mode, except for these modules."""
        model.train()
        if self.evaluating:
            modules = dict(model.named_modules())
            for name in self.evaluating:
                modules[name].training = False

    @property
    def outermost(self) -> list[str]:
        """Their names, without those of modules inside them.

        >>> model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Dropout()), nn.Linear(1, 1))
        >>> _ = model[0].eval()
        >>> TrainingModes(model).outermost
        ['0']
        """
        return [
            name
            for name in self.evaluating
            if not any(name.startswith(f"{outer}.") for outer in self.evaluating)
        ]
