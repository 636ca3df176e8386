"""One attempt at a trial on a worker: runs the training code and turns every ending into an Outcome."""

from __future__ import annotations

import errno
import gc
import traceback
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from ..spaces.errors import BsearchError, InfeasiblePlanError, TaskError
from ..spaces.record import name_fault, type_fault
from ..spaces.trial import LEFT, NODE_DIED, Measurement, Outcome, TrialSetup
from .adapters.loop_task import uses_loop
from .loading import contained, described, error_line, load_task, user_code_location
from .loop import forget_loop, newest_loop
from .machine.accelerator import device_of
from .machine.device_memory import (
    EvaluationMemoryError,
    is_out_of_memory,
    limit_memory,
    process_fault,
    release_memory,
)
from .machine.environment import same_folder
from .machine.process_state import kept_process
from .machine.torch_settings import seed_everything
from .model.own_weights import own_weights
from .parallel.rank_main import RankDiedError
from .parallel.rank_processes import ask_ranks_to_leave, close_ranks, rank_processes
from .state.leaving import Leaving, ask_to_leave, asked_to_leave, stay
from .task import Task, TrainFunction
from .training import train_task

# The beginning of the message of an attempt that could not begin, since nothing can train in its process.
PROCESS_FAILED = "its process cannot train"


def leave() -> None:
    """Ask the training of this process, or of its ranks, to write a checkpoint and end; may be called in a signal handler."""
    ask_to_leave()
    ask_ranks_to_leave()


def start_attempt(reference: str, setup: TrialSetup) -> Iterator[Measurement | Outcome]:
    """Run the training code named by `reference`; the last value yielded is the attempt's Outcome.

    Closing the iterator stops the trial: the user's generator gets GeneratorExit and can clean up.
    """
    with same_folder():
        yield from _started(reference, setup)


def _started(reference: str, setup: TrialSetup) -> Iterator[Measurement | Outcome]:
    try:
        task = load_task(reference)
    except TaskError as error:
        yield Outcome("error", str(error))
        return
    if setup.plan.devices > 1 and (isinstance(task, Task) or uses_loop(task)):
        attempt = _over_ranks(reference, setup)
    else:
        if setup.device == "gpu":
            close_ranks()  # ranks of another trial hold memory on this GPU
        attempt = _in_kept_process(_attempt(task, setup, reference))
    try:
        yield from attempt
    finally:
        attempt.close()
        stay()


def _in_kept_process(attempt: Any) -> Iterator[Measurement | Outcome]:
    """An attempt's reports, in a process that is afterwards as it was before; the outcome says what its code had changed."""
    outcome: Outcome | None = None
    with kept_process() as changes, own_weights(), closing(attempt):
        for report in attempt:
            if isinstance(report, Outcome):
                outcome = report
            else:
                yield report
    if outcome is not None:
        yield replace(outcome, changes=str(changes), spoils=outcome.spoils or bool(changes.left))


def _over_ranks(reference: str, setup: TrialSetup) -> Any:
    """The attempt on several devices: every rank runs it, and rank 0 reports."""
    try:
        ranks = rank_processes(setup.plan.devices, setup.device, setup.cpus)
        with closing(ranks.run(attempt_in_rank, reference, setup.to_dict())) as reports:  # type: ignore[type-var]
            if asked_to_leave():  # while they started
                yield Outcome("interrupted", LEFT)
                return
            yield from reports
    except RankDiedError as error:
        yield Outcome("interrupted", f"{NODE_DIED}: {error}" if error.machine else str(error))
    except BsearchError as error:
        yield Outcome("error", str(error))


def attempt_in_rank(reference: str, setup: Mapping[str, Any]) -> Iterator[Measurement | Outcome]:
    """One rank's part of an attempt; its measurements are aggregated over all ranks."""
    yield from _in_kept_process(_attempt(load_task(reference), TrialSetup.from_dict(setup), reference))


def _attempt(task: Task | TrainFunction, setup: TrialSetup, reference: str) -> Any:
    name = reference.rpartition(":")[2]
    if fault := process_fault(setup.device):
        yield Outcome("interrupted", f"{PROCESS_FAILED}: {fault}")
        return
    if not isinstance(task, Task):
        seed_everything(setup.seed)  # so that initial weights of a custom loop follow the trial's seed
        limit_memory(setup.memory_limit_bytes, device_of(setup.device))
    measurements: Any = train_task(task, setup) if isinstance(task, Task) else task(setup)
    if not isinstance(measurements, Iterator):
        yield Outcome(
            "error", f"task {name}: expected to yield Measurement, got {type(measurements).__name__}"
        )
        return
    last: Measurement | None = None
    forget_loop()
    try:
        for measurement in _with_earlier(measurements):
            _check(measurement, last, setup, name)
            last = measurement
            yield measurement
            if fault := measurement.not_finite(setup.metric):
                progress = f"{measurement.samples_seen} of {setup.samples_budget} samples"
                yield Outcome("diverged", f"{fault} after {progress}")
                return
            if setup.is_timed_by_clock and setup.share_of(measurement) == 1:
                break
            if (
                asked_to_leave()
                and not isinstance(task, Task)
                and newest_loop() is None  # which leaves by itself
                and measurement.samples_seen < setup.samples_budget
            ):
                raise Leaving  # a loop saves at its measurements
        _check_end(last, setup, name)
        yield Outcome("complete", _late(last, setup))
    except Leaving:
        yield Outcome("interrupted", LEFT)
    except InfeasiblePlanError as error:
        yield Outcome("infeasible", str(error))
    except BsearchError as error:
        # Several faults have places of their own.
        yield Outcome("error", str(error) if "\n" in str(error) else f"{error}{user_code_location(error)}")
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            yield _out_of_memory(error, setup)
        elif _is_the_systems(error):
            yield Outcome("interrupted", f"{PROCESS_FAILED}: {described(error)}", spoils=True)
        elif _ends_the_process(error):
            yield Outcome("interrupted", f"{NODE_DIED}: its worker was ended")
        else:
            yield Outcome("error", f"{name}: {described(error)}", "".join(traceback.format_exception(error)))
    finally:
        # Generators hold models and data: closing one frees its memory before the next trial starts.
        if hasattr(measurements, "close"):
            with suppress(Exception, SystemExit), contained():  # how its code cleans up changes no outcome
                measurements.close()
        forget_loop()  # which holds them too
        if not isinstance(task, Task):
            gc.collect()  # trainers and their callbacks form reference cycles that hold the model
        release_memory(setup.device)


def _is_the_systems(error: BaseException) -> bool:
    """Whether an operating system that is out of open files raised it, or a library that says so."""
    return getattr(error, "errno", None) in (
        errno.EMFILE,
        errno.ENFILE,
    ) or "Too many open files" in described(error)


# The share by which a training that the clock ends may miss its seconds.
_GRACE = 0.05

_OVER: Any = object()  # a generator has no more


def _with_earlier(measurements: Iterator[Measurement]) -> Iterator[Measurement]:
    """The measurements, after those of an earlier attempt where a `Loop` has resumed from it."""
    measurements, first = iter(measurements), True
    while True:
        with contained():
            measurement = next(measurements, _OVER)
        if first and (loop := newest_loop()) is not None:
            yield from loop.reported
        if measurement is _OVER:
            return
        first = False
        yield measurement


def _ends_the_process(error: BaseException) -> bool:
    """Whether Ray is ending the process, in the midst of the task's code, such as where it has lost its machine."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, SystemExit) and bool(frames) and frames[-1].filename.endswith("ray/_raylet.pyx")


def _check(measurement: object, last: Measurement | None, setup: TrialSetup, name: str) -> None:
    if not isinstance(measurement, Measurement):
        raise TaskError(f"task {name}: expected to yield Measurement, got {type(measurement).__name__}")
    measurement.value(setup.metric)
    faults = (
        name_fault("scores", measurement.scores),
        name_fault("facts", measurement.facts),
        type_fault(measurement.facts),
    )
    if fault := next(filter(None, faults), ""):
        raise TaskError(f"task {name}: {fault}")
    if last is not None and measurement.samples_seen <= last.samples_seen:
        raise TaskError(
            f"task {name}: expected samples_seen to increase, got {measurement.samples_seen} after {last.samples_seen}"
        )
    if last is not None and measurement.elapsed_s < last.elapsed_s:
        raise TaskError(
            f"task {name}: expected elapsed_s to count up from the beginning of the trial, got "
            f"{measurement.elapsed_s:.6g} after {last.elapsed_s:.6g}. After resuming, add the seconds of the last measurement."
        )
    if measurement.samples_seen and not measurement.elapsed_s:
        raise TaskError(
            f"task {name}: expected elapsed_s above 0 after {measurement.samples_seen} samples, got 0. Give the seconds of "
            "training so far, such as time.perf_counter() minus its beginning."
        )


def _check_end(last: Measurement | None, setup: TrialSetup, name: str) -> None:
    if last is None:
        raise TaskError(f"task {name}: expected at least one Measurement, got none")
    if setup.ends_by is not None and "shortened_to" in last.facts:
        return
    if setup.is_timed_by_clock and setup.train_s is not None:
        if last.elapsed_s < setup.train_s * (1 - _GRACE):
            raise TaskError(
                f"task {name}: expected a last Measurement after setup.train_s = {setup.train_s:g} seconds, the last had "
                f"elapsed_s {last.elapsed_s:.4g}. Train until then; where the loop stops early, leave that to the study "
                "(`stopping:`)."
            )
        return
    # A custom loop may round to whole steps; the built-in loop never does.
    if abs(last.samples_seen - setup.samples_budget) >= setup.effective_batch:
        raise TaskError(
            f"task {name}: expected a last Measurement after setup.samples_budget = {setup.samples_budget} samples, within "
            f"less than one step of {setup.effective_batch}; the last had samples_seen {last.samples_seen}. Yield one after "
            "the last step; where the loop stops early, leave that to the study (`stopping:`)."
        )


def _late(last: Measurement | None, setup: TrialSetup) -> str:
    """What is said of a training that the clock should have ended earlier."""
    if (
        last is None
        or setup.train_s is None
        or not setup.is_timed_by_clock
        or last.elapsed_s <= setup.train_s * (1 + _GRACE)
    ):
        return ""
    return f"ended after {last.elapsed_s:.4g} s instead of {setup.train_s:g}, at its first measurement"


def _out_of_memory(error: BaseException, setup: TrialSetup) -> Outcome:
    """`micro_batch` is the size that did not fit, or None if evaluation ran out of memory."""
    failed = None if isinstance(error, EvaluationMemoryError) else setup.plan.largest_micro_batch
    return Outcome("out_of_memory", error_line(error), micro_batch=failed)
