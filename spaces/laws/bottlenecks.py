"""What limits a training's speed, by its own measurements: its loader, the fixed cost of a pass, evaluation, or memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from .device import DeviceProfile
from .step_time import StepTime

# Shares from which what takes them is what limits: waiting in a step, evaluation in a trial.
_MOST, _EVALUATION = 0.5, 1 / 3
# Passes that take at most so many times as long as the smallest have a fixed cost; told where sizes differ by so much at least.
_FIXED, _SIZES = 1.5, 4


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """One thing that limits speed.

    Args:
        by: `loader`: steps wait for samples most of their time; `launch`: passes take as long with fewer samples, since their
            fixed cost is most of it; `evaluation`: it takes most of a trial; `memory`: no larger micro-batch fits.
        low, high: the batches of which that holds (`launch`, `memory`: micro-batches); None: no bound.
        share: of a step, or of a trial, that it takes; None where that says nothing.
    """

    by: Literal["loader", "launch", "evaluation", "memory"]
    low: int | None = None
    high: int | None = None
    share: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "text": str(self)}

    def __str__(self) -> str:
        match self.by:
            case "loader":
                begin = "" if self.low is None else f" from batch {self.low} on"
                return f"loader-bound{begin}: steps spend at least {self.share:.0%} of their time waiting for samples"
            case "launch":
                longest = f"at most {_FIXED:g} times as long as the smallest one"
                return f"launch-bound up to micro-batch {self.high}: a pass over that many samples takes {longest}"
            case "evaluation":
                return (
                    f"evaluation-bound: evaluating takes {self.share:.0%} of a trial's time: fewer `training.evaluations` or "
                    "less validation data would leave more for training"
                )
        return f"memory-bound: micro-batches of more than {self.high} samples do not fit"


def bottlenecks(profile: DeviceProfile, highest: int, evaluation: float) -> Iterator[Bottleneck]:
    """What limits a task on a device, as far as its steps were timed.

    Args:
        highest: the largest batch that is searched.
        evaluation: the share of a trial's time that is evaluation.
    """
    law = next(iter(profile.step_times), None)
    if law is not None:
        yield from _loader(law)
        yield from _launch(law)
    if evaluation > _EVALUATION:
        yield Bottleneck("evaluation", share=evaluation)
    cap, devices = profile.largest_micro_batch, 1 if law is None else law.devices
    if cap is not None and cap * devices < highest:
        yield Bottleneck("memory", high=cap)


def _loader(law: StepTime) -> Iterator[Bottleneck]:
    """Batches whose steps wait most of their time for samples, up to the largest."""
    timed = sorted((one.plan.effective_batch, one.input_s, one.step_s) for one in law.timed)
    # Above 0 where most of a step is waiting; between the timed sizes both are taken to be linear.
    over = [(batch, input_s - _MOST * step_s) for batch, input_s, step_s in timed]
    if not over or over[-1][1] < 0:
        return
    last = max((place for place, (_, much) in enumerate(over) if much < 0), default=None)
    if last is None:
        yield Bottleneck("loader", share=min(input_s / step_s for _, input_s, step_s in timed))
        return
    (low, less), (high, more) = over[last], over[last + 1]
    yield Bottleneck("loader", low=math.ceil(low + (high - low) * less / (less - more)), share=_MOST)


def _launch(law: StepTime) -> Iterator[Bottleneck]:
    """Micro-batches whose passes are mostly a fixed cost."""
    size, smallest_s = law.points[0]
    high = size
    for (low, low_s), (next_size, next_s) in pairwise(law.points):
        if next_s > _FIXED * smallest_s:
            high = round(low + (next_size - low) * (_FIXED * smallest_s - low_s) / (next_s - low_s))
            break
        high = next_size
    if high >= _SIZES * size:
        yield Bottleneck("launch", high=high)
