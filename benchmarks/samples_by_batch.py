"""Samples to a target by batch, from a study's trials, against measured tables.

    .venv/bin/python benchmarks/samples_by_batch.py [--seeds 6] [--trials 40]

The truth of a batch is where the mean accuracy of its best rate crosses the target, linear in log epochs between the measured
ones. Printed are the relative error of the samples (median, 90th percentile) and how often 90 % intervals hold the truth, of
trials chosen at random and by a search.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
from bsearch.search.laws.samples_by_batch import samples_by_batch
from bsearch.search.suggest.optuna.sampler import FrontSampler
from problems import Table, random_value

TARGETS = (("digits", 0.95), ("digits", 0.9), ("cifar", 0.5), ("cifar", 0.45))


def truth(table: Table, batch: int, target: float) -> float:
    """Epochs at which a batch reaches the target; infinite where it does not."""
    at, epochs = table.names.index("epochs"), table.grid[table.names.index("epochs")]
    best = [
        max(
            statistics.fmean(curve[-1] for curve in curves)
            for key, curves in table.curves.items()
            if key[0] == batch and key[at] == each
        )
        for each in epochs
    ]
    for place, value in enumerate(best):
        if value >= target:
            if not place:
                return epochs[0]
            share = (target - best[place - 1]) / (value - best[place - 1])
            return float(epochs[place - 1] * (epochs[place] / epochs[place - 1]) ** share)
    return math.inf


def trials_of(table: Table, how: str, count: int, seed: int) -> list[tuple[Mapping[str, Any], float]]:
    rng, found = np.random.default_rng(seed), []
    study = optuna.create_study(
        directions=["minimize", "maximize"],
        sampler=FrontSampler(space=table.space, known_seconds=table.seconds, seed=seed),
    )
    for _ in range(count):
        if how == "random":
            parameters = {name: random_value(one, rng) for name, one in table.space.items()}
            accuracy = table.curve(parameters, rng)[-1]
        else:
            trial = study.ask(table.space)
            parameters, accuracy = trial.params, table.curve(trial.params, rng)[-1]
            study.tell(trial, [table.seconds(parameters), accuracy])
        found.append((dict(zip(table.names, table._nearest(parameters), strict=True)), accuracy))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--trials", type=int, default=40)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"{'':<28}{'median':>10}{'90th':>10}{'held':>10}{'batches':>10}")
    for name, target in TARGETS:
        table = Table(name, 0.1)
        fewest = table.grid[table.names.index("epochs")][0]
        for how in ("random", "searched"):
            errors, held = [], []
            for seed in range(options.seeds):
                found = samples_by_batch(trials_of(table, how, options.trials, seed), table.space, 1, target)
                for place, batch in enumerate(found.batches):
                    measured = min(table.grid[0], key=lambda one: abs(math.log(one / batch)))
                    true, guess = truth(table, int(measured), target), found.samples_at(place)
                    # At most the fewest epochs, or more than the most: a bound is all there is to hold.
                    held.append(guess.low <= fewest if true <= fewest else guess.low <= true <= guess.high)
                    if fewest < true < math.inf and math.isfinite(guess.value):
                        errors.append(abs(guess.value / true - 1))
            figures = [statistics.median(errors), float(np.quantile(errors, 0.9)), statistics.fmean(held)]
            print(
                f"{f'{name} {target}, {how}':<28}"
                + "".join(f"{one:>10.0%}" for one in figures)
                + f"{len(held):>10}",
                flush=True,
            )


if __name__ == "__main__":
    main()
