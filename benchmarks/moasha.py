"""How much of the front Syne Tune's MOASHA finds in the time that benchmarks/search.py --time gives other methods.

    python3 -m venv VENV && VENV/bin/pip install syne-tune numpy optuna    # its own environment: bsearch does not need it
    VENV/bin/python benchmarks/moasha.py [--problems digits cifar laws] [--ways moasha ranks spared] [--trials 60] [--seeds 3]

The rows are comparable with those of `search.py --time`: the same problems, four simulated workers, the time of
a given number of random trials, a report at each tenth of a training, and only trials trained to their end count as points.

- random: MOASHA's proposals (random, as those of Optuna's random sampler), without stopping.
- moasha: as installed, with its defaults: rungs after 1, 3 and 9 tenths, of which the best third continues, sorted
  by front and then by distance.
- ranks: the same with that sorting fixed. In syne-tune 0.16.0 `NonDominatedPriority` returns which trial comes first, second,
  ..., but `Bracket` expects the rank of each; the new trial is then judged by the wrong number.
- spared: `ranks`, but trials that the last rung would stop are trained to their end: nine tenths are spent by then, and only
  finished trials are points.

The two metrics are the seconds of the whole training, known from the first report on, and 1 - accuracy. Dominance does not
depend on which seconds are reported, but distances do: after the time of 60 trials `ranks` found 0.935 of CIFAR's front with
these, 0.915 with their log and 0.910 with seconds so far (± 0.006, 0.014 and 0.015, ten seeds), hardly significant.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Iterator
from datetime import datetime

import numpy as np
from optuna.distributions import IntDistribution
from problems import FRACTIONS, WORKERS, Problem, Share, head, problems, row
from syne_tune.backend.trial_status import Trial
from syne_tune.config_space import loguniform
from syne_tune.optimizer.scheduler import SchedulerDecision
from syne_tune.optimizer.schedulers.multiobjective.moasha import MOASHA
from syne_tune.optimizer.schedulers.multiobjective.multiobjective_priority import MOPriority
from syne_tune.optimizer.schedulers.multiobjective.non_dominated_priority import compute_epsilon_net, pareto_efficient

WAYS = ("random", "moasha", "ranks", "spared")
LAST_RUNG = 9


class Ranks(MOPriority):
    """Rank of each trial: front by front, and within a front from the fastest on, the farthest remaining one next."""

    def priority_unsafe(self, objectives: np.ndarray) -> np.ndarray:
        ranks = np.empty(len(objectives), dtype=int)
        left, placed = np.arange(len(objectives)), 0
        while left.size:
            first = pareto_efficient(objectives[left])
            ranks[left[first]] = placed + compute_epsilon_net(objectives[left[first]], dim=0)
            left, placed = left[~first], placed + int(first.sum())
        return ranks


def scheduler_of(way: str, problem: Problem) -> MOASHA:
    # Integers are drawn as Optuna does, half a step beyond both ends: few epochs are drawn more often than with lograndint,
    # and `random` then runs 5 to 18 % more trials in the same time.
    steps = {name: 0.5 if isinstance(one, IntDistribution) else 0.0 for name, one in problem.space.items()}
    return MOASHA(
        {name: loguniform(one.low - steps[name], one.high + steps[name]) for name, one in problem.space.items()},  # type: ignore[attr-defined]
        metrics=["seconds", "error"],
        time_attr="tenth",
        max_t=FRACTIONS,
        multiobjective_priority=None if way == "moasha" else Ranks(),
    )


def side_by_side(
    way: str, problem: Problem, limit_s: float, seed: int
) -> tuple[list[tuple[float, float, float]], list[float], int]:
    """Run trials on simulated workers for `limit_s` seconds.

    Returns:
        For each trial trained to its end, when it ended and its true seconds and accuracy; the seconds of each ask; and the
        number of stopped trials.
    """
    np.random.seed(seed)  # MOASHA uses this global state, whatever seed it is given
    scheduler, rng = scheduler_of(way, problem), np.random.default_rng(seed)
    ended: list[tuple[float, float, float]] = []
    ask_times_s: list[float] = []
    stopped = 0

    def steps() -> Iterator[float]:
        """A worker: yields the seconds until its next report."""
        nonlocal stopped
        while True:
            started = time.perf_counter()
            drawn = scheduler.suggest().config
            parameters = {
                name: min(max(round(drawn[name]), one.low), one.high) if isinstance(one, IntDistribution) else drawn[name]
                for name, one in problem.space.items()
            }
            ask_times_s.append(time.perf_counter() - started)
            trial = Trial(len(ask_times_s), parameters, datetime.now())
            scheduler.on_trial_add(trial)
            seconds, curve = problem.seconds(parameters), problem.curve(parameters, rng)
            for tenth, accuracy in enumerate(curve, start=1):
                yield seconds / FRACTIONS
                if way != "random":
                    reported = {"tenth": tenth, "seconds": seconds, "error": 1 - accuracy}
                    stop = scheduler.on_trial_result(trial, reported) == SchedulerDecision.STOP
                    if stop and tenth < (LAST_RUNG if way == "spared" else FRACTIONS):
                        stopped += 1
                        break
            else:
                # The last report returns STOP as well: max_t is reached.
                ended.append((now, seconds, problem.accuracy(parameters)))
            scheduler.on_trial_remove(trial)

    workers = [steps() for _ in range(WORKERS)]
    queue = [(next(worker), index) for index, worker in enumerate(workers)]
    heapq.heapify(queue)
    while queue[0][0] <= limit_s:
        now, index = heapq.heappop(queue)
        heapq.heappush(queue, (now + next(workers[index]), index))
    return ended, ask_times_s, stopped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = ("digits", "cifar", "laws")  # those with curves
    parser.add_argument("--problems", nargs="+", default=families, choices=families)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    after = [round(options.trials * part / 4) for part in (1, 2, 3, 4)]
    print(head("share after mean trials' time", after))
    for family in options.problems:
        for way in options.ways:
            shares, asks, ends, stops = [], [], 0, 0
            for problem in problems(family):
                share = Share(problem)
                unit_s = problem.mean_seconds() / WORKERS
                for seed in range(options.seeds):
                    ended, ask_times_s, stopped = side_by_side(way, problem, after[-1] * unit_s, seed)
                    shares.append([share.of([point for at, *point in ended if at <= count * unit_s]) for count in after])
                    asks += ask_times_s[-5:]
                    ends, stops = ends + len(ended), stops + stopped
            print(row(f"{family}, {way}", shares, asks, f"   {ends} ended, {stops} stopped"), flush=True)


if __name__ == "__main__":
    main()
