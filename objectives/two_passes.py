"""A step whose gradient an optimizer computes again, such as sharpness-aware minimisation's at perturbed weights.

Source: Foret et al. 2020, arXiv 2010.01412.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .batches import with_tensors
from .profiling.live_bytes import LiveBytes


class HeldStep:
    """A step's samples, and the random state and buffers before it, so that the same function of the weights is computed again.

    The samples stay where they were fetched, in host memory unless the data live on a GPU: of each pass, one micro-batch at a
    time is on the device.

    Args:
        micro_batches: pairs of samples and a batch, or a function that returns it.
    """

    def __init__(self, model: nn.Module, device: torch.device, micro_batches: Sequence[tuple[int, Any]]) -> None:
        self._model, self._device = model, device
        self._held = [
            (samples, LiveBytes.fetched(batch, counts=False) if callable(batch) else batch) for samples, batch in micro_batches
        ]
        # A traced step has neither values nor, where a GPU is not here, its generator.
        self._draws = not any(isinstance(parameter, FakeTensor) for parameter in model.parameters())
        self._before = self._state()

    def micro_batches(self) -> list[tuple[int, Callable[[], Any]]]:
        """The step's micro-batches, copied, so that a task may change them in place."""

        def copied(batch: Any) -> Callable[[], Any]:
            return lambda: with_tensors(batch, lambda one: one.clone() if one.device.type == self._device.type else one)

        return [(samples, copied(batch)) for samples, batch in self._held]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context of another pass: it draws the same random numbers, and leaves buffers and generators as they are now."""
        now = self._state()
        self._set_state(self._before)
        try:
            yield
        finally:
            self._set_state(now)

    def _state(self) -> tuple[dict[str, Tensor], tuple[Any, ...] | None]:
        """Every buffer's values: torch's BatchNorm changes its own without a trace in their version counters."""
        buffers = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
        return buffers, _random_state(self._device) if self._draws else None

    def _set_state(self, state: tuple[Mapping[str, Tensor], tuple[Any, ...] | None]) -> None:
        values, generators = state
        for name, buffer in self._model.named_buffers():
            buffer.data.copy_(values[name])  # `data`: to ranks, a buffer that is set back has not been updated
        if generators is not None:
            _set_random_state(generators, self._device)


def _random_state(device: torch.device) -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _set_random_state(state: tuple[Any, ...], device: torch.device) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state(state[3], device)


__all__ = ["HeldStep"]
