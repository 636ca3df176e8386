"""A second measure of what training takes: three objectives, and energy under power limits.

    .venv/bin/python benchmarks/three_objectives.py [--problems digits cifar laws] [--ways random tpe front known] [--seeds 4]
    BSEARCH_DATA=... .venv/bin/python benchmarks/three_objectives.py --zeus [--seeds 16]

Each problem of `problems.py` is trained on 1, 2, 4 or 8 devices besides: with d of them a training takes d^-0.8 of its time and
d^0.2 of its cost, so that no number of devices is best. Printed is the share of the true front's hypervolume (log seconds, log
cost, accuracy) that finished trials reach, mean and standard error over seeds and problems, and ms of an ask. `known` is
`front` with seconds and costs known beforehand, `optuna-gp` Optuna's GPSampler.

With --zeus, on what was measured for Zeus (NSDI 2023) on four GPUs under several power limits:
- power at a batch that was left out, interpolated as between a profile's sizes, against the mean of the others;
- the share of the true front of time and energy to the target, log scales, after 3, 6 and 10 trainings. A training has one
  random run's epochs; fronts are judged by the mean over runs. `searched` chooses batch and power limit of each, `planned` the
  batch alone: what it takes under every limit is known from profiles, since a limit does not change what is learned.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from bsearch.search.suggest.optuna.sampler import FrontSampler
from bsearch.search.suggest.trial_history import front_places
from bsearch.spaces.laws.step_time import StepTime
from bsearch.spaces.plan import BatchPlan
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from problems import ZEUS_GPUS, ZEUS_TARGETS, Problem, head, problems, random_value, row

AFTER, AFTER_ZEUS = (10, 25, 50, 100), (3, 6, 10)
DEVICES = (1, 2, 4, 8)
Point = tuple[float, float, float]


def area(points: Sequence[tuple[float, float]], end: float, lowest: float) -> float:
    """Under points of something lower is better in, and something higher is better in."""
    total, best = 0.0, lowest
    for at, value in sorted(points):
        if value > best and at < end:
            total += (value - best) * (end - at)
            best = value
    return total


def volume(points: Sequence[Point], begins: Sequence[float], ends: Sequence[float], lowest: float) -> float:
    """Hypervolume over two logs, clipped at their beginnings, and accuracy, by slabs of accuracy."""
    if not points:
        return 0.0
    values = np.array(points)
    values = values[front_places(values[:, :2], values[:, 2])]
    total, below = 0.0, lowest
    for level in sorted({float(one) for one in values[:, 2] if one > lowest}):
        above = values[values[:, 2] >= level]
        flat = [(max(a, begins[0]), ends[1] - max(b, begins[1])) for a, b in above[:, :2] if b < ends[1]]
        total += (level - below) * area(flat, ends[0], 0.0)
        below = level
    return total


class OnDevices:
    """A problem whose trainings may have several devices."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.space: dict[str, BaseDistribution] = {**problem.space, "devices": CategoricalDistribution(DEVICES)}
        rng = np.random.default_rng(1)
        settings = [
            {name: random_value(one, rng) for name, one in problem.space.items()} | {"devices": DEVICES[rng.integers(4)]}
            for _ in range(20_000)
        ]
        every = [self.true(one) for one in settings]
        self.begins = [min(one[axis] for one in every) for axis in (0, 1)]
        self.ends = [max(one[axis] for one in every) for axis in (0, 1)]
        self.whole = volume(every, self.begins, self.ends, problem.lowest)

    def taken(self, parameters: Mapping[str, Any]) -> tuple[float, float]:
        """Seconds and cost."""
        seconds, devices = self.problem.seconds(parameters), parameters["devices"]
        return seconds * devices**-0.8, seconds * devices**0.2

    def true(self, parameters: Mapping[str, Any]) -> Point:
        seconds, cost = self.taken(parameters)
        return math.log(seconds), math.log(cost), self.problem.accuracy(parameters)

    def share(self, points: Sequence[Point]) -> float:
        return volume(points, self.begins, self.ends, self.problem.lowest) / self.whole


def sampler_of(way: str, space: Mapping[str, BaseDistribution], known: Any, seed: int) -> optuna.samplers.BaseSampler:
    match way:
        case "random":
            return optuna.samplers.RandomSampler(seed=seed)
        case "tpe":
            return optuna.samplers.TPESampler(multivariate=True, seed=seed)
        case "nsga2":
            return optuna.samplers.NSGAIISampler(seed=seed, population_size=20)
        case "optuna-gp":
            return optuna.samplers.GPSampler(seed=seed)
        case "front" | "known":
            return FrontSampler(space=space, known_seconds=known if way == "known" else None, seed=seed)
    raise ValueError(way)


def searched(way: str, problem: OnDevices, trials: int, seed: int) -> tuple[list[Point], list[float]]:
    """The true results of a search's trials, in order, and the seconds of its asks."""
    study = optuna.create_study(
        directions=["minimize", "maximize", "minimize"], sampler=sampler_of(way, problem.space, problem.taken, seed)
    )
    rng, found, asks = np.random.default_rng(seed), [], []
    for _ in range(trials):
        started = time.perf_counter()
        trial = study.ask(problem.space)
        asks.append(time.perf_counter() - started)
        (seconds, cost), accuracy = problem.taken(trial.params), problem.problem.curve(trial.params, rng)[-1]
        study.tell(trial, [seconds, accuracy, cost])
        found.append(problem.true(trial.params))
    return found, asks


class Workload:
    """One of Zeus' workloads on a GPU: seconds and watts of an epoch by batch and power limit, and epochs to the target."""

    def __init__(self, cells: dict[tuple[int, float], tuple[float, float]], runs: dict[int, list[float]]) -> None:
        self.cells = {key: value for key, value in cells.items() if key[0] in runs}
        self.runs = runs
        self.batches = sorted({batch for batch, _ in self.cells})
        self.limits = sorted({limit for _, limit in self.cells})
        every = [self.to_target(batch, limit) for batch, limit in self.cells]
        self.ends = [max(one[axis] for one in every) for axis in (0, 1)]
        self.whole = self._area(every)

    def to_target(self, batch: int, limit: float) -> tuple[float, float]:
        """Logs of the mean seconds and joules to the target."""
        seconds, watts = self.cells[batch, limit]
        epochs = statistics.fmean(self.runs[batch])
        return math.log(seconds * epochs), math.log(seconds * watts * epochs)

    def _area(self, points: Sequence[tuple[float, float]]) -> float:
        return area([(time, self.ends[1] - energy) for time, energy in points], self.ends[0], 0.0)

    def share(self, points: Sequence[tuple[float, float]]) -> float:
        return self._area(points) / self.whole

    def chosen(self, seen: Mapping[int, list[float]], cells: Sequence[tuple[int, float]]) -> float:
        """The share of the true front that those cells have which seem to be on the front, by the epochs that were seen."""
        seem = {
            cell: (
                math.log(self.cells[cell][0] * statistics.fmean(seen[cell[0]])),
                math.log(math.prod(self.cells[cell]) * statistics.fmean(seen[cell[0]])),
            )
            for cell in cells
        }
        amounts = np.array([[one[0]] for one in seem.values()])
        members = front_places(amounts, -np.array([one[1] for one in seem.values()]))
        return self.share([self.to_target(*list(seem)[place]) for place in members])

    def searched(self, way: str, trials: int, seed: int) -> list[float]:
        sampler_name, _, how = way.partition("/")
        planned = how == "planned"
        space: dict[str, BaseDistribution] = {"effective_batch": IntDistribution(self.batches[0], self.batches[-1], log=True)}
        if not planned:
            space["power_limit"] = IntDistribution(int(self.limits[0]), int(self.limits[-1]), step=25)

        def cell(parameters: Mapping[str, Any]) -> tuple[int, float]:
            batch = min(self.batches, key=lambda one: abs(math.log(one / parameters["effective_batch"])))
            wanted = parameters.get("power_limit", self.limits[-1])
            limits = [limit for of, limit in self.cells if of == batch]
            return batch, min(limits, key=lambda one: abs(one - wanted))

        def known(parameters: Mapping[str, Any]) -> tuple[float, float]:
            seconds, watts = self.cells[cell(parameters)]
            return seconds, seconds * watts

        study = optuna.create_study(
            directions=["minimize", "minimize", "minimize"], sampler=sampler_of(sampler_name, space, known, seed)
        )
        rng, seen, cells, shares = np.random.default_rng(seed), {}, [], []
        for _ in range(trials):
            trial = study.ask(space)
            batch, limit = cell(trial.params)
            epochs = float(rng.choice(self.runs[batch]))
            seconds, joules = known(trial.params)
            study.tell(trial, [seconds, math.log(epochs), joules])
            seen.setdefault(batch, []).append(epochs)
            cells += [one for one in self.cells if one[0] == batch] if planned else [(batch, limit)]
            shares.append(self.chosen(seen, cells))
        return shares


def workloads() -> dict[str, Workload]:
    folder = Path(os.environ["BSEARCH_DATA"]) / "zeus"

    def rows(name: str) -> list[dict[str, str]]:
        with (folder / f"{name}.csv").open() as file:
            return list(csv.DictReader(file))

    epochs: dict[tuple[str, str], dict[int, list[float]]] = {}
    for one in rows("summary_train"):
        if float(one["target_metric"]) == ZEUS_TARGETS[one["dataset"]]:
            runs = epochs.setdefault((one["dataset"], one["optimizer"]), {})
            runs.setdefault(int(one["batch_size"]), []).append(float(one["target_epoch"]))
    found = {}
    for gpu in ZEUS_GPUS:
        cells: dict[tuple[str, str], dict[tuple[int, float], tuple[float, float]]] = {}
        for one in rows(f"summary_power_{gpu}"):
            key = int(one["batch_size"]), float(one["power_limit"])
            of = cells.setdefault((one["dataset"], one["optimizer"]), {})
            of[key] = float(one["time_per_epoch"]), float(one["average_power"])
        for workload, runs in epochs.items():
            here = cells.get(workload, {})
            if len({batch for batch, _ in here if batch in runs}) >= 4:
                found[f"{workload[0]} {gpu}"] = Workload(here, runs)
    return found


def power_errors(workload: Workload) -> list[tuple[float, float]]:
    """Relative errors of the power at each inner batch, left out: interpolated, and the mean of the others."""
    errors = []
    for limit in workload.limits:
        power = sorted((batch, watts) for (batch, at), (_, watts) in workload.cells.items() if at == limit)
        for place in range(1, len(power) - 1):
            others = (*power[:place], *power[place + 1 :])
            law = StepTime(((1, 1.0),), 0.0, power=tuple(others))
            size, true = power[place]
            guess = law.watts(BatchPlan(size))
            assert guess is not None
            errors.append((abs(guess / true - 1), abs(statistics.fmean(watts for _, watts in others) / true - 1)))
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=["digits", "cifar", "laws"])
    parser.add_argument("--ways", nargs="+", default=["random", "tpe", "nsga2", "front", "known"])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--zeus", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if options.zeus:
        every = workloads()
        errors = [one for workload in every.values() for one in power_errors(workload)]
        print(f"power at a batch left out, {len(errors)} of {len(every)} workloads and GPUs   median   90th percentile")
        for name, place in (("interpolated", 0), ("mean of the others", 1)):
            each = sorted(one[place] for one in errors)
            print(f"{name:<62}{each[len(each) // 2]:>9.1%}{each[int(0.9 * len(each))]:>14.1%}")
        print(head("front of time and energy to the target", AFTER_ZEUS))
        for way in (f"{sampler}/{how}" for how in ("searched", "planned") for sampler in options.ways):
            shares = [
                [found[count - 1] for count in AFTER_ZEUS]
                for workload in every.values()
                for seed in range(options.seeds)
                for found in [workload.searched(way, AFTER_ZEUS[-1], seed)]
            ]
            print(row(way, shares, [0.0], ""), flush=True)
        return
    after = [count for count in AFTER if count <= options.trials]
    print(head("share of the front of three after", after))
    for family in options.problems:
        members = [OnDevices(problem) for problem in problems(family)]
        for way in options.ways:
            shares, asks = [], []
            for problem in members:
                for seed in range(options.seeds):
                    found, taken = searched(way, problem, options.trials, seed)
                    shares.append([problem.share(found[:count]) for count in after])
                    asks += taken[-5:]
            print(row(f"{family}, {way}", shares, asks, ""), flush=True)


if __name__ == "__main__":
    main()
