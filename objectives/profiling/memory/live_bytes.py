"""Count the bytes of live tensors on any device: the peak of a step, and its breakdown.

Process memory is a poor measure on a CPU, because allocators cache and round; live storages are exact. Every storage that
an operation returns is counted once, and subtracted when it is freed. Fake tensors have storages too, so the same counter
predicts steps that have never run.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ...parallel.fsdp2 import own_part
from .allocator import BLOCK, Event


class LiveBytes(TorchDispatchMode):
    """Context manager that counts live bytes; `peak_bytes` is their maximum, including tensors registered before.

    Args:
        limit_bytes: size of a virtual device: the operation that exceeds it raises `torch.OutOfMemoryError`, as a real
            device's allocator would.

    Attributes:
        events: every allocation and free in order, for a replay (`CachingAllocator`).
    """

    _active: ClassVar[LiveBytes | None] = None

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self.live_parts: Counter[str] = Counter()
        self.peak_parts: Counter[str] = Counter()
        self._known: dict[int, tuple[int, str]] = {}
        self._fetching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._fetching:
            return result
        # Results of a forward pass are activations, kept for the backward pass. Results of the backward pass and the
        # optimizer are workspace, until a hook or `register` assigns them to another part.
        backward = torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled()
        self.register(tree_iter(result), "workspace" if backward else "activations")
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"virtual device: {self.live_bytes} bytes live, {self.live_bytes - self.limit_bytes} over the limit of "
                f"{self.limit_bytes}"
            )
        return result

    def register(self, values: Iterable[Any], part: str, *, views: bool = False) -> None:
        """Count the tensors in `values` under `part`; those already counted are reassigned.

        Args:
            views: count a tensor's own bytes, not those of the storage that it is a view of.
        """
        for value in chain.from_iterable(
            _strided_parts(own_part(tensor)) for tensor in values if isinstance(tensor, torch.Tensor)
        ):
            storage = value.untyped_storage()
            identity = storage._cdata
            known = self._known.get(identity)
            if known is not None:
                if part not in ("activations", "workspace", known[1]):
                    self.live_parts[known[1]] -= known[0]
                    self.live_parts[part] += known[0]
                    self._known[identity] = (known[0], part)
                continue
            self._add(identity, min(value.nbytes, storage.nbytes()) if views else storage.nbytes(), part)
            weakref.finalize(storage, self._forget, identity).atexit = False

    def _add(self, identity: int, nbytes: int, part: str) -> None:
        size = -(-nbytes // BLOCK) * BLOCK
        self.events.append((identity, size))
        self._known[identity] = (size, part)
        self.live_bytes += size
        self.live_parts[part] += size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.peak_parts = self.live_parts.copy()

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count what `fully_shard` frees and takes again: it resizes storages whose tensors live on."""
        known = self._known.get(storage._cdata)
        if known is not None:
            self._forget(storage._cdata)
            self._add(storage._cdata, size, known[1])

    def register_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the tensors that the optimizer keeps between steps as its state."""
        self.register(
            (value for state in optimizer.state.values() for value in state.values()), "optimizer state"
        )

    def _forget(self, identity: int) -> None:
        size, part = self._known.pop(identity)
        self.events.append((identity, None))
        self.live_bytes -= size
        self.live_parts[part] -= size

    @classmethod
    def fetched(cls, fetch: Callable[[], Any], *, counts: bool = True) -> Any:
        """A batch; where bytes are counted, its own and not those of the dataset behind it, whose samples may be views.

        The counter is found by itself: what fetches batches does not know whether bytes are counted.

        Args:
            counts: false for a batch that waits in host memory.
        """
        counter = cls._active
        if counter is None:
            return fetch()
        counter._fetching = True
        try:
            batch = fetch()
        finally:
            counter._fetching = False
        if counts:
            counter.register(tree_iter(batch), "batch", views=True)
        return batch

    @contextmanager
    def counting(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, averages: Sequence[torch.Tensor] = ()
    ) -> Iterator[LiveBytes]:
        """Count inside the block, with parameters, gradients and optimizer state as parts of their own.

        Args:
            averages: of the weights; a list may be filled meanwhile.
        """
        self.register(model.parameters(), "parameters")
        self.register(model.buffers(), "parameters")
        self.register_states(optimizer)
        self.register(averages, "weight average")
        hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda owner: self.register([owner.grad], "gradients")
            )
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        hooks.append(
            optimizer.register_step_pre_hook(
                lambda *_: self.register((parameter.grad for parameter in model.parameters()), "gradients")
            )
        )
        outer, LiveBytes._active = LiveBytes._active, self
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._resized(storage, size)

        try:
            with self, patch.object(torch.UntypedStorage, "resize_", resized):
                yield self
        finally:
            LiveBytes._active = outer
            for hook in hooks:
                hook.remove()
            self.register_states(optimizer)


def _strided_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that hold its values: itself, or those of a sparse one, such as an embedding's gradient."""
    if tensor.layout == torch.strided:
        return (tensor,)
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else ()
