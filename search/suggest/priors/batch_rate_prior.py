"""What is known of batches and learning rates before any trial, as the prior of the sampler's processes.

The best rate moves with the batch along a ridge whose slope is nearly known (about 0 if a rule scales it, else about 0.7 on
log scales), and score falls off similarly on both sides of it on all tasks. Coordinates are natural logarithms, so that a
length means the same whatever the searched range.

    z = (u − ½) · ln(high / low);  z_rate −= slope · z_batch,  slope ~ N(mean, std), fitted along with the length scales
    y ~ GP(−¼ · z_rate² / 2,  Matérn-5/2(z) + ΦΦᵀ),  Φ the features below
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...analysis.gaussian_process import Array, Structure
from ..space_transform import SpaceTransform

BATCH, RATES = "effective_batch", ("reference_rate", "learning_rate")

# Slope of the best log rate over the log batch, mean and standard deviation: of a rate that a rule scales, and of one as it is.
SCALED, BARE = (0.0, 0.25), (0.7, 0.25)

# Of log length scales, mean and standard deviation: batch, rate, others; and of the log noise variance.
_SCORE = (1.1, 0.7), (0.7, 0.7), (0.0, 0.8), (-8.0, 1.5)
_SECONDS = (1.5, 0.7), (3.5, 0.5), (0.5, 0.7), (-6.0, 1.5)

# How much score falls with the squared distance from the ridge.
_FALL = 0.25


@dataclass(frozen=True)
class BatchRate:
    """Where batch and rate lie in a space, both on log scales.

    Args:
        batch, rate: their coordinates.
        widths: (width,), natural logarithm of high / low for these two, 1 for others.
        slope: mean and standard deviation of the ridge's.
    """

    batch: int
    rate: int
    widths: Array
    slope: tuple[float, float]

    @classmethod
    def of(cls, transform: SpaceTransform, scaled: bool = True) -> BatchRate | None:
        """The batch and rate of a space; None unless it searches both on log scales.

        Args:
            scaled: a rule scales `reference_rate` with the batch.
        """
        places = transform.log_coordinates()
        rate = next((name for name in RATES if name in places), None)
        if BATCH not in places or rate is None:
            return None
        widths = np.ones(transform.width)
        (batch, widths[places[BATCH][0]]), (at, widths[places[rate][0]]) = places[BATCH], places[rate]
        return cls(batch, at, widths, SCALED if scaled and rate == "reference_rate" else BARE)

    def on_ridge(self, points: Array, rng: np.random.Generator) -> Array:
        """Points (n, width) with rates near the ridge through the middle of the space."""
        moved = points.copy()
        ratio = self.widths[self.batch] / self.widths[self.rate]
        ridge = 0.5 + self.slope[0] * (points[:, self.batch] - 0.5) * ratio
        moved[:, self.rate] = np.clip(ridge + rng.normal(0.0, 0.08, len(points)), 0.02, 0.98)
        return moved


class _Prior(Structure):
    """Coordinates, and length scales by the kind of coordinate."""

    def __init__(self, place: BatchRate, scales: tuple[tuple[float, float], ...]) -> None:
        self.place = place
        batch, rate, other, self.noise = scales
        width = len(place.widths)
        self.others = [column for column in range(width) if column not in (place.batch, place.rate)]
        each = [
            batch if column == place.batch else rate if column == place.rate else other
            for column in range(width)
        ]
        self.means, self.stds = (np.array([pair[part] for pair in each]) for part in (0, 1))

    def coordinates(self, points: Array, free: Array) -> Array:
        return np.asarray((points - 0.5) * self.place.widths)


class ScorePrior(_Prior):
    """Of score on the `ScoreScale`; the last free parameter is the ridge's slope."""

    def __init__(self, place: BatchRate) -> None:
        super().__init__(place, _SCORE)
        self.sheared = place.rate, place.batch
        self.means = np.append(self.means, place.slope[0])
        self.stds = np.append(self.stds, place.slope[1])

    def coordinates(self, points: Array, free: Array) -> Array:
        z = super().coordinates(points, free)
        z[:, self.place.rate] -= free[-1] * z[:, self.place.batch]
        return z

    def features(self, z: Array) -> Array:
        b, r = z[:, self.place.batch], z[:, self.place.rate]
        ours = np.stack([np.full(len(z), 0.5), 0.4 * r, 0.4 * b, 0.15 * r**2, 0.1 * b**2], axis=1)
        return np.hstack([ours, 0.7 * z[:, self.others]])

    def mean(self, z: Array) -> Array:
        return np.asarray(-_FALL * z[:, self.place.rate] ** 2 / 2)

    def features_by_slope(self, z: Array) -> Array:
        b, r = z[:, self.place.batch], z[:, self.place.rate]
        zero = np.zeros(len(z))
        ours = np.stack([zero, -0.4 * b, zero, -0.3 * r * b, zero], axis=1)
        return np.hstack([ours, np.zeros((len(z), len(self.others)))])

    def mean_by_slope(self, z: Array) -> Array:
        return np.asarray(_FALL * z[:, self.place.rate] * z[:, self.place.batch])


class SecondsPrior(_Prior):
    """Of log seconds, which hardly depend on the rate."""

    def __init__(self, place: BatchRate) -> None:
        super().__init__(place, _SECONDS)

    def features(self, z: Array) -> Array:
        b = z[:, self.place.batch]
        return np.hstack([np.stack([np.full(len(z), 0.5), 0.5 * b, 0.075 * b**2], axis=1), z[:, self.others]])


# Where first points lie: the share of the way from the slowest to the fastest, in log seconds; without known seconds, batches.
# Where more are asked for side by side, the others lie anywhere.
_SHARES, _BATCHES = (0.7, 0.1, 0.4), (0.5, 0.15, 0.85)
# Random points to choose them from, and how many of the nearest may be chosen where there are more parameters.
DRAWN, _NEAREST = 512, 8


# Where trials are paused, two more: fast ones at a high and a low rate. So little is known of such rates by then that they are
# not paused, and show early whether curves of different rates cross.
_ANCHOR_RATES, _FASTEST = (0.85, 0.15), 0.1
ANCHORS = len(_ANCHOR_RATES)


def first_points(known: bool) -> int:
    """Trials that are spread over the space before the model is asked, without anchors."""
    return 2 if known else 3


def first_point(
    place: BatchRate,
    points: Array,
    log_seconds: Array | None,
    number: int,
    parameters: int,
    rng: np.random.Generator,
    *,
    anchors: bool = False,
    on_ridge: bool = True,
) -> Array:
    """One of the first points (width,): spread over times, or over batches, with a rate on the ridge.

    Args:
        points: (n, width), random ones that can be planned.
        log_seconds: (n,) by a law; None: there is none.
        number: of first points so far.
        parameters: searched.
        anchors: trials are paused, so anchors follow.
        on_ridge: else the rate stays as drawn, where its author expects it.
    """
    anchor = number - first_points(log_seconds is not None)
    if anchors and 0 <= anchor < ANCHORS:
        chosen = points[0].copy()
        if log_seconds is None:
            chosen[place.batch] = 1 - _FASTEST  # large batches are fast
        else:
            fastest = np.argsort(log_seconds)[: max(1, round(_FASTEST * len(points)))]
            chosen = points[int(rng.choice(fastest))].copy()
        chosen[place.rate] = _ANCHOR_RATES[anchor] + rng.normal(0.0, 0.04)
        return np.asarray(np.clip(chosen, 0.0, 1.0))
    if log_seconds is None:
        chosen = points[0].copy()
        if number < len(_BATCHES):
            chosen[place.batch] = _BATCHES[number]
    else:
        share = _SHARES[number] if number < len(_SHARES) else rng.random()
        wanted = log_seconds.max() - share * (log_seconds.max() - log_seconds.min())
        near = np.argsort(np.abs(log_seconds - wanted))[: _NEAREST if parameters > 2 else 1]
        chosen = points[int(rng.choice(near))]
    return np.asarray(place.on_ridge(chosen[None, :], rng)[0] if on_ridge else chosen)
