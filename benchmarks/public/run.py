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
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

# Before NumPy is imported: several threads are slower on matrices of this size, and asks are timed.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # the problems, which benchmarks/search.py has too

import optuna
from page import write_page
from problems import Decision, Problem, Share, problems
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=FAMILIES, choices=FAMILIES, metavar="FAMILY")
    parser.add_argument(
        "--ways",
        nargs="+",
        default=WAYS,
        metavar="WAY",
        help=f"of {', '.join(WAYS)}; `tpe` is `tpe+known` too",
    )
    parser.add_argument("--seeds", type=int, default=10, help="searches of each way on each problem")
    parser.add_argument(
        "--trials", type=int, default=USUAL[-1], help="trainings a search, or the mean time of so many"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=900.0,
        help="wall-clock seconds after which a search is cut short; a higher limit runs it again",
    )
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
        drop(options.results, lambda row: row.way in ways and family_of(row) in options.problems)
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
    if family.startswith("lcbench") and members:
        from lcbench import TASKS

        return {f"{family}/{task}": problem for task, problem in zip(TASKS, members, strict=True)}
    return {family: members[0]} if members else {}


def drop(results: Path, which: Callable[[Row], bool]) -> None:
    """Remove rows."""
    rows = read_rows(results)
    for file in {file_of(row.way, results) for row in rows if which(row)}:
        write_rows(
            [row for row in rows if file_of(row.way, results) == file and not which(row)], file, append=False
        )


def run_missing(
    searchers: Searchers, members: dict[str, Problem], ways: Sequence[str], options: argparse.Namespace
) -> None:
    """Run the searches whose rows are missing, or were cut by a lower limit."""
    rows = read_rows(options.results)
    cut = {row.search for row in rows if 0 < row.limit_s < options.limit_s}
    done = {row.search for row in rows} - cut
    shares: dict[str, Share] = {}
    judges: dict[str, Decision] = {}
    absent: set[str] = set(NOT_INSTALLABLE)
    for seed, way, name, clock in searches(members, ways, options.seeds):
        search = name, way, seed, clock
        if search in done or way in absent:
            continue
        share = shares[name] = shares.get(name) or Share(members[name])
        decision = judges[name] = judges.get(name) or Decision(members[name])
        started = time.monotonic()
        try:
            searcher = searchers.start(way, members[name], share, seed, by_time=clock == "seconds")
        except PeerError as error:
            print(f"{way}: left out, {error}", flush=True)
            absent.add(way)
            continue
        counts = trainings(name, options.trials)
        run = simulate(searcher, members[name], clock, counts[-1], seed, options.limit_s)
        if search in cut:
            drop(options.results, lambda row, search=search: row.search == search)
        write_rows(
            rows_of(run, search, share, decision, counts, searcher.version),
            file_of(way, options.results),
            append=True,
        )
        told = f"{share.of(run.points(counts[-1])):.3f}, {len(run.asks_s)} asks, {time.monotonic() - started:.0f} s"
        print(
            f"{name}, {way}, seed {seed}, {clock}: {told}" + (f"   cut short: {run.cut}" if run.cut else ""),
            flush=True,
        )


def rows_of(
    run: Run,
    search: tuple[str, str, int, str],
    share: Share,
    decision: Decision,
    counts: Sequence[int],
    version: str,
) -> list[Row]:
    """What a search found after these numbers of trainings."""
    ask_ms, rows = 1e3 * statistics.median(run.asks_s[-5:] or [0.0]), []
    for after in counts:
        points = run.points(after)
        within2, within5, within10, _, slower, _, top = decision.of(points)
        found = within2, within5, within10, slower, top
        rows.append(Row(*search, after, share.of(points), ask_ms, version, run.cut_before(after), *found))
    return rows


def searches(
    members: dict[str, Problem], ways: Sequence[str], seeds: int
) -> Iterator[tuple[int, str, str, Clock]]:
    """All searches, in an order in which an interrupted benchmark has the most to compare."""
    for seed, known in product(range(seeds), (False, True)):
        for clock, way, (name, problem) in product(CLOCKS, ways, members.items()):
            if ("+" in way) == known and applies(way, problem):
                yield seed, way, name, clock


def trainings(name: str, most: int) -> list[int]:
    """After how many trainings the shares are counted."""
    counts = AFTER.get(name.partition("/")[0], USUAL)
    most = min(most, counts[-1])
    return [count for count in counts if count < most] + [most]


def print_table(rows: Sequence[Row], family: str) -> None:
    lines = table(rows, family)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{family}, {PARAMETERS[family]} parameters: share of the true front's hypervolume")
    print("* a lower bound: some of these searches were cut short")
    for first, *others in lines:
        aligned = [word.rjust(width) for word, width in zip(others, widths[1:], strict=True)]
        print("   ".join([first.ljust(widths[0]), *aligned]))
    for way, reason in NOT_INSTALLABLE.items():
        print(f"{title(way)}: left out, {reason}")
    print(flush=True)


if __name__ == "__main__":
    main()
