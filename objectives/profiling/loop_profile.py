"""Profile the user's own training loop: examined, traced and timed where it is made of our parts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch import nn

from ...spaces.errors import Fault, StudyFileError, TaskError
from ...spaces.laws.device import DeviceProfile, ProfileRequest
from ...spaces.laws.examination import Examination
from ...spaces.plan import BatchPlan
from ...spaces.trial import Outcome, TrialSetup
from ..adapters.driven_loop import DrivenLoop
from ..adapters.loop_task import LoopTask, NoTrainingError, plain, uses_adapter, uses_loop
from ..examination.life import life_of_loop, with_life
from ..loading import error_line, line_of
from ..loop import newest_loop
from ..machine.device_memory import release_memory
from ..script.examined import in_script_words
from ..task import TrainFunction, embeds
from ..trial import attempt
from .costs import with_other_costs
from .first_step import ReadParameters, smallest_workable, user_code_errors, with_facts_of
from .loop_probes import examined_session
from .memory.limit import with_memory
from .step_time import with_step_times

_UNKNOWN_MEMORY = "Its memory is not known before the first trial: "


def profile_of_loop(
    function: TrainFunction, reference: str, request: ProfileRequest, profile: DeviceProfile
) -> DeviceProfile:
    """The profile of a training loop: with its memory where an adapter drives it. Its steps are timed in trials."""
    if faults := list(_unsupported(function, request)):
        raise StudyFileError(faults)
    # None on a CPU, where the limit is that of a virtual device, which counts the tensors of a driven loop alone.
    unknown = replace(profile, limit_bytes=request.setup.memory_limit_bytes)
    # What is checkpointed is the loop's own affair.
    request = replace(
        request, memory=request.memory.model_copy(update={"activation_checkpointing": ("none",)})
    )
    if uses_loop(function):
        return _profile_of_kit(function, reference, request, unknown)
    if not uses_adapter(function):
        with user_code_errors(reference, "a first measurement"):
            _first_measurement(reference, request.setup)
        note = "your own loop takes its own steps; it was only run to its first measurement"
        return replace(unknown, examination=Examination(note=note))
    task, setup, started = LoopTask(function), replace(request.setup, plan=BatchPlan(1)), time.process_time()
    with user_code_errors(reference, "preparing its first step"):
        try:
            size = len(task.data(setup).train)  # type: ignore[arg-type]
        except NoTrainingError as error:
            return replace(
                unknown,
                note=_UNKNOWN_MEMORY + error_line(error),
                examination=Examination(note=error_line(error)),
            )
    task = task.prepared(setup)
    examination = task.parts(setup).examination
    if examination is not None:
        first_s = time.process_time() - started
        with user_code_errors(reference, "a short training"):
            examination = _with_life(
                examination, reference, function, setup, size, first_s, _driven_parameters
            )
        if examination.refusals and not setup.training.accept_inexact:
            raise TaskError("\n".join(examination.refusal_lines))
    profile = replace(profile, examination=examination)
    unknown = replace(unknown, examination=examination, training_set=size)
    try:
        smallest, run = smallest_workable(task, setup)
    except Exception as error:
        if isinstance(error, TaskError) and embeds(task):
            raise TaskError(f"task {reference}: {error}") from None  # each trial would fail of it
        # A loop's step may do more than is known here.
        return replace(unknown, note=_UNKNOWN_MEMORY + error_line(error))
    profile = with_facts_of(profile, run, smallest)
    del run
    release_memory(profile.kind)
    profile = with_memory(task, profile, request)
    if profile.memory is not None:  # without it there is no law that has to hold for all parameters
        with user_code_errors(reference, "comparing the cost of its parameters"):
            profile = with_other_costs(task, profile, request)
    del task
    gc.collect()  # trainers form reference cycles that hold their model
    return profile


def _unsupported(function: TrainFunction, request: ProfileRequest) -> Iterator[Fault]:
    """What the study asks for and the loop does itself."""
    setup, kept = request.setup, request.memory.activation_checkpointing
    own = "since the task's training loop"
    if setup.sharding != "ddp":
        advice = "Remove it, or shard in the loop."
        yield Fault(
            "devices.sharding",
            f"expected ddp, {own} creates the optimizer itself; got {setup.sharding}. {advice}",
        )
    if setup.training.ema is not None and not uses_loop(function):
        advice = "Remove it, or average weights in the loop."
        got = f"{setup.training.ema:g}"
        yield Fault(
            "training.ema", f"expected null, {own} evaluates and saves its own model; got {got}. {advice}"
        )
    if setup.train_s is not None and uses_adapter(function) and not uses_loop(function):
        expected = "expected another length, since the steps of a trainer's loop are not timed beforehand and its schedule"
        yield Fault(
            "space.train_s", f"{expected} follows its samples; got seconds. Write samples, steps or epochs."
        )
    if "none" not in kept:
        expected = f"expected a list that includes none, {own} decides itself which activations it keeps"
        advice = "Remove it, or turn it on in the loop."
        yield Fault("memory.activation_checkpointing", f"{expected}; got {', '.join(kept)}. {advice}")


def _profile_of_kit(
    function: TrainFunction, reference: str, request: ProfileRequest, profile: DeviceProfile
) -> DeviceProfile:
    """The profile of a user's loop that is made of `Loop`: examined, traced and timed as a task, evaluation aside."""
    parameters = ReadParameters(request.setup.parameters)
    setup = replace(request.setup, parameters=parameters, plan=BatchPlan(1))
    with user_code_errors(reference, "a test step"):
        started = time.process_time()
        smallest, loop = smallest_workable(function, setup)
        profile = with_facts_of(profile, loop, smallest)
        first_s = time.process_time() - started
        setup = replace(setup, plan=BatchPlan(smallest), smallest_micro_batch=smallest)
        examination = examined_session(function, setup)
        unused = tuple(sorted(set(parameters.keys()) - parameters.read))  # before anything reads them all
        samples = profile.training_set or 0
        examination = _with_life(examination, reference, function, setup, samples, first_s, _kit_parameters)
        if (loop := newest_loop()) is not None and not loop.schedules:
            examination = in_script_words(examination)
    if examination.refusals and not setup.training.accept_inexact:
        raise TaskError("\n".join(examination.refusal_lines))
    if setup.training.samples not in (None, profile.training_set):
        message = (
            f"expected the length of the training set, {profile.training_set}, got {setup.training.samples}"
        )
        raise StudyFileError(Fault("training.samples", message))
    profile = replace(profile, examination=examination, unused_parameters=unused)
    request = replace(request, setup=setup, others=())
    with user_code_errors(reference, "tracing its memory"):
        profile = with_memory(function, profile, request)
    with user_code_errors(reference, "timing its steps"):
        return with_step_times(reference, profile, request, [1])


def _with_life(
    examination: Examination,
    reference: str,
    function: TrainFunction,
    setup: TrialSetup,
    samples: int,
    first_s: float,
    parameters: Callable[[], Sequence[nn.Parameter]],
) -> Examination:
    named: Any = plain(function)
    where = f"{line_of(named, setup.folder)}{named.__name__}"
    return with_life(examination, where, life_of_loop(reference, parameters), setup, samples, first_s)


def _kit_parameters() -> Sequence[nn.Parameter]:
    loop = newest_loop()
    return [] if loop is None else loop.parameters


def _driven_parameters() -> Sequence[nn.Parameter]:
    driven = DrivenLoop.newest()
    return [] if driven is None else list(driven.model.parameters())


def _first_measurement(reference: str, setup: TrialSetup) -> None:
    """Run a user's loop up to its first measurement, in a training of two steps.

    Raises:
        TaskError: it fails, or yields none.
    """
    size = min(setup.effective_batch, setup.training.samples or setup.effective_batch)
    setup = replace(setup, plan=BatchPlan(size), samples_budget=2 * size)
    with closing(attempt(reference, setup)) as reports:  # type: ignore[type-var]  # a generator
        report = next(reports)
    if isinstance(report, Outcome) and report.kind in ("error", "interrupted"):
        name = reference.rpartition(":")[2]
        raise TaskError(
            f"task {reference}: {report.message.removeprefix(f'task {name}: ').removeprefix(f'{name}: ')}"
        )
