"""A task's memory as rows by micro-batch: here beside what was measured, or on a card that is not here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...spaces.errors import Fault, StudyFileError, TaskError
from ...spaces.laws.cards import Card
from ...spaces.laws.device import DeviceProfile, ProfileRequest
from ...spaces.plan import BatchPlan
from ...spaces.study.devices import Memory
from ...spaces.trial import TrialSetup
from ..adapters.loop_task import LoopTask, uses_adapter
from ..loading import load_task
from ..machine.device import usable_bytes
from ..task import Task
from .first_step import user_code_errors
from .memory.limit import smallest_setup, with_each_kind, with_possible_checkpointing
from .memory.tracing import MemoryProbe, cached_law, does_not_fit, evaluation_batch, memory_law
from .task_profile import profile_task


def profile_like(
    reference: str, request: ProfileRequest, card: Card
) -> tuple[DeviceProfile, list[MemoryRow]]:
    """The memory of a task on a card that is not here, traced as CUDA would run it; nothing is measured there.

    Raises:
        TaskError, ProfilingError: the code does not work, is a loop of its own, or cannot be traced.
        StudyFileError: not even the smallest micro-batch fits.
    """
    training = request.setup.training
    # As many bytes, where a CPU, or a loop on it, does not have the precision.
    alike = {"tf32": "fp32"} if isinstance(load_task(reference), Task) else {"tf32": "fp32", "fp16": "bf16"}
    training = training.model_copy(update={"precision": alike.get(training.precision, training.precision)})
    setup = replace(request.setup, device="cpu", training=training)
    here = replace(request, setup=setup, memory=Memory(), timing_s=0.0, traces=False, others=())
    profile = profile_task(reference, here)
    if profile.note:
        raise TaskError(f"task {reference}: {profile.note}")
    task = _traceable(reference, here.setup)
    device_bytes = usable_bytes(card.memory_bytes, card.usable_bytes, request.share)
    limit = request.memory.limit_bytes(device_bytes, "gpu")
    profile = replace(profile, kind="gpu", device=card.name, device_bytes=device_bytes, limit_bytes=limit)
    usable = profile.usable_bytes(max(request.devices))
    smallest = profile.smallest_micro_batch
    highest = max(request.largest_share(profile.training_set, min(request.devices)), smallest)
    rows: list[MemoryRow] = []

    def with_law(variant: DeviceProfile, first: DeviceProfile | None) -> DeviceProfile:
        probe = MemoryProbe(
            task,
            smallest_setup(here.setup, variant),
            usable,
            like_gpu=True,
            ranks=here.parameter_shards,
            embedding=variant.embedding,
        )
        law = memory_law(
            probe, usable, smallest, highest if variant.embedding != "cached" else max(highest // 2, smallest)
        )
        assert law is not None
        largest = law.largest_micro_batch(usable)
        if largest is None:
            fault = does_not_fit(probe.train_peak(smallest), usable, smallest)
            raise StudyFileError(Fault("memory.limit", fault))
        sizes = _spread(smallest, largest)
        if first is not None and first.memory is not None:
            sizes = sorted({smallest, largest})
            most, peaks = first.evaluation_batch, dict(first.memory.evaluation_points)
        else:
            most, peaks = (
                (None, {}) if isinstance(task, LoopTask) else evaluation_batch(probe, usable, law, largest)
            )
        if variant.embedding == "cached":
            law, largest_batch = cached_law(probe, law, usable, 2 * smallest, request.highest)
            variant = replace(variant, largest_batch=largest_batch)
        law = replace(law, evaluation_points=tuple(sorted(peaks.items())), note=probe.note)
        rows.extend(MemoryRow(size, probe.train_peak(size).total, None, variant.recomputed) for size in sizes)
        return replace(variant, largest_micro_batch=largest, evaluation_batch=most, memory=law)

    with user_code_errors(reference, "tracing it as on a GPU"):
        request = with_possible_checkpointing(task, task.model(here.setup), request)
        profile = with_each_kind(task, profile, request, with_law)
    return profile, rows


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Peak bytes of a training step at one micro-batch; `measured` is None where the time limit was reached."""

    micro_batch: int
    predicted: int
    measured: int | None
    recomputed: str = "none"


def memory_rows(
    reference: str, request: ProfileRequest, profile: DeviceProfile, limit_s: float
) -> list[MemoryRow]:
    """Predicted and measured peaks at a few sizes up to the largest that fits, smallest first.

    Raises:
        TaskError: a loop of its own, whose memory cannot be traced.
    """
    task = _traceable(reference, request.setup)
    if profile.memory is None:
        raise TaskError(f"task {reference}: {profile.note or 'its memory is not known'}")
    return [
        row
        for variant in profile.each
        for row in _memory_rows(task, request, variant, limit_s / len(profile.each))
    ]


def _memory_rows(
    task: Task, request: ProfileRequest, profile: DeviceProfile, limit_s: float
) -> Iterator[MemoryRow]:
    """The rows of the profile's own activation checkpointing."""
    assert profile.memory is not None
    smallest = profile.smallest_micro_batch
    largest = profile.largest_micro_batch or profile.memory.points[-1][0]
    probe = MemoryProbe(
        task,
        smallest_setup(request.setup, profile),
        ranks=request.parameter_shards,
        embedding=profile.embedding,
    )
    sizes = _spread(smallest, largest)
    last_s, started = 0.0, time.perf_counter()
    for before, size in zip([smallest, *sizes], sizes, strict=False):
        predicted, measured = probe.train_peak(size).total, None
        # Time is assumed proportional to size; a measurement that would exceed the limit is skipped.
        if probe.ranks == 1 and time.perf_counter() - started + last_s * size / before <= limit_s:
            size_started = time.perf_counter()
            measured = probe.counted("train", size).total
            last_s = time.perf_counter() - size_started
        yield MemoryRow(size, predicted, measured, profile.recomputed)


def _traceable(reference: str, setup: TrialSetup) -> Task:
    task = load_task(reference)
    if isinstance(task, Task):
        return task
    if not uses_adapter(task):
        raise TaskError(
            f"task {reference}: expected a Task, or a training function that calls train_with, got one with its own loop, "
            "whose memory can only be measured while it runs"
        )
    return LoopTask(task).prepared(replace(setup, plan=BatchPlan(1)))


def _spread(smallest: int, largest: int) -> list[int]:
    """At most seven sizes between two, both included, in equal ratios."""
    return sorted({round(smallest * (largest / smallest) ** (part / 6)) for part in range(7)})
