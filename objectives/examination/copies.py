"""Copies of a task's training to be examined: in what precision, and how its methods are named in messages."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

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


def copied(run: TrainingRun, dtype: torch.dtype | None, *, perturbed: bool) -> TrainingRun:
    """The run with a copy of its model in a precision, without autocast but in the study's own."""
    model = copy.deepcopy(run.model)
    if perturbed:
        perturb(model)
    if dtype is not None:
        model = model.to(dtype)
    device = next(run.model.parameters()).device
    other = run.on(model.to(device), device)
    if dtype is not None:
        training = run.setup.training.model_copy(update={"precision": "fp32"})
        other.setup = other.loss.setup = replace(run.setup, training=training)
    run.modes.train(other.model)
    return other


def location_of(run: TrainingRun, method: str, split: str = "") -> str:
    """The user's method with its file and line, and the data it was given."""
    place, function = "", inspect.unwrap(getattr(type(run.task), method))
    if function is not getattr(Task, method):
        with suppress(OSError, TypeError):
            file, folder = Path(inspect.getsourcefile(function) or ""), Path(run.setup.folder).resolve()
            name = file.relative_to(folder) if file.is_relative_to(folder) else file.name
            place = f"{name}:{inspect.getsourcelines(function)[1]}: "
    return f"{place}{name_of(run.task)}.{method}" + (f", on {split}" if split else "")


def error_line(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
