"""Trying a study on this machine before it runs, for `bsearch check` and `bsearch profile`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ...objectives.machine.host import cores_here
from ...objectives.task_code import task_code_hash
from ...spaces.errors import NoStudyError, StudyFileError
from ...spaces.laws.cards import Card
from ...spaces.laws.device import DeviceProfile, ProfileRequest
from ...spaces.planning import CostKey, cost_keys, feasible_batches
from ...spaces.profile_request import profile_faults, profile_request
from ...spaces.record import TrialRecord
from ...spaces.study.spec import StudySpec
from ..run.decisions.eta import ClockFactors, Span
from ..run.decisions.spending import device_names, prices_of
from ..run.serial import SerialRunner
from ..store.database import storage_engine
from ..store.stored import study_identity
from ..store.tables import Tables
from .forecast import Forecast, forecast

if TYPE_CHECKING:
    from ...objectives.profiling.memory_rows import MemoryRow

# Seconds that `check` spends on timing steps, at most and for each combination of parameters that change cost.
_CHECK_S, _LEAST_S = 5.0, 1.0
# Seconds that `profile` spends on measuring memory, at most.
_MEMORY_S = 5.0
# Complete trials of an earlier study, at least, from which the overhead around training is estimated.
_ENOUGH = 3


@dataclass(frozen=True, slots=True)
class CheckedStudy:
    """A valid study with a forecast.

    Args:
        profiles: for every combination of parameters that change cost.
        feasible: the effective batches that can be planned, lowest and highest.
        forecast: None where steps cannot be timed beforehand, as in a training loop that is not made of `Loop`.
        slots: trials that would run side by side here.
        notice: where trials run, if the user may not expect it.
    """

    profiles: Mapping[CostKey, DeviceProfile]
    feasible: tuple[int, int]
    forecast: Forecast | None
    slots: int
    notice: str = ""


@dataclass(frozen=True, slots=True)
class ProfiledStudy:
    """A study's profiles on this machine, with predicted and measured memory.

    Args:
        task: its name and the identity of its code, as studies store them.
        profiles: for every combination of parameters that change cost.
        memory: of the first of them.
    """

    task: Mapping[str, Any]
    profiles: Mapping[CostKey, DeviceProfile]
    memory: list[MemoryRow]


def check_study(spec: StudySpec) -> CheckedStudy:
    """Check everything a run would refuse, with a few timed steps and no training.

    Raises:
        StudyFileError, TaskError, StorageError: as `bsearch run` would.
    """
    runner = SerialRunner(spec.devices)
    spec = spec.with_cores(runner.cores)
    assert spec.storage is not None
    task_code_hash(spec.task)
    storage_engine(spec.storage).dispose()
    timing_s = min(float(spec.budget.profile_s) or _CHECK_S, _CHECK_S) / len(cost_keys(spec))
    profiles = {
        key: profile for key, (_, profile) in _profiles(spec, runner, max(timing_s, _LEAST_S)).items()
    }
    feasible = feasible_batches(spec, profiles.values())
    if faults := [
        fault for profile in profiles.values() for fault in profile_faults(spec, profile, feasible)
    ]:
        raise StudyFileError(dict.fromkeys(faults))
    prices_of(spec, device_names({"": profiles}), runner.device)
    cores = runner.cores * min(spec.devices.counts)
    slots = spec.cluster.trials_at_once or max(cores_here() // cores, 1)
    timed = all(profile.step_times for profile in profiles.values())
    at_once = slots if runner.device == "cpu" else 1
    spans = _earlier_spans(spec)
    forecasted = (
        forecast(spec, profiles, at_once, ClockFactors.of(spans) if spans else None) if timed else None
    )
    return CheckedStudy(profiles, feasible, forecasted, slots, runner.notice)


def _earlier_spans(spec: StudySpec) -> list[Span]:
    """Complete trials of this file's last study that has enough of them, which show the overhead around training; or none."""
    assert spec.storage is not None
    try:
        tables = Tables(spec.storage, create=False)
    except NoStudyError:
        return []
    with closing(tables):
        for study in reversed(tables.studies(spec.study)):
            trials = {record.number: record for record in tables.trials(study.name)}
            ended = [
                _span(row.started_at, row.ended_at, trials[row.number])
                for row in tables.attempts(study.name)
                if row.outcome == "complete" and row.ended_at and row.number in trials
            ]
            known = [span for span in ended if span.known_s is not None]
            if len(known) >= _ENOUGH:
                return known
    return []


def _span(started_at: str, ended_at: str, trial: TrialRecord) -> Span:
    started, ended = (datetime.fromisoformat(at).timestamp() for at in (started_at, ended_at))
    facts = trial.facts
    known_s = facts.train_s if facts.train_s_source == "known" else None
    return Span(started, ended, known_s, facts.measured_train_s or 0.0, 1.0, 1.0, 1)


def profile_study(spec: StudySpec, card: Card | None = None) -> ProfiledStudy:
    """Predict memory and step time on this machine, and measure for `budget.profile_s`; or predict memory on another card.

    Args:
        card: not here; then nothing is measured, and step times are not known.

    Raises:
        StudyFileError, TaskError, ProfilingError: the task cannot be profiled.
    """
    from ...objectives.profiling.memory_rows import memory_rows, profile_like  # with torch

    task = study_identity(spec, task_code_hash(spec.task))["task"]
    if card is not None:
        key = cost_keys(spec)[0]
        known, memory = profile_like(spec.task, profile_request(spec, "cpu", key), card)
        return ProfiledStudy(task, {key: known}, memory)
    timing_s = float(spec.budget.profile_s)
    runner = SerialRunner(spec.devices)
    profiled = _profiles(spec.with_cores(runner.cores), runner, timing_s, traces=True)
    request, profile = next(iter(profiled.values()))
    rows = memory_rows(spec.task, request, profile, min(_MEMORY_S, timing_s))
    return ProfiledStudy(task, {key: measured for key, (_, measured) in profiled.items()}, rows)


def _profiles(
    spec: StudySpec, runner: SerialRunner, timing_s: float, *, traces: bool = False
) -> dict[CostKey, tuple[ProfileRequest, DeviceProfile]]:
    """The request and the profile of every combination of parameters that change cost."""
    requests = {key: profile_request(spec, runner.device, key, traces=traces) for key in cost_keys(spec)}
    requests = {key: replace(request, timing_s=timing_s) for key, request in requests.items()}
    return {key: (request, runner.profile(spec.task, request)) for key, request in requests.items()}
