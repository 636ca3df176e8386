"""A study's device profiles: from its database, or from a worker; and the step-time laws that price its trials.

One study has one kind of seconds: the laws it was begun with are kept with it and price all its trials, wherever it goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ...spaces.device import DeviceProfile, ProfileRequest
from ...spaces.errors import Fault, StudyFileError
from ...spaces.planning import CostKey, cost_keys, profile_request, training_cost
from ...spaces.step_time import StepTime
from ...spaces.study import StudySpec
from ..store.records import Records

if TYPE_CHECKING:
    from ..store.stored import StoredStudy
    from .runner import Runner

Prices = Mapping[str, list[dict[str, Any]]]


def study_profiles(
    spec: StudySpec, runner: Runner, task_hash: str, records: Records, tell: Callable[[str], None]
) -> dict[str, dict[CostKey, DeviceProfile]]:
    """Profiles of every kind of device, the one that prices trials first; from the database where they were made before.

    Args:
        tell: is given words for whoever waits.

    Raises:
        StudyFileError: there is no device of the kind that is to price, or several kinds and no known times.
    """
    kinds, price_on = list(runner.kinds), spec.devices.price_on
    if price_on is not None and price_on not in kinds:
        have = ", ".join(kind or "devices that tell no kind" for kind in kinds)
        raise StudyFileError(Fault("devices.price_on", f"expected a kind of device that is here ({have}), got {price_on!r}"))
    if len(kinds) > 1 and not spec.budget.profile_s:
        raise StudyFileError(
            Fault(
                "budget.profile_s",
                f"expected known times where there are several kinds of devices ({', '.join(kinds)}), got 0: the clocks of "
                "two kinds do not compare. Give it seconds, or one kind with devices.accelerator_type.",
            )
        )
    kinds.sort(key=lambda kind: kind != price_on)  # stable: else those with the most room first
    return {kind: _profiles_of(spec, runner, kind, task_hash, records, tell) for kind in kinds}


def _profiles_of(
    spec: StudySpec, runner: Runner, kind: str, task_hash: str, records: Records, tell: Callable[[str], None]
) -> dict[CostKey, DeviceProfile]:
    """A profile for every combination of parameters that change cost."""
    profiles = {}
    for key in cost_keys(spec):
        request = profile_request(spec, runner.device, key)
        about = _about(spec, task_hash, request, runner.device_id(kind))
        kept = records.profile(about)
        known = DeviceProfile.from_dict(kept) if kept else None
        if known is None or (known.rough and request.timing_s > known.timing_s):
            timing = ""
            if request.timing_s:
                timing = f" and timing its steps for up to {request.timing_s:g} s (one look at each size at least)"
            values = f" at {', '.join(f'{name} {value}' for name, value in key)}" if key else ""
            where = f"a {kind}" if kind else "a worker"
            tell(f"trying the training code{values}{timing} on {where} ...")
            known = runner.profile(spec.task, request, kind)
            records.keep_profile(about, known.to_dict())
        profiles[key] = known
    return profiles


def _about(spec: StudySpec, task_hash: str, request: ProfileRequest, device_id: str) -> str:
    """Everything a profile hangs on, as text."""
    setup = request.setup
    cost = {
        "parameters": dict(setup.parameters),
        "metric": setup.metric,
        "folder": setup.folder,
        "cpus": setup.cpus,
        "training": training_cost(spec),
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


def prices_of(profiles: Mapping[CostKey, DeviceProfile]) -> Prices:
    """The laws that price a study's trials, by parameters that change cost, as they are kept."""
    return {json.dumps(key): [law.to_dict() for law in profile.step_times] for key, profile in profiles.items()}


def repriced_profiles(profiles: Mapping[CostKey, DeviceProfile], prices: Prices) -> dict[CostKey, DeviceProfile]:
    """The profiles with the laws that a study was begun with; none where its trials were timed by the clock."""
    return {
        key: replace(profile, step_times=tuple(map(StepTime.from_dict, prices.get(json.dumps(key), ()))))
        for key, profile in profiles.items()
    }


def kept_profiles(study: StoredStudy, records: Records) -> dict[CostKey, DeviceProfile]:
    """A stored study's profiles, with the laws that price its trials; none where its database holds none.

    Of several kinds of devices the one whose laws price the trials counts; of several measurements the newest.
    """
    prices = records.prices(study.name) or {}
    task = list(study.identity["task"].values()) if isinstance(study.identity["task"], Mapping) else study.identity["task"]
    keys = cost_keys(study.spec)
    found: dict[CostKey, DeviceProfile] = {}
    for about, profile in records.profiles():
        cost = about["request"]["setup"]
        key = next((key for key in keys if all(cost["parameters"].get(name) == value for name, value in key)), None)
        if key is None or about["task"][1] not in task or cost["training"] != training_cost(study.spec):
            continue
        known = DeviceProfile.from_dict(profile)
        laws = prices.get(json.dumps(key))
        if key not in found or [law.to_dict() for law in known.step_times] == laws or not laws:
            found[key] = known
    return repriced_profiles(found, prices)
