"""Where trainings fail: the probability that one blows up, by batch and rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy.special import expit, logit

from .gaussian_process import Array

# Prior of the intercept and of the slopes along log batch and log rate, means and standard deviations: failures are rare, and
# beyond a cliff a tenth of an e-fold wide of the rate, which may turn with the batch.
_MEANS, _STDS = np.array([-4.0, 0.0, 12.0]), np.array([6.0, 3.0, 5.0])
_ROUNDS, _CLOSE = 30, 1e-5
# Where the odds of a failure rise by less with each e-fold of the rate, failures have another cause, such as a setting of their
# own, and nothing is known of rates.
_GENTLEST = 3.0


@dataclass(frozen=True, slots=True)
class Cliff:
    """A logistic regression of failures on (log batch, log rate).

    Args:
        middle: (2,), the point that slopes are relative to.
        coefficients: (3,), intercept and slopes.
    """

    middle: Array
    coefficients: Array

    @classmethod
    def fitted(cls, points: Array, failed: Array) -> Self:
        """The likeliest regression given the prior, by Newton's method; a constant where failures hardly depend on the rate.

        Args:
            points: (n, 2), logarithms of batch and rate.
            failed: (n,), 1 where the training failed, else 0.
        """
        middle = points.mean(axis=0)
        terms = np.column_stack([np.ones(len(points)), points - middle])
        free = _MEANS.copy()
        reached = _log_posterior(terms, failed, free)
        for _ in range(_ROUNDS):
            chance = expit(terms @ free)
            slope = terms.T @ (failed - chance) - (free - _MEANS) / _STDS**2
            curvature = (terms.T * (chance * (1 - chance))) @ terms + np.diag(1 / _STDS**2)
            step = np.linalg.solve(curvature, slope)
            # A whole step may lead beyond the maximum.
            while (next_reached := _log_posterior(terms, failed, free + step)) < reached and np.abs(
                step
            ).max() > _CLOSE:
                step = step / 2
            if np.abs(step).max() <= _CLOSE:
                break
            free, reached = free + step, next_reached
        if free[2] < _GENTLEST:
            share = (float(failed.sum()) + 0.5) / (len(failed) + 1)
            free = np.array([logit(share), 0.0, 0.0])
        return cls(middle, free)

    def chance(self, points: Array) -> Array:
        """The probability that a training fails at points (m, 2), (m,)."""
        return np.asarray(expit(self.coefficients[0] + (points - self.middle) @ self.coefficients[1:]))

    def log_rate(self, log_batch: float, chance: float) -> float:
        """The log rate at which so many trainings with this batch fail; infinite where no rate is too high."""
        at_batch = self.coefficients[0] + self.coefficients[1] * (log_batch - self.middle[0])
        slope = self.coefficients[2]
        return float(self.middle[1] + (logit(chance) - at_batch) / slope) if slope > 0 else math.inf


def _log_posterior(terms: Array, failed: Array, free: Array) -> float:
    """Of the coefficients, up to a constant."""
    return _log_likelihood(terms, failed, free) - 0.5 * float((((free - _MEANS) / _STDS) ** 2).sum())


def _log_likelihood(terms: Array, failed: Array, free: Array) -> float:
    logits = terms @ free
    return float(failed @ logits - np.logaddexp(0.0, logits).sum())
