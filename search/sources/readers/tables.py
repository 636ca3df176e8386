"""Tables of runs: CSV and TSV, JSON and JSON lines, Parquet."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from ....spaces.boundary.files import foreign, regular
from ....spaces.errors import Fault, StudyFileError, cut
from ....spaces.names import is_unit
from ..names import is_metric, meaning_of
from ..runs import Run, curve_results, flat
from ..values import cell, mapping
from .folders import MOST_BYTES, MOST_LOG_BYTES

SUFFIXES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".ndjson", ".log", ".parquet")
_ENCODINGS = ("utf-8-sig", "cp1252")
# The first words of rows that are made of others.
_SUMS = frozenset(
    {"mean", "average", "avg", "total", "sum", "std", "stdev", "sd", "median", "min", "max", "minimum"}
)
_SUMS |= {"maximum", "mittelwert", "durchschnitt", "summe", "moyenne", "somme", "promedio", "suma", "media"}
_SUM = re.compile(rf"({'|'.join(sorted(_SUMS))})[ .:]*(\(.*\)|±.*|of .*)?", re.IGNORECASE | re.DOTALL)
# A last row is a mean or a sum where so many columns that vary, and all of its numbers, say so to this.
_FEWEST, _CLOSE, _MOST = 3, 0.005, 10_000
_MOST_ROWS = 2_000_000
_SHEETS = (".xls", ".xlsx", ".ods", ".numbers")


def read(source: str) -> Iterator[Run]:
    """The rows of a table.

    Raises:
        StudyFileError: it cannot be read, by line.
    """
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix in _SHEETS:
        raise StudyFileError(
            Fault("", f"expected CSV, got a spreadsheet ({suffix}). Save it as CSV (UTF-8).", source)
        )
    path = regular(path, "a table of runs", MOST_LOG_BYTES)
    with foreign(source, "a table of runs"):
        if suffix == ".parquet":
            yield from _parquet(path)
        elif suffix in (".jsonl", ".ndjson", ".log"):
            yield from _lines(path)
        elif suffix == ".json":
            yield from _json(path)
        else:
            yield from _without_sums(_csv(path))


def _without_sums(rows: Iterator[Run]) -> Iterator[Run]:
    """Rows, with those that are made of others marked: by their first words, unless these are choices that rows share, or as
    the last row, whose numbers are the means or sums of those before.
    """
    named, firsts, totals = list[Run](), list[str](), dict[str, list[float]]()
    last: Run | None = None
    for row in rows:
        first = next(iter(row.values.values()), None)
        if isinstance(first, str) and _SUM.fullmatch(first.strip()):
            named.append(row)
            continue
        if isinstance(first, str) and len(firsts) < len(named) + 1000:
            firsts.append(first)
        if last is not None:
            yield last
            for name, value in last.values.items():
                if isinstance(value, int | float) and len(totals.setdefault(name, [])) < _MOST:
                    totals[name].append(value)
        last = row
    if last is not None:
        yield replace(last, no_run="a mean or a sum") if _is_made_of(last, totals) else last
    is_choice = len(set(firsts)) < len(firsts) or last is None
    yield from named if is_choice else (replace(row, no_run="a mean or a sum") for row in named)


def _is_made_of(row: Run, columns: Mapping[str, Sequence[float]]) -> bool:
    """Whether its numbers are the means, or the sums, of those above, in columns that vary."""
    varying = {
        name: values
        for name, values in columns.items()
        if len(values) > _FEWEST and min(values) < max(values)
    }
    numbers = {
        name: value
        for name, value in row.values.items()
        if name in varying and isinstance(value, int | float)
    }
    return len(numbers) >= _FEWEST and any(
        all(math.isclose(value, made(varying[name]), rel_tol=_CLOSE) for name, value in numbers.items())
        for made in (fmean, math.fsum)
    )


def _csv(path: Path) -> Iterator[Run]:
    encoding = _encoding(path)
    with path.open(newline="", encoding=encoding, errors="replace") as file:
        head = file.read(65536)
        file.seek(0)
        delimiter = _delimiter(path, head)
        apart = f"[{delimiter}\\r\\n]"
        # Three digits may be thousands.
        decimals = rf'{apart}[ "+-]*(0,\d+|\d+,(\d\d?|\d{{4,}}))[ "%]*{apart}'
        decimal_comma = delimiter in ";\t" and bool(re.search(decimals, f"\n{head}\n"))
        reader = csv.reader(file, delimiter=delimiter)
        header: list[str] = []
        percent: dict[str, bool] = {}
        try:
            for row in reader:
                if not any(text.strip() for text in row):
                    continue
                if not header:
                    header = _header(path, row)
                    continue
                if reader.line_num == 2 and (units := _units(row)):
                    header = [
                        f"{name} ({unit})" if unit else name
                        for name, unit in zip_longest(header, units, fillvalue="")
                    ]
                    continue
                place = f"{path.name}:{reader.line_num}"
                if len(row) > len(header):
                    message = (
                        f"expected {len(header)} cells as in the header, got {len(row)}. Quote cells that hold "
                        f"{delimiter!r}."
                    )
                    raise StudyFileError(Fault("", message, str(path), reader.line_num))
                cells = {
                    name: cell(text, decimal_comma=decimal_comma and meaning_of(name) != "devices")
                    for name, text in zip(header, row, strict=False)
                }
                for name, text in zip(header, row, strict=False):
                    if isinstance(cells[name], float | int) and percent.setdefault(name, "%" in text) != (
                        "%" in text
                    ):
                        message = f"expected all or none of its numbers with %, got {cut(text.strip(), 40)!r}"
                        raise StudyFileError(Fault(name, message, str(path), reader.line_num))
                given = {name: value for name, value in cells.items() if value is not None}
                yield Run(
                    place, values=dict(flat({name: mapping(value) or value for name, value in given.items()}))
                )
        except csv.Error as error:
            raise StudyFileError(
                Fault("", f"expected a CSV table: {error}", str(path), reader.line_num)
            ) from None


def _units(row: list[str]) -> list[str]:
    """The units under a header, one of a time at least; empty where it is a run."""
    units = [text.strip().strip("[]()").lower().removeprefix("in ") for text in row]
    of_time = any(map(is_unit, units))
    return units if of_time and not any(isinstance(cell(unit), int | float) for unit in units) else []


def _encoding(path: Path) -> str:
    """UTF-8, with or without a mark, or what Windows' spreadsheets write; UTF-16 by its mark."""
    with path.open("rb") as file:
        start = file.read(1 << 20)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    if start[:4] == b"PK\x03\x04":
        raise StudyFileError(Fault("", "expected CSV, got a spreadsheet. Save it as CSV (UTF-8).", str(path)))
    if b"\0" in start:
        raise StudyFileError(Fault("", "expected a table in text, got a binary file", str(path)))
    try:
        start[: start.rfind(b"\n") + 1 or len(start)].decode("utf-8")
    except UnicodeDecodeError:
        return _ENCODINGS[1]
    return _ENCODINGS[0]


def _delimiter(path: Path, head: str) -> str:
    """The character that separates the columns: the one that the header has most."""
    line = next((line for line in head.splitlines() if line.strip()), "")
    if path.suffix.lower() == ".tsv":
        return "\t"
    return max(",;\t|", key=lambda each: (line.count(each), each == ","))


def _header(path: Path, row: list[str]) -> list[str]:
    names = [name.strip() or f"column {place + 1}" for place, name in enumerate(row)]
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        message = (
            f"expected a header of different names, got {', '.join(cut(name, 60) for name in twice)} twice"
        )
        raise StudyFileError(Fault("", message, str(path), 1))
    if len(names) == 1:
        message = f"expected several columns, got one, {cut(names[0], 60)!r}. Separate them by commas."
        raise StudyFileError(Fault("", message, str(path), 1))
    return names


def _lines(path: Path) -> Iterator[Run]:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line, text in enumerate(file, start=1):
            if text.strip():
                yield _document(path, line, _parsed(path, line, text.strip()))


def _json(path: Path) -> Iterator[Run]:
    """A list of runs, or columns by their names."""
    document = _parsed(
        path, 1, regular(path, "JSON", MOST_BYTES).read_text(encoding="utf-8-sig", errors="replace")
    )
    if isinstance(document, dict):
        lists = [
            value
            for value in document.values()
            if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        if len(lists) == 1:
            document = lists[0]
        elif document and all(isinstance(value, list) for value in document.values()):
            if len(lengths := {len(value) for value in document.values()}) > 1:
                message = f"expected columns of one length, got {sorted(lengths)}"
                raise StudyFileError(Fault("", message, str(path)))
            document = [
                dict(zip(document, row, strict=False)) for row in zip(*document.values(), strict=False)
            ]
    if not isinstance(document, list):
        raise StudyFileError(Fault("", f"expected a list of runs, got {type(document).__name__}", str(path)))
    for place, one in enumerate(document, start=1):
        yield _document(path, place, one)


def _parsed(path: Path, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        at = line + getattr(error, "lineno", 1) - 1
        raise StudyFileError(
            Fault("", f"expected JSON: {getattr(error, 'msg', error)}", str(path), at)
        ) from None


def _document(path: Path, place: int, document: Any) -> Run:
    """A run of JSON: settings under `config` or `params`, results under `summary` or `metrics`, or all of them mixed."""
    if not isinstance(document, Mapping):
        message = f"expected an object with a run's settings and results, got {type(document).__name__}"
        raise StudyFileError(Fault("", message, str(path), place))
    if {"op_code", "worker_id"} <= document.keys():
        raise StudyFileError(
            Fault("", f"expected runs, got Optuna's journal. Write optuna:{path}", str(path))
        )
    rest = dict(document)
    parts: list[dict[str, Any]] = []
    for names in (
        ("config", "params", "parameters", "hparams", "settings"),
        ("summary", "metrics", "results", "summary_metrics"),
    ):
        found = next((name for name in names if isinstance(rest.get(name), Mapping)), None)
        parts.append({} if found is None else rest.pop(found))
    curves: dict[str, float] = {}
    for part in (parts[1], rest):
        for name in [name for name, value in part.items() if _is_curve(name, value, part is rest)]:
            curves |= curve_results(name, part.pop(name))
    return Run(f"{path.name}:{place}", dict(flat(parts[0])), dict(flat(parts[1])) | curves, dict(flat(rest)))


def _is_curve(name: str, value: Any, unsaid: bool) -> bool:
    """Whether a list is a metric over time; one that may be a setting, such as betas, only by its name."""
    numbers = isinstance(value, list) and len(value) > 1 and all(type(one) in (int, float) for one in value)
    return numbers and (not unsaid or is_metric(name))


def _plain(value: Any) -> Any:
    """A decimal as a number, a duration in seconds, a date as text."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value.isoformat() if isinstance(value, datetime) else value


def _parquet(path: Path) -> Iterator[Run]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        message = "expected the package pyarrow to read Parquet. Install it, or save the table as CSV."
        raise StudyFileError(Fault("", message, str(path))) from None
    try:
        table = parquet.ParquetFile(path)
        if table.metadata.num_rows > _MOST_ROWS:
            raise ValueError(f"{table.metadata.num_rows:,} rows, of at most {_MOST_ROWS:,}")
        number = 0
        for batch in table.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield Run(
                    f"{path.name}:{number}",
                    values=dict(flat({name: _plain(value) for name, value in row.items()})),
                )
    except (ArrowException, ValueError) as error:
        raise StudyFileError(
            Fault("", f"expected a Parquet table: {cut(str(error), 200)}", str(path))
        ) from None
