"""What learns in a training's steps, against what a trial carries: nothing that learns may be unknown to it.

It is found by its effect in steps of the user's own: which tensors get gradients, and which schedulers hold the rates.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...spaces.laws.examination import Finding
from ..task import scheduler_error
from .step import attribute_tensors, listed


def learning(step: Callable[[], object]) -> list[Tensor]:
    """The tensors that get a gradient in two calls of a step; those of one alone, such as inputs whose gradient is penalised,
    are its own affair.
    """
    first, second = _reached(step), _reached(step)
    return [tensor for key, tensor in first.items() if key in second]


def _reached(step: Callable[[], object]) -> dict[int, Tensor]:
    """The tensors that its backward passes reach, by identity."""
    found: dict[int, Tensor] = {}

    def noted(function: Any) -> Any:
        def called(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            found.update(_leaves([tensors] if isinstance(tensors, Tensor) else tensors))
            return function(tensors, *args, **kwargs)

        return called

    backward, grad = noted(torch.autograd.backward), noted(torch.autograd.grad)
    with patch("torch.autograd.backward", backward), patch("torch.autograd.grad", grad):
        step()
    return found


def census(
    where: str, learns: Sequence[Tensor], model: nn.Module, optimizers: Sequence[Optimizer], owner: Any = None
) -> Iterator[Finding]:
    """What learns and is not carried by a trial.

    Args:
        where: the user's code, for messages.
        owner: an object of the user's whose attributes may hold it.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stepped = {
        id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]
    }
    if beside := [_name(tensor, owner) for tensor in learns if id(tensor) not in names]:
        yield Finding(
            "beside",
            where,
            f"expected gradients of the model's parameters alone, got one of {listed(beside)}, which no model holds: it is not "
            "cleared, clipped, saved nor resumed as they are. Make it an nn.Parameter of a module that is trained.",
        )
    if idle := [names[id(tensor)] for tensor in learns if id(tensor) in names and id(tensor) not in stepped]:
        yield Finding(
            "unstepped",
            where,
            f"expected an optimizer for each parameter that gets a gradient, got none for {listed(idle)}. Give it to one, or "
            "freeze it: parameter.requires_grad_(False).",
        )


def _leaves(roots: Sequence[Tensor]) -> dict[int, Tensor]:
    """The tensors without a history that gradients of these reach, by identity."""
    found: dict[int, Tensor] = {}
    waiting = [root.grad_fn for root in roots if isinstance(root, Tensor)]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(tensor := getattr(node, "variable", None), Tensor):
            found[id(tensor)] = tensor
        waiting += [following for following, _ in node.next_functions]
    return found


def check_no_living_scheduler(where: str, optimizers: Sequence[Optimizer]) -> None:
    """Check that nothing alive sets the rates of these optimizers, whenever it was made.

    Raises:
        TaskError: a scheduler does.
    """
    known = {id(optimizer) for optimizer in optimizers}
    for candidate in gc.get_objects():
        # Asking an object for its class may run its code.
        if issubclass(type(candidate), LRScheduler) and id(getattr(candidate, "optimizer", None)) in known:
            raise scheduler_error(where, type(candidate).__name__)


def _name(tensor: Tensor, owner: Any) -> str:
    held = {} if owner is None else attribute_tensors(owner)
    return next(
        (name for name, value in held.items() if value is tensor), f"a tensor of shape {tuple(tensor.shape)}"
    )
