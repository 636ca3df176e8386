"""What a training's own code must not change while a step's gradient is computed, or from one step to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ...spaces.errors import TaskError


class Constants:
    """A model's weights within a step's passes, and which of them are trained.

    Args:
        where: the code that trains the model, for messages.
        checked: otherwise nothing is.
    """

    def __init__(self, where: str, model: nn.Module, *, checked: bool = True) -> None:
        self._where = where
        self._named = list(model.named_parameters()) if checked else []
        self._parameters = [parameter for _, parameter in self._named]
        self._trained: dict[int, list[bool]] = {}  # by the pass of a step

    @contextmanager
    def held(self, number: int = 0) -> Iterator[None]:
        """Context of a step's `number`th pass over its samples.

        Raises:
            TaskError: it has changed a weight, or trains others than in the first step.
        """
        trained = [parameter.requires_grad for parameter in self._parameters]
        if trained != (before := self._trained.setdefault(number, trained)):
            name, now = next(
                (name, now)
                for (name, _), was, now in zip(self._named, before, trained, strict=True)
                if was != now
            )
            raise TaskError(
                f"{self._where}: expected the same trainable parameters in every step, got {name}, which is "
                f"{'trained' if now else 'frozen'} now and was not in the first, for which times, memory and the optimizer are "
                "known. Train in stages of their own; to train all the same, write training: {accept_inexact: true}."
            )
        versions = [parameter._version for parameter in self._parameters]
        yield
        if [parameter._version for parameter in self._parameters] != versions:
            changed = next(
                name
                for (name, parameter), version in zip(self._named, versions, strict=True)
                if parameter._version != version
            )
            raise TaskError(
                f"{self._where}: expected weights that stay as they are while a step's gradient is computed, got {changed} "
                "changed meanwhile: each micro-batch would find other weights. Step the optimizer once, after all parts; to "
                "average weights write training: {ema: 0.999}; what else moves some belongs after the step, in a Task's "
                "after_step. To train all the same, write training: {accept_inexact: true}."
            )
