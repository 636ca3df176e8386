"""Choosing a point of a front: a trial by its number, the best, the fastest that is nearly as good, or the fastest
that reaches a target.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Integral
from statistics import NormalDist
from typing import Literal

from ...spaces.errors import StudyFileError
from ...spaces.front import ParetoFront
from ...spaces.readable import number
from ...spaces.record import TrialRecord
from ...spaces.study.goals import Metric, Objectives
from .confirm import averaged

# Without a choice: the fastest whose metric is within this share of the best. The front is steep at its slow end.
NEARLY_BEST = 0.01


@dataclass(frozen=True, slots=True)
class Choice:
    """How to choose a point of a front; at most one of these. None of them is `within` 1 %.

    Args:
        trial: this one, by its number; `best`: the one with the best metric.
        within: the fastest whose metric is at most this share of the best value away from it.
        target: the fastest whose metric is at least this good.
        cheapest_to: of all settings, on the front or not, the one of least cost whose metric is at least this good.

    Raises:
        StudyFileError: several, or a trial that is neither a number nor one of these words.
    """

    trial: int | Literal["best"] | None = None
    within: float | None = None
    target: float | None = None
    cheapest_to: float | None = None

    def __post_init__(self) -> None:
        given = (self.trial, self.within, self.target, self.cheapest_to)
        if sum(value is not None for value in given) > 1:
            raise StudyFileError("expected one of trial, within, target and cheapest-to, got several")
        if self.trial not in (None, "best") and not (isinstance(self.trial, Integral) and self.trial >= 0):
            raise StudyFileError(f"trial: expected a trial's number or best, got {self.trial!r}")

    def reason(self, front: ParetoFront) -> str:
        """Why it is this trial of the front, to be displayed.

        >>> Choice().reason(ParetoFront(())), Choice(trial=3).reason(ParetoFront(()))
        ('the fastest within 1% of the best', 'as asked')
        """
        if self.trial is not None:
            return "the best" if self.trial == "best" else "as asked"
        if self.target is not None:
            return f"the {front.fastest} that reaches {self.target:.12g}"
        if self.cheapest_to is not None:
            return f"the cheapest that reaches {self.cheapest_to:.12g}"
        return f"the {front.fastest} within {100 * (NEARLY_BEST if self.within is None else self.within):.3g}% of the best"


def chosen_trial(
    name: str, front: ParetoFront, choice: Choice = Choice(), records: Iterable[TrialRecord] = ()
) -> TrialRecord:
    """The chosen point of a front.

    Args:
        name: the study's, for messages.
        records: all its trials, for messages and for the cheapest.

    Raises:
        StudyFileError: an empty front, no such trial on it, none that reaches the target, or none with a cost.
    """
    if not front.trials:
        raise StudyFileError(f"study {name}: has no finished trial yet, so there is no front to choose from")
    if choice.trial not in (None, "best"):
        chosen = next((trial for trial in front.trials if trial.number == choice.trial), None)
        if chosen is None:
            members = ", ".join(str(trial.number) for trial in front.trials)
            repeats = next(
                (record.facts.repeats for record in records if record.number == choice.trial), None
            )
            why = "" if repeats is None else f" (it repeats trial {repeats} and counts in its mean)"
            raise StudyFileError(
                f"study {name}: trial {choice.trial} is not on its front{why}; expected one of {members}"
            )
        return chosen
    best = front.best
    assert best is not None
    if choice.trial == "best":
        return best
    target = choice.cheapest_to if choice.target is None else choice.target
    if target is not None:
        objectives = Objectives(
            metric=Metric(name=front.metric, direction=front.direction), speed=front.speed
        )
        cheapest = choice.target is None
        settings = averaged(records, objectives) if cheapest else front.trials
        reaching = settings_reaching(front, settings, target).trials
        if not reaching:
            raise StudyFileError(
                f"study {name}: no trial reaches {front.metric} {target:.12g}; the best, trial {best.number}, has "
                f"{below(best, target)}"
            )
        return _cheapest(name, reaching) if cheapest else reaching[0]
    return fastest_within(front, NEARLY_BEST if choice.within is None else choice.within)


def _cheapest(name: str, settings: Iterable[TrialRecord]) -> TrialRecord:
    priced = [
        (cost, place, setting)
        for place, setting in enumerate(settings)
        if (cost := setting.taken("cost")) is not None
    ]
    if not priced:
        raise StudyFileError(
            f"study {name}: expected trials with a cost, which devices.prices gives them; got none"
        )
    return min(priced)[2]


def fastest_within(front: ParetoFront, share: float) -> TrialRecord:
    """The fastest member whose metric is at most a share of the best value away from it.

    >>> points = [(1.0, 0.90), (2.0, 0.991), (9.0, 1.0)]
    >>> trials = [TrialRecord(i, "complete", {}, train_s=s, accuracy=value) for i, (s, value) in enumerate(points)]
    >>> fastest_within(ParetoFront(tuple(trials)), 0.01).number
    1
    """
    best = front.best
    assert best is not None and best.accuracy is not None
    least = share * abs(best.accuracy)
    return next(
        trial
        for trial in front.trials
        if trial.accuracy is not None and abs(trial.accuracy - best.accuracy) <= least
    )


def settings_reaching(front: ParetoFront, settings: Iterable[TrialRecord], target: float) -> ParetoFront:
    """All settings whose metric is at least as good as a target, fastest first, on the front or not."""
    reaching = [
        setting for setting in settings if setting.outcome == "complete" and front.reaches(setting, target)
    ]
    return replace(front, trials=tuple(sorted(reaching, key=lambda setting: front.taken(setting) or 0.0)))


def below(best: TrialRecord, target: float) -> str:
    """The metric of a trial that does not reach a target, in so many digits that one sees it."""
    short = number(best.accuracy)
    return short if short != number(target) else f"{best.accuracy:.12g}"


def chance_to_reach(trial: TrialRecord, target: float) -> float | None:
    """The probability that a setting's mean is at least as good as a target; None where no setting was repeated.

    >>> from bsearch.spaces.record import TrialFacts
    >>> facts = TrialFacts(mean_low=0.74, mean_high=0.76)
    >>> round(chance_to_reach(TrialRecord(0, "complete", {}, facts, 1.0, 0.75), 0.745), 3)
    0.795
    """
    if trial.half_interval is None or trial.score is None:
        return None
    away = trial.score - trial.score_of(target)
    # The interval holds 90 %; as if normal.
    std = max(trial.half_interval, 1e-300) / NormalDist().inv_cdf(0.95)
    return NormalDist().cdf(away / std)
