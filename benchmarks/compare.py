"""How often is a change judged rightly? Measured tables, a change made of each, and two searches of the same budget.

    .venv/bin/python benchmarks/compare.py [--tasks digits@16 cifar@8] [--changes none better ...] [--runs 20] [--repeats 100]

Beside `bsearch compare` (two searches of so many runs, judged by `search/compare/difference.py`) are those who keep a change
that scores higher at the old best setting (one run), and who train both there with three seeds (a t-test at 5 %). Printed are
the shares of verdicts better, worse and cannot tell, and the true difference of the best settings in standard deviations of a
run. Changes: none; by two standard deviations of a run to either side (better, worse); a best rate four times as high, which
is no better (moved); better when trained briefly and worse in the end (early); noise whose tail is long (tails) and one run in
twenty that is lost (lost), both no better; half of the rates searched (narrow), no better; another schedule (wsd).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from bsearch.search.analysis.confirm import FOR_REPEATS
from bsearch.search.compare.difference import Runs, difference
from bsearch.search.compare.referee import targets, verdict
from bsearch.search.suggest.ask_tell import Search
from bsearch.search.suggest.space_transform import SearchSpace, SpaceTransform
from problems import Problem, problems
from scipy import stats

Score = Callable[[Mapping[str, Any], np.random.Generator], float]
# As many of the best settings are trained again with other seeds.
REPEATED = 3


def logit(accuracy: float) -> float:
    return math.log(min(max(accuracy, 0.02), 0.997) / (1 - min(max(accuracy, 0.02), 0.997)))


def back(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@dataclass
class Side:
    """One side's training: what a run scores, what it would score in the mean, and what is searched."""

    problem: Problem
    score: Score
    mean: Callable[[Mapping[str, Any]], float]
    space: dict[str, dict[str, Any]]


def plain(problem: Problem) -> Side:
    return Side(problem, lambda one, rng: problem.curve(one, rng)[-1], problem.accuracy, problem.domains())


def changed(problem: Problem, change: str, deviation: float) -> Side:
    """The other side."""
    side = plain(problem)
    own, mean = side.score, side.mean
    longest = max(problem.seconds(settings) for settings in grid(problem))
    by = {"better": 2 * deviation, "worse": -2 * deviation}.get(change, 0.0)

    def shift(one: Mapping[str, Any]) -> float:
        if change == "early":
            return deviation * (2 - 4 * max(0.0, 1 + math.log(problem.seconds(one) / longest) / math.log(8)))
        return by

    def at(one: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**one, "reference_rate": one["reference_rate"] / 4} if change == "moved" else one

    def score(one: Mapping[str, Any], rng: np.random.Generator) -> float:
        value = logit(own(at(one), rng)) + shift(one)
        if change == "tails":
            value -= 2 * deviation * (rng.exponential() - 1)
        return math.nan if change == "lost" and rng.random() < 0.05 else back(value)

    space = {name: dict(domain) for name, domain in side.space.items()}
    if change == "narrow":
        best = max(grid(problem), key=mean)["reference_rate"]
        low, high = space["reference_rate"]["low"], space["reference_rate"]["high"]
        space["reference_rate"] |= {
            "low": max(low, best / (high / low) ** 0.25),
            "high": min(high, best * (high / low) ** 0.25),
        }
    if change == "moved":
        space["reference_rate"] |= {
            "low": 4 * space["reference_rate"]["low"],
            "high": 4 * space["reference_rate"]["high"],
        }
    return Side(problem, score, lambda one: back(logit(mean(at(one))) + shift(one)), space)


def grid(problem: Problem) -> list[dict[str, float]]:
    return [dict(zip(problem.names, key, strict=True)) for key in problem.curves]  # type: ignore[attr-defined]


def searched(side: Side, runs: int, seed: int) -> list[Runs]:
    """A search as `compare` makes it, at each of its looks: the last runs of all repeat its best settings."""
    search, rng = (
        Search(side.space, sampler="front", known_seconds=side.problem.seconds, seed=seed),
        np.random.default_rng(seed),
    )
    found: list[tuple[dict[str, Any], float, float]] = []
    looks, number = [], 0
    for target in targets(runs):
        repeats = round(FOR_REPEATS * runs) if target == runs else 0
        for left in range(target - number, 0, -1):
            if left > repeats:
                suggestion = search.ask()
                parameters = dict(suggestion.parameters)
                score = side.score(parameters, rng)
                search.tell(
                    suggestion.number,
                    side.problem.seconds(parameters),
                    score,
                    *(["diverged"] * math.isnan(score)),
                )
            else:
                best = sorted(
                    {tuple(one.items()) for one, _, score in found},
                    key=lambda one: -mean_of(found, dict(one)),
                )
                parameters = dict(best[left % min(REPEATED, len(best))])
                score = side.score(parameters, rng)
            if not math.isnan(score):
                found.append((parameters, side.problem.seconds(parameters), score))
        number = target
        parameters_of, seconds, scores = zip(*found, strict=True)
        looks.append(Runs(parameters_of, np.array(seconds), np.array(scores), []))
    return looks


def mean_of(found: list[tuple[dict[str, Any], float, float]], parameters: dict[str, Any]) -> float:
    return statistics.fmean(score for one, _, score in found if one == parameters)


def judged(task: str, change: str, runs: int, seed: int) -> dict[str, Any]:
    """What each way says of one pair."""
    (problem,) = problems(task)
    other = problems(change_of(task, change))[0] if change == "wsd" else problem
    deviation = run_deviation(problem)
    first = plain(problem)
    second = plain(other) if change == "wsd" else changed(problem, change, deviation)
    sides = searched(first, runs, 2 * seed), searched(second, runs, 2 * seed + 1)
    wide = {
        name: {
            **domain,
            "low": min(domain["low"], second.space[name]["low"]),
            "high": max(domain["high"], second.space[name]["high"]),
        }
        for name, domain in first.space.items()
    }
    common, *own = (
        SpaceTransform(SearchSpace.of(domains_of(one)).searched) for one in (wide, first.space, second.space)
    )
    spaces = [(common, common), (own[0], own[1])]
    for looked, target in zip(zip(*sides, strict=True), targets(runs), strict=True):
        found = difference(spaces, looked, seed)
        if verdict(found, 0.0, target / runs, -1) != "cannot tell":
            break
    sides = looked
    rng = np.random.default_rng(seed)
    best = sides[0].parameters[int(np.argmax(sides[0].scores))]
    once = second.score(best, rng)
    ours, theirs = ([one.score(best, rng) for _ in range(3)] for one in (first, second))
    p = stats.ttest_ind(ours, theirs).pvalue
    return {
        "compare": verdict(found, 0.0, target / runs, -1),
        "higher": "better" if once > sides[0].scores.max() else "worse",
        "t-test": ("better" if np.mean(theirs) > np.mean(ours) else "worse") if p < 0.05 else "cannot tell",
        "runs": len(looked[0].scores),
        "z": found.drawn[-1].mean() / found.drawn[-1].std(),
        "mean": found.drawn[-1].mean(),
        "std": found.drawn[-1].std(),
    }


def domains_of(domains: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    from bsearch.spaces.study.space import Space

    return dict(Space.model_validate(domains).domains())


def change_of(task: str, change: str) -> str:
    name, _, epochs = task.partition("@")
    return f"{name}-{change}@{epochs}"


def run_deviation(problem: Problem) -> float:
    """Of a run, on the logit's scale, among settings near the best."""
    groups = [[logit(curve[-1]) for curve in curves] for curves in problem.curves.values()]  # type: ignore[attr-defined]
    best = max(map(statistics.fmean, groups))
    return math.sqrt(
        statistics.fmean(statistics.variance(group) for group in groups if statistics.fmean(group) > best - 1)
    )


def true_difference(task: str, change: str) -> float:
    """Of the best settings in the mean, on the logit's scale, in standard deviations of a run."""
    (problem,) = problems(task)
    deviation = run_deviation(problem)
    first = max(map(problem.accuracy, grid(problem)))
    if change == "wsd":
        (other,) = problems(change_of(task, change))
        best = max(map(other.accuracy, grid(other)))
    else:
        side, times = changed(problem, change, deviation), 4 if change == "moved" else 1
        best = max(
            side.mean({**one, "reference_rate": times * one["reference_rate"]}) for one in grid(problem)
        )
    return (logit(best) - logit(first)) / deviation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["digits@4", "digits@16", "cifar@2", "cifar@8"])
    changes = ["none", "better", "worse", "moved", "early", "tails", "lost", "narrow"]
    parser.add_argument("--changes", nargs="+", default=changes)
    parser.add_argument("--runs", type=int, default=20, help="of each side")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(f"{'task':10s} {'change':8s}  {'by':12s} better  worse  cannot tell")
    with ProcessPoolExecutor(options.processes) as pool:
        for task in options.tasks:
            for change in options.changes:
                print(
                    f"{task:10s} {change:8s}  {true_difference(task, change):+.1f} standard deviations of a run",
                    flush=True,
                )
                jobs = [
                    pool.submit(judged, task, change, options.runs, seed) for seed in range(options.repeats)
                ]
                results = [job.result() for job in jobs]
                z = [one["z"] for one in results]
                for way in ("compare", "higher", "t-test"):
                    shares = [
                        sum(one[way] == said for one in results) / len(results)
                        for said in ("better", "worse", "cannot tell")
                    ]
                    said = "  ".join(f"{share:6.0%}" for share in shares)
                    print(f"{task:10s} {change:8s}  {way:12s}{said}", flush=True)
                mean, std = (statistics.fmean(one[name] for one in results) for name in ("mean", "std"))
                used = statistics.median(one["runs"] for one in results)
                print(
                    f"{'':20s}  z {np.mean(z):+.2f} sd {np.std(z):.2f}; mean {mean:+.4f} std {std:.4f} runs {used}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
