"""An old study on another device: the same trials and accuracies, the seconds of that device's step-time law."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..spaces.device import DeviceProfile
from ..spaces.errors import InfeasiblePlanError, StudyFileError
from ..spaces.study import StudySpec
from ..spaces.trial import ParetoFront, TrialRecord, TrialSetup
from .pareto import study_front
from .setups import known_train_s, planned


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A device as `bsearch profile --out` wrote it down: a profile for each combination that changes cost."""

    name: str
    profiles: tuple[tuple[Mapping[str, Any], DeviceProfile], ...]

    def profile(self, parameters: Mapping[str, Any]) -> DeviceProfile | None:
        """The profile of a trial with these parameters."""
        for key, profile in self.profiles:
            if all(parameters.get(name) == value for name, value in key.items()):
                return profile
        return None


def read_profile(path: Path) -> KnownDevice:
    """Read what `bsearch profile --out` wrote.

    Raises:
        StudyFileError: no such file, or another one, or one without step times.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        known = KnownDevice(
            str(document["device"]),
            tuple((dict(one["parameters"]), DeviceProfile.from_dict(one["profile"])) for one in document["profiles"]),
        )
    except OSError as error:
        raise StudyFileError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StudyFileError(
            f"{path}: expected what `bsearch profile STUDY --out FILE` writes, got something else "
            f"({type(error).__name__}: {error})"
        ) from None
    if not all(profile.step_times for _, profile in known.profiles):
        raise StudyFileError(f"{path}: its steps were not timed. Profile again, without --seconds 0.")
    return known


@dataclass(frozen=True, slots=True)
class Repriced:
    """A study's front in another device's seconds.

    `was` are the old seconds by trial number; `left_out` says why trials have no price there.
    """

    front: ParetoFront
    records: tuple[TrialRecord, ...]
    was: Mapping[int, float]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def repriced(
    spec: StudySpec, records: Sequence[TrialRecord], attempts: Iterable[Mapping[str, Any]], device: KnownDevice
) -> Repriced:
    """Price a study's complete trials by another device's laws; batch, rate and accuracy stay as they were.

    Args:
        attempts: the study's, as `Records.attempts` gives them; a trial's last one holds its setup.
    """
    setups = {row["number"]: TrialSetup.from_dict(row["setup"]) for row in attempts}
    priced, left_out, notes, was = [], [], [], {}
    for record in records:
        if record.outcome != "complete" or record.train_s is None:
            continue
        setup = setups[record.number]
        profile = device.profile(setup.parameters)
        if profile is None or profile.step_time(setup.plan.devices) is None:
            missing = "its parameters that change cost" if profile is None else f"{setup.plan.devices} devices"
            left_out.append(f"trial {record.number}: the profile knows nothing of {missing}")
            continue
        try:
            wished = None if spec.space.accumulation is None else setup.plan.accumulation
            plan = planned(spec, profile, setup.effective_batch, setup.plan.devices, wished)
        except InfeasiblePlanError as error:
            left_out.append(f"trial {record.number}: {error}")
            continue
        train_s = known_train_s(profile, plan, setup.samples_budget)
        assert train_s is not None
        if profile.batch_statistics and plan.largest_micro_batch != setup.plan.largest_micro_batch:
            notes.append(
                f"trial {record.number}: BatchNorm saw {setup.plan.largest_micro_batch} samples and would see "
                f"{plan.largest_micro_batch} there, so its accuracy may differ"
            )
        was[record.number] = record.train_s
        facts = {
            **record.facts,
            "train_s": train_s,
            "device_s": train_s * plan.devices,
            "train_s_source": "repriced",
            "micro_batch": plan.largest_micro_batch,
            "accumulation": plan.accumulation,
        }
        priced.append(replace(record, train_s=train_s, facts=facts))
    return Repriced(study_front(priced, spec.objectives), tuple(priced), was, tuple(left_out), tuple(notes))


def repriced_words(before: ParetoFront, after: Repriced) -> str:
    """How the front changed, in a sentence."""
    old, new = ({trial.number for trial in front.trials} for front in (before, after.front))
    stayed, joined, left = sorted(old & new), sorted(new - old), sorted(old - new)

    def named(numbers: list[int]) -> str:
        return ", ".join(map(str, numbers)) or "none"

    return f"On both fronts: {named(stayed)}. Joined: {named(joined)}. Left: {named(left)}."
