"""What a worker is asked to measure before the first trial, and what makes a study impossible with its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from .domain import applying, bounds, values_of
from .errors import Fault
from .laws.device import DeviceProfile, ProfileRequest
from .learning_rate import RULES_FOR_ADAM, RULES_FOR_DECAY, OptimizerSettings, with_beta2_half_life
from .plan import BatchPlan
from .planning import CostKey, first_values, training_of
from .study.spec import StudySpec
from .study.training import BETAS
from .trial import TrialSetup

# Seconds that a generator trains for in its first measurement.
_NO_TIME_S = 1e-3


def profiling_setup(spec: StudySpec, device: Literal["cpu", "gpu"], key: CostKey = ()) -> TrialSetup:
    """A setup from the first value of every domain, for profiling the training code."""
    first = first_values(spec) | dict(key)
    own = spec.space.task_parameters()
    parameters = {name: value for name, value in applying(own, first).items() if name in own}
    training = training_of(spec, first)
    betas = training.betas
    # As after the rule: shows whether the optimizer gets them.
    if spec.keeps_beta2_half_life or "adam_sde" in values_of(spec.space.rule):
        betas = with_beta2_half_life(OptimizerSettings(0.0, betas), 2.0).betas
    reference = OptimizerSettings(float(first["reference_rate"]), betas, training.eps, first["weight_decay"])
    return TrialSetup(
        study=spec.study,
        number=0,
        attempt=0,
        plan=BatchPlan(int(bounds(spec.space.effective_batch)[0])),
        optimizer=reference,
        samples_budget=1,
        training=training,
        epochs=first.get("epochs", 1.0),
        train_s=None if spec.space.train_s is None else _NO_TIME_S,
        metric=spec.objectives.metric.name,
        device=device,
        cpus=spec.devices.cores(device),
        sharding=spec.devices.sharding,
        folder=str(spec.folder),
        parameters=parameters,
    )


def profile_request(
    spec: StudySpec, device: Literal["cpu", "gpu"], key: CostKey = (), *, traces: bool = False
) -> ProfileRequest:
    """What to measure about a study's task on a device."""
    setup = profiling_setup(spec, device, key)
    # Values without changes_cost: the laws of one of them have to hold for all.
    own = spec.space.task_parameters()
    first = {name: next(values_of(domain)) for name, domain in own.items()} | dict(setup.parameters)
    others = [
        (name, value, applying(own, {**first, name: value}))
        for name, domain in own.items()
        if not getattr(domain, "changes_cost", False)
        for value in dict.fromkeys(values_of(domain))
        if value != setup.parameters.get(name)
    ]
    # One that does not apply there is among the parameters of a value with which it does.
    others = [(name, value, parameters) for name, value, parameters in others if name in parameters]
    return ProfileRequest(
        setup=setup,
        memory=spec.memory,
        highest=int(bounds(spec.space.effective_batch)[1]),
        traces=traces,
        devices=spec.devices.counts,
        share=spec.devices.share,
        timing_s=float(spec.budget.profile_s),
        others=tuple(others) if spec.budget.profile_s else (),
    )


def profile_faults(
    spec: StudySpec, profile: DeviceProfile, feasible: tuple[int, int] | None = None
) -> list[Fault]:
    """Settings of the study that its task, data or memory do not allow."""
    parts = (_batches, _length, _examined, _split, _optimizer, _cost)
    return [fault for part in parts for fault in part(spec, profile, feasible)]


Feasible = tuple[int, int] | None


def _batches(spec: StudySpec, profile: DeviceProfile, feasible: Feasible) -> Iterator[Fault]:
    for index, settings in enumerate(spec.baseline):
        batch = settings.get("effective_batch")
        if feasible is not None and isinstance(batch, int) and not feasible[0] <= batch <= feasible[1]:
            message = f"expected a feasible batch, from {feasible[0]} to {feasible[1]}; got {batch}"
            if not any(variant.splits for variant in profile.each):
                message += " (a batch is never split, since the loss compares its samples)"
            yield Fault(f"baseline.{index}.effective_batch", message)
    largest = bounds(spec.space.effective_batch)[1]
    if profile.training_set is None:
        message = "expected the size of the training set, which a loop of your own does not report; got none"
        yield Fault("training.samples", message)
    elif largest > profile.training_set:
        message = f"expected at most the training set's {profile.training_set} samples, got {largest:g}."
        yield Fault("space.effective_batch", f"{message} Write high: {profile.training_set} or less.")


def _length(spec: StudySpec, profile: DeviceProfile, feasible: Feasible) -> Iterator[Fault]:
    """How long trainings are, where their samples or seconds do not follow from it."""
    if spec.space.tokens is not None and profile.units_per_sample is None:
        message = "expected data that say how many each sample has (Data(lengths=...)), got none. Write samples instead."
        yield Fault("space.tokens", message)
    timed = spec.budget.profile_s and profile.step_times
    if spec.space.train_s is not None and not timed and profile.optimizer is not None:
        message = (
            "expected budget.profile_s above 0, since known step times decide how many samples that is; got"
        )
        yield Fault("space.train_s", f"{message} {spec.budget.profile_s:g}.")


def _examined(spec: StudySpec, profile: DeviceProfile, feasible: Feasible) -> Iterator[Fault]:
    if profile.examination is not None and not spec.training.accept_inexact:
        yield from (Fault("", line) for line in profile.examination.refusal_lines)


def _split(spec: StudySpec, profile: DeviceProfile, feasible: Feasible) -> Iterator[Fault]:
    """What a batch that is never split does not allow."""
    if any(variant.splits for variant in profile.each):
        return
    message = (
        "expected 1, because the loss compares the samples of a batch, which is then never split; got {}."
    )
    if profile.embedding:
        message = (
            "expected 1, because whole batches fit in memory, and splitting them takes a second forward pass; got {}. To "
            "split them, set memory.limit or memory.largest_micro_batch."
        )
    if max(spec.devices.counts) > 1 and profile.couples_samples:
        yield Fault("devices.per_trial", message.format(max(spec.devices.counts)))
    if spec.space.accumulation is not None and bounds(spec.space.accumulation)[1] > 1:
        yield Fault("space.accumulation", message.format(f"up to {bounds(spec.space.accumulation)[1]:g}"))


def _optimizer(spec: StudySpec, profile: DeviceProfile, feasible: Feasible) -> Iterator[Fault]:
    """What the task's optimizer, or the device, does not do."""
    optimizer, rules = profile.optimizer, list(values_of(spec.space.rule))
    if spec.training.sync_batch_norm and profile.kind == "cpu":
        message = "expected GPUs, since torch's SyncBatchNorm does not support CPUs; got cpu. Write false."
        yield Fault("training.sync_batch_norm", message)
    if (scaled := [rule for rule in rules if rule in RULES_FOR_ADAM]) and not profile.adaptive:
        message = f"expected a rule for {optimizer}, which has no betas of Adam's kind; got {scaled[0]!r}, which scales them."
        yield Fault("space.rule", f"{message} Use linear or sqrt, or an Adam optimizer.")
    if (scaled := [rule for rule in rules if rule in RULES_FOR_DECAY]) and not profile.decoupled_decay:
        message = f"expected a rule for {optimizer}, whose weight decay is part of the gradient; got {scaled[0]!r}, which"
        yield Fault("space.rule", f"{message} scales decoupled weight decay. Use sqrt, or AdamW.")
    if "weight_decay" in spec.space.model_fields_set and not profile.applies_decay:
        message = f"expected a task whose {optimizer} applies it, got one that does not. Write"
        instead = "weight_decay=setup.weight_decay in the task's optimizer, or remove the key."
        yield Fault("space.weight_decay", f"{message} {instead}")
    wanted = [f"space.{name}" for name in BETAS if getattr(spec.space, name) is not None]
    wanted += ["training.beta2_scaling"] if spec.keeps_beta2_half_life else []
    wanted += ["space.rule"] if "adam_sde" in rules else []
    if wanted and not (profile.applies_betas and profile.adaptive):
        message = f"expected a task whose {optimizer} gets betas=setup.betas, got one that does not. Pass"
        yield Fault(wanted[0], f"{message} betas=setup.betas to the optimizer, or remove the key.")


def _cost(spec: StudySpec, profile: DeviceProfile, feasible: Feasible) -> Iterator[Fault]:
    """Parameters that change cost unsaid, or that the task does not read."""
    for name, value, factor in profile.other_costs:
        message = f"expected changes_cost: true, since at {value} a step's bytes or operations are {factor:.3g} times those at"
        yield Fault(
            f"space.{name}",
            f"{message} the first value. Write {{choices: [...], changes_cost: true}} to time each value separately, or "
            "budget: {profile_s: 0} to use measured wall-clock times.",
        )
    for name in profile.unused_parameters:
        yield Fault(f"space.{name}", "expected a parameter that the task reads, got one that it never read")
