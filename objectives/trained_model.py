"""The files of a model that `bsearch train` has trained: weights and optimizer, as torch loads them anywhere."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import nn

MODEL, OPTIMIZER = "model.pt", "optimizer.pt"  # search.run.train looks for the first


def save_model(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write both state dicts, on the CPU, each atomically.

    Raises:
        OSError: they cannot be written.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for name, state in ((MODEL, model.state_dict()), (OPTIMIZER, optimizer.state_dict())):
        part = place / f"{name}.{uuid.uuid4().hex[:8]}.part"
        try:
            torch.save(_on_cpu(state), part)
            os.replace(part, place / name)
        finally:
            part.unlink(missing_ok=True)


def _on_cpu(state: Any) -> Any:
    """State dicts have plain dicts, lists and tensors only."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {name: _on_cpu(value) for name, value in state.items()}
    return [_on_cpu(value) for value in state] if isinstance(state, list) else state


__all__ = ["MODEL", "OPTIMIZER", "save_model"]
