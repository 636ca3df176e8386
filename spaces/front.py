"""The Pareto front: trials that no other beats in what training takes and the metric."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .names import Direction
from .readable import number, seconds
from .record import TrialRecord
from .study.goals import Speed


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """The trials that no other trial beats in both what training takes (such as seconds) and the metric, fastest first."""

    trials: tuple[TrialRecord, ...]
    metric: str = "accuracy"
    direction: Direction = "maximize"
    speed: Speed = "train_s"

    @property
    def best(self) -> TrialRecord | None:
        """The member with the best metric; None where there is none."""
        return max(self.trials, key=_score, default=None)

    def within(self, most: float) -> ParetoFront:
        """The members that take at most so much by the front's measure of speed."""
        return replace(
            self, trials=tuple(trial for trial in self.trials if (self.taken(trial) or 0.0) <= most)
        )

    def reaches(self, trial: TrialRecord, target: float) -> bool:
        """Whether a trial's metric is at least as good as a value."""
        return trial.score is not None and trial.score >= trial.score_of(target)

    def taken(self, trial: TrialRecord) -> float | None:
        """What a trial takes by the front's measure of speed, such as seconds."""
        return trial.taken(self.speed)

    @property
    def noun(self) -> str:
        """What it measures, in a word."""
        return "cost" if self.speed == "cost" else "time"

    @property
    def fastest(self) -> str:
        """What its first member is."""
        return "cheapest" if self.speed == "cost" else "fastest"

    @property
    def faster(self) -> str:
        """What its earlier members are."""
        return "cheaper" if self.speed == "cost" else "faster"

    def amount(self, trial: TrialRecord) -> str:
        """What a trial takes, with its unit."""
        return amount(self.speed, self.taken(trial))

    def takes(self, trial: TrialRecord) -> str:
        """What a trial takes, as it follows a result in a sentence: "in 12.3 s", or "for a cost of 0.05"."""
        return f"{'for a cost of' if self.speed == 'cost' else 'in'} {self.amount(trial)}"


def _score(member: TrialRecord) -> float:
    assert member.score is not None  # a front has complete trials
    return member.score


def amount(speed: Speed, taken: float | None) -> str:
    """An amount of a measure of speed, with its unit.

    >>> amount("train_s", 75.2), amount("cost", 0.0512), amount("cost", None)
    ('1 min 15 s', '0.0512', '-')
    """
    if speed == "cost":
        return "-" if taken is None else number(taken)
    return seconds(taken)
