"""Our tables: what bsearch keeps beside Optuna's own, in the same database.

Only the driver writes. An attempt's end is written here before Optuna is told, so a driver that dies between the
two loses nothing: the next one tells Optuna what stands here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection, Engine

from ..spaces.errors import LauncherError
from ..spaces.storage import masked
from ..spaces.trial import COUNTED, Measurement, Outcome, TrialSetup
from .database import (
    DatabaseAway,
    Patience,
    database_door,
    network_storage,
    patient,
    storage_engine,
    words_of,
)

VERSION_TABLE = "bsearch_alembic_version"
LOCK_EXPIRES_S = 60.0
HEARTBEAT_S = 5.0

# Seconds since 1970 by the database's clock: those of two drivers' machines may differ by more than a lock lives.
_CLOCKS = {
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)",
}
_CLOCK_ELSEWHERE = "UNIX_TIMESTAMP(NOW(6))"  # MySQL's and MariaDB's

metadata = sa.MetaData()

_studies = sa.Table(
    "bsearch_study",
    metadata,
    sa.Column("name", sa.String(120), primary_key=True),
    sa.Column("base_name", sa.String(120), nullable=False),  # as in the study file; `--new` adds -2, -3, ...
    sa.Column("identity", sa.Text, nullable=False),  # JSON of what may not change between runs
    sa.Column("spec", sa.Text, nullable=False),  # JSON of the study as it was last run
    sa.Column("created_at", sa.String(40), nullable=False),
    sa.Column("driver_s", sa.Float, nullable=False),  # seconds of driving, summed over restarts
    sa.Column("holder", sa.String(200)),
    sa.Column("heartbeat_at", sa.Float),  # seconds since 1970, by the database's clock
    sa.Column("prices", sa.Text),  # JSON of the step-time laws that price its trials, by parameters that change cost
)
_profiles = sa.Table(
    "bsearch_profile",
    metadata,
    sa.Column("key", sa.String(64), primary_key=True),  # hash of `about`
    sa.Column("about", sa.Text, nullable=False),  # JSON of task, parameters, precision, limits and device
    sa.Column("profile", sa.Text, nullable=False),  # JSON of the DeviceProfile
    sa.Column("measured_at", sa.String(40), nullable=False),
)
_attempts = sa.Table(
    "bsearch_attempt",
    metadata,
    sa.Column("study", sa.String(120), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),  # of the Optuna trial
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("setup", sa.Text, nullable=False),
    sa.Column("started_at", sa.String(40), nullable=False),
    sa.Column("ended_at", sa.String(40)),
    sa.Column("outcome", sa.String(20)),
    sa.Column("message", sa.Text),
    sa.Column("traceback", sa.Text),
    sa.Column("result", sa.Text),  # JSON of what Optuna is told
)
_measurements = sa.Table(
    "bsearch_measurement",
    metadata,
    sa.Column("study", sa.String(120), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("samples_seen", sa.BigInteger, primary_key=True),
    sa.Column("elapsed_s", sa.Float, nullable=False),
    sa.Column("accuracy", sa.Float),
    sa.Column("train_loss", sa.Float),
    sa.Column("scores", sa.Text, nullable=False),
)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class KeptStudy:
    """A study as the database knows it."""

    name: str
    base_name: str
    identity: Mapping[str, Any]
    spec: Mapping[str, Any]
    created_at: str
    driver_s: float


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


@dataclass(frozen=True, slots=True)
class StorageLook:
    """A database as it is found, before anything is written to it.

    Args:
        revision: of bsearch's tables there; None where there are none yet.
        newer: a newer bsearch has written them.
        network: the type of the network file system that an SQLite file lies on.
        refusal: why it cannot be written; empty where it can.
        drivers: who runs which study.
    """

    revision: str | None
    newer: bool
    network: str | None
    refusal: str
    drivers: Mapping[str, Driver]


def look_at_storage(url: str) -> StorageLook:
    """Open a database that is there, and try whether it could be written; nothing in it changes.

    Raises:
        LauncherError: it cannot be opened.
        StudyFileError: the URL names no database.
    """
    engine = storage_engine(url, create=False)

    def look() -> StorageLook:
        with database_door(url), engine.connect() as connection:
            revision = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()
        known = {script.revision for script in _migrations(Config()).walk_revisions()}
        newer = revision is not None and revision not in known
        drivers: dict[str, Driver] = {}
        if revision is not None and not newer:
            records = Records(url, create=False)
            found = {study.name: records.driver(study.name) for study in records.studies()}
            drivers = {name: driver for name, driver in found.items() if driver is not None}
            records.close()
        return StorageLook(revision, newer, network_storage(engine), _refusal(engine), drivers)

    try:
        return Patience(url)(look)
    finally:
        engine.dispose()


def _refusal(engine: Engine) -> str:
    """Why a database cannot be written; empty where it can."""
    if engine.dialect.name == "postgresql":
        may_write = "current_setting('transaction_read_only') = 'off' AND NOT pg_is_in_recovery()"
        with engine.connect() as connection:
            asked = f"SELECT {may_write}, has_schema_privilege(current_schema(), 'CREATE')"
            writes, may_create = connection.exec_driver_sql(asked).one()
        if not writes:
            return "the server takes no writes (a standby, or default_transaction_read_only)"
        return "" if may_create else "its user may not create tables in this schema"
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql("PRAGMA busy_timeout=2000")
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                connection.exec_driver_sql("ROLLBACK")
    except (sa.exc.DBAPIError, DatabaseAway) as error:
        return words_of(getattr(error, "orig", None) or error)
    return ""


class Records:
    """bsearch's tables in one database; `study` is the full name of one study in it.

    Args:
        create: make the tables where there are none.
        patience: waits where the database goes away; not given, nothing waits.

    Raises:
        LauncherError: the database cannot be opened, or a newer bsearch has written it.
    """

    def __init__(self, url: str, *, create: bool = True, patience: Patience | None = None) -> None:
        self.url = url
        self.patience = patience or Patience(url)
        self.engine = storage_engine(url, create=create)
        self.holder = _Holder.here()
        self._clock = sa.literal_column(_CLOCKS.get(self.engine.dialect.name, _CLOCK_ELSEWHERE), sa.Float)
        self._migrate(create)

    def close(self) -> None:
        """Close the connections; the next use opens new ones."""
        self.engine.dispose()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with database_door(self.url), self.engine.begin() as connection:
            yield connection

    def _put(self, table: sa.Table, row: Mapping[str, Any], change: Mapping[str, Any] | None = None) -> None:
        """Insert a row, or change the one that stands under its key: we repeat ourselves, or another was faster."""
        try:
            with self._transaction() as connection:
                connection.execute(sa.insert(table).values(**row))
        except sa.exc.IntegrityError:
            key = [column == row[column.name] for column in table.primary_key]
            with self._transaction() as connection:
                connection.execute(sa.update(table).where(*key).values(**(row if change is None else change)))

    @patient
    def _migrate(self, create: bool) -> None:
        with database_door(self.url):
            _migrate(self.engine, create=create)

    # Studies

    @patient
    def studies(self, base_name: str | None = None) -> list[KeptStudy]:
        """Every study, or those of one study file, oldest first."""
        query = sa.select(_studies).order_by(_studies.c.created_at, _studies.c.name)
        if base_name is not None:
            query = query.where(_studies.c.base_name == base_name)
        with self._transaction() as connection:
            rows = connection.execute(query).mappings().all()
        return [
            KeptStudy(
                name=row["name"],
                base_name=row["base_name"],
                identity=json.loads(row["identity"]),
                spec=json.loads(row["spec"]),
                created_at=row["created_at"],
                driver_s=row["driver_s"],
            )
            for row in rows
        ]

    @patient
    def keep_study(self, name: str, base_name: str, identity: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
        """Write the study down, or its newest spec where it is known."""
        change = {"spec": json.dumps(spec), "identity": json.dumps(identity)}
        self._put(_studies, {"name": name, "base_name": base_name, "created_at": now(), "driver_s": 0.0, **change}, change)

    @patient
    def prices(self, study: str) -> dict[str, list[dict[str, Any]]] | None:
        """The step-time laws that price a study's trials; None where none were kept yet."""
        with self._transaction() as connection:
            kept = connection.execute(sa.select(_studies.c.prices).where(_studies.c.name == study)).scalar()
        return json.loads(kept) if kept else None

    @patient
    def keep_prices(self, study: str, prices: Mapping[str, Any]) -> None:
        with self._transaction() as connection:
            connection.execute(sa.update(_studies).where(_studies.c.name == study).values(prices=json.dumps(prices)))

    @patient
    def profile(self, about: str) -> Mapping[str, Any] | None:
        """A device profile that an earlier run kept, by everything it hangs on; None where there is none."""
        with self._transaction() as connection:
            kept = connection.execute(sa.select(_profiles.c.profile).where(_profiles.c.key == _digest(about))).scalar()
        return json.loads(kept) if kept else None

    @patient
    def profiles(self) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Every profile that was kept, with all that it hangs on, oldest first."""
        query = sa.select(_profiles.c.about, _profiles.c.profile).order_by(_profiles.c.measured_at)
        with self._transaction() as connection:
            return [(json.loads(about), json.loads(profile)) for about, profile in connection.execute(query)]

    @patient
    def keep_profile(self, about: str, profile: Mapping[str, Any]) -> None:
        self._put(_profiles, {"key": _digest(about), "about": about, "profile": json.dumps(profile), "measured_at": now()})

    @patient
    def driver(self, study: str) -> Driver | None:
        """Who holds a study; None where nobody does, or there is no such study."""
        query = sa.select(_studies.c.holder, self._clock - _studies.c.heartbeat_at).where(_studies.c.name == study)
        with self._transaction() as connection:
            holder, silent_s = connection.execute(query).one_or_none() or (None, None)
        if holder is None:
            return None
        read = _Holder.read(holder)
        since = datetime.strptime(read.since, _SINCE).replace(tzinfo=UTC)
        return Driver(read.host, read.process, since, silent_s or 0.0, _is_gone(holder, silent_s))

    @patient
    def take(self, study: str) -> None:
        """Become the one driver of the study.

        Raises:
            LauncherError: another driver holds it and is alive.
        """
        held = sa.select(_studies.c.holder, _studies.c.heartbeat_at, self._clock - _studies.c.heartbeat_at)
        with self._transaction() as connection:
            holder, heartbeat_at, silent_s = connection.execute(held.where(_studies.c.name == study)).one()
            if holder and holder != self.holder and not _is_gone(holder, silent_s):
                host, process, since, _ = _Holder.read(holder)
                raise LauncherError(
                    f"study {study}: process {process} on {host} is running it since {since} (last sign of life "
                    f"{silent_s:.0f} s ago). Wait for it, stop it, or follow it with `bsearch show`."
                )
            # Compare and swap: of two drivers that both saw a free study one wins, and a holder that comes to life keeps it.
            taken = connection.execute(
                sa.update(_studies)
                .where(
                    _studies.c.name == study,
                    _studies.c.holder.is_not_distinct_from(holder),
                    _studies.c.heartbeat_at.is_not_distinct_from(heartbeat_at),
                )
                .values(holder=self.holder, heartbeat_at=self._clock)
            )
            if taken.rowcount != 1:
                raise LauncherError(f"study {study}: another driver took it a moment ago")

    def beat(self, study: str, driven_s: float) -> bool:
        """Sign of life, and seconds driven so far in all; False where the study is no longer ours.

        Raises:
            DatabaseAway: it cannot be told now; the next beat may.
        """
        with self._transaction() as connection:
            done = connection.execute(
                sa.update(_studies)
                .where(_studies.c.name == study, _studies.c.holder == self.holder)
                .values(heartbeat_at=self._clock, driver_s=driven_s)
            )
        return done.rowcount == 1

    @patient
    def holds(self, study: str) -> bool:
        """Whether we are the study's one driver."""
        with self._transaction() as connection:
            holder = connection.execute(sa.select(_studies.c.holder).where(_studies.c.name == study)).scalar()
        return holder == self.holder

    def vanished(self) -> bool:
        """An SQLite file that was deleted under us: what we write goes nowhere from then on."""
        database = self.engine.url.database
        return (
            self.engine.dialect.name == "sqlite" and database not in (None, "", ":memory:") and not Path(str(database)).exists()
        )

    @patient
    def release(self, study: str) -> None:
        with self._transaction() as connection:
            connection.execute(
                sa.update(_studies)
                .where(_studies.c.name == study, _studies.c.holder == self.holder)
                .values(holder=None, heartbeat_at=None)
            )

    # Attempts and measurements

    @patient
    def begin(self, setup: TrialSetup) -> None:
        row = {"study": setup.study, "number": setup.number, "attempt": setup.attempt, "started_at": now()}
        self._put(_attempts, row | {"setup": json.dumps(setup.to_dict())})

    @patient
    def placed(self, setup: TrialSetup) -> None:
        """Write down the setup that an attempt really runs by, once its device is known."""
        with self._transaction() as connection:
            connection.execute(
                sa.update(_attempts)
                .where(
                    _attempts.c.study == setup.study,
                    _attempts.c.number == setup.number,
                    _attempts.c.attempt == setup.attempt,
                )
                .values(setup=json.dumps(setup.to_dict()))
            )

    @patient
    def measured(self, setup: TrialSetup, measurement: Measurement) -> None:
        self._put(
            _measurements,
            {
                "study": setup.study,
                "number": setup.number,
                "attempt": setup.attempt,
                "samples_seen": measurement.samples_seen,
                "elapsed_s": measurement.elapsed_s,
                "accuracy": _finite(measurement.score(setup.metric)),
                "train_loss": _finite(measurement.train_loss),
                "scores": json.dumps({name: _finite(value) for name, value in measurement.scores.items()}),
            },
        )

    @patient
    def end(self, setup: TrialSetup, outcome: Outcome, result: Mapping[str, Any]) -> None:
        """Write an attempt's end down; `result` is what Optuna is to be told."""
        with self._transaction() as connection:
            connection.execute(
                sa.update(_attempts)
                .where(
                    _attempts.c.study == setup.study,
                    _attempts.c.number == setup.number,
                    _attempts.c.attempt == setup.attempt,
                )
                .values(
                    ended_at=now(),
                    outcome=outcome.kind,
                    message=outcome.message,
                    traceback=outcome.traceback,
                    result=json.dumps(result),
                )
            )

    @patient
    def attempts(self, study: str, number: int | None = None) -> list[Mapping[str, Any]]:
        """Attempts in order, `setup` and `result` read back as dicts."""
        query = sa.select(_attempts).where(_attempts.c.study == study).order_by(_attempts.c.number, _attempts.c.attempt)
        if number is not None:
            query = query.where(_attempts.c.number == number)
        with self._transaction() as connection:
            rows = connection.execute(query).mappings().all()
        return [
            {**row, "setup": json.loads(row["setup"]), "result": json.loads(row["result"]) if row["result"] else None}
            for row in rows
        ]

    @patient
    def latest_attempts(self, study: str, most: int) -> list[Mapping[str, Any]]:
        """Attempts that have not ended, and so many of those that ended last; each with its last `measurement`, or None."""
        mine = _attempts.c.study == study
        ended = sa.select(_attempts).where(mine, _attempts.c.ended_at.is_not(None)).order_by(_attempts.c.ended_at.desc())
        last = (
            sa.select(_measurements)
            .where(*(_measurements.c[name] == sa.bindparam(name) for name in ("study", "number", "attempt")))
            .order_by(_measurements.c.samples_seen.desc())
            .limit(1)
        )
        found: list[Mapping[str, Any]] = []
        with self._transaction() as connection:
            for query in (sa.select(_attempts).where(mine, _attempts.c.ended_at.is_(None)), ended.limit(most)):
                for row in connection.execute(query).mappings().all():
                    key = {name: row[name] for name in ("study", "number", "attempt")}
                    measured = connection.execute(last, key).mappings().one_or_none()
                    measurement = measured and {**measured, "scores": json.loads(measured["scores"])}
                    found.append({**row, "setup": json.loads(row["setup"]), "measurement": measurement})
        return found

    @patient
    def any_counted(self, study: str) -> bool:
        """Whether a trial of the study has come to an end that counts."""
        query = sa.select(_attempts.c.number).where(_attempts.c.study == study, _attempts.c.outcome.in_(sorted(COUNTED)))
        with self._transaction() as connection:
            return connection.execute(query.limit(1)).first() is not None

    @patient
    def curve(self, study: str, number: int) -> list[Mapping[str, Any]]:
        """Measurements of a trial's attempts, in order."""
        query = (
            sa.select(_measurements)
            .where(_measurements.c.study == study, _measurements.c.number == number)
            .order_by(_measurements.c.attempt, _measurements.c.samples_seen)
        )
        with self._transaction() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    @patient
    def curves(self, study: str) -> dict[int, list[tuple[int, float]]]:
        """(samples seen, accuracy) of every trial's last attempt, by trial number; what was not finite is left out."""
        query = (
            sa.select(_measurements)
            .where(_measurements.c.study == study)
            .order_by(_measurements.c.number, _measurements.c.attempt, _measurements.c.samples_seen)
        )
        last: dict[int, tuple[int, list[tuple[int, float]]]] = {}
        with self._transaction() as connection:
            for row in connection.execute(query).mappings():
                attempt, curve = last.get(row["number"], (-1, []))
                if row["attempt"] != attempt:
                    curve = []
                    last[row["number"]] = (row["attempt"], curve)
                if row["accuracy"] is not None:
                    curve.append((row["samples_seen"], row["accuracy"]))
        return {number: curve for number, (_, curve) in last.items()}


def _digest(about: str) -> str:
    return hashlib.sha256(about.encode()).hexdigest()


def _finite(value: float | None) -> float | None:
    """JSON and SQL know no NaN; a measurement that is not finite is kept as null."""
    return value if value is not None and math.isfinite(value) else None


def _is_gone(holder: str, silent_s: float | None) -> bool:
    """A holder is gone when its process is, or where that cannot be seen, when its heart stopped for long.

    A sign of life far in the future was written before the database's clock was put back: it says as little as an old one.
    """
    lives = _Holder.read(holder).lives()
    if lives is not None:
        return not lives
    return silent_s is None or abs(silent_s) > LOCK_EXPIRES_S


def _migrations(config: Config) -> ScriptDirectory:
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return ScriptDirectory.from_config(config)


def _migrate(engine: Engine, *, create: bool) -> None:
    config = Config()
    head = _migrations(config).get_current_head()

    def revision_of(connection: Connection) -> str | None:
        return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()

    with engine.connect() as connection:
        revision = revision_of(connection)
    if revision == head:
        return
    if revision is None and not create:  # whoever only reads leaves other people's databases as they are
        raise LauncherError(
            f"storage {masked(engine.url.render_as_string())}: holds no study of bsearch's. `bsearch run` begins one."
        )
    with _alone(engine) as connection:
        if revision_of(connection) != head:  # another process was faster
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


@contextmanager
def _alone(engine: Engine) -> Iterator[Connection]:
    """A transaction beside which no other process changes the schema."""
    if engine.dialect.name != "sqlite":
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtext(VERSION_TABLE))))
            yield connection
        return
    # Python's sqlite3 begins no transaction for CREATE TABLE, so we do, and take the write lock at once.
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("COMMIT")
