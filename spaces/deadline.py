"""When a study has to be done: a time of day, a date, or so long after the first run with it."""

from __future__ import annotations

import re
import time as clock
from dataclasses import dataclass
from datetime import datetime, time, timedelta

from .errors import Fault, StudyFileError

_EXPECTED = (
    "expected a time of day such as 18:00, a date such as 2026-11-28 09:00, one with a time zone such as "
    "2026-11-28T09:00+01:00, or a duration such as 2h, 90m or 1h30m"
)
_PART = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*(d|h|min|m|s)(?=[\s\d]|$)\s*")
_SECONDS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?")
_LONGEST = timedelta(days=366)
# What comes before the first and after the last training: imports, the front, files, leaving Ray. A share of the time, within
# these seconds, and so many times as long at most where the machine is slow.
_CLOSING, _CLOSING_S, _SLOWEST, _MOST_CLOSING = 0.03, (5.0, 15.0), 2.5, 0.12


def duration_of(text: str) -> timedelta | None:
    """The length of a duration; None where the text is none.

    >>> duration_of("1h 30m"), duration_of("90min"), duration_of("18:00")
    (datetime.timedelta(seconds=5400), datetime.timedelta(seconds=5400), None)
    """
    rest, total = text.strip(), 0.0
    while match := _PART.match(rest):
        total += float(match[1]) * _SECONDS[match[2]]
        rest = rest[match.end() :]
    return timedelta(seconds=total) if total and not rest else None


def checked_deadline(text: str) -> str:
    """The text, if it names a moment or a duration of at most a year.

    Raises:
        ValueError: what was expected instead.
    """
    length = duration_of(text)
    if length is None:
        _moment(text)
    elif length > _LONGEST:
        raise ValueError(f"expected at most a year, got {text!r}")
    return text


def moment_of(text: str, now: datetime) -> datetime:
    """The moment that `budget.by` names, with a time zone.

    Args:
        now: with a time zone; a time of day is today's, a duration begins now. What has no zone is in this machine's.

    Raises:
        StudyFileError: it has passed, or is more than a year away.

    >>> from datetime import timezone
    >>> now = datetime(2026, 11, 27, 12, 0, tzinfo=timezone.utc)
    >>> [moment_of(text, now).isoformat(" ", "minutes") for text in ("2h", "2026-11-28T09:00+01:00")]
    ['2026-11-27 14:00+00:00', '2026-11-28 09:00+01:00']
    """
    if (length := duration_of(text)) is not None:
        return now + length
    named = _moment(text)
    at = datetime.combine(now.date(), named) if isinstance(named, time) else named
    try:
        at = at if at.tzinfo is not None else _of_here(at, now)
        far = at - now > _LONGEST
    except (OverflowError, ValueError, OSError):  # of the years 1 and 9999
        far = True
    if far:
        raise StudyFileError(Fault("budget.by", f"expected a time within a year, got {text}"))
    if at <= now:
        tomorrow = (now + timedelta(days=1)).date()
        instead = f"{tomorrow} {text}" if isinstance(named, time) else "a later one"
        message = f"expected a time in the future, but {text} has passed: it is {now:%H:%M}. Write {instead}."
        raise StudyFileError(Fault("budget.by", message))
    return at


def _of_here(at: datetime, now: datetime) -> datetime:
    """The next such moment by this machine's clock: one that it skips when it is set is as long after, one that it shows twice
    may come again.
    """
    both = [at.replace(fold=fold).astimezone() for fold in (0, 1)]
    shown = [moment for moment in both if moment.replace(tzinfo=None, fold=0) == at]
    return min((moment for moment in shown if moment > now), default=max(both))


def names_zone(text: str) -> bool:
    """Whether a deadline is the same on every machine, whatever its time zone."""
    if duration_of(text) is not None:
        return True
    named = _moment(text)
    return isinstance(named, datetime) and named.tzinfo is not None


def _moment(text: str) -> time | datetime:
    text = text.strip()
    try:
        if _CLOCK.fullmatch(text):
            return time.fromisoformat(text.zfill(5) if text.count(":") == 1 else text.zfill(8))
        if len(text) > 10:
            return datetime.fromisoformat(text)
    except ValueError:
        pass
    raise ValueError(f"{_EXPECTED}; got {text[:60]!r}")


@dataclass(frozen=True)
class Deadline:
    """When a study has to be done, as its database holds it.

    Args:
        given: as it was written.
        began_at, ends_at: seconds since 1970.
    """

    given: str
    began_at: float
    ends_at: float

    def left_s(self, *, slowdown: float) -> float:
        """Seconds until what comes after the last training has to begin.

        Args:
            slowdown: of the machine, as its trials show it.
        """
        return self.ends_at - clock.time() - self.closing_s(slowdown)

    def closing_s(self, slowdown: float) -> float:
        """Seconds set aside for what comes after the last training."""
        whole_s, (least, most) = self.ends_at - self.began_at, _CLOSING_S
        aside_s = min(max(_CLOSING * whole_s, least), most) * min(max(slowdown, 1.0), _SLOWEST)
        return min(aside_s, max(_MOST_CLOSING * whole_s, least))
