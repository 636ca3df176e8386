"""What a recipe's step takes of other devices' memory: traced with a model of its configuration, without weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...spaces.errors import Fault, ProfilingError, StudyFileError, TaskError
from ...spaces.laws.cards import Card, card_named
from ...spaces.laws.memory import bytes_of
from ...spaces.learning_rate import OptimizerSettings
from ...spaces.plan import BatchPlan
from ...spaces.study.training import Training
from ...spaces.trial import TrialSetup
from .recipe import Recipe

# Bytes of a weight of 4 bits, with the scales of its block and theirs (Dettmers et al. 2023, arXiv 2305.14314), and of 8.
BYTES = {4: 0.52, 8: 1.0}

_HEADROOM = 0.05  # of the memory, as `memory.headroom` has it by default
# By the names of all three libraries; others are traced as AdamW.
_OPTIMIZERS = ("adafactor", "sgd", "muon")
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
            known = str(error).partition("expected ")[2]
            raise StudyFileError(Fault("--onto", f"expected devices such as '1x 24GiB', or {known}")) from None
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


def memory_on(recipe: Recipe, target: Target, model: str | None, share: int) -> Memory | str:
    """What fits on a device, or why that is not known."""
    from ...objectives.language.imagined import Imagined, saved_bytes
    from ...objectives.profiling.memory.tracing import MemoryProbe, memory_law

    named = model or recipe.get("model")
    if named is None:
        return f"{recipe.path.name} names no model: --model NAME says which it is"
    if not recipe.has("length"):
        return f"{recipe.path.name} does not say how long a row is ({recipe.key('length')})"
    parameters, assumed = parameters_of(recipe, str(named))
    setup = TrialSetup(
        study="port",
        number=0,
        attempt=0,
        plan=BatchPlan(1),
        optimizer=OptimizerSettings(1e-4),
        samples_budget=1,
        # fp16 takes as many bytes as bf16, and autocast on a CPU does not know it.
        training=Training(precision="fp32" if _half(recipe) is None else "bf16", schedule="constant", warmup=0),
        epochs=1,
        rule="constant",
        reference_batch=1,
        parameters=parameters,
        device="cpu",
        folder=str(recipe.path.resolve().parent),
    )
    limit = target.usable_bytes * (1 - _HEADROOM)
    modes: tuple[Checkpointing, ...] = ("full",) if recipe.get("checkpointing") else ("none", "full")
    found: Memory | None = None
    try:
        for mode in modes:
            probe = MemoryProbe(Imagined(), replace(setup, plan=BatchPlan(1, activation_checkpointing=mode)), like_gpu=True)
            saved, more = saved_bytes(probe.run.model, BYTES.get(recipe.count("bits", 0))), 0
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
    bits, adapter, library = recipe.count("bits", 0), recipe.get("adapter"), recipe.library
    if bits not in (0, *BYTES):
        raise recipe.fault(recipe.key("bits"), f"expected 4 or 8 bits, whose memory port knows; got {bits}")
    if dtype not in ("bfloat16", "float16", "float32"):
        in_half = {"always": True, "with adapters": adapter or recipe.get("pure_bf16"), "quantized": bits}[library.half_weights]
        dtype = _half(recipe) or "float32" if in_half else "float32"
        if library.half_weights == "quantized":
            assumed.append(f"weights in {dtype}, since the recipe has no {recipe.key('dtype')}")
    optimizer = str(recipe.get("optimizer") or "adamw")
    if optimizer.partition("_")[0].replace("paged", "adamw") not in ("adamw", *_OPTIMIZERS):
        assumed.append(f"{optimizer} takes the memory of AdamW")
    elif "8bit" in optimizer:
        assumed.append("an optimizer's states of 8 bits are counted as AdamW's, which take more")
    if bits:
        assumed.append(
            f"weights of {bits} bits are counted, not traced: {BYTES[bits]} bytes a parameter of linear layers, and the "
            "largest of them once more in half precision"
        )
    if any(str(recipe.settings.get(key) or "") for key in ("deepspeed", "fsdp", "fsdp_config")):
        assumed.append("nothing is sharded")
    parameters: dict[str, Any] = {
        "model": model,
        "tokenizer": "bytes",
        "length": recipe.count("length", 1),
        "dtype": dtype,
        "packing": False,
        "optimizer": optimizer_of(recipe),
    }
    if adapter:
        parameters |= {
            "lora_rank": recipe.count("rank", 8),
            "lora_targets": ",".join(recipe.get("targets") or ()),
            "lora_trained": ",".join(recipe.get("trained") or ()),
        }
        if recipe.get("variant"):
            parameters["lora_variant"] = recipe.get("variant")
    return parameters, tuple(assumed)


def _half(recipe: Recipe) -> str | None:
    """Half precision that the recipe trains in; None: it does not."""
    if recipe.get("bf16") or recipe.get("pure_bf16"):
        return "bfloat16"
    return "float16" if recipe.get("fp16") else None


def optimizer_of(recipe: Recipe) -> str:
    """`CausalLM`'s optimizer that takes as much memory."""
    name = str(recipe.get("optimizer") or "adamw").lower()
    return name if name in _OPTIMIZERS else "adamw"
