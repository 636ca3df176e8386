"""How far trials of somebody else's runs are believed: as far as they predict this study's own.

A process over the earlier runs alone predicts the own trials. What it is wrong by, beyond its own uncertainty, is the standard
deviation s of an earlier run from what it would have been here:

    s² = (c s₀² + Σ max(r² − v, 0)) / (c + n),    r the errors of n own trials, v the variances of their predictions

Differences between tasks are alike for neighbours, which independent noise is not, so that variance is multiplied by the number
of earlier runs for each two of the dimensions: all of them together say no more than so many points of that uncertainty.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ...analysis.gaussian_process import Array, GaussianProcess, fitted, single_threaded_blas
from ...analysis.score_scale import ScoreScale
from ..trial_history import Observations

# Of the prior of s: the standard deviation as a share of the earlier runs', and as how many trials it counts.
_SHARE, _COUNTS = 0.1, 2.0
# The most earlier runs in the fit.
_MOST = 150


class Doubt:
    """How much earlier runs are off, told again as own trials end."""

    def __init__(self) -> None:
        self._process: GaussianProcess | None = None
        self._scale: ScoreScale | None = None

    def of(self, observations: Observations) -> Observations:
        """The observations, with earlier runs as uncertain as they proved to be."""
        own = observations.own
        earlier = int((~own).sum())
        if not earlier:
            return observations
        std = np.where(
            own, observations.std, math.sqrt(self._variance(observations) * self._times(observations))
        )
        return replace(observations, std=std)

    def _times(self, observations: Observations) -> float:
        earlier, dimensions = int((~observations.own).sum()), observations.points.shape[1]
        return float(max(earlier / (2 * dimensions), 1.0))

    def _variance(self, observations: Observations) -> float:
        own, score = observations.own, observations.score
        finished = own & (observations.std == 0)
        scale, process = self._fitted(observations.points[~own], score[~own])
        prior = (_SHARE * process.std) ** 2
        if not finished.any():
            return float(prior * scale.unit**2)
        expected, std = process.predict(observations.points[finished])
        errors = scale.of(score[finished]) - expected
        excess = np.maximum(errors**2 - std**2, 0.0)
        return float((_COUNTS * prior + excess.sum()) / (_COUNTS + len(excess))) * scale.unit**2

    def _fitted(self, points: Array, score: Array) -> tuple[ScoreScale, GaussianProcess]:
        if self._process is None or self._scale is None:
            self._scale = ScoreScale(score)
            some = slice(None, None, max(1, math.ceil(len(points) / _MOST)))
            with single_threaded_blas():
                self._process = fitted(points[some], self._scale.of(score[some]))
        return self._scale, self._process
