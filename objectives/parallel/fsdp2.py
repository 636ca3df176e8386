"""FSDP: each rank keeps a share of every parameter, gradient and optimizer state, and gathers a block's parameters to use it.

torch's `fully_shard` (Zhao et al. 2023, arXiv 2304.11277) does the work. Gradients are summed over ranks in every micro-batch,
so that no rank ever holds all of them. Every rank has to run as many forward and backward passes as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def device_mesh(device: torch.device, ranks: int) -> DeviceMesh:
    """The devices of all ranks of the default process group."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(device.type, list(range(ranks)))


def shard_parameters(root: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Share out the parameters of a module among the devices of a mesh, in place, and move its own share to this rank's device.

    Args:
        blocks: modules inside it that are gathered one at a time, such as a transformer's layers; the rest is gathered as one.
    """
    # Late: it takes a third of a second, and only these trials need it.
    from torch.distributed.fsdp import (
        fully_shard,
    )

    for block in blocks:
        fully_shard(block, mesh=mesh)
    sharded: Any = fully_shard(root, mesh=mesh)
    if takes_unused_parameters(root):
        # Ranks may use different parameters (mixtures of experts): those without a gradient send zeros.
        sharded.set_reduce_scatter_unused_params(True)


def takes_unused_parameters(root: nn.Module) -> bool:
    """Whether this torch sums gradients right where ranks use different parameters; older versions would mix them up."""
    return hasattr(root, "set_reduce_scatter_unused_params")


@contextmanager
def imagined_ranks(device: torch.device, count: int) -> Iterator[DeviceMesh]:
    """Context in which this process is rank 0 of a process group whose other ranks do not exist: nothing is sent.

    For the memory of one rank, which does not depend on what the others send.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield device_mesh(device, count)
    finally:
        dist.destroy_process_group()


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a sharded tensor; any other tensor as it is."""
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def whole(tensor: Any) -> Any:
    """A sharded tensor gathered from all ranks, on the CPU of rank 0; anything else as it is. All ranks must call it."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    gathered = gather().detach()
    return None if dist.get_rank() else gathered.cpu()


def like_shard(value: Any, parameter: Tensor) -> Any:
    """A whole tensor cut as the parameter is; what has another shape, such as a step count, stays as it is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    mesh = parameter.device_mesh
    # Every rank has the whole tensor: nothing needs to be sent.
    return distribute_tensor(
        value.to(parameter.to_local().device), mesh, parameter.placements, src_data_rank=None
    )


def model_state(model: nn.Module) -> dict[str, Any]:
    """The state of the whole model, on rank 0. All ranks must call it."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Keep this rank's part of a whole model's state."""
    own = model.state_dict()
    model.load_state_dict({name: like_shard(value, own[name]) for name, value in state.items()})


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state of the whole optimizer, as an optimizer of parameters in one piece would give it, on rank 0. All
    ranks must call it."""
    state = optimizer.state_dict()
    gathered = {
        index: {name: whole(value) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": gathered}


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Keep this rank's part of a whole optimizer's state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {
        index: {name: like_shard(value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": own})
