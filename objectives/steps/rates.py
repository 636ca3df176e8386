"""The learning rates of a training's optimizers: the schedule sets them, and nothing else may."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from ...spaces.errors import TaskError
from ...spaces.schedule import Schedule, rate_factor
from ...spaces.trial import Parameter
from ..optimizers import group_settings, main_first, shown_kind

# The longest text of groups that is recorded; of more, the first.
_LONGEST = 1_800


class Stepped:
    """What some optimizers step with, read from their groups: the one source of what is said of them.

    Args:
        peaks: the rates of each one's groups, before any schedule.
    """

    def __init__(self, optimizers: Sequence[Optimizer], peaks: Sequence[Sequence[float]]) -> None:
        self._optimizers, self._peaks = optimizers, peaks
        self._seen: list[
            dict[str, list[Any]]
        ] = []  # of each group's settings the value, or the lowest and highest
        self._checked = 0

    def check(self) -> None:
        """Before each step; it looks at the 1st, 2nd, 4th, 8th, ..."""
        self._checked += 1
        if self._checked & (self._checked - 1) == 0:
            self._look()

    def _look(self) -> None:
        groups = []
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for place, (group, plain) in enumerate(
                zip(optimizer.param_groups, group_settings(optimizer), strict=True)
            ):
                # One that was added later has the rate that it was added with.
                peak = peaks[place] if place < len(peaks) else float(group.get("initial_lr", group["lr"]))
                groups.append({**plain, "lr": peak})
        if len(groups) != len(self._seen):
            self._seen = [{} for _ in groups]
        for seen, settings in zip(self._seen, groups, strict=True):
            for name, value in settings.items():
                values = [value, *(seen.get(name, ()) if name != "parameters" else ())]
                seen[name] = [value] if min(values) == max(values) else [min(values), max(values)]

    def facts(self, decay: float) -> dict[str, Parameter]:
        """The optimizers' names and, as JSON, what their groups step with; of further groups only what differs from the first.

        A setting that has changed since the first step is its range, as text.

        Args:
            decay: the study's weight decay, by which one of several groups comes first.
        """
        self._look()
        found: list[dict[str, Any]] = []
        for seen in self._seen:
            group = {
                name: values[0] if len(values) == 1 else f"{values[0]} to {values[1]}"
                for name, values in seen.items()
            }
            same = next(
                (each for each in found if {**each, "parameters": 0} == {**group, "parameters": 0}), None
            )
            if same is None:
                found.append(group)
            else:
                same["parameters"] += group["parameters"]
        first, *others = main_first(found, decay)
        groups = [first, *(_difference(each, first) for each in others)]
        more: list[dict[str, int]] = []
        while len(text := json.dumps([*groups, *more])) > _LONGEST and len(groups) > 1:
            groups.pop()
            more = [{"more_groups": len(found) - len(groups)}]
        return {"optimizer": shown_kind(*self._optimizers), "optimizer_groups": text}


def _difference(group: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """What a group has otherwise than the first; all of it where another optimizer steps it."""
    alike = group["optimizer"] == first["optimizer"]
    return {name: value for name, value in group.items() if not alike or first.get(name) != value}


class Rates(Stepped):
    """The rates of all groups of some optimizers, each of them a share of its peak.

    Args:
        where: the code that made the optimizers, for messages.
        optimizers: with their peaks as rates.
    """

    def __init__(
        self, where: str, optimizers: Sequence[Optimizer], schedule: Schedule, warmup: float
    ) -> None:
        super().__init__(optimizers, [_peaks(optimizer) for optimizer in optimizers])
        self._where, self._schedule, self._warmup = where, schedule, warmup
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
        super().check()
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
