"""Reading a study's trials straight from Optuna's tables, without importing Optuna.

Commands that only read start faster this way: Optuna and its storage take most of a second to import. Only Optuna writes
these tables; a test compares every record read here with what Optuna itself reads (docs/decisions/0017).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ...spaces.errors import StorageError
from ...spaces.storage import masked
from ...spaces.trial import TrialFacts, TrialRecord
from .database import RetryPolicy, retrying, storage_engine, transaction

# The schema of Optuna 3.0 to 5.0.
SCHEMA_VERSION = 12
# Trials in one query: databases limit the number of bound values.
_CHUNK = 500

_version = sa.table("version_info", sa.column("schema_version"))
_studies = sa.table("studies", sa.column("study_id"), sa.column("study_name"))
_trials = sa.table(
    "trials",
    *(sa.column(name) for name in ("trial_id", "number", "study_id", "state")),
    sa.column("datetime_start", sa.DateTime),
    sa.column("datetime_complete", sa.DateTime),
)
_params = sa.table(
    "trial_params", *(sa.column(name) for name in ("trial_id", "param_name", "param_value", "distribution_json"))
)
_values = sa.table("trial_values", *(sa.column(name) for name in ("trial_id", "objective", "value", "value_type")))
_attributes = sa.table("trial_user_attributes", *(sa.column(name) for name in ("trial_id", "key", "value_json")))


def stored_trials(url: str, name: str) -> list[TrialRecord]:
    """Every trial of a study in the storage, by number; none where Optuna has no such study yet.

    Raises:
        StorageError: the storage cannot be opened, or its schema is unknown.
    """
    with StoredTrials(url, name, RetryPolicy(url)) as trials:
        return trials.read()


class StoredTrials:
    """A study's trials as the storage holds them, for repeated reading: a finished trial is read once.

    Raises:
        StorageError: the storage cannot be opened, or its schema is unknown.
    """

    def __init__(self, url: str, name: str, retry_policy: RetryPolicy) -> None:
        self._url, self._name, self.retry_policy = url, name, retry_policy
        self._engine: Engine = storage_engine(url, create=False)
        self._finished: dict[int, TrialRecord] = {}  # by Optuna's id

    def __enter__(self) -> StoredTrials:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.dispose()

    @retrying
    def read(self) -> list[TrialRecord]:
        """All trials now, by number."""
        with transaction(self._url, self._engine) as connection:
            study_id = self._study_id(connection)
            if study_id is None:
                return []
            rows = connection.execute(sa.select(_trials).where(_trials.c.study_id == study_id).order_by(_trials.c.number)).all()
            fresh = [row.trial_id for row in rows if row.trial_id not in self._finished]
            params: dict[int, dict[str, Any]] = defaultdict(dict)
            for row in _of_trials(connection, _params, fresh):
                params[row.trial_id][row.param_name] = parameter_value(row.param_value, row.distribution_json)
            values: dict[int, dict[int, float]] = defaultdict(dict)
            for row in _of_trials(connection, _values, fresh):
                infinite = {"INF_POS": math.inf, "INF_NEG": -math.inf}
                values[row.trial_id][row.objective] = infinite.get(row.value_type, row.value)
            attributes: dict[int, dict[str, Any]] = defaultdict(dict)
            for row in _of_trials(connection, _attributes, fresh):
                attributes[row.trial_id][row.key] = json.loads(row.value_json)
        records = []
        for row in rows:
            record = self._finished.get(row.trial_id)
            if record is None:
                objectives = values[row.trial_id]
                record = trial_record(
                    row.number,
                    row.state,
                    params[row.trial_id],
                    [objectives[objective] for objective in sorted(objectives)] or None,
                    attributes[row.trial_id],
                    _local(row.datetime_start),
                    _local(row.datetime_complete),
                )
                if row.state in ("COMPLETE", "PRUNED", "FAIL"):
                    self._finished[row.trial_id] = record
            records.append(record)
        return records

    def _study_id(self, connection: Connection) -> int | None:
        """Optuna's id of the study; None before its driver has created it there."""
        shown = masked(self._url)
        if not sa.inspect(connection).has_table("version_info"):
            return None
        version = connection.execute(sa.select(_version.c.schema_version)).scalar()
        if version is None:
            return None  # the tables are being created
        if version != SCHEMA_VERSION:
            raise StorageError(
                f"storage {shown}: expected the tables of Optuna 3.0 to 5.0 (schema {SCHEMA_VERSION}), got schema {version}. "
                "`optuna storage upgrade` brings older ones up to date."
            )
        study_id = connection.execute(sa.select(_studies.c.study_id).where(_studies.c.study_name == self._name)).scalar()
        return None if study_id is None else int(study_id)


def trial_record(
    number: int,
    state: str,
    parameters: Mapping[str, Any],
    values: list[float] | None,
    attributes: Mapping[str, Any],
    started: datetime | None,
    ended: datetime | None,
) -> TrialRecord:
    """A trial of Optuna's as our own record.

    Args:
        state: Optuna's: RUNNING, COMPLETE, PRUNED, FAIL or WAITING.
        values: of both objectives, seconds first; None where there are none.
        attributes: the trial's user attributes.
    """
    facts = dict(attributes)
    outcome = facts.pop("outcome", "error")
    if state in ("WAITING", "RUNNING"):
        outcome = "paused" if facts.get("paused") else state.lower()
    complete = values if state == "COMPLETE" else None
    return TrialRecord(
        number=number,
        outcome=outcome,
        parameters=dict(parameters),
        facts=TrialFacts.of(facts),
        # `Search.tell` stores no train_s beside the objective.
        train_s=facts.get("train_s", complete[0] if complete else facts.get("measured_train_s")),
        accuracy=complete[1] if complete else facts.get("rung_accuracy" if outcome == "paused" else "stopped_accuracy"),
        message=facts.get("message", ""),
        started_at=started.isoformat(timespec="milliseconds") if started else "",
        ended_at=ended.isoformat(timespec="milliseconds") if ended else "",
    )


def parameter_value(stored: float, distribution: str) -> Any:
    """A parameter's value from the number and the distribution that Optuna stores for it.

    >>> parameter_value(1.0, '{"name": "CategoricalDistribution", "attributes": {"choices": ["linear", "sqrt"]}}')
    'sqrt'
    >>> parameter_value(500.0, '{"name": "IntDistribution", "attributes": {"low": 16, "high": 4096, "log": true, "step": 1}}')
    500
    """
    described = json.loads(distribution)
    decode: dict[str, Callable[[], Any]] = {
        "CategoricalDistribution": lambda: described["attributes"]["choices"][int(stored)],
        "IntDistribution": lambda: int(stored),
        "IntUniformDistribution": lambda: int(stored),
        "IntLogUniformDistribution": lambda: int(stored),
    }
    return decode.get(described["name"], lambda: stored)()


def _of_trials(connection: Connection, table: Any, trial_ids: list[int]) -> Iterable[Any]:
    for first in range(0, len(trial_ids), _CHUNK):
        yield from connection.execute(sa.select(table).where(table.c.trial_id.in_(trial_ids[first : first + _CHUNK])))


def _local(stored: datetime | None) -> datetime | None:
    """Optuna stores naive UTC and reads it as naive local time."""
    return None if stored is None else stored.replace(tzinfo=UTC).astimezone().replace(tzinfo=None)
