"""Cells of other people's tables: numbers, missing values, durations, dates."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from itertools import groupby, pairwise
from statistics import median
from typing import Any

from ...spaces.names import UNIT_WORDS, UNITS, is_unit, words_of
from .runs import Scalar

# As pandas, R, spreadsheets and people write that there is no value; and as trainings print a value that is no number.
MISSING = frozenset({"", "-", "--", "?", "na", "n/a", "#n/a", "<na>", "null", "none", "nil", "missing"})
NOT_FINITE = frozenset(
    {"nan", "-nan", "+nan", "inf", "-inf", "+inf", "infinity", "-infinity", "1.#qnan", "1.#inf", "#num!"}
)
_NUMBER = re.compile(r"[+-]?(\d{1,300}\.?\d{0,300}|\.\d{1,300})([eE][+-]?\d{1,4})?")
_COMMA = re.compile(r"[+-]?\d{1,300},\d{1,300}([eE][+-]?\d{1,4})?")
# Where a comma is before the decimals.
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3}){1,99}(,\d{1,300})?")
_YES, _NO = frozenset({"true", "yes", "y", "x", "1", "1.0"}), frozenset({"false", "no", "n", "0", "0.0"})
_POWERS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
# So many moments tell what is usual; a pause is so many times that, and at least so many seconds.
_FEW_GAPS, _PAUSE, _SHORTEST_PAUSE_S = 8, 30, 300.0
_LONGEST_CELL = 10_000
_EARLIEST = 3e8  # no run is from before 1979
_PART = re.compile(rf"(\d{{1,15}}(?:\.\d{{1,15}})?) ?({UNIT_WORDS})(?![a-z])", re.IGNORECASE)
_CLOCK = re.compile(r"(?:(\d{1,6}) days?,? )?(\d{1,6}):(\d{2})(?::(\d{2}(?:\.\d{1,9})?))?")


@lru_cache(1 << 16)  # tables repeat themselves
def cell(text: str, *, decimal_comma: bool = False) -> Scalar | None:
    """What a cell holds; None where it is empty, NaN where a training's value was no number.

    Args:
        decimal_comma: `0,1` is a tenth, as in tables whose columns are separated by semicolons.

    >>> cell(" 3e-4 "), cell("256"), cell("True"), cell("N/A"), cell("NaN"), cell("93.1%"), cell("adam")
    (0.0003, 256, True, None, nan, 0.931, 'adam')
    >>> cell("0,001"), cell("0,001", decimal_comma=True), cell("1.645", decimal_comma=True), cell("86,58 %", decimal_comma=True)
    ('0,001', 0.001, 1645, 0.8658)
    """
    text = text.strip()
    low = text[:20].lower()
    if low in MISSING:
        return None
    if low in NOT_FINITE:
        return math.nan
    if low in ("true", "false"):
        return low == "true"
    plain = text.removesuffix("%").rstrip() if len(text) < 400 else ""
    if decimal_comma and (_COMMA.fullmatch(plain) or _THOUSANDS.fullmatch(plain)):
        plain = plain.replace(".", "").replace(",", ".")
    if not _NUMBER.fullmatch(plain):
        return text
    if text.endswith("%"):
        return float(f"{plain}e-2") if "e" not in plain.lower() else float(plain) / 100
    return int(plain) if re.fullmatch(r"[+-]?\d{1,18}", plain) else float(plain)


def mapping(text: Scalar) -> dict[str, Any] | None:
    """Names and values in a cell, as JSON or as Python prints them; None where it holds none.

    >>> mapping('{"lr": 0.1}'), mapping("{'bs': 32}"), mapping("adam")
    ({'lr': 0.1}, {'bs': 32}, None)
    """
    if not isinstance(text, str) or not text.lstrip().startswith("{") or len(text) > _LONGEST_CELL:
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, dict):
            return {str(name): value for name, value in found.items()}
    return None


def is_truth(value: Scalar) -> bool:
    """Whether it is yes or no, as people write that.

    >>> [is_truth(value) for value in (True, 0, "yes", "x", 2, "adam")]
    [True, True, True, True, False, False]
    """
    return str(value).strip().lower() in _YES | _NO


def is_true(value: Scalar | None) -> bool:
    return str(value).strip().lower() in _YES


def number(value: Scalar | None) -> float | None:
    """A number, also of a source that keeps it as text; None where it is none.

    >>> number("0.1"), number(3), number(True), number("adam")
    (0.1, 3.0, None, None)
    """
    if isinstance(value, str):
        value = cell(value)
    if value is None or isinstance(value, bool | str):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def amount(value: Scalar | None) -> float | None:
    """A number, also with a letter for thousands, millions, billions or trillions; None where it is none.

    >>> amount("1.07B"), amount("124M"), amount(3), amount("small")
    (1070000000.0, 124000000.0, 3.0, None)
    """
    text = str(value).strip().upper()
    if len(text) > 1 and text[-1] in _POWERS and (plain := number(text[:-1].rstrip())) is not None:
        return round(plain * _POWERS[text[-1]], 3)
    return number(value)


def seconds(value: Scalar | None, unit_s: float = 1.0) -> float | None:
    """A duration in seconds; None where it is none.

    Args:
        unit_s: of a plain number.

    >>> seconds("1h 20m"), seconds("01:20:00"), seconds("2:30"), seconds(2, 60.0), seconds("1 day 00:00:01")
    (4800.0, 4800.0, 150.0, 120.0, 86401.0)
    >>> seconds("3.2min"), seconds("2 hours"), seconds("1:30", 3600.0)
    (192.0, 7200.0, 5400.0)
    """
    plain = number(value)
    if plain is not None:
        return plain * unit_s
    if not isinstance(value, str) or len(value) > 60:
        return None
    if clock := _CLOCK.fullmatch(value.strip()):
        days, first, second, third = clock.groups()
        if not third and unit_s == UNITS["h"]:
            third = "0"  # hours and minutes
        hours, minutes, rest = (first, second, third) if third else ("0", first, second)
        return float(days or 0) * 86400 + float(hours) * 3600 + float(minutes) * 60 + float(rest)
    parts = list(_PART.finditer(value))
    if not parts or re.sub(r"[ ,]|and", "", _PART.sub("", value)):
        return None
    return sum(float(part[1]) * _unit(part[2]) for part in parts)


def _unit(word: str) -> float:
    word = word.lower()
    return UNITS[word] if word in UNITS else UNITS[word.rstrip("s")]


def spent(moments: Sequence[float]) -> tuple[float, str]:
    """The seconds of a training between its first and last of these moments, and what is to be told of them: a gap of many
    times the usual is no training, such as a night of a closed laptop, nor is a clock that was set back.

    >>> spent([0, 10, 20, 30, 40, 50, 60, 70, 40_000, 40_010])
    (90.0, 'pauses left out of its seconds')
    """
    # One a step.
    gaps = [
        after - before for before, after in pairwise(second for second, _ in groupby(map(round, moments)))
    ]
    if len(gaps) < _FEW_GAPS:
        return (max(moments) - min(moments) if moments else 0.0), ""
    usual = median([gap for gap in gaps if gap > 0] or [0.0])
    longest = sorted(gaps[1:], reverse=True)  # before the first there may be a whole training
    # Evaluations are long too, and recur.
    while longest[0] > max(_PAUSE * usual, 5 * median(longest[1:11]), _SHORTEST_PAUSE_S):
        del longest[0]
    trained = [gap for gap in (gaps[0], *longest) if gap >= 0]
    if len(trained) == len(gaps):
        return max(moments) - min(moments), ""
    return float(sum(trained) + (len(gaps) - len(trained)) * usual), "pauses left out of its seconds"


def unit_of(name: str) -> float:
    """The unit in seconds that a column of durations has by its name.

    >>> unit_of("runtime"), unit_of("time_min"), unit_of("train hours"), unit_of("wall_ms")
    (1.0, 60.0, 3600.0, 0.001)
    """
    word = words_of(name)[-1]
    return _unit(word) if is_unit(word) else 1.0


def moment(value: Scalar | None) -> float | None:
    """A date or a time stamp, in seconds since 1970; None where it is none, such as a small number.

    >>> moment("2026-11-27T08:00:00Z") - moment("2026-11-27 07:00:00+00:00")
    3600.0
    """
    plain = number(value)
    if plain is not None:
        if plain < _EARLIEST or not math.isfinite(plain):
            return None
        if 1e13 <= plain < 1e14:
            value = f"{plain:.0f}"[:8] + "T" + f"{plain:.0f}"[8:]  # 20260701220902
        else:  # MLflow's are milliseconds; others write them to the microsecond or nanosecond
            return plain / next(
                per for bound, per in ((1e11, 1), (1e14, 1e3), (1e17, 1e6), (math.inf, 1e9)) if plain < bound
            )
    try:
        return (
            datetime.fromisoformat(value.strip()).timestamp()
            if isinstance(value, str) and len(value) < 40
            else None
        )
    except (ValueError, OverflowError, OSError):  # of the years 1 and 9999
        return None
