"""What runs in the process of an attempt: the training code, whose every ending is turned into an Outcome."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from ..spaces.errors import BsearchError, InfeasiblePlanError, TaskError
from ..spaces.record import name_fault, type_fault
from ..spaces.trial import LEFT, Measurement, Outcome, TrialSetup
from .adapters.loop_task import uses_loop
from .loading import contained, described, load_task, user_code_location
from .loop import forget_loop, newest_loop
from .machine.accelerator import device_of
from .machine.device_memory import (
    EvaluationMemoryError,
    is_out_of_memory,
    limit_memory,
)
from .machine.torch_settings import seed_everything
from .state.leaving import Leaving, asked_to_leave
from .task import Task, TrainFunction
from .training import train_task


def takes_ranks(reference: str) -> Iterator[bool]:
    """Whether the training on several devices is a process for each of them."""
    task = load_task(reference)
    yield isinstance(task, Task) or uses_loop(task)


def attempt_in_rank(reference: str, setup: Mapping[str, Any]) -> Iterator[Measurement | Outcome]:
    """What `start_attempt` runs in each process."""
    yield from attempt(reference, TrialSetup.from_dict(setup))


def attempt(reference: str, setup: TrialSetup) -> Iterator[Measurement | Outcome]:
    """Run the training code named by `reference` in this process; the last value yielded is the attempt's Outcome.

    On several devices every rank runs it; its measurements are aggregated over all.
    """
    try:
        task = load_task(reference)
    except TaskError as error:
        yield Outcome("error", str(error))
        return
    yield from _attempt(task, setup, reference)


def _attempt(task: Task | TrainFunction, setup: TrialSetup, reference: str) -> Any:
    name = reference.rpartition(":")[2]
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
        else:
            yield Outcome("error", f"{name}: {described(error)}", "".join(traceback.format_exception(error)))
    finally:
        if hasattr(measurements, "close"):
            with suppress(Exception, SystemExit), contained():  # how its code cleans up changes no outcome
                measurements.close()
        forget_loop()


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
    words = str(error).splitlines() or [type(error.__cause__ or error).__name__]
    return Outcome("out_of_memory", words[0], micro_batch=failed)
