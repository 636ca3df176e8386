"""Profile a task on a device before the first trial: whether it runs, what fits in memory, and how long a step takes."""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ...spaces.errors import Fault, ProfilingError, StudyFileError, TaskError
from ...spaces.laws.cards import Card
from ...spaces.laws.device import DeviceProfile, ProfileRequest
from ...spaces.laws.examination import Examination
from ...spaces.laws.memory import MemoryLaw
from ...spaces.laws.step_time import StepTime, timing_plans
from ...spaces.plan import BatchPlan, Embedding
from ...spaces.study.devices import Memory
from ...spaces.trial import EVALUATION_BATCH, Outcome, Parameter, TrialSetup
from ..adapters.loop_task import LoopTask, NoTrainingError, uses_adapter, uses_loop
from ..data.batches import in_order
from ..examination.examine import examined
from ..examination.scores import first_scores
from ..loading import load_task, schedule_of
from ..machine import accelerator
from ..machine.device import bytes_here, device_name, neighbours_here, usable_bytes
from ..machine.device_memory import is_out_of_memory, process_fault, release_memory
from ..model.batch_norm import batch_norms
from ..optimizers import decouples_decay, has_adams_betas, shown_kind, takes_shards
from ..parallel.rank_processes import close_ranks, ranks_here
from ..parallel.zero1 import state_bytes
from ..task import Task, TrainFunction, embeds
from ..training import TrainingRun
from ..trial import start_attempt
from .exchange import exchange_over
from .first_step import ReadParameters, on_cpu, smallest_workable, user_code_errors
from .loop_session import LoopMemory, LoopSession, examined_session
from .memory import MemoryProbe, cached_law, does_not_fit, evaluation_batch, memory_law
from .power import with_power
from .sharing import with_sharing
from .step_time import measured_step_time, refined_step_time, timed_rounds

# Real runs that may look for the largest micro-batch.
_MOST_RUNS = 4

# From this factor between two parameter values, in a step's bytes or operations, one law does not cover both.
_COST_FACTOR = 1.1


def profile_task(reference: str, request: ProfileRequest) -> DeviceProfile:
    """Run the training code on its smallest micro-batch, probe its memory where a limit applies, and time its steps.

    Raises:
        TaskError: the code cannot be loaded, breaks its contract, raises, or its loss is not finite.
        StudyFileError: not even the smallest micro-batch fits the memory limit.
        ProfilingError: the device fails.
    """
    if fault := process_fault(request.setup.device):
        raise ProfilingError(f"the {request.setup.device.upper()} of this process does not work: {fault}")
    training = load_task(reference)
    setup, kind = request.setup, request.setup.device
    schedule_of(setup)  # or raises
    device_bytes = bytes_here(kind, request.share)
    if kind == "gpu":  # as in a trial; on a CPU the limit is that of a virtual device, which is counted where it matters
        setup = replace(setup, memory_limit_bytes=request.memory.limit_bytes(device_bytes, kind))
        request = replace(request, setup=setup)
    profile = DeviceProfile(kind, device_name(kind), setup.training.samples, device_bytes=device_bytes)
    if kind == "gpu":
        profile = replace(profile, neighbours=neighbours_here())
    if not isinstance(training, Task):
        return _profile_of_loop(training, reference, request, profile)
    if kind == "gpu" and accelerator.device_count() < (here := ranks_here(max(request.devices))):
        raise ProfilingError(f"devices.per_trial: expected {here} GPUs here, got {accelerator.device_count()}")
    parameters = ReadParameters(setup.parameters)
    setup = replace(setup, parameters=parameters, plan=BatchPlan(1))
    with user_code_errors(reference, "a test step"), _limit_named(setup, request):
        smallest, run = _first_run(training, setup, request)
        request = _with_possible_checkpointing(training, run.model, request)
        scores = first_scores(run)
        examination = examined(run, smallest)
    if examination.refusals and not setup.training.accept_inexact:
        raise TaskError("\n".join(examination.refusal_lines))
    if setup.metric not in scores:
        raise TaskError(
            f"objectives.metric: expected a metric that {type(training).__name__}.score returns "
            f"({', '.join(scores)}), got {setup.metric!r}"
        )
    sharded = setup.sharding == "fsdp2"
    if sharded and not takes_shards(run.optimizer):
        message = (
            f"expected ddp or zero1 with {type(run.optimizer).__name__}, which cannot update shards of parameters; got fsdp2. "
            "Write zero1, or use AdamW."
        )
        raise StudyFileError(Fault("devices.sharding", message))
    profile = _with_facts_of(profile, run, smallest)
    profile = replace(
        profile,
        # Sharded, they are traced.
        gradient_bytes=0 if sharded else profile.gradient_bytes,
        validation_set=len(run.data.validation),  # type: ignore[arg-type]
        state_bytes=()
        if setup.sharding != "zero1"
        else tuple((devices, state_bytes(run.optimizer, devices)) for devices in sorted({1, *request.devices})),
        examination=examination,
        validates_on_training=run.train_fetcher.same_data(run.validation_fetcher),
        unused_parameters=tuple(sorted(set(parameters.keys()) - parameters.read)),
    )
    # Free the test run before memory is probed.
    del run
    release_memory(kind)
    with _limit_named(setup, request):
        profile = with_memory(training, profile, request)
    with user_code_errors(reference, "comparing the cost of its parameters"):
        profile = with_other_costs(training, profile, request)
    largest = min(request.highest, profile.training_set or request.highest)
    advice = "lower memory.largest_micro_batch, or write budget: {profile_s: 0} to measure trial times instead"
    with user_code_errors(reference, f"timing its steps (batches of up to {largest}; {advice})"):
        profile = with_step_times(reference, profile, request)
    return with_sharing(reference, profile, request, partial(bytes_here, kind))


def _profile_of_loop(function: TrainFunction, reference: str, request: ProfileRequest, profile: DeviceProfile) -> DeviceProfile:
    """The profile of a training loop: with its memory where an adapter drives it. Its steps are timed in trials."""
    if request.setup.sharding != "ddp":
        message = (
            f"expected ddp, since the task's training loop creates the optimizer itself; got {request.setup.sharding}. Remove "
            "it, or shard in the loop."
        )
        raise StudyFileError(Fault("devices.sharding", message))
    if request.setup.training.ema is not None and not uses_loop(function):
        message = (
            "expected null, since the task's training loop evaluates and saves its own model; got "
            f"{request.setup.training.ema:g}. Remove it, or average weights in the loop."
        )
        raise StudyFileError(Fault("training.ema", message))
    if "none" not in request.memory.activation_checkpointing:
        message = (
            "expected a list that includes none, since the task's training loop decides itself which activations it keeps; got "
            f"{', '.join(request.memory.activation_checkpointing)}. Remove it, or turn it on in the loop."
        )
        raise StudyFileError(Fault("memory.activation_checkpointing", message))
    # None on a CPU, where the limit is that of a virtual device, which counts the tensors of a driven loop alone.
    unknown = replace(profile, limit_bytes=request.setup.memory_limit_bytes)
    if uses_loop(function):
        return _profile_of_kit(function, reference, request, unknown)
    if not uses_adapter(function):
        with user_code_errors(reference, "a first measurement"):
            _first_measurement(reference, request.setup)
        note = "your own loop takes its own steps; it was only run to its first measurement"
        return replace(unknown, examination=Examination(note=note))
    task, setup = LoopTask(function), replace(request.setup, plan=BatchPlan(1))
    with user_code_errors(reference, "preparing its first step"):
        try:
            size = len(task.data(setup).train)  # type: ignore[arg-type]
        except NoTrainingError as error:
            note = _unknown_memory(error)
            return replace(unknown, note=note, examination=Examination(note=f"{type(error).__name__}: {error}"[:200]))
    task = task.prepared(setup)
    examination = task.parts(setup).examination
    if examination is not None and examination.refusals and not setup.training.accept_inexact:
        raise TaskError("\n".join(examination.refusal_lines))
    profile = replace(profile, examination=examination)
    unknown = replace(unknown, examination=examination, training_set=size)
    # What is checkpointed is the loop's own affair.
    request = replace(request, memory=request.memory.model_copy(update={"activation_checkpointing": ("none",)}))
    try:
        smallest, run = smallest_workable(task, setup)
    except Exception as error:
        if isinstance(error, TaskError) and embeds(task):
            raise TaskError(f"task {reference}: {error}") from None  # each trial would fail of it
        return replace(unknown, note=_unknown_memory(error))  # a loop's step may do more than is known here
    profile = _with_facts_of(profile, run, smallest)
    del run
    release_memory(profile.kind)
    profile = with_memory(task, profile, request)
    if profile.memory is not None:  # without it there is no law that has to hold for all parameters
        with user_code_errors(reference, "comparing the cost of its parameters"):
            profile = with_other_costs(task, profile, request)
    del task
    gc.collect()  # trainers form reference cycles that hold their model
    return profile


def _profile_of_kit(function: TrainFunction, reference: str, request: ProfileRequest, profile: DeviceProfile) -> DeviceProfile:
    """The profile of a loop of one's own that is made of `Loop`: examined, traced and timed as a task, evaluation aside."""
    parameters = ReadParameters(request.setup.parameters)
    setup = replace(request.setup, parameters=parameters, plan=BatchPlan(1))
    with user_code_errors(reference, "a test step"):
        smallest, profile = _smallest_of_loop(function, setup, profile)
        setup = replace(setup, plan=BatchPlan(smallest), smallest_micro_batch=smallest)
        examination = examined_session(function, setup)
    if examination.refusals and not setup.training.accept_inexact:
        raise TaskError("\n".join(examination.refusal_lines))
    if setup.training.samples not in (None, profile.training_set):
        message = f"expected the length of the training set, {profile.training_set}, got {setup.training.samples}"
        raise StudyFileError(Fault("training.samples", message))
    unused = tuple(sorted(set(parameters.keys()) - parameters.read))
    profile = replace(profile, examination=examination, unused_parameters=unused)
    request = replace(request, setup=setup, others=())
    with user_code_errors(reference, "tracing its memory"):
        profile = _with_loop_memory(function, setup, profile, request)
    with user_code_errors(reference, "timing its steps"):
        return with_step_times(reference, profile, request)


def _smallest_of_loop(function: TrainFunction, setup: TrialSetup, profile: DeviceProfile) -> tuple[int, DeviceProfile]:
    """The fewest samples that a part works with, 1 or 2, and the profile with what is known of the loop's models."""
    first_error: Exception | None = None
    for samples in (1, 2):
        session = LoopSession(function, replace(setup, plan=BatchPlan(samples)))
        try:
            loop = session.loop
            session.step([(samples, loop.train_fetcher.fetch(loop.stream.take(0, samples)))], samples)
            return samples, _with_facts_of(profile, loop, samples)
        except (ValueError, RuntimeError) as error:
            first_error = first_error or error
        finally:
            session.close()
    assert first_error is not None
    raise first_error


def _with_loop_memory(
    function: TrainFunction, setup: TrialSetup, profile: DeviceProfile, request: ProfileRequest
) -> DeviceProfile:
    """The profile with the memory law of a `Loop`, if the study or the device sets a limit.

    Raises:
        StudyFileError: not even the smallest part fits.
    """
    limit = request.memory.limit_bytes(profile.device_bytes, profile.kind)
    profile = replace(profile, limit_bytes=limit)
    if limit is None and not request.traces:
        return profile
    usable = min(profile.usable_bytes(devices, request.memory.headroom) for devices in request.devices)
    smallest = profile.smallest_micro_batch
    highest = max(_largest_share(profile, request, min(request.devices)), smallest)
    probe = LoopMemory(function, setup)
    try:
        law = memory_law(probe, usable, smallest, highest)
        largest = None if law is None else law.largest_micro_batch(usable)
        if law is None or largest is None:
            peak = None if law is None else probe.train_peak(smallest)
            raise StudyFileError(Fault("memory.limit", does_not_fit(probe, peak, usable, smallest)))
        if limit is not None:
            law, largest = verified(law, probe, limit, usable, largest)
        law = replace(law, source=probe.source, note=law.note or probe.note)
        return replace(profile, memory=law, largest_micro_batch=largest)
    finally:
        probe.close()


def _first_measurement(reference: str, setup: TrialSetup) -> None:
    """Run a loop of one's own up to its first measurement, in a training of two steps.

    Raises:
        TaskError: it fails, or yields none.
    """
    size = min(setup.effective_batch, setup.training.samples or setup.effective_batch)
    setup = replace(setup, plan=BatchPlan(size), samples_budget=2 * size)
    with closing(start_attempt(reference, setup)) as attempt:  # type: ignore[type-var]  # a generator
        report = next(attempt)
    if isinstance(report, Outcome) and report.kind in ("error", "interrupted"):
        name = reference.rpartition(":")[2]
        raise TaskError(f"task {reference}: {report.message.removeprefix(f'task {name}: ').removeprefix(f'{name}: ')}")


@contextmanager
def _limit_named(setup: TrialSetup, request: ProfileRequest) -> Iterator[None]:
    """Context in which a GPU's memory that does not do for one sample is a fault of its limit, and not of the task."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error) or setup.device == "cpu":
            raise
        usable = (setup.memory_limit_bytes or 0) * (1 - request.memory.headroom)
        raise StudyFileError(Fault("memory.limit", does_not_fit(None, None, usable, 1))) from None


def _first_run(task: Task, setup: TrialSetup, request: ProfileRequest) -> tuple[int, TrainingRun]:
    """The smallest micro-batch that works and its run, with more activation checkpointing where memory runs out without.

    What several GPUs share out may be too large for one: then it runs on the CPU.
    """
    more = [mode for mode in request.memory.activation_checkpointing if mode != "none"]
    for mode in more:
        try:
            return smallest_workable(task, setup)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not task.checkpoint_blocks(task.model(setup)):
                if setup.sharding != "fsdp2":
                    raise
                break
        release_memory(setup.device)
        setup = replace(setup, plan=replace(setup.plan, activation_checkpointing=mode))
    try:
        return smallest_workable(task, setup)
    except Exception as error:
        if not is_out_of_memory(error) or setup.device == "cpu":
            raise
        if setup.sharding != "fsdp2":
            raise
    release_memory(setup.device)
    return smallest_workable(task, on_cpu(setup))


def _with_possible_checkpointing(task: Task, model: nn.Module, request: ProfileRequest) -> ProfileRequest:
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


def _unknown_memory(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"Its memory is not known before the first trial: {type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _with_facts_of(profile: DeviceProfile, run: Any, smallest: int) -> DeviceProfile:
    return replace(
        profile,
        training_set=run.data.training_set,
        smallest_micro_batch=smallest,
        unit="" if run.data.lengths is None else run.data.unit,
        units_per_sample=None if run.data.lengths is None else float(np.average(run.data.lengths, weights=run.data.weights)),
        optimizer=shown_kind(run.optimizer),
        adaptive=has_adams_betas(run.optimizer),
        decoupled_decay=decouples_decay(run.optimizer),
        applies_decay=any(
            math.isclose(float(group.get("weight_decay", 0.0)), run.setup.weight_decay) for group in run.optimizer.param_groups
        ),
        applies_betas=any(
            all(map(math.isclose, group["betas"], run.setup.betas)) for group in run.optimizer.param_groups if "betas" in group
        ),
        batch_statistics=any(True for _ in batch_norms(run.model)),
        model_parameters=sum(parameter.numel() for parameter in run.parameters),
        gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in run.parameters),
    )


def with_other_costs(task: Task, profile: DeviceProfile, request: ProfileRequest) -> DeviceProfile:
    """The profile with the cost of other parameter values, where a step's bytes or operations change by 10 % or more."""
    if not request.others:
        return profile
    smallest = profile.smallest_micro_batch

    def cost(parameters: Mapping[str, Parameter]) -> tuple[int, int]:
        probe = MemoryProbe(task, replace(_smallest_setup(request.setup, profile), parameters=parameters))
        with FlopCounterMode(display=False) as counter:
            peak = probe.train_peak(smallest).total
        # Loops are not timed, so that only their memory has to be alike.
        return peak, 0 if isinstance(task, LoopTask) else int(counter.get_total_flops())

    base = cost(request.setup.parameters)
    changes = []
    for name, value, parameters in request.others:
        other = cost(parameters)
        factor = max(
            (b / a for a, b in zip(base, other, strict=True) if a and b), key=lambda ratio: abs(math.log(ratio)), default=1
        )
        if abs(math.log(factor)) > math.log(_COST_FACTOR):
            changes.append((name, value, factor))
    return replace(profile, other_costs=tuple(changes))


def with_step_times(reference: str, profile: DeviceProfile, request: ProfileRequest) -> DeviceProfile:
    """The profile with a step-time law for each number of devices, if the study allots time for it.

    Raises:
        ProfilingError: a rank died.
    """
    refused = request.highest > (profile.training_set or request.highest) or profile.unused_parameters or profile.other_costs
    if not request.timing_s or refused:
        return profile  # no need to time what the driver will refuse anyway
    laws = []
    for devices in request.devices:
        smallest = profile.smallest_micro_batch
        share = _largest_share(profile, request, devices)
        cap = profile.cap_on(devices, request.memory.headroom) or share
        if profile.embedding == "cached":
            share = max(share // 2, smallest)
        plans_up_to = partial(
            timing_plans,
            smallest,
            devices=devices,
            dense=profile.kind == "gpu",
            activation_checkpointing=profile.activation_checkpointing,
            embedding=profile.embedding,
            largest_batch=min(request.highest, profile.largest_batch or request.highest),
        )
        plans = plans_up_to(max(min(cap, share), smallest))
        setup = replace(
            request.setup,
            plan=plans[0],
            smallest_micro_batch=smallest,
            evaluation_batch=profile.evaluation_batch,
            # On a CPU the limit is that of a virtual device, and counting bytes would slow the timed steps.
            memory_limit_bytes=profile.limit_bytes if profile.kind == "gpu" else None,
        )
        release_memory(profile.kind)  # the ranks use this process's device too
        law = _timed_within_memory(reference, setup, plans, plans_up_to, request.timing_s)
        law = replace(law, embedding=profile.embedding)
        if devices > 1:
            law = replace(law, exchange=exchange_over(devices, setup.device, setup.cpus, profile.gradient_bytes))
        if request.energy:
            try:
                law = with_power(reference, setup, law)
            except ProfilingError as error:
                profile = replace(profile, no_energy=str(error))
        laws.append(law)
    profile = replace(profile, step_times=tuple(laws), timing_s=request.timing_s)
    others = tuple(with_step_times(reference, alternative, request) for alternative in profile.alternatives)
    return replace(profile, alternatives=others)


def _timed_within_memory(
    reference: str,
    setup: TrialSetup,
    plans: list[BatchPlan],
    plans_up_to: Callable[[int], list[BatchPlan]],
    limit_s: float,
) -> StepTime:
    """The law of these plans, halving their sizes while memory runs out: without a limit it has not been probed."""
    while True:
        try:
            # Compiling is not worth another look.
            if setup.device == "gpu" and not setup.training.compile:
                return refined_step_time(lambda chosen: timed_rounds(reference, setup, chosen), plans, limit_s)
            with closing(timed_rounds(reference, setup, plans)) as rounds:  # type: ignore[type-var]  # a generator
                return measured_step_time(rounds, plans, limit_s, on_cpu=setup.device == "cpu")
        except Exception as error:
            largest = max(plan.largest_micro_batch for plan in plans) // 2
            if not is_out_of_memory(error) or largest < setup.smallest_micro_batch:
                raise
        release_memory(setup.device)
        plans = plans_up_to(largest)


def with_memory(task: Task, profile: DeviceProfile, request: ProfileRequest) -> DeviceProfile:
    """The profile with its memory law and the batches that follow from it, if the study or the device sets a limit.

    Raises:
        StudyFileError: not even the smallest micro-batch fits.
    """
    limit = request.memory.limit_bytes(profile.device_bytes, profile.kind)
    if limit is None and not request.traces:
        profile = replace(profile, activation_checkpointing=request.memory.activation_checkpointing[0])
        least, *more = (replace(profile, embedding=embedding) for embedding in _embeddings(task))
        # Without a limit whole batches fit, unless the user says otherwise.
        return replace(least, alternatives=tuple(more) if request.memory.largest_micro_batch is not None else ())
    profile = replace(profile, limit_bytes=limit)
    return _with_each_kind(task, profile, request, lambda *each: _with_memory_law(task, request, limit, *each))


def _kind_of(profile: DeviceProfile) -> str:
    """What a profile recomputes, as a noun."""
    return profile.recomputed if profile.embedding else f"{profile.recomputed} activation checkpointing"


def _embeddings(task: Task) -> tuple[Embedding, ...]:
    """The ways to compute the task's loss, from the least recomputation to the most."""
    return ("whole", "cached") if embeds(task) else ("",)


def _with_each_kind(
    task: Task,
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
    for mode, embedding in product(request.memory.activation_checkpointing, _embeddings(task)):
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
            law, reason = found[0].memory, f"{_kind_of(kind)} failed: {type(error).__name__}: {error}"
            if law is not None:
                found[0] = replace(found[0], memory=replace(law, note=law.note or reason.splitlines()[0][:300]))
            continue
        caps = {devices: found[0].cap_on(devices, request.memory.headroom) for devices in request.devices}
        if all(cap is None or cap >= _largest_share(profile, request, devices) for devices, cap in caps.items()):
            break  # every micro-batch fits without more
    if not found:
        assert does_not_fit is not None
        raise does_not_fit
    first, *others = found
    return replace(first, alternatives=tuple(others))


def _with_memory_law(
    task: Task, request: ProfileRequest, limit: int | None, profile: DeviceProfile, first: DeviceProfile | None
) -> DeviceProfile:
    """The profile with the memory law of its activation checkpointing.

    Args:
        first: the one whose evaluation, which keeps no activations, is known.

    Raises:
        StudyFileError: not even the smallest micro-batch fits.
    """
    # Several devices have less room for a step, or more where they shard the optimizer state.
    each = [profile.usable_bytes(devices, request.memory.headroom) for devices in request.devices]
    alone, least = profile.usable_bytes(1, request.memory.headroom), min(each)
    usable = max(alone, *each)
    smallest = profile.smallest_micro_batch
    highest = max(_largest_share(profile, request, min(request.devices)), smallest)
    setup = _smallest_setup(request.setup, profile)
    probe = MemoryProbe(task, setup, usable, ranks=_sharing(request), embedding=profile.embedding)
    if profile.embedding == "cached":
        highest = max(highest // 2, smallest)
    law = memory_law(probe, usable, smallest, highest)
    if law is None:
        raise StudyFileError(Fault("memory.limit", does_not_fit(probe, None, usable, smallest)))
    largest = law.largest_micro_batch(alone) or smallest
    if probe.ranks > 1:
        law = replace(law, note=law.note or f"of one of {probe.ranks} devices; not confirmed on real tensors")
    elif limit is not None and law.largest_micro_batch(alone) is None and 1 not in request.devices:
        law = replace(law, note=law.note or "not confirmed on real tensors: on one device alone it does not fit")
    elif limit is not None:
        try:
            law, largest = verified(law, probe, limit, alone, largest)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fault = Fault("memory.limit", does_not_fit(probe, probe.train_peak(smallest), usable, smallest))
            raise StudyFileError(fault) from None
    if law.largest_micro_batch(least) is None:
        raise StudyFileError(Fault("memory.limit", does_not_fit(probe, probe.train_peak(smallest), least, smallest)))
    if profile.embedding == "cached":
        law, largest_batch = cached_law(probe, law, least, 2 * smallest, request.highest)
        profile = replace(profile, largest_batch=largest_batch)
    profile = replace(profile, largest_micro_batch=largest)
    peaks: dict[int, int] = {}
    if first is not None and first.memory is not None:
        peaks = dict(first.memory.evaluation_points)
        profile = replace(profile, evaluation_batch=first.evaluation_batch)
    elif not isinstance(task, LoopTask):  # which evaluates in its own way
        most, peaks = evaluation_batch(probe, least, law, largest)
        # Inexact scores may depend on the evaluation batch, so it is not chosen by timing.
        by_time = probe.ranks == 1 and not request.setup.training.accept_inexact
        fastest = fastest_evaluation_batch(probe, most, largest) if by_time else min(most, EVALUATION_BATCH)
        profile = replace(profile, evaluation_batch=fastest)
    points = tuple(sorted(peaks.items()))
    return replace(profile, memory=replace(law, evaluation_points=points, source=probe.source, note=law.note or probe.note))


def _sharing(request: ProfileRequest) -> int:
    """The devices that share out the parameters; 1: each has all of them."""
    return max(request.devices) if request.setup.sharding == "fsdp2" else 1


def _largest_share(profile: DeviceProfile, request: ProfileRequest, devices: int) -> int:
    """The largest micro-batch that a trial on this number of devices could need, memory aside."""
    batch = min(request.highest, profile.training_set or request.highest)
    return min(-(-batch // devices), request.memory.largest_micro_batch or batch)


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


def profile_like(reference: str, request: ProfileRequest, card: Card) -> tuple[DeviceProfile, list[MemoryRow]]:
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
    usable = profile.usable_bytes(max(request.devices), request.memory.headroom)
    smallest = profile.smallest_micro_batch
    highest = max(_largest_share(profile, request, min(request.devices)), smallest)
    rows: list[MemoryRow] = []

    def with_law(one: DeviceProfile, first: DeviceProfile | None) -> DeviceProfile:
        probe = MemoryProbe(
            task, _smallest_setup(here.setup, one), usable, like_gpu=True, ranks=_sharing(here), embedding=one.embedding
        )
        law = memory_law(probe, usable, smallest, highest if one.embedding != "cached" else max(highest // 2, smallest))
        assert law is not None
        largest = law.largest_micro_batch(usable)
        if largest is None:
            fault = does_not_fit(probe, probe.train_peak(smallest), usable, smallest)
            raise StudyFileError(Fault("memory.limit", fault))
        sizes = _spread(smallest, largest)
        if first is not None and first.memory is not None:
            sizes = sorted({smallest, largest})
            most, peaks = first.evaluation_batch, dict(first.memory.evaluation_points)
        else:
            most, peaks = (None, {}) if isinstance(task, LoopTask) else evaluation_batch(probe, usable, law, largest)
        if one.embedding == "cached":
            law, largest_batch = cached_law(probe, law, usable, 2 * smallest, request.highest)
            one = replace(one, largest_batch=largest_batch)
        law = replace(law, evaluation_points=tuple(sorted(peaks.items())), note=probe.note)
        rows.extend(MemoryRow(size, probe.train_peak(size).total, None, one.recomputed) for size in sizes)
        return replace(one, largest_micro_batch=largest, evaluation_batch=most, memory=law)

    with user_code_errors(reference, "tracing it as on a GPU"):
        request = _with_possible_checkpointing(task, task.model(here.setup), request)
        profile = _with_each_kind(task, profile, request, with_law)
    return profile, rows


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Peak bytes of a training step at one micro-batch; `measured` is None where the time limit was reached."""

    micro_batch: int
    predicted: int
    measured: int | None
    recomputed: str = "none"


def memory_rows(reference: str, request: ProfileRequest, profile: DeviceProfile, limit_s: float) -> list[MemoryRow]:
    """Predicted and measured peaks at a few sizes up to the largest that fits, smallest first.

    Raises:
        TaskError: a loop of its own, whose memory cannot be traced.
    """
    task = _traceable(reference, request.setup)
    if profile.memory is None:
        raise TaskError(f"task {reference}: {profile.note or 'its memory is not known'}")
    return [row for one in profile.each for row in _memory_rows(task, request, one, limit_s / len(profile.each))]


def _memory_rows(task: Task, request: ProfileRequest, profile: DeviceProfile, limit_s: float) -> Iterator[MemoryRow]:
    """The rows of the profile's own activation checkpointing."""
    assert profile.memory is not None
    smallest, largest = profile.smallest_micro_batch, profile.largest_micro_batch or profile.memory.points[-1][0]
    probe = MemoryProbe(task, _smallest_setup(request.setup, profile), ranks=_sharing(request), embedding=profile.embedding)
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


def _smallest_setup(setup: TrialSetup, profile: DeviceProfile) -> TrialSetup:
    """The setup with the smallest micro-batch that works, under the profile's activation checkpointing."""
    smallest = profile.smallest_micro_batch
    plan = BatchPlan(smallest, activation_checkpointing=profile.activation_checkpointing)
    return replace(setup, plan=plan, smallest_micro_batch=smallest)


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


def verified(
    law: MemoryLaw, probe: MemoryProbe | LoopMemory, limit: int, usable: float, largest: int, limit_s: float = 10.0
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
        raise StudyFileError(Fault("memory.limit", does_not_fit(probe, probe.train_peak(fits), usable, fits)))
    if probe.setup.device == "cpu":
        started = time.perf_counter()
        probe.counted("train", fits, limit)  # the first run also warmed up
        took_s = (time.perf_counter() - started) * largest / fits
    else:
        took_s = 0.0
    if took_s > limit_s:
        return replace(law, note=law.note or f"not confirmed on real tensors: that would take over {limit_s:.0f} s"), largest
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


def profile_in_subprocess(reference: str, request: ProfileRequest) -> DeviceProfile:
    """`profile_task` for a separate process: ends its ranks, which would otherwise keep the process alive."""
    try:
        return profile_task(reference, request)
    finally:
        close_ranks()
