"""That a training begins with weights of its own, and not with those that an earlier one in its process has trained.

A model that is made once, when its module is imported, would go on from trial to trial: each would begin where the last ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ...spaces.errors import TaskError

# Versions of parameters, which count their changes, when a training that had changed them ended.
_trained: Any = WeakIdKeyDictionary()


@contextmanager
def own_weights() -> Iterator[None]:
    """Context of a training, of whatever kind.

    Raises:
        TaskError: an optimizer is about to step with what an earlier training has left.
    """
    seen: Any = WeakIdKeyDictionary()  # keeps no model alive
    begun: Any = WeakIdKeyDictionary()

    def before(optimizer: Optimizer, *_: Any) -> None:
        if optimizer in seen:
            return
        seen[optimizer] = True
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        left = sum(_trained.get(parameter) == parameter._version for parameter in parameters)
        if left:
            raise TaskError(
                f"expected new weights, got {left} of {len(parameters)} tensors as an earlier training in this process has "
                "left them: the model is kept somewhere, such as in a variable of a module. Make it anew for each training."
            )
        for parameter in parameters:
            begun[parameter] = parameter._version

    handle = register_optimizer_step_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()
        for parameter, version in begun.items():
            if parameter._version != version:
                _trained[parameter] = parameter._version
