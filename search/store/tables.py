"""Queries on our tables: studies, device profiles, attempts and measurements.

Only the driver writes. A trial's end is one transaction, with all that its attempt still has to write; nothing is read back
from the copy in Optuna's tables. Measurements follow within a second.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...spaces.laws.device import DeviceProfile
from ...spaces.record import TrialRecord
from ...spaces.study.goals import Objectives
from ...spaces.trial import Measurement, Outcome, TrialSetup
from . import schema
from .database import RetryPolicy, has_table, retrying, storage_engine, transaction, translate_errors
from .lock import StudyLock
from .rows import (
    AttemptRow,
    MeasurementRow,
    Row,
    StudyRow,
    objectives_of,
    profile_of,
    readable,
    trials_of,
    with_setup,
)
from .write_buffer import Write, WriteBuffer


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Tables:
    """bsearch's tables in one database; `study` is the full name of one study in it.

    Attributes:
        writes: a driver's buffer for what its trials report; without one everything is written at once.

    Args:
        create: create the tables if there are none.
        retry_policy: for when the database is unavailable; not given, nothing is retried.

    Raises:
        StorageError: the database cannot be opened, or a newer bsearch has written it.
    """

    def __init__(self, url: str, *, create: bool = True, retry_policy: RetryPolicy | None = None) -> None:
        self.url = url
        self.retry_policy = retry_policy or RetryPolicy(url)
        self.engine = storage_engine(url, create=create)
        self.lock = StudyLock(url, self.engine, self.retry_policy)
        self.writes: WriteBuffer | None = None
        self._migrate(create)
        self._on_disk = self._is_on_disk()

    def close(self) -> None:
        """Close the connections; the next use opens new ones."""
        self.engine.dispose()

    @contextmanager
    def buffered(self, study: str) -> Iterator[WriteBuffer]:
        """Buffer what the trials of a study report while this driver holds it, and write it in few transactions.

        Raises:
            StorageError: the last of them failed.
        """
        held = functools.partial(self.lock.check, study=study)
        self.writes = WriteBuffer(self.url, self.engine, self.retry_policy, held)
        try:
            yield self.writes
        finally:
            self.writes.close()
            self.writes = None

    def late_error(self) -> Exception | None:
        """The error of a background commit that failed, returned once; None if none did."""
        return None if self.writes is None else self.writes.failed()

    def drop_writes(self) -> None:
        """Forget what is buffered: another driver holds the study."""
        if self.writes is not None:
            self.writes.drop()

    def _write(self, write: Write) -> None:
        """Write it now, or with the buffer's next commit."""
        if self.writes is not None:
            self.writes.add(write)
        else:
            self._write_now(write)

    @retrying
    def _write_now(self, write: Write) -> None:
        with transaction(self.url, self.engine) as connection:
            write(connection)

    @contextmanager
    def _of_trials(self) -> Iterator[Connection]:
        """A transaction that sees what trials have reported."""
        if self.writes is not None:
            self.writes.commit()
        with transaction(self.url, self.engine) as connection:
            yield connection

    @retrying
    def _all(self, query: sa.Select[Any]) -> Sequence[Row]:
        """The rows of a query."""
        with self._of_trials() as connection:
            return connection.execute(query).mappings().all()

    def _upsert(
        self, table: sa.Table, row: Mapping[str, Any], change: Mapping[str, Any] | None = None
    ) -> None:
        """Insert a row, or update the one with its key, which a retry or another process has inserted."""
        try:
            self._write_now(lambda connection: connection.execute(sa.insert(table).values(**row)))
        except sa.exc.IntegrityError:
            key = [column == row[column.name] for column in table.primary_key]
            update = sa.update(table).where(*key).values(**(row if change is None else change))
            self._write_now(lambda connection: connection.execute(update))

    @retrying
    def _migrate(self, create: bool) -> None:
        with translate_errors(self.url):
            schema.migrate(self.url, self.engine, create=create, may_change=self.lock.check_free)

    # Studies

    def studies(self, base_name: str | None = None) -> list[StudyRow]:
        """Every study, or those of one study file, oldest first."""
        columns = schema.studies.c
        query = sa.select(schema.studies).order_by(columns.created_at, columns.name)
        return [
            StudyRow(row)
            for row in self._all(query if base_name is None else query.where(columns.base_name == base_name))
        ]

    def study(self, name: str) -> StudyRow | None:
        """The study of this full name; None where there is none."""
        rows = self._all(sa.select(schema.studies).where(schema.studies.c.name == name))
        return StudyRow(rows[0]) if rows else None

    def save_study(
        self, name: str, base_name: str, identity: Mapping[str, Any], spec: Mapping[str, Any]
    ) -> None:
        """Store the study, or its newest spec where it exists."""
        change = {"spec": json.dumps(spec), "identity": json.dumps(identity)}
        row = {"name": name, "base_name": base_name, "created_at": now(), "driver_s": 0.0, **change}
        self._upsert(schema.studies, row, change)

    def save_step_times(self, study: str, document: Mapping[str, Any]) -> None:
        self._save_document(study, "step_times", document)

    def save_best_rates(self, study: str, document: Mapping[str, Any]) -> None:
        self._save_document(study, "best_rates", document)

    def save_deadline(self, study: str, document: Mapping[str, Any] | None) -> None:
        self._save_document(study, "deadline", document)

    def _save_document(self, study: str, column: str, document: Mapping[str, Any] | None) -> None:
        update = sa.update(schema.studies).where(schema.studies.c.name == study)
        self._write_now(
            lambda connection: connection.execute(update.values({column: document and json.dumps(document)}))
        )

    def profile(self, about: str) -> DeviceProfile | None:
        """The device profile stored by an earlier run, by everything it depends on; None where there is none."""
        found = self.profiles(schema.profiles.c.key == _digest(about))
        return found[-1][1] if found else None

    def profiles(self, *conditions: sa.ColumnElement[bool]) -> list[tuple[Mapping[str, Any], DeviceProfile]]:
        """Every stored profile with everything it depends on, oldest first."""
        query = sa.select(schema.profiles).where(*conditions).order_by(schema.profiles.c.measured_at)
        return readable(schema.profiles, self._all(query), profile_of)

    def save_profile(self, about: str, profile: Mapping[str, Any]) -> None:
        row = {"key": _digest(about), "about": about, "profile": json.dumps(profile), "measured_at": now()}
        self._upsert(schema.profiles, row)

    def vanished(self) -> bool:
        """Whether the SQLite file has been deleted while open: writes are lost from then on. A connection that was opened since
        has made an empty one in its place.
        """
        # Neither a file's number nor its dates tell: a new file often has the deleted one's number.
        return self._on_disk and not (
            self._is_on_disk() and has_table(str(self.engine.url.database), schema.studies.name)
        )

    def _is_on_disk(self) -> bool:
        """Whether this is an SQLite database whose file exists."""
        database = self.engine.url.database
        return (
            self.engine.dialect.name == "sqlite"
            and database not in (None, "", ":memory:")
            and Path(str(database)).exists()
        )

    # Trials

    def add_trial(self, study: str, trial: TrialRecord) -> bool:
        """Store a new trial; False where another process has added one of its number."""
        try:
            self._write_now(
                lambda connection: connection.execute(sa.insert(schema.trials).values(**_row(study, trial)))
            )
        except sa.exc.IntegrityError:
            return False
        return True

    def save_trial(self, study: str, trial: TrialRecord) -> None:
        """Store a trial as it is now, in place of what it was."""
        self._write(_replacing(schema.trials, _row(study, trial)))

    @retrying
    def trials(
        self, study: str, known: Mapping[int, TrialRecord] | None = None, objectives: Objectives | None = None
    ) -> list[TrialRecord]:
        """Every trial of a study, by number; one whose row is missing or cannot be read is `unreadable`.

        Args:
            known: trials as they were read before; those that had ended then are not read again.
            objectives: of the study; not given, as its own row has them.
        """
        ended = {number: trial for number, trial in (known or {}).items() if trial.ended_at}
        last = max(ended, default=-1)
        # All but those that had ended: what is new is at the end, and databases limit the number of bound values.
        columns = schema.trials.c
        left = sa.or_(~columns.number.between(0, last), columns.number.in_(set(range(last)) - ended.keys()))
        spec = sa.select(schema.studies.c.spec).where(schema.studies.c.name == study)
        attempted = sa.select(sa.func.max(schema.attempts.c.number)).where(schema.attempts.c.study == study)
        with self._of_trials() as connection:
            stored = objectives_of(connection.execute(spec).scalar())
            begun = connection.execute(attempted).scalar()  # first: an attempt is written with its trial
            found = (
                connection.execute(sa.select(schema.trials).where(columns.study == study, left))
                .mappings()
                .all()
            )
        return trials_of(study, found, objectives or stored, ended, begun)

    # Attempts and measurements

    def start_attempt(self, setup: TrialSetup) -> None:
        row = {"study": setup.study, "number": setup.number, "attempt": setup.attempt, "started_at": now()}
        self._write(_replacing(schema.attempts, row | {"setup": json.dumps(setup.to_dict())}))

    def update_setup(self, setup: TrialSetup) -> None:
        """Replace an attempt's setup by the one it really runs with, once its device is known."""
        update = (
            sa.update(schema.attempts).where(*_attempt_of(setup)).values(setup=json.dumps(setup.to_dict()))
        )
        self._write(lambda connection: connection.execute(update))

    def add_measurement(self, setup: TrialSetup, measurement: Measurement) -> None:
        row = {
            "study": setup.study,
            "number": setup.number,
            "attempt": setup.attempt,
            "samples_seen": measurement.samples_seen,
            "elapsed_s": measurement.elapsed_s,
            "accuracy": _finite(measurement.value(setup.metric)),
            "train_loss": _finite(measurement.train_loss),
            "scores": json.dumps({name: _finite(value) for name, value in measurement.scores.items()}),
        }
        self._write(_replacing(schema.measurements, row))

    def end_attempt(self, setup: TrialSetup, outcome: Outcome) -> None:
        self._end_attempts(outcome, *_attempt_of(setup))

    def attempts(self, study: str, number: int | None = None) -> list[AttemptRow]:
        """Attempts of a study or a trial, in order; those that cannot be read are left out."""
        return readable(schema.attempts, self._rows(schema.attempts, study, number), AttemptRow.of)

    def setups(self, study: str) -> dict[int, TrialSetup]:
        """The setup of every trial's last attempt, by number; those that cannot be read are left out."""
        last = {row["number"]: row for row in self._rows(schema.attempts, study)}
        return {
            attempt.number: setup for attempt, setup in readable(schema.attempts, last.values(), with_setup)
        }

    def _rows(self, table: sa.Table, study: str, number: int | None = None) -> Sequence[Row]:
        """What a study's trials, or one of them, have in a table, in the order of its key."""
        query = sa.select(table).where(table.c.study == study).order_by(*table.primary_key)
        return self._all(query if number is None else query.where(table.c.number == number))

    def attempts_begun(self, study: str, number: int) -> int:
        """How many attempts at a trial have begun; those that cannot be read count as well."""
        columns = schema.attempts.c
        last = sa.select(sa.func.max(columns.attempt).label("last")).where(
            columns.study == study, columns.number == number
        )
        found = self._all(last)[0]["last"]
        return found + 1 if isinstance(found, int) else 0

    def end_left_attempts(self, study: str, number: int, outcome: Outcome) -> None:
        """End the attempts at a trial that their driver left open."""
        columns = schema.attempts.c
        self._end_attempts(
            outcome, columns.study == study, columns.number == number, columns.ended_at.is_(None)
        )

    def _end_attempts(self, outcome: Outcome, *conditions: sa.ColumnElement[bool]) -> None:
        ended = {
            "ended_at": now(),
            "outcome": outcome.kind,
            "message": outcome.message,
            "traceback": outcome.traceback,
        }
        self._write(
            lambda connection: connection.execute(
                sa.update(schema.attempts).where(*conditions).values(**ended)
            )
        )

    @retrying
    def latest_attempts(
        self, study: str, most: int
    ) -> list[tuple[AttemptRow, TrialSetup, MeasurementRow | None]]:
        """Running attempts, and the `most` that ended last; each with its setup and its last measurement, or None."""
        attempts, measurements = schema.attempts.c, schema.measurements.c
        mine = sa.select(schema.attempts).where(attempts.study == study)
        ended = mine.where(attempts.ended_at.is_not(None)).order_by(attempts.ended_at.desc()).limit(most)
        last = sa.select(schema.measurements).order_by(measurements.samples_seen.desc()).limit(1)
        found: list[tuple[AttemptRow, TrialSetup, MeasurementRow | None]] = []
        with self._of_trials() as connection:
            for query in (mine.where(attempts.ended_at.is_(None)), ended):
                for row, setup in readable(
                    schema.attempts, connection.execute(query).mappings().all(), with_setup
                ):
                    of = (
                        measurements.study == study,
                        measurements.number == row.number,
                        measurements.attempt == row.attempt,
                    )
                    measured = connection.execute(last.where(*of)).mappings().all()
                    found.append(
                        (
                            row,
                            setup,
                            next(iter(readable(schema.measurements, measured, MeasurementRow.of)), None),
                        )
                    )
        return found

    def curve(self, study: str, number: int) -> list[MeasurementRow]:
        """Measurements of a trial's attempts, in order."""
        return readable(
            schema.measurements, self._rows(schema.measurements, study, number), MeasurementRow.of
        )

    def curves(self, study: str) -> dict[int, list[tuple[int, float]]]:
        """(samples seen, accuracy) of every trial's last attempt, by trial number; non-finite values are left out."""
        measured = readable(schema.measurements, self._rows(schema.measurements, study), MeasurementRow.of)
        last = {row.number: row.attempt for row in measured}
        curves: dict[int, list[tuple[int, float]]] = {number: [] for number in last}
        for row in measured:
            if row.attempt == last[row.number] and row.accuracy is not None:
                curves[row.number].append((row.samples_seen, row.accuracy))
        return curves


def _replacing(table: sa.Table, row: Mapping[str, Any]) -> Write:
    """Writes a row over the one with its key, if there is one: what a newer version has added to that stays."""
    key = [column == row[column.name] for column in table.primary_key]

    def write(connection: Connection) -> None:
        if not connection.execute(sa.update(table).where(*key).values(**row)).rowcount:
            connection.execute(sa.insert(table).values(**row))

    return write


def _row(study: str, trial: TrialRecord) -> dict[str, Any]:
    return {
        "study": study,
        "number": trial.number,
        "outcome": trial.outcome,
        "parameters": json.dumps(dict(trial.parameters)),
        "facts": json.dumps(trial.facts.to_dict()),
        "objectives": None if trial.values is None else json.dumps(trial.values),
        "violation": trial.violation,
        "started_at": _as_utc(trial.started_at),
        "ended_at": _as_utc(trial.ended_at) or None,
    }


def _as_utc(local: str) -> str:
    return datetime.fromisoformat(local).astimezone(UTC).isoformat(timespec="milliseconds") if local else ""


def _attempt_of(setup: TrialSetup) -> tuple[sa.ColumnElement[bool], ...]:
    """The row of a setup's attempt, as conditions of a query."""
    columns = schema.attempts.c
    return columns.study == setup.study, columns.number == setup.number, columns.attempt == setup.attempt


def _digest(about: str) -> str:
    return hashlib.sha256(about.encode()).hexdigest()


def _finite(value: float | None) -> float | None:
    """JSON and SQL have no NaN: a non-finite measurement is stored as null."""
    return value if value is not None and math.isfinite(value) else None
