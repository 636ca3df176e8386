"""Exact Gaussian-process regression in NumPy: Matérn-5/2 kernel, one length scale per dimension, for hundreds of points.

    y(x) = mean + std · (f(x) + ε),  f ~ GP(0, k),  ε ~ N(0, exp(log_noise))
    k(x, x') = (1 + √5 r + 5 r²/3) exp(−√5 r),  r² = Σ_j ((x_j − x'_j) / exp(log_scales_j))²

Source: Rasmussen & Williams 2006, https://gaussianprocess.org/gpml (algorithm 2.1, equation 4.17, section 5.4). Priors as in
Hvarfner, Hellsten & Nardi 2024, arXiv 2402.02229: length scales grow with the square root of the number of dimensions, so that
few points in many dimensions do not look like noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from scipy.linalg import blas, cho_solve, lapack, solve_triangular
from scipy.optimize import minimize
from threadpoolctl import ThreadpoolController

Array = np.ndarray[Any, np.dtype[np.float64]]

_LENGTH_STD = math.sqrt(3.0)
_NOISE_MEAN, _NOISE_STD = -4.0, 1.0  # of log noise variance, values standardised
_SQRT5 = math.sqrt(5.0)
_JITTER = 1e-8
# The factor of so many points is inverted to predict others; with more, each inverse costs more than it saves.
_INVERTED = 512


class Structure:
    """The prior of a process: an input transform, a mean function, basis functions added to the kernel, and hyperpriors.

        y ~ GP(mean(z), k(z, z') + φ(z)ᵀφ(z')),  z the coordinates of a point; standardised values throughout

    Attributes:
        means, stds: (s,), prior of the free parameters: a log length scale for each coordinate, then a slope if `sheared`.
        noise: prior mean and standard deviation of the log noise variance.
        sheared: (i, j), where coordinate i is z_i - slope · z_j; None: there is no slope.
    """

    means: Array
    stds: Array
    noise: tuple[float, float]
    sheared: tuple[int, int] | None = None

    def coordinates(self, points: Array, free: Array) -> Array:
        """z of points (n, d), as (n, d)."""
        return points

    def features(self, z: Array) -> Array:
        """φ of coordinates (n, d), as (n, f)."""
        return np.zeros((len(z), 0))

    def mean(self, z: Array) -> Array:
        """The mean at coordinates (n, d), as (n,)."""
        return np.zeros(len(z))

    def features_by_slope(self, z: Array) -> Array:
        """Derivative of the features with respect to the slope, (n, f)."""
        return np.zeros_like(self.features(z))

    def mean_by_slope(self, z: Array) -> Array:
        """Derivative of the mean with respect to the slope, (n,)."""
        return np.zeros(len(z))


class Plain(Structure):
    """The vague prior: mean 0, no basis functions, log-normal length scales and noise.

    Args:
        log_scale: prior mean of the log length scales; not given, as in the source above.
    """

    def __init__(self, dimensions: int, log_scale: float | None = None) -> None:
        middle = math.sqrt(2.0) + 0.5 * math.log(max(dimensions, 1)) if log_scale is None else log_scale
        self.means, self.stds = np.full(dimensions, middle), np.full(dimensions, _LENGTH_STD)
        self.noise = _NOISE_MEAN, _NOISE_STD


class Bowls(Structure):
    """The prior of a score about whose parameters nothing is known: along each coordinate a slope and a bowl, and the rest.

    The vague prior took most of ten parameters for irrelevant after few trials, and was sure of it (docs/log.md).
    """

    def __init__(self, dimensions: int) -> None:
        self.means, self.stds = np.zeros(dimensions), np.full(dimensions, 0.8)
        self.noise = _NOISE_MEAN, _NOISE_STD

    def features(self, z: Array) -> Array:
        away = z - 0.5
        return np.hstack([np.full((len(z), 1), 0.5), 0.7 * away, 1.3 * (away**2 - 1 / 12)])


@dataclass(frozen=True)
class GaussianProcess:
    """A process conditioned on values at points.

    Args:
        points: (n, d), each dimension about 1 wide.
        free: log length scales, (d,), and a slope where the structure has one.
        log_noise: log noise variance of the standardised values.
        mean, std: of the values, which are standardised by them.
        factor: lower Cholesky factor of the kernel matrix plus noise, (n, n).
        weights: that matrix's inverse times the standardised values less the structure's mean, (n,).
    """

    points: Array
    free: Array
    log_noise: float
    mean: float
    std: float
    factor: Array
    weights: Array
    structure: Structure

    def mean_at(self, points: Array) -> Array:
        """Posterior mean at points (m, d), as (m,): a fraction of the work of `predict`."""
        z, _, cross = self._cross(points)
        return self.mean + self.std * (self.structure.mean(z) + cross @ self.weights)

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Posterior mean and standard deviation of the noise-free function at points (m, d): two of (m,)."""
        z, features, cross = self._cross(points)
        middle = self.structure.mean(z) + cross @ self.weights
        if len(self.points) <= _INVERTED:
            solved = blas.dtrmm(1.0, self._inverse_factor, cross.T, lower=1)
        else:
            solved = solve_triangular(self.factor, cross.T, lower=True, check_finite=False)
        prior = 1.0 + np.einsum("ij,ij->i", features, features)
        variance = np.maximum(prior - np.einsum("ij,ij->j", solved, solved), 1e-12)
        return self.mean + self.std * middle, self.std * np.sqrt(variance)

    @cached_property
    def _inverse_factor(self) -> Array:
        """For thousands of points to predict, a product takes a third of the time of a triangular system."""
        return np.asarray(lapack.dtrtri(self.factor, lower=1)[0])

    def joint(self, points: Array) -> tuple[Array, Array]:
        """Posterior mean (m,) and covariance (m, m) of the noise-free function at points (m, d)."""
        z, features, cross = self._cross(points)
        solved = solve_triangular(self.factor, cross.T, lower=True, check_finite=False)
        prior = matern52(distances(z, z, self.free[: points.shape[1]])) + features @ features.T
        middle = self.structure.mean(z) + cross @ self.weights
        return self.mean + self.std * middle, self.std**2 * (prior - solved.T @ solved)

    def believing(self, points: Array) -> GaussianProcess:
        """The process conditioned also on its own means at points (m, d), without noise: only its variance changes."""
        if not len(points):
            return self
        _, features, cross = self._cross(points)
        solved = solve_triangular(self.factor, cross.T, lower=True, check_finite=False)
        z = self.structure.coordinates(points, self.free)
        among = matern52(distances(z, z, self.free[: points.shape[1]])) + features @ features.T
        among[np.diag_indices_from(among)] += _JITTER
        corner = np.linalg.cholesky(among - solved.T @ solved)
        factor = np.block([[self.factor, np.zeros_like(solved)], [solved.T, corner]])
        return replace(
            self,
            points=np.vstack([self.points, points]),
            factor=factor,
            weights=np.append(self.weights, np.zeros(len(points))),
        )

    def _cross(self, points: Array) -> tuple[Array, Array, Array]:
        """Coordinates and features of points (m, d), and their covariance with those that are known, (m, n)."""
        z, ours = (self.structure.coordinates(some, self.free) for some in (points, self.points))
        features = self.structure.features(z)
        scales = self.free[: points.shape[1]]
        return z, features, matern52(distances(z, ours, scales)) + features @ self.structure.features(ours).T


def fitted(
    points: Array,
    values: Array,
    start: tuple[Array, float] | None = None,
    most_steps: int = 40,
    own_noise: Array | None = None,
    prior: tuple[float, float] | None = None,
    structure: Structure | None = None,
) -> GaussianProcess:
    """The process with the maximum a posteriori length scales, slope and noise, by L-BFGS.

    Minimizes −log p(y | θ) − log p(θ) = ½ yᵀK⁻¹y + ½ log|K| + ½ Σ ((θ − prior mean) / prior std)² + constant.

    Args:
        points: (n, d).
        values: (n,).
        start: free parameters and log noise variance to start from; not given, length scales of 0.5 and the prior noise, or
            the means of a given structure's prior.
        most_steps: iterations of L-BFGS.
        own_noise: of the values beyond the common noise: variances (n,), or their covariance (n, n).
        prior: mean and standard deviation of the process far from all points; not given, those of the values.
        structure: what is known beforehand; not given, `Plain`.
    """
    mean, std = prior or (float(values.mean()), float(values.std()) or 1.0)
    targets = (values - mean) / std
    known_noise = 0.0 if own_noise is None else _covariance(own_noise) / std**2
    dimensions = points.shape[1]
    known = Plain(dimensions) if structure is None else structure
    unsheared = known.coordinates(points, np.zeros(len(known.means)))
    squares = (unsheared[:, None, :] - unsheared[None, :, :]) ** 2  # (n, n, d)

    def loss(all_free: Array) -> tuple[float, Array]:
        free, log_noise = all_free[:-1], all_free[-1]
        log_scales = free[:dimensions]
        z = known.coordinates(points, free)
        apart = squares
        if known.sheared is not None:
            apart = squares.copy()
            first, second = (z[:, None, place] - z[None, :, place] for place in known.sheared)
            apart[:, :, known.sheared[0]] = first**2
        scaled = apart * np.exp(-2 * log_scales)
        distance = np.sqrt(scaled.sum(-1))
        features = known.features(z)
        covariance = matern52(distance) + features @ features.T + known_noise
        residual = targets - known.mean(z)
        noise = math.exp(log_noise)
        covariance[np.diag_indices_from(covariance)] += noise + _JITTER
        try:
            factor = np.linalg.cholesky(covariance)
        except np.linalg.LinAlgError:
            return 1e10, np.zeros_like(all_free)
        weights = cho_solve((factor, True), residual, check_finite=False)
        value = 0.5 * residual @ weights + np.log(np.diag(factor)).sum()
        inverse = cho_solve((factor, True), np.eye(len(targets)), check_finite=False)
        # Twice that of `value` with respect to the covariance.
        gradient = inverse - np.outer(weights, weights)
        # dk / d log_scale_j = −k'(r)/r · (x_j − x'_j)² / exp(2 log_scale_j)
        shared = gradient * matern52_derivative(distance)
        derivative = np.empty_like(all_free)
        derivative[:dimensions] = 0.5 * np.einsum("ij,ijk->k", shared, scaled)
        if known.sheared is not None:
            # The slope moves the first coordinate's differences by the second's, and with them features and mean.
            moved = shared * first * second * math.exp(-2 * log_scales[known.sheared[0]])
            by_features = np.einsum("ij,ik,jk->", gradient, known.features_by_slope(z), features)
            derivative[-2] = 0.5 * moved.sum() + by_features - weights @ known.mean_by_slope(z)
        derivative[-1] = 0.5 * noise * np.trace(gradient)
        away, noise_away = (free - known.means) / known.stds, (log_noise - known.noise[0]) / known.noise[1]
        value += 0.5 * float(away @ away) + 0.5 * noise_away**2
        derivative[:-1] += away / known.stds
        derivative[-1] += noise_away / known.noise[1]
        return float(value), derivative

    if start is None:
        start = (np.full(dimensions, math.log(0.5)) if structure is None else known.means), known.noise[0]
    bounds = [(-4.0, 6.0)] * len(known.means) + [(-12.0, 1.0)]
    begin = np.append(*start)
    found = minimize(loss, begin, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": most_steps})
    return conditioned(
        points, values, found.x[:-1], float(found.x[-1]), mean, std, own_noise, structure=known
    )


def conditioned(
    points: Array,
    values: Array,
    free: Array,
    log_noise: float,
    mean: float,
    std: float,
    own_noise: Array | None = None,
    structure: Structure | None = None,
) -> GaussianProcess:
    """The process with given length scales, slope and noise, conditioned on values at points.

    Args:
        own_noise: of the values beyond the common noise: variances (n,), or their covariance (n, n).
        structure: what is known beforehand; not given, `Plain`.
    """
    known = Plain(points.shape[1]) if structure is None else structure
    z = known.coordinates(points, free)
    features = known.features(z)
    covariance = matern52(distances(z, z, free[: points.shape[1]])) + features @ features.T
    noise = np.full(len(points), math.exp(log_noise))
    if own_noise is not None:
        covariance += _covariance(own_noise) / std**2
    covariance[np.diag_indices_from(covariance)] += noise + _JITTER
    factor = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    weights = cho_solve((factor, True), (values - mean) / std - known.mean(z), check_finite=False)
    return GaussianProcess(points, free, log_noise, mean, std, factor, weights, known)


def _covariance(noise: Array) -> Array:
    return np.diag(noise) if noise.ndim == 1 else noise


def distances(some: Array, others: Array, log_scales: Array) -> Array:
    """Scaled distances r of points (n, d) and others (m, d), as (n, m)."""
    a, b = some * np.exp(-log_scales), others * np.exp(-log_scales)
    squared = -2 * a @ b.T
    squared += (a**2).sum(1)[:, None]
    squared += (b**2).sum(1)[None, :]
    return np.asarray(np.sqrt(np.maximum(squared, 0.0, out=squared), out=squared))


def single_threaded_blas() -> Any:
    """Matrices of a few hundred rows gain nothing from threads; on cores busy with trials an ask took 20 times as long."""
    return _blas_libraries().limit(limits=1, user_api="blas")


@cache
def _blas_libraries() -> ThreadpoolController:
    return ThreadpoolController()  # finding them takes some milliseconds


def matern52(distance: Array, log_amplitude: float = 0.0) -> Array:
    """The Matérn-5/2 kernel k(r) of scaled distances, elementwise."""
    scaled = np.asarray(_SQRT5 * distance)
    # In place: most of an ask is this, on matrices of which each copy leaves the cache.
    value = scaled * scaled
    value /= 3.0
    value += scaled
    value += 1.0
    np.exp(np.negative(scaled, out=scaled), out=scaled)
    value *= scaled
    return np.asarray(value if log_amplitude == 0.0 else value * math.exp(2 * log_amplitude))


def matern52_derivative(distance: Array, log_amplitude: float = 0.0) -> Array:
    """−k'(r)/r of the Matérn-5/2 kernel, elementwise: 5/3 (1 + √5 r) exp(−√5 r), finite at r = 0."""
    scaled = _SQRT5 * distance
    return np.asarray(5.0 / 3.0 * (1.0 + scaled) * (math.exp(2 * log_amplitude) * np.exp(-scaled)))
