"""What a training's steps change, against what a trial carries: nothing that learns may be unknown to it.

It is found by its effect in steps of the user's own: which tensors get gradients, and which schedulers hold the rates.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...spaces.laws.examination import Finding

# Names in a message.
_SHOWN = 3


class Census:
    """The tensors that get a gradient in every one of some steps, each within `step()`.

    Those of one step alone are its own affair, such as inputs whose gradient is penalised.
    """

    def __init__(self) -> None:
        self._of_steps: list[dict[int, Tensor]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step."""
        found: dict[int, Tensor] = {}
        self._of_steps.append(found)
        backward, grad = torch.autograd.backward, torch.autograd.grad

        def noted(function: Any) -> Any:
            def called(tensors: Any, *args: Any, **kwargs: Any) -> Any:
                found.update(_leaves([tensors] if isinstance(tensors, Tensor) else tensors))
                return function(tensors, *args, **kwargs)

            return called

        with patch("torch.autograd.backward", noted(backward)), patch("torch.autograd.grad", noted(grad)):
            yield

    @property
    def learning(self) -> list[Tensor]:
        first, *others = self._of_steps
        return [tensor for key, tensor in first.items() if all(key in other for other in others)]

    def findings(self, where: str, model: nn.Module, optimizers: Sequence[Optimizer], owner: Any = None) -> Iterator[Finding]:
        """What gets gradients and is not carried, and what else sets rates.

        Args:
            where: the user's code, for messages.
            owner: an object of the user's whose attributes may hold it.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        stepped = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        beside = [_name(tensor, owner) for tensor in self.learning if id(tensor) not in names]
        if beside:
            yield Finding(
                "beside",
                where,
                f"expected gradients of the model's parameters alone, got one of {_listed(beside)}, which no model holds: it "
                "is not cleared, clipped, saved nor resumed as they are. Make it an nn.Parameter of a module that is trained.",
            )
        if idle := [names[id(tensor)] for tensor in self.learning if id(tensor) in names and id(tensor) not in stepped]:
            yield Finding(
                "unstepped",
                where,
                f"expected an optimizer for each parameter that gets a gradient, got none for {_listed(idle)}. Give it to one, "
                "or freeze it: parameter.requires_grad_(False).",
            )
        for scheduler in _schedulers(optimizers):
            yield Finding(
                "scheduler",
                where,
                f"expected no scheduler, since training.schedule sets the rate; got {type(scheduler).__name__}. Remove it; for "
                "a schedule of your own write training.schedule: module:function.",
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


def _schedulers(optimizers: Sequence[Optimizer]) -> Iterator[LRScheduler]:
    """Those that are alive and set the rates of these optimizers, whenever they were made."""
    known = {id(optimizer) for optimizer in optimizers}
    for candidate in gc.get_objects():
        # Asking an object for its class may run its code.
        if issubclass(type(candidate), LRScheduler) and id(getattr(candidate, "optimizer", None)) in known:
            yield candidate


def _name(tensor: Tensor, owner: Any) -> str:
    for name, value in vars(owner).items() if owner is not None else ():
        if value is tensor:
            return f"self.{name}"
        if isinstance(value, nn.Module):
            for inner, parameter in value.named_parameters():
                if parameter is tensor:
                    return f"self.{name}.{inner}"
    return f"a tensor of shape {tuple(tensor.shape)}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
