"""Trials that are paused, and what the rest of their training is expected to add to their scores.

A trial that is paused at the rung is an uncertain observation: its score there plus the gap to its end. Gaps differ with
the learning rate most of all: at high rates a curve is low until its schedule ends and rises late, so curves cross, and a
ranking at the rung would finish low rates only. The gap is therefore a process over places of its own, with the rate as a
feature, learned from the trials that went on.

    gap(x) ~ GP(0.3 (1 − f), τ² (k(x, x') + 0.15 δ)),  k = ½ + a·a' + ½ Matérn-5/2(z),  a = 2 u_rate − 1
    τ² = (gᵀ (K + 0.15 I)⁻¹ g + 3 t₀²) / (n + 3),  t₀ = 0.4 √(1 − f)

on the `ScoreScale`, where f is the share of training at the rung and g the finished gaps less their prior mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from ...spaces.record import TrialFacts
from ...spaces.study.goals import Metric
from ..analysis.gaussian_process import Array, Structure, distances, matern52
from .stopping import EarlyStopping

# The share of its training from which on a trial may be paused: by default, at the third of ten measurements, which may come
# a step early. A fifth is too early; a third and a half are alike (docs/decisions/0035).
RUNG = 0.29
# Of gaps: their own variance relative to the process's, the prior's mean and standard deviation per share left (and its root),
# and how many gaps the prior is worth.
_OWN, _RISE, _SPREAD, _WORTH = 0.15, 0.3, 0.4, 3.0
# A trial is not paused at the rung if more than this share of its gap's variance is still unexplained.
_UNKNOWN = 0.3


class PauseAtRung(EarlyStopping):
    """Pause every trial at the rung, unless too little is known of how its curve goes on. The sampler resumes them.

    Args:
        is_new_ground: whether too little is known about a trial's curve, given the trials that were not paused.
    """

    pauses = True

    def __init__(self, metric: Metric, is_new_ground: Callable[[int, Collection[int]], bool]) -> None:
        super().__init__(metric)
        self._is_new_ground = is_new_ground
        self._going_on: set[int] = set()

    def should_stop(self, number: int, fraction: float) -> bool:
        if fraction < RUNG or number in self._going_on:
            return False
        if self._is_new_ground(number, sorted(self._going_on)):
            self._going_on.add(number)
            return False
        return True

    def facts(self, number: int, *, stopped: bool) -> TrialFacts:
        """Of a trial that is paused or goes on, its measurement at the rung."""
        if stopped:
            return super().facts(number, stopped=True)
        curve = self.curves.get(number)
        for fraction, score in zip(curve.fractions, curve.scores, strict=True) if curve else ():
            if RUNG <= fraction < 1 and math.isfinite(score):
                return TrialFacts(stopped_fraction=fraction, stopped_accuracy=self._metric.score(score))
        return TrialFacts()

    def resume(self, number: int) -> None:
        self._going_on.add(number)

    def end(self, number: int, taken: float, value: float | None) -> list[tuple[float, float]]:
        curve = super().end(number, taken, value)
        if not curve:
            self._going_on.discard(number)
        return curve


@dataclass(frozen=True)
class GapKernel:
    """How alike the gaps of two places are.

    Args:
        structure: of the score's process: its coordinates, and the prior of its length scales.
        free: that process's log length scales and slope, as last fitted or of the prior; gaps vary at least as slowly as the
            prior's.
        rate: the rate's coordinate; None where no rate is searched.
    """

    structure: Structure
    free: Array
    rate: int | None

    def __call__(self, some: Array, others: Array) -> Array:
        """Of points (m, d) and others (n, d), as (m, n)."""
        z, theirs = (self.structure.coordinates(points, self.free) for points in (some, others))
        dimensions = some.shape[1]
        scales = np.maximum(self.free[:dimensions], self.structure.means[:dimensions])
        alike = 0.5 + 0.5 * matern52(distances(z, theirs, scales))
        if self.rate is not None:
            alike = alike + np.outer(2 * some[:, self.rate] - 1, 2 * others[:, self.rate] - 1)
        return np.asarray(alike)

    def is_unknown(self, point: Array, known: Array) -> bool:
        """Whether too little is known of the gap at a point (d,) from trials at others (n, d) that go on to their ends."""
        here = float(self(point[None, :], point[None, :])[0, 0])
        if not len(known):
            return True
        cross = self(point[None, :], known)[0]
        explained = cross @ cho_solve(self._factor(known), cross)
        return bool((here - explained) / here > _UNKNOWN)

    def predicted(
        self, known: Array, gaps: Array, shares: Array, paused: Array, paused_shares: Array
    ) -> tuple[Array, Array]:
        """Gaps of paused trials: their mean (p,) and joint covariance (p, p).

        Args:
            known, gaps, shares: places (n, d) of finished trials, their gaps (n,), and their shares of training at the rung.
            paused, paused_shares: places (p, d) of paused trials, and theirs.
        """
        rest = float(1 - paused_shares.mean()) if len(paused_shares) else 1.0
        residual = gaps - _RISE * (1 - shares)
        mean, covariance = _RISE * (1 - paused_shares), self(paused, paused) + _OWN * np.eye(len(paused))
        scale = _WORTH * _SPREAD**2 * rest
        if len(known):
            factor, cross = self._factor(known), self(paused, known)
            weights = cho_solve(factor, residual)
            scale += float(residual @ weights)
            mean = mean + cross @ weights
            covariance = covariance - cross @ cho_solve(factor, cross.T)
        return mean, covariance * (scale / (len(known) + _WORTH))

    def _factor(self, known: Array) -> tuple[Array, bool]:
        factor, lower = cho_factor(self(known, known) + _OWN * np.eye(len(known)), lower=True)
        return np.asarray(factor), bool(lower)
