"""The sum of many steps' losses, kept where they are computed, so that adding one does not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..machine.accelerator import widest_float


class LossSum:
    """A sum of scalars: in double precision, or, on devices that have none, in single precision with its rounding errors
    summed beside it (Knuth's two-sum).

    >>> total = LossSum(torch.device("cpu"), 0.5)
    >>> total += torch.tensor(2.0)
    >>> float(total)
    2.5
    """

    def __init__(self, device: torch.device, value: float = 0.0) -> None:
        self._total = torch.full((), value, dtype=widest_float(device), device=device)
        self._error = None if self._total.dtype == torch.float64 else torch.zeros_like(self._total)

    def __iadd__(self, loss: Tensor) -> LossSum:
        if self._error is None:
            self._total += loss
            return self
        loss = loss.to(self._total.dtype)
        total = self._total + loss
        added = total - self._total
        self._error += (self._total - (total - added)) + (loss - added)
        self._total = total
        return self

    def __float__(self) -> float:
        """The sum; this waits for the device."""
        return float(self._total) + (0.0 if self._error is None else float(self._error))
