"""A recipe's batch on other devices: the same steps in other micro-batches, or the nearest batch where there are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...search.analysis.retime import KnownDevice, read_profile
from ...search.report.frameworks.settings import nearest_even_plan
from ...spaces.errors import Fault, InfeasiblePlanError, StudyFileError
from ...spaces.laws.device import DeviceProfile
from ...spaces.learning_rate import OptimizerSettings, scaled_settings
from ...spaces.plan import BatchPlan, plan_batch
from ...spaces.planning import best_plan
from ...spaces.readable import readable_bytes
from ..exporters.libraries import AXOLOTL
from .memory import Memory, Target, memory_on, optimizer_of, parameters_of
from .recipe import Recipe


@dataclass(frozen=True, slots=True)
class Nearest:
    """A batch near the recipe's, with the rate and decay of rules: (by the square root, if unchanged, by linear scaling).

    Args:
        steps: of `max_steps`, and of `warmup_steps`, where the recipe has them.
    """

    plan: BatchPlan
    rates: tuple[float, float, float]
    decays: tuple[float, float, float] | None
    steps: tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Ported:
    """A recipe on other devices.

    Args:
        before: its own devices, micro-batch and accumulation.
        plan: even micro-batches of the same batch; None: there are none, and `nearest` is written.
        memory: or why it is not known.
        differs: how steps differ from the recipe's beyond rounding; none: they are identical.
        warned: what else has to be looked at.
        step_s: a step's time, from a profile.
    """

    recipe: Recipe
    target: Target
    before: BatchPlan
    plan: BatchPlan | None
    nearest: Nearest | None
    memory: Memory | str
    differs: tuple[str, ...]
    warned: tuple[str, ...]
    step_s: float | None = None

    @property
    def written(self) -> BatchPlan:
        """The plan that is written."""
        if self.plan is not None:
            return self.plan
        assert self.nearest is not None
        return self.nearest.plan

    @property
    def changes(self) -> dict[str, Any]:
        """Settings of the recipe that change, by its own names."""
        recipe, plan = self.recipe, self.written
        changes: dict[str, Any] = {recipe.key("micro_batch"): plan.largest_micro_batch}
        if recipe.has("total_batch"):
            changes[recipe.key("total_batch")] = plan.largest_micro_batch * plan.accumulation
        if not recipe.has("total_batch") or recipe.has("accumulation"):  # else it follows from that
            changes[recipe.key("accumulation")] = plan.accumulation
        if isinstance(self.memory, Memory) and self.memory.checkpointing == "full" and not recipe.get("checkpointing"):
            changes |= recipe.library.written({"checkpointing": True})
        if self.plan is None and self.nearest is not None:
            if recipe.has("rate"):
                changes[recipe.key("rate")] = float(f"{self.nearest.rates[0]:.6g}")
            if self.nearest.decays is not None:
                changes[recipe.key("decay")] = float(f"{self.nearest.decays[0]:.6g}")
            for meaning, value in zip(("steps", "warmup_steps"), self.nearest.steps, strict=True):
                if value is not None:
                    changes[recipe.key(meaning)] = value  # type: ignore[arg-type]
        missing = {recipe.key("accumulation"): 1}  # what libraries take where nothing is written
        return {key: value for key, value in changes.items() if str(recipe.settings.get(key, missing.get(key))) != str(value)}


def port(recipe: Recipe, target: Target, devices: int | None, model: str | None, profile: Path | None) -> Ported:
    """A recipe on other devices.

    Args:
        devices: of the recipe, where it does not tell them itself.
        model: a folder or a name on the hub, instead of the recipe's.
        profile: of these rows on the target, from `bsearch profile --out`.

    Raises:
        StudyFileError: the recipe's batch is not known, or not even one row fits.
    """
    before = _batch_of(recipe, devices)
    share = -(-before.effective_batch // target.devices)
    memory = memory_on(recipe, target, model, share)
    cap = memory.largest if isinstance(memory, Memory) else before.largest_micro_batch
    if cap is None:
        assert isinstance(memory, Memory)
        least = memory.points[0][1]
        raise StudyFileError(
            Fault(
                "--onto",
                f"expected devices that hold one row, which takes {readable_bytes(least)} with activations recomputed; got "
                f"{target.name}, of which {readable_bytes(memory.limit_bytes)} can be used. Shorten {recipe.key('length')}, or "
                "train adapters.",
            )
        )
    plan = _even(before.effective_batch, target.devices, cap)
    near = None if plan is not None and _is_cheap(plan, cap) else _nearest(recipe, before.effective_batch, target.devices, cap)
    if plan is None and near is None:
        raise StudyFileError(
            Fault(
                "--onto",
                f"expected at most as many devices as the batch has rows, {before.effective_batch}; got {target.devices}",
            )
        )
    written = plan or (near.plan if near else before)
    step_s = None
    if profile is not None:
        own, _ = parameters_of(recipe, str(model or recipe.get("model")))
        step_s = _step_s(read_profile(profile), written, own)
    differs, warned = tuple(_differences(recipe, before, written)), tuple(_warnings(recipe, before, written))
    if devices is None and recipe.devices is None:
        warned = ("the recipe does not state its number of devices: 1 is assumed (set it with --written-for N)", *warned)
    return Ported(recipe, target, before, plan, near, memory, differs, warned, step_s)


def _step_s(device: KnownDevice, plan: BatchPlan, parameters: Mapping[str, Any]) -> float:
    """The time of a plan's step by a profile, with as little activation checkpointing as fits.

    Raises:
        StudyFileError: the device was timed with another number of devices, or not one combination has these parameters.
        InfeasiblePlanError: the micro-batch does not fit.
    """
    chosen = [
        profile for key, profile in device.profiles if all(parameters.get(name, value) == value for name, value in key.items())
    ]
    if len(chosen) != 1:
        there = "; ".join(" ".join(f"{name}={value}" for name, value in key.items()) for key, _ in device.profiles)
        raise StudyFileError(f"the profile of {device.name}: expected one combination of the recipe's parameters, got {there}")
    (profile,) = chosen

    def plan_of(variant: DeviceProfile) -> BatchPlan:
        return plan_batch(
            plan.effective_batch,
            devices=plan.devices,
            accumulation=plan.accumulation,
            largest_micro_batch=variant.cap_on(plan.devices, 0.0, plan.effective_batch),
            activation_checkpointing=variant.activation_checkpointing,
        )

    used = best_plan(profile, plan_of)
    law = profile.under(used).step_time(plan.devices)
    if law is None:
        there = ", ".join(str(step_time.devices) for step_time in profile.step_times)
        raise StudyFileError(f"devices {plan.devices}: expected a number that the profile was timed on: {there}")
    return law.step_s(used)


def _batch_of(recipe: Recipe, devices: int | None) -> BatchPlan:
    if devices is not None and recipe.devices not in (None, devices):
        raise StudyFileError(Fault("--written-for", f"expected the recipe's own {recipe.devices} devices, got {devices}"))
    count = devices or recipe.devices or 1
    micro_batch = recipe.count("micro_batch", 1)
    total = recipe.count("total_batch", 0)
    accumulation = recipe.count("accumulation", max(total // micro_batch, 1))
    return BatchPlan(count * micro_batch * accumulation, accumulation, count)


def _even(batch: int, devices: int, cap: int) -> BatchPlan | None:
    """The batch in as few equal micro-batches as fit; None: the devices' shares are not equal."""
    if batch % devices:
        return None
    share = batch // devices
    largest = next(size for size in range(min(cap, share), 0, -1) if share % size == 0)
    return BatchPlan(batch, share // largest, devices)


def _is_cheap(plan: BatchPlan, cap: int) -> bool:
    """Whether equal micro-batches are at most twice as many as uneven ones would be."""
    share = plan.effective_batch // plan.devices
    return plan.accumulation <= 2 * -(-share // cap)


def _nearest(recipe: Recipe, batch: int, devices: int, cap: int) -> Nearest | None:
    try:
        even = nearest_even_plan(plan_batch(batch, devices=devices, largest_micro_batch=cap), cap)
    except InfeasiblePlanError:  # fewer samples than devices
        return None
    near = BatchPlan(even.effective_batch, even.accumulation, devices)
    rate = recipe.number("rate") or 0.0
    middle = "linear" if optimizer_of(recipe) == "sgd" else "sqrt"
    rates = [_scaled(rule, rate, batch, near.effective_batch) for rule in (middle, "constant", "linear")]
    decay = recipe.number("decay")
    # Decay keeps the time over which it acts, in samples: rate x decay / batch stays (Wang and Aitchison 2024, rule adamw_tau).
    grown = near.effective_batch / batch
    decays = [decay * grown * rate / scaled for scaled in rates] if decay and rate and optimizer_of(recipe) == "adamw" else None
    counts = (recipe.number("steps"), recipe.number("warmup_steps"))
    steps = [None if not count or count < 1 else max(round(count / grown), 1) for count in counts]
    return Nearest(near, tuple(rates), tuple(decays) if decays else None, tuple(steps))  # type: ignore[arg-type]


def _scaled(rule: str, rate: float, before: int, after: int) -> float:
    settings = OptimizerSettings(rate)
    return scaled_settings(rule, settings, reference_batch=before, effective_batch=after).learning_rate


# ---------------------------------------------------------------- what differs


def _differences(recipe: Recipe, before: BatchPlan, after: BatchPlan) -> Iterator[str]:
    settings = recipe.settings
    if after.effective_batch != before.effective_batch:
        yield f"the batch is {after.effective_batch} instead of {before.effective_batch} rows"
    cut = (before.devices * before.accumulation, before.largest_micro_batch) != (
        after.devices * after.accumulation,
        after.largest_micro_batch,
    )
    if not recipe.library.whole_mean and cut:
        yield (
            f"{recipe.library.title} averages the means of micro-batches and devices, not over all tokens of a step, so other "
            "micro-batches weight tokens differently"
        )
    elif _is_off(settings.get("average_tokens_across_devices")) and before.devices != after.devices:
        yield "average_tokens_across_devices: false averages the means of devices, of which there are others"
    if recipe.library is AXOLOTL and recipe.get("packing") and cut:
        yield "sample_packing with flash attention packs micro_batch_size x sequence_len tokens at a time, so rows differ"
    groups = str(settings.get("group_by_length")).lower() == "true" or "group_by_length" in settings.values()
    if groups and before.devices != after.devices:
        yield "group_by_length depends on the batch per device, so steps have other samples"
    random = [key for key in ("lora_dropout", "neftune_noise_alpha") if _positive(settings.get(key))]
    if random and cut:
        yield f"{' and '.join(random)} draws random numbers that depend on the micro-batches"
    if str(settings.get("auto_find_batch_size")).lower() == "true":
        yield "auto_find_batch_size: true halves the micro-batch where memory runs out, and with it the batch: write false"


def _warnings(recipe: Recipe, before: BatchPlan, after: BatchPlan) -> Iterator[str]:
    settings = recipe.settings
    if before.devices != after.devices:
        yield ("if an epoch is not a multiple of the batch, its last step differs: several devices repeat samples to fill it")
    if str(settings.get("deepspeed") or ""):
        yield f"deepspeed: {settings['deepspeed']} must leave batch sizes to be set (auto)"
    if settings.get("dataloader_drop_last") and before.devices != after.devices:
        yield "dataloader_drop_last leaves out what does not fill a micro-batch, which is another number of samples now"


def _positive(value: Any) -> bool:
    try:
        return float(value) > 0
    except (TypeError, ValueError):
        return False


def _is_off(value: Any) -> bool:
    return str(value).lower() == "false"
