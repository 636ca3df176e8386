"""How one step is split, for `bsearch plan`: a document, and text for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from ....spaces.learning_rate import OptimizerSettings
from ....spaces.plan import BatchPlan
from ....spaces.readable import readable_bytes, seconds
from ...analysis.retime import KnownCost


def plan_document(plan: BatchPlan, rule: str, settings: OptimizerSettings | None, known: KnownCost | None) -> dict[str, Any]:
    """The JSON document of `bsearch plan --json`."""
    return {
        "effective_batch": plan.effective_batch,
        "accumulation": plan.accumulation,
        "micro_batch": plan.largest_micro_batch,
        "activation_checkpointing": plan.activation_checkpointing,
        "devices": _shares(plan),
        "optimizer": None if settings is None else {"rule": rule, **asdict(settings)},
        "time": None if known is None or known.step_s is None else asdict(known),
        "peak_bytes": None if known is None else known.peak_bytes,
    }


def _shares(plan: BatchPlan) -> list[dict[str, Any]]:
    return [
        {
            "device": device,
            "samples": samples,
            "micro_batches": list(plan.micro_batches(device)),
            "weights": [size / plan.effective_batch for size in plan.micro_batches(device)],
        }
        for device, samples in enumerate(plan.shares)
    ]


def plan_parts(
    plan: BatchPlan,
    requested: int | None,
    scaled: tuple[str, float | None, int, OptimizerSettings] | None,
    epochs: float,
    known: KnownCost | None,
) -> Iterator[str | Text | Table]:
    """What `bsearch plan` prints for people.

    Args:
        requested: the accumulation that was asked for; None where it was left to the plan.
        scaled: a rule, its reference rate and batch, and the scaled settings.
        epochs: of the training that `known` times.
    """
    raised = requested is not None and plan.accumulation > requested
    yield (
        f"{plan.effective_batch} samples per step = {plan.devices} device{'s' * (plan.devices > 1)} x {plan.accumulation} "
        f"micro-batch{'es' * (plan.accumulation > 1)} of at most {plan.largest_micro_batch} samples"
        + (f" (raised from {requested}: fewer do not fit)" if raised else "")
        + (f", with {plan.activation_checkpointing} activation checkpointing" * (plan.activation_checkpointing != "none"))
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("device", "samples", "micro-batches", "weights"):
        table.add_column(column, justify="right")
    for share in _shares(plan):
        weights = _runs([f"{weight:.4g}" for weight in share["weights"]])
        table.add_row(str(share["device"]), str(share["samples"]), _runs(share["micro_batches"]), weights)
    yield table
    if scaled is not None:
        rule, rate, at_batch, settings = scaled
        yield f"learning rate {settings.learning_rate:.6g} ({rule}, {rate:g} at {at_batch})"
        if settings.betas != OptimizerSettings(1.0).betas:
            yield f"betas {settings.betas}, eps {settings.eps:g}"
        if settings.weight_decay:
            yield f"weight decay {settings.weight_decay:.6g}"
    if known is not None and known.peak_bytes is not None:
        limit = "" if known.limit_bytes is None else f" of {readable_bytes(known.limit_bytes)}"
        yield f"predicted peak memory of a step: {readable_bytes(known.peak_bytes)}{limit} per device, on {known.device}"
    if known is not None and known.step_s is not None and known.train_s is not None:
        # The rough figure first, then the exact one, whose last step has only the samples that are left.
        steps = known.samples_budget / plan.effective_batch
        trust = "" if known.interval is None else f" (±{known.interval:.1%})"
        yield (
            f"training time: {epochs:g} x {known.training_set} samples / {plan.effective_batch} per step = {steps:.4g} steps x "
            f"{seconds(known.step_s)}; with a smaller last step: {seconds(known.train_s)}{trust} on {known.device}"
        )
    if plan.accumulation > 1 and known is not None and known.caches:
        yield Text(
            "All micro-batches are embedded first; the loss over the whole batch gives the embeddings' gradients, and each\n"
            "micro-batch runs again for its own (gradient caching), so the step equals one large batch.\n"
            "BatchNorm is the exception: it sees the micro-batch, not the step.",
            style="dim",
        )
    elif plan.accumulation > 1:
        yield Text(
            "Each micro-batch adds its summed loss over the whole step's denominator, so the step equals one large batch.\n"
            "BatchNorm is the exception: it sees the micro-batch, not the step.",
            style="dim",
        )


def _runs(values: Iterable[Any]) -> str:
    """Runs of equal values, with their lengths.

    >>> _runs([65, 64, 64])
    '65, 64 x 2'
    """
    runs: list[list[Any]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return ", ".join(f"{value} x {count}" if count > 1 else str(value) for value, count in runs)
