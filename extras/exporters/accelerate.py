"""A training loop with Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...search.report.frameworks.differences import (
    checkpointing_notes,
    device_notes,
    even_notes,
    mean_notes,
    optimizer_notes,
    seed_notes,
    tf32_notes,
    torch_optimizer,
)
from ...search.report.frameworks.settings import ChosenSettings
from ...search.report.frameworks.texts import Exported, program

_TEMPLATE = Path(__file__).parent / "templates" / "accelerate.py.jinja"


def accelerate(chosen: ChosenSettings) -> Exported:
    """A training loop with `Accelerator` that follows the trial's schedule step by step."""
    training = chosen.setup.training
    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": chosen.even.accumulation,
        "mixed_precision": {"fp32": "no", "tf32": "no"}.get(training.precision, training.precision),
    }
    if chosen.setup.device == "cpu":
        arguments["cpu"] = True
    notes = [*even_notes(chosen), *optimizer_notes(chosen), *seed_notes(chosen), *mean_notes(chosen, "Accelerate")]
    notes += [*device_notes(chosen, "cpu=True"), *tf32_notes(chosen), *checkpointing_notes(chosen, enabled=False)]
    if training.compile:
        notes.append("the trial's model was compiled: call model = torch.compile(model) before train(...)")
    if training.sync_batch_norm:
        notes.append("the trial used synchronised BatchNorm: call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) first")
    optimizer = torch_optimizer(chosen, chosen.even_settings)
    return program(_TEMPLATE, chosen, notes, arguments=arguments, optimizer=optimizer)


__all__ = ["accelerate"]
