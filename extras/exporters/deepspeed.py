"""DeepSpeed's configuration."""

from __future__ import annotations

import json
from typing import Any

from ...search.report.frameworks.differences import (
    checkpointing_notes,
    even_notes,
    is_sharded,
    mean_notes,
    optimizer_notes,
    own_schedule_notes,
    torch_optimizer,
)
from ...search.report.frameworks.settings import ChosenSettings
from ...search.report.frameworks.texts import Exported
from ...spaces.schedule import is_own


def deepspeed(chosen: ChosenSettings) -> Exported:
    """DeepSpeed's configuration as JSON, which has no comments."""
    training, settings, even = chosen.setup.training, chosen.even_settings, chosen.even
    name, keywords = torch_optimizer(chosen, settings)
    if name == "Adam":
        keywords["adam_w_mode"] = False  # otherwise DeepSpeed's "Adam" applies weight decay as AdamW does
    scheduler, steps = None, chosen.running_steps
    warmup_steps = chosen.warmup_steps(steps)
    warmup = {"warmup_num_steps": max(warmup_steps, 1), "warmup_type": "linear"}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": settings.learning_rate}
    total = {"total_num_steps": steps}
    match "constant" if is_own(training.schedule) else training.schedule:
        case "cosine":
            ratios = {"warmup_min_ratio": 0.0, "cos_min_ratio": 0.0}
            scheduler = {"type": "WarmupCosineLR", "params": total | warmup | ratios}
        case "linear":
            scheduler = {"type": "WarmupDecayLR", "params": total | warmup | rates}
        case "constant" if training.warmup:
            scheduler = {"type": "WarmupLR", "params": warmup | rates}
    document: dict[str, Any] = {
        "train_batch_size": even.effective_batch,
        "train_micro_batch_size_per_gpu": even.micro_batch,
        "gradient_accumulation_steps": even.accumulation,
        "optimizer": {"type": name, "params": keywords},
        "scheduler": scheduler,
        "gradient_clipping": training.clip_norm,
        "bf16": {"enabled": True} if training.precision == "bf16" else None,
        "fp16": {"enabled": True} if training.precision == "fp16" else None,
        "zero_optimization": {"stage": 3} if is_sharded(chosen) else None,
        "zero_allow_untested_optimizer": True
        if is_sharded(chosen) and name not in ("Adam", "AdamW")
        else None,
    }
    notes = [
        f"launch: deepspeed --num_gpus {even.devices} train.py; for another number of GPUs, change train_batch_size",
        f"DeepSpeed's configuration has no key for the length of training, {steps} steps, nor for the seed, {training.seed}",
        *even_notes(chosen, flushes=False),
        *optimizer_notes(chosen),
        *mean_notes(chosen, "DeepSpeed"),
        *own_schedule_notes(chosen),
        *checkpointing_notes(chosen, enabled=False),
    ]
    if scheduler:
        late = "DeepSpeed's schedules start with two steps at learning rate 0 and lag the trial's by up to one and a half steps"
        notes.append(
            f"{late}, and warm up for at least 2 steps; the trial's warm-up is {warmup_steps}"
            if warmup_steps < 2
            else late
        )
    if training.schedule == "wsd":
        notes.append(
            "DeepSpeed has no schedule like wsd: pass one of torch to deepspeed.initialize, or the rate never falls"
        )
    if training.precision == "bf16":
        notes.append(
            "DeepSpeed's bf16 stores the model's weights in bf16; the trial's were fp32 under autocast"
        )
    return Exported(
        json.dumps({key: value for key, value in document.items() if value is not None}, indent=2) + "\n",
        tuple(notes),
    )
