"""Copies of a task's training to be examined: in what precision, and how its methods are named in messages."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..loading import line_of
from ..task import Task, name_of
from ..training import TrainingRun
from .step import perturb

# Precision, and whether parameters are perturbed off their first values, where many gradients vanish; the first that works.
ATTEMPTS: Sequence[tuple[torch.dtype | None, bool]] = (
    (torch.float64, True),
    (torch.float64, False),
    (torch.float32, True),
    (torch.float32, False),
    (None, False),
)


def needs_its_own_model(run: TrainingRun) -> bool:
    """Whether a copy of the run's model would not do, because copies lack the hooks of parameters."""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(parameter, name, None) for parameter in run.model.parameters() for name in hooks)


def copied(
    run: TrainingRun, dtype: torch.dtype | None, *, perturbed: bool, live: bool = False
) -> TrainingRun:
    """The run with a copy of its model in a precision, without autocast but in the study's own.

    Args:
        live: its own model instead, as it is.
    """
    model = run.model if live else copy.deepcopy(run.model)
    if perturbed and not live:
        perturb(model)
    if dtype is not None and not live:
        model = model.to(dtype)
    device = next(run.model.parameters()).device
    other = run.on(model.to(device), device)
    if dtype is not None:
        training = run.setup.training.model_copy(update={"precision": "fp32"})
        other.setup = other.loss.setup = replace(run.setup, training=training)
    run.modes.train(other.model)
    return other


def numbers_of(task: Task | None) -> dict[str, Any]:
    """The plain numbers among a task's attributes."""
    return {
        name: value for name, value in (vars(task) if task else {}).items() if isinstance(value, int | float)
    }


@contextmanager
def unchanged(task: Task) -> Iterator[None]:
    """Restore a task's attributes on exit, and empty the caches of its module that have grown: they may hold tensors in another
    precision. Containers are restored as they were, not what is in them.
    """
    before = {
        name: copy.copy(value) if isinstance(value, dict | list | set) else value
        for name, value in vars(task).items()
    }
    module = sys.modules.get(type(task).__module__)
    functions = (*vars(type(task)).values(), *(vars(module).values() if module else ()))
    caches = [
        function
        for function in functions
        if hasattr(function, "cache_info") and hasattr(function, "cache_clear")
    ]
    sizes = [cache.cache_info().currsize for cache in caches]
    try:
        yield
    finally:
        for name in vars(task).keys() - before.keys():
            delattr(task, name)
        vars(task).update(before)
        for cache, size in zip(caches, sizes, strict=True):
            if cache.cache_info().currsize > size:
                cache.cache_clear()


def location_of(run: TrainingRun, method: str, split: str = "") -> str:
    """The user's method with its file and line, and the data it was given."""
    function = getattr(type(run.task), method)
    place = "" if function is getattr(Task, method) else line_of(function, run.setup.folder)
    return f"{place}{name_of(run.task)}.{method}" + (f", on {split}" if split else "")
