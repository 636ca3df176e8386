"""From a suggestion to a trial's setup: its plan, its optimizer settings, and which batches can be planned at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any, Literal

from .device import DeviceProfile, ProfileRequest
from .domain import Range, bounds, values_of
from .errors import Fault, InfeasiblePlanError, StudyFileError
from .learning_rate import RULES_FOR_ADAM, RULES_FOR_DECAY, OptimizerSettings, RuleConstants, scaled_settings
from .plan import BatchPlan, plan_batch, step_plans
from .readable import readable_bytes
from .step_time import fastest_plan
from .study import StudySpec
from .trial import Suggestion, TrialSetup

# Combinations of parameters that change cost; each is looked at on the device before the first trial.
MOST_PROFILES = 16


def trial_setup(
    spec: StudySpec, name: str, suggestion: Suggestion, profile: DeviceProfile, device: Literal["cpu", "gpu"]
) -> TrialSetup:
    """A suggestion as a plan, optimizer settings and a budget of samples.

    Raises:
        InfeasiblePlanError: no plan, or a rule that is undefined there.
    """
    values: dict[str, Any] = dict(suggestion.parameters)
    epochs, devices = values.pop("epochs"), int(values.pop("devices"))
    effective_batch, accumulation = int(values.pop("effective_batch")), values.pop("accumulation", None)
    limits = plan_limits(spec, profile, devices)
    plan = planned(spec, profile, effective_batch, devices, accumulation)
    samples_budget = _samples_budget(profile, epochs, effective_batch)
    step_plans(plan, samples_budget, **limits)
    rule, reference_rate = str(values["rule"]), float(values["reference_rate"])
    optimizer = optimizer_settings(spec, effective_batch, epochs, values)
    for name_of_rule in ("rule", "reference_rate", "weight_decay", "exponent", "noise_batch"):
        values.pop(name_of_rule, None)
    return TrialSetup(
        study=name,
        number=suggestion.number,
        attempt=0,
        plan=plan,
        optimizer=optimizer,
        samples_budget=samples_budget,
        training=spec.training.model_copy(update={"seed": suggestion.notes.get("seed", spec.training.seed)}),
        epochs=epochs,
        rule=rule,
        reference_rate=reference_rate,
        reference_batch=spec.space.reference_batch,
        metric=spec.objectives.metric.name,
        device=device,
        cpus=spec.devices.cpus,
        folder=str(spec.folder),
        parameters=values,
        evaluation_batch=profile.evaluation_batch,
        memory_limit_bytes=profile.limit_bytes,
        largest_micro_batch=limits["largest_micro_batch"],
        smallest_micro_batch=limits["smallest_micro_batch"],
    )


def _samples_budget(profile: DeviceProfile, epochs: float, effective_batch: int) -> int:
    """Samples of a training.

    Raises:
        InfeasiblePlanError: fewer than one step's.
    """
    assert profile.training_set is not None
    samples_budget = max(1, round(float(epochs) * profile.training_set))
    if effective_batch > samples_budget:
        raise InfeasiblePlanError(
            f"effective_batch {effective_batch}: expected at most the trial's {samples_budget} samples",
            violation=effective_batch / samples_budget - 1,
        )
    return samples_budget


def optimizer_settings(spec: StudySpec, effective_batch: int, epochs: float, values: Mapping[str, Any]) -> OptimizerSettings:
    """What the rule makes of the reference settings.

    Raises:
        InfeasiblePlanError: the rule is undefined there.
    """
    reference = OptimizerSettings(
        learning_rate=float(values["reference_rate"]),
        betas=spec.training.betas,
        eps=spec.training.eps,
        weight_decay=float(values["weight_decay"]),
    )
    return scaled_settings(
        str(values["rule"]),
        reference,
        reference_batch=spec.space.reference_batch,
        effective_batch=effective_batch,
        constants=RuleConstants.at(
            spec.space.reference_batch,
            values.get("exponent"),
            values.get("noise_batch"),
            samples_ratio=float(epochs) / bounds(spec.space.epochs)[1],
        ),
    )


def checkpoint_url(spec: StudySpec, name: str, task_hash: str, suggestion: Suggestion) -> str | None:
    """Where a trial's checkpoint lies; a trial that goes on for one that was cut off finds that one's."""
    if spec.cluster.checkpoints is None:
        return None
    began_as = suggestion.notes.get("began_as", suggestion.number)
    return f"{spec.cluster.checkpoints.rstrip('/')}/{name}/checkpoints/{began_as}-{task_hash[:8]}.pt"


def planned(
    spec: StudySpec, profile: DeviceProfile, effective_batch: int, devices: int, accumulation: int | None = None
) -> BatchPlan:
    """How a batch is trained on so many devices: as few passes as fit, or as many as are known to be faster.

    With batch statistics more passes would change what is learned, so there the fewest it is.

    Args:
        accumulation: wished passes, where the study searches them.

    Raises:
        InfeasiblePlanError: no plan.
    """
    domain = spec.space.accumulation
    plan = plan_batch(
        effective_batch,
        devices=devices,
        accumulation=accumulation,
        accumulation_high=None if domain is None else int(bounds(domain)[1]),
        **plan_limits(spec, profile, devices),
    )
    return plan if domain is not None else as_fast_as_known(plan, profile)


def as_fast_as_known(plan: BatchPlan, profile: DeviceProfile) -> BatchPlan:
    """The plan in as many passes as are known to be fastest, where passes change time alone."""
    law = profile.step_time(plan.devices)
    if law is None or profile.batch_statistics:
        return plan
    return fastest_plan(plan, law, smallest_micro_batch=profile.smallest_micro_batch)


def micro_batch_cap(spec: StudySpec, profile: DeviceProfile, devices: int = 1) -> int | None:
    """The most samples a pass may hold: the study's own word and the memory law's, whichever is less."""
    caps = (spec.memory.largest_micro_batch, profile.cap_on(devices, spec.memory.headroom))
    return min((cap for cap in caps if cap is not None), default=None)


def timed_cap(spec: StudySpec, profile: DeviceProfile, devices: int) -> int | None:
    """The same, and no more than was timed: what lies beyond has no known time."""
    law = profile.step_time(devices)
    caps = (micro_batch_cap(spec, profile, devices), None if law is None else law.largest_micro_batch)
    return min((cap for cap in caps if cap is not None), default=None)


def plan_limits(spec: StudySpec, profile: DeviceProfile, devices: int) -> dict[str, Any]:
    """What every plan on so many devices keeps to, as `plan_batch` takes it."""
    return {
        "largest_micro_batch": timed_cap(spec, profile, devices),
        "smallest_micro_batch": profile.smallest_micro_batch,
        "every_micro_batch": spec.training.sync_batch_norm,
    }


def known_train_s(profile: DeviceProfile, setup: TrialSetup) -> float | None:
    """Seconds that training will take, evaluation left out; None where steps were not timed."""
    law = profile.step_time(setup.plan.devices)
    return None if law is None else law.train_s(setup.plan, setup.samples_budget, **setup.limits)


def known_seconds(spec: StudySpec, profiles: Mapping[CostKey, DeviceProfile]) -> Callable[[Mapping[str, Any]], float] | None:
    """A study's seconds by its searched parameters, in its own objective; None where steps were not timed.

    NaN where no plan or no rule exists: that a sampler need not propose. Remembered by what the time hangs on, for samplers ask
    thousands of times.
    """
    if not all(profile.step_times for profile in profiles.values()):
        return None
    fixed, costly = spec.fixed(), _costly(spec)
    remembered: dict[Any, float] = {}

    @cache
    def plan(key: CostKey, effective_batch: int, devices: int, accumulation: int | None) -> BatchPlan:
        return planned(spec, profiles[key], effective_batch, devices, accumulation)

    def train_s(key: CostKey, values: Mapping[str, Any]) -> float:
        """As of the trial's setup, without the rest of it."""
        effective_batch, devices, epochs = int(values["effective_batch"]), int(values["devices"]), values["epochs"]
        law = profiles[key].step_time(devices)
        if law is None:
            return math.nan
        try:
            made = plan(key, effective_batch, devices, values.get("accumulation"))
            optimizer_settings(spec, effective_batch, epochs, values)
            samples_budget = _samples_budget(profiles[key], epochs, effective_batch)
            return law.train_s(made, samples_budget, **plan_limits(spec, profiles[key], devices))
        except InfeasiblePlanError:
            return math.nan

    def seconds(parameters: Mapping[str, Any]) -> float:
        values = {**fixed, **parameters}
        key = tuple((name, values[name]) for name in costly)
        about = (key, *map(values.get, ("effective_batch", "accumulation", "devices", "epochs", "rule")))
        if about not in remembered:
            many = values["devices"] if spec.objectives.speed == "device_s" else 1
            remembered[about] = train_s(key, values) * many
        return remembered[about]

    return seconds


# What of `training` no step's bytes or seconds hang on.
_NO_COST = {"schedule", "warmup", "evaluations", "seed", "betas", "eps"}


def training_cost(spec: StudySpec) -> dict[str, Any]:
    """What of a study's training a step's bytes and seconds hang on."""
    return spec.training.model_dump(mode="json", exclude=_NO_COST)


# The values of the parameters that change what a step costs; each combination has a profile of its own.
CostKey = tuple[tuple[str, Any], ...]


def cost_key(spec: StudySpec, parameters: Mapping[str, Any]) -> CostKey:
    return tuple((name, parameters[name]) for name in _costly(spec))


def _costly(spec: StudySpec) -> list[str]:
    return [name for name, domain in spec.space.domains().items() if getattr(domain, "changes_cost", False)]


def cost_keys(spec: StudySpec) -> list[CostKey]:
    """Every combination of the values that change cost.

    Raises:
        StudyFileError: one of them is a range, or there are too many to look at each.
    """
    domains = {name: domain for name, domain in spec.space.domains().items() if getattr(domain, "changes_cost", False)}
    ranges = [name for name, domain in domains.items() if isinstance(domain, Range)]
    keys = [tuple(zip(domains, values, strict=True)) for values in product(*(values_of(domain) for domain in domains.values()))]
    faults = [Fault(f"space.{name}", "expected choices where changes_cost is true, got a range") for name in ranges]
    if len(keys) > MOST_PROFILES:
        faults.append(
            Fault("space", f"expected at most {MOST_PROFILES} combinations of parameters that change cost, got {len(keys)}")
        )
    if faults:
        raise StudyFileError(faults)
    return keys


def legal_batches(spec: StudySpec, profiles: Iterable[DeviceProfile]) -> tuple[int, int]:
    """The effective batches that some profile has a plan for: smallest and largest of the searched range.

    Raises:
        StudyFileError: none of the searched range is legal.
    """
    low, high = (int(bound) for bound in bounds(spec.space.effective_batch))
    fewest, most = min(spec.devices.counts), max(spec.devices.counts)
    most_passes = None if spec.space.accumulation is None else int(bounds(spec.space.accumulation)[1])
    lows, highs = [], []
    for profile in profiles:
        lows.append(max(low, fewest * profile.smallest_micro_batch))
        reach = [high, profile.training_set or high]
        cap = timed_cap(spec, profile, most)
        if cap is not None and most_passes is not None:
            reach.append(cap * most_passes * most)
        highs.append(min(reach))
    legal = min(lows), max(highs)
    if legal[0] > legal[1]:
        raise StudyFileError(
            Fault(
                "space.effective_batch",
                f"expected batches that can be planned ({legal[0]} to {legal[1]} samples), but searched are {low} to {high}. "
                "Look at memory and at space.accumulation.",
            )
        )
    return legal


def common_batches(spec: StudySpec, kinds: Mapping[str, Mapping[CostKey, DeviceProfile]]) -> tuple[int, int]:
    """The effective batches that every kind of device has a plan for: any of them may get the next trial.

    Raises:
        StudyFileError: a kind can plan none of the searched range, or they have none in common.
    """
    ranges = {kind: legal_batches(spec, profiles.values()) for kind, profiles in kinds.items()}
    low, high = max(low for low, _ in ranges.values()), min(high for _, high in ranges.values())
    if low > high:
        each = "; ".join(f"{kind or 'others'}: {low} to {high}" for kind, (low, high) in ranges.items())
        raise StudyFileError(
            Fault(
                "space.effective_batch",
                f"expected batches that all kinds of devices can plan, got none ({each}). Name one with "
                "devices.accelerator_type.",
            )
        )
    return low, high


def profiling_setup(spec: StudySpec, device: Literal["cpu", "gpu"], key: CostKey = ()) -> TrialSetup:
    """A setup from the first value of every domain, to try the training code with before anything is known."""
    first = {name: next(iter(values_of(domain))) for name, domain in spec.space.domains().items()} | dict(key)
    parameters = {name: first[name] for name in spec.space.task_parameters()}
    reference = OptimizerSettings(float(first["reference_rate"]), spec.training.betas, spec.training.eps, first["weight_decay"])
    return TrialSetup(
        study=spec.study,
        number=0,
        attempt=0,
        plan=BatchPlan(1),
        optimizer=reference,
        samples_budget=1,
        training=spec.training,
        epochs=first["epochs"],
        metric=spec.objectives.metric.name,
        device=device,
        cpus=spec.devices.cpus,
        folder=str(spec.folder),
        parameters=parameters,
    )


def profile_request(
    spec: StudySpec, device: Literal["cpu", "gpu"], key: CostKey = (), *, traces: bool = False
) -> ProfileRequest:
    """What to ask a device about a study's task."""
    setup = profiling_setup(spec, device, key)
    # Values that are not said to change what a step costs: a law for one of them is to hold for all.
    others = [
        (name, value)
        for name, domain in spec.space.task_parameters().items()
        if not getattr(domain, "changes_cost", False)
        for value in dict.fromkeys(values_of(domain))
        if value != setup.parameters[name]
    ]
    return ProfileRequest(
        setup=setup,
        memory=spec.memory,
        highest=int(bounds(spec.space.effective_batch)[1]),
        traces=traces,
        devices=spec.devices.counts,
        timing_s=float(spec.budget.profile_s),
        others=tuple(others) if spec.budget.profile_s else (),
    )


def profile_faults(spec: StudySpec, profile: DeviceProfile, legal: tuple[int, int] | None = None) -> list[Fault]:
    """What the study asks for that its task, its data or its memory cannot give."""
    faults = []
    for index, settings in enumerate(spec.baseline):
        batch = settings.get("effective_batch")
        if legal is not None and isinstance(batch, int) and not legal[0] <= batch <= legal[1]:
            message = f"expected a batch that can be planned, from {legal[0]} to {legal[1]}, got {batch}"
            faults.append(Fault(f"baseline.{index}.effective_batch", message))
    if profile.training_set is None:
        faults.append(
            Fault(
                "training.samples", "expected the size of the training set, since a bare generator does not tell it; got none"
            )
        )
    else:
        _, largest = bounds(spec.space.effective_batch)
        if largest > profile.training_set:
            faults.append(
                Fault(
                    "space.effective_batch",
                    f"expected at most the training set's {profile.training_set} samples, got {largest:g}. "
                    f"Write high: {profile.training_set} or less.",
                )
            )
    if spec.training.sync_batch_norm and profile.kind == "cpu":
        faults.append(Fault("training.sync_batch_norm", "expected GPUs: torch's SyncBatchNorm knows no CPU. Write false."))
    adam_rules = [rule for rule in values_of(spec.space.rule) if rule in RULES_FOR_ADAM]
    if adam_rules and not profile.adaptive:
        faults.append(
            Fault(
                "space.rule",
                f"expected a rule for {profile.optimizer}, which has no betas; got {adam_rules[0]!r}, which scales them. "
                "Use linear or sqrt, or an Adam optimizer.",
            )
        )
    decay_rules = [rule for rule in values_of(spec.space.rule) if rule in RULES_FOR_DECAY]
    if decay_rules and not (profile.adaptive and profile.decoupled_decay):
        faults.append(
            Fault(
                "space.rule",
                f"expected a rule for {profile.optimizer}, whose weight decay is part of the gradient; got {decay_rules[0]!r}, "
                "which scales a decay apart from it. Use sqrt, or AdamW.",
            )
        )
    for name, value, factor in profile.other_costs:
        faults.append(
            Fault(
                f"space.{name}",
                f"expected changes_cost: true, since at {value} a step's bytes or operations are {factor:.3g} times those at "
                f"the first value. Write {{choices: [...], changes_cost: true}}, and each value gets step times of its own; or "
                "budget: {profile_s: 0}, and trials are timed by the clock.",
            )
        )
    for name in profile.unused_parameters:
        faults.append(Fault(f"space.{name}", "expected a parameter that the task reads; it never asked for this one"))
    return faults


def legal_batches_sentence(spec: StudySpec, legal: tuple[int, int], profiles: Iterable[DeviceProfile]) -> str:
    """What may be tried, in a line."""
    caps = sorted({cap for profile in profiles if (cap := micro_batch_cap(spec, profile)) is not None})
    limits = sorted({profile.limit_bytes for profile in profiles if profile.limit_bytes is not None})
    words = f"legal batches: {legal[0]} to {legal[1]}"
    if caps:
        words += f", in passes of at most {' or '.join(map(str, caps))} samples"
    if limits:
        words += f" ({readable_bytes(limits[0])} per device, {spec.memory.headroom:.0%} kept free)"
    return words


def step_time_summary(spec: StudySpec, profiles: Iterable[DeviceProfile]) -> Iterator[str]:
    """How well training times are known, a line for each number of devices."""
    profiles = list(profiles)
    laws = [law for profile in profiles for law in profile.step_times]
    if not laws:
        yield "train_s is the clock's: steps were not timed beforehand"
    for devices in sorted({law.devices for law in laws}):
        these = [law for law in laws if law.devices == devices]
        intervals, misfits = [law.interval for law in these], [law.misfit[0] for law in these if law.misfit]
        known = [interval for interval in intervals if interval is not None]
        words = f" to ±{max(known):.1%}" if len(known) == len(intervals) else " roughly: there was time for a few looks only"
        if misfits:
            words += f" (plans between the timed ones: {max(misfits):.1%})"
        yield f"train_s is known beforehand on {devices} device{'s' * (devices > 1)}{words}"
        caps = [micro_batch_cap(spec, profile, devices) for profile in profiles]
        largest = -(-int(bounds(spec.space.effective_batch)[1]) // devices)
        for law, cap in zip(these, caps, strict=False):
            if law.largest_micro_batch < min(largest, cap or largest):
                yield f"passes of more than {law.largest_micro_batch} samples were not timed, so none is planned"
