"""A write-through cache over Optuna's storage, for a study that a single driver writes."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import InMemoryStorage, RDBStorage
from optuna.storages._rdb.models import StudyModel, TrialModel, TrialParamModel, TrialUserAttributeModel, TrialValueModel
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session

from .write_buffer import WriteBuffer

# Optuna's own tables. Through Optuna every attribute is a transaction with three ORM statements, and a trial's two dozen
# attributes were half of a driver's work.
_user_attributes, _system_attributes = (
    sa.table(f"trial_{whose}_attributes", sa.column("trial_id"), sa.column("key"), sa.column("value_json"))
    for whose in ("user", "system")
)


class SingleWriterStorage(InMemoryStorage):
    """A study's trials in memory. A new trial is in the database first, and its end at once; attributes with the next commit.

    Optuna's own cache reads every unfinished trial again several times per ask: 0.2 s each with 200 running side by side
    (docs/scaling.md). A trial's id is its number here.

    Args:
        backend: the storage that holds the study.
        study_id: in that storage.
        writes: of this study's driver, to the same database.
    """

    def __init__(self, backend: RDBStorage, study_id: int, writes: WriteBuffer) -> None:
        super().__init__()
        self._backend, self._backend_study, self._writes = backend, study_id, writes
        self._ids: list[int] = []  # of trials in the database, by number
        self._creating = threading.Lock()
        self._spaces: dict[tuple[Any, ...], dict[str, BaseDistribution]] = {}  # those of finished trials
        here = super().create_new_study(backend.get_study_directions(study_id), backend.get_study_name_from_id(study_id))
        for key, value in backend.get_study_system_attrs(study_id).items():
            super().set_study_system_attr(here, key, value)
        for key, value in backend.get_study_user_attrs(study_id).items():
            super().set_study_user_attr(here, key, value)
        self._study_id = here
        self._read_new(here)

    def _read_new(self, study_id: int) -> None:
        """Read trials that are not in memory yet."""
        for trial in self._backend.get_all_trials(self._backend_study, deepcopy=False)[len(self._ids) :]:
            self._ids.append(trial._trial_id)
            super().create_new_trial(study_id, trial)

    def reread(self) -> None:
        """Read everything again: the reply to a write was lost, so it may or may not have been applied."""
        self._writes.commit()
        with self._creating:
            for trial in self._backend.get_all_trials(self._backend_study)[: len(self._ids)]:
                trial._trial_id = trial.number
                self._set_trial(trial.number, trial)
            self._read_new(self._study_id)

    @property
    def engine(self) -> Engine:
        return self._backend.engine

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        with self._creating:
            if template_trial is not None and template_trial.state == TrialState.RUNNING:
                created = self._begin(template_trial)
            else:
                # Its public twin returns the id alone; reading the number again would be as many statements as writing it.
                created = self._backend._create_new_trial(self._backend_study, template_trial)
            if created.number == len(self._ids):
                self._ids.append(created._trial_id)
                super().create_new_trial(study_id, created)
            else:  # trials were queued through Optuna, or the reply to a write of ours was lost
                self._read_new(study_id)
            return created.number

    def _begin(self, template: FrozenTrial) -> FrozenTrial:
        """Write a RUNNING trial; through Optuna that is three statements for each parameter and a count of all trials."""
        trial = copy.copy(template)
        trial.datetime_start = datetime.now()
        with Session(self._backend.engine) as session, session.begin():
            session.get_one(StudyModel, self._backend_study, with_for_update=True)  # the lock under which Optuna counts, too
            newer = sa.select(sa.func.count()).where(
                TrialModel.study_id == self._backend_study, TrialModel.trial_id > (self._ids[-1] if self._ids else 0)
            )
            trial.number = len(self._ids) + session.scalars(newer).one()
            row: Any = TrialModel(number=trial.number, study_id=self._backend_study, state=trial.state)
            row.datetime_start = trial.datetime_start
            session.add(row)
            session.flush()
            trial._trial_id = row.trial_id
            parameters = [
                {
                    "trial_id": row.trial_id,
                    "param_name": name,
                    "param_value": distribution.to_internal_repr(trial.params[name]),
                    "distribution_json": distribution_to_json(distribution),
                }
                for name, distribution in trial.distributions.items()
            ]
            if parameters:
                session.execute(sa.insert(TrialParamModel), parameters)
            if notes := _attribute_rows(row.trial_id, trial.user_attrs):
                session.execute(sa.insert(TrialUserAttributeModel), notes)
        return trial

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        self._backend.set_trial_param(self._ids[trial_id], param_name, param_value_internal, distribution)
        super().set_trial_param(trial_id, param_name, param_value_internal, distribution)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        backend_id = self._ids[trial_id]
        if not state.is_finished():
            self._writes.commit()
            done = self._backend.set_trial_state_values(backend_id, state, values)
            return super().set_trial_state_values(trial_id, state, values) and done
        super().set_trial_state_values(trial_id, state, values)
        ended = self.get_trial(trial_id).datetime_complete
        self._set_trial(trial_id, self._small(self.get_trial(trial_id)))

        def write(connection: Connection) -> None:
            # Through Optuna's own classes, which know how times and infinite values are stored.
            with Session(connection) as session:
                trial = session.get_one(TrialModel, backend_id)
                if trial.state.is_finished() and trial.state != state:  # by a driver that took the study over
                    raise UpdateFinishedTrialError(f"Trial {trial_id} has ended as {trial.state.name} already.")
                session.execute(sa.delete(TrialValueModel).where(TrialValueModel.trial_id == backend_id))
                for objective, value in enumerate(values or ()):
                    stored, kind = TrialValueModel.value_to_stored_repr(value)
                    session.add(TrialValueModel(trial_id=backend_id, objective=objective, value=stored, value_type=kind))
                trial.state, trial.datetime_complete = state, ended
                session.commit()  # of the session; the connection's transaction goes on

        self._writes.add(write)
        self._writes.commit()
        return True

    def _small(self, trial: FrozenTrial) -> FrozenTrial:
        """A finished trial in less memory: Optuna's copies have a dictionary and distributions of their own each."""
        space = self._spaces.setdefault(tuple(trial.distributions.items()), trial.distributions)
        return FrozenTrial(
            number=trial.number,
            state=trial.state,
            value=None,
            values=trial.values,
            datetime_start=trial.datetime_start,
            datetime_complete=trial.datetime_complete,
            params=trial.params,
            distributions=space,
            user_attrs=trial.user_attrs,
            system_attrs=trial.system_attrs,
            intermediate_values=trial.intermediate_values,
            trial_id=trial._trial_id,
        )

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        self._backend.set_trial_intermediate_value(self._ids[trial_id], step, intermediate_value)
        super().set_trial_intermediate_value(trial_id, step, intermediate_value)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self.set_trial_user_attrs(trial_id, {key: value})

    def set_trial_user_attrs(self, trial_id: int, values: Mapping[str, Any]) -> None:
        """Several attributes at once."""
        rows = _attribute_rows(self._ids[trial_id], values)
        for row in rows:
            super().set_trial_user_attr(trial_id, row["key"], json.loads(row["value_json"]))  # as it would be read back
        self._write_attributes(_user_attributes, rows)

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        rows = _attribute_rows(self._ids[trial_id], {key: value})
        super().set_trial_system_attr(trial_id, key, json.loads(rows[0]["value_json"]))
        self._write_attributes(_system_attributes, rows)

    def _write_attributes(self, table: sa.TableClause, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return

        def write(connection: Connection) -> None:
            # They may exist: to be replaced, or written before, and the reply was lost.
            where = table.c.trial_id == rows[0]["trial_id"], table.c.key.in_([row["key"] for row in rows])
            connection.execute(sa.delete(table).where(*where))
            connection.execute(sa.insert(table), rows)

        self._writes.add(write)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        self._backend.set_study_user_attr(self._backend_study, key, value)
        super().set_study_user_attr(study_id, key, value)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self._backend.set_study_system_attr(self._backend_study, key, value)
        super().set_study_system_attr(study_id, key, value)


def _attribute_rows(backend_id: int, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"trial_id": backend_id, "key": key, "value_json": json.dumps(value)} for key, value in values.items()]


__all__ = ["SingleWriterStorage"]
