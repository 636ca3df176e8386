"""Everything that can go wrong, sorted by who can act on it.

A message says where, what was expected, what came, and the next step where we know it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
        return ": ".join(part for part in (place, self.key, self.message) if part)


class StudyFileError(BsearchError):
    """The study file is to be mended: every fault found in it, one a line."""

    def __init__(self, faults: str | Fault | Iterable[Fault]) -> None:
        if isinstance(faults, str):
            faults = Fault("", faults)
        self.faults = (faults,) if isinstance(faults, Fault) else tuple(faults)
        super().__init__("\n".join(map(str, self.faults)))


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
