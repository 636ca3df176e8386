"""How much better the best of one side's settings is than the other's, and how sure that is.

One Gaussian process models the scores of both sides. A side is a coordinate of its own, so the difference between the sides is
a smooth function of the settings: runs of both sides at neighbouring settings inform each other, and each side may have its
best somewhere else. From the process both sides' scores at many settings are drawn together; within each training time, the
best of one side less the best of the other is the difference. It is as uncertain as the runs leave it: about scores, and about
where the best is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..analysis.gaussian_process import (
    Array,
    GaussianProcess,
    Plain,
    conditioned,
    fitted,
    single_threaded_blas,
)
from ..analysis.score_scale import ScoreScale
from ..suggest.space_transform import SpaceTransform

# Log length scale of the coordinate that tells the sides apart: its prior, at which the sides' scores correlate at .98.
_SIDE, _SIDE_STD = math.log(6.0), 0.5
# Log noise variance: its prior, wider than the search's, since repeats tell it.
_NOISE = -4.0, 1.5
# The share of the variance of a run's noise that is its seed's, whatever the setting: 0 to .27 in seven tables (docs/log.md).
_COMMON = 0.2
# Random settings among those that may be a side's best, moves of each observed one, and how far; the best of them are drawn.
_RANDOM, _MOVES, _MOVED, _DRAWN = 200, 2, 0.05, 120
_DRAWS = 2000
# Training times at which sides are compared.
_TIMES = 12
# What counts as within a training time, as modelled times differ a little from measured ones.
_LATE = 1.02
# Fewer runs of a side say nothing of its best.
LEAST = 6


@dataclass(frozen=True, slots=True)
class Runs:
    """The finished runs of one side, of which higher scores are better.

    Args:
        parameters: of each run, (n,).
        seconds, scores: (n,).
        seeds: (n,); None where one is not known.
    """

    parameters: Sequence[Mapping[str, Any]]
    seconds: Array
    scores: Array
    seeds: Sequence[int | None]


@dataclass(frozen=True, slots=True)
class Difference:
    """The second side's best score less the first's, by training time.

    Args:
        seconds: training times, ascending, (k,).
        drawn: of the difference within each, (k, draws); in the metric's unit, positive where the second side is better.
        best: each side's best setting.
        unmoved: mean and standard deviation of the difference at the first side's best setting; None where the same setting
            is another one on the second side.
        noise: standard deviation of a run.
        runs: of both sides.
    """

    seconds: Array
    drawn: Array
    best: tuple[Mapping[str, Any], Mapping[str, Any]]
    unmoved: tuple[float, float] | None
    noise: float
    runs: int

    def better(self, margin: float) -> Array:
        """The probability that the second side is better by more than this, (k,): of a normal difference."""
        from scipy.special import ndtr

        return np.asarray(
            ndtr((self.drawn.mean(axis=1) - margin) / np.maximum(self.drawn.std(axis=1), 1e-12))
        )


class _Sides(Plain):
    """The vague prior over a setting's coordinates and the side's."""

    noise = _NOISE

    def __init__(self, dimensions: int) -> None:
        super().__init__(dimensions)
        self.means, self.stds = np.append(self.means, _SIDE), np.append(self.stds, _SIDE_STD)
        self.noise = _NOISE


def difference(
    spaces: Sequence[tuple[SpaceTransform, SpaceTransform]], sides: tuple[Runs, Runs], seed: int = 0
) -> Difference:
    """The difference between two sides' bests.

    Args:
        spaces: for each side, how its settings are points; of several ways that in which the sides resemble each other most.
    """
    rng = np.random.default_rng(seed)
    scores = np.concatenate([runs.scores for runs in sides])
    scale = ScoreScale(scores)
    seconds = np.log(np.concatenate([runs.seconds for runs in sides]))
    with single_threaded_blas():
        fits = [_fitted(each, sides, scale.of(scores)) for each in spaces]
        model, transforms = max(
            zip(fits, spaces, strict=True), key=lambda fit: _evidence(fit[0], scale.of(scores))
        )
        points = [
            np.array([way.encode(one) for one in runs.parameters])
            for way, runs in zip(transforms, sides, strict=True)
        ]
        model = _with_common_seeds(model, scale.of(scores), sides)
        times = fitted(model.points, seconds, structure=model.structure)
        cuts = _cuts(sides)
        places, best = list[Array](), list[Array]()
        for side in range(2):
            candidates = _candidates(transforms[side], points, side, rng)
            means = model.mean_at(candidates)
            best.append(candidates[np.argmax(means)])
            places.append(_drawable(candidates, means, np.exp(times.mean_at(candidates)), cuts))
        at = np.vstack(places)
        mean, covariance = model.joint(at)
        seconds = np.exp(times.mean_at(at))
        drawn = scale.back(_draws(mean, covariance, rng))
        unmoved = _difference_at(model, best[0], scale) if transforms[0] is transforms[1] else None
    count = len(places[0])
    gaps = [
        _highest(drawn[count:], seconds[count:], cut) - _highest(drawn[:count], seconds[:count], cut)
        for cut in cuts
    ]
    noise = scale.unit * model.std * math.exp(model.log_noise / 2) / math.sqrt(1 - _COMMON)
    first, second = (way.decode(one[:-1]) for way, one in zip(transforms, best, strict=True))
    return Difference(cuts, np.array(gaps), (first, second), unmoved, noise, len(scores))


def _fitted(transforms: Sequence[SpaceTransform], sides: Sequence[Runs], values: Array) -> GaussianProcess:
    points = [
        _of_side(np.array([way.encode(one) for one in runs.parameters]), side)
        for side, (way, runs) in enumerate(zip(transforms, sides, strict=True))
    ]
    return fitted(np.vstack(points), values, structure=_Sides(transforms[0].width))


def _evidence(model: GaussianProcess, values: Array) -> float:
    """The log of the values' probability by a process, but for a constant."""
    return -0.5 * float((values - model.mean) / model.std @ model.weights) - float(
        np.log(np.diag(model.factor)).sum()
    )


def _with_common_seeds(model: GaussianProcess, values: Array, sides: Sequence[Runs]) -> GaussianProcess:
    """The process with a part of the noise shared by a side's runs of one seed, which more of them do not average out."""
    named = [
        (side, seed) for side, runs in enumerate(sides) for seed in runs.seeds or [None] * len(runs.scores)
    ]
    alike = [[one == other and one[1] is not None for other in named] for one in named]
    shared = _COMMON * math.exp(model.log_noise) * model.std**2 * np.array(alike, dtype=float)
    own = model.log_noise + math.log(1 - _COMMON)
    np.fill_diagonal(shared, _COMMON * math.exp(model.log_noise) * model.std**2)
    return conditioned(
        model.points, values, model.free, own, model.mean, model.std, shared, structure=model.structure
    )


def _of_side(points: Array, side: int) -> Array:
    return np.column_stack([points, np.full(len(points), float(side))])


def _cuts(sides: Sequence[Runs]) -> Array:
    """Training times from that of both sides' fastest runs to that of the slowest."""
    begin, end = max(runs.seconds.min() for runs in sides), max(runs.seconds.max() for runs in sides)
    return np.unique(np.append(np.geomspace(begin, end, _TIMES)[:-1], end))


def _candidates(
    transform: SpaceTransform, points: Sequence[Array], side: int, rng: np.random.Generator
) -> Array:
    """Settings that may be a side's best: those of both sides, moved ones and random ones, as far as the side has runs."""
    own = points[side]
    low, high = own.min(axis=0), own.max(axis=0)
    moved = np.repeat(own, _MOVES, axis=0)
    moved += rng.normal(0.0, _MOVED, moved.shape)
    some = np.vstack([*points, moved, rng.uniform(low, high, (_RANDOM, transform.width))])
    return _of_side(np.unique(transform.round_to_feasible(np.clip(some, low, high)), axis=0), side)


def _drawable(candidates: Array, means: Array, seconds: Array, cuts: Array) -> Array:
    """The candidates with the highest means within each training time."""
    order = np.argsort(-means)
    chosen = {
        int(place) for cut in cuts for place in order[seconds[order] <= cut * _LATE][: _DRAWN // len(cuts)]
    }
    chosen |= {int(np.argmin(seconds)), *map(int, order[: _DRAWN // 2])}
    return candidates[sorted(chosen)]


def _draws(mean: Array, covariance: Array, rng: np.random.Generator) -> Array:
    factor = np.linalg.cholesky(
        covariance + 1e-6 * max(float(np.diag(covariance).max()), 1e-12) * np.eye(len(mean))
    )
    return np.asarray(mean[:, None] + factor @ rng.standard_normal((len(mean), _DRAWS)))


def _highest(drawn: Array, seconds: Array, cut: float) -> Array:
    within = seconds <= max(cut * _LATE, seconds.min())
    return np.asarray(drawn[within].max(axis=0))


def _difference_at(model: GaussianProcess, best: Array, scale: ScoreScale) -> tuple[float, float]:
    """Mean and standard deviation of the difference at one setting."""
    mean, covariance = model.joint(np.vstack([best, np.append(best[:-1], 1.0)]))
    first, second = scale.back(mean)
    return float(second - first), scale.unit * math.sqrt(
        max(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1], 0.0)
    )
