"""Early stopping at the trial's own time: can it still rise above the front that is as fast as it is?

A trial's training time is known when it starts, so the question is single-valued: can it still end above the best finished
trial that is at least as fast? How low curves that end there are on their way is learned from the finished ones; a trial is
stopped where so low a one would be rarer than the study's `risk`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import stdtr

from ..analysis.accuracy_scale import AccuracyScale
from ..analysis.gaussian_process import Array
from ..analysis.pareto import front_members

# Finished curves before the first trial is stopped: fewer say little of how curves go on.
LEAST_CURVES = 6
# Share of a budget before which nothing is stopped: at high rates the best trainings are no better than guessing until then.
_EARLIEST = 0.3
# How near curves must be to speak for one another, in standard deviations of what trials come to; others count a little.
_NEAR, _FAR_WEIGHT = 0.7, 0.05
# The same of their log seconds, in standard deviations of those.
_LIKE = 0.5
# Before any curve: deviation of what is still to come, in the same unit, worth so many curves.
_PRIOR_DEVIATION, _PRIOR_CURVES = 0.3, 2.0
# The slope of the end on the way there is expected to be 1, give or take.
_SLOPE_DEVIATION = 0.5


@dataclass(slots=True)
class Curve:
    """What is known of a trial on its way: accuracies, higher is better, at shares of its budget.

    Args:
        seconds: of its whole training, in the unit of the front.
        done: it was trained to its end, and the last accuracy is what it came to.
    """

    seconds: float
    fractions: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    done: bool = False

    def at(self, fraction: float) -> float:
        """Accuracy at a share of the budget; NaN before the first that was measured."""
        return float(np.interp(fraction, self.fractions, self.accuracies, left=math.nan))

    @property
    def last(self) -> float:
        return self.accuracies[-1]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a curve is expected to come to: Student's t with so many degrees of freedom, on the scale of accuracies."""

    scale: AccuracyScale
    mean: float
    deviation: float
    freedom: float

    def chance_above(self, accuracy: float) -> float:
        away = (float(self.scale.of(np.array([accuracy]))[0]) - self.mean) / self.deviation
        return float(stdtr(self.freedom, -away))

    @property
    def accuracy(self) -> float:
        return float(self.scale.back(np.array([self.mean]))[0])

    @property
    def accuracy_deviation(self) -> float:
        up, down = self.scale.back(np.array([self.mean + self.deviation, self.mean - self.deviation]))
        return float(up - down) / 2


class Stopping(ABC):
    """Decides over running trials; told of every measurement and every end.

    Accuracies are higher is better: signs were turned before.
    """

    def __init__(self) -> None:
        self.curves: dict[int, Curve] = {}

    def report(self, number: int, fraction: float, seconds: float, accuracy: float) -> bool:
        """Keep a measurement; True where the trial is to be stopped.

        Args:
            fraction: share of the trial's budget that is trained, in (0, 1].
            seconds: that its whole training takes.
        """
        curve = self.curves.setdefault(number, Curve(seconds))
        curve.seconds = seconds
        if curve.fractions and fraction <= curve.fractions[-1]:
            # A trial that was interrupted begins again.
            kept = [index for index, one in enumerate(curve.fractions) if one < fraction]
            curve.fractions, curve.accuracies = curve.fractions[: len(kept)], curve.accuracies[: len(kept)]
        curve.fractions.append(fraction)
        curve.accuracies.append(accuracy)
        return math.isfinite(accuracy) and fraction < 1 and self.hopeless(number, fraction)

    def ended(self, number: int, seconds: float, accuracy: float | None) -> None:
        """Keep how a trial ended; None where it came to no accuracy and its curve says nothing."""
        curve = self.curves.pop(number, None) or Curve(seconds)
        if accuracy is None or not math.isfinite(accuracy):
            return
        if not curve.fractions or curve.fractions[-1] < 1:
            curve.fractions.append(1.0)
            curve.accuracies.append(accuracy)
        curve.seconds, curve.done = seconds, True
        self.curves[number] = curve

    def learn(self, number: int, seconds: float, curve: Sequence[tuple[float, float]], done: bool) -> None:
        """Take a trial that ended before for one of this run's; `done` means that it trained to its end."""
        if curve:
            fractions, accuracies = zip(*curve, strict=True)
            self.curves[number] = Curve(seconds, list(fractions), list(accuracies), done)

    def curve_of(self, number: int) -> list[tuple[float, float]]:
        """(fraction, accuracy) of a trial so far."""
        curve = self.curves[number]
        return list(zip(curve.fractions, curve.accuracies, strict=True))

    def stopped_facts(self, number: int, sign: float) -> dict[str, Any]:
        """What is kept of a trial that was stopped: how far it came, and what its curve promised.

        Args:
            sign: -1 where the metric is minimized and was turned.
        """
        if number not in self.curves:
            return {}
        curve, promised = self.curves[number], self.expected(number)
        facts: dict[str, Any] = {"stopped_fraction": curve.fractions[-1], "stopped_accuracy": sign * curve.last}
        if promised is not None:
            facts |= {
                "expected_seconds": curve.seconds,
                "expected_accuracy": sign * promised.accuracy,
                "expected_deviation": promised.accuracy_deviation,
            }
        return facts

    @abstractmethod
    def hopeless(self, number: int, fraction: float) -> bool:
        """Whether a trial that got so far is to be stopped there."""

    def finished(self) -> list[Curve]:
        return [curve for curve in self.curves.values() if curve.done]

    def expected(self, number: int) -> Expectation | None:
        """What a trial's curve promises; None while there are too few finished ones to tell."""
        curve = self.curves.get(number)
        return None if curve is None else expectation(curve, self.finished())


class NeverStopping(Stopping):
    """Every trial trains its whole budget."""

    def hopeless(self, number: int, fraction: float) -> bool:
        return False


class FrontStopping(Stopping):
    """Stop a trial where one that ends on the front would hardly ever have been so low.

    `risk` is how many of those that would have ended on the front are stopped. It is not the share of stopped trials that
    would have: late in a search nearly all trials end below the front, so stopping every tenth of the few that do not would
    still look like hardly any mistakes (docs/decisions/0011).
    """

    def __init__(self, risk: float = 0.05) -> None:
        super().__init__()
        self.risk = risk

    def hopeless(self, number: int, fraction: float) -> bool:
        if fraction < _EARLIEST:
            return False
        curve, finished = self.curves[number], self.finished()
        as_fast = [one.last for one in finished if one.seconds <= curve.seconds]
        if not as_fast:
            return False
        chance = chance_so_low(curve, max(as_fast), finished)
        return chance is not None and chance < self.risk


class RankHalving(Stopping):
    """Asynchronous successive halving (Li et al. 2020, arXiv 1810.05934) with ranks of fronts in the place of one metric.

    At each rung, a share of the budget, a trial goes on if its non-dominated rank (seconds of its whole training against
    accuracy so far) is among the best 1/eta of those that came there.
    """

    def __init__(self, eta: int = 3, rungs: Sequence[float] = (1 / 9, 1 / 3)) -> None:
        super().__init__()
        self.eta, self.rungs = eta, tuple(rungs)
        self._came: dict[float, dict[int, tuple[float, float]]] = {rung: {} for rung in self.rungs}

    def learn(self, number: int, seconds: float, curve: Sequence[tuple[float, float]], done: bool) -> None:
        super().learn(number, seconds, curve, done)
        for rung in self.rungs:
            came = next((accuracy for fraction, accuracy in curve if fraction >= rung - 1e-9), None)
            if came is not None:
                self._came[rung][number] = (seconds, came)

    def hopeless(self, number: int, fraction: float) -> bool:
        curve = self.curves[number]
        for rung in self.rungs:
            came = self._came[rung]
            if fraction < rung - 1e-9 or number in came:
                continue
            came[number] = (curve.seconds, curve.last)
            ranks = front_ranks(list(came.values()))
            if len(came) >= self.eta and sorted(ranks)[len(ranks) // self.eta - 1] < ranks[list(came).index(number)]:
                return True
        return False


STOPPING: dict[str, Callable[[float], Stopping]] = {
    "front": lambda risk: FrontStopping(risk),
    "halving": lambda risk: RankHalving(),
    "none": lambda risk: NeverStopping(),
}


def front_ranks(points: Sequence[tuple[float, float]]) -> list[int]:
    """Rank of each (seconds, accuracy): 0 on the front, 1 on the front of the rest, and so on.

    >>> front_ranks([(1, 0.5), (2, 0.9), (2, 0.7), (3, 0.6)])
    [0, 0, 1, 2]
    """
    left = list(range(len(points)))
    ranks = [0] * len(points)
    rank = 0
    while left:
        for one in [left[place] for place in front_members([(points[one][0], -points[one][1]) for one in left])]:
            ranks[one] = rank
            left.remove(one)
        rank += 1
    return ranks


def stopped_words(facts: Mapping[str, Any]) -> str:
    """Why a trial was stopped where it was, for people.

    >>> stopped_words({"stopped_fraction": 0.4, "expected_accuracy": 0.5512, "expected_deviation": 0.021})
    'stopped after 40% of its budget, with 0.5512 ± 0.021 to be expected at its end'
    """
    words = f"stopped after {facts['stopped_fraction']:.0%} of its budget"
    if "expected_accuracy" in facts:
        words += f", with {facts['expected_accuracy']:.4g} ± {facts['expected_deviation']:.2g} to be expected at its end"
    return words


def expectation(curve: Curve, finished: Sequence[Curve]) -> Expectation | None:
    """What a curve comes to, by what finished ones came to from where they were; None where too few got so far."""
    known = _paired(curve, finished)
    if known is None:
        return None
    scale, was, became, here, alike = known
    return Expectation(scale, *_predicted(was, became, here, alike))


def chance_so_low(curve: Curve, level: float, finished: Sequence[Curve]) -> float | None:
    """How often a curve that ends at a level is as low as this one at its share of the budget; None where too few got there."""
    known = _paired(curve, finished)
    if known is None:
        return None
    scale, was, became, here, alike = known
    mean, deviation, freedom = _predicted(became, was, float(scale.of(np.array([level]))[0]), alike)
    return float(stdtr(freedom, (here - mean) / deviation))


def _paired(curve: Curve, finished: Sequence[Curve]) -> tuple[AccuracyScale, Array, Array, float, Array] | None:
    """Finished curves at this one's share of the budget and at their ends, and this one now, on the scale of accuracies.

    Last come weights: how much each finished one is this one's like in seconds, for fast trainings' curves rise late.
    """
    if not curve.fractions:
        return None
    rows = [(one.at(curve.fractions[-1]), one.last, max(one.seconds, 1e-9)) for one in finished]
    pairs = np.array(rows).reshape(-1, 3)
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    if len(pairs) < LEAST_CURVES:
        return None
    scale = AccuracyScale(pairs[:, 1])
    times = np.log(pairs[:, 2])
    apart = (times - math.log(max(curve.seconds, 1e-9))) / max(_LIKE * float(times.std()), 0.1)
    here = float(scale.of(np.array([curve.last]))[0])
    return scale, scale.of(pairs[:, 0]), scale.of(pairs[:, 1]), here, np.exp(-0.5 * apart**2)


def _predicted(known: Array, sought: Array, here: float, alike: Array) -> tuple[float, float, float]:
    """What is sought where `known` is here, by a line of slope about 1 through what lies near, with a prior worth two curves.

    Returns:
        Mean, deviation and degrees of freedom of Student's t.
    """
    weights = np.exp(-0.5 * ((known - here) / _NEAR) ** 2) * alike + _FAR_WEIGHT
    total = float(weights.sum())
    middle, rise = float(weights @ known) / total, float(weights @ (sought - known)) / total
    spread = float(weights @ (known - middle) ** 2)
    # Ridge towards slope 1.
    stiff = (_PRIOR_DEVIATION / _SLOPE_DEVIATION) ** 2
    slope = float(weights @ ((known - middle) * (sought - known - rise))) / (spread + stiff)
    left = sought - known - rise - slope * (known - middle)
    variance = (float(weights @ left**2) + _PRIOR_CURVES * _PRIOR_DEVIATION**2) / (total + _PRIOR_CURVES)
    reach = 1 + 1 / total + (here - middle) ** 2 / (spread + stiff)
    return here + rise + slope * (here - middle), math.sqrt(variance * reach), total + _PRIOR_CURVES
