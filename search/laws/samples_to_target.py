"""The law of samples to a target: how many samples a training needs at each effective batch, with intervals.

    S(B) = floor · (1 + (B / c)^k)^(q / k)

Below the knee c the batch costs nothing, above it samples grow like B^q; k says how sharp the knee is. McCandlish et al. 2018
(arXiv 1812.06162) have k = q = 1; measured workloads bend more sharply, and often grow more slowly than the batch.

The posterior is a weighted grid over c, k, q, the spread of settings around the law, and that of the levels of groups; levels
are integrated in closed form. Two measured points at one batch differ by their seeds, which the runs show, by the resolution of
what was counted, and by their other hyperparameters, which is the spread.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...spaces.errors import Fault, StudyFileError, cut
from ..analysis.gaussian_process import Array
from ..analysis.rates import Estimate

# The grid, and what is expected beforehand of each: means and standard deviations, of k and the spread on a log scale.
_SHARPNESS, _GROWTH = (0.5, 1.0, 2.0, 4.0), (0.35, 0.5, 0.7, 0.85, 1.0, 1.15)
_SPREADS, _LEVELS = tuple(float(spread) for spread in np.geomspace(0.01, 0.5, 16)), (0.01, 0.1, 0.4, 1.5)
_OF_SHARPNESS, _OF_GROWTH, _OF_SPREAD, _OF_LEVELS = (0.0, 0.7), (0.9, 0.25), (0.06, 1.0), (0.1, 2.0)
# Knees lie from this far below the smallest to this far above the largest batch, in natural logarithms; and their number.
_BELOW, _ABOVE, _KNEES = 2.0, 3.0, 120
# Variance of the level beforehand, around the measured mean; the draws of the posterior, and their seed.
_VAGUE, _DRAWS, _SEED = 25.0, 4000, 0
# The standard error of a median of normal values, over that of their mean.
_OF_MEDIAN = 1.2533
# Batches without which there is no law.
LEAST_BATCHES = 3


@dataclass(frozen=True, slots=True)
class RunsToTarget:
    """What runs of one setting needed to reach the target.

    Args:
        effective_batch: of all of them.
        samples: of each run, > 0: samples, epochs, or any other count of data.
        group: of settings that share a level, such as one version of a benchmark.
    """

    effective_batch: int
    samples: tuple[float, ...]
    group: str = ""

    @property
    def median(self) -> float:
        return float(np.median(self.samples))


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

    def floor(self, group: str | None = None) -> Estimate:
        """The number of samples however small the batch."""
        return Estimate.of(np.exp(self.levels[group]))

    def critical_batch(self) -> Estimate:
        """The batch that needs twice as many samples as the smallest."""
        return Estimate.of(self.knee * (2.0 ** (self.sharpness / self.growth) - 1) ** (1 / self.sharpness))

    def samples_at(self, effective_batch: float, group: str | None = None) -> Estimate:
        """The median that a setting at this batch would need, with what settings differ by."""
        times = self.growth / self.sharpness * np.logaddexp(0.0, self.sharpness * np.log(effective_batch / self.knee))
        around = np.random.default_rng(_SEED).standard_normal(len(times)) * self.spread
        return Estimate.of(np.exp(self.levels[group] + times + around))

    def covers(self, effective_batch: float) -> bool:
        """Whether a batch lies among the measured ones; elsewhere the interval rests on the prior."""
        return self.batches[0] <= effective_batch <= self.batches[1]


def fit_batch_law(points: Sequence[RunsToTarget]) -> BatchLaw:
    """The law that measured points follow.

    Raises:
        ValueError: at fewer than three batches.
    """
    batches = np.array([float(point.effective_batch) for point in points])
    if len(set(batches)) < LEAST_BATCHES:
        raise ValueError(f"expected at least {LEAST_BATCHES} different batches, got {len(set(batches))}")
    logs, middle = np.log([point.median for point in points]), float(np.mean(np.log([point.median for point in points])))
    errors = _errors(points)
    groups: list[str | None] = [*sorted({point.group for point in points}), None]
    of_group = np.array([groups.index(point.group) for point in points])
    same = (of_group[:, None] == of_group[None, :]).astype(float)

    ends = math.log(batches.min()) - _BELOW, math.log(batches.max()) + _ABOVE
    knees, sharpness, growth = (axis.ravel() for axis in np.meshgrid(np.linspace(*ends, _KNEES), _SHARPNESS, _GROWTH))
    times = growth / sharpness * np.logaddexp(0.0, sharpness * (np.log(batches)[:, None] - knees))  # (n, grid)
    residuals = logs[:, None] - middle - times
    prior = _log_normal(np.log(sharpness), _OF_SHARPNESS) + _log_normal(growth, _OF_GROWTH)

    weights, means, variances, spreads = [], [], [], []
    for level in _LEVELS:
        # Of the group's levels: with the points, (groups, n), and among themselves.
        towards = _VAGUE + level**2 * (np.arange(len(groups))[:, None] == of_group[None, :])
        for spread in _SPREADS:
            factor = np.linalg.cholesky(_VAGUE + level**2 * same + np.diag(spread**2 + errors**2))
            whitened, cross = np.linalg.solve(factor, residuals), np.linalg.solve(factor, towards.T)  # (n, grid), (n, groups)
            fit = -0.5 * (whitened**2).sum(0) - np.log(np.diag(factor)).sum()
            of_spreads = (
                (np.log(spread), math.log(_OF_SPREAD[0]), _OF_SPREAD[1]),
                (np.log(level), math.log(_OF_LEVELS[0]), _OF_LEVELS[1]),
            )
            weights.append(fit + prior + sum(_log_normal(value, (mean, std)) for value, mean, std in of_spreads))
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
        counted = np.unique([value for other in points if other.group == point.group for value in other.samples])
        step = float(np.diff(counted).min()) if len(counted) > 1 else 0.0
        if step and not np.allclose(counted / step, np.round(counted / step), atol=1e-3):
            step = 0.0  # not counted in such steps
        errors.append(math.hypot(of_runs, step / math.sqrt(12) / point.median))
    return np.array(errors)


def _log_normal(value: Array | float, prior: tuple[float, float]) -> Array:
    """The logarithm of a normal density, up to a constant."""
    return np.asarray(-0.5 * ((value - prior[0]) / prior[1]) ** 2)


# Column names of a table of runs: what is read from each, by the names it may have.
_COLUMNS = {
    "effective_batch": ("effective_batch", "batch_size", "batch"),
    "to_target": ("to_target", "samples_to_target", "samples"),
    "workload": ("workload",),
    "group": ("group", "round"),
}


# What no batch and no number of samples reaches.
_LARGEST = 2**60


def _whole(text: str) -> int:
    """An integer, also as 256.0, which a table of floats has."""
    value = float(text)
    if not value.is_integer():
        raise ValueError
    return int(value)


def read_runs(path: Path) -> dict[str, list[RunsToTarget]]:
    """The measured points of each workload in a CSV table.

    Columns are `effective_batch`, `to_target` (one number, or several of as many runs, separated by spaces), and optionally
    `workload` and `group`. Rows of the same workload, batch and group are one point where each has one run.

    Raises:
        StudyFileError: it cannot be read; with every fault, by row.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StudyFileError(f"{path}: cannot be read as a CSV table: {error}") from None
    header = [name for name in (rows[0] if rows else ()) if name is not None]
    named = {what: next((name for name in names if name in header), None) for what, names in _COLUMNS.items()}
    if missing := [what for what in ("effective_batch", "to_target") if named[what] is None]:
        found = ", ".join(header) or "no rows"
        raise StudyFileError([Fault(str(path), f"expected a column {what}, got {found}") for what in missing])
    faults: list[Fault] = []
    single: dict[tuple[str, str, int], list[float]] = {}
    points: dict[str, list[RunsToTarget]] = {}
    for number, row in enumerate(rows, start=2):
        cells = {what: (row.get(name or "") or "").strip() for what, name in named.items()}
        try:
            batch, runs = _whole(cells["effective_batch"]), [float(value) for value in cells["to_target"].split()]
            if not 1 <= batch <= _LARGEST or not runs or not all(1 / _LARGEST <= value <= _LARGEST for value in runs):
                raise ValueError
        except ValueError:
            got = f"{cells['effective_batch']!r} and {cut(cells['to_target'], 60)!r}"
            what = (
                f"expected a batch of at least 1 and numbers above 0, got {got}. Leave out runs that did not reach the target."
            )
            faults.append(Fault(f"{path}, row {number}", what))
            continue
        if len(runs) == 1:
            single.setdefault((cells["workload"], cells["group"], batch), []).extend(runs)
        else:
            points.setdefault(cells["workload"], []).append(RunsToTarget(batch, tuple(runs), cells["group"]))
    if faults:
        raise StudyFileError(faults)
    for (workload, group, batch), runs in single.items():
        points.setdefault(workload, []).append(RunsToTarget(batch, tuple(runs), group))
    return points
