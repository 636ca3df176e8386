"""A forecast of a study's duration and of its front's span, from a few timed steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from ...spaces.deadline import moment_of
from ...spaces.domain import Choices, Fixed, bounds, values_of
from ...spaces.errors import InfeasiblePlanError
from ...spaces.laws.bottlenecks import Bottleneck, bottlenecks
from ...spaces.laws.device import DeviceProfile
from ...spaces.planning import CostKey, micro_batch_cap, plan_limits, planned
from ...spaces.readable import UNLIMITED
from ...spaces.study.spec import StudySpec
from ..run.decisions.eta import ClockFactors


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One effective batch of the space with its plan and times."""

    effective_batch: int
    devices: int
    accumulation: int
    micro_batch: int
    activation_checkpointing: str
    step_s: float
    epoch_s: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What `bsearch check` reports; times in seconds, without evaluation unless noted.

    Args:
        study_s: of all trials with their evaluations, over those that run side by side; with the overhead around them where
            an earlier study shows it.
        trials: to train.
        overhead_s: around a trial's training, in that study: its start, evaluations, checkpoints; None where there was none.
        slowdown: time of training by the clock over known time, in that study.
        span: slowest over fastest.
        limits: what limits the speed of its trainings.
        cost: of the trials by the study's prices; None where this device has none.
        left_s: until its deadline; None where it has none.
    """

    plans: tuple[PlannedBatch, ...]
    fastest_trial_s: float
    slowest_trial_s: float
    study_s: float
    trials: int
    span: float
    advice: tuple[str, ...]
    limits: tuple[Bottleneck, ...] = ()
    overhead_s: float | None = None
    slowdown: float | None = None
    cost: float | None = None
    left_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sample_batches(spec: StudySpec, count: int = 5) -> list[int]:
    """A few effective batches spread over the space on a logarithmic scale, both ends among them."""
    domain = spec.space.effective_batch
    if isinstance(domain, Fixed | Choices):
        return sorted({int(value) for value in values_of(domain)})
    low, high = bounds(domain)
    return sorted({round(low * (high / low) ** (part / (count - 1))) for part in range(count)})


def planned_batches(spec: StudySpec, profile: DeviceProfile, devices: int) -> list[PlannedBatch]:
    """A few effective batches with their plans and times on this number of devices; those without either are left out."""
    assert profile.training_set is not None
    requested = None if spec.space.accumulation is None else int(bounds(spec.space.accumulation)[0])
    batches = []
    for batch in sample_batches(spec):
        try:
            plan = planned(spec, profile, batch, devices, requested)
        except InfeasiblePlanError:
            continue
        variant = profile.under(plan)
        law = variant.step_time(devices)
        if law is None:
            continue
        batches.append(
            PlannedBatch(
                effective_batch=batch,
                devices=devices,
                accumulation=plan.accumulation,
                micro_batch=plan.largest_micro_batch,
                activation_checkpointing=plan.activation_checkpointing,
                step_s=law.step_s(plan),
                epoch_s=law.train_s(plan, profile.training_set, **plan_limits(spec, variant, devices, batch)),
            )
        )
    return batches


def _seconds_of(spec: StudySpec, profile: DeviceProfile, plan: PlannedBatch) -> float:
    """Seconds of one epoch, sample, unit, step or second, whichever says how long trainings are."""
    match spec.space.length:
        case "epochs":
            return plan.epoch_s
        case "train_s":
            return 1.0
        case "steps":
            return plan.step_s
    per_sample = plan.step_s / plan.effective_batch
    return per_sample / (profile.units_per_sample or 1.0) if spec.space.length == "tokens" else per_sample


def time_left_s(spec: StudySpec) -> float | None:
    """Seconds until a study's deadline if it began now; None where it has none.

    Raises:
        StudyFileError: it has passed.
    """
    if spec.budget.by is None:
        return None
    now = datetime.now().astimezone()
    return (moment_of(spec.budget.by, now) - now).total_seconds()


def forecast(
    spec: StudySpec,
    profiles: Mapping[CostKey, DeviceProfile],
    slots: int,
    factors: ClockFactors | None = None,
) -> Forecast:
    """Time the corners of the space and the whole study by its profiles' step-time laws; plans are of the first profile.

    Args:
        factors: of an earlier study; None where there was none.
    """
    each = [
        [plan for law in profile.step_times for plan in planned_batches(spec, profile, law.devices)]
        for profile in profiles.values()
    ]
    plans, profile = each[0], next(iter(profiles.values()))
    shortest, longest = bounds(spec.space.domains()[spec.space.length])
    one = [_seconds_of(spec, profile, plan) for some in each for plan in some]
    fastest, slowest = min(one) * shortest, max(one) * longest
    evaluation_s = (
        spec.training.evaluations
        * (profile.validation_set or 0)
        * (profile.step_times[0].evaluate_sample_s or 0.0)
    )
    # Searched on log scales, so the geometric mean is the middle one.
    middle = math.exp(sum(map(math.log, one)) / len(one)) * math.sqrt(shortest * longest)
    trial_s = middle + evaluation_s if factors is None else middle * factors.slowdown + factors.overhead_s
    left_s, budget = time_left_s(spec), spec.budget
    price, counts = spec.devices.price_of(profile.device, profile.kind), spec.devices.counts
    devices = math.sqrt(counts[0] * counts[-1])
    hourly = (price or 0.0) * devices * slots
    limits_s = [left_s, (budget.hours or 0.0) * 3600, (budget.cost or 0.0) * 3600 / (hourly or 1.0)]
    trials = int(min(budget.trials, min(filter(None, limits_s), default=math.inf) * slots / trial_s))
    study_s = trials * trial_s / slots if left_s is None else left_s
    cost = None if price is None else trials * trial_s * devices * price / 3600
    return Forecast(
        plans=tuple(plans),
        fastest_trial_s=fastest,
        slowest_trial_s=slowest,
        study_s=study_s,
        trials=trials,
        span=slowest / fastest,
        advice=tuple(_advice(spec, profile, slowest / fastest, trials)),
        limits=tuple(
            bottlenecks(
                profile, int(bounds(spec.space.effective_batch)[1]), evaluation_s / (evaluation_s + middle)
            )
        ),
        overhead_s=None if factors is None else factors.overhead_s,
        slowdown=None if factors is None else factors.slowdown,
        cost=cost,
        left_s=left_s,
    )


def _advice(
    spec: StudySpec,
    profile: DeviceProfile,
    span: float,
    trials: int,
) -> list[str]:
    advice = []
    if trials < spec.budget.trials != UNLIMITED:
        advice.append(
            f"the time or cost under `budget:` will end the study before its {spec.budget.trials} trials"
        )
    if span < 2.5 and spec.space.length == "epochs" and isinstance(spec.space.epochs, Fixed):
        advice.append(
            f"training times differ by only a factor of {span:.1f}: search `epochs` as well, such as {{low: 2, high: 20}}"
        )
    if profile.validates_on_training:
        advice.append(
            "the validation data are the training data, so the front will show what trials memorise: hold samples out"
        )
    if not spec.baseline:
        advice.append(
            "add your current settings under `baseline:`, and the result will compare the front with them"
        )
    searched = len(spec.searched())
    if trials < 5 * searched:
        advice.append(
            f"{trials} trials are few for {searched} searched parameters; aim for about {10 * searched}"
        )
    if profile.batch_statistics and (
        spec.space.accumulation is not None
        or any(micro_batch_cap(spec, profile, devices, None) for devices in spec.devices.counts)
    ):
        advice.append(
            "the model has BatchNorm, which sees the micro-batch and not the whole batch: accumulation changes what is learned"
        )
    return advice
