"""What trials have shown so far, as arrays for the sampler's models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...spaces.record import TrialRecord
from ..analysis.gaussian_process import Array
from ..analysis.pareto import front_members
from .space_transform import SpaceTransform

# Trials that the processes are conditioned on: cost grows with the cube. Of more, those nearest the front and an even
# selection of the others are used.
MOST_POINTS = 300
_NEAREST = 200
# Paused trials among them.
_MOST_PAUSED = 100
# Parameters, what training takes, and score of a trial of an earlier study.
PriorTrial = tuple[Mapping[str, Any], float, float]


@dataclass(frozen=True, slots=True)
class PausedTrials:
    """Trials that were paused at the rung.

    Args:
        numbers: (p,), of the trials.
        points: (p, width).
        seconds: (p,), > 0, of their full training.
        fractions: (p,), shares of it that they had completed at the rung.
        score: (p,), there; higher is better.
        waiting: (p,), whether they are still paused, not training again.
    """

    numbers: np.ndarray[Any, np.dtype[np.int64]]
    points: Array
    seconds: Array
    fractions: Array
    score: Array
    waiting: np.ndarray[Any, np.dtype[np.bool_]]

    def __len__(self) -> int:
        return len(self.numbers)

    def best(self, most: int) -> PausedTrials:
        """Those that train again, and of the others the most accurate for their time."""
        below = np.where(self.waiting, _below_front(self.seconds, self.score), -math.inf)
        kept = np.sort(np.argsort(below, kind="stable")[:most])
        return PausedTrials(*(getattr(self, name)[kept] for name in self.__slots__))


@dataclass(frozen=True)
class Observations:
    """What the trials have shown so far, as points of the unit cube.

    Args:
        points: (n, width), trials that were trained to their end or stopped early.
        taken: (n,), > 0, what their full training takes, such as seconds.
        score: (n,), higher is better; the prediction for a stopped trial.
        std: (n,), standard deviation of that prediction, 0 where training finished.
        own: (n,), of this study rather than an earlier one.
        pending: (m, width), running trials.
        failed: (l, width), trials that ended without values.
        rung_fractions, rung_score: (n,), of those that were measured at the rung; NaN for others.
        paused: trials at the rung.
    """

    points: Array
    taken: Array
    score: Array
    std: Array
    own: np.ndarray[Any, np.dtype[np.bool_]]
    pending: Array
    failed: Array
    rung_fractions: Array
    rung_score: Array
    paused: PausedTrials

    def subset_near_front(self, most: int) -> Observations:
        """At most `most` of them, paused ones included: those closest to the front at their time, evenly selected others."""
        if len(self.paused) > _MOST_PAUSED:
            return replace(self, paused=self.paused.best(_MOST_PAUSED)).subset_near_front(most)
        most -= len(self.paused)
        if len(self.points) <= most:
            return self
        ranked = np.argsort(_below_front(self.taken, self.score), kind="stable")
        nearest = min(_NEAREST, most - 1)
        near, rest = ranked[:nearest], np.sort(ranked[nearest:])
        kept = np.concatenate([near, rest[np.linspace(0, len(rest) - 1, most - nearest).astype(int)]])
        per_trial = ("points", "taken", "score", "std", "own", "rung_fractions", "rung_score")
        return replace(
            self, failed=self.failed[-most:], **{name: getattr(self, name)[kept] for name in per_trial}
        )


def _below_front(taken: Array, score: Array) -> Array:
    """How far each trial is below the best score of those that take at most as much; all (n,)."""
    reached = np.empty(len(taken))
    order = np.lexsort((-score, taken))
    reached[order] = np.maximum.accumulate(score[order])
    return np.asarray(reached - score)


def front_places(taken: Array, score: Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Indices of the trials that no other beats, by what they take and score (n,); of equal trials, all are included."""
    return np.sort(np.array(front_members(np.column_stack([taken, -score]).tolist()), dtype=np.int64))


# What a trial is to the models: not over, an observation, a failure, or nothing.
_OPEN, _OBSERVED, _FAILED, _IGNORED = range(4)


class TrialHistory:
    """A study's trials as arrays, each read once when it ends: thousands are not read again for every ask."""

    def __init__(self, transform: SpaceTransform) -> None:
        self.transform = transform
        # Indexed by trial number, which counts from 0 without gaps.
        self._kinds = np.empty(0, dtype=np.int8)
        # What it takes, score, its standard deviation, fraction and score at the rung.
        self._points, self._values = np.empty((0, transform.width)), np.empty((0, 5))

    def observations(
        self,
        trials: Sequence[TrialRecord],
        prior: Sequence[PriorTrial] = (),
        proposed: Sequence[Mapping[str, Any]] = (),
    ) -> Observations:
        """What all trials show.

        Args:
            prior: trials of earlier studies.
            proposed: parameters of trials that will be running soon.
        """
        count, capacity = len(trials), len(self._kinds)
        if count > capacity:  # doubled, so that copying stays rare
            self._kinds = np.append(self._kinds, np.zeros(count, dtype=np.int8))
            self._points = np.vstack([self._points, np.zeros((count, self.transform.width))])
            self._values = np.vstack([self._values, np.zeros((count, 5))])
        pending, paused = [self.transform.encode(parameters) for parameters in proposed], []
        for number in np.flatnonzero(self._kinds[:count] == _OPEN).tolist():
            trial = trials[number]
            complete = self.transform.is_whole(trial.parameters)
            if trial.has_ended:
                self._kinds[number] = self._read(number, trial) if complete else _IGNORED
            elif complete:
                point, facts, waiting = self.transform.encode(trial.parameters), trial.facts, trial.is_paused
                if not waiting:
                    pending.append(point)
                share, score, takes = facts.stopped_fraction, facts.stopped_accuracy, facts.expected_seconds
                if share is not None and score is not None and takes is not None:
                    paused.append((number, point, takes, share, trial.score_of(score), waiting))
        observed, failed = (np.flatnonzero(self._kinds[:count] == kind) for kind in (_OBSERVED, _FAILED))
        earlier = np.array([self.transform.encode(parameters) for parameters, _, _ in prior]).reshape(
            -1, self.transform.width
        )
        values_of_prior = [(taken, score, 0.0, math.nan, math.nan) for _, taken, score in prior]
        values = np.vstack([np.array(values_of_prior).reshape(-1, 5), self._values[observed]])
        numbers, places, seconds, fractions, reached, waits = (
            zip(*paused, strict=True) if paused else ((),) * 6
        )
        return Observations(
            np.vstack([earlier, self._points[observed]]),
            values[:, 0],
            values[:, 1],
            values[:, 2],
            np.arange(len(values)) >= len(prior),
            np.array(pending).reshape(-1, self.transform.width),
            self._points[failed],
            values[:, 3],
            values[:, 4],
            PausedTrials(
                np.array(numbers, dtype=np.int64),
                np.array(places).reshape(-1, self.transform.width),
                np.array(seconds, dtype=float),
                np.array(fractions, dtype=float),
                np.array(reached, dtype=float),
                np.array(waits, dtype=bool),
            ),
        )

    def _read(self, number: int, trial: TrialRecord) -> int:
        """Store an ended trial's point and values; returns what it is to the models."""
        facts, score_of = trial.facts, trial.score_of
        self._points[number] = self.transform.encode(trial.parameters)
        if trial.values is not None and np.isfinite(trial.values).all():
            rung = math.nan, math.nan
            if facts.stopped_fraction is not None and facts.stopped_accuracy is not None:
                rung = facts.stopped_fraction, score_of(facts.stopped_accuracy)
            self._values[number] = trial.values[0], score_of(trial.values[1]), 0.0, *rung
            return _OBSERVED
        taken, accuracy, std = facts.expected_seconds, facts.expected_accuracy, facts.expected_std
        if taken is not None and accuracy is not None and std is not None:
            self._values[number] = taken, score_of(accuracy), std, math.nan, math.nan
            return _OBSERVED
        # A trial that goes on has not failed; nor has one that cannot be read.
        return _IGNORED if trial.outcome in ("interrupted", "paused", "unreadable") else _FAILED
