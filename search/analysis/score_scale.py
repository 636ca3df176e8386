"""A scale of scores for modelling: linear near the best, compressed below."""

from __future__ import annotations

import numpy as np

from .gaussian_process import Array

# Units below the best up to which the scale is linear; logarithmic beyond.
_LINEAR = 1.5
# How far down the logarithmic part reaches. Further down, as where a perplexity overflowed, all values are equal.
DEEPEST = 30.0


class ScoreScale:
    """Scores as distances below the best, in units of the median's distance: linear to 1.5 units, logarithmic beyond.

    On the raw scale, one badly failed trial would distort a model's whole surface.

    >>> scale = ScoreScale(np.array([0.1, 0.5, 0.9, 0.95, 0.99]))
    >>> scale.of(np.array([0.99, 0.9, 0.1])).round(3).tolist()
    [0.0, -1.0, -3.74]
    >>> scale.back(scale.of(np.array([0.0, 0.93, 1.0]))).round(6).tolist()
    [0.0, 0.93, 1.0]
    """

    def __init__(self, values: Array) -> None:
        self.best = float(values.max())
        self.unit = max(self.best - float(np.median(values)), 1e-3 * max(abs(self.best), 1e-9))

    def of(self, values: Array) -> Array:
        """Scores on this scale, elementwise."""
        with np.errstate(over="ignore"):
            z: Array = np.maximum((values - self.best) / self.unit, -_LINEAR - np.expm1(DEEPEST))
        return np.where(z >= -_LINEAR, z, -_LINEAR - np.log1p(np.maximum(-_LINEAR - z, 0.0)))

    def back(self, scaled: Array) -> Array:
        """The inverse of `of`, elementwise."""
        depth = np.minimum(np.maximum(-_LINEAR - scaled, 0.0), DEEPEST)
        return self.best + self.unit * np.where(scaled >= -_LINEAR, scaled, -_LINEAR - np.expm1(depth))
