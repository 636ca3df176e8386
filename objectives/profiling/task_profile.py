"""Profile a task on a device before the first trial: whether it runs, what fits in memory, and how long a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...spaces.errors import Fault, ProfilingError, StudyFileError, TaskError
from ...spaces.laws.device import HEADROOM, DeviceProfile, ProfileRequest
from ...spaces.plan import BatchPlan
from ...spaces.trial import TrialSetup
from ..data.batches import SampleKeys
from ..data.stream import digest_of
from ..examination.copies import location_of
from ..examination.examine import examined
from ..examination.life import life_of_task, with_life
from ..examination.plans import with_plans
from ..examination.scores import first_scores
from ..loading import load_anew, load_task, schedule_of
from ..machine.device import bytes_here, device_name, neighbours_here
from ..machine.device_memory import is_out_of_memory, process_fault, release_memory
from ..optimizers import takes_shards
from ..task import Task
from ..training import TrainingRun
from .costs import with_other_costs
from .first_step import ReadParameters, on_cpu, smallest_workable, user_code_errors, with_facts_of
from .loop_profile import profile_of_loop
from .memory.limit import with_memory, with_possible_checkpointing
from .memory.tracing import does_not_fit
from .step_time import with_step_times

# Validation samples of which the digest is.
_DIGESTED = 16


def profile_in_rank(reference: str, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What `profiled` runs in a process of its own."""
    yield profile_task(reference, ProfileRequest.from_dict(request)).to_dict()


def profile_task(reference: str, request: ProfileRequest) -> DeviceProfile:
    """Run the training code on its smallest micro-batch, probe its memory where a limit applies, and time steps on one device.

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
    # As in a trial; on a CPU the limit is that of a virtual device, which is counted where it matters.
    if kind == "gpu":
        setup = replace(setup, memory_limit_bytes=request.memory.limit_bytes(device_bytes, kind))
        request = replace(request, setup=setup)
    profile = DeviceProfile(kind, device_name(kind), setup.training.samples, device_bytes=device_bytes)
    if kind == "gpu":
        profile = replace(profile, neighbours=neighbours_here())
    if not isinstance(training, Task):
        return profile_of_loop(training, reference, request, profile)
    parameters = ReadParameters(setup.parameters)
    setup = replace(setup, parameters=parameters, plan=BatchPlan(1))
    with user_code_errors(reference, "a test step"), _limit_named(setup, request):
        started = time.process_time()
        untrained: dict[str, float] = {}
        smallest, run = _first_run(training, setup, request, partial(_score, untrained))
        first_s = time.process_time() - started
        request = with_possible_checkpointing(training, run.model, request)
        scores = first_scores(run)
        examination = examined(run, smallest, request.memory.activation_checkpointing)
        examination = with_plans(
            examination, run, partial(load_anew, reference), smallest, max(request.devices)
        )
    if setup.metric not in scores:
        raise TaskError(
            f"objectives.metric: expected a metric that {type(training).__name__}.score returns "
            f"({', '.join(scores)}), got {setup.metric!r}"
        )
    profile = replace(_with_facts(profile, run, smallest), untrained=untrained.get(setup.metric))
    unused = tuple(sorted(set(parameters.keys()) - parameters.read))  # before anything reads them all
    where = location_of(run, "model")
    setup = replace(run.setup, smallest_micro_batch=smallest)
    # Free the test run before the next ones.
    del run
    release_memory(kind)
    with user_code_errors(reference, "a few test steps"):
        life = life_of_task(reference)
        examination = with_life(examination, where, life, setup, profile.training_set or 0, first_s)
    if examination.refusals and not setup.training.accept_inexact:
        raise TaskError("\n".join(examination.refusal_lines))
    profile = replace(profile, examination=examination, unused_parameters=unused)
    with _limit_named(setup, request):
        profile = with_memory(training, profile, request)
    with user_code_errors(reference, "comparing the cost of its parameters"):
        profile = with_other_costs(training, profile, request)
    largest = min(request.highest, profile.training_set or request.highest)
    advice = (
        "lower memory.largest_micro_batch, or write budget: {profile_s: 0} to measure trial times instead"
    )
    with user_code_errors(reference, f"timing its steps (batches of up to {largest}; {advice})"):
        return with_step_times(reference, profile, request, [1])


def _with_facts(profile: DeviceProfile, run: TrainingRun, smallest: int) -> DeviceProfile:
    """The profile with what its run shows.

    Raises:
        StudyFileError: the optimizer cannot be sharded as the study says.
    """
    sharding = run.setup.sharding
    if sharding == "fsdp2" and not takes_shards(run.optimizer):
        message = (
            f"expected ddp with {type(run.optimizer).__name__}, which cannot update shards of parameters; got fsdp2. Write "
            "ddp, or use AdamW."
        )
        raise StudyFileError(Fault("devices.sharding", message))
    profile = with_facts_of(profile, run, smallest)
    return replace(
        profile,
        gradient_bytes=0 if sharding == "fsdp2" else profile.gradient_bytes,  # sharded, they are traced
        validation_set=(size := len(run.data.validation)),  # type: ignore[arg-type]
        validation_digest=_digest_of(run, size),
        validates_on_training=run.train_fetcher.same_data(run.validation_fetcher),
    )


def _digest_of(run: TrainingRun, size: int) -> int:
    """Of some validation samples, spread over them, as a trial reads them."""
    places = np.unique(np.linspace(0, size - 1, min(size, _DIGESTED)).astype(np.int64))
    return digest_of(run.validation_fetcher.fetch(SampleKeys(places, np.zeros_like(places), 0)))


def _score(scores: dict[str, float], run: TrainingRun) -> None:
    with suppress(Exception):  # it is asked for again after the step
        scores |= first_scores(run)


def _first_run(
    task: Task, setup: TrialSetup, request: ProfileRequest, look: Callable[[TrainingRun], None]
) -> tuple[int, TrainingRun]:
    """The smallest micro-batch that works and its run, with more activation checkpointing where memory runs out without.

    What several GPUs share out may be too large for one: then it runs on the CPU.
    """
    more = [mode for mode in request.memory.activation_checkpointing if mode != "none"]
    for mode in more:
        try:
            return smallest_workable(task, setup, look)
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
        return smallest_workable(task, setup, look)
    except Exception as error:
        if not is_out_of_memory(error) or setup.device == "cpu":
            raise
        if setup.sharding != "fsdp2":
            raise
    release_memory(setup.device)
    return smallest_workable(task, on_cpu(setup), look)


@contextmanager
def _limit_named(setup: TrialSetup, request: ProfileRequest) -> Iterator[None]:
    """Context in which a GPU's memory that does not do for one sample is a fault of its limit, and not of the task."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error) or setup.device == "cpu":
            raise
        usable = (setup.memory_limit_bytes or 0) * (1 - HEADROOM)
        raise StudyFileError(Fault("memory.limit", does_not_fit(None, usable, 1))) from None
