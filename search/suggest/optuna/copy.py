"""A study's trials as a study of Optuna's: for its samplers, in memory, and for its dashboard, in the database.

Optuna holds a copy, written after the fact; nothing here is read back to decide anything (docs/decisions/0058).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from ....spaces.errors import cut
from ....spaces.names import Direction
from ....spaces.record import TrialFacts, TrialRecord
from ....spaces.study.space import LENGTHS

# Optuna's own key for a trial's constraints; its dashboard and its samplers read this system attribute.
_CONSTRAINTS = "constraints"
# By these outcomes a trial says nothing about its setting.
_FAILED = {"error", "out_of_memory", "interrupted", "unreadable"}
# A copy that is later than this says when its trial really ended.
_LATE_S = 10.0
# The dashboard does not wrap attributes, so a long message would widen its page; a trial's note has all of it.
_MESSAGE_CHARACTERS = 60


class Disagrees(Exception):
    """A study of Optuna's has trials that are not copies of ours."""


class OptunaCopy:
    """A study of Optuna's that follows a study's trials: same numbers, parameters, states, values and dates.

    Facts are user attributes. A trial that diverged is infeasible to Optuna, as is one without a feasible plan. One that is
    paused or interrupted, and goes on, is RUNNING there, since Optuna knows no such state.

    Args:
        storage: of Optuna's; only this process writes this study there.
        study_id: in that storage.
        space: of every searched parameter.
        for_people: rather than for samplers. Optuna's dashboard ignores constraints where it draws the front, so a trial that
            diverged is PRUNED there, without values. One that blew up keeps its values, which another beats: what Optuna holds
            of an ended trial cannot change, and that verdict may.
    """

    def __init__(
        self,
        storage: BaseStorage,
        study_id: int,
        space: Mapping[str, BaseDistribution],
        *,
        for_people: bool = False,
    ) -> None:
        self._storage, self._study_id, self._space, self._for_people = (
            storage,
            study_id,
            dict(space),
            for_people,
        )
        # By number: the trial as it was copied last, or as it was found there.
        self._copies: list[TrialRecord | FrozenTrial] = list(storage.get_all_trials(study_id, deepcopy=False))
        # Optuna's, by ours: those of a sampler's trials may differ.
        self._numbers = list(range(len(self._copies)))
        self._begun: dict[
            int, Mapping[str, Any]
        ] = {}  # parameters by number there, of trials that are not yet among ours

    def update(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        """Copy what is new or has changed; returns those trials.

        Raises:
            Disagrees: the study there has trials that are not copies of these.
        """
        if len(self._copies) > len(records):
            raise Disagrees
        changed = []
        for record in records:
            if record.number == len(self._copies):
                self._add(record)
            elif self._copies[record.number] is record:
                continue
            else:
                self._bring_up_to_date(record)
                self._copies[record.number] = record
            changed.append(record)
        return changed

    def expect(self, number: int, parameters: Mapping[str, Any]) -> None:
        """Register a trial begun in Optuna's study: our next trial with these parameters corresponds to it."""
        self._begun[number] = parameters

    def id_of(self, number: int) -> int:
        """Optuna's id of a trial."""
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, self._numbers[number])

    def _add(self, record: TrialRecord) -> None:
        begun = next(
            (number for number, parameters in self._begun.items() if parameters == self._known(record)), None
        )
        if begun is None:
            trial_id = self._storage.create_new_trial(self._study_id, self._template(record))
            self._numbers.append(self._storage.get_trial_number_from_id(trial_id))
            self._copies.append(record)
        else:
            del self._begun[begun]
            self._numbers.append(begun)
            self._copies.append(self._storage.get_trial(self.id_of(record.number)))
            self._bring_up_to_date(record)
            self._copies[record.number] = record

    def _template(self, record: TrialRecord) -> FrozenTrial:
        parameters = self._known(record)
        state, values = self._end(record)
        template = create_trial(
            state=state,
            values=values,
            params=parameters,
            distributions={name: _containing(self._space[name], value) for name, value in parameters.items()},
            user_attrs=_attributes(record),
            system_attrs=_constraints(record),
        )
        template.datetime_start = _time(record.started_at) or _time(record.ended_at) or datetime.now()
        template.datetime_complete = _time(record.ended_at) if record.has_ended else None
        return template

    def _bring_up_to_date(self, record: TrialRecord) -> None:
        if record.outcome == "unreadable":
            return  # what was copied before is all that is left of it
        before, (state, values) = self._copies[record.number], self._end(record)
        if isinstance(before, FrozenTrial):
            ended, there = before.state.is_finished(), (before.state, before.values and tuple(before.values))
            if before.params not in ({}, self._known(record)) or (ended and there != (state, values)):
                raise Disagrees
        else:
            ended = before.has_ended
        if ended:
            return
        trial_id = self.id_of(record.number)
        attributes = _attributes(record)
        had = before.user_attrs if isinstance(before, FrozenTrial) else _attributes(before)
        ended_at = _time(record.ended_at)
        if ended_at is not None and (datetime.now() - ended_at).total_seconds() > _LATE_S:
            attributes["ended_at"] = record.ended_at  # Optuna's own date is that of the copy
        for name, value in attributes.items():
            if name not in had or had[name] != value:
                self._storage.set_trial_user_attr(trial_id, name, value)
        if record.has_ended:
            for name, value in _constraints(record).items():
                self._storage.set_trial_system_attr(trial_id, name, value)
            self._storage.set_trial_state_values(trial_id, state, values)

    def _end(self, record: TrialRecord) -> tuple[TrialState, tuple[float, ...] | None]:
        """The state and the values that a trial has there."""
        if self._for_people and record.outcome == "diverged" and not record.facts.blew_up:
            return TrialState.PRUNED, None
        return _state(record), record.values

    def _known(self, record: TrialRecord) -> dict[str, Any]:
        """Its parameters that are searched, as they were suggested: a trial that is shortened keeps those there."""
        planned = record.facts.planned_length
        changed = {} if planned is None else {name: planned for name in LENGTHS if name in record.parameters}
        return {
            name: value for name, value in {**record.parameters, **changed}.items() if name in self._space
        }


def record_of(trial: FrozenTrial, direction: Direction) -> TrialRecord:
    """A trial of Optuna's as a record; one that is waiting has no parameters yet."""
    facts = dict(trial.user_attrs)
    outcome = facts.pop(
        "outcome", {"COMPLETE": "complete", "PRUNED": "stopped"}.get(trial.state.name, "error")
    )
    return TrialRecord.of(
        trial.number,
        outcome if trial.state.is_finished() else "running",
        {} if trial.state == TrialState.WAITING else trial.params,
        TrialFacts.of(facts),
        tuple(trial.values) if trial.state == TrialState.COMPLETE and trial.values else None,
        started_at=_text(trial.datetime_start),
        ended_at=_text(trial.datetime_complete),
        direction=direction,
    )


def _state(record: TrialRecord) -> TrialState:
    if not record.has_ended:
        return TrialState.RUNNING
    if record.values is not None:
        return TrialState.COMPLETE
    return TrialState.FAIL if record.outcome in _FAILED else TrialState.PRUNED


def _attributes(record: TrialRecord) -> dict[str, Any]:
    attributes = {"outcome": record.outcome, **record.facts.to_dict()}
    if "message" in attributes:
        attributes["message"] = cut(attributes["message"], _MESSAGE_CHARACTERS)
    return attributes


def _containing(distribution: BaseDistribution, value: Any) -> BaseDistribution:
    """A distribution, wide enough for a value: the user's own settings may lie outside of what is searched."""
    if not isinstance(distribution, IntDistribution | FloatDistribution):
        return distribution
    steps = (value - distribution.low) / (distribution.step or 1)
    on_grid = (isinstance(distribution, FloatDistribution) and distribution.step is None) or math.isclose(
        steps, round(steps)
    )
    if on_grid and distribution.low <= value <= distribution.high:
        return distribution
    return type(distribution)(
        min(distribution.low, value), max(distribution.high, value), log=distribution.log
    )


def _constraints(record: TrialRecord) -> dict[str, Any]:
    """System attributes that say whether an ended trial was feasible; none where it says nothing about its setting."""
    if not record.has_ended or _state(record) == TrialState.FAIL:
        return {}
    return {_CONSTRAINTS: [1.0 if record.outcome == "diverged" else record.violation]}


def _time(text: str) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _text(time: datetime | None) -> str:
    return time.isoformat(timespec="milliseconds") if time else ""
