"""From a suggestion to a trial's setup: its plan and optimizer settings, and which batches are feasible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import product
from typing import Any, Literal

from .boundary.files import file_name
from .domain import bounds, every_value_of, values_of
from .errors import Fault, InfeasiblePlanError, StudyFileError
from .laws.device import DeviceProfile
from .laws.step_time import StepTime, doubt, fastest_plan
from .learning_rate import (
    RULES_FOR_ADAM,
    OptimizerSettings,
    RuleConstants,
    scaled_settings,
    with_beta2_half_life,
)
from .plan import BatchPlan, accumulation_limits, plan_batch, step_plans
from .record import taken_per_second
from .study.spec import StudySpec
from .study.training import BETAS, RECIPE, Training
from .trial import UNTIMED_SAMPLES, Suggestion, TrialSetup


def trial_setup(
    spec: StudySpec, name: str, suggestion: Suggestion, profile: DeviceProfile, device: Literal["cpu", "gpu"]
) -> TrialSetup:
    """The setup of a trial: plan, optimizer settings and samples budget.

    Raises:
        InfeasiblePlanError: no feasible plan, or the rule is undefined for this batch.
    """
    values: dict[str, Any] = dict(suggestion.parameters)
    devices = int(values.pop("devices"))
    effective_batch, accumulation = int(values.pop("effective_batch")), values.pop("accumulation", None)
    plan = planned(spec, profile, effective_batch, devices, accumulation)
    limits = plan_limits(spec, profile.under(plan), devices, effective_batch)
    length = values.pop(spec.space.length)
    samples_budget = _samples_budget(spec, profile, length, plan)
    assert profile.training_set is not None
    epochs = length if spec.space.length == "epochs" else samples_budget / profile.training_set
    training = training_of(spec, values, seed=suggestion.notes.get("seed", spec.training.seed))
    step_plans(plan, samples_budget, **limits)  # refuses a remainder without a plan
    rule, reference_rate = str(values["rule"]), float(values["reference_rate"])
    optimizer = optimizer_settings(spec, effective_batch, epochs, values)
    for own in ("rule", "reference_rate", "weight_decay", "exponent", "noise_batch", *RECIPE):
        values.pop(own, None)
    return TrialSetup(
        study=name,
        number=suggestion.number,
        attempt=0,
        plan=plan,
        optimizer=optimizer,
        samples_budget=samples_budget,
        training=training,
        epochs=epochs,
        train_s=float(length) if spec.space.length == "train_s" else None,
        rule=rule,
        reference_rate=reference_rate,
        reference_batch=spec.space.reference_batch,
        metric=spec.objectives.metric.name,
        device=device,
        cpus=spec.devices.cores(device),
        sharding=spec.devices.sharding,
        folder=str(spec.folder),
        parameters=values,
        evaluation_batch=profile.evaluation_batch,
        memory_limit_bytes=profile.limit_bytes,
        largest_micro_batch=limits["largest_micro_batch"],
        smallest_micro_batch=limits["smallest_micro_batch"],
        couples_samples=profile.couples_samples,
        embedding=profile.under(plan).embedding,
    )


def training_of(spec: StudySpec, values: Mapping[str, Any], **changes: Any) -> Training:
    """The study's `training` section with those of a trial's parameters that belong there."""
    changes |= {name: values[name] for name in RECIPE if name in values}
    betas = tuple(
        float(changes.pop(name, beta)) for name, beta in zip(BETAS, spec.training.betas, strict=True)
    )
    return spec.training.model_copy(update={**changes, "betas": betas})


def _samples_budget(spec: StudySpec, profile: DeviceProfile, length: float, plan: BatchPlan) -> int:
    """Samples that a training sees.

    Raises:
        InfeasiblePlanError: less than one step.
    """
    samples_budget = max(1, _samples(spec.space.length, profile, length, plan))
    effective_batch = plan.effective_batch
    if effective_batch > samples_budget:
        raise InfeasiblePlanError(
            f"effective_batch {effective_batch}: expected at most the trial's {samples_budget} samples",
            violation=effective_batch / samples_budget - 1,
        )
    return samples_budget


def _samples(name: str, profile: DeviceProfile, length: float, plan: BatchPlan) -> int:
    """A length of training in samples: of seconds, those of the whole steps that are known to fit."""
    match name:
        case "epochs":
            assert profile.training_set is not None
            return round(float(length) * profile.training_set)
        case "samples":
            return int(length)
        case "tokens":
            assert profile.units_per_sample is not None
            return round(length / profile.units_per_sample)
        case "steps":
            return int(length) * plan.effective_batch
    law = profile.under(plan).step_time(plan.devices)
    return (
        UNTIMED_SAMPLES if law is None else int(length / law.step_s(plan) * (1 + 1e-9)) * plan.effective_batch
    )


def optimizer_settings(
    spec: StudySpec, effective_batch: int, epochs: float, values: Mapping[str, Any]
) -> OptimizerSettings:
    """The reference settings scaled by the rule.

    Raises:
        InfeasiblePlanError: the rule is undefined for this batch.
    """
    training = training_of(spec, values)
    reference = OptimizerSettings(
        learning_rate=float(values["reference_rate"]),
        betas=training.betas,
        eps=spec.training.eps,
        weight_decay=float(values["weight_decay"]),
    )
    settings = scaled_settings(
        str(values["rule"]),
        reference,
        reference_batch=spec.space.reference_batch,
        effective_batch=effective_batch,
        constants=RuleConstants.at(
            spec.space.reference_batch,
            values.get("exponent"),
            values.get("noise_batch"),
            samples_ratio=float(epochs) / longest_epochs(spec),
        ),
    )
    if training.beta2_scaling == "half_life":
        return with_beta2_half_life(settings, effective_batch / spec.space.reference_batch)
    return settings


def longest_epochs(spec: StudySpec) -> float:
    """Epochs of the study's longest training, to which some rules relate the others; 1 where something else is its length."""
    return 1.0 if spec.space.epochs is None else bounds(spec.space.epochs)[1]


def checkpoint_url(spec: StudySpec, name: str, task_hash: str, suggestion: Suggestion) -> str | None:
    """URL of a trial's checkpoint, which all attempts at it share."""
    if spec.cluster.checkpoints is None:
        return None
    return f"{spec.cluster.checkpoints.rstrip('/')}/{file_name(name)}/checkpoints/{suggestion.number}-{task_hash[:8]}.pt"


def planned(
    spec: StudySpec,
    profile: DeviceProfile,
    effective_batch: int,
    devices: int,
    accumulation: int | None = None,
) -> BatchPlan:
    """The plan of a batch: the least activation checkpointing and the lowest accumulation that fit, or more of either where
    that is known to be faster.

    With batch statistics a higher accumulation would change the training, so the lowest is used.

    Args:
        accumulation: requested micro-batches per step, if the study searches accumulation.

    Raises:
        InfeasiblePlanError: no feasible plan.
    """
    best: BatchPlan | None = None
    error: InfeasiblePlanError | None = None
    for variant in profile.each:
        try:
            plan = _planned(spec, variant, effective_batch, devices, accumulation)
        except InfeasiblePlanError as infeasible:
            if error is None or infeasible.violation < error.violation:
                error = infeasible
            continue
        if best is None or _faster(profile, plan, best):
            best = plan
    if best is None:
        assert error is not None
        raise error
    return best


def _faster(profile: DeviceProfile, plan: BatchPlan, than: BatchPlan) -> bool:
    """Whether a plan is known to be faster than another, beyond doubt."""
    laws = [profile.under(compared).step_time(compared.devices) for compared in (plan, than)]
    if laws[0] is None or laws[1] is None or any(law.interval is None for law in laws if law):
        return False
    return laws[0].step_s(plan) < laws[1].step_s(than) * (1 - max(map(doubt, laws)))  # type: ignore[arg-type]


def _planned(
    spec: StudySpec, profile: DeviceProfile, effective_batch: int, devices: int, accumulation: int | None
) -> BatchPlan:
    """The plan with what the profile's own laws hold for."""
    domain = spec.space.accumulation
    limits = plan_limits(spec, profile, devices, effective_batch)
    if profile.embedding == "cached":
        most = largest_batch(spec, profile, devices)
        if most is not None and effective_batch > most:
            raise InfeasiblePlanError(
                f"effective_batch {effective_batch}: expected at most {most} samples, whose embeddings and loss fit in memory",
                violation=effective_batch / most - 1,
            )
    plan = plan_batch(
        effective_batch,
        devices=devices,
        accumulation=accumulation,
        **limits | {"accumulation_high": _most_micro_batches(spec, profile)},
    )
    return plan if domain is not None or not profile.splits else with_fastest_accumulation(plan, profile)


def _most_micro_batches(spec: StudySpec, profile: DeviceProfile) -> int | None:
    """The most micro-batches that a step may have: one where the loss compares its samples."""
    if not profile.splits:
        return 1
    return None if spec.space.accumulation is None else int(bounds(spec.space.accumulation)[1])


def with_fastest_accumulation(plan: BatchPlan, profile: DeviceProfile) -> BatchPlan:
    """The plan with the accumulation known to be fastest, unless batch statistics depend on it."""
    law = profile.step_time(plan.devices)
    if law is None or profile.batch_statistics:
        return plan
    return fastest_plan(plan, law, smallest_micro_batch=profile.smallest_micro_batch)


def micro_batch_cap(
    spec: StudySpec, profile: DeviceProfile, devices: int, effective_batch: int | None
) -> int | None:
    """The largest micro-batch allowed by the study's setting and by the memory law; see `DeviceProfile.cap_on`."""
    caps = (spec.memory.largest_micro_batch, profile.cap_on(devices, effective_batch))
    return min((cap for cap in caps if cap is not None), default=None)


def largest_timed_micro_batch(
    spec: StudySpec, profile: DeviceProfile, devices: int, effective_batch: int | None
) -> int | None:
    """The largest micro-batch allowed that is also within the timed sizes, beyond which step time is unknown."""
    law = profile.step_time(devices)
    caps = (
        micro_batch_cap(spec, profile, devices, effective_batch),
        None if law is None else law.largest_micro_batch,
    )
    return min((cap for cap in caps if cap is not None), default=None)


def largest_batch(spec: StudySpec, profile: DeviceProfile, devices: int) -> int | None:
    """The most samples of a step by memory alone; None: no limit."""
    cap = largest_timed_micro_batch(spec, profile, devices, None)
    if not profile.splits:
        return None if cap is None else cap * devices
    law = profile.memory
    if law is None or not law.held_bytes:
        return profile.largest_batch
    spare = profile.usable_bytes(devices) - law.peak_bytes(profile.smallest_micro_batch)
    by_embeddings = math.inf if math.isinf(spare) else int(spare / law.held_bytes)
    most = min(by_embeddings, profile.largest_batch or math.inf)
    return None if math.isinf(most) else int(most)


def plan_limits(
    spec: StudySpec, profile: DeviceProfile, devices: int, effective_batch: int | None
) -> dict[str, Any]:
    """Limits of every plan on this number of devices with what the profile's own laws hold for, as keyword arguments of
    `plan_batch`.
    """
    return {
        "largest_micro_batch": largest_timed_micro_batch(spec, profile, devices, effective_batch),
        "smallest_micro_batch": profile.smallest_micro_batch,
        "every_micro_batch": spec.training.sync_batch_norm,
        "activation_checkpointing": profile.activation_checkpointing,
        **accumulation_limits(profile.embedding, couples_samples=profile.couples_samples),
    }


def known_train_s(profile: DeviceProfile, setup: TrialSetup) -> float | None:
    """Predicted seconds of training, without evaluation; None if steps were not timed."""
    law = profile.under(setup.plan).step_time(setup.plan.devices)
    return None if law is None else law.train_s(setup.plan, setup.samples_budget, **setup.limits)


def known_taken(
    spec: StudySpec, profiles: Mapping[CostKey, DeviceProfile], price: float | None
) -> Callable[[Mapping[str, Any]], float] | None:
    """What training takes by the study's measure of speed, as a function of the searched parameters; None if it is not known.

    That is where steps were not timed. Values are NaN where no plan exists or the rule is undefined, so that samplers skip the
    point. They are cached, because samplers ask for thousands.

    Args:
        price: of such a device for an hour, which a cost is made of.
    """
    if not all(profile.step_times for profile in profiles.values()):
        return None
    fixed, costly = spec.fixed(), _costly(spec)
    length = spec.space.length
    depends_on = ["effective_batch", "accumulation", "devices", length]
    # No other rule is undefined for a batch.
    if may_be_undefined := not RULES_FOR_ADAM.isdisjoint(values_of(spec.space.rule)):
        depends_on += ["rule", *BETAS]
    names = (*costly, *depends_on)
    defaults = [fixed.get(name) for name in names]
    cached: dict[Any, float] = {}

    @cache
    def plan(
        key: CostKey, effective_batch: int, devices: int, accumulation: int | None
    ) -> tuple[BatchPlan, DeviceProfile, StepTime | None, dict[str, Any]]:
        batch_plan = planned(spec, profiles[key], effective_batch, devices, accumulation)
        profile = profiles[key].under(batch_plan)
        return (
            batch_plan,
            profile,
            profile.step_time(devices),
            plan_limits(spec, profile, devices, effective_batch),
        )

    def seconds(key: CostKey, values: Mapping[str, Any]) -> float:
        """The same as from the trial's setup, without building one."""
        effective_batch, devices = int(values["effective_batch"]), int(values["devices"])
        try:
            batch_plan, profile, law, limits = plan(key, effective_batch, devices, values.get("accumulation"))
            if may_be_undefined:
                optimizer_settings(spec, effective_batch, values.get("epochs", 1.0), values)
            samples_budget = _samples_budget(spec, profile, values[length], batch_plan)
            if law is None or length == "train_s":
                return math.nan if law is None else float(values[length])
            return law.train_s(batch_plan, samples_budget, **limits)
        except InfeasiblePlanError:
            return math.nan

    def taken(parameters: Mapping[str, Any]) -> float:
        relevant = tuple(map(parameters.get, names, defaults))
        if relevant not in cached:
            values = {**fixed, **parameters}
            key = tuple((name, values[name]) for name in costly)
            per_second = taken_per_second(spec.objectives.speed, int(values["devices"]), price)
            cached[relevant] = math.nan if per_second is None else seconds(key, values) * per_second
        return cached[relevant]

    return taken


# Keys of `training` that affect neither the memory nor the time of a step.
_NO_COST = {
    "schedule",
    "warmup",
    "beta2_scaling",
    "evaluations",
    "seed",
    "betas",
    "eps",
    "accept_inexact",
}


def training_cost(spec: StudySpec) -> dict[str, Any]:
    """The keys of a study's `training` that affect the memory or the time of a step."""
    costly = _costly(spec)  # these are in a profile's own parameters
    cost = training_of(spec, first_values(spec)).model_dump(mode="json", exclude=_NO_COST)
    return {name: value for name, value in cost.items() if name not in costly}


# Values of the cost-changing parameters; each combination has its own profile.
CostKey = tuple[tuple[str, Any], ...]


def cost_key(spec: StudySpec, parameters: Mapping[str, Any]) -> CostKey:
    return tuple((name, parameters[name]) for name in _costly(spec))


def _costly(spec: StudySpec) -> list[str]:
    return [name for name, domain in spec.space.domains().items() if getattr(domain, "changes_cost", False)]


def cost_keys(spec: StudySpec) -> list[CostKey]:
    """Every combination of cost-changing values."""
    domains = {name: spec.space.domains()[name] for name in _costly(spec)}
    return [
        tuple(zip(domains, each, strict=True)) for each in product(*map(every_value_of, domains.values()))
    ]


def feasible_batches(spec: StudySpec, profiles: Iterable[DeviceProfile]) -> tuple[int, int]:
    """The smallest and largest effective batch in the searched range that some profile can plan.

    Raises:
        StudyFileError: no batch in the searched range is feasible.
    """
    low, high = (int(bound) for bound in bounds(spec.space.effective_batch))
    fewest, most = min(spec.devices.counts), max(spec.devices.counts)
    lows, highs = [], []
    profiles = list(profiles)
    for profile in profiles:
        lows.append(max(low, fewest * profile.smallest_micro_batch))
        planned_most = max(_largest_planned(spec, variant, most) for variant in profile.each)
        highs.append(int(min(high, profile.training_set or high, planned_most)))
    feasible = min(lows), max(highs)
    if feasible[0] > feasible[1]:
        raise StudyFileError(
            Fault(
                "space.effective_batch",
                f"expected a feasible batch, of at least {feasible[0]} and at most {feasible[1]} samples; got {low} to {high}. "
                + (
                    "The loss compares samples, so a batch is never split, and has to fit memory as one micro-batch. Raise "
                    "memory.limit."
                    if any(profile.couples_samples for profile in profiles)
                    else "Check memory and space.accumulation."
                ),
            )
        )
    return feasible


def _largest_planned(spec: StudySpec, profile: DeviceProfile, devices: int) -> float:
    """The largest batch that has a plan by the profile's own laws, infinite where nothing limits it."""
    most = largest_batch(spec, profile, devices)
    cap = largest_timed_micro_batch(spec, profile, devices, None)
    micro_batches = _most_micro_batches(spec, profile)
    by_accumulation = math.inf if cap is None or micro_batches is None else cap * micro_batches * devices
    return min(math.inf if most is None else most, by_accumulation)


def common_batches(spec: StudySpec, kinds: Mapping[str, Mapping[CostKey, DeviceProfile]]) -> tuple[int, int]:
    """The effective batches that every kind of device can plan, since a trial may run on any of them.

    Raises:
        StudyFileError: no batch in the searched range is feasible on one kind, or on all of them.
    """
    ranges = {kind: feasible_batches(spec, profiles.values()) for kind, profiles in kinds.items()}
    low, high = max(low for low, _ in ranges.values()), min(high for _, high in ranges.values())
    if low > high:
        each = "; ".join(f"{kind or 'others'}: {low} to {high}" for kind, (low, high) in ranges.items())
        raise StudyFileError(
            Fault(
                "space.effective_batch",
                f"expected batches that are feasible on all kinds of devices, got none ({each}). Select one kind with "
                "devices.accelerator_type.",
            )
        )
    return low, high


def first_values(spec: StudySpec) -> dict[str, Any]:
    """The first value of every domain; of betas an unusual one, which shows whether the optimizer gets them."""
    first = {name: next(iter(values_of(domain))) for name, domain in spec.space.domains().items()}
    for name, usual in zip(BETAS, spec.training.betas, strict=True):
        if name in first:
            first[name] = next(
                (value for value in values_of(spec.space.domains()[name]) if value != usual), first[name]
            )
    return first
