"""Retiming a study for another device: the same trials and accuracies, timed by that device's step-time law."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from ...spaces.boundary.files import text_of
from ...spaces.errors import BsearchError, Fault, InfeasiblePlanError, StudyFileError, cut
from ...spaces.front import ParetoFront
from ...spaces.laws.device import DeviceProfile
from ...spaces.planning import known_train_s, plan_limits, planned, training_cost
from ...spaces.record import TrialRecord
from ...spaces.study.spec import StudySpec
from ...spaces.trial import Parameter, TrialSetup
from .pareto import study_front


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A device as written by `bsearch profile --out`: a profile for each combination of parameters that change cost.

    `task` and `training` are what it was profiled with, as studies store them.
    """

    name: str
    task: Mapping[str, Any]
    training: Mapping[str, Any]
    profiles: tuple[tuple[Mapping[str, Any], DeviceProfile], ...]

    def profile(self, parameters: Mapping[str, Any]) -> DeviceProfile | None:
        """The profile of a trial with these parameters."""
        for key, profile in self.profiles:
            if all(parameters.get(name) == value for name, value in key.items()):
                return profile
        return None


# A profile holds some hundreds of numbers for each combination that changes cost.
_LARGEST_PROFILE = 1 << 24  # bytes


@dataclass(frozen=True, slots=True)
class _Profiled:
    parameters: dict[str, Parameter]
    profile: DeviceProfile


@dataclass(frozen=True, slots=True)
class _Document:
    """The part of a profile's document that is read here; the rest is for people."""

    device: str
    task: dict[str, Any]
    training: dict[str, Any]
    profiles: tuple[_Profiled, ...]


def read_profile(path: Path, *, timed: bool = True) -> KnownDevice:
    """Read a profile written by `bsearch profile --out`; the file is not trusted, so every number is checked.

    Args:
        timed: expect step times.

    Raises:
        StudyFileError: no such file, not a profile, or one without step times.
    """
    text = text_of(path, "a profile", _LARGEST_PROFILE)
    try:
        document = TypeAdapter(_Document).validate_json(text.encode(), strict=True)
    except ValidationError as error:
        faults = [Fault(_dotted(detail["loc"]), _words(detail), str(path)) for detail in error.errors()[:10]]
        raise StudyFileError(
            [Fault("", "expected what `bsearch profile STUDY --out FILE` writes", str(path)), *faults]
        ) from None
    except BsearchError as error:
        raise StudyFileError(
            Fault("", f"expected what `bsearch profile` writes: {error}", str(path))
        ) from None
    profiles = tuple((entry.parameters, entry.profile) for entry in document.profiles)
    if not profiles or (timed and not all(profile.step_times for _, profile in profiles)):
        raise StudyFileError(
            f"{path}: expected step times, got none. Write bsearch profile STUDY --out {path} on the "
            "device, with budget.profile_s above 0."
        )
    return KnownDevice(document.device, document.task, document.training, profiles)


def _dotted(loc: Iterable[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _words(details: ErrorDetails) -> str:
    got = "" if details["type"] in ("missing", "json_invalid") else f", got {cut(repr(details['input']), 60)}"
    return f"{details['msg'][:1].lower()}{details['msg'][1:]}{got}"


@dataclass(frozen=True, slots=True)
class Retimed:
    """A study's front in another device's seconds.

    `was` are the old seconds by trial number; `left_out` says why trials could not be retimed.
    """

    front: ParetoFront
    records: tuple[TrialRecord, ...]
    was: Mapping[int, float]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def retimed(
    spec: StudySpec,
    task: Mapping[str, Any],
    records: Sequence[TrialRecord],
    setups: Mapping[int, TrialSetup],
    device: KnownDevice,
) -> Retimed:
    """Retime a study's complete trials with another device's laws; batch, rate and accuracy stay the same.

    Args:
        task: the study's, as in its identity.
        setups: of each trial's last attempt, as `Tables.setups` gives them.

    Raises:
        StudyFileError: the profile is of another task, or the front is of costs and it has no price.
    """
    price = spec.devices.price_of(device.name, next((profile.kind for _, profile in device.profiles), "gpu"))
    if price is None and spec.objectives.speed == "cost":
        raise StudyFileError(
            f"retime: expected a price for {device.name}, since the front is of costs. Write it under devices.prices."
        )
    if device.task.get("name") != task.get("name"):
        raise StudyFileError(
            f"profile: expected a profile of the task {task.get('name')}, got one of {device.task.get('name')}"
        )
    timed, left_out, was = [], [], {}
    notes = [f"the profile was made with another {key}: {value}" for key, value in _differing(device, spec)]
    if device.task.get("code") not in (task.get("code"), *task.get("earlier", ())):
        notes.append("the profile was made with other code of the task")
    for record in records:
        if record.outcome != "complete" or record.train_s is None:
            continue
        try:
            trial, note = _there(spec, record, setups.get(record.number), device, price)
        except InfeasiblePlanError as error:
            left_out.append(f"trial {record.number}: {error}")
            continue
        was[record.number] = record.train_s
        timed.append(trial)
        notes += [f"trial {record.number}: {note}"] if note else []
    return Retimed(study_front(timed, spec.objectives), tuple(timed), was, tuple(left_out), tuple(notes))


def _there(
    spec: StudySpec, record: TrialRecord, setup: TrialSetup | None, device: KnownDevice, price: float | None
) -> tuple[TrialRecord, str]:
    """A trial as it would train on another device, and what may differ beside its time.

    Raises:
        InfeasiblePlanError: it has no plan there, or its time is not known.
    """
    if setup is None:
        raise InfeasiblePlanError("its setup cannot be read from the database")
    profile, devices = device.profile(setup.cost_parameters), setup.plan.devices
    if profile is None or profile.step_time(devices) is None:
        missing = "its parameters that change cost" if profile is None else f"{devices} devices"
        raise InfeasiblePlanError(f"the profile does not cover {missing}")
    requested = record.parameters.get("accumulation")
    plan = planned(
        spec, profile, setup.effective_batch, devices, None if requested is None else int(requested)
    )
    variant = profile.under(plan)
    limits = plan_limits(spec, variant, devices, setup.effective_batch)
    there = replace(
        setup,
        plan=plan,
        embedding=variant.embedding,
        largest_micro_batch=limits["largest_micro_batch"],
        smallest_micro_batch=limits["smallest_micro_batch"],
    )
    train_s, note = known_train_s(profile, there), ""
    assert train_s is not None
    if profile.batch_statistics and plan.largest_micro_batch != setup.plan.largest_micro_batch:
        note = (
            f"BatchNorm saw {setup.plan.largest_micro_batch} samples and would see {plan.largest_micro_batch} there, so its "
            "accuracy may differ"
        )
    facts = replace(
        record.facts,
        train_s=train_s,
        device_s=train_s * plan.devices,
        price=price,
        train_s_source="retimed",
        micro_batch=plan.largest_micro_batch,
        accumulation=plan.accumulation,
        activation_checkpointing=None
        if plan.activation_checkpointing == "none"
        else plan.activation_checkpointing,
    )
    return replace(record, train_s=train_s, facts=facts), note


def _differing(device: KnownDevice, spec: StudySpec) -> Iterator[tuple[str, Any]]:
    """Training settings that affect a step's cost and differ from the study's, with the profile's values."""
    ours = training_cost(spec)
    yield from ((key, value) for key, value in device.training.items() if ours.get(key, value) != value)


def retimed_summary(before: ParetoFront, after: Retimed) -> str:
    """How the front changed, in a sentence."""
    old, new = ({trial.number for trial in front.trials} for front in (before, after.front))
    stayed, joined, left = sorted(old & new), sorted(new - old), sorted(old - new)

    def named(numbers: list[int]) -> str:
        return ", ".join(map(str, numbers)) or "none"

    return f"On both fronts: {named(stayed)}. Only on the new front: {named(joined)}. Only on the old front: {named(left)}."
