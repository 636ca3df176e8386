"""TODO."""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from ...cluster.tune import os

LOCK_EXPIRES_S = 60.0

HEARTBEAT_S = 5.0

# Seconds since 1970 by the database's clock: those of two drivers' machines may differ by more than a lock lives.
_CLOCKS = {
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)",
}

_CLOCK_ELSEWHERE = "UNIX_TIMESTAMP(NOW(6))"  # MySQL's and MariaDB's


@dataclass(frozen=True, slots=True)
class Driver:
    """The process that holds a study.

    Args:
        since: when it took the study.
        silent_s: seconds since its last sign of life, by the database's clock.
        gone: it will give none any more, so the next `run` takes the study over.
    """

    host: str
    process: str
    since: datetime
    silent_s: float
    gone: bool


_SINCE = "%Y-%m-%d %H:%M:%S UTC"


class _Holder(NamedTuple):
    """Who drives a study, as text `host:process:since mark-random`."""

    host: str
    process: str
    since: str
    mark: str  # of the process, `""` where there is none

    @classmethod
    def read(cls, text: str) -> _Holder:
        host, process, since = text.split(":", 2)
        since, _, token = since.rpartition(" ")
        return cls(host, process, since, token.rpartition("-")[0])

    @classmethod
    def here(cls) -> str:
        """This process, as text."""
        since = datetime.now(UTC).strftime(_SINCE)
        return f"{socket.gethostname()}:{os.getpid()}:{since} {_mark(os.getpid())}-{uuid.uuid4().hex[:8]}"

    def lives(self) -> bool | None:
        """Whether the very process still runs; None where that cannot be seen from here."""
        theirs, ours = self.mark.partition(".")[0], _mark(os.getpid()).partition(".")[0]
        if self.host != socket.gethostname() or (theirs and theirs != ours):
            return None  # another machine, or another container's numbers
        if self.mark:
            return _mark(int(self.process)) == self.mark
        try:
            os.kill(int(self.process), 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return None  # a process of that number: perhaps another by now


def _mark(process: int) -> str:
    """What tells a process from another of the same number: whose numbers they are, and ticks from boot to its start."""
    try:
        numbers = os.stat("/proc/self/ns/pid").st_ino
        return f"{numbers}.{Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return ""


def _is_gone(holder: str, silent_s: float | None) -> bool:
    """A holder is gone when its process is, or where that cannot be seen, when its heart stopped for long.

    A sign of life far in the future was written before the database's clock was put back: it says as little as an old one.
    """
    lives = _Holder.read(holder).lives()
    if lives is not None:
        return not lives
    return silent_s is None or abs(silent_s) > LOCK_EXPIRES_S
