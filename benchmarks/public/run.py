"""A public benchmark: bsearch and its peers on problems that cost nothing, in one table that anybody can make again.

    python benchmarks/public/run.py [--problems lcbench digits cifar zeus] [--ways tpe ours] [--seeds 10]
    python benchmarks/public/run.py --ways ours --again       # ours at another commit, in place of its rows
    python benchmarks/public/run.py --page                    # docs/benchmarks.md from the rows; nothing is run

Each peer runs in an environment of its own, which uv makes with pinned versions. Rows are added to `results/` as they are
found; a search whose rows are there is not run again, so an interrupted benchmark goes on where it was. LCBench needs
onnxruntime (`pip install .[benchmark]`) and the data that BSEARCH_DATA names, Zeus the data; a family without them is left out
and named.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

# Before NumPy is imported: several threads are slower on matrices of this size, and asks are timed.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # the problems, which benchmarks/search.py has too

import optuna
from page import write_page
from problems import Problem, Share, problems
from searchers import NOT_INSTALLABLE, WAYS, PeerError, Searchers, applies
from simulation import Clock, Run, simulate
from table import (
    AFTER,
    CLOCKS,
    FAMILIES,
    PARAMETERS,
    RESULTS,
    USUAL,
    Row,
    family_of,
    file_of,
    read_rows,
    table,
    title,
    write_rows,
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=FAMILIES, choices=FAMILIES, metavar="FAMILY")
    parser.add_argument(
        "--ways", nargs="+", default=WAYS, metavar="WAY", help=f"of {', '.join(WAYS)}; `tpe` is `tpe+known` too"
    )
    parser.add_argument("--seeds", type=int, default=10, help="searches of each way on each problem")
    parser.add_argument("--trials", type=int, default=USUAL[-1], help="trainings a search, or the mean time of so many")
    parser.add_argument("--limit-s", type=float, default=900.0, help="wall-clock seconds after which a search is cut short")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--again", action="store_true", help="drop these ways' rows of these problems first")
    parser.add_argument("--page", action="store_true", help="write docs/benchmarks.md from the rows instead")
    options = parser.parse_args(arguments)
    if options.page:
        write_page(read_rows(options.results))
        return
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    ways = [way for way in WAYS if {way, way.partition("+")[0]} & set(options.ways)]
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"--ways: expected some of {', '.join(WAYS)}; got {', '.join(sorted(unknown))}")
    options.results.mkdir(parents=True, exist_ok=True)
    if options.again:
        drop(options.results, ways, options.problems)
    for family in options.problems:
        try:
            members = named_problems(family)
        except ModuleNotFoundError as error:
            print(f"{family}: left out, {error.name} is not installed: pip install .[benchmark]")
            continue
        if not members:
            print(f"{family}: left out, its data are not in the folder that BSEARCH_DATA names")
            continue
        with Searchers() as searchers:
            run_missing(searchers, members, ways, options)
        print_table(read_rows(options.results), family)


def named_problems(family: str) -> dict[str, Problem]:
    """A family's problems by name, none without its data; of Zeus those of the GPU on which all six workloads were measured."""
    members = problems(family)
    if family == "zeus":
        return {f"zeus/v100-{number}": problem for number, problem in enumerate(members[:6])}
    if family == "lcbench" and members:
        from lcbench import TASKS

        return {f"lcbench/{task}": problem for task, problem in zip(TASKS, members, strict=True)}
    return {family: members[0]} if members else {}


def drop(results: Path, ways: Sequence[str], families: Sequence[str]) -> None:
    """Remove the rows of these ways on these families."""
    kept = [row for row in read_rows(results) if row.way not in ways or family_of(row) not in families]
    for file in {file_of(way, results) for way in ways}:
        if file.exists():
            write_rows([row for row in kept if file_of(row.way, results) == file], file, append=False)


def run_missing(searchers: Searchers, members: dict[str, Problem], ways: Sequence[str], options: argparse.Namespace) -> None:
    """Run the searches whose rows are missing, seed by seed, so that an interrupted benchmark is about even."""
    done = {row.search for row in read_rows(options.results)}
    shares: dict[str, Share] = {}
    absent: set[str] = set(NOT_INSTALLABLE)
    for seed, way, name, clock in searches(members, ways, options.seeds):
        if (name, way, seed, clock) in done or way in absent:
            continue
        problem = members[name]
        share = shares[name] = shares.get(name) or Share(problem)
        started = time.monotonic()
        try:
            searcher = searchers.start(way, problem, share, seed, by_time=clock == "seconds")
        except PeerError as error:
            print(f"{way}: left out, {error}", flush=True)
            absent.add(way)
            continue
        run = simulate(searcher, problem, clock, trainings(name, options.trials)[-1], seed, options.limit_s)
        rows = [
            Row(
                name, way, seed, clock, after, share.of(run.points(after)), ask_ms(run), searcher.version, run.cut_before(after)
            )
            for after in trainings(name, options.trials)
        ]
        write_rows(rows, file_of(way, options.results), append=True)
        note = f"   cut short: {run.cut}" if run.cut else ""
        print(
            f"{name}, {way}, seed {seed}, {clock}: {rows[-1].share:.3f}, {len(run.asks_s)} asks, "
            f"{time.monotonic() - started:.0f} s{note}",
            flush=True,
        )


def searches(members: dict[str, Problem], ways: Sequence[str], seeds: int) -> Iterator[tuple[int, str, str, Clock]]:
    """All searches, in an order in which an interrupted benchmark has the most to compare."""
    for seed, known in product(range(seeds), (False, True)):
        for clock, way, (name, problem) in product(CLOCKS, ways, members.items()):
            if ("+" in way) == known and applies(way, problem):
                yield seed, way, name, clock


def trainings(name: str, most: int) -> list[int]:
    """After how many trainings the shares are counted."""
    counts = AFTER.get(name.partition("/")[0], USUAL)
    return [count for count in counts if count < most] + [min(most, counts[-1])]


def ask_ms(run: Run) -> float:
    return 1e3 * statistics.median(run.asks_s[-5:] or [0.0])


def print_table(rows: Sequence[Row], family: str) -> None:
    lines = table(rows, family)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{family}, {PARAMETERS[family]} parameters: share of the true front's hypervolume; * some searches were cut short")
    for first, *others in lines:
        aligned = [word.rjust(width) for word, width in zip(others, widths[1:], strict=True)]
        print("   ".join([first.ljust(widths[0]), *aligned]))
    for way, reason in NOT_INSTALLABLE.items():
        print(f"{title(way)}: left out, {reason}")
    print(flush=True)


if __name__ == "__main__":
    main()
