"""A scale on which accuracies are as normal as their ranks: what models of them believe in."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

from .gaussian_process import Array


class RankScale:
    """A monotone scale on which values are as normal as their ranks; straight between them and beyond their ends.

    >>> scale = RankScale(np.array([0.1, 0.1, 0.9, 0.95, 0.99]))
    >>> scale.back(scale.of(np.array([0.1, 0.93, 1.0]))).round(6).tolist()
    [0.1, 0.93, 1.0]
    """

    def __init__(self, values: Array) -> None:
        self.values, first = np.unique(values, return_index=True)
        self.scores = ndtri((rankdata(values) - 0.5) / len(values))[first]
        if len(self.values) == 1:
            self.values, self.scores = self.values + np.array([0.0, 1.0]), np.array([0.0, 1.0])

    def of(self, values: Array) -> Array:
        return _straight(values, self.values, self.scores)

    def back(self, scores: Array) -> Array:
        return _straight(scores, self.scores, self.values)


def _straight(at: Array, x: Array, y: Array) -> Array:
    """Linear interpolation; beyond the ends on with the slope of the outer quarter of the points."""
    few = max(len(x) // 4, 1)
    low, high = (y[few] - y[0]) / (x[few] - x[0]), (y[-1] - y[-1 - few]) / (x[-1] - x[-1 - few])
    inside = np.interp(at, x, y)
    return np.asarray(inside + np.minimum(at - x[0], 0.0) * low + np.maximum(at - x[-1], 0.0) * high)
