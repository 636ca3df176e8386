"""What a recipe's step takes of other devices' memory: traced with a model of its configuration, without weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from ....spaces.errors import Fault, ProfilingError, StudyFileError, TaskError
from ....spaces.laws.cards import Card, card_named
from ....spaces.laws.memory import bytes_of
from ....spaces.learning_rate import OptimizerSettings
from ....spaces.plan import BatchPlan
from ....spaces.study.training import Training
from ....spaces.trial import TrialSetup
from .recipe import Recipe

# Bytes of a weight of 4 bits, with the scales of its block and theirs (Dettmers et al. 2023, arXiv 2305.14314), and of 8.
BYTES = {4: 0.52, 8: 1.0}

_HEADROOM = 0.05  # of the memory, as `memory.headroom` has it by default
# By the names of all three libraries; others are traced as AdamW.
_OPTIMIZERS = {"adafactor": "adafactor", "sgd": "sgd", "muon": "muon"}
Checkpointing = Literal["none", "full"]


@dataclass(frozen=True, slots=True)
class Target:
    """Devices that are all alike.

    Args:
        usable_bytes: that a training process can allocate on each.
    """

    devices: int
    name: str
    usable_bytes: int


def target_of(text: str) -> Target:
    """Devices as `--to` has them.

    Raises:
        StudyFileError: it cannot be read, or there is no such card.

    >>> target_of("2x 24GiB").devices, target_of("RTX 4090 24GB").devices
    (2, 1)
    """
    found = re.fullmatch(r"\s*(?:(\d{1,5})\s*[x×]\s+|(\d{1,5})\s*[x×])?(.+?)\s*", text)
    devices = int((found and (found[1] or found[2])) or 1)
    what = found[3] if found else text
    try:
        card = Card(what, bytes_of(what), 0)
    except ValueError:
        try:
            card = card_named(what)
        except StudyFileError as error:
            told = str(error).partition("expected ")[2]
            raise StudyFileError(Fault("--onto", f"expected devices such as '1x 24GiB', or {told}")) from None
    if devices < 1 or card.usable_bytes <= 0:
        raise StudyFileError(Fault("--onto", f"expected at least one device, with more than 500 MiB, got {text!r}"))
    return Target(devices, card.name, card.usable_bytes)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a device of the target holds, traced.

    Args:
        points: bytes by micro-batch, as traced, in this mode of activation checkpointing.
        limit_bytes: that a plan may reach.
        assumed: what the recipe does not say, and what was not traced, as sentences.
    """

    checkpointing: Checkpointing
    points: tuple[tuple[int, float], ...]
    limit_bytes: float
    largest: int | None
    assumed: tuple[str, ...] = ()


def checkpoints(recipe: Recipe) -> bool:
    """Whether the recipe recomputes activations; LLaMA-Factory does unless told otherwise."""
    if "no_checkpointing" in recipe.form.keys:
        return not recipe.is_on("no_checkpointing")
    return recipe.is_on("checkpointing")


def memory_on(recipe: Recipe, target: Target, model: str | None, share: int) -> Memory | str:
    """What fits on a device, or why that is not known."""
    from ....objectives.language.imagined import Imagined, saved_bytes
    from ....objectives.profiling.memory.tracing import MemoryProbe, memory_law

    named = model or recipe.get("model")
    if named is None:
        return f"{recipe.path.name} names no model: --model NAME says which it is"
    if recipe.get("length") is None:
        return f"{recipe.path.name} does not say how long a row is ({recipe.key('length')})"
    parameters, assumed = parameters_of(recipe, str(named))
    precision: Any = "bf16" if recipe.is_on("bf16") or recipe.is_on("pure_bf16") else "fp16" if recipe.is_on("fp16") else "fp32"
    setup = TrialSetup(
        study="port",
        number=0,
        attempt=0,
        plan=BatchPlan(1),
        optimizer=OptimizerSettings(1e-4),
        samples_budget=1,
        # As many bytes, and here autocast on a CPU knows no fp16.
        training=Training(precision="bf16" if precision == "fp16" else precision, schedule="constant", warmup=0),
        epochs=1,
        rule="constant",
        reference_batch=1,
        parameters=parameters,
        device="cpu",
        folder=str(recipe.path.resolve().parent),
    )
    limit = target.usable_bytes * (1 - _HEADROOM)
    modes: tuple[Checkpointing, ...] = ("full",) if checkpoints(recipe) else ("none", "full")
    found: Memory | None = None
    try:
        for mode in modes:
            probe = MemoryProbe(Imagined(), replace(setup, plan=BatchPlan(1, activation_checkpointing=mode)), like_gpu=True)
            saved, more = saved_bytes(probe.run.model, BYTES.get(_bits(recipe))), 0
            if target.devices > 1:  # a second copy of the gradients, in buckets
                more = sum(
                    parameter.numel() * parameter.element_size()
                    for parameter in probe.run.model.parameters()
                    if parameter.requires_grad
                )
            room = limit + saved - more
            probe.cap_bytes = target.usable_bytes + saved - more
            law = memory_law(probe, room, 1, share)
            if law is None or probe.note:
                return f"the model cannot be traced: {probe.note}"
            points = tuple((size, value - saved + more) for size, value in law.points)
            found = Memory(mode, points, limit, law.largest_micro_batch(room), assumed)
            if found.largest is not None:
                return found
    except (TaskError, ProfilingError) as error:
        return str(error)
    return found or "not one mode could be traced"


def parameters_of(recipe: Recipe, model: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`CausalLM`'s parameters that decide about memory, and what was assumed."""
    assumed = []
    dtype = str(recipe.get("dtype") or "").rpartition(".")[2]
    adapts = _adapts(recipe)
    half = "bfloat16" if recipe.is_on("bf16") or recipe.is_on("pure_bf16") else "float16" if recipe.is_on("fp16") else "float32"
    if dtype not in ("bfloat16", "float16", "float32"):
        if recipe.form.library.startswith("Axolotl"):
            dtype = half
        elif recipe.form.library.startswith("LLaMA-Factory"):
            dtype = half if adapts or recipe.is_on("pure_bf16") else "float32"
        else:
            dtype = half if _bits(recipe) else "float32"
            assumed.append(f"weights in {dtype}, since the recipe has no {recipe.key('dtype')}")
    optimizer = optimizer_of(recipe)
    if str(recipe.get("optimizer") or "adamw").partition("_")[0].replace("paged", "adamw") not in ("adamw", *_OPTIMIZERS):
        assumed.append(f"{recipe.get('optimizer')} takes the memory of AdamW")
    elif "8bit" in str(recipe.get("optimizer")):
        assumed.append("an optimizer's states of 8 bits are counted as AdamW's, which take more")
    if _bits(recipe):
        assumed.append(
            f"weights of {_bits(recipe)} bits are counted, not traced: {BYTES[_bits(recipe)]} bytes a parameter of linear "
            "layers, and the largest of them once more in half precision"
        )
    if any(str(recipe.settings.get(key) or "") for key in ("deepspeed", "fsdp", "fsdp_config")):
        assumed.append("nothing is sharded")
    parameters: dict[str, Any] = {
        "model": model,
        "tokenizer": "bytes",
        "length": recipe.count("length", 1),
        "dtype": dtype,
        "packing": False,
        "optimizer": optimizer,
    }
    if adapts:
        targets = _names(recipe.get("targets"))
        parameters |= {
            "lora_rank": recipe.count("rank", 8),
            "lora_targets": "" if targets in ("all", "all-linear") else targets,
            "lora_trained": _names(recipe.get("trained")),
        }
        if recipe.is_on("dora"):
            parameters["lora_variant"] = "dora"
    return parameters, tuple(assumed)


def _names(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _adapts(recipe: Recipe) -> bool:
    if recipe.form.library.startswith("LLaMA-Factory"):
        return str(recipe.get("adapter") or "lora") == "lora"
    return str(recipe.get("adapter")) in ("lora", "qlora") or recipe.is_on("use_adapter")


def _bits(recipe: Recipe) -> int:
    """Of the frozen weights; 0: they are not quantized."""
    if recipe.get("bits") is not None:
        return recipe.count("bits", 4)
    return 4 if recipe.is_on("4bit") or str(recipe.get("adapter")) == "qlora" else 8 if recipe.is_on("8bit") else 0


def optimizer_of(recipe: Recipe) -> str:
    return _OPTIMIZERS.get(str(recipe.get("optimizer") or "adamw").lower(), "adamw")


__all__ = ["Memory", "Target", "checkpoints", "memory_on", "optimizer_of", "parameters_of", "target_of"]
