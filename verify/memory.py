"""Stages about memory: predictions against measurements, the largest micro-batch, and errors on purpose."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..objectives.machine.device_memory import EXPANDABLE_SEGMENTS, is_out_of_memory, release_memory
from ..objectives.profiling.as_cuda import backward
from ..objectives.profiling.live_bytes import LiveBytes
from ..objectives.profiling.memory import MemoryProbe
from ..objectives.profiling.probe import profile_task
from ..objectives.training import TrainingRun
from ..spaces.laws.device import DeviceProfile, ProfileRequest
from ..spaces.plan import BatchPlan
from ..spaces.readable import readable_bytes
from ..spaces.study.devices import Memory
from ..spaces.trial import TrialSetup
from .claims import Claim, Fact, worst
from .stage import Found, Stage
from .tasks import Images, models, setup_of, small_model, task_of

_MIB = 1 << 20
# The allocator reserves large blocks in pages of 20 MiB: two numbers of pages may differ by one each.
_PAGES = 40 * _MIB
_HEADROOM = 0.05


def predictions(stage: Stage) -> Iterator[Found]:
    """Peaks of training steps traced without running anything, against the same steps on real tensors."""
    live, reserved, uncalibrated, untraced, constants = (list[tuple[str, float]]() for _ in range(5))
    precisions = ("fp32",) if stage.quick else ("fp32", "bf16")
    every = models(stage.device)
    # All models first, in precisions that alternate, so that a stage that ends early has seen most models and each precision.
    for turn, (place, (name, (reference, parameters), sizes)) in product(range(len(precisions)), enumerate(every)):
        precision = precisions[(place + turn) % len(precisions)]
        if stage.expired:
            yield Fact(f"{name}, {precision}", "not measured: out of time")
            continue
        release_memory(stage.device)
        setup = setup_of(BatchPlan(sizes[0]), stage.device, parameters, precision=precision)
        probe = MemoryProbe(task_of(reference), replace(setup, smallest_micro_batch=sizes[0]))
        fixed = fixed_live = 0
        for size in sizes:
            predicted = probe.train_peak(size)
            untraced.append((f"{name}, {precision}, {size}", float(bool(probe.note))))
            if probe.note:
                yield Fact(f"{name}, {precision}", f"not traced: {probe.note}")
                break
            try:
                measured = probe.counted("train", size)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                release_memory(stage.device)
                continue
            case = f"{name}, {precision}, {size}"
            if size == sizes[0] and stage.device == "gpu":
                # As a study does: the smallest size tells what libraries take for themselves.
                fixed, fixed_live = measured.total - predicted.total, measured.live - predicted.live
                constants.append((f"{name}, {precision}", abs(fixed) / _MIB))
                yield Fact(f"beside the traced tensors: {name}, {precision}", f"{fixed / _MIB:.1f} MiB")
                continue
            live.append((case, abs((predicted.live + fixed_live) / measured.live - 1)))
            if stage.device == "gpu":
                reserved.append((case, max(abs(predicted.total + fixed - measured.total) - _PAGES, 0) / measured.total))
                uncalibrated.append((case, abs(predicted.total / measured.total - 1)))
                yield Fact(
                    case,
                    f"live {predicted.live / _MIB:.0f} MiB traced, {measured.live / _MIB:.0f} measured; "
                    f"reserved {predicted.total / _MIB:.0f}, {measured.total / _MIB:.0f}",
                )
    after = " after one run of the smallest micro-batch" if stage.device == "gpu" else ""
    # Without segments that grow, a library's workspace may need one of its own, where the replay has room between blocks.
    bound, allocator = (0.03, "") if EXPANDABLE_SEGMENTS else (0.08, ", default allocator")
    yield from worst("steps that could not be traced", 0, untraced, unit="")
    yield from worst(f"error of the predicted peak, live bytes{after}", 0.02, live)
    text = f"error of the predicted peak beyond two of the allocator's pages, reserved bytes{after}{allocator}"
    yield from worst(text, bound, reserved)
    yield from worst("bytes that the smallest micro-batch takes beside its prediction", 256, constants, unit="MiB")
    for claim in worst("", 0.0, uncalibrated):
        yield Fact("reserved bytes before anything was measured", f"off by at most {claim.measured_text} ({claim.note})")


def graph(stage: Stage) -> Iterator[Found]:
    """The walk of the autograd graph that a trace as CUDA uses, against the engine, on real tensors of this machine's CPU."""
    gradients, peaks = [], []
    for name, (reference, parameters), sizes in models("cpu"):
        if stage.expired:
            break
        run = TrainingRun(task_of(reference), setup_of(BatchPlan(sizes[1]), "cpu", parameters))
        batch = run.train_fetcher.fetch(run.stream.take(0, sizes[1]))

        def walked(walk: bool, run: TrainingRun = run, batch: Any = batch) -> tuple[list[Tensor | None], int]:
            model = copy.deepcopy(run.model)
            torch.manual_seed(0)
            with LiveBytes().counting(model, torch.optim.SGD(model.parameters())) as counter:
                for _ in range(2):
                    loss = run.task.loss(model, batch, run.setup).total
                    if walk:
                        backward(loss, torch.ones_like(loss))
                    else:
                        loss.backward()  # type: ignore[no-untyped-call]
                    del loss
            return [parameter.grad for parameter in model.parameters()], counter.peak_bytes

        (expected, peak), (found, found_peak) = walked(False), walked(True)
        same = all(
            (one is None) == (other is None) and (one is None or other is None or torch.equal(one, other))
            for one, other in zip(expected, found, strict=True)
        )
        gradients.append((name, 0.0 if same else 1.0))
        peaks.append((name, abs(found_peak / peak - 1)))
    yield from worst("models whose gradients are not bitwise equal", 0, gradients, unit="")
    yield from worst("error of the walk's peak, live bytes", 0.001, peaks)


def largest(stage: Stage) -> Iterator[Found]:
    """The largest micro-batch that a profile finds under a limit: it trains, and not much more would."""
    shortfalls, failures = [], []
    chosen, gpu = models(stage.device), stage.device == "gpu"
    # A convolutional net and a transformer, the lower limit of each first.
    limits = ((0, 2048), (4, 4096), (0, 6144), (4, 8192)) if gpu else ((0, 48), (4, 48), (0, 96), (4, 96))
    for place, mebibytes in limits:
        (name, (reference, parameters), _), limit = chosen[place], _MIB * mebibytes
        if stage.quick and place:
            continue
        if stage.expired:
            yield Fact(f"{name} under {readable_bytes(limit)}", "not measured: out of time")
            continue
        setup = setup_of(BatchPlan(1), stage.device, parameters, **({"precision": "bf16"} if stage.device == "gpu" else {}))
        profile = _profile(reference, setup, limit)
        assert profile.largest_micro_batch is not None
        found = profile.largest_micro_batch
        case = f"{name} under {readable_bytes(limit)}: {found}"
        failures.append((case, 0.0 if _runs(reference, setup, found, limit, steps=20) else 1.0))
        # Beyond it, under what the plan may use: the true maximum, by bisection.
        usable = int(limit * (1 - _HEADROOM))
        highest = profile.training_set or found
        fits, over = found, min(2 * found, highest) + 1
        while over - fits > max(1, found // 50) and not stage.expired:
            middle = (fits + over) // 2
            fits, over = (middle, over) if _runs(reference, setup, middle, usable, steps=4) else (fits, middle)
        if not stage.expired:
            shortfalls.append((f"{case} of {fits}", max(fits - found - 1, 0) / fits))
    yield from worst("largest micro-batches that ran out of memory in 20 steps", 0, failures, unit="")
    yield from worst("shortfall of more than a sample against the largest micro-batch that runs", 0.05, shortfalls)


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
    reference, limit = f"{__name__}:HiddenWorkspace", (1 << 30) if gpu else 16 * _MIB
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
        runs.append((case, float(needed) if found and _runs(reference, setup, found, limit, steps=4) else math.inf))
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


def _profile(reference: str, setup: TrialSetup, limit: int, counted: list[int] | None = None) -> DeviceProfile:
    """The memory profile under a limit in bytes; `counted` collects the sizes that ran on real tensors."""
    request = ProfileRequest(setup, Memory(limit=limit, headroom=_HEADROOM), highest=512)
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


def _runs(reference: str, setup: TrialSetup, micro_batch: int, limit: int, *, steps: int) -> bool:
    """Whether steps of two micro-batches of this size train within the limit."""
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
