"""What a study's figures are drawn from, and what they have in common: axes, groups of trials, labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeGuard

from ....spaces.front import ParetoFront
from ....spaces.laws.device import DeviceProfile
from ....spaces.readable import number
from ....spaces.record import TrialRecord
from ...run.profiles import stored_profiles
from ...store.stored import StoredStudy
from ..columns import MEASURES
from ..sentences import setting_words
from .figure import Axis, Layer, Tone


@dataclass(frozen=True)
class StudyData:
    """What a study's figures are drawn from, read once; the front figure needs only the study.

    Args:
        curves: (samples seen, accuracy) by trial.
        profiles: of the device that trials are timed for, by parameters that change cost; empty if none is stored.
    """

    study: StoredStudy
    curves: Mapping[int, list[tuple[int, float]]] = field(default_factory=dict)
    profiles: Mapping[Any, DeviceProfile] = field(default_factory=dict)

    @classmethod
    def of(cls, study: StoredStudy) -> StudyData:
        tables = study.tables()
        return cls(study, tables.curves(study.name), stored_profiles(study, tables))

    @property
    def front(self) -> ParetoFront:
        return self.study.front

    @cached_property
    def baseline(self) -> list[TrialRecord]:
        """The baseline trials; with the mean of their runs if they are on the front."""
        members = {trial.number: trial for trial in self.front.trials}
        complete = [
            r for r in self.study.records if r.is_baseline and not r.is_repeat and r.outcome == "complete"
        ]
        return [members.get(r.number, r) for r in complete]

    @cached_property
    def runs(self) -> list[TrialRecord]:
        """Complete trials, each setting once."""
        return [r for r in self.study.records if r.outcome == "complete" and not r.is_repeat]

    def time_axis(self) -> Axis:
        return Axis(self.front.speed, f"{self.front.speed} ({MEASURES[self.front.speed].counts})", log=True)

    def accuracy_axis(self) -> Axis:
        better = "higher" if self.front.direction == "maximize" else "lower"
        return Axis(self.front.metric, f"{self.front.metric} ({better} is better)", ends=self.levels)

    @cached_property
    def levels(self) -> tuple[float, float] | None:
        """The accuracies that figures show: without trials so bad that they would flatten all others; None shows every one."""
        members = [float(trial.accuracy or 0.0) for trial in self.front.trials]
        if len(members) < 2 or not max(members) > min(members):
            return None
        reach = max(members) - min(members)
        levels = [
            float(r.accuracy or 0.0)
            for r in self.study.records
            if r.outcome == "complete" and finite(r.accuracy)
        ]
        shown = [
            *members,
            *(level for level in levels if min(members) - reach <= level <= max(members) + reach),
        ]
        if len(shown) == len(members) + len(levels):
            return None
        bars = [end for trial in self.front.trials for end in trial.interval or ()]
        room = 0.05 * (max(shown) - min(shown))
        return min([*shown, *bars]) - room, max([*shown, *bars]) + room

    def points(
        self,
        name: str,
        tone: Tone,
        records: Iterable[TrialRecord],
        *,
        x: Callable[[TrialRecord], Any] | None = None,
        y: Callable[[TrialRecord], Any] | None = None,
        shown: bool = True,
    ) -> Layer:
        """Trials as points; those without a place are left out.

        Args:
            x, y: of a trial; by default what it takes, and its metric.
        """
        place: Callable[[TrialRecord], Any] = x or self.front.taken
        height: Callable[[TrialRecord], Any] = y or (lambda record: record.accuracy)
        placed = [(at, level, r) for r in records if finite(at := place(r)) and finite(level := height(r))]
        return Layer(
            name,
            "points",
            tone,
            tuple(float(at) for at, _, _ in placed),
            tuple(float(level) for _, level, _ in placed),
            labels=tuple(self.label(record) for _, _, record in placed),
            trials=tuple(record.number for _, _, record in placed),
            shown=shown,
        )

    def line(self, name: str, trials: Sequence[TrialRecord], tone: Tone = "front") -> Layer:
        """The best accuracy on a front at every training time."""
        times = tuple(float(self.front.taken(trial) or 0.0) for trial in trials)
        return Layer(name, "steps", tone, times, tuple(float(trial.accuracy or 0.0) for trial in trials))

    def label(self, record: TrialRecord) -> str:
        """A trial in a few lines, as hover text."""
        values = record.settings
        lines = [
            f"trial {record.number}"
            + ("" if record.outcome == "complete" else f", {record.outcome.replace('_', ' ')}")
        ]
        if finite(record.accuracy):
            interval = ""
            if record.half_interval is not None:
                interval = f" ± {number(record.half_interval)}"
            lines.append(
                f"{self.front.metric} {number(record.accuracy)}{interval} {self.front.takes(record)}"
            )
        lines += setting_words(record)
        if "micro_batch" in values:
            lines.append(f"micro-batch {values['micro_batch']}, accumulation {values.get('accumulation', 1)}")
        if record.message and record.outcome != "complete":
            lines.append(record.message.splitlines()[0][:100])
        return "\n".join(lines)


def finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that has a place on an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
