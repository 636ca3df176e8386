"""Cells of other people's tables: numbers, missing values, durations, dates."""

from __future__ import annotations

import math
import re
from datetime import datetime
from functools import lru_cache

from .names import words_of
from .runs import Scalar

# As pandas, R, spreadsheets and people write that there is no value; and as trainings print a value that is no number.
MISSING = frozenset({"", "-", "--", "?", "na", "n/a", "#n/a", "<na>", "null", "none", "nil", "missing"})
NOT_FINITE = frozenset({"nan", "-nan", "+nan", "inf", "-inf", "+inf", "infinity", "-infinity", "1.#qnan", "1.#inf", "#num!"})
_NUMBER = re.compile(r"[+-]?(\d{1,300}\.?\d{0,300}|\.\d{1,300})([eE][+-]?\d{1,4})?")
_COMMA = re.compile(r"[+-]?\d{1,300},\d{1,300}([eE][+-]?\d{1,4})?")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3}){1,99}(,\d{1,300})?")  # where a comma is before the decimals
UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0}
UNITS |= {"h": 3600.0, "hr": 3600.0, "hour": 3600.0, "d": 86400.0, "day": 86400.0}
_WORDS = "ms|seconds?|secs?|s|minutes?|mins?|m|hours?|hrs?|h|days?|d"
_EARLIEST = 3e8  # no run is from before 1979
_PART = re.compile(rf"(\d{{1,15}}(?:\.\d{{1,15}})?) ?({_WORDS})(?![a-z])", re.IGNORECASE)
_CLOCK = re.compile(r"(?:(\d{1,6}) days? )?(\d{1,6}):(\d{2})(?::(\d{2}(?:\.\d{1,9})?))?")


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
        return float(f"{plain}e-2") if "e" not in low else float(plain) / 100
    return int(plain) if re.fullmatch(r"[+-]?\d{1,18}", plain) else float(plain)


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


def unit_of(name: str) -> float:
    """The unit in seconds that a column of durations has by its name.

    >>> unit_of("runtime"), unit_of("time_min"), unit_of("train hours"), unit_of("wall_ms")
    (1.0, 60.0, 3600.0, 0.001)
    """
    word = words_of(name)[-1]
    return UNITS.get(word) or UNITS.get(word.rstrip("s")) or 1.0


def moment(value: Scalar | None) -> float | None:
    """A date or a time stamp, in seconds since 1970; None where it is none, such as a small number.

    >>> moment("2026-11-27T08:00:00Z") - moment("2026-11-27 07:00:00+00:00")
    3600.0
    """
    plain = number(value)
    if plain is not None:
        if plain < _EARLIEST:
            return None
        return plain / 1000 if plain > 1e11 else plain  # MLflow's are milliseconds
    try:
        return datetime.fromisoformat(value.strip()).timestamp() if isinstance(value, str) and len(value) < 40 else None
    except ValueError:
        return None
