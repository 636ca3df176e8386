"""Problems that cost nothing to run: what the trials of a search would have measured.

- digits, cifar: measured trainings (benchmarks/tables.py, stored in benchmarks/data/): a setting is looked up at its
  nearest neighbour; seconds are the median over rates and seeds, a trial's curve is that of one of three seeds, and its
  true accuracy is their mean.
- laws: synthetic tasks: steps to learn S = S_min (1 + B_crit / B), a best rate that depends on the batch, step times with
  tiles, width and epochs that cost time; accuracy with noise of 1 %.
- late: of those tables, the batches at which early and final ranks disagree most.
- crossing2, crossing4: laws of two and four parameters whose curves cross: the best rates look bad at a third of a training.
- zeus: six workloads measured for Zeus (NSDI 2023, https://github.com/ml-energy/zeus), each on every GPU with at least four
  measured batch sizes, at that GPU's highest power limit. Only the batch size is searched, the rate follows a
  rule: seconds of one epoch against epochs to the paper's target, relative to the fewest. A trial gets a random run.
  Read from the folder `zeus` of $BSEARCH_DATA.
- lcbench: networks on tabular data, eight parameters, by a surrogate (benchmarks/lcbench.py).

`digits@16`, `cifar@8`, `lcbench@52` have that number of epochs in every trial. lcbench@52 has four parameters: batch, rate,
weight decay and dropout, and lcbench-size@52 batch, rate, layers and units.
"""

from __future__ import annotations

import csv
import gzip
import math
import os
import statistics
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

DATA = Path(__file__).parent / "data"
FRACTIONS = 10
WORKERS = 4  # in parallel, in simulated time
# Target metric of each dataset in the Zeus paper; word error rate in % for librispeech, otherwise higher is better.
ZEUS_TARGETS = {
    "cifar100": 0.6,
    "imagenet": 0.65,
    "librispeech": 40,
    "movielens-1m": 0.41,
    "sentiment140": 0.84,
    "squad": 84,
}
ZEUS_GPUS = ("v100", "a40", "p100", "rtx6000")


class Problem(ABC):
    """A search space, what a trial in it would measure, and all settings behind the true front."""

    space: dict[str, BaseDistribution]
    lowest: float  # accuracy of the reference point

    def domains(self) -> dict[str, dict[str, Any]]:
        """The space as a study file has it."""
        return {name: {"low": one.low, "high": one.high, "log": one.log} for name, one in self.space.items()}  # type: ignore[attr-defined]

    @abstractmethod
    def seconds(self, parameters: Mapping[str, Any]) -> float: ...

    @abstractmethod
    def accuracy(self, parameters: Mapping[str, Any]) -> float:
        """Mean accuracy of a setting."""

    @abstractmethod
    def curve(self, parameters: Mapping[str, Any], rng: np.random.Generator) -> list[float]:
        """Accuracies of one training at each tenth of its budget."""

    def everything(self) -> list[tuple[float, float]]:
        """(seconds, accuracy) of every setting, or of enough settings to approximate the true front."""
        rng = np.random.default_rng(1)
        settings = [{name: random_value(one, rng) for name, one in self.space.items()} for _ in range(40_000)]
        return [(self.seconds(one), self.accuracy(one)) for one in settings]

    def mean_seconds(self) -> float:
        """Mean seconds of a random setting: the unit of equal time."""
        rng = np.random.default_rng(2)
        settings = [{name: random_value(one, rng) for name, one in self.space.items()} for _ in range(2000)]
        return statistics.fmean(self.seconds(one) for one in settings)


def random_value(distribution: Any, rng: np.random.Generator) -> float:
    low, high = distribution.low, distribution.high
    value = (
        math.exp(rng.uniform(math.log(low), math.log(high))) if distribution.log else rng.uniform(low, high)
    )
    return round(value) if isinstance(distribution, IntDistribution) else value


class Table(Problem):
    """Measured trainings, looked up at their nearest neighbour."""

    def __init__(self, name: str, lowest: float, least_batch: int = 0, epochs: str = "") -> None:
        self.lowest = lowest
        with gzip.open(DATA / f"{name}.csv.gz", "rt") as file:
            rows = [row for row in csv.DictReader(file) if int(row["effective_batch"]) >= least_batch]
        if epochs:
            rows = [row for row in rows if row.pop("epochs") == epochs]
        self.names = [key for key in rows[0] if key not in ("seed", "train_s", "curve")]
        self.curves: dict[tuple[float, ...], list[list[float]]] = {}
        taken: dict[tuple[float, ...], list[float]] = {}
        for row in rows:
            key = tuple(float(row[name]) for name in self.names)
            curve = [float(value) for value in row["curve"].split()]
            self.curves.setdefault(key, []).append(curve or [0.0] * FRACTIONS)
            if curve:
                taken.setdefault(self._cost(key), []).append(float(row["train_s"]))
        self.taken = {key: statistics.median(values) for key, values in taken.items()}
        self.grid = [sorted({key[place] for key in self.curves}) for place in range(len(self.names))]
        self._middles = [[math.sqrt(low * high) for low, high in pairwise(grid)] for grid in self.grid]
        self.space = {
            name: FloatDistribution(grid[0], grid[-1], log=True)
            if name == "reference_rate"
            else IntDistribution(int(grid[0]), int(grid[-1]), log=True)
            for name, grid in zip(self.names, self.grid, strict=True)
        }

    def _cost(self, key: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value for name, value in zip(self.names, key, strict=True) if name != "reference_rate")

    def _nearest(self, parameters: Mapping[str, Any]) -> tuple[float, ...]:
        return tuple(
            grid[bisect(middles, parameters[name])]
            for name, grid, middles in zip(self.names, self.grid, self._middles, strict=True)
        )

    def seconds(self, parameters: Mapping[str, Any]) -> float:
        return self.taken[self._cost(self._nearest(parameters))]

    def accuracy(self, parameters: Mapping[str, Any]) -> float:
        return statistics.fmean(curve[-1] for curve in self.curves[self._nearest(parameters)])

    def curve(self, parameters: Mapping[str, Any], rng: np.random.Generator) -> list[float]:
        curves = self.curves[self._nearest(parameters)]
        return curves[int(rng.integers(len(curves)))]

    def everything(self) -> list[tuple[float, float]]:
        return [
            (self.taken[self._cost(key)], statistics.fmean(curve[-1] for curve in curves))
            for key, curves in self.curves.items()
        ]


class Laws(Problem):
    """A synthetic task; its seed draws the constants of the laws."""

    lowest = 0.1
    samples = 20_000
    space = {
        "effective_batch": IntDistribution(8, 2048, log=True),
        "reference_rate": FloatDistribution(1e-3, 1.0, log=True),
        "epochs": IntDistribution(1, 20, log=True),
        "width": IntDistribution(16, 128, log=True),
    }

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.critical = math.exp(rng.uniform(math.log(50), math.log(2000)))
        self.exponent, self.rate = rng.uniform(0.4, 1.0), math.exp(rng.uniform(math.log(0.02), math.log(0.3)))
        self.curvature, self.best, self.steps = (
            rng.uniform(0.05, 0.25),
            rng.uniform(0.7, 0.98),
            rng.uniform(30, 300),
        )
        self.fixed_ms, self.sample_ms = rng.uniform(0.2, 2), math.exp(rng.uniform(-5, -3))
        self.tile = int(rng.choice([1, 16, 64]))

    def seconds(self, parameters: Mapping[str, Any]) -> float:
        batch = parameters["effective_batch"]
        computed = math.ceil(batch / self.tile) * self.tile
        step_ms = self.fixed_ms + self.sample_ms * computed * (parameters["width"] / 48) ** 1.3
        return parameters["epochs"] * self.samples / batch * step_ms * 1e-3

    def _away(self, parameters: Mapping[str, Any]) -> float:
        batch = parameters["effective_batch"]
        best_rate = min(self.rate * (batch / 256) ** self.exponent, 0.5)
        return math.log(parameters["reference_rate"] * math.sqrt(batch / 256) / best_rate)

    def _learned(self, parameters: Mapping[str, Any], fraction: float = 1.0) -> float:
        batch = parameters["effective_batch"]
        steps = fraction * parameters["epochs"] * self.samples / batch / (1 + self.critical / batch)
        return 1 - math.exp(-math.sqrt(steps / self.steps))

    def accuracy(self, parameters: Mapping[str, Any]) -> float:
        away = self._away(parameters)
        if away > 2.5:
            return 0.1 + 0.05 * math.exp(-away)  # diverged
        lost = 0.1 * self.curvature * away**2 * (2 if away > 0 else 1)
        most = self.best * (1 - 0.075 * math.sqrt(48 / parameters["width"]))
        return max(0.1, most * self._learned(parameters) - lost)

    def curve(self, parameters: Mapping[str, Any], rng: np.random.Generator) -> list[float]:
        final, away = self.accuracy(parameters), self._away(parameters)
        # The end of a schedule gains more after a higher rate.
        late = 0.15 / (1 + math.exp(-away))
        part = [
            self._learned(parameters, (tenth + 1) / FRACTIONS) / self._learned(parameters)
            for tenth in range(FRACTIONS)
        ]
        held = [1 - late * (1 - (tenth + 1) / FRACTIONS) ** 0.7 for tenth in range(FRACTIONS)]
        noise = 0.01 * rng.standard_normal(FRACTIONS)
        return [
            0.1 + (final - 0.1) * one * other + more
            for one, other, more in zip(part, held, noise, strict=True)
        ]


class OddLaws(Laws):
    """Laws that a prior on batch and rate does not expect: ridges that stand still, rise steeply, fall, or lie at an edge."""

    kinds = ("still", "steep", "falling", "low", "high")

    def __init__(self, seed: int, kind: str) -> None:
        super().__init__(seed)
        self.exponent = {"still": 0.0, "steep": 1.5, "falling": -0.5}.get(kind, self.exponent)
        self.rate = {"low": 1.5e-3, "high": 0.9}.get(kind, self.rate)

    def _away(self, parameters: Mapping[str, Any]) -> float:
        batch = parameters["effective_batch"]
        return math.log(
            parameters["reference_rate"]
            * math.sqrt(batch / 256)
            / (self.rate * (batch / 256) ** self.exponent)
        )


class CrossingLaws(Laws):
    """Laws whose curves cross: the higher the rate, the more of the accuracy comes at the end of the schedule.

    The best rates look bad at a third of their training, as under long cosine schedules.

    Args:
        parameters: of the space, in its order; the others are fixed.
    """

    fixed = {"epochs": 6, "width": 48}

    def __init__(self, seed: int, parameters: int) -> None:
        super().__init__(seed)
        self.space = dict(list(Laws.space.items())[:parameters])

    def seconds(self, parameters: Mapping[str, Any]) -> float:
        return super().seconds({**self.fixed, **parameters})

    def accuracy(self, parameters: Mapping[str, Any]) -> float:
        return super().accuracy({**self.fixed, **parameters})

    def curve(self, parameters: Mapping[str, Any], rng: np.random.Generator) -> list[float]:
        final, away = self.accuracy(parameters), self._away(parameters)
        late = 0.7 / (1 + math.exp(-2 * away - 1))
        held = [1 - late * (1 - (tenth + 1) / FRACTIONS) ** 0.7 for tenth in range(FRACTIONS)]
        noise = 0.01 * rng.standard_normal(FRACTIONS)
        return [0.1 + (final - 0.1) * one + more for one, more in zip(held, noise, strict=True)]


class Zeus(Problem):
    """One workload of Zeus on one GPU: which batch size.

    Accuracy is 1 for a run that needs as few epochs as any run at any of the batch sizes, 1/2 for twice as many, 0 for one
    that never reaches the target; seconds are those of one epoch, so seconds / accuracy is proportional to the time to the
    target. Curves carry no information: they are 0 until the end, so early stopping has nothing to learn from them.
    """

    lowest = 0.0

    def __init__(self, epoch_s: Mapping[int, float], epochs: Mapping[int, list[float]]) -> None:
        """Take the seconds of an epoch, and the epochs to the target of every run (NaN: never), by batch size."""
        fewest = min(one for batch in epoch_s for one in epochs[batch] if not math.isnan(one))
        self.taken = {batch: epoch_s[batch] for batch in sorted(epoch_s)}
        self.runs = {
            batch: [0.0 if math.isnan(one) else fewest / one for one in epochs[batch]] for batch in self.taken
        }
        self.space = {"effective_batch": IntDistribution(min(self.taken), max(self.taken), log=True)}

    def _nearest(self, parameters: Mapping[str, Any]) -> int:
        return min(self.taken, key=lambda one: abs(math.log(one / parameters["effective_batch"])))

    def seconds(self, parameters: Mapping[str, Any]) -> float:
        return self.taken[self._nearest(parameters)]

    def accuracy(self, parameters: Mapping[str, Any]) -> float:
        return statistics.fmean(self.runs[self._nearest(parameters)])

    def curve(self, parameters: Mapping[str, Any], rng: np.random.Generator) -> list[float]:
        runs = self.runs[self._nearest(parameters)]
        return [0.0] * (FRACTIONS - 1) + [runs[int(rng.integers(len(runs)))]]

    def everything(self) -> list[tuple[float, float]]:
        return [(seconds, statistics.fmean(self.runs[batch])) for batch, seconds in self.taken.items()]


def zeus_problems(folder: Path) -> list[Problem]:
    """Every workload and GPU with enough batch sizes for which both epochs and seconds were measured."""

    def rows(name: str) -> list[dict[str, str]]:
        with (folder / f"{name}.csv").open() as file:
            return list(csv.DictReader(file))

    epochs: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in rows("summary_train"):
        if float(row["target_metric"]) == ZEUS_TARGETS[row["dataset"]]:
            runs = epochs.setdefault((row["dataset"], row["optimizer"]), {})
            runs.setdefault(int(row["batch_size"]), []).append(float(row["target_epoch"]))
    found: list[Problem] = []
    for gpu in ZEUS_GPUS:
        power = rows(f"summary_power_{gpu}")
        highest = max(float(row["power_limit"]) for row in power)
        for workload, runs in epochs.items():
            epoch_s = {
                int(row["batch_size"]): float(row["time_per_epoch"])
                for row in power
                if (row["dataset"], row["optimizer"]) == workload and float(row["power_limit"]) == highest
            }
            both = {batch: seconds for batch, seconds in epoch_s.items() if batch in runs}
            if len(both) >= 4:
                found.append(Zeus(both, runs))
    return found


def problems(family: str) -> list[Problem]:
    """A family's problems; empty if its data are missing."""
    name, _, epochs = family.partition("@")
    match name:
        case "digits":
            return [Table("digits", 0.5, epochs=epochs)]
        case "cifar":
            return [Table("cifar", 0.15, epochs=epochs)]
        case "digits-wsd" | "cifar-wsd":
            return [Table(name, 0.5 if name == "digits-wsd" else 0.15, epochs=epochs)]
        case "late":
            # Of both tables, the batches where ranks at a third of a training and at its end disagree most.
            return [Table("digits", 0.5, least_batch=353), Table("cifar", 0.15, least_batch=1000)]
        case "crossing2" | "crossing4":
            return [CrossingLaws(seed, int(family[-1])) for seed in range(4)]
        case "laws":
            return [Laws(seed) for seed in range(4)]
        case "odd":
            return [OddLaws(seed, kind) for kind in OddLaws.kinds for seed in (10, 11)]
        case "zeus":
            folder = Path(os.environ.get("BSEARCH_DATA", "")) / "zeus"
            return zeus_problems(folder) if folder.is_dir() else []
        case "lcbench" | "lcbench-size":
            # Onnxruntime reads it, which the other problems do not need.
            from lcbench import (
                RECIPE,
                SIZE,
                lcbench_problems,
            )

            folder = Path(os.environ.get("BSEARCH_DATA", "")) / "lcbench"
            fixed = {"epochs": int(epochs)} | (SIZE if name == "lcbench" else RECIPE) if epochs else {}
            return lcbench_problems(folder, fixed=fixed) if folder.is_dir() else []
    raise ValueError(family)


def hypervolume(points: list[tuple[float, float]], fastest: float, slowest: float, lowest: float) -> float:
    """Area in log seconds and accuracy that the points dominate."""
    area, best = 0.0, lowest
    for seconds, accuracy in sorted(points):
        if accuracy > best:
            area += (accuracy - best) * max(0.0, math.log(slowest) - math.log(max(seconds, fastest)))
            best = accuracy
    return area


class Share:
    """The share of a problem's true hypervolume that some points reach."""

    def __init__(self, problem: Problem) -> None:
        every = problem.everything()
        self.ends = min(seconds for seconds, _ in every), max(seconds for seconds, _ in every), problem.lowest
        self.whole = hypervolume(every, *self.ends)

    def of(self, points: list[tuple[float, float]]) -> float:
        return hypervolume(points, *self.ends) / self.whole


class Decision:
    """What people take: the fastest setting within so much of the best.

    Tolerances are shares of the range of accuracies that the true front has, above the reference point; `top` is the
    hypervolume above the best less a fifth of that range.
    """

    TOLERANCES = 0.02, 0.05, 0.1

    def __init__(self, problem: Problem) -> None:
        every = sorted(problem.everything(), key=lambda point: (point[0], -point[1]))
        best = max(accuracy for _, accuracy in every)
        spread = best - max(every[0][1], problem.lowest)
        self.levels = [best - share * spread for share in self.TOLERANCES]
        self.fastest_s = [
            min(seconds for seconds, accuracy in every if accuracy >= level) for level in self.levels
        ]
        self.floor = best - 0.2 * spread
        self._ends = every[0][0], max(seconds for seconds, _ in every), self.floor
        self._top = hypervolume(every, *self._ends)

    def of(self, points: list[tuple[float, float]]) -> list[float]:
        """By tolerance, whether any is within it, then log of the seconds of the fastest such over the true one's (NaN: none);
        and the share of `top`."""
        within = [[seconds for seconds, accuracy in points if accuracy >= level] for level in self.levels]
        logs = [
            math.log(min(some) / true) if some else math.nan
            for some, true in zip(within, self.fastest_s, strict=True)
        ]
        # Where one setting is best and fastest.
        top = hypervolume(points, *self._ends) / self._top if self._top else math.nan
        return [*map(float, map(bool, within)), *logs, top]


def decision_rows(decided: np.ndarray) -> str:
    """`Decision.of` of searches, (searches, columns, 7), as two rows."""
    with np.errstate(invalid="ignore"):
        means = np.nansum(decided, axis=0) / np.isfinite(decided).sum(axis=0)
    reached = [" ".join(f"{100 * one:.0f}" for one in column[:3]) for column in means]
    times = [f"{math.exp(column[4]):.2f} x  {column[6]:.3f}" for column in means]
    rows = ("within 2, 5, 10 %", reached), ("time within 5 %, top", times)
    return "\n".join(f"    {name:<30}" + "".join(f"{cell:>16}" for cell in cells) for name, cells in rows)


def head(title: str, after: Sequence[int]) -> str:
    """The header: shares after these numbers of trials, or after their time."""
    return f"{title:<34}" + "".join(f"{count:>16}" for count in after) + "   ask ms"


def row(name: str, shares: list[list[float]], asks: list[float], more: str = "") -> str:
    """Mean and standard error of shares: (searches, columns); and the median seconds of an ask."""
    figures = np.array(shares)
    errors = (
        figures.std(axis=0, ddof=1) / math.sqrt(len(figures))
        if len(figures) > 1
        else np.zeros(figures.shape[1])
    )
    words = "".join(
        f"   {mean:.3f} ± {error:.3f}" for mean, error in zip(figures.mean(axis=0), errors, strict=True)
    )
    return f"{name:<34}{words}   {1e3 * statistics.median(asks):6.0f}{more}"
