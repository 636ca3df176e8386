"""A gradient whose loss is a mean over something else than samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ..machine.accelerator import widest_float


def rescale_gradients(gradients: list[Tensor], denominator: Tensor | float, size: float) -> None:
    """Rescale gradients from a mean over `size` samples to the loss's own denominator, in place."""
    if not isinstance(denominator, Tensor):
        if denominator == size:
            return
        # Unlike a copy, a fill does not synchronise with the GPU.
        denominator = torch.full(
            (), denominator, device=gradients[0].device, dtype=widest_float(gradients[0].device)
        )
    # In double precision where there is one: in single, the ratio of two counts would lose eight digits.
    denominator = denominator.to(widest_float(denominator.device))
    # Where every label of a step is ignored, its gradient is 0 rather than 0/0.
    ratio = torch.where(
        denominator > 0, size / denominator.clamp_min(torch.finfo(denominator.dtype).tiny), 0.0
    )
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient._values() if gradient.is_sparse else gradient)
    for dtype, same in by_type.items():
        if dtype in (torch.bfloat16, torch.float16):
            for gradient in same:  # rounded to eight bits, the ratio itself would be off by up to .4 %
                gradient.copy_(gradient.float() * ratio.float())
        else:
            torch._foreach_mul_(same, ratio.to(dtype))
