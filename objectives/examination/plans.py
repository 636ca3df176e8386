"""The same micro-batches under other plans: how a step is split, and over how many devices, is no affair of the user's code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ...spaces.laws.examination import Examination, Finding
from ...spaces.plan import BatchPlan
from ..parallel.data_parallel import Ranks
from ..task import Task
from ..training import TrainingRun
from .copies import location_of, unchanged
from .examine import found_in_memory
from .fixed_noise import seed_draws
from .step import differing

# Processor seconds that making the model and one step may take.
_MAKING_S = 10.0
# Relative difference of updates that is none of rounding.
_ANOTHER = 1e-3


def with_plans(
    examination: Examination, run: TrainingRun, make: Callable[[], Any], smallest: int, devices: int
) -> Examination:
    """The examination with whether updates of the task that `make` returns depend on `setup.plan`, if none is refused yet."""
    if examination.refusals:
        return examination
    started, find = time.perf_counter(), partial(_findings, run, make, smallest, devices)
    with unchanged(run.task):
        found = found_in_memory("the use of setup.plan", location_of(run, "loss"), run.setup.device, find)
    seconds = examination.seconds + time.perf_counter() - started
    return replace(examination, findings=(*examination.findings, *found), seconds=seconds)


def _findings(run: TrainingRun, make: Callable[[], Any], smallest: int, devices: int) -> Iterator[Finding]:
    where, size = location_of(run, "loss"), 3 * smallest
    if run.task.couples_samples or run.data.training_set < size:
        return
    started = time.process_time()
    update = _update(run, make(), BatchPlan(size), smallest)
    if (took_s := time.process_time() - started) > _MAKING_S:
        yield _unexamined(where, f"making the model and a step take {took_s:.0f} s of processor time")
        return
    others = (
        ("2 micro-batches rather than 1", BatchPlan(size, 2)),
        ("2 devices rather than 1", BatchPlan(size, devices=2)),
    )
    for what, plan in others[: min(devices, 2)]:
        if (off := differing(_update(run, make(), plan, smallest), update)) > _ANOTHER:
            repeats = differing(_update(run, make(), BatchPlan(size), smallest), update) <= _ANOTHER
            yield (
                plan_finding(where, off, what)
                if repeats
                else _unexamined(where, "two updates of the same plan differ")
            )
            return


def plan_finding(where: str, off: float, what: str) -> Finding:
    """That updates, or gradients, of the same micro-batches differ by `off` where `setup.plan` says something else of them."""
    message = (
        f"expected the same update for the same micro-batches, got one that differs by {off:.2g} (relative) where setup.plan "
        f"says {what}: the code computes something from it, such as a loss that is divided by the accumulation, or a rate that "
        "grows with the devices. The step has that already (a Loop's in part.weight); leave it out."
    )
    return Finding("plan", where, message, off)


def _unexamined(where: str, why: str) -> Finding:
    return Finding("unexamined", where, f"the use of setup.plan was not examined: {why}")


def _update(run: TrainingRun, task: Task, plan: BatchPlan, smallest: int) -> list[Tensor]:
    """The change of the parameters in one step in the same two micro-batches, where the setup has this plan."""
    training = run.setup.training.model_copy(update={"compile": False})
    setup = replace(run.setup, plan=plan, largest_micro_batch=2 * smallest, training=training)
    other = TrainingRun(task, setup, Ranks())
    parts = [_part(other, 0, 2 * smallest), _part(other, 2 * smallest, smallest)]
    before = [parameter.detach().clone() for parameter in other.parameters]
    other.rates.set(0.5)
    seed_draws(0)
    other.step(parts, 3 * smallest)
    return [(parameter.detach() - was).cpu() for parameter, was in zip(other.parameters, before, strict=True)]


def _part(run: TrainingRun, start: int, samples: int) -> tuple[int, Any]:
    return samples, run.train_fetcher.fetch(run.stream.take(start, samples))
