"""One driver at a time holds a study: a lock with a heartbeat, which expires when its holder dies."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ...spaces.errors import StorageError, cut
from .database import RetryPolicy, retrying, transaction
from .schema import studies

LOCK_EXPIRES_S = 60.0
HEARTBEAT_S = 5.0

# Seconds since 1970 by the database's clock: the clocks of two drivers' machines may differ by more than a lock's lifetime.
_CLOCKS = {
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)",
}
_OTHER_CLOCK = "UNIX_TIMESTAMP(NOW(6))"  # MySQL's and MariaDB's

_SINCE = "%Y-%m-%d %H:%M:%S UTC"


@dataclass(frozen=True, slots=True)
class Driver:
    """The process that holds a study.

    Args:
        since: when it took the study.
        silent_s: seconds since its last heartbeat, by the database's clock.
        gone: it is dead or presumed dead, so the next `run` takes the study over.
    """

    host: str
    process: str
    since: datetime
    silent_s: float
    gone: bool


class StudyLock:
    """The driver's lock on the studies of one database.

    Args:
        holder: text that identifies this process, `host:process:since mark-random`.
    """

    def __init__(self, url: str, engine: Engine, retry_policy: RetryPolicy) -> None:
        self.url, self.engine, self.retry_policy = url, engine, retry_policy
        self.holder = _Holder.here()
        self._clock = sa.literal_column(_CLOCKS.get(engine.dialect.name, _OTHER_CLOCK), sa.Float)

    @retrying
    def driver(self, study: str) -> Driver | None:
        """The driver that holds a study; None if none does, or there is no such study."""
        query = sa.select(studies.c.holder, self._clock - studies.c.heartbeat_at).where(
            studies.c.name == study
        )
        with transaction(self.url, self.engine) as connection:
            holder, silent_s = connection.execute(query).one_or_none() or (None, None)
        if holder is None:
            return None
        read = _Holder.read(holder)
        return Driver(read.host, read.process, read.since_when(), silent_s or 0.0, _is_gone(holder, silent_s))

    @retrying
    def acquire(self, study: str) -> None:
        """Become the study's one driver.

        Raises:
            StorageError: another driver holds it and is alive.
        """
        held = sa.select(studies.c.holder, studies.c.heartbeat_at, self._clock - studies.c.heartbeat_at)
        with transaction(self.url, self.engine) as connection:
            holder, heartbeat_at, silent_s = connection.execute(held.where(studies.c.name == study)).one()
            if holder and holder != self.holder and not _is_gone(holder, silent_s):
                host, process, since, _ = _Holder.read(holder)
                raise StorageError(
                    f"study {study}: process {process} on {host} has been running it since {since} (last heartbeat "
                    f"{silent_s:.0f} s ago). Wait for it, stop it, or follow it with `bsearch show --watch`."
                )
            # Compare and swap: of two drivers that both saw a free study one wins, and a holder that revives keeps it.
            taken = connection.execute(
                sa.update(studies)
                .where(
                    studies.c.name == study,
                    studies.c.holder.is_not_distinct_from(holder),
                    studies.c.heartbeat_at.is_not_distinct_from(heartbeat_at),
                )
                .values(holder=self.holder, heartbeat_at=self._clock)
            )
            if taken.rowcount != 1:
                raise StorageError(f"study {study}: another driver has just taken it")

    def heartbeat(self, study: str, driver_s: float) -> bool:
        """Record that this driver is alive, and its seconds so far; False where the study is no longer ours.

        Raises:
            DatabaseUnavailable: it cannot be recorded now; the next heartbeat may.
        """
        with transaction(self.url, self.engine) as connection:
            done = connection.execute(
                sa.update(studies)
                .where(studies.c.name == study, studies.c.holder == self.holder)
                .values(heartbeat_at=self._clock, driver_s=driver_s)
            )
        return done.rowcount == 1

    def check(self, connection: Connection, study: str) -> None:
        """Make sure, within a transaction, that no other driver has taken the study over, or takes it before the commit.

        Raises:
            StorageError: one has.
        """
        mine = sa.update(studies).where(studies.c.name == study, studies.c.holder == self.holder)
        if connection.execute(mine.values(holder=self.holder)).rowcount != 1:
            raise StorageError(f"study {study}: another driver took it over; this one writes nothing more")

    def check_free(self, connection: Connection) -> None:
        """Make sure that no driver runs a study, whose tables are about to change.

        Raises:
            StorageError: one does.
        """
        query = sa.select(studies.c.name, studies.c.holder, self._clock - studies.c.heartbeat_at)
        for study, holder, silent_s in connection.execute(query.where(studies.c.holder.is_not(None))):
            if not _is_gone(holder, silent_s):
                host, process, since, _ = _Holder.read(holder)
                raise StorageError(
                    f"study {study}: an older bsearch has been running it since {since} (process {process} on {host}), and "
                    "this one would change its tables. Wait for it, stop it, or look at it with that version."
                )

    @retrying
    def held(self, study: str) -> bool:
        """Whether this process is the study's one driver."""
        with transaction(self.url, self.engine) as connection:
            holder = connection.execute(sa.select(studies.c.holder).where(studies.c.name == study)).scalar()
        return holder == self.holder

    @retrying
    def release(self, study: str) -> None:
        with transaction(self.url, self.engine) as connection:
            connection.execute(
                sa.update(studies)
                .where(studies.c.name == study, studies.c.holder == self.holder)
                .values(holder=None, heartbeat_at=None)
            )


class _Holder(NamedTuple):
    """Who drives a study, as text `host:process:since mark-random`."""

    host: str
    process: str
    since: str
    mark: str  # of the process, `""` where there is none

    @classmethod
    def read(cls, text: Any) -> _Holder:
        """The holder in a text; of another form it is somebody on a machine that cannot be asked, until the lock expires."""
        host, process, since = (*str(text).split(":", 2), "", "")[:3]
        since, _, token = since.rpartition(" ")
        if not process.isascii() or not process.isdigit() or not since:
            return cls(f"unknown ({cut(str(text), 60)!r})", "unknown", "an unknown time", "")
        return cls(host, process, since, token.rpartition("-")[0])

    def since_when(self) -> datetime:
        """When it took the study; now where that cannot be read."""
        try:
            return datetime.strptime(self.since, _SINCE).replace(tzinfo=UTC)
        except ValueError:
            return datetime.now(UTC)

    @classmethod
    def here(cls) -> str:
        """This process, as text."""
        since = datetime.now(UTC).strftime(_SINCE)
        return f"{socket.gethostname()}:{os.getpid()}:{since} {_mark(os.getpid())}-{uuid.uuid4().hex[:8]}"

    def alive(self) -> bool | None:
        """Whether this very process still runs; None if that cannot be checked from here."""
        theirs, ours = self.mark.partition(".")[0], _mark(os.getpid()).partition(".")[0]
        if self.host != socket.gethostname() or (theirs and theirs != ours):
            return None  # another machine, or another container's process numbers
        if self.mark:
            return _mark(int(self.process)) == self.mark
        try:
            os.kill(int(self.process), 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        return None  # a process of that number: perhaps another by now


def _mark(process: int) -> str:
    """Distinguishes processes with the same PID: the PID namespace, and ticks from boot to the process's start.

    Empty for a process that has ended, even if it is still a zombie that its parent has not reaped.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        of_process = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if of_process[0] in ("Z", "X") else f"{namespace}.{of_process[19]}"
    except (OSError, IndexError):
        return ""


def _is_gone(holder: Any, silent_s: float | None) -> bool:
    """A holder is gone if its process is or, where that cannot be checked, if its heartbeat is too old.

    A heartbeat far in the future was written before the database's clock was set back: it counts as too old.
    """
    alive = _Holder.read(holder).alive()
    if alive is not None:
        return not alive
    return silent_s is None or abs(silent_s) > LOCK_EXPIRES_S
