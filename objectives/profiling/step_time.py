"""Timing whole optimizer steps, so that the law of `spaces.step_time` can be fitted to them.

What is timed is what a trial runs: its own model, loader, rates and passes, at learning rate zero so that nothing is
trained away. Plans are timed in random order, round after round, so that a busy minute of the machine falls on all of them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ...spaces.errors import ProfilingError, TaskError
from ...spaces.plan import BatchPlan
from ...spaces.step_time import PRECISION, StepTime, TimedPlan
from ...spaces.trial import TrialSetup
from ..batches import in_order
from ..data_parallel import RankDiedError, rank_processes
from ..loading import load_task
from ..step_clock import StepClock
from ..task import Task
from ..training import TrainingRun
from .fit import fit_step_time, with_trust

# Steps in a row whose mean counts, by the seconds that one takes at most; the first after a change of shape is up to 1.45
# times slower and is dropped. Three short steps in a row came out slower than a training's, ten do not (docs/log.md).
_DROPPED = 1
_KEPT = ((0.05, 10), (0.3, 3), (math.inf, 1))
# Samples to time evaluation with, and rounds in which it is timed.
_EVALUATED, _EVALUATED_ROUNDS = 512, 3
# Rounds before the law's interval is asked for.
_FEWEST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Round:
    """One look at every plan: seconds of a step and of the waiting for input in it.

    `evaluations` are seconds to evaluate a sample: one figure or none, or one a plan in passes as large as the plan's.
    """

    steps: tuple[tuple[float, float], ...]
    evaluations: tuple[float, ...] = ()


def timed_rounds(
    reference: str, setup: TrialSetup, plans: Sequence[BatchPlan], evaluates_each: bool = False
) -> Iterator[Round]:
    """Rounds of timing the plans, without end; all plans are for the same number of devices.

    Args:
        evaluates_each: evaluate in passes of each plan's size in every round, rather than a few times in all.

    Raises:
        ProfilingError: a rank of several died.
    """
    (devices,) = {plan.devices for plan in plans}
    if devices == 1:
        yield from _rounds(reference, setup, plans, evaluates_each)
        return
    values = [(plan.effective_batch, plan.accumulation, plan.devices) for plan in plans]
    try:
        ranks = rank_processes(devices, setup.device, setup.cpus)
        with closing(ranks.run(rounds_in_rank, reference, setup.to_dict(), values, evaluates_each)) as rounds:  # type: ignore[type-var]
            yield from rounds
    except RankDiedError as error:
        raise ProfilingError(f"timing steps on {devices} devices: {error}") from None


def rounds_in_rank(
    reference: str, setup: Mapping[str, Any], plans: Sequence[tuple[int, int, int]], evaluates_each: bool
) -> Iterator[Round]:
    """One rank's part of `timed_rounds`."""
    yield from _rounds(reference, TrialSetup.from_dict(setup), [BatchPlan(*plan) for plan in plans], evaluates_each)


def _rounds(reference: str, setup: TrialSetup, plans: Sequence[BatchPlan], evaluates_each: bool) -> Iterator[Round]:
    task = load_task(reference)
    if not isinstance(task, Task):
        raise TaskError(f"task {reference}: is a generator: its steps are its own and cannot be timed apart")
    run = TrainingRun(task, replace(setup, plan=plans[0]))
    run.model.train()
    run.freeze_updates()
    clock, summed = StepClock(run, counts_memory=False), torch.zeros((), device=run.device, dtype=torch.float64)
    orders = _orders(len(plans))
    kept = [3] * len(plans)
    # With loader processes the order of steps is fixed some passes ahead, so how many there are is settled beforehand.
    loader = run.loader(
        plans[index]
        for order in _orders(len(plans))
        for index in order
        for _ in range(_dropped(run, plans[index]) + _ahead(run, plans[index], kept[index]))
    )
    for number, order in enumerate(orders):
        steps: dict[int, tuple[float, float]] = {}
        evaluations: dict[int, float] = {}
        for index in order:
            steps[index] = _timed(run, plans[index], loader, _ahead(run, plans[index], kept[index]), clock, summed)
            if number == 0 and not run.setup.training.workers:
                step_s = run.ranks.longest(steps[index][0])
                kept[index] = next(count for limit_s, count in _KEPT if step_s <= limit_s)
            if evaluates_each:
                evaluations[index] = _evaluated(run, plans[index].largest_micro_batch)
        if not evaluates_each and number < _EVALUATED_ROUNDS:
            evaluations[0] = _evaluated(run, setup.evaluation_batch or _EVALUATED)
        yield Round(
            tuple(steps[index] for index in range(len(plans))), tuple(evaluations[index] for index in sorted(evaluations))
        )


def _evaluated(run: TrainingRun, batch: int) -> float:
    """Seconds of evaluating one sample in passes of so many: a first pass warms up."""
    count = min(max(_EVALUATED, 2 * batch * run.ranks.count), len(run.data.evaluation))  # type: ignore[arg-type]
    keys = in_order(count, min(batch, -(-count // run.ranks.count)), run.setup.seed)
    run.evaluate(keys[: run.ranks.count])
    begun = time.perf_counter()
    run.evaluate(keys)
    return (time.perf_counter() - begun) / count


def _orders(count: int) -> Iterator[list[int]]:
    """Random orders of the plans, the same in every rank; the first from the smallest to the largest, to warm up."""
    chance = random.Random(0)
    yield list(range(count))
    while True:
        yield chance.sample(range(count), count)


def _dropped(run: TrainingRun, plan: BatchPlan) -> int:
    """Steps before the timed ones; loader processes have fetched some while other plans ran, which are to be used up."""
    return _DROPPED + -(-2 * run.setup.training.workers // plan.accumulation)


def _ahead(run: TrainingRun, plan: BatchPlan, kept: int) -> int:
    """Timed steps; loader processes deliver in bursts, of which several are to be seen."""
    return max(kept, -(-4 * run.setup.training.workers // plan.accumulation))


def _timed(
    run: TrainingRun, plan: BatchPlan, loader: Iterator[Any], kept: int, clock: StepClock, summed: Tensor
) -> tuple[float, float]:
    """Seconds of a step and of the waiting for input in it."""
    waits: list[float] = []

    def waiting() -> Iterator[Any]:
        while True:
            begun = time.perf_counter()
            batch = next(loader)
            waits[-1] += time.perf_counter() - begun
            yield batch

    input_s = waiting()

    def step() -> None:
        waits.append(0.0)
        run.train_step(plan, input_s, 0.5, clock, summed)

    for _ in range(_dropped(run, plan)):
        step()
    waits.clear()
    clock.restart()  # waits for a GPU, which runs behind its driver: only the steps together have a time
    begun = time.perf_counter()
    for _ in range(kept):
        step()
    clock.restart()
    return (time.perf_counter() - begun) / kept, sum(waits) / kept


def measured_step_time(rounds: Iterator[Round], plans: Sequence[BatchPlan], limit_s: float) -> StepTime:
    """The law of as many rounds as it takes for its interval to be below 2 %, or as the limit allows; one at least.

    The first round warms up: it is left out where there are others, and the limit counts from its end.
    """
    begun = math.inf
    kept: list[Round] = []
    law: StepTime | None = None
    for seen in rounds:
        kept.append(seen)
        begun = min(begun, time.perf_counter())
        over = time.perf_counter() - begun >= limit_s
        if not over and (len(kept) <= _FEWEST_ROUNDS or len(kept) % 3):
            continue
        law = with_trust(_fitted(kept, plans))
        if over or (law.interval is not None and law.interval < PRECISION):
            break
    assert law is not None
    return law


def _fitted(rounds: Sequence[Round], plans: Sequence[BatchPlan]) -> StepTime:
    used = rounds[1:] or rounds
    timed = [
        TimedPlan(plan, tuple(one.steps[index][0] for one in used), median(one.steps[index][1] for one in used))
        for index, plan in enumerate(plans)
    ]
    evaluations = [one.evaluations[0] for one in rounds if one.evaluations]
    return replace(fit_step_time(timed), evaluate_sample_s=median(evaluations) if evaluations else None)
