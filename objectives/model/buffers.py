"""A model's buffers as they are now, to be put back where a pass is run again."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class KeptBuffers:
    """The values of a model's buffers; also of those that a forward pass replaces instead of writing to them."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module._buffers, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def put_back(self) -> None:
        """Give the model these buffers again, with their values; as often as wanted."""
        for owner, name, buffer, value in self._kept:
            owner[name] = buffer
            # All of them, since BatchNorm writes without counting a version; nobody is to see that these did not change.
            with torch.no_grad(), _unsafe_preserve_version_counter(buffer):
                buffer.copy_(value)


__all__ = ["KeptBuffers"]
