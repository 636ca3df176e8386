"""Exact Gaussian-process regression in NumPy: Matérn-5/2 kernel, one length scale per dimension, for hundreds of points.

    y(x) = mean + std · (f(x) + ε),  f ~ GP(0, k),  ε ~ N(0, exp(log_noise))
    k(x, x') = (1 + √5 r + 5 r²/3) exp(−√5 r),  r² = Σ_j ((x_j − x'_j) / exp(log_scales_j))²

Source: Rasmussen & Williams 2006, https://gaussianprocess.org/gpml (algorithm 2.1, equation 4.17, section 5.4). Priors as in
Hvarfner, Hellsten & Nardi 2024, arXiv 2402.02229: length scales grow with the square root of the number of dimensions, so that
few points in many dimensions do not look like noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize
from threadpoolctl import ThreadpoolController

Array = np.ndarray[Any, np.dtype[np.float64]]

_LENGTH_STD = math.sqrt(3.0)
_NOISE_MEAN, _NOISE_STD = -4.0, 1.0  # of log noise variance, values standardised
_SQRT5 = math.sqrt(5.0)
_JITTER = 1e-8


@dataclass(frozen=True)
class GaussianProcess:
    """A process conditioned on values at points.

    Args:
        points: (n, d), each dimension about 1 wide.
        log_scales: log length scales, (d,).
        log_noise: log noise variance of the standardised values.
        mean, std: of the values, which are standardised by them.
        factor: lower Cholesky factor of the kernel matrix plus noise, (n, n).
        weights: that matrix's inverse times the standardised values, (n,).
    """

    points: Array
    log_scales: Array
    log_noise: float
    mean: float
    std: float
    factor: Array
    weights: Array

    def mean_at(self, points: Array) -> Array:
        """Posterior mean at points (m, d), as (m,): a fraction of the work of `predict`."""
        return self.mean + self.std * (matern52(distances(points, self.points, self.log_scales)) @ self.weights)

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Posterior mean and standard deviation of the noise-free function at points (m, d): two of (m,)."""
        cross = matern52(distances(points, self.points, self.log_scales))
        middle = cross @ self.weights
        solved = solve_triangular(self.factor, cross.T, lower=True, check_finite=False)
        variance = np.maximum(1.0 - np.einsum("ij,ij->j", solved, solved), 1e-12)
        return self.mean + self.std * middle, self.std * np.sqrt(variance)


def fitted(
    points: Array,
    values: Array,
    start: tuple[Array, float] | None = None,
    most_steps: int = 40,
    noise_variance: Array | None = None,
    prior: tuple[float, float] | None = None,
    log_scale: float | None = None,
) -> GaussianProcess:
    """The process with the maximum a posteriori length scales and noise, by L-BFGS.

    Minimizes −log p(y | θ) − log p(θ) = ½ yᵀK⁻¹y + ½ log|K| + ½ Σ ((θ − prior mean) / prior std)² + constant.

    Args:
        points: (n, d).
        values: (n,).
        start: log length scales and log noise variance to start from; not given, length scales of 0.5 and the prior noise.
        most_steps: iterations of L-BFGS.
        noise_variance: (n,), of each value beyond the common noise.
        prior: mean and standard deviation of the process far from all points; not given, those of the values.
        log_scale: prior mean of the log length scales; not given, as in the source above.
    """
    mean, std = prior or (float(values.mean()), float(values.std()) or 1.0)
    targets = (values - mean) / std
    own_noise = np.zeros(len(values)) if noise_variance is None else noise_variance / std**2
    dimensions = points.shape[1]
    length_mean = math.sqrt(2.0) + 0.5 * math.log(dimensions) if log_scale is None else log_scale
    squares = (points[:, None, :] - points[None, :, :]) ** 2  # (n, n, d)

    def loss(free: Array) -> tuple[float, Array]:
        log_scales, log_noise = free[:-1], free[-1]
        scaled = squares * np.exp(-2 * log_scales)
        distance = np.sqrt(scaled.sum(-1))
        covariance = matern52(distance)
        noise = math.exp(log_noise)
        covariance[np.diag_indices_from(covariance)] += noise + own_noise + _JITTER
        try:
            factor = np.linalg.cholesky(covariance)
        except np.linalg.LinAlgError:
            return 1e10, np.zeros_like(free)
        weights = cho_solve((factor, True), targets, check_finite=False)
        value = 0.5 * targets @ weights + np.log(np.diag(factor)).sum()
        inverse = cho_solve((factor, True), np.eye(len(targets)), check_finite=False)
        gradient = inverse - np.outer(weights, weights)  # twice that of `value` with respect to the covariance
        # dk / d log_scale_j = −k'(r)/r · (x_j − x'_j)² / exp(2 log_scale_j)
        shared = gradient * matern52_derivative(distance)
        derivative = np.empty_like(free)
        derivative[:-1] = 0.5 * np.einsum("ij,ijk->k", shared, scaled)
        derivative[-1] = 0.5 * noise * np.trace(gradient)
        away, noise_away = (log_scales - length_mean) / _LENGTH_STD, (log_noise - _NOISE_MEAN) / _NOISE_STD
        value += 0.5 * float(away @ away) + 0.5 * noise_away**2
        derivative[:-1] += away / _LENGTH_STD
        derivative[-1] += noise_away / _NOISE_STD
        return float(value), derivative

    first = np.full(dimensions + 1, length_mean)
    first[:-1], first[-1] = (math.log(0.5), _NOISE_MEAN) if start is None else start
    bounds = [(-4.0, 6.0)] * dimensions + [(-12.0, 1.0)]
    found = minimize(loss, first, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": most_steps})
    return conditioned(points, values, found.x[:-1], float(found.x[-1]), mean, std, noise_variance)


def conditioned(
    points: Array,
    values: Array,
    log_scales: Array,
    log_noise: float,
    mean: float,
    std: float,
    noise_variance: Array | None = None,
    noiseless: int = 0,
) -> GaussianProcess:
    """The process with given length scales and noise, conditioned on values at points.

    Args:
        noise_variance: (n,), of each value beyond the common noise.
        noiseless: how many of the last values have no noise at all.
    """
    covariance = matern52(distances(points, points, log_scales))
    noise = np.full(len(points), math.exp(log_noise))
    if noise_variance is not None:
        noise += noise_variance / std**2
    noise[len(points) - noiseless :] = 0.0
    covariance[np.diag_indices_from(covariance)] += noise + _JITTER
    factor = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    weights = cho_solve((factor, True), (values - mean) / std, check_finite=False)
    return GaussianProcess(points, log_scales, log_noise, mean, std, factor, weights)


def distances(some: Array, others: Array, log_scales: Array) -> Array:
    """Scaled distances r of points (n, d) and others (m, d), as (n, m)."""
    a, b = some * np.exp(-log_scales), others * np.exp(-log_scales)
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    return np.asarray(np.sqrt(np.maximum(squared, 0.0)))


def single_threaded_blas() -> Any:
    """Matrices of a few hundred rows gain nothing from threads; on cores busy with trials an ask took 20 times as long."""
    return _blas_libraries().limit(limits=1, user_api="blas")


@cache
def _blas_libraries() -> ThreadpoolController:
    return ThreadpoolController()  # finding them takes some milliseconds


def matern52(distance: Array, log_amplitude: float = 0.0) -> Array:
    """The Matérn-5/2 kernel k(r) of scaled distances, elementwise."""
    scaled = _SQRT5 * distance
    return np.asarray((1.0 + scaled + scaled**2 / 3.0) * (math.exp(2 * log_amplitude) * np.exp(-scaled)))


def matern52_derivative(distance: Array, log_amplitude: float = 0.0) -> Array:
    """−k'(r)/r of the Matérn-5/2 kernel, elementwise: 5/3 (1 + √5 r) exp(−√5 r), finite at r = 0."""
    scaled = _SQRT5 * distance
    return np.asarray(5.0 / 3.0 * (1.0 + scaled) * (math.exp(2 * log_amplitude) * np.exp(-scaled)))
