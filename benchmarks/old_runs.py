"""What old runs are worth: verdicts on tables whose truth is known, and a search that is warm-started by them.

    .venv/bin/python benchmarks/old_runs.py verdicts [--problems digits cifar laws odd lcbench] [--seeds 4]
    .venv/bin/python benchmarks/old_runs.py critical [--problems mlperf zeus digits cifar lcbench] [--seeds 8]
    .venv/bin/python benchmarks/old_runs.py warm [--problems lcbench laws] [--seeds 3] [--rows warm.csv]

`verdicts` imports random runs as a table of theirs would be, and prints how often `ask` was silent about the best rate, how far
off it was at three batches (the median factor), and what share of its 90 % intervals held the truth: the rate that is best on
average over everything else; the exponent's truth is the slope through those.

`critical` asks for critical batches: of runs to a target, MLPerf's and Zeus's, with samples at batches that were held out too;
their truth is the median of all runs, and the law of the whole table where that knows the critical batch within a factor of 4;
and of runs of several lengths, by the best of everything else in the whole table.

`warm` prints the share of the true front's hypervolume after 5, 10 and 25 trials, seconds known, for a search by itself; one
with 40 random runs of the same problem; one with 40 of another problem of the family; and the last two without doubt. Each
search is a row of a file when it ends, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import warnings
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from batch_law import mlperf_runs, zeus
from bsearch.commands.ask import as_study
from bsearch.search.laws.runs_table import RunsToTarget, to_target
from bsearch.search.laws.samples_to_target import fit_batch_law
from bsearch.search.laws.target_verdicts import target_verdicts
from bsearch.search.laws.verdicts import _critical_batch, verdicts
from bsearch.search.sources.columns import columns_of
from bsearch.search.sources.imported import imported
from bsearch.search.sources.runs import Run
from bsearch.search.store.stored import StoredStudy
from bsearch.search.suggest.ask_tell import Search
from bsearch.search.suggest.samplers import suggester_of
from bsearch.search.suggest.trial_history import PriorTrial
from problems import Laws, Problem, Share, Table, head, problems, random_value, row

AFTER = (5, 10, 25)
RUNS = 40
WAYS = ("alone", "same", "other", "same, believed", "other, believed")


def old_runs(problem: Problem, here: Problem, seed: int) -> list[PriorTrial]:
    """Random runs of a problem, timed as this one's: as imported ones are."""
    rng, found = np.random.default_rng((seed, 1)), []
    for _ in range(RUNS):
        parameters = {name: random_value(domain, rng) for name, domain in problem.space.items()}
        found.append((parameters, here.seconds(parameters), problem.curve(parameters, rng)[-1]))
    return found


def searched(
    problem: Problem, share: Share, old: Sequence[PriorTrial], doubted: bool, seed: int
) -> list[float]:
    """Shares of the true front after some trials of one search."""
    rng = np.random.default_rng(seed)
    search = Search(problem.domains(), stopping="none", known_seconds=problem.seconds, seed=seed)
    if old:
        search._suggester = suggester_of(
            "front",
            search._space,
            search.objectives,
            known_seconds=problem.seconds,
            prior_trials=old,
            doubted=doubted,
            seed=seed,
        )
    points = []
    for _ in range(AFTER[-1]):
        asked = search.ask()
        points.append((problem.seconds(asked.parameters), problem.accuracy(asked.parameters)))
        search.tell(asked.number, points[-1][0], problem.curve(asked.parameters, rng)[-1])
    return [share.of(points[:count]) for count in AFTER]


def warm(name: str, ways: Sequence[str], seeds: int, file: Path) -> None:
    """Search every problem with every seed, one row each; those that the file has already are not searched again."""
    family, done = problems(name), set(rows_of(file))
    shares: dict[int, Share] = {}
    for seed, place, way in product(range(seeds), range(len(family)), ways):
        if (name, place, way, seed) in done:
            continue
        problem, other = family[place], family[(place + 1) % len(family)]
        if place not in shares:
            shares[place] = Share(problem)
        old = [] if way == "alone" else old_runs(problem if way.startswith("same") else other, problem, seed)
        found = searched(problem, shares[place], old, not way.endswith("believed"), seed)
        with file.open("a", newline="") as out:
            csv.writer(out).writerow([name, place, way, seed, *(f"{share:.5f}" for share in found)])


def rows_of(file: Path) -> dict[tuple[str, int, str, int], list[float]]:
    """Shares by family, problem, way and seed."""
    if not file.exists():
        return {}
    with file.open(newline="") as rows:
        return {
            (name, int(place), way, int(seed)): list(map(float, shares))
            for name, place, way, seed, *shares in csv.reader(rows)
        }


def print_warm(name: str, file: Path) -> None:
    """Means and standard errors of each way, and of its difference from no old runs with the same problem and seed."""
    found = {key[1:]: shares for key, shares in rows_of(file).items() if key[0] == name}
    for way in dict.fromkeys(way for _, way, _ in found):
        print(row(f"{name}, {way}", [shares for (_, own, _), shares in found.items() if own == way], [0.0]))
    for way in dict.fromkeys(way for _, way, _ in found if way != "alone"):
        pairs = [
            [more - less for more, less in zip(shares, found[place, "alone", seed], strict=True)]
            for (place, own, seed), shares in found.items()
            if own == way and (place, "alone", seed) in found
        ]
        if pairs:
            print(row(f"{name}, {way} - alone, {len(pairs)} pairs", pairs, [0.0]), flush=True)


COUNTS, BATCHES = (20, 40, 80), (0.25, 0.5, 0.75)


def rate_of(parameters: Mapping[str, Any]) -> float:
    """What the optimizer gets."""
    if "learning_rate" in parameters:
        return float(parameters["learning_rate"])
    return float(parameters["reference_rate"] * math.sqrt(parameters["effective_batch"] / 256))


def true_rates(problem: Problem) -> dict[int, float]:
    """The best rate at a quarter, half and three quarters of the range of batches, on average over everything else."""
    rng, found = np.random.default_rng(3), {}
    space = {
        name: domain
        for name, domain in problem.space.items()
        if name not in ("reference_rate", "learning_rate")
    }
    name = next(name for name in ("learning_rate", "reference_rate") if name in problem.space)
    rates, batches = problem.space[name], problem.space["effective_batch"]
    others = [{key: random_value(domain, rng) for key, domain in space.items()} for _ in range(60)]
    for share in BATCHES:
        batch = round(batches.low * (batches.high / batches.low) ** share)
        grid = np.geomspace(rates.low, rates.high, 61)
        means = [
            np.mean([problem.accuracy({**one, "effective_batch": batch, name: rate}) for one in others])
            for rate in grid
        ]
        # Tables are flat between their points: the middle of what is as good as the best.
        best = grid[np.flatnonzero(np.array(means) >= max(means) - 1e-12)]
        middle = float(np.exp(np.log(best).mean()))
        found[batch] = rate_of({name: middle, "effective_batch": batch})
    return found


def imported_runs(problem: Problem, count: int, seed: int, *, measured: bool = False) -> StoredStudy:
    """Random runs as somebody's table has them.

    Args:
        measured: of a table only settings that it has, so that no length stands for another.
    """
    rng, runs = np.random.default_rng((seed, count)), []
    for place in range(count):
        parameters = {name: random_value(domain, rng) for name, domain in problem.space.items()}
        if measured and isinstance(problem, Table):
            nearest = dict(zip(problem.names, problem._nearest(parameters), strict=True))
            parameters = {
                key: value if key == "reference_rate" else round(value) for key, value in nearest.items()
            }
        row = {
            "bs": parameters["effective_batch"],
            "lr": rate_of(parameters),
            "runtime": problem.seconds(parameters),
        }
        others = {
            name: value
            for name, value in parameters.items()
            if name not in ("effective_batch", "reference_rate")
        }
        others.pop("learning_rate", None)
        runs.append(
            Run(f"runs.csv:{place + 2}", row | others, {"val_acc": problem.curve(parameters, rng)[-1]})
        )
    (group,) = imported("runs.csv", runs, columns_of("runs.csv", runs))
    return as_study(group)


def best_accuracies(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Batches, lengths, and the best mean accuracy that any of the other parameters has there, (batches, lengths)."""
    if isinstance(problem, Table):
        places = [problem.names.index(name) for name in ("effective_batch", "epochs")]
        batches, lengths = (np.array(problem.grid[place]) for place in places)
        best = np.full((len(batches), len(lengths)), -np.inf)
        for key, curves in problem.curves.items():
            at = tuple(
                int(np.searchsorted(axis, key[place]))
                for axis, place in zip((batches, lengths), places, strict=True)
            )
            best[at] = max(best[at], np.mean([curve[-1] for curve in curves]))
        return batches, lengths, best
    rng = np.random.default_rng(4)
    batches, lengths = np.geomspace(16, 512, 11).round(), np.array([1, 2, 3, 4, 6, 9, 13, 18, 26, 37, 52])
    others = [
        {name: random_value(domain, rng) for name, domain in problem.space.items()} for _ in range(4000)
    ]
    best = np.zeros((len(batches), len(lengths)))
    rows = problem._rows(others)  # type: ignore[attr-defined]
    places = [list(problem.space).index(name) for name in ("effective_batch", "epochs")]
    for i, batch in enumerate(batches):
        for j, length in enumerate(lengths):
            rows[:, places] = batch, length
            best[i, j] = problem._surrogate(rows)[:, 1].max() / 100  # type: ignore[attr-defined]
    return batches, lengths, best


def true_critical(batches: np.ndarray, lengths: np.ndarray, best: np.ndarray, level: float) -> float | None:
    """The batch that needs twice the data of the best one, between batches on a log scale; infinite beyond the largest."""
    needed = np.full(len(batches), np.inf)
    for place, of_batch in enumerate(best):
        reached = np.maximum.accumulate(of_batch)
        if reached[-1] >= level:
            needed[place] = (
                np.interp(level, reached, np.log(lengths)) if reached[0] < level else np.log(lengths[0])
            )
    if not np.isfinite(needed).any():
        return None
    first = int(np.argmin(needed))
    over = needed - needed[first] - math.log(2)
    after = next((place for place in range(first + 1, len(batches)) if over[place] >= 0), None)
    if after is None:
        return math.inf
    if not np.isfinite(over[after]):
        return float(batches[after])
    share = -over[after - 1] / (over[after] - over[after - 1])
    return float(batches[after - 1] * (batches[after] / batches[after - 1]) ** share)


def critical_of(family: Sequence[Problem], seeds: int, name: str) -> None:
    """How often the critical batch's interval holds that of the whole table, at the level that the verdict chose."""
    tables = [best_accuracies(problem) for problem in family]
    for count in COUNTS:
        asked, factors, held, widths = 0, [], [], []
        for (problem, table), seed in product(zip(family, tables, strict=True), range(seeds)):
            asked += 1
            study = imported_runs(problem, count, seed, measured=True)
            complete = [
                record
                for record in study.records
                if record.outcome == "complete" and record.accuracy is not None
            ]
            answer = _critical_batch(study, complete)
            truth = None if answer.silent else true_critical(*table, answer.data["target"])
            if truth is None:
                continue
            low, middle, high = answer.data["estimate"]
            held.append(low <= truth <= high)
            largest = float(table[0][-1])
            factors.append(abs(math.log(min(middle, largest) / min(truth, largest))))
            widths.append(math.log(min(high, largest) / min(low, largest)))
        print_held(f"{name}, {count} runs", asked, factors, held, widths)


def print_held(
    title: str, asked: int, factors: Sequence[float], held: Sequence[bool], widths: Sequence[float]
) -> None:
    texts = [title, f"{asked - len(held)} of {asked}"]
    if held:
        median = f"{math.exp(statistics.median(factors)):.3f}"
        texts += [median, f"{np.mean(held):.0%} of {len(held)}", f"{math.exp(statistics.median(widths)):.2f}"]
    print("".join(f"{text:>30}" for text in texts), flush=True)


def target_points(name: str) -> list[list[RunsToTarget]]:
    """Each workload's runs to its target."""
    folder = Path(os.environ["BSEARCH_DATA"])
    if name == "mlperf":
        return list(mlperf_runs(folder / "mlperf" / "samples_to_target.csv").values())
    return list(zeus(folder / "zeus" / "summary_train.csv").values())


def target_study(
    points: Sequence[RunsToTarget], count: int, rng: np.random.Generator
) -> tuple[StoredStudy, set[str]]:
    """Random ones of all runs, as somebody's table has them, and the levels among them."""
    every = [(point, place) for point in points for place in range(len(point.samples))]
    chosen = rng.permutation(len(every))[:count]
    rows = [(place, every[index]) for place, index in enumerate(chosen)]
    runs = [
        Run(
            f"runs.csv:{place}",
            values={
                "batch_size": point.effective_batch,
                "samples_to_target": point.samples[which],
                "seed": which,
                "round": point.group,
            },
        )
        for place, (point, which) in rows
    ]
    found = to_target("runs.csv", runs, {})
    assert found is not None
    (group,) = imported("runs.csv", *found)
    return as_study(group), {point.group for _, (point, _) in rows}


def targets_of(name: str, seeds: int) -> None:
    """Data at two batches held out, and the critical batch against that of the law of the whole table where it is known."""
    workloads = target_points(name)
    whole = [fit_batch_law(points).critical_batch() for points in workloads]
    for count in COUNTS:
        asked = asked_critical = 0
        figures: dict[str, tuple[list[float], list[bool], list[float]]] = {
            "data": ([], [], []),
            "critical": ([], [], []),
        }

        def add(
            what: str, truth: float, low: float, value: float, high: float, figures: Any = figures
        ) -> None:
            factors, held, widths = figures[what]
            factors.append(abs(math.log(value / truth)))
            held.append(low <= truth <= high)
            widths.append(math.log(high / low))

        for (points, critical), seed in product(zip(workloads, whole, strict=True), range(seeds)):
            rng = np.random.default_rng((seed, count))
            batches = sorted({point.effective_batch for point in points})
            held = (
                rng.choice(batches[1:-1], min(2, len(batches) - 3), replace=False) if len(batches) > 3 else []
            )
            study, levels = target_study(
                [point for point in points if point.effective_batch not in held], count, rng
            )
            (answer,) = target_verdicts(study, "samples", [int(batch) for batch in held])
            at = {(one["effective_batch"], one["level"]): one for one in answer.data.get("predicted", ())}
            for point in points:
                if point.effective_batch in held and point.group in levels:
                    asked += 1
                    one = at.get((point.effective_batch, point.group if len(levels) > 1 else ""))
                    if one is not None:
                        add("data", point.median, one["low"], one["value"], one["high"])
            if critical.high < 4 * critical.low:
                asked_critical += 1
                answers = {one.about: one for one in target_verdicts(study, "samples")}
                if not answers["critical batch"].silent:
                    add("critical", critical.value, *answers["critical batch"].data["estimate"])
        print_held(f"{name}, data, {count} runs", asked, *figures["data"])
        print_held(f"{name}, critical, {count} runs", asked_critical, *figures["critical"])


def verdicts_of(family: Sequence[Problem], seeds: int, name: str) -> None:
    truths = [true_rates(problem) for problem in family]
    for count in COUNTS:
        asked = silent = 0
        factors: list[float] = []
        held: list[bool] = []
        slopes: list[bool] = []
        critical: list[bool | None] = []
        for problem, truth in zip(family, truths, strict=True):
            batches = list(truth)
            slope = np.polyfit(np.log(batches), np.log(list(truth.values())), 1)[0]
            for seed in range(seeds):
                asked += 1
                study = imported_runs(problem, count, seed)
                if isinstance(problem, Laws):
                    answers = {one.about: one for one in verdicts(study)}
                    # The data to a level grow as batch + critical, so batch 8 needs half of what critical + 16 does.
                    estimate = answers["critical batch"].data.get("estimate")
                    critical.append(estimate and estimate[0] <= problem.critical + 16 <= estimate[2])
                (answer,) = verdicts(study, batches=batches)
                if not answer.data:
                    silent += 1
                    continue
                at = {rate["effective_batch"]: rate["learning_rate"] for rate in answer.data["rates"]}
                for batch in (batch for batch in batches if batch in at):
                    factors.append(abs(math.log(at[batch]["value"] / truth[batch])))
                    held.append(at[batch]["low"] <= truth[batch] <= at[batch]["high"])
                exponent = answer.data["exponent"]
                slopes.append(exponent["low"] <= slope <= exponent["high"])
        texts = [f"{name}, {count} runs", f"{silent} of {asked}"]
        if factors:
            texts += [
                f"{math.exp(statistics.median(factors)):.2f}",
                f"{np.mean(held):.0%} of {len(held)}",
                f"{np.mean(slopes):.0%}",
            ]
        if critical:
            told = [one for one in critical if one is not None]
            texts.append(f"{np.mean(told) if told else 0:.0%} of {len(told)}/{len(critical)}")
        print("".join(f"{text:>22}" for text in texts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    warmed = commands.add_parser("warm")
    warmed.add_argument("--problems", nargs="+", default=["lcbench", "laws"])
    warmed.add_argument("--seeds", type=int, default=3)
    warmed.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    warmed.add_argument(
        "--rows", type=Path, default=Path("warm.csv"), help="where each search is written when it ends"
    )
    asked = commands.add_parser("verdicts")
    asked.add_argument("--problems", nargs="+", default=["digits", "cifar", "laws", "odd", "lcbench"])
    asked.add_argument("--seeds", type=int, default=4)
    lengths = commands.add_parser("critical")
    lengths.add_argument("--problems", nargs="+", default=["mlperf", "zeus", "digits", "cifar", "lcbench"])
    lengths.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if options.command == "verdicts":
        print(
            "".join(
                f"{text:>22}"
                for text in ("", "silent", "off by a factor", "rates held", "exponents held", "critical held")
            )
        )
        for name in options.problems:
            verdicts_of(problems(name), options.seeds, name)
        return
    if options.command == "critical":
        print(
            "".join(
                f"{text:>30}" for text in ("", "silent", "off by a factor of", "held", "width, a factor of")
            )
        )
        for name in options.problems:
            if name in ("mlperf", "zeus"):
                targets_of(name, options.seeds)
            else:
                critical_of(problems(name), options.seeds, name)
        return
    for name in options.problems:
        warm(name, options.ways, options.seeds, options.rows)
    print(head("share of the front after trials", AFTER))
    for name in options.problems:
        print_warm(name, options.rows)


if __name__ == "__main__":
    main()
