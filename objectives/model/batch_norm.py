"""BatchNorm under accumulation: it sees micro-batches, and its running statistics are updated once for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def batch_norms(model: nn.Module) -> Iterator[nn.modules.batchnorm._BatchNorm]:
    return (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))


def correct_batch_norm(model: nn.Module, micro_batches: int) -> None:
    """Running statistics are updated once per micro-batch; this momentum makes k updates weigh as much as one."""
    for module in batch_norms(model):
        if module.momentum is not None:
            module.step_momentum = module.momentum  # type: ignore[assignment]  # a number, kept by copies of the module
            module.momentum = 1 - (1 - module.momentum) ** (1 / micro_batches)


@contextmanager
def once_per_step(model: nn.Module) -> Iterator[None]:
    """Meanwhile BatchNorm's statistics are updated once per step, not once per micro-batch."""
    norms = [(norm, norm.momentum) for norm in batch_norms(model) if hasattr(norm, "step_momentum")]
    try:
        for norm, _ in norms:
            norm.momentum = norm.step_momentum  # type: ignore[assignment]  # as above
        yield
    finally:
        for norm, momentum in norms:
            norm.momentum = momentum
