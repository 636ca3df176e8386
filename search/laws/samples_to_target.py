"""The law of samples to a target: how many samples a training needs at each effective batch, with intervals.

    S(B) = floor · (1 + (B / c)^k)^(q / k)

Below the knee c the batch costs nothing, above it samples grow like B^q; k says how sharp the knee is. McCandlish et al. 2018
(arXiv 1812.06162) have k = q = 1, the plain law, which gets half of the prior. The other half is shared by a few shapes that
bend more sharply, or grow more slowly than the batch, as some measured workloads do (docs/decisions/0067).

The posterior is a weighted grid over c, the shapes, the spread of settings around the law, and that of the levels of groups;
levels are integrated in closed form. Two measured points at one batch differ by their seeds, which the runs show, by the
resolution of what was counted, and by their other hyperparameters, which is the spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from ..analysis.gaussian_process import Array
from ..analysis.rates import Estimate
from .runs_table import RunsToTarget

# The shapes: each k with each q.
_SHARPNESS, _GROWTH = (1.0, 2.0, 4.0), (0.5, 1.0)
# The prior probability of the plain law: with less, few points of a plain law are predicted worse (docs/log.md, 2026-11-27).
_PLAIN = 0.5
# The grid of the spread and of levels' standard deviation, and the prior of each: median, and deviation of the logarithm.
_SPREADS, _LEVELS = tuple(float(spread) for spread in np.geomspace(0.01, 0.5, 16)), (0.01, 0.1, 0.4, 1.5)
_OF_SPREAD, _OF_LEVELS = (0.1, 1.0), (0.1, 2.0)
# Knees lie from this far below the smallest to this far above the largest batch, in natural logarithms; and their number.
_BELOW, _ABOVE, _KNEES = 2.0, 4.5, 140
# Variance of the level beforehand, around the measured mean; the draws of the posterior, and their seed.
_VAGUE, _DRAWS, _SEED = 25.0, 4000, 0
# The standard error of a median of normal values, over that of their mean.
_OF_MEDIAN = 1.2533
# Batches without which there is no law.
LEAST_BATCHES = 3


class Shape(NamedTuple):
    """A sharpness k and a growth q, with its share of the prior."""

    sharpness: float
    growth: float
    share: float


def shapes_with(plain: float) -> tuple[Shape, ...]:
    """The plain law with this share of the prior, and the other shapes with equal parts of the rest.

    >>> [shape.share for shape in shapes_with(0.5)]
    [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]
    """
    bent = [pair for pair in product(_SHARPNESS, _GROWTH) if pair != (1.0, 1.0)]
    return (Shape(1.0, 1.0, plain), *(Shape(*pair, (1 - plain) / len(bent)) for pair in bent))


SHAPES = shapes_with(_PLAIN)


@dataclass(frozen=True)
class BatchLaw:
    """The fitted law, as draws from its posterior.

    Args:
        batches: the smallest and the largest measured.
        levels: by group, the logarithm of its floor, (draws,); None is a group that was not measured.
        knee, sharpness, growth: c, k and q, (draws,).
        spread: standard deviation of settings around the law, on a log scale, (draws,).
    """

    batches: tuple[int, int]
    levels: dict[str | None, Array]
    knee: Array
    sharpness: Array
    growth: Array
    spread: Array

    def critical_batch(self) -> Estimate:
        """The batch that needs twice as many samples as the smallest."""
        return Estimate.of(self.knee * (2.0 ** (self.sharpness / self.growth) - 1) ** (1 / self.sharpness))

    def samples_at(self, effective_batch: float, group: str | None = None) -> Estimate:
        """The median that a setting at this batch would need, with what settings differ by."""
        around = np.random.default_rng(_SEED).standard_normal(len(self.knee)) * self.spread
        return Estimate.of(np.exp(self.log_samples(effective_batch, group) + around))

    def log_samples(self, effective_batch: float, group: str | None = None) -> Array:
        """The logarithm of the law itself, (draws,)."""
        times = (
            self.growth
            / self.sharpness
            * np.logaddexp(0.0, self.sharpness * np.log(effective_batch / self.knee))
        )
        return np.asarray(self.levels[group] + times)

    def covers(self, effective_batch: float) -> bool:
        """Whether a batch lies among the measured ones; elsewhere the interval rests on the prior."""
        return self.batches[0] <= effective_batch <= self.batches[1]


def fit_batch_law(points: Sequence[RunsToTarget], shapes: Sequence[Shape] = SHAPES) -> BatchLaw:
    """The law that measured points follow.

    Args:
        shapes: the law may have, with their shares of the prior, which are > 0.

    Raises:
        ValueError: at fewer than three batches.
    """
    batches = np.array([float(point.effective_batch) for point in points])
    if len(set(batches)) < LEAST_BATCHES:
        raise ValueError(f"expected at least {LEAST_BATCHES} different batches, got {len(set(batches))}")
    logs = np.log([point.median for point in points])
    middle = float(np.mean(np.log([point.median for point in points])))
    errors = _errors(points)
    groups: list[str | None] = [*sorted({point.group for point in points}), None]
    of_group = np.array([groups.index(point.group) for point in points])
    same = (of_group[:, None] == of_group[None, :]).astype(float)

    ends = math.log(batches.min()) - _BELOW, math.log(batches.max()) + _ABOVE
    knees = np.repeat(np.linspace(*ends, _KNEES), len(shapes))
    sharpness, growth, shares = np.tile(np.array(shapes).T, _KNEES)
    # (n, grid)
    times = growth / sharpness * np.logaddexp(0.0, sharpness * (np.log(batches)[:, None] - knees))
    residuals = logs[:, None] - middle - times

    weights, means, variances, spreads = [], [], [], []
    for level in _LEVELS:
        # Of the group's levels: with the points, (groups, n), and among themselves.
        towards = _VAGUE + level**2 * (np.arange(len(groups))[:, None] == of_group[None, :])
        for spread in _SPREADS:
            factor = np.linalg.cholesky(_VAGUE + level**2 * same + np.diag(spread**2 + errors**2))
            # (n, grid), (n, groups)
            whitened = np.linalg.solve(factor, residuals)
            cross = np.linalg.solve(factor, towards.T)
            fit = -0.5 * (whitened**2).sum(0) - np.log(np.diag(factor)).sum()
            weights.append(
                fit + np.log(shares) + _log_normal(spread, _OF_SPREAD) + _log_normal(level, _OF_LEVELS)
            )
            means.append(middle + cross.T @ whitened)  # (groups, grid)
            variances.append(np.maximum(_VAGUE + level**2 - (cross**2).sum(0), 0.0))  # (groups,)
            spreads.append(spread)
    every = np.array(weights)  # (level and spread, grid)
    share = np.exp(every - every.max())
    rng = np.random.default_rng(_SEED)
    drawn = rng.choice(share.size, _DRAWS, p=(share / share.sum()).ravel())
    outer, inner = np.unravel_index(drawn, share.shape)
    normal = rng.standard_normal(_DRAWS)
    levels = {
        group: np.array(means)[outer, place, inner] + np.sqrt(np.array(variances)[outer, place]) * normal
        for place, group in enumerate(groups)
    }
    return BatchLaw(
        (int(batches.min()), int(batches.max())),
        levels,
        np.exp(knees[inner] + (ends[1] - ends[0]) / (_KNEES - 1) * (rng.random(_DRAWS) - 0.5)),
        sharpness[inner],
        growth[inner],
        np.array(spreads)[outer],
    )


def _errors(points: Sequence[RunsToTarget]) -> Array:
    """Standard errors of the medians' logarithms, (n,): by the runs, and by the resolution of what was counted."""
    errors = []
    for point in points:
        values = np.log(point.samples)
        of_runs = _OF_MEDIAN * float(values.std()) / math.sqrt(len(values))
        counted = np.unique(
            [value for other in points if other.group == point.group for value in other.samples]
        )
        step = float(np.diff(counted).min()) if len(counted) > 1 else 0.0
        if step and not np.allclose(counted / step, np.round(counted / step), atol=1e-3):
            step = 0.0  # not counted in such steps
        errors.append(math.hypot(of_runs, step / math.sqrt(12) / point.median))
    return np.array(errors)


def _log_normal(value: float, prior: tuple[float, float]) -> float:
    """The logarithm of a log-normal density over log(value), up to a constant, by its median and the logarithm's deviation."""
    return -0.5 * (math.log(value / prior[0]) / prior[1]) ** 2
