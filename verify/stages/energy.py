"""The stage about energy: the power of sizes between those that a profile measures, and of longer training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice

from ...objectives.machine.energy import EnergyCounter
from ...objectives.profiling.power import PowerReading, with_power
from ...objectives.profiling.step_time import fitted, timed_rounds
from ...spaces.errors import ProfilingError
from ...spaces.laws.step_time import timing_plans
from ...spaces.plan import BatchPlan
from ..claims import Fact, worst
from ..stage import Found, Stage
from .speed import our_loop
from .tasks import IMAGES, setup_of, small_model, task_of

_HIGHEST = 512
# Sizes that no profile measures, one of them with accumulation; seconds of training with each, and rounds.
_UNSEEN, _TRAINED_S, _ROUNDS = (BatchPlan(11), BatchPlan(90), BatchPlan(400, 2)), 2.0, 2


def known_power(stage: Stage) -> Iterator[Found]:
    """Power by the profile against power while training for longer, and what a device draws in all."""
    try:
        counter = EnergyCounter(stage.device)
    except ProfilingError as error:
        yield Fact("counter of energy", str(error))
        return
    name, parameters = small_model(stage.device)
    setup = replace(setup_of(BatchPlan(2), stage.device, parameters), smallest_micro_batch=2)
    plans = timing_plans(2, _HIGHEST)
    with closing(timed_rounds(IMAGES, setup, plans)) as rounds:  # type: ignore[type-var]  # a generator
        law = fitted(list(islice(rounds, 4)), plans)
    law = with_power(IMAGES, setup, law)
    assert law.power is not None
    (least, low), (most, high) = law.power[0], law.power[-1]
    yield Fact(f"power of {name}", f"{low:.3g} W with micro-batches of {least} to {high:.3g} W with {most}")
    errors, spreads = [], [law.power_spread or 0.0]
    for plan in _UNSEEN:
        steps, read = our_loop(task_of(IMAGES), plan, stage.device, parameters), []
        steps(5)
        for _ in range(_ROUNDS):
            with PowerReading(counter) as power:
                ends = time.monotonic() + _TRAINED_S
                while time.monotonic() < ends:
                    steps(10)
            read.append(power.watts)
        middle, known = sum(read) / len(read), law.watts(plan)
        assert known is not None
        errors.append((f"{plan.effective_batch} in {plan.accumulation}", abs(known / middle - 1)))
        spreads.append((max(read) - min(read)) / (2 * middle))
    for claim in worst(f"largest error of predicted power, sizes between the measured: {name}", 0.1, errors):
        yield replace(claim, uncertainty=sum(spreads) / len(spreads))
