"""The step-time law: seconds of an optimizer step under any plan.

    step_s(plan) = Σ micro_batch_s(m) + update_s, over the plan's micro-batches m

`micro_batch_s`, the time of one forward and backward pass, is known at the micro-batches that were timed and linear between
them. It falls only where the timings leave no doubt. A law holds for one number of devices; their communication is part of
`update_s`. Beyond the largest size timed it is undefined. Where micro-batches are run twice (gradient caching), `micro_batch_s`
is of both passes, and a step also takes `pair_s` for each pair of its samples, which the loss compares.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any

from ..errors import ProfilingError
from ..plan import ActivationCheckpointing, BatchPlan, Embedding, step_plans
from .memory import check_points

# The relative interval at which timing stops.
PRECISION = 0.02
# Micro-batches of the largest timed step where embeddings are cached: it tells what the loss of a large batch takes.
_MOST_CACHED = 8
# Accumulation beyond this was never faster.
_MOST_MICRO_BATCHES = 64


# Of several timings of one thing: below it, timings are of chance; above it, of neighbours.
LOW_QUANTILE = 0.25


def low_quantile(values: Sequence[float]) -> float:
    """The quantile of timings that stands for the time alone.

    >>> low_quantile([2.0, 1.0, 9.0, 3.0, 4.0])
    2.0
    """
    ordered = sorted(values)
    place = LOW_QUANTILE * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True)
class TimedPlan:
    """Seconds of one optimizer step under a plan, one value per round of timing.

    `input_s` is the part of a step spent waiting for samples.
    """

    plan: BatchPlan
    rounds: tuple[float, ...]
    input_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The time alone: a low quantile, since neighbours and interruptions only ever add to it."""
        return low_quantile(self.rounds)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds to sum gradients over a trial's machines, with nothing else going on.

    In a step, a part of it overlaps with the last backward pass.

    Args:
        machines: their number.
        gradient_bytes: what is summed.
        all_s: over all ranks.
        within_s: over the ranks of one machine.
    """

    machines: int
    gradient_bytes: int
    all_s: float
    within_s: float

    @property
    def between_s(self) -> float:
        """What the network between the machines adds."""
        return max(self.all_s - self.within_s, 0.0)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of an optimizer step on `devices` devices.

    Args:
        points: (micro-batch, seconds of a forward and backward pass), sizes ascending.
        update_s: seconds of a step besides its micro-batches: optimizer, and communication between devices.
        evaluate_sample_s: seconds of evaluating one sample, if timed; not part of a step.
        interval: relative half width of the predictions' 95 % interval, the widest of the timed plans, with `others` and
            `stolen`; None after too few rounds.
        others: share of the machine's cores that other programs used while steps were timed on a CPU.
        stolen: share of the core time of its programs that the virtual machine's host gave to others meanwhile.
        held_back: share of a step's time in which the processor limit of its control groups keeps it waiting.
        misfit: relative error of the law on a timed plan left out of its fit, median and worst.
        timed: what it was fitted to.
        activation_checkpointing, embedding: of the plans that it holds for.
        pair_s: seconds for each pair of a step's samples.
        exchange: how much of it is due to the network, where the devices are on several machines.

    >>> round(StepTime(((1, 0.011), (101, 0.111)), update_s=0.005).step_s(BatchPlan(100, accumulation=2)), 6)
    0.125
    """

    points: tuple[tuple[int, float], ...]
    update_s: float
    devices: int = 1
    evaluate_sample_s: float | None = None
    interval: float | None = None
    misfit: tuple[float, float] | None = None
    others: float = 0.0
    stolen: float = 0.0
    held_back: float = 0.0
    timed: tuple[TimedPlan, ...] = ()
    activation_checkpointing: ActivationCheckpointing = "none"
    embedding: Embedding = ""
    pair_s: float = 0.0
    exchange: Exchange | None = None

    def __post_init__(self) -> None:
        check_points("step time", self.points)
        if not 0 <= self.update_s < math.inf or self.devices < 1:
            raise ProfilingError(
                f"step time: expected seconds >= 0 on at least one device, got {self.update_s} on {self.devices}"
            )

    @property
    def largest_micro_batch(self) -> int:
        """The largest micro-batch that was timed."""
        return self.points[-1][0]

    def step_s(self, plan: BatchPlan) -> float:
        """Seconds of one step.

        Raises:
            ProfilingError: another number of devices, or a micro-batch larger than any timed.
        """
        if plan.devices != self.devices:
            raise ProfilingError(f"step time: expected a plan on {self.devices} devices, got {plan.devices}")
        if plan.activation_checkpointing != self.activation_checkpointing:
            raise ProfilingError(
                f"step time: expected a plan with {self.activation_checkpointing} activation checkpointing, got "
                f"{plan.activation_checkpointing}"
            )
        if plan.largest_micro_batch > self.largest_micro_batch:
            raise ProfilingError(
                f"micro-batch {plan.largest_micro_batch}: step time is known only up to {self.largest_micro_batch} samples"
            )
        return self.seconds_of(plan)

    def train_s(self, plan: BatchPlan, samples_budget: int, **limits: Any) -> float:
        """Seconds of a full training: steps times seconds per step, with the last step at its actual size.

        Args:
            limits: of the trial's plans, as in `spaces.plan.step_plans`.

        >>> StepTime(((1, 1.0), (100, 1.0)), update_s=0.0).train_s(BatchPlan(100, accumulation=2), 1050)
        21.0
        """
        first_s = self.step_s(plan)  # refuses what it does not know
        runs = step_plans(plan, samples_budget, **limits)
        return sum(run.count * (first_s if run.plan == plan else self.seconds_of(run.plan)) for run in runs)

    def micro_batch_s(self, micro_batch: int) -> float:
        """Seconds of one forward and backward pass."""
        # Only the last step's remainder can lie beyond the ends.
        place = min(max(bisect_left(self.points, micro_batch, key=itemgetter(0)), 1), len(self.points) - 1)
        if place < 1:
            return self.points[0][1]
        (low, low_s), (high, high_s) = self.points[place - 1], self.points[place]
        return low_s + (high_s - low_s) * (micro_batch - low) / (high - low)

    def seconds_of(self, plan: BatchPlan) -> float:
        """The same without a check of what it holds for."""
        # The first device's are of two sizes at most; samplers ask for this ten thousand times.
        size, larger = divmod(plan.shares[0], plan.accumulation)
        smaller_s = (plan.accumulation - larger) * self.micro_batch_s(size) if size else 0.0
        of_step_s = self.update_s + self.pair_s * plan.effective_batch**2
        return smaller_s + (larger * self.micro_batch_s(size + 1) if larger else 0.0) + of_step_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def doubt(law: StepTime) -> float:
    """The share of a step's time that another plan must save to be preferred; less may be noise or interpolation error."""
    return max(0.03, 2 * (law.interval or 0.0), 2 * (law.misfit[0] if law.misfit else 0.0))


def fastest_plan(plan: BatchPlan, law: StepTime, *, smallest_micro_batch: int) -> BatchPlan:
    """The accumulation, from the plan's own up, with the shortest known step time.

    More micro-batches than needed must save 3 % of the time, and twice the law's interval and misfit.

    >>> law = StepTime(((1, 0.002), (64, 0.065), (256, 2.0)), update_s=0.0, interval=0.01)
    >>> fastest_plan(BatchPlan(256), law, smallest_micro_batch=1).accumulation
    4
    """
    if law.interval is None:
        return plan
    best, best_s = plan, law.step_s(plan) * (1 - doubt(law))
    for accumulation in range(
        plan.accumulation + 1, min(_MOST_MICRO_BATCHES, plan.shares[-1] // smallest_micro_batch) + 1
    ):
        other = replace(plan, accumulation=accumulation)
        if (other_s := law.step_s(other)) < best_s * (1 - 1e-9):
            best, best_s = other, other_s
    return best


def timing_plans(
    smallest: int,
    highest: int,
    *,
    devices: int = 1,
    dense: bool = False,
    activation_checkpointing: ActivationCheckpointing = "none",
    embedding: Embedding = "",
    largest_batch: int | None = None,
) -> list[BatchPlan]:
    """Plans that determine the whole law: micro-batches spread over the range, some of them accumulated.

    Args:
        dense: 9 sizes instead of 6: a GPU's time has corners, where it begins to be busy.
        embedding: "whole": none is accumulated; "cached": all of them are, two at least.
        largest_batch: of the cached ones, beside those of two micro-batches.

    >>> [(plan.effective_batch, plan.accumulation) for plan in timing_plans(1, 256)]
    [(1, 1), (3, 1), (9, 1), (28, 1), (84, 1), (256, 1), (6, 2), (27, 3), (168, 2)]
    """
    gaps = 8 if dense else 5
    sizes = sorted({round(smallest * (highest / smallest) ** (part / gaps)) for part in range(gaps + 1)})
    plans = [BatchPlan(size * devices, 1, devices, activation_checkpointing) for size in sizes]
    if embedding == "whole":
        return plans
    inner = [size for size in sizes if size < highest] or [max(highest // 2, smallest)]
    several = [(inner[len(inner) // 4], 2), (inner[len(inner) // 2], 3), (inner[-1], 2)]
    if embedding == "cached":
        plans = [replace(plan, effective_batch=2 * plan.effective_batch, accumulation=2) for plan in plans]
        most = max((largest_batch or _MOST_CACHED * sizes[-1] * devices) // (sizes[-1] * devices), 3)
        several = [
            (inner[len(inner) // 2], 3),
            (inner[-1], 4),
            (sizes[-1], min(most, _MOST_CACHED)),
            (sizes[0], 5),
        ]
    return plans + [
        BatchPlan(size * micro_batches * devices, micro_batches, devices, activation_checkpointing)
        for size, micro_batches in dict.fromkeys(several)
    ]


def refined_plans(plans: list[BatchPlan], size: int) -> list[BatchPlan]:
    """The plans, with one more size on either side of a timed one, halfway to its neighbours on a log scale.

    >>> [plan.effective_batch for plan in refined_plans([BatchPlan(8), BatchPlan(32), BatchPlan(128)], 32)]
    [8, 16, 32, 64, 128]
    """
    fewest = min(plan.accumulation for plan in plans)
    timed = sorted({plan.largest_micro_batch for plan in plans if plan.accumulation == fewest})
    place, first = timed.index(size), plans[0]
    around = {round(math.sqrt(size * other)) for other in timed[max(place - 1, 0) : place + 2]} - set(timed)
    added = [
        replace(first, effective_batch=between * fewest * first.devices, accumulation=fewest)
        for between in sorted(around)
    ]
    return sorted([*plans, *added], key=lambda plan: (plan.accumulation > fewest, plan.effective_batch))
