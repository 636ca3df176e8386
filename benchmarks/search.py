"""Share of the true front found by a number of trials, or in a given time: bsearch and others on problems that cost nothing.

    .venv/bin/python benchmarks/search.py [--problems digits cifar laws] [--ways tpe front known] [--trials 50] [--seeds 8]
    .venv/bin/python benchmarks/search.py --asks          # ms of an ask after 100, 200, 500, 2000 trials with 8 running
    .venv/bin/python benchmarks/search.py --time [--ways tpe front front+stop]    # 4 parallel workers, equal time
    BSEARCH_DATA=... .venv/bin/python benchmarks/search.py --problems zeus --trials 10

Printed is the share of the true front's hypervolume (log seconds against accuracy) reached by the true values of the complete
trials, mean and standard error over seeds and problems: after 10, 25, 50, ... trials (3, 6 and 10 if at most 10), or with
`--time` after the mean time of so many random trials; and what people decide by: percent of the searches that have any setting
within 2, 5 and 10 % of the front's range of the best, the geometric mean of the fastest such setting's seconds over the true
one's, and the share of the hypervolume of the top fifth of that range. `known` is `front` with seconds known beforehand, as in
a study; `/2` searches only powers of two, `/rate` the learning rate without a rule; `+stop` stops trials early, `+time`
divides what candidates are worth by time, `+floor` is told that nothing below that fifth is worth anything, `+time+stop` does
both, and `+pause` pauses trials as well as dividing by time, and resumes them at `--restart` mean trainings each; `:4` takes
four suggestions from each fit of the models, with `--workers` trials at once. `--noise` is added to times (a share) and
accuracies.
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
from bsearch.search.suggest.ask_tell import Search
from bsearch.spaces.trial import Suggestion
from problems import FRACTIONS, WORKERS, Decision, Problem, Share, decision_rows, head, problems, row

AFTER = (3, 6, 10), (10, 25, 50, 75, 100)  # few trials, and the usual counts


@dataclass
class SearchResult:
    """The result of one search."""

    # True (seconds, accuracy) of finished trials, in order.
    points: list[tuple[float, float]] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)  # when each ended, on simulated clocks
    asks_s: list[float] = field(default_factory=list)
    # Per stopped trial: would it have risen above the front?
    stopped: list[bool] = field(default_factory=list)
    risen: int = 0  # finished trials that did


def search_of(way: str, problem: Problem, seed: int) -> Search:
    """The search that a name such as `front/2+stop` stands for."""
    sampler, *added = way.split("+")
    sampler, _, change = sampler.partition("/")
    space = problem.domains()
    batch, rate = space.get("effective_batch"), space.get("reference_rate")
    if change == "rate":
        ends = [rate[end] * math.sqrt(batch[end]) for end in ("low", "high")]
        del space["reference_rate"]
        space["learning_rate"] = {"low": ends[0], "high": ends[1], "log": True}
    if change == "2":
        low, high = (math.log2(space["effective_batch"][end]) for end in ("low", "high"))
        space["effective_batch"] = {"low": math.ceil(low), "high": math.floor(high)}
    return Search(
        space,
        sampler="front" if sampler == "known" else sampler,
        stopping="front" if {"stop", "pause"} & {*added} else "none",
        pauses="pause" in added,
        floor=Decision(problem).floor if "floor" in added else None,
        by_time=bool({"time", "pause"} & {*added}),
        known_seconds=(lambda one: problem.seconds(problem_parameters(way, one)))
        if sampler == "known"
        else None,
        seed=seed,
    )


def problem_parameters(way: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A suggestion as parameters of the problem."""
    if "/2" in way:  # searched by their exponents
        return {**parameters, "effective_batch": 2 ** parameters["effective_batch"]}
    if "/rate" in way:  # the rate itself, without a rule
        return {
            **parameters,
            "reference_rate": parameters["learning_rate"] / math.sqrt(parameters["effective_batch"]),
        }
    return dict(parameters)


def one_by_one(way: str, problem: Problem, trials: int, seed: int, noise: float) -> SearchResult:
    """Whole trials, one after another."""
    search, result, rng = search_of(way, problem, seed), SearchResult(), np.random.default_rng(seed)
    for _ in range(trials):
        started = time.perf_counter()
        suggestion = search.ask()
        result.asks_s.append(time.perf_counter() - started)
        parameters = problem_parameters(way, suggestion.parameters)
        seconds, accuracy = problem.seconds(parameters), problem.curve(parameters, rng)[-1]
        result.points.append((seconds, problem.accuracy(parameters)))
        noisy = seconds if way == "known" else seconds * math.exp(noise * rng.standard_normal())
        search.tell(suggestion.number, noisy, accuracy + 0.1 * noise * rng.standard_normal())
    return result


def at_once(
    way: str, problem: Problem, trials: int, seed: int, noise: float, workers: int, each_fit: int
) -> SearchResult:
    """Whole trials, so many at a time; each fit of the models gives the next `each_fit` of them."""
    search, result, rng = search_of(way, problem, seed), SearchResult(), np.random.default_rng(seed)
    running: list[tuple[float, int, float, float, float]] = []
    parameters_of: dict[int, dict[str, Any]] = {}
    now = 0.0
    for begun in range(trials + workers - 1):
        if begun >= workers:
            now, number, noisy, accuracy, true = heapq.heappop(running)
            result.points.append((problem.seconds(parameters_of[number]), true))
            search.tell(number, noisy, accuracy)
        started = time.perf_counter()
        if not search._ready:
            search.prepare(each_fit)
        suggestion = search.ask()
        result.asks_s.append(time.perf_counter() - started)
        parameters = problem_parameters(way, suggestion.parameters)
        parameters_of[suggestion.number] = parameters
        seconds, accuracy = problem.seconds(parameters), problem.curve(parameters, rng)[-1]
        noisy = seconds if way == "known" else seconds * math.exp(noise * rng.standard_normal())
        accuracy += 0.1 * noise * rng.standard_normal()
        heapq.heappush(
            running, (now + seconds, suggestion.number, noisy, accuracy, problem.accuracy(parameters))
        )
    while len(result.points) < trials:
        _, number, *_, true = heapq.heappop(running)
        result.points.append((problem.seconds(parameters_of[number]), true))
    return result


def side_by_side(
    way: str, problem: Problem, limit_s: float, seed: int, noise: float, restart_s: float = 0.0
) -> SearchResult:
    """Run trials on four simulated workers for `limit_s` seconds.

    Args:
        restart_s: what it takes to resume a paused trial.
    """
    search, result, rng = search_of(way, problem, seed), SearchResult(), np.random.default_rng(seed)
    seen_ends: list[tuple[float, float]] = []
    paused: dict[int, list[float]] = {}  # whole curves of trials that were paused

    def steps() -> Iterator[float]:
        """A worker: yields the seconds until its next report."""
        while True:
            started = time.perf_counter()
            suggestion = search.ask()
            result.asks_s.append(time.perf_counter() - started)
            parameters = problem_parameters(way, suggestion.parameters)
            seconds, curve = problem.seconds(parameters), problem.curve(parameters, rng)
            noisy = seconds if way.startswith("known") else seconds * math.exp(noise * rng.standard_normal())
            trained = 0
            if suggestion.resumes_from:
                trained, curve = round(suggestion.resumes_from * FRACTIONS), paused.pop(suggestion.number)
                yield restart_s
            for tenth, accuracy in list(enumerate(curve, start=1))[trained:]:
                yield seconds / FRACTIONS
                seen = accuracy + 0.1 * noise * rng.standard_normal()
                if search.report(suggestion.number, tenth / FRACTIONS, noisy, seen):
                    if "+pause" in way:
                        paused[suggestion.number] = curve
                        search.tell(suggestion.number, noisy, seen, "paused")
                        break
                    result.stopped.append(
                        curve[-1]
                        > max((end for taken, end in seen_ends if taken <= seconds), default=-math.inf)
                    )
                    search.tell(suggestion.number, noisy, seen, "stopped")
                    break
            else:
                result.points.append((seconds, problem.accuracy(parameters)))
                result.risen += curve[-1] > max(
                    (end for taken, end in seen_ends if taken <= seconds), default=-math.inf
                )
                result.ended_s.append(now)
                seen_ends.append((seconds, seen))
                search.tell(suggestion.number, noisy, seen)

    workers = [steps() for _ in range(WORKERS)]
    queue = [(next(worker), index) for index, worker in enumerate(workers)]
    heapq.heapify(queue)
    while queue[0][0] <= limit_s:
        now, index = heapq.heappop(queue)
        heapq.heappush(queue, (now + next(workers[index]), index))
    return result


def ask_s(way: str, problem: Problem, finished: int) -> float:
    """Median seconds of an ask with `finished` finished trials and 8 running ones."""
    search, rng = search_of("random", problem, 0), np.random.default_rng(0)

    def tell(suggestion: Suggestion) -> None:
        parameters = suggestion.parameters
        search.tell(suggestion.number, problem.seconds(parameters), problem.curve(parameters, rng)[-1])

    for number in range(finished + 8):
        suggestion = search.ask()
        if number < finished:
            tell(suggestion)
    # The same trials, seen by another sampler.
    search._suggester = search_of(way, problem, 0)._suggester
    taken = []
    for _ in range(6):
        started = time.perf_counter()
        suggestion = search.ask()
        taken.append(time.perf_counter() - started)
        tell(suggestion)
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=["digits", "cifar", "laws"])
    parser.add_argument("--ways", nargs="+", default=["random", "tpe", "front", "known"])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--restart", type=float, default=0.0, help="of a paused trial, in mean trainings")
    parser.add_argument(
        "--workers", type=int, default=0, help="trials at once; each ends before the next is asked for"
    )
    parser.add_argument("--time", action="store_true")
    parser.add_argument(
        "--paired", action="store_true", help="also each way's difference from the first, search by search"
    )
    parser.add_argument("--asks", nargs="*", type=int, help="only time an ask after these numbers of trials")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if options.asks is not None:
        counts = options.asks or [100, 200, 500, 2000]
        print(f"{'ms of an ask, 8 running, after':<34}" + "".join(f"{count:>10}" for count in counts))
        for way in options.ways:
            taken = [1e3 * ask_s(way, problems(options.problems[0])[0], count) for count in counts]
            print(f"{way:<34}" + "".join(f"{one:>10.0f}" for one in taken), flush=True)
        return
    after = [count for count in AFTER[options.trials > max(AFTER[0])] if count <= options.trials]
    title = "share after mean trials' time" if options.time else "share of the front after trials"
    print(head(title, after))
    for family in options.problems:
        members = problems(family)
        if not members:
            print(f"{family}: skipped, not found in BSEARCH_DATA")
            continue
        first: list[list[float]] = []
        measures = [(Share(problem), Decision(problem)) for problem in members]
        for way in options.ways:
            shares, decided, asks, stopped, ended, risen = [], [], [], [], 0, 0
            for problem, (share, decision) in zip(members, measures, strict=True):
                unit_s = problem.mean_seconds() / WORKERS
                for seed in range(options.seeds):
                    if options.time:
                        restart_s = options.restart * WORKERS * unit_s
                        result = side_by_side(
                            way, problem, after[-1] * unit_s, seed, options.noise, restart_s
                        )
                        counts = [sum(at <= count * unit_s for at in result.ended_s) for count in after]
                    elif options.workers:
                        named, _, each_fit = way.partition(":")
                        how = options.noise, options.workers, int(each_fit or 1)
                        result = at_once(named, problem, options.trials, seed, *how)
                        counts = after
                    else:
                        result = one_by_one(way, problem, options.trials, seed, options.noise)
                        counts = after
                    shares.append([share.of(result.points[:count]) for count in counts])
                    decided.append([decision.of(result.points[:count]) for count in counts])
                    asks += result.asks_s[-5:]
                    stopped += result.stopped
                    ended, risen = ended + len(result.points), risen + result.risen
            wrong = f"{sum(stopped)} of the {sum(stopped) + risen} that would have risen above the front"
            more = f"   {ended} ended, {len(stopped)} stopped, {wrong}" if stopped else ""
            print(row(f"{family}, {way}", shares, asks, more), flush=True)
            print(decision_rows(np.array(decided)), flush=True)
            first = shares if way == options.ways[0] else first
            if options.paired and way != options.ways[0]:
                differences = (np.array(shares) - np.array(first)).tolist()
                print(row(f"    less {options.ways[0]}", differences, asks), flush=True)


if __name__ == "__main__":
    main()
