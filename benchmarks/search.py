"""How much of the front is found in how many trials: ours and Optuna's samplers on problems that cost nothing to try.

    .venv/bin/python benchmarks/search.py [--problems digits laws] [--samplers tpe front known] [--trials 50] [--seeds 8]
    .venv/bin/python benchmarks/search.py --measure       # train the table of digits anew, 3 minutes on one core

Printed is the share of the true front's hypervolume (log seconds against accuracy) after 10, 25, 50, ... trials, mean and
standard error over seeds and problems. `known` is `front` with seconds known beforehand.

- digits: 720 trainings of the embedded task (15 batches x 12 rates x 4 epochs, kept in benchmarks/data/digits.csv.gz); a
  setting is looked up at its nearest neighbour, its seconds are the median over rates.
- laws: made-up tasks: steps to learn S = S_min (1 + B_crit / B), a best rate that moves with the batch, width and epochs
  that cost time; accuracy with noise of 1 %.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import statistics
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from bsearch.objectives.trial import start_attempt
from bsearch.search.sampler import FrontSampler
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study import Training
from bsearch.spaces.trial import Measurement, TrialSetup
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

TABLE = Path(__file__).parent / "data" / "digits.csv.gz"
AFTER = (10, 25, 50, 75, 100)


class Problem(ABC):
    """What may be tried, and what a trial of it would measure; every setting that counts for the true front."""

    space: dict[str, BaseDistribution]
    lowest = 0.5  # accuracy from which a front counts

    @abstractmethod
    def seconds(self, parameters: Mapping[str, Any]) -> float: ...

    @abstractmethod
    def accuracy(self, parameters: Mapping[str, Any]) -> float: ...

    def everything(self) -> list[tuple[float, float]]:
        chance = np.random.default_rng(1)
        found = []
        for _ in range(40_000):
            one = {name: drawn(distribution, chance) for name, distribution in self.space.items()}
            found.append((self.seconds(one), self.accuracy(one)))
        return found


def drawn(distribution: Any, chance: np.random.Generator) -> float:
    value = math.exp(chance.uniform(math.log(distribution.low), math.log(distribution.high)))
    return round(value) if isinstance(distribution, IntDistribution) else value


class Digits(Problem):
    def __init__(self) -> None:
        with gzip.open(TABLE, "rt") as file:
            rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
        self.table = {(row["effective_batch"], row["reference_rate"], row["epochs"]): row["accuracy"] for row in rows}
        taken: dict[tuple[float, float], list[float]] = {}
        for row in rows:
            taken.setdefault((row["effective_batch"], row["epochs"]), []).append(row["train_s"])
        self.taken = {key: statistics.median(values) for key, values in taken.items()}
        self.grid = [sorted({key[place] for key in self.table}) for place in range(3)]
        low_rate, high_rate = self.grid[1][0], self.grid[1][-1]
        self.space = {
            "effective_batch": IntDistribution(8, 1000, log=True),
            "reference_rate": FloatDistribution(low_rate, high_rate, log=True),
            "epochs": IntDistribution(2, 16, log=True),
        }

    def _near(self, parameters: Mapping[str, Any]) -> tuple[float, ...]:
        return tuple(
            min(grid, key=lambda one: abs(math.log(one / parameters[name])))
            for name, grid in zip(self.space, self.grid, strict=True)
        )

    def seconds(self, parameters: Mapping[str, Any]) -> float:
        batch, _, epochs = self._near(parameters)
        return self.taken[batch, epochs]

    def accuracy(self, parameters: Mapping[str, Any]) -> float:
        return self.table[self._near(parameters)]  # type: ignore[index]

    def everything(self) -> list[tuple[float, float]]:
        return [(self.taken[batch, epochs], accuracy) for (batch, _, epochs), accuracy in self.table.items()]


class Laws(Problem):
    lowest = 0.1
    samples = 20_000
    space = {
        "effective_batch": IntDistribution(8, 2048, log=True),
        "reference_rate": FloatDistribution(1e-3, 1.0, log=True),
        "epochs": IntDistribution(1, 20, log=True),
        "width": IntDistribution(16, 128, log=True),
    }

    def __init__(self, seed: int) -> None:
        chance = np.random.default_rng(seed)
        self.critical = math.exp(chance.uniform(math.log(50), math.log(2000)))
        self.exponent, self.rate = chance.uniform(0.4, 1.0), math.exp(chance.uniform(math.log(0.02), math.log(0.3)))
        self.curvature, self.best, self.steps = chance.uniform(0.05, 0.25), chance.uniform(0.7, 0.98), chance.uniform(30, 300)
        self.pass_ms, self.sample_ms = chance.uniform(0.2, 2), math.exp(chance.uniform(-5, -3))

    def seconds(self, parameters: Mapping[str, Any]) -> float:
        batch = parameters["effective_batch"]
        step_ms = self.pass_ms + self.sample_ms * batch * (parameters["width"] / 48) ** 1.3
        return parameters["epochs"] * self.samples / batch * step_ms * 1e-3

    def accuracy(self, parameters: Mapping[str, Any]) -> float:
        batch = parameters["effective_batch"]
        learned = parameters["epochs"] * self.samples / batch / (1 + self.critical / batch)
        best_rate = min(self.rate * (batch / 256) ** self.exponent, 0.5)
        away = math.log(parameters["reference_rate"] * math.sqrt(batch / 256) / best_rate)
        if away > 2.5:
            return 0.1 + 0.05 * math.exp(-away)  # diverged
        lost = 0.1 * self.curvature * away**2 * (2 if away > 0 else 1)
        most = self.best * (1 - 0.075 * math.sqrt(48 / parameters["width"]))
        return max(0.1, most * (1 - math.exp(-math.sqrt(learned / self.steps))) - lost)


def hypervolume(points: list[tuple[float, float]], fastest: float, slowest: float, lowest: float) -> float:
    """Area over log seconds and accuracy that the points beat."""
    area, best = 0.0, lowest
    for seconds, accuracy in sorted(points):
        if accuracy > best:
            area += (accuracy - best) * max(0.0, math.log(slowest) - math.log(max(seconds, fastest)))
            best = accuracy
    return area


def sampler_of(kind: str, problem: Problem, seed: int) -> optuna.samplers.BaseSampler:
    kinds: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        "tpe": lambda: optuna.samplers.TPESampler(multivariate=True, constant_liar=True, seed=seed),
        "nsga2": lambda: optuna.samplers.NSGAIISampler(seed=seed),
        "gp": lambda: optuna.samplers.GPSampler(seed=seed),
        "front": lambda: FrontSampler(space=problem.space, seed=seed),
        "known": lambda: FrontSampler(space=problem.space, seed=seed, known_seconds=problem.seconds),
    }
    return kinds[kind]()


def tried(kind: str, problem: Problem, trials: int, seed: int, noise: float) -> tuple[list[tuple[float, float]], list[float]]:
    """What the trials truly were, and the seconds of the last asks."""
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler_of(kind, problem, seed))
    chance = np.random.default_rng(seed)
    points, asks = [], []
    for _ in range(trials):
        begun = time.perf_counter()
        trial = study.ask(problem.space)
        asks.append(time.perf_counter() - begun)
        points.append((problem.seconds(trial.params), problem.accuracy(trial.params)))
        study.tell(trial, [points[-1][0], points[-1][1] + noise * chance.standard_normal()])
    return points, asks[-5:]


def measure() -> None:
    """Train every setting of the table of digits once."""
    batches = (8, 11, 16, 22, 31, 44, 62, 88, 125, 177, 250, 353, 500, 707, 1000)
    rates = [round(10**power, 5) for power in np.linspace(-2.3, 0.3, 12)]
    plain = TrialSetup("table", 0, 0, BatchPlan(1), OptimizerSettings(1.0), 1, Training(evaluations=4), 1)
    TABLE.parent.mkdir(exist_ok=True)
    with gzip.open(TABLE, "wt") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["effective_batch", "reference_rate", "epochs", "train_s", "accuracy"])
        for batch in batches:
            for rate in rates:
                for epochs in (2, 4, 8, 16):
                    optimizer = OptimizerSettings(rate * math.sqrt(batch / 64))
                    setup = replace(
                        plain, plan=BatchPlan(batch), optimizer=optimizer, samples_budget=1197 * epochs, epochs=epochs
                    )
                    *_, last, _ = start_attempt("bsearch.objectives.digits:Digits", setup)
                    assert isinstance(last, Measurement)
                    writer.writerow([batch, rate, epochs, f"{last.elapsed_s:.5f}", f"{last.accuracy:.4f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=["digits", "laws"], choices=["digits", "laws"])
    parser.add_argument("--samplers", nargs="+", default=["random", "tpe", "front", "known"])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args()
    if options.measure:
        measure()
        return
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    after = [count for count in AFTER if count <= options.trials]
    print(f"{'share of the front after trials':<34}" + "".join(f"{count:>16}" for count in after) + "   ask ms")
    for family in options.problems:
        problems: list[Problem] = [Digits()] if family == "digits" else [Laws(seed) for seed in range(4)]
        for kind in options.samplers:
            shares, asks = [], []
            for problem in problems:
                every = problem.everything()
                ends = min(seconds for seconds, _ in every), max(seconds for seconds, _ in every), problem.lowest
                for seed in range(options.seeds):
                    points, took = tried(kind, problem, options.trials, seed, 0.0 if family == "digits" else 0.01)
                    shares.append([hypervolume(points[:count], *ends) / hypervolume(every, *ends) for count in after])
                    asks += took
            figures = np.array(shares)
            errors = figures.std(axis=0, ddof=1) / math.sqrt(len(figures))
            words = "".join(f"   {mean:.3f} ± {error:.3f}" for mean, error in zip(figures.mean(axis=0), errors, strict=True))
            print(f"{family + ', ' + kind:<34}{words}   {1e3 * statistics.median(asks):6.0f}", flush=True)


if __name__ == "__main__":
    main()
