"""That a training begins with weights of its own, and not with those that an earlier one in its process has trained.

A model that is made once, when its module is imported, would go on from trial to trial: each would begin where the last ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ...spaces.errors import TaskError

# What trained parameters were, by sums of them, when the training that had stepped them ended.
_left: Any = WeakIdKeyDictionary()


@contextmanager
def own_weights() -> Iterator[None]:
    """Context of a training, of whatever kind.

    Raises:
        TaskError: an optimizer is about to step with what an earlier training has left.
    """
    seen, trained = WeakIdKeyDictionary(), WeakIdKeyDictionary()  # keep no model alive

    def before(optimizer: Optimizer, *_: Any) -> None:
        if optimizer in seen:
            return
        seen[optimizer] = True
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        same = sum(one in _left and _left[one] == sums(one) for one in parameters)
        if same:
            raise TaskError(
                f"expected new weights, got {same} of {len(parameters)} tensors with the values that an earlier training in "
                "this process left: the model is kept somewhere, such as in a variable of a module. Make it anew for each."
            )
        for one in parameters:
            trained[one] = True

    handle = register_optimizer_step_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()
        for one in trained:  # those that have outlived their training
            _left[one] = sums(one)


def sums(tensor: Tensor) -> tuple[float, float]:
    """What tells a tensor's values from others: an optimizer may move them without their version."""
    with torch.no_grad():
        values = tensor.detach().to(torch.float64) if tensor.device.type != "mps" else tensor.detach().float()
        return float(values.sum()), float(values.square().sum())
