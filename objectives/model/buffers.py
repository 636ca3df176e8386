"""A model's buffers: kept, to be put back where a pass is run again; and made the same on several devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..data.batches import RandomState
from ..parallel.data_parallel import Ranks
from .batch_norm import batch_norms


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
        """Give the model these buffers again, with their values; any number of times."""
        for owner, name, buffer, value in self._kept:
            owner[name] = buffer
            # All of them, since BatchNorm writes without counting a version; buffers that did not change keep their version.
            with torch.no_grad(), _unsafe_preserve_version_counter(buffer):
                buffer.copy_(value)


class Moment:
    """What passes over a model move and draw from, as it is now: its buffers, and the process's generators."""

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        self._model, self._device = model, device
        self._buffers, self._generators = KeptBuffers(model), RandomState.now(device)

    def put_back(self) -> None:
        self._buffers.put_back()
        self._generators.restore()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context of a pass that is run again from this moment; it leaves both as they are before it."""
        now = Moment(self._model, self._device)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


class SharedBuffers:
    """The buffers that a model updates as it trains, such as spectral norm's: on all devices rank 0's, as with
    DistributedDataParallel. BatchNorm's are averaged instead.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._updated: set[str] = set()  # those known to be updated
        self._checked = ranks.count == 1
        self._versions = _versions(self._all())

    def after_step(self) -> None:
        """Broadcast those that were found to be updated."""
        if self._updated or not self._checked:
            self.broadcast()

    def broadcast(self) -> None:
        """Find out which are updated, and broadcast them. Some are first updated after the first step."""
        if self._ranks.count == 1:
            return
        buffers, before, self._checked = self._all(), self._versions, True
        changed = [
            name for name, buffer in buffers.items() if before.get(name) != (id(buffer), buffer._version)
        ]
        self._updated |= set(self._ranks.all_gathered({"changed": changed}).get("changed", []))
        self._ranks.broadcast(buffers[name] for name in sorted(self._updated))
        self._versions = _versions(buffers)

    def _all(self) -> dict[str, Tensor]:
        norms = {id(buffer) for norm in batch_norms(self._model) for buffer in norm.buffers()}
        return {name: buffer for name, buffer in self._model.named_buffers() if id(buffer) not in norms}


def _versions(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Identity and version counter: they change when a tensor is replaced or written to."""
    return {name: (id(tensor), tensor._version) for name, tensor in tensors.items()}
