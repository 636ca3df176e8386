"""A scale of accuracies to believe in: true to size near the best, compressed below."""

from __future__ import annotations

import numpy as np

from .gaussian_process import Array

# Distances from best to median up to which the scale is straight; a logarithm beyond.
_STRAIGHT = 1.5


class AccuracyScale:
    """Accuracies as distances below the best, one being that of the median; straight to 1.5, logarithmic beyond.

    A trial that failed badly says "bad", not how bad: its depth would bend a model's whole surface. Near the front each digit
    counts as it is.

    >>> scale = AccuracyScale(np.array([0.1, 0.5, 0.9, 0.95, 0.99]))
    >>> scale.of(np.array([0.99, 0.9, 0.1])).round(3).tolist()
    [0.0, -1.0, -3.74]
    >>> scale.back(scale.of(np.array([0.0, 0.93, 1.0]))).round(6).tolist()
    [0.0, 0.93, 1.0]
    """

    def __init__(self, values: Array) -> None:
        self.best = float(values.max())
        self.unit = max(self.best - float(np.median(values)), 1e-3 * max(abs(self.best), 1e-9))

    def of(self, values: Array) -> Array:
        z = (values - self.best) / self.unit
        return np.where(z >= -_STRAIGHT, z, -_STRAIGHT - np.log1p(np.maximum(-_STRAIGHT - z, 0.0)))

    def back(self, scaled: Array) -> Array:
        # Draws of a wide belief reach far down; below e^30 units they are as good as any.
        depth = np.minimum(np.maximum(-_STRAIGHT - scaled, 0.0), 30.0)
        return self.best + self.unit * np.where(scaled >= -_STRAIGHT, scaled, -_STRAIGHT - np.expm1(depth))
