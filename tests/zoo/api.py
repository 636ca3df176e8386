"""What bsearch's interface has here: the zoo also loads beside a version that lacks some of it, whose table it prints."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from bsearch.objectives import task
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.study.training import Training

# None where a metric of the whole set cannot be written; only entries that need it use it.
WholeSet: Any = getattr(task, "WholeSet", None)


def has(feature: str) -> bool:
    """Whether this bsearch knows what an entry needs."""
    match feature:
        case "WholeSet":
            return WholeSet is not None
        case "train_collate":
            return "train_collate" in {field.name for field in fields(task.Data)}
        case "samples":
            return "samples" in {field.name for field in fields(task.Data)}
        case "couples_samples":
            return hasattr(task.Task, "couples_samples")
        case "accept_inexact":
            return "accept_inexact" in Training.model_fields
        case "examination":
            return "examination" in {field.name for field in fields(DeviceProfile)}
        case "sample_weights":
            return "weights" in {field.name for field in fields(task.Data)}
        case "hf_arguments":
            from bsearch.objectives.adapters.huggingface import train_with

            return {"denominator", "couples_samples"} <= set(inspect.signature(train_with).parameters)
    raise ValueError(f"expected a feature of bsearch, got {feature!r}")


def stated(samples: int) -> dict[str, Any]:
    """`Data(..., samples=samples)` where that exists; entries that use it need it."""
    return {"samples": samples} if has("samples") else {}


def collated_in_training(collate: Any) -> dict[str, Any]:
    """`Data(..., train_collate=collate)` where that exists; entries that use it need it."""
    return {"train_collate": collate} if has("train_collate") else {}
