"""Counting the bytes of living tensors, on any device: what a step needs at its peak.

Process memory says little on a CPU (allocators keep and round); storages that are alive say it exactly. Every
storage an operation gives out is counted once, and uncounted when it dies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_BLOCK = 512  # bytes; what CUDA's caching allocator rounds to


class LiveBytes(TorchDispatchMode):
    """Inside the `with`, `peak_bytes` is the most that lived at once, what was registered before included."""

    def __init__(self, already: Iterable[Any] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()
        for value in already:
            self._register(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            self._register(value)
        return result

    def _register(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            return
        storage = value.untyped_storage()
        identity = storage._cdata
        if identity in self._known:
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._known.add(identity)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, identity, size).atexit = False

    def _forget(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.live_bytes -= size
