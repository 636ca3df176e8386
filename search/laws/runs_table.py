"""Runs that reached a target, read from a CSV table: by effective batch, workload and group."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...spaces.errors import Fault, StudyFileError, cut

# What is read from a table, by the names that its column may have: the first is the one to write.
_COLUMNS = {
    "effective_batch": ("effective_batch", "batch_size", "batch"),
    "to_target": ("to_target", "samples_to_target", "samples"),
    "workload": ("workload",),
    "group": ("group", "round"),
}
_NEEDED = ("effective_batch", "to_target")
_IS = {
    "effective_batch": "the batch of a whole optimizer step",
    "to_target": "the samples or epochs until the target was reached, not the metric itself",
}
# No batch and no number of samples is larger.
_LARGEST = 2**60
# Longer cells and headers are truncated in messages.
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class RunsToTarget:
    """What runs of one setting needed to reach the target.

    Args:
        effective_batch: of all of them.
        samples: of each run, > 0: samples, epochs, or any other count of data.
        group: of settings that share a level, such as one version of a benchmark.
    """

    effective_batch: int
    samples: tuple[float, ...]
    group: str = ""

    @property
    def median(self) -> float:
        return float(np.median(self.samples))


def read_runs(path: Path) -> dict[str, list[RunsToTarget]]:
    """The measured points of each workload in a CSV table.

    Columns are `effective_batch`, `to_target` (one number, or several of as many runs, separated by spaces), and optionally
    `workload` and `group`. Rows of the same workload, batch and group are one point where each has one run.

    Raises:
        StudyFileError: it cannot be read; with every fault, by line and column.
    """
    lines = _lines(path)
    header = [name.strip() for name in lines[0][1]] if lines else []
    places = _places(str(path), header)
    if len(lines) < 2:
        raise StudyFileError(Fault("", "expected rows below the header, got none", str(path)))
    faults: list[Fault] = []
    single: dict[tuple[str, str, int], list[float]] = {}
    points: dict[str, list[RunsToTarget]] = {}
    for line, row in lines[1:]:
        cells = {what: row[place].strip() if place < len(row) else "" for what, place in places.items()}
        if found := [
            Fault(header[places[key]] if key else "", text, str(path), line) for key, text in _wrong(header, row, cells)
        ]:
            faults += found
            continue
        batch, runs = int(float(cells["effective_batch"])), [float(value) for value in cells["to_target"].split()]
        workload, group = cells.get("workload", ""), cells.get("group", "")
        if len(runs) == 1:
            single.setdefault((workload, group, batch), []).extend(runs)
        else:
            points.setdefault(workload, []).append(RunsToTarget(batch, tuple(runs), group))
    if faults:
        raise StudyFileError(faults)
    for (workload, group, batch), runs in single.items():
        points.setdefault(workload, []).append(RunsToTarget(batch, tuple(runs), group))
    return points


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """The rows that are not blank, the header among them, each with the number of its last line.

    Raises:
        StudyFileError: the file cannot be read, or is no CSV table.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            try:
                return [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
            except csv.Error as error:
                raise StudyFileError(Fault("", f"expected a CSV table: {error}", str(path), reader.line_num)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise StudyFileError(f"{path}: expected a CSV table in UTF-8: {error}") from None


def _places(path: str, header: Sequence[str]) -> dict[str, int]:
    """The position of each column that is read.

    Raises:
        StudyFileError: one is missing, or two could be meant.
    """
    counts, places, faults = Counter(header), {}, []
    for what, names in _COLUMNS.items():
        # The name to write decides between several; a name that occurs twice never does.
        found = [name for name in names if name in counts][:1] if what in counts else [name for name in names if name in counts]
        if sum(counts[name] for name in found) > 1:
            every = ", ".join(name for name in header if name in found)
            faults.append(Fault("", f"expected one column {what}, got {every}. Rename or remove the others.", path, 1))
        elif found:
            places[what] = header.index(found[0])
        elif what in _NEEDED:
            got = cut(", ".join(header), _SHOWN) or "an empty file"
            hint = " Separate columns by commas." if len(header) == 1 else ""
            faults.append(Fault("", f"expected a column {what}, {_IS[what]}; got {got}.{hint}", path, 1))
    if faults:
        raise StudyFileError(faults)
    return places


def _wrong(header: Sequence[str], row: Sequence[str], cells: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What is wrong in a row: the column (empty: the whole row) and a message."""
    if len(row) > len(header):
        yield "", f"expected {len(header)} cells, got {len(row)}. Separate several runs by spaces, not by commas."
        return
    batch = cells["effective_batch"]
    if not 1 <= _number(batch) <= _LARGEST or not _number(batch).is_integer():
        yield "effective_batch", f"expected an integer >= 1, got {_shown(batch)}"
    runs = cells["to_target"].split() or [""]
    for value in [value for value in runs if not 1 / _LARGEST <= _number(value) <= _LARGEST][:1]:
        yield "to_target", f"expected numbers > 0, separated by spaces; got {_shown(value)}.{_advice(value)}"


def _advice(value: str) -> str:
    if not value or value.lower() == "nan" or math.isinf(_number(value)):
        return " Leave out runs that did not reach the target, and batches where most did not."
    return " Write a number as 12000 or 1.2e4." if math.isnan(_number(value)) else ""


def _number(text: str) -> float:
    """NaN where it is none, which no comparison admits."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _shown(text: str) -> str:
    return repr(cut(text, _SHOWN)) if text else "an empty cell"
