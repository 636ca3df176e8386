"""A small Gaussian process: Matérn 5/2, one length scale a dimension, noise estimated; exact, in NumPy, for hundreds of points.

Priors as in Hvarfner, Hellsten and Nardi 2024 (arXiv 2402.02229): length scales are expected to grow with the square root of
the number of dimensions, so that few points in many dimensions do not look like noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize

Array = np.ndarray[Any, np.dtype[np.float64]]

_LENGTH_DEVIATION = math.sqrt(3.0)
_NOISE_MEAN, _NOISE_DEVIATION = -4.0, 1.0  # of log noise variance, values standardised
_SQRT5 = math.sqrt(5.0)
_JITTER = 1e-8


@dataclass(frozen=True)
class GaussianProcess:
    """A process conditioned on values at points.

    Args:
        points: (n, d), each dimension about 1 wide.
        log_scales: log length scales, (d,).
        log_noise: log of the noise's variance, of standardised values.
        mean, deviation: of the values, which were standardised by them.
        factor: lower Cholesky factor of the covariance with its noise, (n, n).
        weights: its inverse times the standardised values, (n,).
    """

    points: Array
    log_scales: Array
    log_noise: float
    mean: float
    deviation: float
    factor: Array
    weights: Array

    def expect(self, points: Array) -> Array:
        """Mean of the function at points (m, d), (m,): a fraction of the work of `predict`."""
        return self.mean + self.deviation * (_matern(_distances(points, self.points, self.log_scales)) @ self.weights)

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the function (without its noise) at points (m, d): two of (m,)."""
        cross = _matern(_distances(points, self.points, self.log_scales))
        middle = cross @ self.weights
        solved = solve_triangular(self.factor, cross.T, lower=True, check_finite=False)
        variance = np.maximum(1.0 - np.einsum("ij,ij->j", solved, solved), 1e-12)
        return self.mean + self.deviation * middle, self.deviation * np.sqrt(variance)


def fitted(
    points: Array,
    values: Array,
    start: tuple[Array, float] | None = None,
    most_steps: int = 40,
    doubt: Array | None = None,
    around: tuple[float, float] | None = None,
    log_scale: float | None = None,
) -> GaussianProcess:
    """The process of the most probable length scales and noise, by L-BFGS from `start` or from the priors' middle.

    Args:
        points: (n, d).
        values: (n,).
        start: log scales and log noise of an earlier fit: few more points move them little.
        doubt: (n,), variance of each value beyond the common noise.
        around: mean and deviation far from all points; not given, those of the values.
        log_scale: expected of the length scales; not given, the priors' (see above).
    """
    mean, deviation = around or (float(values.mean()), float(values.std()) or 1.0)
    targets = (values - mean) / deviation
    doubts = np.zeros(len(values)) if doubt is None else doubt / deviation**2
    dimensions = points.shape[1]
    length_mean = math.sqrt(2.0) + 0.5 * math.log(dimensions) if log_scale is None else log_scale
    squares = (points[:, None, :] - points[None, :, :]) ** 2  # (n, n, d)

    def loss(free: Array) -> tuple[float, Array]:
        log_scales, log_noise = free[:-1], free[-1]
        weighed = squares * np.exp(-2 * log_scales)
        distance = np.sqrt(weighed.sum(-1))
        covariance = _matern(distance)
        noise = math.exp(log_noise)
        covariance[np.diag_indices_from(covariance)] += noise + doubts + _JITTER
        try:
            factor = np.linalg.cholesky(covariance)
        except np.linalg.LinAlgError:
            return 1e10, np.zeros_like(free)
        weights = cho_solve((factor, True), targets, check_finite=False)
        value = 0.5 * targets @ weights + np.log(np.diag(factor)).sum()
        inverse = cho_solve((factor, True), np.eye(len(targets)), check_finite=False)
        pull = inverse - np.outer(weights, weights)  # twice the slope of `value` along the covariance
        # d matern / d log scale_j = 5/3 (1 + sqrt5 r) exp(-sqrt5 r) x (x_j - y_j)^2 / scale_j^2
        shared = pull * (5.0 / 3.0 * (1.0 + _SQRT5 * distance) * np.exp(-_SQRT5 * distance))
        slope = np.empty_like(free)
        slope[:-1] = 0.5 * np.einsum("ij,ijk->k", shared, weighed)
        slope[-1] = 0.5 * noise * np.trace(pull)
        away, noise_away = (log_scales - length_mean) / _LENGTH_DEVIATION, (log_noise - _NOISE_MEAN) / _NOISE_DEVIATION
        value += 0.5 * float(away @ away) + 0.5 * noise_away**2
        slope[:-1] += away / _LENGTH_DEVIATION
        slope[-1] += noise_away / _NOISE_DEVIATION
        return float(value), slope

    first = np.full(dimensions + 1, length_mean)
    first[:-1], first[-1] = (math.log(0.5), _NOISE_MEAN) if start is None else start
    bounds = [(-4.0, 6.0)] * dimensions + [(-12.0, 1.0)]
    found = minimize(loss, first, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": most_steps})
    return conditioned(points, values, found.x[:-1], float(found.x[-1]), mean, deviation, doubt)


def conditioned(
    points: Array,
    values: Array,
    log_scales: Array,
    log_noise: float,
    mean: float,
    deviation: float,
    doubt: Array | None = None,
    certain: int = 0,
) -> GaussianProcess:
    """The process of given length scales and noise at other points: what pending trials ask for.

    Args:
        doubt: (n,), variance of each value beyond the common noise.
        certain: how many of the last values are taken for noiseless.
    """
    covariance = _matern(_distances(points, points, log_scales))
    noise = np.full(len(points), math.exp(log_noise))
    if doubt is not None:
        noise += doubt / deviation**2
    noise[len(points) - certain :] = 0.0
    covariance[np.diag_indices_from(covariance)] += noise + _JITTER
    factor = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    weights = cho_solve((factor, True), (values - mean) / deviation, check_finite=False)
    return GaussianProcess(points, log_scales, log_noise, mean, deviation, factor, weights)


def _distances(some: Array, others: Array, log_scales: Array) -> Array:
    a, b = some * np.exp(-log_scales), others * np.exp(-log_scales)
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    return np.asarray(np.sqrt(np.maximum(squared, 0.0)))


def _matern(distance: Array) -> Array:
    scaled = _SQRT5 * distance
    return (1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled)
