"""A training loop with Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...search.report.frameworks.differences import loop_notes, torch_optimizer
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
    compiled = "model = torch.compile(model) before train(...)"
    notes = loop_notes(chosen, "Accelerate", cpu="cpu=True", compiled=compiled)
    if training.sync_batch_norm:
        notes.append(
            "the trial used synchronised BatchNorm: call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) first"
        )
    optimizer = torch_optimizer(chosen, chosen.even_settings)
    return program(_TEMPLATE, chosen, notes, arguments=arguments, optimizer=optimizer)
