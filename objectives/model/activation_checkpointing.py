"""Activation checkpointing: blocks of a model that store fewer activations, and recompute the others in the backward pass.

Results stay as they were: random numbers (dropout) are drawn again from the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ...spaces.errors import TaskError
from ...spaces.plan import ActivationCheckpointing
from .batch_norm import batch_norms
from .buffers import Moment

_aten = torch.ops.aten

# Operations whose results `selective` keeps, since they take most of a block's time. What lies between them (normalisation,
# activation functions, dropout) takes much memory and little time.
KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


def _is_cache(value: Any) -> bool:
    return any(
        base.__name__ == "Cache" and base.__module__.startswith("transformers")
        for base in type(value).__mro__
    )


class _Checkpointed:
    """A block's forward pass; in a copy of the block, the copy's."""

    def __init__(self, block: nn.Module, mode: ActivationCheckpointing) -> None:
        self.block, self.forward, self.mode = block, block.forward, mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        # A cache of keys and values, which models of `transformers` fill by default, would be filled again.
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        options: dict[str, Any] = {}
        if self.mode == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT)
        # What is compiled draws from torch's generators alone.
        forward = self.forward if torch.compiler.is_compiling() else self._again_alike()
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    def _again_alike(self) -> Callable[..., Any]:
        """The forward pass; run again, it finds buffers and generators as the first time. A GPU's are `checkpoint`'s affair."""
        before, passes = Moment(self.block), 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal passes
            passes += 1
            if passes == 1:
                return self.forward(*args, **kwargs)
            # Selective checkpointing's, which recognises what is computed again.
            with _disable_current_modes():
                now = Moment(self.block)
                before.put_back()
            try:
                return self.forward(*args, **kwargs)
            finally:
                with _disable_current_modes():
                    now.put_back()

        return forward


def checkpoint_activations(blocks: Iterable[nn.Module], mode: ActivationCheckpointing) -> None:
    """Let each block keep fewer activations, in place, instead of an earlier mode; names of parameters stay.

    Raises:
        TaskError: there are no blocks, or they hold BatchNorm, whose statistics would count each batch twice.
    """
    blocks = list(blocks)
    for block in blocks:
        if isinstance(vars(block).get("forward"), _Checkpointed):
            del block.forward
    if mode == "none":
        return
    if not blocks:
        raise TaskError(
            f"checkpoint_blocks: expected at least one block for {mode} activation checkpointing, got an empty list. Return "
            "the model's blocks, or write memory: {activation_checkpointing: none}."
        )
    if _has_batch_norm(blocks):
        raise TaskError(
            "checkpoint_blocks: expected blocks without BatchNorm, whose running statistics recomputation would update twice; "
            "got some. Leave these blocks out, or write memory: {activation_checkpointing: none}."
        )
    for block in blocks:
        block.forward = _Checkpointed(block, mode)


def _has_batch_norm(blocks: Iterable[nn.Module]) -> bool:
    return any(True for block in blocks for _ in batch_norms(block))


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that `transformers` marks as worth checkpointing; none in other models."""
    layers = [
        module
        for module in model.modules()
        if any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
    ]
    return [] if _has_batch_norm(layers) else layers
