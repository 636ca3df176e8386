"""An exponential moving average of a model's weights, which is evaluated and saved in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """The average of a model's trainable weights over the steps of a training, in one copy of them.

    The numbers are those of torch's `AveragedModel` with `get_ema_multi_avg_fn`: the first step's weights begin it. That class
    also copies frozen weights and, in every step, all buffers, and reads a counter whose values a traced step does not have.
    Weights of 16 bits are averaged in 32: in 16 a step's share would be rounded away.

    Attributes:
        values: of each parameter; empty before the first step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.values: list[Tensor] = []

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Add the weights as they are after a step, given what the average keeps of itself, in [0, 1]."""
        if not self.values:
            self.values.extend(
                parameter.detach().to(_wide(parameter.dtype), copy=True) for parameter in self._parameters
            )
            return
        weights = [
            parameter.detach().to(value.dtype)
            for parameter, value in zip(self._parameters, self.values, strict=True)
        ]
        get_ema_multi_avg_fn(decay)(self.values, weights, None)  # type: ignore[no-untyped-call]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Meanwhile the model has the averaged weights; afterwards its own, bit for bit."""
        own = [parameter.detach().clone() for parameter in self._parameters] if self.values else []
        _copy(self.values, self._parameters)
        try:
            yield
        finally:
            _copy(own, self._parameters)

    def load(self, values: Sequence[Tensor]) -> None:
        """Go on from the `values` of another one."""
        if not self.values:
            self.values.extend(
                torch.empty_like(parameter, dtype=_wide(parameter.dtype)) for parameter in self._parameters
            )
        _copy(values, self.values)


@torch.no_grad()
def _copy(values: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for value, tensor in zip(values, into, strict=bool(values)):
        tensor.copy_(value)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
