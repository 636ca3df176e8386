"""Optuna's storage for a study that one driver alone writes: what it wrote, or has read once, it never reads again."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from optuna.distributions import BaseDistribution
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import InMemoryStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import Engine

# Optuna's own table. Through its storage every attribute is a transaction with three statements of its ORM, and a trial's two
# dozen of them were half of a driver's work.
_attributes = sa.table("trial_user_attributes", sa.column("trial_id"), sa.column("key"), sa.column("value_json"))


class OneWriterStorage(InMemoryStorage):
    """A study's trials in memory; everything is written to the database first.

    Optuna's own cache reads all that is known of every unfinished trial again, several times for each that is asked: 0.2 s a
    time where 200 run side by side (docs/scaling.md). A trial's id is its number here.

    Args:
        kept: where the study is kept.
        study_id: in there.
    """

    def __init__(self, kept: RDBStorage, study_id: int) -> None:
        super().__init__()
        self._kept, self._kept_study = kept, study_id
        self._ids: list[int] = []  # of trials in the database, by number
        self._creating = threading.Lock()
        here = super().create_new_study(kept.get_study_directions(study_id), kept.get_study_name_from_id(study_id))
        for key, value in kept.get_study_system_attrs(study_id).items():
            super().set_study_system_attr(here, key, value)
        for key, value in kept.get_study_user_attrs(study_id).items():
            super().set_study_user_attr(here, key, value)
        self._study_id = here
        self._catch_up(here)

    def _catch_up(self, study_id: int) -> None:
        """Read the trials that are not known yet."""
        for trial in self._kept.get_all_trials(self._kept_study, deepcopy=False)[len(self._ids) :]:
            self._ids.append(trial._trial_id)
            super().create_new_trial(study_id, trial)

    def read_again(self) -> None:
        """Read everything anew: the answer to a writing was lost, and it may have been done or not."""
        with self._creating:
            for trial in self._kept.get_all_trials(self._kept_study)[: len(self._ids)]:
                trial._trial_id = trial.number
                self._set_trial(trial.number, trial)
            self._catch_up(self._study_id)

    @property
    def engine(self) -> Engine:
        return self._kept.engine

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        with self._creating:
            made = self._kept.get_trial(self._kept.create_new_trial(self._kept_study, template_trial))
            if made.number == len(self._ids):
                self._ids.append(made._trial_id)
                super().create_new_trial(study_id, made)
            else:  # somebody queued trials by Optuna, or the answer to a writing of ours was lost
                self._catch_up(study_id)
            return made.number

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        self._kept.set_trial_param(self._ids[trial_id], param_name, param_value_internal, distribution)
        super().set_trial_param(trial_id, param_name, param_value_internal, distribution)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        kept_id = self._ids[trial_id]
        try:
            done = self._kept.set_trial_state_values(kept_id, state, values)
        except UpdateFinishedTrialError:
            # Written before, and the answer was lost: twice is once.
            if self._kept.get_trial(kept_id).state != state:
                raise
            done = True
        return super().set_trial_state_values(trial_id, state, values) and done

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        self._kept.set_trial_intermediate_value(self._ids[trial_id], step, intermediate_value)
        super().set_trial_intermediate_value(trial_id, step, intermediate_value)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._kept.set_trial_user_attr(self._ids[trial_id], key, value)
        super().set_trial_user_attr(trial_id, key, json.loads(json.dumps(value)))  # as it would be read back

    def set_trial_user_attrs(self, trial_id: int, values: Mapping[str, Any]) -> None:
        """Several attributes in one transaction."""
        self.check_trial_is_updatable(trial_id, self.get_trial(trial_id).state)
        if not values:
            return
        kept_id, texts = self._ids[trial_id], {key: json.dumps(value) for key, value in values.items()}
        rows = [{"trial_id": kept_id, "key": key, "value_json": text} for key, text in texts.items()]
        try:
            with self._kept.engine.begin() as connection:
                # They may be there: to be changed, or written before, and the answer was lost.
                where = _attributes.c.trial_id == kept_id, _attributes.c.key.in_(list(texts))
                connection.execute(sa.delete(_attributes).where(*where))
                connection.execute(sa.insert(_attributes), rows)
        except sa.exc.SQLAlchemyError as error:  # as Optuna tells them
            raise StorageInternalError(f"The attributes of trial {trial_id} could not be written.") from error
        for key, text in texts.items():
            super().set_trial_user_attr(trial_id, key, json.loads(text))

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._kept.set_trial_system_attr(self._ids[trial_id], key, value)
        super().set_trial_system_attr(trial_id, key, json.loads(json.dumps(value)))

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        self._kept.set_study_user_attr(self._kept_study, key, value)
        super().set_study_user_attr(study_id, key, value)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self._kept.set_study_system_attr(self._kept_study, key, value)
        super().set_study_system_attr(study_id, key, value)


__all__ = ["OneWriterStorage"]
