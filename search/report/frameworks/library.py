"""What a library calls our settings: a table for each, by which exports write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Setting = Literal[
    "model",
    "length",
    "micro_batch",
    "accumulation",
    "rate",
    "decay",
    "optimizer",
    "schedule",
    "steps",
    "warmup_steps",
    "bf16",
    "fp16",
    "checkpointing",
    "packing",
    "adapter",  # "lora", "qlora", or "" where all weights are trained
    "rank",
    "targets",  # a list of layers, empty for all linear layers
    "trained",  # a list of layers
    "variant",  # of LoRA
    "bits",  # of frozen weights that are quantized
]


@dataclass(frozen=True, slots=True)
class Name:
    """A library's key for one of our settings.

    Args:
        write: our value as the library's, None to leave the key out.
    """

    key: str
    write: Callable[[Any], Any] = lambda value: value


# A library's keys by our names.
Library = Mapping[Setting, tuple[Name, ...]]


def written(library: Library, settings: Mapping[Setting, Any]) -> dict[str, Any]:
    """Our settings by a library's names, in our order."""
    found = {name.key: name.write(value) for own, value in settings.items() for name in library[own]}
    return {key: value for key, value in found.items() if value is not None}


# transformers' Trainer. Warm-up in steps, which all versions from 4.46 support; the argument for a share was renamed.
TRAINER: Library = {
    "micro_batch": (Name("per_device_train_batch_size"),),
    "accumulation": (Name("gradient_accumulation_steps"),),
    "steps": (Name("max_steps"),),
    "rate": (Name("learning_rate"),),
    "schedule": (Name("lr_scheduler_type"),),
    "warmup_steps": (Name("warmup_steps"),),
    "decay": (Name("weight_decay"),),
    "optimizer": (Name("optim"),),
    "bf16": (Name("bf16"),),
    "fp16": (Name("fp16"),),
    "checkpointing": (Name("gradient_checkpointing"),),
}
