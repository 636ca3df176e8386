"""What fits in a device's memory: the least recomputation that does, and the largest micro-batch, confirmed on real tensors."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import product
from typing import Any

from torch import nn

from ....spaces.errors import Fault, StudyFileError
from ....spaces.laws.device import DeviceProfile, ProfileRequest
from ....spaces.laws.memory import MemoryLaw
from ....spaces.plan import BatchPlan, Embedding
from ....spaces.trial import EVALUATION_BATCH, TrialSetup
from ...adapters.loop_task import LoopTask
from ...data.batches import in_order
from ...machine import accelerator
from ...machine.device_memory import is_out_of_memory, release_memory
from ...task import Task, TrainFunction, embeds
from ..loop_probes import LoopMemory
from .tracing import MemoryProbe, Probe, cached_law, does_not_fit, evaluation_batch, memory_law

# Real runs that may look for the largest micro-batch.
_MOST_RUNS = 4


def with_memory(
    training: Task | TrainFunction, profile: DeviceProfile, request: ProfileRequest
) -> DeviceProfile:
    """The profile with its memory law and the batches that follow from it, if the study or the device sets a limit.

    Raises:
        StudyFileError: not even the smallest micro-batch fits.
    """
    limit = request.memory.limit_bytes(profile.device_bytes, profile.kind)
    if limit is None and not request.traces:
        profile = replace(profile, activation_checkpointing=request.memory.activation_checkpointing[0])
        least, *more = (replace(profile, embedding=embedding) for embedding in _embeddings(training))
        # Without a limit whole batches fit, unless the user says otherwise.
        return replace(
            least, alternatives=tuple(more) if request.memory.largest_micro_batch is not None else ()
        )
    profile = replace(profile, limit_bytes=limit)
    return with_each_kind(
        training, profile, request, lambda *each: _with_memory_law(training, request, limit, *each)
    )


def _kind_of(profile: DeviceProfile) -> str:
    """What a profile recomputes, as a noun."""
    return profile.recomputed if profile.embedding else f"{profile.recomputed} activation checkpointing"


def _embeddings(training: Task | TrainFunction) -> tuple[Embedding, ...]:
    """The ways to compute the loss, from the least recomputation to the most."""
    return ("whole", "cached") if isinstance(training, Task) and embeds(training) else ("",)


def with_each_kind(
    training: Task | TrainFunction,
    profile: DeviceProfile,
    request: ProfileRequest,
    with_law: Callable[[DeviceProfile, DeviceProfile | None], DeviceProfile],
) -> DeviceProfile:
    """The profile with the least recomputation that fits; where it limits micro-batches, more as alternatives.

    Args:
        with_law: adds the memory law of what the profile recomputes, given the first one that fits.

    Raises:
        StudyFileError: not even the smallest micro-batch fits.
    """
    found: list[DeviceProfile] = []
    does_not_fit: StudyFileError | None = None
    for mode, embedding in product(request.memory.activation_checkpointing, _embeddings(training)):
        kind = replace(profile, activation_checkpointing=mode, embedding=embedding)
        try:
            found.append(with_law(kind, found[0] if found else None))
        except StudyFileError as error:
            does_not_fit = error
            continue
        except Exception as error:
            if not found:
                raise
            # The study runs without: this kind does not suit the model.
            law = found[0].memory
            reason = f"{_kind_of(kind)} failed: {type(error).__name__}: {error}".splitlines()[0][:300]
            if law is not None:
                found[0] = replace(
                    found[0], memory=replace(law, note="; ".join(filter(None, (reason, law.note))))
                )
            continue
        caps = {devices: found[0].cap_on(devices, None) for devices in request.devices}
        if all(
            cap is None or cap >= request.largest_share(profile.training_set, devices)
            for devices, cap in caps.items()
        ):
            break  # every micro-batch fits without more
    if not found:
        assert does_not_fit is not None
        raise does_not_fit
    first, *others = found
    return replace(first, alternatives=tuple(others))


def _with_memory_law(
    training: Task | TrainFunction,
    request: ProfileRequest,
    limit: int | None,
    profile: DeviceProfile,
    first: DeviceProfile | None,
) -> DeviceProfile:
    """The profile with the memory law of its activation checkpointing.

    Args:
        first: the one whose evaluation, which keeps no activations, is known.

    Raises:
        StudyFileError: not even the smallest micro-batch fits.
    """
    # Several devices have less room for a step.
    usable = profile.usable_bytes(1)
    least = min(profile.usable_bytes(devices) for devices in request.devices)
    smallest = profile.smallest_micro_batch
    highest = max(request.largest_share(profile.training_set, min(request.devices)), smallest)
    setup = smallest_setup(request.setup, profile)
    if profile.embedding == "cached":
        highest = max(highest // 2, smallest)
    with closing(_probe_of(training, setup, usable, request.parameter_shards, profile.embedding)) as probe:
        law = memory_law(probe, usable, smallest, highest)
        if law is None:
            raise StudyFileError(Fault("memory.limit", does_not_fit(None, usable, smallest)))
        largest = law.largest_micro_batch(usable) or smallest
        if probe.ranks > 1:
            law = replace(
                law, note=law.note or f"of one of {probe.ranks} devices; not confirmed on real tensors"
            )
        elif limit is not None:
            try:
                law, largest = verified(law, probe, limit, usable, largest)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                fault = Fault("memory.limit", does_not_fit(probe.train_peak(smallest), usable, smallest))
                raise StudyFileError(fault) from None
        if law.largest_micro_batch(least) is None:
            raise StudyFileError(
                Fault("memory.limit", does_not_fit(probe.train_peak(smallest), least, smallest))
            )
        if profile.embedding == "cached":
            law, largest_batch = cached_law(probe, law, least, 2 * smallest, request.highest)
            profile = replace(profile, largest_batch=largest_batch)
        profile = replace(profile, largest_micro_batch=largest)
        peaks: dict[int, int] = {}
        if first is not None and first.memory is not None:
            peaks = dict(first.memory.evaluation_points)
            profile = replace(profile, evaluation_batch=first.evaluation_batch)
        elif isinstance(training, Task) and not isinstance(
            training, LoopTask
        ):  # which evaluate in their own way
            most, peaks = evaluation_batch(probe, least, law, largest)
            # Inexact scores may depend on the evaluation batch, so it is not chosen by timing.
            by_time = probe.ranks == 1 and not request.setup.training.accept_inexact
            fastest = (
                fastest_evaluation_batch(probe, most, largest) if by_time else min(most, EVALUATION_BATCH)
            )
            profile = replace(profile, evaluation_batch=fastest)
        points = tuple(sorted(peaks.items()))
        return replace(
            profile,
            memory=replace(law, evaluation_points=points, source=probe.source, note=law.note or probe.note),
        )


def _probe_of(
    training: Task | TrainFunction, setup: TrialSetup, usable: float, ranks: int, embedding: Embedding
) -> Any:
    if not isinstance(training, Task):
        return LoopMemory(training, setup)
    return MemoryProbe(training, setup, usable, ranks=ranks, embedding=embedding)


def with_possible_checkpointing(task: Task, model: nn.Module, request: ProfileRequest) -> ProfileRequest:
    """The request, without the activation checkpointing that the task does not allow.

    Raises:
        StudyFileError: none is left.
    """
    if task.checkpoint_blocks(model):
        return request
    allowed = request.memory.activation_checkpointing
    if "none" not in allowed:
        message = (
            f"expected a list that includes none, since {type(task).__name__}.checkpoint_blocks returns no blocks; got "
            f"{', '.join(allowed)}. Write none, or return the model's blocks there."
        )
        raise StudyFileError(Fault("memory.activation_checkpointing", message))
    return replace(request, memory=request.memory.model_copy(update={"activation_checkpointing": ("none",)}))


def smallest_setup(setup: TrialSetup, profile: DeviceProfile) -> TrialSetup:
    """The setup with the smallest micro-batch that works, under the profile's activation checkpointing."""
    smallest = profile.smallest_micro_batch
    plan = BatchPlan(smallest, activation_checkpointing=profile.activation_checkpointing)
    return replace(setup, plan=plan, smallest_micro_batch=smallest)


def fastest_evaluation_batch(probe: MemoryProbe, most: int, least: int, limit_s: float = 2.0) -> int:
    """The fastest evaluation batch from `least` to `most`, both of which fit; of similar ones, the smallest.

    Each candidate evaluates the same samples once; candidates beyond the time limit are skipped, and those from the first that
    runs out of memory on.
    """
    device = accelerator.device_of(probe.setup.device)
    run = probe.run.on(copy.deepcopy(probe.run.model).to(device), device)
    candidates = sorted({max(most // part, least) for part in (64, 16, 4, 1)})
    samples = min(most, len(run.data.validation))  # type: ignore[arg-type]
    best, best_s = candidates[0], math.inf
    started = time.perf_counter()
    for batch in candidates:
        if time.perf_counter() - started > limit_s:
            break
        # The first evaluation also warms up, so it is repeated.
        for _ in range(2 if batch == candidates[0] else 1):
            evaluation_started = time.perf_counter()
            try:
                run.evaluate(in_order(samples, batch, run.setup.seed))
            except Exception as error:
                if not is_out_of_memory(error) or batch == 1:
                    raise
                release_memory(probe.setup.device)
                return best if batch > candidates[0] else max(batch // 2, 1)
            evaluation_s = time.perf_counter() - evaluation_started
        if evaluation_s < 0.97 * best_s:
            best, best_s = batch, evaluation_s
    return best


def verified(
    law: MemoryLaw, probe: Probe, limit: int, usable: float, largest: int, limit_s: float = 10.0
) -> tuple[MemoryLaw, int]:
    """Find the largest micro-batch on real tensors, starting from the law's, and let measurements replace its predictions.

    On a GPU always, on a CPU if it takes seconds. At most `_MOST_RUNS` runs beside that of the smallest size: after a success
    the measured law names the next size, after a failure half of it is measured.

    Returns:
        The law and the largest micro-batch within memory: it has run, or a larger one has.

    Raises:
        Exception: out of memory, at the smallest size.
        StudyFileError: the smallest size runs, but takes more than is usable.
    """
    fits = ran = law.points[0][0]
    smallest = probe.counted("train", fits, limit).total
    law = law.measured_at(fits, smallest)
    if smallest > usable:
        raise StudyFileError(Fault("memory.limit", does_not_fit(probe.train_peak(fits), usable, fits)))
    if probe.setup.device == "cpu":
        started = time.perf_counter()
        probe.counted("train", fits, limit)  # the first run also warmed up
        took_s = (time.perf_counter() - started) * largest / fits
    else:
        took_s = 0.0
    if took_s > limit_s:
        return replace(
            law, note=law.note or f"not confirmed on real tensors: that would take over {limit_s:.0f} s"
        ), largest
    candidate = law.largest_micro_batch(usable) or fits
    for _ in range(_MOST_RUNS):
        if candidate <= fits:
            break
        try:
            peak = probe.counted("train", candidate, limit).total
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release_memory(probe.setup.device)
            law, candidate = law.failed_at(candidate), max(candidate // 2, fits + 1)
            continue
        law = law.measured_at(candidate, peak)
        ran = max(ran, candidate)
        if peak <= usable:
            fits = candidate
        candidate = law.largest_micro_batch(usable) or fits
    # What lies below a size that ran, runs too.
    return law, max(fits, min(candidate, ran))
