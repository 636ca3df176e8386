"""Whether other parameter values cost the same, so that one profile holds for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch.utils.flop_counter import FlopCounterMode

from ...spaces.laws.device import DeviceProfile, ProfileRequest
from ...spaces.trial import Parameter
from ..adapters.loop_task import LoopTask
from ..task import Task
from .memory.limit import smallest_setup
from .memory.tracing import MemoryProbe

# From this factor between two parameter values, in a step's bytes or operations, one law does not cover both.
_COST_FACTOR = 1.1


def with_other_costs(task: Task, profile: DeviceProfile, request: ProfileRequest) -> DeviceProfile:
    """The profile with the cost of other parameter values, where a step's bytes or operations change by 10 % or more."""
    if not request.others:
        return profile
    smallest = profile.smallest_micro_batch

    def cost(parameters: Mapping[str, Parameter]) -> tuple[int, int]:
        probe = MemoryProbe(task, replace(smallest_setup(request.setup, profile), parameters=parameters))
        with FlopCounterMode(display=False) as counter:
            peak = probe.train_peak(smallest).total
        # Loops are not timed, so that only their memory has to be alike.
        return peak, 0 if isinstance(task, LoopTask) else int(counter.get_total_flops())

    base = cost(request.setup.parameters)
    changes = []
    for name, value, parameters in request.others:
        other = cost(parameters)
        factor = max(
            (b / a for a, b in zip(base, other, strict=True) if a and b),
            key=lambda ratio: abs(math.log(ratio)),
            default=1,
        )
        if abs(math.log(factor)) > math.log(_COST_FACTOR):
            changes.append((name, value, factor))
    return replace(profile, other_costs=tuple(changes))
