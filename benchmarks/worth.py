"""What ten more trials add to a front: as the sampler expects it beforehand, and as it turned out.

    BSEARCH_DATA=... .venv/bin/python benchmarks/worth.py [--problems digits cifar laws] [--ways front known] [--seeds 6]

Printed are mean relative gains of the front's hypervolume (log seconds against accuracy, above the worst accuracy so far):
expected after so many trials, and that of the true values of the ten trials that followed; then, for a share at which a search
would have been ended, after how many trials, and what part of the hypervolume after 110 trials it had by then. At the end, of
all, what was found as a share of what was expected: the ends between which it lies eight times in ten.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from itertools import pairwise

import numpy as np
import optuna
from problems import problems

from search import problem_parameters, search_of

MORE, EVERY, LAST = 10, 5, 110
SHOWN = (10, 20, 30, 50, 75, 100)
LEAST = (0.05, 0.02, 0.01, 0.005)
BINS = (0.0, 0.003, 0.01, 0.03, 0.1, 10.0)


def area(points: list[tuple[float, float]], worst: float, end: float) -> float:
    """Hypervolume over log seconds up to `end` and accuracy above `worst`."""
    total, best = 0.0, worst
    for seconds, accuracy in sorted(points):
        if accuracy > best and math.log(seconds) < end:
            total += (accuracy - best) * (end - math.log(seconds))
            best = accuracy
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=["digits", "cifar", "laws"])
    parser.add_argument("--ways", nargs="+", default=["front", "known"])
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pairs_of_all: list[tuple[float, float]] = []
    print(f"{'expected -> found, after':<20}" + "".join(f"{count:>18}" for count in SHOWN))
    for family in options.problems:
        for way in options.ways:
            expected: dict[int, list[float]] = {}
            found: dict[int, list[float]] = {}
            ended: dict[float, list[tuple[int, float]]] = {least: [] for least in LEAST}
            for problem in problems(family):
                for seed in range(options.seeds):
                    search, points, told = search_of(way, problem, seed), [], {}
                    for count in range(LAST):
                        if count >= MORE and count % EVERY == 0:
                            told[count] = search._suggester.expected_gain(search._trials, MORE) or 0.0
                        suggestion = search.ask()
                        parameters = problem_parameters(way, suggestion.parameters)
                        seconds, accuracy = problem.seconds(parameters), problem.accuracy(parameters)
                        points.append((seconds, accuracy))
                        search.tell(suggestion.number, seconds, accuracy)
                    end = max(math.log(seconds) for seconds, _ in points) + 0.05
                    for count, gain in told.items():
                        worst = min(accuracy for _, accuracy in points[:count])
                        before = area(points[:count], worst, end)
                        expected.setdefault(count, []).append(gain)
                        found.setdefault(count, []).append(
                            area(points[: count + MORE], worst, end) / before - 1
                        )
                    lowest = min(accuracy for _, accuracy in points)
                    whole = area(points, lowest, end)
                    for least in LEAST:
                        count = next((one for one, gain in told.items() if gain < least), LAST)
                        ended[least].append((count, area(points[:count], lowest, end) / whole))
            pairs_of_all += [
                pair
                for count in expected
                for pair in zip(expected[count], found[count], strict=True)
                if pair[0] > 0
            ]
            mean = statistics.fmean
            pairs = "".join(
                f"{100 * mean(expected[one]):>8.2f} ->{100 * mean(found[one]):>5.2f} %" for one in SHOWN
            )
            print(f"{family + ', ' + way:<20}{pairs}", flush=True)
            for least, each in ended.items():
                shares = sorted(share for _, share in each)
                trials = statistics.median(count for count, _ in each)
                print(
                    f"  ended below {least:.1%}: after {trials:.0f} trials, with {mean(shares):.3f}, at least {shares[0]:.3f}"
                )
    for low, high in (*pairwise(BINS), (BINS[0], BINS[-1])):
        shares = np.array([actual / gain for gain, actual in pairs_of_all if low <= gain < high])
        if len(shares) > 1:
            ends = np.quantile(shares, [0.1, 0.5, 0.9]).round(2)
            near = np.mean((shares > 1 / 3) & (shares < 3))
            print(
                f"expected {low:.1%} to {high:.1%}: found / expected, 10, 50 and 90 % of {len(shares)}: {ends}; "
                f"within a factor of three: {near:.0%}; at most twice: {np.mean(shares <= 2):.0%}"
            )


if __name__ == "__main__":
    main()
