"""Exceptions, grouped by who can fix the cause.

A message says where, what was expected, what was found and, if known, what to do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .boundary.secrets import masked

# The most faults reported per file, and the most characters shown of each.
MOST_FAULTS = 100
_MOST_CHARACTERS = 2000
_LONGEST_OF_TASKS = 10_000
# What a terminal interprets instead of printing: control characters except tab and line feed, bidirectional marks, and lone
# surrogates, which cannot be encoded.
_INTERPRETED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    r"""Text that is safe to print on a terminal: control characters are escaped.

    >>> print(plain("\x1b[31mred\r"))
    \x1b[31mred\x0d
    """
    return _INTERPRETED.sub(
        lambda found: f"\\x{ord(found[0]):02x}" if found[0] < "\x80" else f"\\u{ord(found[0]):04x}", text
    )


def cut(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Text truncated to `most` characters, with its full length.

    >>> cut("abcdef", 4)
    'abcd... (6 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def cut_middle(text: str, most: int) -> str:
    r"""Text truncated to about `most` characters, of which the first and last are kept.

    >>> cut_middle("abcdefghijkl", 6)
    'abc\n... (12 characters)\njkl'
    """
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n... ({len(text)} characters)\n{text[-half:]}"


def near_miss(word: Any, known: Any, cutoff: float = 0.6) -> str:
    """ " Did you mean 'x'?" if one of the known words is similar, otherwise an empty string.

    Args:
        cutoff: similarity from 0 to 1, as `difflib.SequenceMatcher.ratio` tells it.

    >>> near_miss("sqr", ["linear", "sqrt"])
    " Did you mean 'sqrt'?"
    """
    if len(str(word)) > 100:
        return ""
    matches = difflib.get_close_matches(str(word), [str(name) for name in known], n=1, cutoff=cutoff)
    return f" Did you mean {matches[0]!r}?" if matches else ""


class BsearchError(Exception):
    """An error that a user can act on; the command line prints it without a traceback. Secrets in its message are masked."""

    def __init__(self, message: str = "") -> None:
        super().__init__(masked(message))


class TerminatedError(KeyboardInterrupt):
    """SIGTERM was received: handled as Ctrl-C is, with an exit code of its own."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong in a study file.

    >>> print(Fault("space.rule", "expected one of linear, sqrt; got 'sqr'", "study.yaml", 9))
    study.yaml:9: space.rule: expected one of linear, sqrt; got 'sqr'
    """

    key: str
    message: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        place = "" if self.file is None else self.file if self.line is None else f"{self.file}:{self.line}"
        key = cut(self.key, 200).replace("\n", "\\n")
        return plain(": ".join(part for part in (place, key, cut(self.message)) if part))


class StudyFileError(BsearchError):
    """The study file must be fixed; the message lists every fault in it, one per line."""

    def __init__(self, faults: str | Fault | Iterable[Fault]) -> None:
        if isinstance(faults, str):
            faults = Fault("", faults)
        self.faults = (faults,) if isinstance(faults, Fault) else tuple(faults)
        lines = [str(fault) for fault in self.faults[:MOST_FAULTS]]
        more = (
            [f"... and {len(self.faults) - MOST_FAULTS} more errors"]
            if len(self.faults) > MOST_FAULTS
            else []
        )
        super().__init__("\n".join([*lines, *more]))


class TaskError(BsearchError):
    """The user's training code must be fixed: it breaks the interface, raised, or cannot be loaded."""

    def __init__(self, message: str) -> None:
        # It quotes errors of theirs, which may be of any length.
        super().__init__(cut(message, _LONGEST_OF_TASKS))


class ProfilingError(BsearchError):
    """A measurement of the device failed; measuring again may help."""


class InfeasiblePlanError(BsearchError):
    """No feasible plan exists for this batch. The trial is recorded as infeasible and the study continues.

    Args:
        message: what was expected and what was found.
        violation: how far the plan is from feasible, > 0: a constraint value for samplers.
    """

    def __init__(self, message: str, violation: float = 1.0) -> None:
        super().__init__(message)
        self.violation = max(violation, 1e-6)


class StorageError(BsearchError):
    """The database cannot be used: it is unavailable, read-only, full, in use by another driver, or has no such study."""


class NoStudyError(StorageError):
    """The storage does not exist, or holds no such study."""


class LeftOutWarning(UserWarning):
    """A stored row cannot be read by this version: it is left out of the results, with the reason."""


class ClusterError(BsearchError):
    """The cluster cannot be used: Ray or Slurm is unreachable, refuses, or has no such device or job."""


class OutputError(BsearchError):
    """A file cannot be written, or a port cannot be opened."""
