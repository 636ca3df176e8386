"""What a library calls our settings: a table for each, by which exports write its settings and `port` reads its recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Setting = Literal[
    "model",
    "length",
    "micro_batch",
    "accumulation",
    "total_batch",
    "rate",
    "decay",
    "optimizer",
    "schedule",
    "steps",
    "warmup_steps",
    "bf16",
    "fp16",
    "pure_bf16",
    "dtype",
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
        write: our value as the library's, None to leave the key out; None: it is only read, such as an older name.
        read: the library's value as ours, None if it says nothing; None: it is only written.
    """

    key: str
    write: Callable[[Any], Any] | None = lambda value: value
    read: Callable[[Any], Any] | None = lambda value: value


def names(key: str, *others: str) -> tuple[Name, ...]:
    """A setting with the library's own values: the key that is written, and others that are read."""
    return Name(key), *(Name(other, write=None) for other in others)


def switch(key: str) -> tuple[Name, ...]:
    """A setting that is on or off."""
    return (Name(key, read=is_on),)


def is_on(value: Any) -> bool:
    """Whether a library takes a value for true, also as text, or `auto`."""
    return str(value).lower() in ("true", "auto", "1", "yes", "unsloth", "offload")


@dataclass(frozen=True, slots=True)
class Library:
    """A library's settings.

    Args:
        title: with the version that was read.
        table: its keys by our names.
        defaults: what it takes where a recipe lacks the setting.
        whole_mean: the loss is the mean over the tokens of the whole step, however it is split.
        half_weights: when weights are held in the precision of training, where a recipe does not say their dtype.
    """

    title: str
    table: Mapping[Setting, tuple[Name, ...]]
    defaults: Mapping[Setting, Any] = field(default_factory=dict)
    whole_mean: bool = True
    half_weights: Literal["always", "with adapters", "quantized"] = "quantized"

    @property
    def read(self) -> frozenset[str]:
        """Keys that say something of a step's batch, memory or learning rate."""
        return frozenset(name.key for names in self.table.values() for name in names if name.read)

    def written(self, settings: Mapping[Setting, Any]) -> dict[str, Any]:
        """Our settings by the library's names, in our order."""
        found = {name.key: name.write(value) for own, value in settings.items() for name in self.table[own] if name.write}
        return {key: value for key, value in found.items() if value is not None}


TRAINER = Library(
    "transformers' Trainer",
    {
        "micro_batch": names("per_device_train_batch_size", "per_gpu_train_batch_size"),
        "accumulation": names("gradient_accumulation_steps"),
        "steps": names("max_steps"),
        "rate": names("learning_rate"),
        "schedule": (Name("lr_scheduler_type", read=None),),
        # In steps, which all versions from 4.46 support; the argument for a share was renamed.
        "warmup_steps": names("warmup_steps"),
        "decay": names("weight_decay"),
        "optimizer": names("optim"),
        "bf16": switch("bf16"),
        "fp16": switch("fp16"),
        "checkpointing": switch("gradient_checkpointing"),
    },
    {"micro_batch": 8},
)
