"""Our tables: what bsearch keeps beside Optuna's own, in the same database.

Only the driver writes. An attempt's end is written here before Optuna is told, so a driver that dies between the
two loses nothing: the next one tells Optuna what stands here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...spaces.errors import LauncherError
from ...spaces.trial import COUNTED, Measurement, Outcome, TrialSetup
from .database import (
    Patience,
    database_door,
    patient,
    storage_engine,
)
from .lock import _CLOCK_ELSEWHERE, _CLOCKS, _SINCE, Driver, _Holder, _is_gone
from .schema import _attempts, _measurements, _migrate, _profiles, _studies


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
