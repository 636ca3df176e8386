"""A study's device profiles, from its database or from a worker, and the step-time laws that time its trials.

A study has one clock: the laws it started with are stored with it and time all its trials, wherever it is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from ...objectives.task_code import schedule_code_hash
from ...spaces.errors import Fault, StorageError, StudyFileError
from ...spaces.laws.device import DeviceProfile, ProfileRequest
from ...spaces.laws.step_time import StepTime
from ...spaces.planning import CostKey, cost_keys, training_cost
from ...spaces.profile_request import profile_request
from ...spaces.schedule import is_own
from ...spaces.study.spec import StudySpec
from ..store.rows import left_out
from ..store.stored import StoredStudy, codes
from ..store.tables import Tables
from .runner import Runner

StepTimes = Mapping[str, list[StepTime]]


def study_profiles(
    spec: StudySpec,
    runner: Runner,
    task_hash: str,
    tables: Tables,
    notify: Callable[[str], None],
    *,
    first_run: bool,
) -> dict[str, dict[CostKey, DeviceProfile]]:
    """Profiles of every kind of device, the one that times the study first; from the database where they are stored.

    Args:
        notify: gets progress messages.
        first_run: the study has no step times yet; stored ones that were taken beside other programs are taken again.

    Raises:
        StudyFileError: several kinds of devices, and no known times.
    """
    kinds = list(runner.kinds)
    if len(kinds) > 1 and not spec.budget.profile_s:
        raise StudyFileError(
            Fault(
                "budget.profile_s",
                f"expected a value above 0, because wall-clock times on different kinds of devices ({', '.join(kinds)}) are "
                "not comparable; got 0. Set a number of seconds, or select one kind with devices.accelerator_type.",
            )
        )
    return with_one_evaluation_batch(
        {kind: _profiles_of(spec, runner, kind, task_hash, tables, notify, first_run) for kind in kinds}
    )


def with_one_evaluation_batch(
    profiles: dict[str, dict[CostKey, DeviceProfile]],
) -> dict[str, dict[CostKey, DeviceProfile]]:
    """The profiles with their smallest evaluation batch, so that all trials are evaluated alike."""
    everywhere = [
        variant for of_kind in profiles.values() for profile in of_kind.values() for variant in profile.each
    ]
    batch = min(
        (variant.evaluation_batch for variant in everywhere if variant.evaluation_batch is not None),
        default=None,
    )

    def with_batch(profile: DeviceProfile) -> DeviceProfile:
        others = tuple(replace(alternative, evaluation_batch=batch) for alternative in profile.alternatives)
        return replace(profile, evaluation_batch=batch, alternatives=others)

    return {
        kind: {key: with_batch(profile) for key, profile in of_kind.items()}
        for kind, of_kind in profiles.items()
    }


def _profiles_of(
    spec: StudySpec,
    runner: Runner,
    kind: str,
    task_hash: str,
    tables: Tables,
    notify: Callable[[str], None],
    first_run: bool,
) -> dict[CostKey, DeviceProfile]:
    """A profile for every combination of parameters that change cost."""
    profiles = {}
    for key in cost_keys(spec):
        request = profile_request(spec, runner.device, key)
        about = _about(spec, task_hash, request, key, runner.device_id(kind))
        known = tables.profile(about)
        # Of fixed seconds other step times are other trainings, so what was timed once counts for all studies of its database.
        again_if_shared = first_run and spec.space.train_s is None
        shared = (
            known is not None
            and again_if_shared
            and any(law.others or law.stolen for law in known.all_step_times)
        )
        # Earlier versions examined nothing.
        again = known is not None and (shared or known.examination is None)
        if known is None or again or (known.rough and request.timing_s > known.timing_s):
            timing = ""
            if request.timing_s:
                timing = f" and timing a Task's steps for up to {request.timing_s:g} s (at least one round of every size)"
            values = f" at {', '.join(f'{name} {value}' for name, value in key)}" if key else ""
            where = f"a {kind}" if kind else "a worker"
            notify(f"trying the training code{values}{timing} on {where} ...")
            known = runner.profile(spec.task, request, kind)
            tables.save_profile(about, known.to_dict())
        profiles[key] = known
    return profiles


def _about(spec: StudySpec, task_hash: str, request: ProfileRequest, key: CostKey, device_id: str) -> str:
    """Everything a profile depends on, as JSON text."""
    setup = request.setup
    cost = {
        "parameters": {**setup.parameters, **dict(key)},
        "metric": setup.metric,
        "folder": setup.folder,
        "cpus": setup.cpus,
        "training": training_cost(spec),
        # It costs nothing, but a profile vouches that it can be called.
        **(
            {"schedule": schedule_code_hash(setup.training.schedule, setup.folder)}
            if is_own(setup.training.schedule)
            else {}
        ),
        **({} if setup.sharding == "ddp" else {"sharding": setup.sharding}),
    }
    return json.dumps(
        {
            "task": [spec.task.rpartition(":")[2], task_hash],
            "request": request.to_dict() | {"setup": cost, "timing_s": request.timing_s > 0},
            "device": device_id,
            "torch": version("torch"),
        },
        sort_keys=True,
    )


def step_times_json(profiles: Mapping[CostKey, DeviceProfile]) -> dict[str, list[dict[str, Any]]]:
    """The laws that time a study's trials, by parameters that change cost, as they are stored."""
    return {
        json.dumps(key): [law.to_dict() for law in profile.all_step_times]
        for key, profile in profiles.items()
    }


def with_stored_step_times(
    profiles: Mapping[CostKey, DeviceProfile], step_times: StepTimes
) -> dict[CostKey, DeviceProfile]:
    """The profiles with the laws that a study started with; without any where its trials are timed by the clock."""
    return {
        key: profile.with_step_times(step_times.get(json.dumps(key), ())) for key, profile in profiles.items()
    }


def stored_profiles(study: StoredStudy, tables: Tables) -> dict[CostKey, DeviceProfile]:
    """A stored study's profiles with the laws that time its trials; none where its database holds none.

    Of several kinds of devices the one that times the study counts; of several measurements the newest.
    """
    row = tables.study(study.name)
    try:
        step_times = (row and row.step_times) or {}
    except StorageError as error:
        left_out(f"the step times of study {study.name}", error)
        return {}
    task = codes(study.identity)
    keys = cost_keys(study.spec)
    found: dict[CostKey, DeviceProfile] = {}
    for about, profile in tables.profiles():
        cost = about["request"]["setup"]
        key = next(
            (key for key in keys if all(cost["parameters"].get(name) == value for name, value in key)), None
        )
        if about["request"].get("shared_batch"):
            continue  # of earlier versions, without step-time laws
        if key is None or about["task"][1] not in task or cost["training"] != training_cost(study.spec):
            continue
        laws = step_times.get(json.dumps(key))
        if key not in found or not laws or list(profile.all_step_times) == laws:
            found[key] = profile
    return with_stored_step_times(found, step_times)
