"""The rows of the benchmark, and what follows from them: shares with their standard errors, and ranks."""

from __future__ import annotations

import csv
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from scipy.stats import rankdata
from searchers import NAMES, WAYS
from simulation import Clock

RESULTS = Path(__file__).parent / "results"
PARAMETERS = {"lcbench@52": 4, "lcbench": 8, "digits": 3, "cifar": 4, "zeus": 1}
FAMILIES = tuple(PARAMETERS)
USUAL = (5, 10, 15, 20, 25)
AFTER = {"zeus": (3, 10)}  # trainings after which a family's shares are counted; Zeus has 5 to 15 settings
CLOCKS: tuple[Clock, ...] = ("trials", "seconds")


@dataclass(frozen=True)
class Row:
    """What one search had found after a number of trainings, or in the mean time of so many.

    Args:
        problem: FAMILY/NAME.
        share: of the true front's hypervolume.
        ask_ms: median of its last asks.
        version: of the searcher.
        cut: why the search did not reach `after`, if it did not; `share` is then what it had found.
        within2, within5, within10: whether it has any setting within that part of the front's range of the best; NaN: rows of
            before these were kept.
        slower: log of the seconds of the fastest such setting within 5 % over the true one's; NaN: none.
        top: share of the hypervolume of the top fifth of that range.
    """

    problem: str
    way: str
    seed: int
    clock: str
    after: int
    share: float
    ask_ms: float
    version: str
    cut: str = ""
    within2: float = math.nan
    within5: float = math.nan
    within10: float = math.nan
    slower: float = math.nan
    top: float = math.nan

    @property
    def search(self) -> tuple[str, str, int, str]:
        """What tells one search from another."""
        return self.problem, self.way, self.seed, self.clock

    @property
    def limit_s(self) -> float:
        """Wall-clock seconds at which the search was cut, 0 if that is not why it ended."""
        return float(self.cut.split()[1]) if self.cut.startswith("limit ") else 0.0


def file_of(way: str, folder: Path) -> Path:
    """Where the rows of a way's searcher are."""
    return folder / f"{way.partition('+')[0]}.csv"


def read_rows(folder: Path = RESULTS) -> list[Row]:
    """All rows, in the order of WAYS."""
    found = []
    for file in sorted({file_of(way, folder) for way in WAYS}):
        if file.exists():
            with file.open(newline="") as opened:
                found += [_row(row) for row in csv.DictReader(opened)]
    return sorted(found, key=lambda row: (row.problem, WAYS.index(row.way), row.seed, row.clock, row.after))


def _row(row: Mapping[str, str]) -> Row:
    numbers = {"seed": int, "after": int, "share": float, "ask_ms": float, **dict.fromkeys(DECISION, float)}
    return Row(
        **{name: numbers.get(name, str)(value) for name, value in row.items() if value or name == "cut"}
    )


# What people decide by.
DECISION = ("within2", "within5", "within10", "slower", "top")


def write_rows(rows: Sequence[Row], file: Path, *, append: bool) -> None:
    with file.open("a" if append else "w", newline="") as opened:
        writer = csv.DictWriter(opened, [field.name for field in fields(Row)], lineterminator="\n")
        if not opened.tell():
            writer.writeheader()
        for row in rows:
            written = {
                name: "" if math.isnan(getattr(row, name)) else f"{getattr(row, name):.4g}"
                for name in DECISION
            }
            writer.writerow(
                {**asdict(row), "share": f"{row.share:.4f}", "ask_ms": f"{row.ask_ms:.3g}", **written}
            )


@dataclass(frozen=True)
class Cell:
    """Shares of one way over a family's problems.

    Args:
        mean: over problems, of the mean over seeds.
        error: its standard error over problems and seeds, with each problem's mean over all ways subtracted: some problems are
            harder for everybody. NaN with one search.
        seeds: the fewest that a problem has.
        cut: searches that did not get so far; the mean is then a lower bound.
    """

    mean: float
    error: float
    seeds: int
    problems: int
    cut: int

    def __str__(self) -> str:
        error = "" if math.isnan(self.error) else f" ± {_short(self.error)}"
        return _short(self.mean) + error + ("*" if self.cut else "")


def _short(share: float) -> str:
    return f"{share:.3f}".removeprefix("0")


def cells(rows: Iterable[Row], clock: str, after: int) -> dict[str, Cell]:
    """The cell of each way that has rows of this clock and number of trainings, best first."""
    counted = [row for row in rows if row.clock == clock and row.after == after]
    means = shares_by_problem(counted)
    usual = {problem: statistics.fmean(by_way.values()) for problem, by_way in means.items()}
    found = {}
    for way in WAYS:
        if mine := [row for row in counted if row.way == way]:
            problems = Counter(row.problem for row in mine)
            found[way] = Cell(
                mean=statistics.fmean(means[problem][way] for problem in problems),
                error=_standard_error([row.share - usual[row.problem] for row in mine]),
                seeds=min(problems.values()),
                problems=len(problems),
                cut=sum(bool(row.cut) for row in mine),
            )
    return dict(sorted(found.items(), key=lambda each: -each[1].mean))


def shares_by_problem(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Mean share over seeds, by problem and way."""
    shares: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        shares[row.problem][row.way].append(row.share)
    return {
        problem: {way: statistics.fmean(each) for way, each in by_way.items()}
        for problem, by_way in shares.items()
    }


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def mean_ranks(rows: Iterable[Row], clock: str, after: int) -> dict[str, float]:
    """Mean over problems of each way's rank by its mean share, 1 the best.

    Of the ways that have rows of every problem, none of them cut: what a search had found by then would be ranked too low.
    """
    counted = [row for row in rows if row.clock == clock and row.after == after]
    means, cut = shares_by_problem(counted), {row.way for row in counted if row.cut}
    ways = [way for way in WAYS if way not in cut and all(way in by_way for by_way in means.values())]
    ranks = [rankdata([-by_way[way] for way in ways]) for by_way in means.values()]
    return dict(zip(ways, np.mean(ranks, axis=0).tolist(), strict=True)) if ranks else {}


def title(way: str) -> str:
    name, _, known = way.partition("+")
    return NAMES[name] + (", seconds known" if known else "")


def family_of(row: Row) -> str:
    return row.problem.partition("/")[0]


def columns_of(rows: Sequence[Row], family: str) -> list[int]:
    """After how many trainings a family's table tells the shares: few and many."""
    found = sorted({row.after for row in rows})
    return [after for after in found if after in (10, 25, *AFTER.get(family, ()))] or found[-1:]


def decisions(rows: Iterable[Row], family: str) -> list[list[str]]:
    """What people decide by: the header, then a line for each way whose rows have it; trials one after another."""
    rows = [
        row
        for row in rows
        if family_of(row) == family and row.clock == "trials" and not math.isnan(row.within5)
    ]
    after = columns_of(rows, family) if rows else []
    lines = [
        [
            "searcher",
            *(f"{what} ({count})" for count in after for what in ("2, 5, 10 %", "fastest", "top fifth")),
            "seeds",
        ]
    ]
    for way in WAYS:
        line = [title(way)]
        for count in after:
            mine = [row for row in rows if row.way == way and row.after == count]
            if not mine or any(row.cut for row in mine):
                line += ["", "", ""]
                continue
            reached = [statistics.fmean(getattr(row, name) for row in mine) for name in DECISION[:3]]
            slower = [row.slower for row in mine if not math.isnan(row.slower)]
            line.append(" ".join(f"{100 * share:.0f}" for share in reached))
            line.append(f"× {math.exp(statistics.fmean(slower)):.2f}" if slower else "-")
            line.append(_short(statistics.fmean(row.top for row in mine)))
        if any(line[1:]):
            seeds = min(
                Counter(row.problem for row in rows if row.way == way and row.after == after[-1]).values()
            )
            lines.append([*line, str(seeds)])
    return lines


def table(rows: Iterable[Row], family: str) -> list[list[str]]:
    """A family's table: the header, then a line for each way that was run, in the order of WAYS."""
    rows = [row for row in rows if family_of(row) == family]
    after = columns_of(rows, family)
    found = {(clock, count): cells(rows, clock, count) for clock in CLOCKS for count in after}
    ranks = {clock: mean_ranks(rows, clock, after[-1]) for clock in CLOCKS} if after else {}
    total = len({row.problem for row in rows})
    trials, times = [f"{count} trials" for count in after], [f"time of {count}" for count in after]
    lines = [["searcher", *trials, "rank", *times, "rank", "ms an ask", "seeds"]]
    for way in WAYS:
        mine = [row for row in rows if row.way == way]
        if not mine:
            continue
        line = [title(way)]
        for clock in CLOCKS:
            line += [str(found[clock, count].get(way, "")) for count in after]
            line.append(f"{ranks[clock][way]:.1f}" if way in ranks[clock] else "")
        cell = next(by_way[way] for by_way in found.values() if way in by_way)
        seeds = f"{cell.seeds}" + (f" ({cell.problems} of {total} problems)" if cell.problems < total else "")
        lines.append([*line, f"{statistics.median(row.ask_ms for row in mine):.2g}", seeds])
    return lines
