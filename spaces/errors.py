"""Everything that can go wrong, sorted by who can act on it.

A message says where, what was expected, what came, and the next step where we know it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Faults of one file that are told, and characters of one of them: nobody reads on, and terminals hold no megabytes.
MOST_FAULTS = 100
_MOST_CHARACTERS = 2000
# What a terminal obeys instead of showing it: control characters but tab and line feed, marks that turn the direction of
# text, and halves of characters, which no encoding can write.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    r"""Text that a terminal shows and does not obey: control characters are escaped.

    >>> print(plain("\x1b[31mred\r"))
    \x1b[31mred\x0d
    """
    return _OBEYED.sub(lambda found: f"\\x{ord(found[0]):02x}" if found[0] < "\x80" else f"\\u{ord(found[0]):04x}", text)


def cut(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Text of at most so many characters, and how many there were.

    >>> cut("abcdef", 4)
    'abcd... (6 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


class BsearchError(Exception):
    """Something a user can read and act on; the command line prints it without a traceback."""


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
    """The study file is to be mended: every fault found in it, one a line."""

    def __init__(self, faults: str | Fault | Iterable[Fault]) -> None:
        if isinstance(faults, str):
            faults = Fault("", faults)
        self.faults = (faults,) if isinstance(faults, Fault) else tuple(faults)
        told = [str(fault) for fault in self.faults[:MOST_FAULTS]]
        more = [f"... and {len(self.faults) - MOST_FAULTS} faults more"] if len(self.faults) > MOST_FAULTS else []
        super().__init__("\n".join([*told, *more]))


class ObjectiveError(BsearchError):
    """The user's training code is to be mended: it broke its contract, raised, or cannot be loaded."""


class ProbeError(BsearchError):
    """A measurement of the device did not come out; measuring again may help."""


class InfeasiblePlanError(BsearchError):
    """No plan keeps every rule for this batch; nobody's fault: the trial is recorded and the study goes on.

    Args:
        message: what was expected and what came.
        violation: how far the plan is from being legal, > 0, so that a sampler can learn the direction.
    """

    def __init__(self, message: str, violation: float = 1.0) -> None:
        super().__init__(message)
        self.violation = max(violation, 1e-6)


class LauncherError(BsearchError):
    """The place where trials run or results are kept is to be looked at: cluster, database, folder."""
