"""Studies with a deadline on tables and laws, in simulated time, by the driver's own decisions.

    python benchmarks/deadline.py --problems digits cifar laws lcbench --deadlines 500 --out deadlines.csv
    python benchmarks/deadline.py --table deadlines.csv

One device. A deadline is 2 to 60 mean trainings; step times are off by -10 to +30 % from what is known, in a third of the
cases the machine slows down midway by up to half, and in a fifth the driver is killed once. The metric is that of the model
that is kept, in shares of the table's range below the best setting that one training for all of this time could have been.

Ours is the search until the end, whose best model is kept and whose last trial is shortened if it is late. Beside it: 80 % of
the time for the same search and the rest for the best setting found; and the baseline (the middle of the space), trained as
long as fits.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from bsearch.search.run.decisions.eta import ClockFactors, Span
from bsearch.search.suggest.front_suggester import FrontSuggester
from bsearch.spaces.record import TrialFacts, TrialRecord
from problems import FRACTIONS, Problem, Table, problems

# What the rest of a run takes after its last training, in mean trainings.
CLOSING = 0.02


@dataclass
class World:
    """How time passes: what is known of it is wrong, and it changes."""

    factor: float
    slows_at_s: float
    slows_by: float
    killed_at_s: float
    lost_s: float
    rng: np.random.Generator
    killed: bool = False

    @classmethod
    def of(cls, limit_s: float, mean_s: float, seed: int) -> World:
        rng = np.random.default_rng((11, seed))
        slows = rng.random() < 1 / 3
        return cls(
            factor=float(rng.uniform(0.9, 1.3)),
            slows_at_s=float(rng.uniform(0.2, 0.8)) * limit_s if slows else math.inf,
            slows_by=float(rng.uniform(1.1, 1.5)),
            killed_at_s=float(rng.uniform(0.1, 0.9)) * limit_s if rng.random() < 0.2 else math.inf,
            lost_s=0.2 * mean_s,
            rng=rng,
        )

    def clock_s(self, known_s: float, now_s: float) -> float:
        """Seconds by the clock of a training that begins now, without what a kill costs."""
        work_s = known_s * self.factor * math.exp(0.03 * self.rng.standard_normal())
        before_s = max(min(work_s, self.slows_at_s - now_s), 0.0)
        return before_s + (work_s - before_s) * self.slows_by

    def known_s(self, limit_s: float) -> float:
        """The most known seconds of a training that takes all the time."""
        lost_s = self.lost_s if self.killed_at_s < limit_s else 0.0
        before_s = min(self.slows_at_s, limit_s - lost_s)
        return (before_s + (limit_s - lost_s - before_s) / self.slows_by) / self.factor

    def killed_s(self, began_s: float, ends_s: float) -> float:
        """What a kill costs between these times: the new start, and steps since the last checkpoint."""
        if not self.killed and began_s <= self.killed_at_s < ends_s:
            self.killed = True
            return self.lost_s
        return 0.0


@dataclass
class Result:
    """What a way came to: when it was done, and the true metric of what it kept."""

    ended_s: float = 0.0
    kept: float = math.nan
    trials: int = 0


class Driver:
    """A study on one simulated device."""

    def __init__(self, problem: Problem, limit_s: float, mean_s: float, seed: int) -> None:
        self.problem, self.limit_s, self.mean_s, self.seed = problem, limit_s - CLOSING * mean_s, mean_s, seed
        self.world, self.rng = World.of(limit_s, mean_s, seed), np.random.default_rng((5, seed))
        self.suggester = FrontSuggester(
            problem.space, 1, known_seconds=problem.seconds, by_time=True, seed=seed
        )
        self.trials: list[TrialRecord] = []
        self.spans: list[Span] = []
        self.now_s, self.result = 0.0, Result()
        self.best = -math.inf
        self.overhead_s = 0.02 * mean_s

    def train(self, parameters: Mapping[str, Any], *, shrinks: bool) -> bool:
        """Train, to the end if the time suffices; one that shrinks ends in time in any case. Whether it is complete."""
        began_s, known_s = self.now_s, self.problem.seconds(parameters)
        left_s = self.limit_s - began_s - self.overhead_s
        took_s = self.world.clock_s(known_s, began_s)
        took_s += self.world.killed_s(began_s, began_s + took_s)
        share = min(left_s / took_s, 1.0)
        number = len(self.trials)
        if share < 1 and not (shrinks and share > 0.02):
            self.now_s = self.limit_s
            self.trials.append(TrialRecord.of(number, "interrupted", dict(parameters), TrialFacts()))
            return False
        self.now_s += share * took_s + self.overhead_s
        accuracy, true = self._reached(parameters, share)
        self.spans.append(Span(began_s, self.now_s, known_s, share * took_s, share, 1.0, 1))
        values = known_s, accuracy
        self.trials.append(
            TrialRecord.of(number, "complete", dict(parameters), TrialFacts(train_s=known_s), values)
        )
        if accuracy > self.best:
            self.best, self.result.kept = accuracy, true
        self.result.trials += 1
        return True

    def _reached(self, parameters: Mapping[str, Any], share: float) -> tuple[float, float]:
        """The metric as measured, and the truth of the setting; of a training cut short whose schedule was cut too."""
        if share < 1 and "epochs" in parameters:
            parameters = {
                **parameters,
                "epochs": max(parameters["epochs"] * share, self.problem.space["epochs"].low),
            }
            share = 1.0
        curve = self.problem.curve(parameters, self.rng)
        if share == 1 and isinstance(self.problem, Table):
            return curve[-1], curve[-1]  # a model is what its own seed made it
        if share < 1:
            return (
                reached := float(np.interp(share * FRACTIONS, range(FRACTIONS + 1), [0.0, *curve]))
            ), reached
        return curve[-1], self.problem.accuracy(parameters)

    def known_s(self, until_s: float) -> float:
        """Known seconds of the longest training that is expected to be over by then."""
        factors = ClockFactors.of(self.spans)
        return (until_s - self.now_s - factors.overhead_s) / factors.slowdown

    def search(self, until_s: float) -> bool:
        """One trial of the search that is expected to fit; False where none does."""
        self.suggester.longest_s = 0.9 * self.known_s(until_s)
        for _ in range(3):
            (parameters,) = self.suggester.suggest(self.trials)
            if self.problem.seconds(parameters) <= self.known_s(until_s):
                return self.train(parameters, shrinks=True)
        return False


def ours(driver: Driver) -> None:
    while driver.search(driver.limit_s):
        pass


def share_then_train(driver: Driver, share: float = 0.8) -> None:
    """The same search for a share of the time, then the best setting for as long as is left."""
    while driver.now_s < share * driver.limit_s and driver.search(share * driver.limit_s):
        pass
    done = [trial for trial in driver.trials if trial.outcome == "complete"]
    if not done:
        return
    parameters = dict(max(done, key=lambda trial: trial.accuracy).parameters)
    if "epochs" in parameters:
        space, left_s = driver.problem.space["epochs"], driver.known_s(driver.limit_s)
        lengths = [{**parameters, "epochs": epochs} for epochs in range(int(space.low), int(space.high) + 1)]
        fitting = [each for each in lengths if driver.problem.seconds(each) <= left_s]
        if not fitting:
            return
        parameters = fitting[-1]
    driver.train(parameters, shrinks=True)


def baseline(driver: Driver) -> None:
    """The middle of the space, for as long as fits."""
    parameters = {}
    for name, one in driver.problem.space.items():
        middle = math.sqrt(one.low * one.high) if one.log else (one.low + one.high) / 2
        parameters[name] = round(middle) if type(one).__name__ == "IntDistribution" else middle
    if "epochs" in parameters:
        space = driver.problem.space["epochs"]
        for epochs in range(int(space.high), int(space.low) - 1, -1):
            longer = {**parameters, "epochs": epochs}
            if driver.problem.seconds(longer) * 1.2 <= driver.limit_s:
                parameters = longer
                break
    driver.train(parameters, shrinks=True)


def best_possible(problem: Problem, limit_s: float, settings: list[tuple[float, float]]) -> float:
    return max((accuracy for seconds, accuracy in settings if seconds <= limit_s), default=math.nan)


WAYS = {
    "ours": ours,
    "80/20": share_then_train,
    "baseline": baseline,
}


@cache
def settings_of(family: str, member: int) -> tuple[Problem, list[tuple[float, float]], float]:
    """A problem, all its settings and its mean seconds."""
    problem = problems(family)[member]
    return problem, problem.everything(), problem.mean_seconds()


def rows_of(families: list[str], deadlines: int, first: int, ways: list[str]) -> Any:
    for number in range(first, first + deadlines):
        family = families[number % len(families)]
        problem, settings, mean_s = settings_of(family, (number // len(families)) % len(problems(family)))
        rng = np.random.default_rng((3, number))
        length = math.exp(rng.uniform(math.log(2), math.log(60)))
        limit_s = length * mean_s
        accuracies = [accuracy for _, accuracy in settings]
        span = max(accuracies) - max(min(accuracies), problem.lowest)
        hindsight = best_possible(problem, World.of(limit_s, mean_s, number).known_s(limit_s), settings)
        for name, way in WAYS.items():
            if name not in ways:
                continue
            driver = Driver(problem, limit_s, mean_s, number)
            way(driver)
            kept = driver.result.kept
            yield {
                "number": number,
                "problem": family,
                "length": f"{length:.1f}",
                "way": name,
                "below": f"{(hindsight - (kept if math.isfinite(kept) else problem.lowest)) / span:.4f}",
                "in_time": int(driver.now_s <= driver.limit_s + 1e-6),
                "kept": int(math.isfinite(kept)),
                "trials": driver.result.trials,
            }


def written(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write each row as it comes: all of them take hours."""
    with path.open("w", newline="") as file:
        writer = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
            writer.writerow(row)
            file.flush()


def table(path: Path) -> None:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for part, test in {
        "all": lambda row: True,
        "2 to 6": lambda row: float(row["length"]) < 6,
        "6 to 20": lambda row: 6 <= float(row["length"]) < 20,
        "20 to 60": lambda row: float(row["length"]) >= 20,
        **{
            family: (lambda row, family=family: row["problem"] == family)
            for family in dict.fromkeys(row["problem"] for row in rows)
        },
    }.items():
        for way in WAYS:
            some = [row for row in rows if row["way"] == way and test(row)]
            if not some:
                continue
            below = np.array([float(row["below"]) for row in some])
            shares = [100 * np.mean([int(row[name]) for row in some]) for name in ("in_time", "kept")]
            print(
                f"{part:<9} {way:<12} n {len(some):>4}  below the best {100 * below.mean():5.1f} % "
                f"(median {100 * np.median(below):5.1f}, within 1 %: {100 * (below <= 0.01).mean():3.0f})  "
                f"in time {shares[0]:5.1f} %  model {shares[1]:5.1f} %  "
                f"trials {np.mean([int(row['trials']) for row in some]):5.1f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=["digits", "cifar", "laws", "lcbench"])
    parser.add_argument("--deadlines", type=int, default=500)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("deadlines.csv"))
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    if arguments.table:
        table(arguments.table)
        return
    for family in arguments.problems:
        if not problems(family):
            parser.error(f"{family}: its data are not in $BSEARCH_DATA")
    written(arguments.out, rows_of(arguments.problems, arguments.deadlines, arguments.first, arguments.ways))
    table(arguments.out)


if __name__ == "__main__":
    main()
