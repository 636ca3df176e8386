"""The only SQL: what bsearch keeps beside Optuna's own tables, in the same database.

Only the driver writes. An attempt's end is written here before Optuna is told, so a driver that dies between the
two loses nothing: the next one tells Optuna what stands here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import socket
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy.engine import Connection, Engine, make_url

from ..spaces.errors import Fault, LauncherError, StudyFileError
from ..spaces.trial import COUNTED, Measurement, Outcome, TrialSetup

VERSION_TABLE = "bsearch_alembic_version"
LOCK_EXPIRES_S = 60.0
HEARTBEAT_S = 5.0

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
    sa.Column("heartbeat_at", sa.Float),  # seconds since 1970, by the holder's clock
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


def masked(url: str) -> str:
    """The URL without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except (sa.exc.ArgumentError, ValueError):
        return re.sub(r"(?<=://).*(?=@)", "***", url)


@dataclass(frozen=True, slots=True)
class KeptStudy:
    """A study as the database knows it."""

    name: str
    base_name: str
    identity: Mapping[str, Any]
    spec: Mapping[str, Any]
    created_at: str
    driver_s: float


def storage_engine(url: str, *, create: bool = True) -> Engine:
    """An engine on the storage, SQLite set up so that one writer and many readers get along.

    Args:
        create: make the folder of a SQLite file that is not there yet, which the first connection makes.

    Raises:
        LauncherError: there is no such file, and none is to be made.
        StudyFileError: the URL names no known database, its driver is not installed, or its folder cannot be written.
    """
    shown = masked(url)
    try:
        parsed = make_url(url)
        engine = sa.create_engine(parsed)
        with warnings.catch_warnings():
            warnings.simplefilter("error", sa.exc.SAWarning)  # of a query that the driver does not know
            engine.dialect.create_connect_args(parsed)
    except sa.exc.NoSuchModuleError as error:
        raise _storage_fault(f"no such kind of database: {error}", shown) from None
    except (sa.exc.ArgumentError, sa.exc.SAWarning, ValueError, TypeError):
        raise _storage_fault(
            "expected an SQLAlchemy URL such as sqlite:///study.db or postgresql+psycopg://user@host/db", shown
        ) from None
    except ModuleNotFoundError as error:
        package = "'bsearch[postgres]'" if "psycopg" in str(error) else error.name
        hint = f" Install it: pip install {package}"
        raise _storage_fault(f"the database's driver {error.name!r} is not installed.{hint}", shown) from None
    if parsed.get_backend_name() == "sqlite":
        if not create and not os.path.isfile(parsed.database or ""):  # noqa: PTH113  # a name too long is no file
            raise LauncherError(f"storage {shown}: no such database yet. `bsearch run` makes it.")
        _prepare_sqlite(engine, parsed.database, shown)
    return engine


def _storage_fault(message: str, shown: str) -> StudyFileError:
    return StudyFileError(Fault("storage", f"{message}; got {shown!r}"))


def tune_sqlite(engine: Engine) -> None:
    """WAL and fewer waits for the disk: five times faster asks, and readers never wait for the writer."""

    def _pragmas(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.execute("PRAGMA busy_timeout=30000")
        cursor.close()

    sa.event.listen(engine, "connect", _pragmas)
    engine.dispose()  # what was opened before knows nothing of the pragmas


def _prepare_sqlite(engine: Engine, database: str | None, shown: str) -> None:
    folder = Path(database or ".").parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except (OSError, ValueError) as error:  # a NUL in the name
        raise _storage_fault(
            f"expected a folder that can be written, but {folder}: {getattr(error, 'strerror', error)}. "
            "Name another with storage: or BSEARCH_STORAGE",
            shown,
        ) from None
    tune_sqlite(engine)


class Records:
    """bsearch's tables in one database; `study` is the full name of one study in it.

    Args:
        create: make the tables where there are none.

    Raises:
        LauncherError: the database cannot be opened, or a newer bsearch has written it.
    """

    def __init__(self, url: str, *, create: bool = True) -> None:
        self.url = url
        self.engine = storage_engine(url, create=create)
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        with self._door():
            _migrate(self.engine, create=create)

    @contextmanager
    def _door(self) -> Iterator[None]:
        """SQLAlchemy's errors stop here."""
        try:
            yield
        except CommandError as error:
            raise LauncherError(
                f"storage {masked(self.url)}: a newer bsearch has written it ({error}). Use that version or another storage."
            ) from None
        except sa.exc.DBAPIError as error:
            raise LauncherError(
                f"storage {masked(self.url)}: the database refused: {error.orig}. "
                "Look whether it is there, can be written, and has room."
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._door(), self.engine.begin() as connection:
            yield connection

    # Studies

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

    def keep_study(self, name: str, base_name: str, identity: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
        """Write the study down, or its newest spec where it is known."""
        with self._transaction() as connection:
            known = connection.execute(sa.select(_studies.c.name).where(_studies.c.name == name)).first()
            if known:
                values = {"spec": json.dumps(spec), "identity": json.dumps(identity)}
                connection.execute(sa.update(_studies).where(_studies.c.name == name).values(**values))
            else:
                connection.execute(
                    sa.insert(_studies).values(
                        name=name,
                        base_name=base_name,
                        identity=json.dumps(identity),
                        spec=json.dumps(spec),
                        created_at=now(),
                        driver_s=0.0,
                    )
                )

    def prices(self, study: str) -> dict[str, list[dict[str, Any]]] | None:
        """The step-time laws that price a study's trials; None where none were kept yet."""
        with self._transaction() as connection:
            kept = connection.execute(sa.select(_studies.c.prices).where(_studies.c.name == study)).scalar()
        return json.loads(kept) if kept else None

    def keep_prices(self, study: str, prices: Mapping[str, Any]) -> None:
        with self._transaction() as connection:
            connection.execute(sa.update(_studies).where(_studies.c.name == study).values(prices=json.dumps(prices)))

    def profile(self, about: str) -> Mapping[str, Any] | None:
        """A device profile that an earlier run kept, by everything it hangs on; None where there is none."""
        with self._transaction() as connection:
            kept = connection.execute(sa.select(_profiles.c.profile).where(_profiles.c.key == _digest(about))).scalar()
        return json.loads(kept) if kept else None

    def keep_profile(self, about: str, profile: Mapping[str, Any]) -> None:
        values = {"about": about, "profile": json.dumps(profile), "measured_at": now()}
        with self._transaction() as connection:
            connection.execute(sa.delete(_profiles).where(_profiles.c.key == _digest(about)))
            connection.execute(sa.insert(_profiles).values(key=_digest(about), **values))

    def take(self, study: str) -> None:
        """Become the one driver of the study.

        Raises:
            LauncherError: another driver holds it and is alive.
        """
        with self._transaction() as connection:
            row = connection.execute(
                sa.select(_studies.c.holder, _studies.c.heartbeat_at).where(_studies.c.name == study)
            ).one()
            if row.holder and row.holder != self.holder and not _is_gone(row.holder, row.heartbeat_at):
                host, process, _ = row.holder.rsplit(":", 2)
                raise LauncherError(
                    f"study {study}: process {process} on {host} is running it (last sign of life "
                    f"{time.time() - row.heartbeat_at:.0f} s ago). Wait for it, stop it, or follow it with `bsearch show`."
                )
            # Compare and swap: of two drivers that both saw a free study, one wins.
            taken = connection.execute(
                sa.update(_studies)
                .where(_studies.c.name == study, _studies.c.holder.is_not_distinct_from(row.holder))
                .values(holder=self.holder, heartbeat_at=time.time())
            )
            if taken.rowcount != 1:
                raise LauncherError(f"study {study}: another driver took it a moment ago")

    def beat(self, study: str, driven_s: float) -> bool:
        """Sign of life, and seconds driven since the last one; False where the study is no longer ours."""
        with self._transaction() as connection:
            done = connection.execute(
                sa.update(_studies)
                .where(_studies.c.name == study, _studies.c.holder == self.holder)
                .values(heartbeat_at=time.time(), driver_s=_studies.c.driver_s + driven_s)
            )
        return done.rowcount == 1

    def vanished(self) -> bool:
        """An SQLite file that was deleted under us: what we write goes nowhere from then on."""
        database = self.engine.url.database
        return (
            self.engine.dialect.name == "sqlite" and database not in (None, "", ":memory:") and not Path(str(database)).exists()
        )

    def release(self, study: str) -> None:
        with self._transaction() as connection:
            connection.execute(
                sa.update(_studies)
                .where(_studies.c.name == study, _studies.c.holder == self.holder)
                .values(holder=None, heartbeat_at=None)
            )

    # Attempts and measurements

    def begin(self, setup: TrialSetup) -> None:
        with self._transaction() as connection:
            connection.execute(
                sa.insert(_attempts).values(
                    study=setup.study,
                    number=setup.number,
                    attempt=setup.attempt,
                    setup=json.dumps(setup.to_dict()),
                    started_at=now(),
                )
            )

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

    def measured(self, setup: TrialSetup, measurement: Measurement) -> None:
        with self._transaction() as connection:
            connection.execute(
                sa.insert(_measurements).values(
                    study=setup.study,
                    number=setup.number,
                    attempt=setup.attempt,
                    samples_seen=measurement.samples_seen,
                    elapsed_s=measurement.elapsed_s,
                    accuracy=_finite(measurement.score(setup.metric)),
                    train_loss=_finite(measurement.train_loss),
                    scores=json.dumps({name: _finite(value) for name, value in measurement.scores.items()}),
                )
            )

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

    def any_counted(self, study: str) -> bool:
        """Whether a trial of the study has come to an end that counts."""
        query = sa.select(_attempts.c.number).where(_attempts.c.study == study, _attempts.c.outcome.in_(sorted(COUNTED)))
        with self._transaction() as connection:
            return connection.execute(query.limit(1)).first() is not None

    def curve(self, study: str, number: int) -> list[Mapping[str, Any]]:
        """Measurements of a trial's attempts, in order."""
        query = (
            sa.select(_measurements)
            .where(_measurements.c.study == study, _measurements.c.number == number)
            .order_by(_measurements.c.attempt, _measurements.c.samples_seen)
        )
        with self._transaction() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

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


def _is_gone(holder: str, heartbeat_at: float | None) -> bool:
    """A holder is gone when its heart stopped for long, or when it lived here and its process does not."""
    if heartbeat_at is None or time.time() - heartbeat_at > LOCK_EXPIRES_S:
        return True
    host, process, _ = holder.rsplit(":", 2)
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _migrate(engine: Engine, *, create: bool) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    head = ScriptDirectory.from_config(config).get_current_head()
    with engine.connect() as connection:
        revision = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()
    if revision == head:
        return
    if revision is None and not create:  # whoever only reads leaves other people's databases as they are
        raise LauncherError(f"storage {engine.url.render_as_string()}: holds no study of bsearch's. `bsearch run` begins one.")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
