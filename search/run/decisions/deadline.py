"""A study that ends with a trained model by a deadline: what the next training is for, and how long it may take.

Each time a device is free there are two things to do with it. A trial of the search teaches where the best settings lie; a
final training uses what is known by now, for as long as the time left allows. A trial is worth it while what it is expected to
add to the final training is more than the final training loses by the time that it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from ....spaces.record import TrialRecord
from ...analysis.gaussian_process import Array
from ...suggest.outlook import Outlook
from ...suggest.suggester import Suggester
from .eta import ClockFactors, Span

# Trials of the search that are looked ahead at.
_AHEAD = (1, 2, 4, 8, 16, 32)
# What so many trials would find out is not all that there is to know: they measure with noise, and shorter trainings.
_LEARNED = 0.1
# What a training will reach is taken to be so many standard deviations below its mean.
_CAREFUL = 0.5
# Complete trials before a final training begins, unless so much of the time is used.
_LEAST_TRIALS, _LEAST_SHARE = 6, 0.3
# Every second trial of the search is one that tells most of a final training for its time.
_EVERY = 2
# A final training is worth it if it is expected to add so much of the accuracy's spread.
_LEAST_GAIN = 0.002
# Before any trial has ended, training may take longer than known by this standard deviation, in logs, worth so many trials.
_SLOWER, _WORTH = 0.1, 3
# No search trial takes more than this share of the time left.
_LONGEST = 0.25


@dataclass(frozen=True)
class WallTime:
    """Seconds by the clock of a training whose seconds are known, with how they vary.

    Args:
        slowdown: the clock's seconds of training for each known one, as far as trials have shown.
        overhead_s: of an attempt, outside training.
        spread: standard deviation of the log of what a training takes, over what is expected.
        freedom: degrees of freedom of it.
    """

    slowdown: float = 1.0
    overhead_s: float = 0.0
    spread: float = _SLOWER
    freedom: float = _WORTH

    @classmethod
    def of(cls, spans: Sequence[Span]) -> WallTime:
        """As the attempts that ended have shown."""
        ended = [span for span in spans if span.ended_s is not None and span.known_s and span.share > 0 and span.trained_s > 0]
        logs = np.array([math.log(span.trained_s / (span.known_s * span.share)) for span in ended])  # type: ignore[operator]
        # Few trials say little, so that the law counts as some of them.
        middle = float(logs.sum() / (len(logs) + 1)) if len(logs) else 0.0
        freedom = _WORTH + len(logs)
        variance = (_WORTH * _SLOWER**2 + float(((logs - middle) ** 2).sum())) / freedom
        return cls(
            math.exp(middle), ClockFactors.of(spans).overhead_s, math.sqrt(variance * (1 + 1 / (1 + len(logs)))), freedom
        )

    def expected_s(self, known_s: Array | float) -> Array | float:
        return np.multiply(known_s, self.slowdown) + self.overhead_s

    def probability(self, known_s: float, within_s: float) -> float:
        """That a training is done within so many seconds by the clock."""
        share = within_s / float(self.expected_s(known_s))
        return float(stdtr(self.freedom, math.log(share) / self.spread)) if share > 0 else 0.0

    def at_most_s(self, known_s: Array | float, sure: float) -> Array | float:
        """What it takes at most, with probability `sure`."""
        factor = math.exp(self.spread * float(stdtrit(self.freedom, sure)))
        return np.multiply(known_s, self.slowdown * factor) + self.overhead_s * factor


@dataclass(frozen=True)
class Final:
    """A training that is to be the study's model, or better than what is kept.

    Args:
        parameters: searched ones.
        tried: the trial whose setting it is.
        known_s: seconds of training.
        gain: what it is expected to add to the best model there is, in units of the accuracy's spread.
    """

    parameters: dict[str, Any]
    tried: int
    known_s: float
    gain: float


@dataclass(frozen=True)
class Decision:
    """What to do with a free device.

    Args:
        final: the best final training, which begins after the search; None where none fits.
        trials: of the search before it; 0: it begins now.
    """

    final: Final | None
    trials: int


def decide(outlook: Outlook, left_s: float, trial_s: float, wall: WallTime, sure: float) -> Decision:
    """Search on, or train.

    Args:
        left_s: until the deadline.
        trial_s: by the clock, between the ends of two trials of the search.
    """
    at_most = np.asarray(wall.at_most_s(outlook.seconds, sure))
    floor = outlook.best_so_far
    best, row = _trained(outlook, floor, at_most <= left_s)
    ahead = 0
    for trials in _AHEAD:
        later_s = left_s - trials * trial_s
        if later_s <= 0:
            break
        fits = at_most <= later_s
        without, then = _trained(outlook, floor, fits)
        value = without + _LEARNED * (_searched(outlook, floor, fits, trials) - _searched(outlook, floor, fits, 0))
        if value > best:
            best, row, ahead = value, then, trials
    if row is None:
        return Decision(None, ahead)
    gain = np.maximum(outlook.reached[:, row], floor).mean() - floor.mean()
    final = Final(outlook.parameters(row), int(outlook.tried[row]), float(outlook.seconds[row]), float(gain / outlook.unit))
    return Decision(final, ahead)


def promising(outlook: Outlook, left_s: float, longest_s: float, wall: WallTime, sure: float) -> dict[str, Any] | None:
    """The trial of the search that tells most, for its time, of a final training that may exceed the best known; None: none.

    A setting's gain is by how much its longest training that fits is expected to exceed the best; a shorter training of it
    tells the share of its variance that the two have in common.

    Args:
        left_s: for the final training.
        longest_s: the most known seconds of the trial.
    """
    fits = np.asarray(wall.at_most_s(outlook.seconds, sure)) <= left_s
    short = np.flatnonzero((outlook.seconds <= longest_s) & (outlook.tried < 0) & ~outlook.done)
    if not fits.any() or not len(short):
        return None
    # Rows of a setting are in the order of their lengths.
    last = np.full(int(outlook.setting.max()) + 1, -1)
    last[outlook.setting[fits]] = np.flatnonzero(fits)
    short = short[last[outlook.setting[short]] >= 0]
    if not len(short):
        return None
    final, mean = last[outlook.setting[short]], outlook.reached.mean(axis=0)
    level = max(float(mean[fits].max()), float(outlook.best_so_far.mean()))
    gains = np.maximum(outlook.reached[:, final] - level, 0.0).mean(axis=0)
    own, others = (outlook.reached[:, rows] - mean[rows] for rows in (short, final))
    shared = (own * others).mean(axis=0) ** 2 / ((own**2).mean(axis=0) * (others**2).mean(axis=0) + 1e-30)
    worth = gains * shared / np.asarray(wall.expected_s(outlook.seconds[short]))
    return outlook.parameters(int(short[np.argmax(worth)])) if worth.max() > 0 else None


def _trained(outlook: Outlook, floor: Array, fits: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[float, int | None]:
    """What the best training of a tried setting that fits may be relied on to reach, and its row: no less with more time."""
    careful_floor = float(floor.mean() - _CAREFUL * floor.std())
    fits = fits & (outlook.tried >= 0) & ~outlook.done
    if not fits.any():
        return careful_floor, None
    careful = outlook.reached.mean(axis=0) - _CAREFUL * outlook.reached.std(axis=0)
    row = int(np.argmax(np.where(fits, careful, -math.inf)))
    return max(float(careful[row]), careful_floor), row


def _searched(outlook: Outlook, floor: Array, fits: np.ndarray[Any, np.dtype[np.bool_]], trials: int) -> float:
    """The expected metric of the best training that fits, once so many more settings are known: chosen one by one for most."""
    if not fits.any():
        return float(floor.mean())
    reached = outlook.reached[:, fits]
    best = floor
    for _ in range(trials + 1):
        values = np.maximum(reached, best[:, None])
        row = int(np.argmax(values.mean(axis=0)))
        best = values[:, row]
    return float(best.mean())


# A final training, parameters of a trial of the search, any trial of the search, or nothing.
Step = Final | dict[str, Any] | Literal["search"] | None


class FinalPlanner:
    """Decides what devices do until a deadline, as trials end.

    Args:
        sure: the probability with which a final training is to be done in time, as it is planned.
        whole_s: from the study's beginning to its deadline.
        shortest_s: known seconds of the shortest trainings.
    """

    def __init__(self, suggester: Suggester, sure: float, whole_s: float, shortest_s: float = 0.0) -> None:
        self._suggester, self._sure, self._whole_s, self._shortest_s = suggester, sure, whole_s, shortest_s
        self._outlook: tuple[tuple[int, int], Outlook | None] = (-1, -1), None
        self._over = -1, -1  # the state of the trials in which there was nothing more to do
        self.decision, self._searched = Decision(None, 0), 0

    def next(
        self, trials: Sequence[TrialRecord], wall: WallTime, left_s: float, trial_s: float, *, searches: bool = True
    ) -> Step:
        """What to do with a free device: a final training, parameters of a trial, or any trial of the search.

        None: nothing that fits is expected to do any good.

        Args:
            trials: of the study.
            left_s: until the deadline.
            trial_s: by the clock, between the ends of two trials of the search.
            searches: whether the search may go on.
        """
        if self._over == _state(trials):
            return None
        # The longest of which it is sure enough.
        per_s = float(wall.at_most_s(1.0, self._sure) - wall.at_most_s(0.0, self._sure))
        fits_s = (left_s - float(wall.at_most_s(0.0, self._sure))) / per_s
        self._suggester.longest_s = max(min(fits_s, max(_LONGEST * fits_s, 2 * self._shortest_s)), 0.0)
        outlook = self._seen(trials)
        if outlook is None:
            return "search" if searches and fits_s > 0 else None
        ended = sum(trial.outcome == "complete" for trial in trials)
        self.decision = decide(outlook, left_s, trial_s, wall, self._sure)
        early = ended < _LEAST_TRIALS and left_s > (1 - _LEAST_SHARE) * self._whole_s
        if searches and (self.decision.trials or early):
            self._searched += 1
            if self._searched % _EVERY == 0:
                later_s = left_s - max(self.decision.trials, 1) * trial_s
                return promising(outlook, later_s, self._suggester.longest_s, wall, self._sure) or "search"
            return "search"
        final = self.decision.final
        if final is not None and final.gain > _LEAST_GAIN:
            return final
        self._over = self._outlook[0]
        return None

    def _seen(self, trials: Sequence[TrialRecord]) -> Outlook | None:
        """The outlook after these trials, which takes a moment."""
        state = _state(trials)
        if self._outlook[0] != state:
            self._outlook = state, self._suggester.outlook(trials)
        return self._outlook[1]


def _state(trials: Sequence[TrialRecord]) -> tuple[int, int]:
    """What decisions depend on beside the time: how many trials there are, and how many have ended."""
    return len(trials), sum(trial.has_ended for trial in trials)
