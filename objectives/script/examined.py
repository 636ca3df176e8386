"""What a script counts for each batch of its loader, which a step in parts would give it too often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...spaces.laws.examination import Finding
from ...spaces.plan import BatchPlan
from ..examination.causes import Cause, parts_cause
from ..machine.torch_settings import seed_everything

if TYPE_CHECKING:
    from ..profiling.loop_session import ExaminedLoop

# Steps of a short training, passes in it, and the relative difference that is none of rounding.
_STEPS, _PASSES, _SAME = 6, 3, 1e-4

# For what holds of whole batches alone.
_WHOLE = "write splits=False, and batches come whole, up to the largest that fits."


def script_cause(layer: str) -> Cause:
    """The cause of a difference between a script's step and its parts."""
    cause = parts_cause(layer)
    if layer:
        return cause
    return Cause(
        cause.kind,
        "expected parts whose gradients add up to that of the whole step, got parts that do not. If the loss is a sum over the "
        "batch's samples, write loss='sum'. A loss that compares samples, divides by what it counts in a batch, or is "
        f"back-propagated after another optimizer's step, cannot be split: {_WHOLE}",
    )


def script_findings(parts: ExaminedLoop, where: str) -> Iterator[Finding]:
    """Whether it sets its rates by counting batches; that it moves weights once a batch is seen in every step."""
    size = parts.setup.smallest_micro_batch
    whole, split = (list(_rates(parts, size, accumulation)) for accumulation in (1, 2))
    if len(whole) != len(split) or not torch.allclose(torch.tensor(whole), torch.tensor(split), rtol=_SAME, atol=0.0):
        message = (
            "expected rates that depend on the step, got others where its batch comes in two parts: the script sets them "
            f"itself, by counting batches. Use a scheduler of torch's, whose step() waits for the last part; or {_WHOLE}"
        )
        yield Finding("plan", where, message)


def _rates(parts: ExaminedLoop, size: int, accumulation: int) -> Iterator[float]:
    """The rates of all groups in each step of a short training."""
    from ..loop import unserved

    batch = 2 * size
    short = replace(
        parts.setup,
        plan=BatchPlan(batch, accumulation),
        largest_micro_batch=size if accumulation > 1 else None,
        samples_budget=_STEPS * batch,
        epochs=_PASSES,
        checkpoint=None,
        model_folder=None,
    )
    rates: list[float] = []

    def note(optimizer: Optimizer, *_: Any) -> None:
        rates.extend(float(group["lr"]) for group in optimizer.param_groups)

    seed_everything(short.seed)
    handle = register_optimizer_step_pre_hook(note)
    try:
        with unserved():
            for _ in parts.function(short):
                pass
    finally:
        handle.remove()
    yield from rates
