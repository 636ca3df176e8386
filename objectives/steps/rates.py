"""The learning rates of a training's optimizers: the schedule sets them, and nothing else may."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.optim import Optimizer

from ...spaces.errors import TaskError
from ...spaces.schedule import Schedule, rate_factor


class Rates:
    """The rates of all groups of some optimizers, each of them a share of its peak.

    Args:
        where: the code that made the optimizers, for messages.
        optimizers: with their peaks as rates.
    """

    def __init__(self, where: str, optimizers: Sequence[Optimizer], schedule: Schedule, warmup: float) -> None:
        self._where, self._optimizers, self._schedule, self._warmup = where, optimizers, schedule, warmup
        self._peaks = [_peaks(optimizer) for optimizer in optimizers]
        self._now: list[list[float]] = []  # as set last

    def set(self, fraction: float) -> None:
        """Set every group's rate to the schedule's, at a fraction of the budget.

        Raises:
            TaskError: something else has set one since.
        """
        self.check()
        factor = rate_factor(self._schedule, self._warmup, fraction)
        self._now = [[peak * factor for peak in peaks] for peaks in self._peaks]
        for optimizer, rates in zip(self._optimizers, self._now, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def check(self) -> None:
        """Check that the rates are those that were set last.

        Raises:
            TaskError: they are not.
        """
        for optimizer, rates in zip(self._optimizers, self._now, strict=False):
            if (groups := len(optimizer.param_groups)) != len(rates):
                raise TaskError(
                    f"{self._where}: expected the {len(rates)} groups that {type(optimizer).__name__} began with, got "
                    f"{groups}: the schedule knows no peak of others. Make them all at first, or train in stages."
                )
            for number, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
                if group["lr"] is not rate and (got := float(group["lr"])) != rate:
                    raise TaskError(
                        f"{self._where}: expected the rate of training.schedule in each step, {rate:.4g} in group {number} of "
                        f"{type(optimizer).__name__}; got {got:.4g}: something else sets it, such as a scheduler or a "
                        "callback. Remove that; for a schedule of your own write training.schedule: module:function."
                    )

    def forget(self) -> None:
        """The optimizers have been loaded, with the rates that they had when they were saved."""
        self._now = []

    def freeze(self) -> None:
        """Set the peaks to zero from here on: steps take their usual time and leave the parameters unchanged."""
        self._peaks = [[0.0] * len(peaks) for peaks in self._peaks]


def _peaks(optimizer: Optimizer) -> list[float]:
    """The groups' rates, times their `lr_scale`, if any: layer-wise decay leaves that product to the scheduler.

    Where the rates are already in these proportions, they are what they are to be.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    scales = [float(group.get("lr_scale", 1.0)) for group in optimizer.param_groups]
    are_scaled = len(set(rates)) > 1 and all(
        math.isclose(a * scales[0], rates[0] * b) for a, b in zip(rates, scales, strict=True)
    )
    return rates if are_scaled else [rate * scale for rate, scale in zip(rates, scales, strict=True)]
