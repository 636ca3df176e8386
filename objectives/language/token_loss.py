"""Cross-entropy over a large vocabulary in little memory: neither float32 logits nor their softmax are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .packing import IGNORED

# Bytes of float32 logits that are worked on at a time.
_CHUNK_BYTES = 1 << 26


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over tokens of the cross-entropy, in single precision at least; labels that are IGNORED add nothing.

    The gradient is found in the forward pass, a chunk of tokens at a time, and kept in the logits' precision, in which a
    backward pass would return it too; of float16 in single precision, since it is scaled only in the backward pass, and small
    probabilities would vanish before. It can be differentiated once.

    Args:
        logits: (tokens, vocabulary).
        labels: (tokens,) int64.

    Returns:
        (), float32 or wider.

    Source: the chunks as in Hsu et al. 2024, "Liger Kernel", arXiv 2410.10989.
    """
    total: Tensor = _Summed.apply(logits, labels)
    return total


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=logits.device)
        kept = wide if logits.dtype == torch.float16 else logits.dtype
        gradient = torch.empty_like(logits, dtype=kept) if ctx.needs_input_grad[0] else None
        size = max(_CHUNK_BYTES // (logits.shape[1] * 4), 1)
        for start in range(0, len(logits), size):
            some, label = logits[start : start + size].to(wide), labels[start : start + size]
            counts = (label != IGNORED)[:, None]
            at = torch.where(counts, label[:, None], 0)
            normalizer = some.logsumexp(1, keepdim=True)
            total += torch.where(counts, normalizer - some.gather(1, at), 0.0).sum()
            if gradient is not None:
                slope = (some - normalizer).exp_()
                slope.scatter_add_(1, at, slope.new_full((), -1.0).expand_as(at))
                gradient[start : start + size] = slope.mul_(counts)
        if gradient is not None:
            ctx.save_for_backward(gradient)
            ctx.dtype = logits.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * scale.to(gradient.dtype)).to(ctx.dtype), None
