"""Share of the true front found with equal samples: one result a trial, and the results of its branches too.

    .venv/bin/python benchmarks/branches.py [--problems digits-wsd cifar-wsd] [--ways tpe known branches] [--seeds 10]

A unit is the samples of one longest training; a branch costs what it trains itself, a fifth of its length. Printed is the share
of the true front's hypervolume (log seconds against accuracy) reached by the true values of all results, after so many units,
mean and standard error over seeds. Trials run one after another; tables as in benchmarks/search.py, with schedule wsd.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
from bsearch.search.suggest.sampler import FrontSampler
from bsearch.spaces.schedule import DECAY, halved
from optuna.distributions import FloatDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import TrialState, create_trial
from problems import Problem, Share, Table, head, row

LOWEST = {"digits-wsd": 0.5, "cifar-wsd": 0.15}


class AnyEpochs(Table):
    """A table of any number of epochs: accuracies are interpolated on a logarithmic scale, and every epoch takes as long."""

    def __init__(self, name: str, lowest: float) -> None:
        super().__init__(name, lowest)
        ends = self.space["epochs"]
        self.space["epochs"] = FloatDistribution(ends.low, ends.high, log=True)  # type: ignore[attr-defined]
        self.trained = self.grid[self.names.index("epochs")]

    def _between(self, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], float]:
        """The settings of the next fewer and the next more epochs, and how far between them it is."""
        above = next(index for index in range(1, len(self.trained)) if self.trained[index] >= parameters["epochs"] - 1e-9)
        low, high = self.trained[above - 1], self.trained[above]
        return {**parameters, "epochs": low}, {**parameters, "epochs": high}, math.log(parameters["epochs"] / low, high / low)

    def seconds(self, parameters: Mapping[str, Any]) -> float:
        return super().seconds({**parameters, "epochs": self.trained[-1]}) * parameters["epochs"] / self.trained[-1]

    def accuracy(self, parameters: Mapping[str, Any]) -> float:
        low, high, share = self._between(parameters)
        return (1 - share) * super().accuracy(low) + share * super().accuracy(high)

    def curve(self, parameters: Mapping[str, Any], rng: np.random.Generator) -> list[float]:
        low, high, share = self._between(parameters)
        runs = self.curves[self._nearest(low)], self.curves[self._nearest(high)]
        run = int(rng.integers(min(map(len, runs))))
        return [(1 - share) * runs[0][run][-1] + share * runs[1][run][-1]]

    def everything(self) -> list[tuple[float, float]]:
        settings = [dict(zip(self.names, key, strict=True)) for key in self.curves]
        return [(self.seconds(one), self.accuracy(one)) for one in settings]


def sampler_of(way: str, problem: Problem, seed: int) -> BaseSampler:
    if way == "tpe":
        return TPESampler(multivariate=True, seed=seed)
    return FrontSampler(
        space=problem.space, known_seconds=problem.seconds, by_time=way == "known+time", branches=way == "branches", seed=seed
    )


def search(way: str, problem: Problem, units: int, seed: int) -> tuple[list[tuple[float, float]], list[float]]:
    """True (seconds, accuracy) of every result, and the units spent when it was there."""
    shortest, longest = problem.space["epochs"].low, problem.space["epochs"].high  # type: ignore[attr-defined]
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler_of(way, problem, seed))
    rng, spent, points, at = np.random.default_rng(seed), 0.0, list[tuple[float, float]](), list[float]()

    def values(parameters: Mapping[str, Any]) -> tuple[float, float]:
        points.append((problem.seconds(parameters), problem.accuracy(parameters)))
        at.append(spent)
        return problem.seconds(parameters), problem.curve(parameters, rng)[-1]

    while spent < units:
        trial = study.ask(problem.space)
        branches, epochs = [], trial.params["epochs"]
        while way == "branches" and (epochs := halved(epochs, shortest, None)) >= shortest:
            branches.append({**trial.params, "epochs": epochs})
        for branch in reversed(branches):
            spent += DECAY * branch["epochs"] / longest
            study.add_trial(
                create_trial(state=TrialState.COMPLETE, params=branch, distributions=problem.space, values=values(branch))
            )
        spent += trial.params["epochs"] / longest
        study.tell(trial, values(trial.params))
    return points, at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(LOWEST))
    parser.add_argument("--ways", nargs="+", default=["tpe", "known", "known+time", "branches"])
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    after = [2, 4, 8, 16]
    print(head("share of the front after units", after))
    for name in options.problems:
        problem = AnyEpochs(name, LOWEST[name])
        share = Share(problem)
        for way in options.ways:
            shares = []
            for seed in range(options.seeds):
                points, at = search(way, problem, after[-1], seed)
                shares.append([share.of(points[: sum(one <= limit + 1e-9 for one in at)]) for limit in after])
            print(row(f"{name}, {way}", shares, [0.0]), flush=True)


if __name__ == "__main__":
    main()
