"""Studies that end at a value of their metric on tables and laws, in simulated time, by the driver's own decisions.

    python benchmarks/targets.py --problems digits cifar laws lcbench --studies 120 --out targets.csv
    python benchmarks/targets.py --table targets.csv

One device. A target is what one setting in ten to one in a thousand reaches. What counts is the time until a model measures it,
over the shortest training of any setting that reaches it in the mean: the best that anybody could have done who knew.

Beside ours: the usual search, and settings drawn at random, until one reaches the target. What was said after eight trials is
set against what came.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from bsearch.search.run.decisions.final import Pace
from bsearch.search.run.decisions.final_planner import FinalPlanner
from bsearch.search.run.decisions.wall_time import WallTime
from deadline import SURE, Driver, settings_of, written
from problems import problems, random_value

# Mean trainings after which a study gives up, and trials after which what it says is noted.
MOST, SAID_AFTER = 150, 8


def ours(driver: Driver, target: float) -> list[tuple[float, float, float, float]]:
    planner, said = FinalPlanner(driver.suggester, SURE, math.inf, target=target), []
    while driver.best < target and driver.now_s < driver.limit_s:
        started = time.perf_counter()
        pace = Pace(WallTime.of(driver.spans), math.inf, 0.0)
        step = planner.next(driver.trials, pace)
        driver.result.decided_s.append(time.perf_counter() - started)
        reach = planner.reach
        if len(driver.trials) >= SAID_AFTER:
            said.append((driver.now_s, reach.chance, driver.now_s + reach.earliest_s, driver.now_s + reach.expected_s))
        parameters = None if step == "search" else step if isinstance(step, dict) else step.parameters  # type: ignore[union-attr]
        if parameters is None:
            (parameters,) = driver.suggester.suggest(driver.trials)
        driver.train(parameters, shrinks=False)
    return said


def search(driver: Driver, target: float) -> list[tuple[float, float, float, float]]:
    while driver.best < target and driver.now_s < driver.limit_s:
        driver.train(driver.suggester.suggest(driver.trials)[0], shrinks=False)
    return []


def at_random(driver: Driver, target: float) -> list[tuple[float, float, float, float]]:
    rng = np.random.default_rng(driver.seed)
    while driver.best < target and driver.now_s < driver.limit_s:
        driver.train({name: random_value(one, rng) for name, one in driver.problem.space.items()}, shrinks=False)
    return []


WAYS = {"ours": ours, "search": search, "random": at_random}


def rows_of(families: list[str], studies: int, first: int, ways: list[str]) -> Any:
    for number in range(first, first + studies):
        family = families[number % len(families)]
        problem, settings, mean_s = settings_of(family, (number // len(families)) % len(problems(family)))
        rng = np.random.default_rng((4, number))
        share = math.exp(rng.uniform(math.log(1e-3), math.log(0.1)))
        target = float(np.quantile([accuracy for _, accuracy in settings], 1 - share))
        best_s = min(seconds for seconds, accuracy in settings if accuracy >= target)
        for name in ways:
            driver = Driver(problem, MOST * mean_s, mean_s, number)
            said = WAYS[name](driver, target)
            yield {
                "number": number,
                "problem": family,
                "share": f"{share:.4f}",
                "way": name,
                "reached": int(driver.best >= target),
                "took": f"{driver.now_s / mean_s:.3f}",
                "least": f"{best_s / mean_s:.4f}",
                "trials": driver.result.trials,
                "said": ";".join(
                    " ".join(f"{value / mean_s if place != 1 else value:.3f}" for place, value in enumerate(one))
                    for one in said
                ),
                "decided_ms": f"{1e3 * np.median(driver.result.decided_s):.0f}" if driver.result.decided_s else "",
            }


def table(path: Path) -> None:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for family in ["all", *dict.fromkeys(row["problem"] for row in rows)]:
        for way in WAYS:
            some = [row for row in rows if row["way"] == way and family in ("all", row["problem"])]
            if some:
                took, reached = np.array([float(row["took"]) for row in some]), np.array([int(row["reached"]) for row in some])
                over = took / [float(row["least"]) for row in some]
                print(
                    f"{family:<8} {way:<7} n {len(some):>4}  reached {100 * reached.mean():5.1f} %  mean trainings of time "
                    f"{np.median(took):6.2f} (mean {took.mean():6.2f})  over the least {np.median(over):6.1f}  "
                    f"trials {np.median([int(row['trials']) for row in some]):5.1f}"
                )
    said = [
        (*map(float, one.split()), float(row["took"]) if int(row["reached"]) else math.inf)
        for row in rows
        for one in row["said"].split(";")[:1]
        if one
    ]
    if said:
        _, chance, earliest, expected, came = np.array(said).T
        reached = f"{np.isfinite(came).mean():.2f}, said {chance.mean():.2f}"
        print(f"\nsaid after {SAID_AFTER} trials, of {len(said)}: reached at all {reached}")
        told = np.isfinite(earliest)
        print(f"not before: held {(came >= earliest)[told].mean():.2f} of {told.sum()} (said .90)")
        told = np.isfinite(expected)
        print(f"by the middle: reached {(came <= expected)[told].mean():.2f} of {told.sum()} (said .50)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=["digits", "cifar", "laws", "lcbench"])
    parser.add_argument("--studies", type=int, default=120)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("targets.csv"))
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    if arguments.table:
        table(arguments.table)
        return
    written(arguments.out, rows_of(arguments.problems, arguments.studies, arguments.first, arguments.ways))
    table(arguments.out)


if __name__ == "__main__":
    main()
