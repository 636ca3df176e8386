"""ZeRO stage 1: each rank keeps the optimizer's state of a share of the parameters, updates them, and sends them to the others.

The same training as with the whole state on every rank (Rajbhandari et al. 2019, arXiv 1910.02054), in less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that updates each parameter, such that ranks have about as many elements: the largest parameter first, to the
    rank with the fewest.

    >>> owners([10, 90, 40, 60], 2)
    [0, 0, 1, 1]
    """
    loads, chosen = [0] * ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        rank = min(range(ranks), key=loads.__getitem__)
        chosen[place] = rank
        loads[rank] += sizes[place]
    return chosen


def state_bytes(optimizer: Optimizer, ranks: int) -> int:
    """Bytes of state on the rank with the most, after a first step."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    loads = [0] * ranks
    for parameter, rank in zip(parameters, owners([tensor.numel() for tensor in parameters], ranks), strict=True):
        state = optimizer.state.get(parameter, {}).values()
        loads[rank] += sum(value.numel() * value.element_size() for value in state if isinstance(value, Tensor))
    return max(loads)


class ShardedOptimizer:
    """A rank's part of an optimizer, which is changed in place: its groups hold this rank's parameters alone.

    Args:
        gather: the lists of all ranks by name, concatenated.
    """

    def __init__(self, optimizer: Optimizer, rank: int, ranks: int, gather: Callable[[dict[str, list[Any]]], Any]) -> None:
        self.optimizer, self.rank, self._gather = optimizer, rank, gather
        self._whole = [list(group["params"]) for group in optimizer.param_groups]
        every = [parameter for group in self._whole for parameter in group]
        self._owners = dict(zip(map(id, every), owners([parameter.numel() for parameter in every], ranks), strict=True))
        self._every = every
        self._keep_own()

    def _keep_own(self) -> None:
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = [parameter for parameter in whole if self._owners[id(parameter)] == self.rank]
        for parameter in list(self.optimizer.state):
            if self._owners[id(parameter)] != self.rank:
                del self.optimizer.state[parameter]

    @contextmanager
    def _with_all(self) -> Iterator[None]:
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = whole
        try:
            yield
        finally:
            self._keep_own()

    def share_parameters(self) -> None:
        """Send each rank's updated parameters to the others."""
        with torch.no_grad():
            pending = [
                dist.broadcast(parameter.detach(), self._owners[id(parameter)], async_op=True) for parameter in self._every
            ]
        for work in pending:
            work.wait()  # type: ignore[union-attr]  # asynchronous, so it is there

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks, on the CPU, as the whole optimizer would give it: on rank 0. All ranks must call it."""
        with self._with_all():
            local = self.optimizer.state_dict()
        # One tensor at a time: the whole state may be more than a device has room for.
        described = self._gather({"states": [{index: _described(state) for index, state in local["state"].items()}]})["states"]
        state: dict[int, dict[str, Any]] = {}
        for index, kinds in sorted((index, kinds) for of_rank in described for index, kinds in of_rank.items()):
            parameter = self._every[index]
            state[index] = {}
            for name, (shape, dtype, value) in kinds.items():
                if dtype is None:
                    state[index][name] = value
                    continue
                owner = self._owners[id(parameter)]
                if owner == self.rank:
                    tensor = local["state"][index][name].to(parameter.device).contiguous()
                else:
                    tensor = torch.empty(shape, dtype=dtype, device=parameter.device)
                dist.broadcast(tensor, owner)
                state[index][name] = tensor.cpu() if self.rank == 0 else None
        return {**local, "state": state if self.rank == 0 else local["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep this rank's part of a whole optimizer's state."""
        own = {index for index, parameter in enumerate(self._every) if self._owners[id(parameter)] == self.rank}
        part = {index: value for index, value in state["state"].items() if index in own}
        with self._with_all():
            self.optimizer.load_state_dict({**state, "state": part})


def _described(state: dict[str, Any]) -> dict[str, tuple[Any, Any, Any]]:
    """Shape and type of each tensor of a parameter's state, and what is no tensor."""
    return {
        name: (tuple(value.shape), value.dtype, None) if isinstance(value, Tensor) else ((), None, value)
        for name, value in state.items()
    }
