"""A study's device profiles: from its database, or from a worker; and the step-time laws that price its trials.

One study has one kind of seconds: the laws it was begun with are kept with it and price all its trials, wherever it goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ..spaces.device import DeviceProfile, ProfileRequest
from ..spaces.step_time import StepTime
from ..spaces.study import StudySpec
from .records import Records
from .setups import CostKey, cost_keys, profile_request, training_cost

if TYPE_CHECKING:
    from .study_run import Runner

Prices = Mapping[str, list[dict[str, Any]]]


def study_profiles(
    spec: StudySpec, runner: Runner, task_hash: str, records: Records, tell: Callable[[str], None]
) -> dict[CostKey, DeviceProfile]:
    """A profile for every combination of parameters that change cost; from the database where it was made before.

    Args:
        tell: is given words for whoever waits.
    """
    profiles = {}
    for key in cost_keys(spec):
        request = profile_request(spec, runner.device, key)
        about = _about(spec, task_hash, request, runner.device_id)
        kept = records.profile(about)
        known = DeviceProfile.from_dict(kept) if kept else None
        if known is None or (known.rough and request.timing_s > known.timing_s):
            timing = ""
            if request.timing_s:
                timing = f" and timing its steps for up to {request.timing_s:g} s or a look at each size,"
            values = f" at {', '.join(f'{name} {value}' for name, value in key)}" if key else ""
            tell(f"trying the training code{values}{timing} on a worker ...")
            known = runner.profile(spec.task, request)
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
