"""Stages about memory: predictions against measurements, the largest micro-batch, and errors on purpose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ....objectives.machine.device_memory import (
    EXPANDABLE_SEGMENTS,
    allocator_segments,
    is_out_of_memory,
    release_memory,
)
from ....objectives.profiling.memory.live_bytes import LiveBytes
from ....objectives.profiling.memory.tracing import MemoryProbe
from ....objectives.profiling.task_profile import profile_task
from ....objectives.task import Task
from ....objectives.training import TrainingRun
from ....spaces.laws.device import HEADROOM, DeviceProfile, ProfileRequest
from ....spaces.plan import BatchPlan
from ....spaces.readable import readable_bytes
from ....spaces.study.devices import Memory
from ....spaces.trial import TrialSetup
from ..claims import Claim, Data, Fact, worst
from ..stage import Found, Stage
from .tasks import Images, models, setup_of, small_model, task_of

_MIB = 1 << 20


def predictions(stage: Stage) -> Iterator[Found]:
    """Peaks of training steps traced without running anything, against the same steps on real tensors."""
    precisions = ("fp32",) if stage.quick else ("fp32", "bf16")
    every = models(stage.device)
    # All models first, in precisions that alternate, so that a stage that ends early has seen most models and each precision.
    for turn, (place, (name, (reference, parameters), sizes)) in product(
        range(len(precisions)), enumerate(every)
    ):
        precision = precisions[(place + turn) % len(precisions)]
        if stage.expired:
            yield Fact(f"{name}, {precision}", "not measured: out of time")
            continue
        release_memory(stage.device)
        setup = setup_of(BatchPlan(sizes[0]), stage.device, parameters, precision=precision)
        found, untraced = peaks_of(task_of(reference), setup, sizes)
        values = {
            "device": stage.device,
            "expandable": EXPANDABLE_SEGMENTS,
            "sizes": found,
            "untraced": untraced,
        }
        yield Data("peaks", f"{name}, {precision}", values)


def peaks_of(task: Task, setup: TrialSetup, sizes: Sequence[int]) -> tuple[list[tuple[int, ...]], str]:
    """Traced and measured live and total bytes of each micro-batch that fits, and why a step could not be traced."""
    probe = MemoryProbe(task, replace(setup, smallest_micro_batch=sizes[0]))
    found: list[tuple[int, ...]] = []
    for size in sizes:
        predicted = probe.train_peak(size)
        if probe.note:
            break
        try:
            measured = probe.counted("train", size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release_memory(setup.device)
            continue
        found.append((size, predicted.live, predicted.total, measured.live, measured.total))
    return found, probe.note


def largest(stage: Stage) -> Iterator[Found]:
    """The largest micro-batch that a profile finds under a limit: it trains, and not much more would."""
    # A convolutional net and a transformer, the lower limit of each first.
    gpu_limits = ((0, 2048), (4, 4096), (0, 6144), (4, 8192))
    yield from largest_under(
        stage, gpu_limits if stage.device == "gpu" else ((0, 48), (4, 48), (0, 96), (4, 96))
    )


def largest_under(stage: Stage, limits: Sequence[tuple[int, int]]) -> Iterator[Found]:
    """The same under limits of MiB, each of a model by its place."""
    shortfalls, failures = [], []
    chosen = models(stage.device)
    clipped = dict.fromkeys((place, _at_most(_MIB * mebibytes, stage.device)) for place, mebibytes in limits)
    for place, limit in clipped:
        name, (reference, parameters), _ = chosen[place]
        if stage.quick and place:
            continue
        if stage.expired:
            yield Fact(f"{name} under {readable_bytes(limit)}", "not measured: out of time")
            continue
        setup = setup_of(
            BatchPlan(1), stage.device, parameters, **({"precision": "bf16"} if stage.device == "gpu" else {})
        )
        profile = _profile(reference, setup, limit)
        found = profile.largest_micro_batch
        if found is None:
            yield Fact(f"{name} under {readable_bytes(limit)}", "not measured: one sample does not fit")
            continue
        case = f"{name} under {readable_bytes(limit)}: {found}"
        segments: list[Any] = []
        failures.append(
            (case, 0.0 if _runs(reference, setup, found, limit, steps=20, segments=segments) else 1.0)
        )
        if segments:
            yield Data("segments", case, {"segments": segments})
        # Beyond it, under what the plan may use: the true maximum, by bisection.
        usable = int(limit * (1 - HEADROOM))
        highest = profile.training_set or found
        fits, over = found, min(2 * found, highest) + 1
        while over - fits > max(1, found // 50) and not stage.expired:
            middle = (fits + over) // 2
            fits, over = (
                (middle, over) if _runs(reference, setup, middle, usable, steps=4) else (fits, middle)
            )
        if not stage.expired:
            shortfalls.append((f"{case} of {fits}", max(fits - found - 1, 0) / fits))
    yield from worst("largest micro-batches that ran out of memory in 20 steps", 0, failures, unit="")
    yield from worst(
        "shortfall of more than a sample against the largest micro-batch that runs", 0.05, shortfalls
    )


def _at_most(limit: int, device: str) -> int:
    """A limit that other programs on the GPU leave room for."""
    return min(limit, int(0.9 * torch.cuda.mem_get_info()[0])) if device == "gpu" else limit


class HiddenWorkspace(Images):
    """A model with memory that no trace can see, `hidden` times as much as a sample's activations, until its backward pass."""

    def model(self, setup: TrialSetup) -> nn.Module:
        model = super().model(setup)
        # Thirty times the pixels: about what a convolutional net keeps of a sample.
        factor, floats = float(setup.parameters["hidden"]), 90 * int(setup.parameters["image_size"]) ** 2

        def take(module: nn.Module, inputs: tuple[Tensor, ...], outcome: Tensor) -> None:
            first = inputs[0]
            kept.clear()  # of a pass that ended in an error
            if isinstance(first, FakeTensor):
                return
            kept.append(torch.empty(int(factor * floats * len(first)), device=first.device))
            # It lives until the backward pass of the same micro-batch begins.
            if outcome.requires_grad:
                outcome.register_hook(lambda gradient: kept.clear())  # type: ignore[no-untyped-call]
            else:
                kept.clear()

        kept: list[Tensor] = []
        model.register_forward_hook(take)
        return model


def out_of_memory(stage: Stage) -> Iterator[Found]:
    """Memory that the law does not know of: how many real runs lead to a plan that runs, for the same batch."""
    gpu = stage.device == "gpu"
    _, parameters = small_model(stage.device)
    reference, limit = f"{__name__}:HiddenWorkspace", _at_most(1 << 30, "gpu") if gpu else 16 * _MIB
    runs = []
    for hidden in (0.5,) if stage.quick else (0.5, 1.5, 0.25):
        if stage.expired:
            yield Fact(f"{hidden:g} of the activations hidden", "not measured: out of time")
            continue
        setup = setup_of(BatchPlan(1), stage.device, parameters | {"hidden": hidden})
        counted: list[int] = []
        profile = _profile(reference, setup, limit, counted)
        found = profile.largest_micro_batch or 0
        # The smallest size is run on every device, twice on a CPU: it tells the fixed part and the time.
        needed = sum(size > profile.smallest_micro_batch for size in counted)
        case = f"{hidden:g} of the activations hidden: {found} found"
        runs.append(
            (case, float(needed) if found and _runs(reference, setup, found, limit, steps=4) else math.inf)
        )
    yield from worst("real runs to a plan that fits, hidden workspace", 4, runs, unit="runs")
    # A neighbour takes 30 % of the device after the profile was made.
    setup = setup_of(BatchPlan(1), stage.device, parameters | {"hidden": 0.0})
    profile = _profile(reference, setup, limit)
    left, tries, cap = int(0.7 * limit), 0, profile.largest_micro_batch
    while cap and tries < 8:
        tries += 1
        if _runs(reference, setup, cap, left, steps=4):
            break
        profile = profile.after_out_of_memory(cap)
        cap = profile.largest_micro_batch
    text = "runs until training goes on after a neighbour took 30 %"
    yield Claim(text, 4, float(tries), unit="runs", note=f"micro-batch {cap}, the same batch")


def _profile(
    reference: str, setup: TrialSetup, limit: int, counted: list[int] | None = None
) -> DeviceProfile:
    """The memory profile under a limit in bytes; `counted` collects the sizes that ran on real tensors."""
    request = ProfileRequest(setup, Memory(limit=limit), highest=512)
    honest = MemoryProbe.counted

    def noted(self: MemoryProbe, kind: Any, size: int, limit_bytes: int | None = None) -> Any:
        if counted is not None:
            counted.append(size)
        return honest(self, kind, size, limit_bytes)

    MemoryProbe.counted = noted  # type: ignore[method-assign]
    try:
        return profile_task(reference, request)
    finally:
        MemoryProbe.counted = honest  # type: ignore[method-assign]
        release_memory(setup.device)


def _runs(
    reference: str,
    setup: TrialSetup,
    micro_batch: int,
    limit: int,
    *,
    steps: int,
    segments: list[Any] | None = None,
) -> bool:
    """Whether steps of two micro-batches of this size train within the limit; `segments` collects the allocator's."""
    plan = BatchPlan(2 * micro_batch, 2)
    run = TrainingRun(task_of(reference), replace(setup, plan=plan, memory_limit_bytes=limit))
    loader = run.loader([plan] * steps)
    run.model.train()
    counter = LiveBytes(limit if setup.device == "cpu" else None)
    try:
        with counter.counting(run.model, run.optimizer) if setup.device == "cpu" else nullcontext():
            for _ in range(steps):
                run.step(run.micro_batches(plan, loader), plan.effective_batch)
        if setup.device == "gpu":
            torch.cuda.synchronize()
            if segments is not None:
                segments += allocator_segments()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        del run, loader
        release_memory(setup.device)
        if setup.device == "gpu":
            torch.cuda.set_per_process_memory_fraction(1.0)
    return True
