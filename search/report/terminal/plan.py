"""How a step of one batch is split, for `bsearch check --batch`: a document, and text for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from rich.text import Text

from ....spaces.domain import bounds, values_of
from ....spaces.errors import InfeasiblePlanError, StudyFileError
from ....spaces.laws.device import DeviceProfile
from ....spaces.plan import BatchPlan
from ....spaces.planning import longest_epochs, optimizer_settings, plan_limits, planned
from ....spaces.readable import readable_bytes, seconds
from ....spaces.study.spec import StudySpec
from .fitted import Fitted


def batch_document(spec: StudySpec, profile: DeviceProfile, batch: int, devices: int) -> dict[str, Any]:
    """How a study trains one effective batch on so many devices: shares, micro-batches, weights, rates, time and memory.

    Raises:
        StudyFileError: the batch is larger than the training set.
        InfeasiblePlanError: no plan.
    """
    samples = profile.training_set
    if samples is not None and batch > samples:
        raise StudyFileError(f"--batch: expected at most the {samples} training samples, got {batch}")
    requested = None if spec.space.accumulation is None else int(bounds(spec.space.accumulation)[0])
    plan = planned(spec, profile, batch, devices, requested)
    used = profile.under(plan)
    law, memory = used.step_time(devices), used.memory
    limits = plan_limits(spec, used, devices, batch)
    held_bytes = 0 if memory is None else memory.held_bytes * batch + used.extra_bytes(devices)
    return {
        "effective_batch": batch,
        "accumulation": plan.accumulation,
        "micro_batch": plan.largest_micro_batch,
        "activation_checkpointing": plan.activation_checkpointing,
        "devices": _shares(plan),
        "learning_rates": _rates(spec, batch),
        "device": profile.device,
        "training_set": samples,
        "step_s": None if law is None else law.step_s(plan),
        "epoch_s": None if law is None or samples is None else law.train_s(plan, samples, **limits),
        "interval": None if law is None else law.interval,
        "peak_bytes": None
        if memory is None
        else round(memory.peak_bytes(plan.largest_micro_batch) + held_bytes),
        "limit_bytes": used.limit_bytes,
        "caches_embeddings": used.embedding == "cached",
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


def _rates(spec: StudySpec, batch: int) -> list[dict[str, Any]]:
    """The lowest and highest learning rate of the space at a batch, by rule; rules that are undefined there are left out."""
    ends = {name: bounds(domain) for name, domain in spec.domains().items() if name in _OF_RATES}
    found = []
    for rule in values_of(spec.space.rule):
        corners = [
            {"weight_decay": 0.0, "rule": rule, **dict(zip(ends, corner, strict=True))}
            for corner in product(*ends.values())
        ]
        try:
            rates = [
                optimizer_settings(spec, batch, longest_epochs(spec), corner).learning_rate
                for corner in corners
            ]
        except InfeasiblePlanError:
            continue
        found.append({"rule": rule, "low": min(rates), "high": max(rates)})
    return found


_OF_RATES = frozenset({"reference_rate", "weight_decay", "exponent", "noise_batch"})


def batch_parts(document: Mapping[str, Any]) -> Iterator[str | Text | Fitted]:
    """The same for people."""
    batch = document["effective_batch"]
    accumulation = document["accumulation"]
    count = len(document["devices"])
    recomputed = document["activation_checkpointing"]
    yield (
        f"{batch} samples per step = {count} device{'s' * (count > 1)} x {accumulation} "
        f"micro-batch{'es' * (accumulation > 1)} of at most {document['micro_batch']} samples"
        + f", with {recomputed} activation checkpointing"
        * (recomputed != "none")
    )
    rows = [
        (
            str(share["device"]),
            str(share["samples"]),
            _runs(share["micro_batches"]),
            _runs([f"{each:.4g}" for each in share["weights"]]),
        )
        for share in document["devices"]
    ]
    yield Fitted.of_rows(("device", "samples", "micro-batches", "weights"), rows)
    for rate in document["learning_rates"]:
        to = "" if rate["low"] == rate["high"] else f" to {rate['high']:.6g}"
        yield f"learning rate {rate['low']:.6g}{to} ({rate['rule']})"
    if document["peak_bytes"] is not None:
        limit = "" if document["limit_bytes"] is None else f" of {readable_bytes(document['limit_bytes'])}"
        peak = readable_bytes(document["peak_bytes"])
        yield f"predicted peak memory of a step: {peak}{limit} per device, on {document['device']}"
    if document["epoch_s"] is not None:
        steps = document["training_set"] / batch
        trust = "" if document["interval"] is None else f" (±{document['interval']:.1%})"
        yield (
            f"training time of an epoch: {document['training_set']} samples / {batch} per step = {steps:.4g} steps x "
            f"{seconds(document['step_s'])}; with a smaller last step: {seconds(document['epoch_s'])}{trust} on "
            f"{document['device']}"
        )
    if accumulation > 1:
        summed = "Each micro-batch adds its summed loss over the whole step's denominator, so the step equals one large batch."
        cached = (
            "All micro-batches are embedded first; the loss over the whole batch gives the embeddings' gradients, and each\n"
            "micro-batch runs again for its own (gradient caching), so the step equals one large batch."
        )
        yield Text(cached if document["caches_embeddings"] else summed, style="dim")
        yield Text("BatchNorm is the exception: it sees the micro-batch, not the step.", style="dim")


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
