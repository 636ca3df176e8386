"""Early stopping at the trial's training time: can it still beat the part of the front that is at least as fast?

A trial's training time is known when it starts, so the question has one value: can it still end above the best finished trial
that is at least as fast? Finished curves show how low curves that end there are on their way; a trial is stopped where a
curve that low would be rarer than the study's `risk`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import stdtr

from ...spaces.record import TrialFacts
from ...spaces.study.goals import Metric
from ..analysis.gaussian_process import Array
from ..analysis.score_scale import ScoreScale

# Finished curves before the first trial is stopped: fewer say little about how curves continue.
LEAST_CURVES = 6
# Share of the budget before which nothing is stopped: at high rates even the best trials are near chance until then.
_EARLIEST = 0.3
# Kernel width for curves' scores, in standard deviations of final score, and the weight of all others.
_NEAR, _FAR_WEIGHT = 0.7, 0.05
# Kernel width for log seconds, in standard deviations of those.
_TIME_WIDTH = 0.5
# Prior standard deviation of the remaining change, in the same unit, and how many curves the prior is worth.
_PRIOR_STD, _PRIOR_CURVES = 0.3, 2.0
# Share of would-be front members that are stopped.
_RISK = 0.05
# Prior standard deviation of the slope of final on current score, about 1.
_SLOPE_STD = 0.5


@dataclass(slots=True)
class Curve:
    """A trial's learning curve: scores, higher is better, at fractions of its budget.

    Args:
        taken: by its full training, by the front's measure of speed.
    """

    taken: float
    fractions: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    @property
    def last(self) -> float:
        return self.scores[-1]


class FinishedCurves:
    """Curves of trials that trained to their end, as arrays: every measurement is compared with all of them."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        # (n, measurements), with infinite fractions after a curve's last.
        self._fractions, self._scores = np.empty((0, 1)), np.empty((0, 1))
        self._last, self._taken = np.empty(0), np.empty(0)

    def __len__(self) -> int:
        return len(self._places)

    def put(self, number: int, curve: Curve) -> None:
        """Add a trial's curve, or replace it."""
        place = self._places.setdefault(number, len(self._places))
        rows, (had, columns), measured = len(self._places), self._fractions.shape, len(curve.fractions)
        if rows > had or measured > columns:  # doubled, so that copying stays rare
            grown = (0, 2 * had + 8 if rows > had else 0), (0, max(measured - columns, 0))
            self._fractions = np.pad(self._fractions, grown, constant_values=math.inf)
            self._scores = np.pad(self._scores, grown)
            self._last = np.pad(self._last, grown[0], constant_values=math.nan)
            self._taken = np.pad(self._taken, grown[0])
        self._fractions[place], self._fractions[place, :measured] = math.inf, curve.fractions
        self._scores[place, :measured] = curve.scores
        self._last[place], self._taken[place] = curve.last, curve.taken

    def drop(self, number: int) -> None:
        """Forget a trial, if it is there: another attempt at it begins."""
        if number in self._places:
            self._last[self._places[number]] = math.nan

    def at(self, fraction: float) -> Array:
        """Scores at a fraction of the budget, interpolated, (n,); NaN before the first measurement."""
        fractions = self._fractions[: len(self)]
        scores = self._scores[: len(self)]
        curves = np.arange(len(self))
        after = np.sum(fractions <= fraction, axis=1)
        before = np.maximum(after - 1, 0)
        after = np.minimum(after, np.sum(np.isfinite(fractions), axis=1) - 1)
        begin, end = fractions[curves, before], fractions[curves, after]
        share = np.where(after > before, (fraction - begin) / np.where(after > before, end - begin, 1.0), 0.0)
        low, high = scores[curves, before], scores[curves, after]
        with np.errstate(invalid="ignore"):  # where a metric was infinite
            values = np.where(share > 0, low + share * (high - low), low)
        return np.where(begin <= fraction, values, math.nan)

    @property
    def last(self) -> Array:
        """Final scores, (n,); NaN where there is none."""
        return self._last[: len(self)]

    @property
    def taken(self) -> Array:
        """By their full training, by the front's measure of speed, (n,)."""
        return self._taken[: len(self)]


@dataclass(frozen=True, slots=True)
class Expectation:
    """The predictive distribution of a curve's final score: Student's t on the `ScoreScale`."""

    scale: ScoreScale
    mean: float
    std: float
    degrees_of_freedom: float

    @property
    def score(self) -> float:
        return float(self.scale.back(np.array([self.mean]))[0])

    @property
    def score_std(self) -> float:
        up, down = self.scale.back(np.array([self.mean + self.std, self.mean - self.std]))
        return float(up - down) / 2


class EarlyStopping(ABC):
    """Decides which running trials to stop, from every measurement and every end.

    Values of the metric come in and go out in its own direction; inside, they are scores: higher is better.

    Attributes:
        pauses: trials that it stops are paused, and may be resumed later.
    """

    pauses = False

    def __init__(self, metric: Metric) -> None:
        self.curves: dict[int, Curve] = {}
        self.finished = FinishedCurves()
        self._metric = metric

    def report(self, number: int, fraction: float, taken: float, value: float) -> bool:
        """Record a measurement; True where the trial should stop.

        Args:
            fraction: of the trial's budget trained so far, in (0, 1].
            taken: by its full training, by the front's measure of speed.
        """
        curve = self.curves.setdefault(number, Curve(taken))
        curve.taken = taken
        if curve.fractions and fraction <= curve.fractions[-1]:
            # An interrupted trial starts over, or from a checkpoint.
            kept = [index for index, measured in enumerate(curve.fractions) if measured < fraction]
            curve.fractions, curve.scores = curve.fractions[: len(kept)], curve.scores[: len(kept)]
        curve.fractions.append(fraction)
        curve.scores.append(self._metric.score(value))
        return math.isfinite(value) and fraction < 1 and self.should_stop(number, fraction)

    def end(self, number: int, taken: float, value: float | None) -> list[tuple[float, float]]:
        """Record a trial's final value of the metric; None where it has none, and its curve is dropped.

        Returns:
            Its curve, as (fraction, value); empty where it is dropped.
        """
        curve = self.curves.pop(number, None) or Curve(taken)
        self.finished.drop(number)
        if value is None or not math.isfinite(value):
            return []
        if not curve.fractions or curve.fractions[-1] < 1:
            curve.fractions.append(1.0)
            curve.scores.append(self._metric.score(value))
        curve.taken = taken
        self.curves[number] = curve
        self.finished.put(number, curve)
        return list(zip(curve.fractions, map(self._metric.score, curve.scores), strict=True))

    def learn(self, number: int, taken: float, curve: Sequence[tuple[float, float]], done: bool) -> None:
        """Add a trial of an earlier run; `done` means that it trained to its end."""
        if curve:
            fractions, values = zip(*curve, strict=True)
            self.curves[number] = Curve(taken, list(fractions), list(map(self._metric.score, values)))
            if done:
                self.finished.put(number, self.curves[number])

    def facts(self, number: int, *, stopped: bool) -> TrialFacts:
        """What is stored of a trial: of one that is stopped how far it came, and the prediction for its final value."""
        if not stopped or number not in self.curves:
            return TrialFacts()
        curve, prediction = self.curves[number], self.expected(number)
        facts = TrialFacts(
            stopped_fraction=curve.fractions[-1], stopped_accuracy=self._metric.score(curve.last)
        )
        if prediction is None:
            return facts
        return replace(
            facts,
            expected_seconds=curve.taken,
            expected_accuracy=self._metric.score(prediction.score),
            expected_std=prediction.score_std,
        )

    def resume(self, number: int) -> None:
        """Record that a trial trains beyond the rung, now or in an earlier run; does nothing where trials are not paused."""
        return

    @abstractmethod
    def should_stop(self, number: int, fraction: float) -> bool:
        """Whether a trial should stop at this fraction of its budget."""

    def expected(self, number: int) -> Expectation | None:
        """The prediction for a trial's final score; None while there are too few finished curves."""
        curve = self.curves.get(number)
        return None if curve is None else expectation(curve, self.finished)


class NoEarlyStopping(EarlyStopping):
    """Every trial trains its whole budget, and its curve is needed no more."""

    def end(self, number: int, taken: float, value: float | None) -> list[tuple[float, float]]:
        curve = super().end(number, taken, value)
        self.curves.pop(number, None)
        self.finished = FinishedCurves()
        return curve

    def should_stop(self, number: int, fraction: float) -> bool:
        return False


class FrontStopping(EarlyStopping):
    """Stop a trial where a curve that ends on the front would hardly ever be this low.

    `risk` is the share of would-be front members that are stopped. It is not the share of stopped trials that would have
    reached the front: late in a search nearly all trials end below it, so stopping every tenth of the few that do not would
    still look like hardly any mistakes (docs/decisions/0011).
    """

    def __init__(self, metric: Metric, risk: float) -> None:
        super().__init__(metric)
        self.risk = risk

    def should_stop(self, number: int, fraction: float) -> bool:
        if fraction < _EARLIEST:
            return False
        curve, finished = self.curves[number], self.finished
        if not np.isfinite(finished.last).any():
            return False
        no_slower = finished.last[finished.taken <= curve.taken]
        level = float(np.nanmax(no_slower, initial=-math.inf))
        if np.nanmax(finished.last) >= self._metric.least_score:
            level = max(level, self._metric.least_score)
        if level == -math.inf:
            return False
        probability = probability_as_low(curve, level, finished)
        return probability is not None and probability < self.risk


def early_stopping(kind: str, metric: Metric) -> EarlyStopping:
    """What decides which trials are stopped: `front` or `none`."""
    return NoEarlyStopping(metric) if kind == "none" else FrontStopping(metric, _RISK)


def stopped_sentence(facts: TrialFacts) -> str:
    """Where a trial was stopped, and with what prediction.

    >>> stopped_sentence(TrialFacts(stopped_fraction=0.4, expected_accuracy=0.5512, expected_std=0.021))
    'stopped after 40% of its budget; predicted final value 0.5512 ± 0.021'
    """
    sentence = f"stopped after {facts.stopped_fraction:.0%} of its budget"
    if facts.expected_accuracy is not None:
        sentence += f"; predicted final value {facts.expected_accuracy:.4g} ± {facts.expected_std:.2g}"
    return sentence


def expectation(curve: Curve, finished: FinishedCurves) -> Expectation | None:
    """Predict a curve's final score from finished curves; None where too few got that far."""
    pairs = _paired(curve, finished)
    if pairs is None:
        return None
    scale, there, final, here, weights = pairs
    return Expectation(scale, *_regressed(there, final, here, weights))


def probability_as_low(curve: Curve, level: float, finished: FinishedCurves) -> float | None:
    """Probability that a curve ending at `level` is as low as this one at its fraction; None where too few got that far."""
    pairs = _paired(curve, finished)
    if pairs is None:
        return None
    scale, there, final, here, weights = pairs
    mean, std, degrees_of_freedom = _regressed(final, there, float(scale.of(np.array([level]))[0]), weights)
    return float(stdtr(degrees_of_freedom, (here - mean) / std))


def _paired(curve: Curve, finished: FinishedCurves) -> tuple[ScoreScale, Array, Array, float, Array] | None:
    """Finished curves at this one's fraction and at their ends, and this curve now, on the `ScoreScale`.

    Last come weights by similarity in seconds, since the curves of fast trials rise late.

    Returns:
        Scale, scores at this fraction (n,), final scores (n,), this curve's score, weights (n,).
    """
    if not curve.fractions:
        return None
    pairs = np.column_stack(
        [finished.at(curve.fractions[-1]), finished.last, np.maximum(finished.taken, 1e-9)]
    )
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    if len(pairs) < LEAST_CURVES:
        return None
    scale = ScoreScale(pairs[:, 1])
    times = np.log(pairs[:, 2])
    apart = (times - math.log(max(curve.taken, 1e-9))) / max(_TIME_WIDTH * float(times.std()), 0.1)
    here = float(scale.of(np.array([curve.last]))[0])
    return scale, scale.of(pairs[:, 0]), scale.of(pairs[:, 1]), here, np.exp(-0.5 * apart**2)


def _regressed(known: Array, target: Array, here: float, similarity: Array) -> tuple[float, float, float]:
    """Locally weighted regression of `target` on `known`, evaluated at `here`: slope about 1, a prior worth two curves.

    Args:
        known, target, similarity: (n,).

    Returns:
        Mean, standard deviation and degrees of freedom of Student's t.
    """
    weights = np.exp(-0.5 * ((known - here) / _NEAR) ** 2) * similarity + _FAR_WEIGHT
    total = float(weights.sum())
    middle, rise = float(weights @ known) / total, float(weights @ (target - known)) / total
    spread = float(weights @ (known - middle) ** 2)
    # Ridge regression towards slope 1.
    ridge = (_PRIOR_STD / _SLOPE_STD) ** 2
    slope = float(weights @ ((known - middle) * (target - known - rise))) / (spread + ridge)
    residuals = target - known - rise - slope * (known - middle)
    variance = (float(weights @ residuals**2) + _PRIOR_CURVES * _PRIOR_STD**2) / (total + _PRIOR_CURVES)
    leverage = 1 + 1 / total + (here - middle) ** 2 / (spread + ridge)
    return here + rise + slope * (here - middle), math.sqrt(variance * leverage), total + _PRIOR_CURVES
