"""What a study's author expects of the optimum, under `prior:`: where first points lie, and a weight of candidates that fades.

    w(x) = max(π(x)^s, 1/e),  s = exp(-n / 5) · (1 + 2 r, from 0 to 1)
    π(x) = prod_j (1 + z_j² / ν)^(-(ν + 1)/2),  z_j = (x_j - best_j) / std_j

after n trials, whose scores correlate by r with ln π: where trials near the best are the worse ones, the prior is refuted.
A better place far away keeps its chance by the tails of Student's t, and since no weight is below 1/e.

Source: weights of an acquisition function that fade are those of Hvarfner et al. 2022 (πBO, arXiv 2204.11051),
π(x)^(β/n) there. That, and a prior mean of the score's process, cost more where the prior is wrong (docs/decisions/0069).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from ...analysis.gaussian_process import Array
from ..space_transform import SpaceTransform

# Trials after which the logarithm of the weight has fallen to 1/e of itself.
_LASTS = 5.0
# Trials from which their correlation with the prior says something, and a correlation at which it is as good as refuted.
_FEWEST, _AGAINST = 3, 0.5
# ν: degrees of freedom of Student's t.
_FREEDOM = 3.0
# z of a parameter that does not apply: where its density is the geometric mean of its own distribution.
_NOWHERE = 1.19
# Whoever is surer of a value than a thousandth of its range is not: a standard deviation of 0 has no density.
_LEAST_STD = 1e-3
# Standard deviations from the middle of a normal distribution to the ends between which nine in ten of it lie.
_NINE_IN_TEN = 1.645


@dataclass(frozen=True)
class OptimumPrior:
    """Independent distributions of the optimum's coordinates in the unit cube.

    Args:
        places: (p,), coordinates that have a prior.
        best, std: (p,), middle and standard deviation of each.
        conditional: (p,), whether the parameter does not always apply; its coordinate is then in the middle.
    """

    places: np.ndarray[Any, np.dtype[np.int64]]
    best: Array
    std: Array
    conditional: np.ndarray[Any, np.dtype[np.bool_]]

    @classmethod
    def of(
        cls, transform: SpaceTransform, expected: Mapping[str, tuple[float, float]]
    ) -> OptimumPrior | None:
        """The prior of a space; None without any.

        Args:
            expected: by parameter, its best value and the upper end of where it lies nine times in ten.
        """
        known = {name: ends for name, ends in expected.items() if name in transform.space}
        if not known:
            return None
        places = np.array([transform.place(name) for name in known])
        best, upper = np.array(
            [[transform.coordinate(name, value) for value in ends] for name, ends in known.items()]
        ).T
        # Beyond the batches that can be planned, the nearest one is expected to be best.
        std, best = np.maximum((upper - best) / _NINE_IN_TEN, _LEAST_STD), np.clip(best, 0.0, 1.0)
        return cls(places, best, std, np.array([name in transform.conditions for name in known]))

    def knows(self, place: int) -> bool:
        """Whether a coordinate has a prior."""
        return place in self.places

    def drawn(self, points: Array, rng: np.random.Generator) -> Array:
        """The points (n, width) with the coordinates of the prior drawn from it, inside the cube."""
        low, high = ndtr((0 - self.best) / self.std), ndtr((1 - self.best) / self.std)
        shares = rng.uniform(low, high, (len(points), len(self.places)))
        moved = points.copy()
        moved[:, self.places] = np.clip(self.best + self.std * ndtri(shares), 0.0, 1.0)
        return moved

    def log_density(self, points: Array) -> Array:
        """Of the optimum at points (n, width), (n,): 0 at the best."""
        z = (points[:, self.places] - self.best) / self.std
        z[self.conditional & (points[:, self.places] == 0.5)] = _NOWHERE
        return np.asarray(-(_FREEDOM + 1) / 2 * np.log1p(z**2 / _FREEDOM).sum(axis=1))

    def strength(self, points: Array, score: Array, ended: int) -> float:
        """How much of the prior counts after so many trials, from 1 down: less where trials near the best are the worse ones.

        Args:
            points, score: (n, width) and (n,), of trials.
        """
        density = self.log_density(points)
        if len(points) < _FEWEST or np.ptp(density) == 0 or np.ptp(score) == 0:
            agrees = 0.0
        else:
            agrees = float(np.corrcoef(density, score)[0, 1])
        return math.exp(-ended / _LASTS) * min(max(1 + agrees / _AGAINST, 0.0), 1.0)

    def weights(self, points: Array, strength: float) -> Array:
        """What improvements at points (n, width) are multiplied by, (n,): from 1/e to 1."""
        return np.asarray(np.exp(np.maximum(self.log_density(points) * strength, -1.0)))
