"""A step that is computed more than once: its samples, and what its passes draw and move.

In fp16 a step whose gradient overflows is computed again at a lower scale, and cached embeddings are computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..data.batches import with_tensors
from ..model.buffers import Moment
from ..profiling.memory.live_bytes import LiveBytes


def held(batch: Any, *, on_device: bool = False) -> Any:
    """A batch, or what a function fetches, that waits for a later pass: in host memory, unless it lies on the device."""
    if isinstance(batch, Copies):  # it waits already: a copy would double what is held
        return batch.waiting
    return LiveBytes.fetched(batch, counts=on_device) if callable(batch) else batch


def fresh(batch: Any, device: torch.device) -> Any:
    """A held batch for one pass: where it would not be copied to the device, a copy, since a task may change it in place."""

    def copied() -> Any:
        return with_tensors(
            batch, lambda tensor: tensor.clone() if tensor.device.type == device.type else tensor
        )

    return LiveBytes.fetched(copied)


@dataclass(frozen=True, slots=True)
class Copies:
    """A held batch as a function that returns a copy for one pass."""

    waiting: Any
    device: torch.device

    def __call__(self) -> Any:
        return fresh(self.waiting, self.device)


class HeldStep:
    """A step's samples, and the random state and buffers before it, so that the same function of the weights is computed again.

    Args:
        micro_batches: pairs of samples and a batch, or a function that returns it.
        on_device: the data live on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        micro_batches: Sequence[tuple[int, Any]],
        *,
        on_device: bool = False,
    ) -> None:
        self._device = device
        self._held = [(samples, held(batch, on_device=on_device)) for samples, batch in micro_batches]
        self._before = Moment(model, device)

    def micro_batches(self) -> list[tuple[int, Copies]]:
        """The step's micro-batches, as functions that return a copy."""
        return [(samples, Copies(batch, self._device)) for samples, batch in self._held]

    def again(self) -> AbstractContextManager[None]:
        """Context of another pass: it draws the same random numbers, and leaves buffers and generators as they are now."""
        return self._before.again()
