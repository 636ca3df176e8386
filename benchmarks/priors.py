"""What a prior of the optimum (`prior:` in a study file) gains where it is right, and costs where it is wrong.

    BSEARCH_DATA=... .venv/bin/python benchmarks/priors.py [--problems lcbench laws cifar digits] [--seeds 10] [--known]

Printed is the share of the true front's hypervolume after 10 and 25 trials, mean and standard error over seeds and problems;
then the difference from no prior, paired. A prior is on every parameter but batch and epochs, which trade time for accuracy.

- right: at a setting of the true front, half a standard deviation beside it, of the usual width
- vague: a standard deviation beside it, of three times the width
- wrong: half the range away from it
- narrow: wrong, and of a third of the width
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Mapping
from multiprocessing import Pool
from typing import Any

import numpy as np
import optuna
from bsearch.search.suggest.ask_tell import Search
from problems import Problem, Share, head, hypervolume, problems, random_value, row

AFTER = (10, 25)
WAYS = ("none", "right", "vague", "wrong", "narrow")
TRADED = ("effective_batch", "epochs")
# Of a normal distribution in units of the distance between whose ends nine in ten of it lie.
STD = 1 / 1.645


def best_setting(problem: Problem) -> dict[str, Any]:
    """Of many random settings, the one that alone has the most hypervolume."""
    rng = np.random.default_rng(3)
    settings = [{name: random_value(one, rng) for name, one in problem.space.items()} for _ in range(4000)]
    points = [(problem.seconds(one), problem.accuracy(one)) for one in settings]
    seconds = [taken for taken, _ in points]
    areas = [hypervolume([point], min(seconds), max(seconds), problem.lowest) for point in points]
    return settings[int(np.argmax(areas))]


def prior_of(way: str, one: Any, best: float, rng: np.random.Generator) -> tuple[float, float]:
    """A parameter's prior."""
    low, high = (math.log(one.low), math.log(one.high)) if one.log else (one.low, one.high)
    within = math.log(10) if one.log else (high - low) / 4
    place = math.log(best) if one.log else best
    if way in ("wrong", "narrow"):
        place += (high - low) / 2 if place < (low + high) / 2 else -(high - low) / 2
    else:
        place += {"right": 0.5, "vague": 1.0}[way] * STD * within * rng.standard_normal()
    within *= {"vague": 3.0, "narrow": 1 / 3}.get(way, 1.0)
    place = min(max(place, low), high)
    ends = max(place - within, low), min(place + within, high)
    return (math.exp(ends[0]), math.exp(ends[1])) if one.log else ends


def shares_of(
    problem: Problem, share: Share, best: Mapping[str, Any], way: str, seed: int, known: bool
) -> list[float]:
    """What one search has found after each of AFTER."""
    rng = np.random.default_rng((seed, 1))
    space = problem.domains()
    if way != "none":
        for name in set(space) - set(TRADED):
            space[name]["prior"] = prior_of(way, problem.space[name], best[name], rng)
    search = Search(space, stopping="none", known_seconds=problem.seconds if known else None, seed=seed)
    points, noise = [], np.random.default_rng(seed)
    for _ in range(AFTER[-1]):
        suggestion = search.ask()
        seconds = problem.seconds(suggestion.parameters)
        points.append((seconds, problem.accuracy(suggestion.parameters)))
        search.tell(suggestion.number, seconds, problem.curve(suggestion.parameters, noise)[-1])
    return [share.of(points[:count]) for count in AFTER]


def searches_of(family: str, number: int, seeds: int, known: bool) -> dict[str, list[list[float]]]:
    """All searches of a problem, by way."""
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    problem = problems(family)[number]
    share, best = Share(problem), best_setting(problem)
    return {way: [shares_of(problem, share, best, way, seed, known) for seed in range(seeds)] for way in WAYS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=["lcbench", "laws", "cifar", "digits"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--known", action="store_true", help="seconds are known beforehand")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(head("share of the front after trials", list(AFTER)))
    with Pool(options.processes) as pool:
        for family in options.problems:
            jobs = [(family, number, options.seeds, options.known) for number in range(len(problems(family)))]
            found = pool.starmap(searches_of, jobs, chunksize=1)
            by_way = {way: [shares for each in found for shares in each[way]] for way in WAYS}
            for way in WAYS:
                paired = (np.array(by_way[way]) - np.array(by_way["none"])).T
                more = "   " + ", ".join(
                    f"{each.mean():+.3f} ± {each.std(ddof=1) / math.sqrt(len(each)):.3f}" for each in paired
                )
                print(row(f"{family}, {way}", by_way[way], [0.0], more if way != "none" else ""), flush=True)


if __name__ == "__main__":
    main()
