"""Measure the power of a trial's devices at several micro-batches, from their own counters of energy.

Counters move on every 20 to 100 ms only, so each size trains for a second at a time, after a pause in which the device settles
and its counter forgets the size before.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, replace
from statistics import mean
from typing import Any

import torch

from ...spaces.errors import ProfilingError
from ...spaces.laws.step_time import StepTime
from ...spaces.plan import BatchPlan
from ...spaces.trial import TrialSetup
from ..loading import load_task
from ..machine.accelerator import widest_float
from ..machine.energy import EnergyCounter
from ..parallel.rank_main import RankDiedError
from ..parallel.rank_processes import rank_processes, ranks_here
from ..steps.loss_sum import LossSum
from ..steps.step_clock import StepClock
from ..task import Task
from ..training import TrainingRun

# Seconds of training before power is read, and while it is, for each size; so often, in turns.
_SETTLING_S, _READING_S, _ROUNDS = 0.4, 1.2, 2
# Sizes at most; between them power changes slowly.
_MOST_SIZES = 6
# Seconds between two looks at a counter.
_LOOK_S = 0.005


def with_power(reference: str, setup: TrialSetup, law: StepTime) -> StepTime:
    """The step-time law with the power of its devices, all of a trial's together.

    Raises:
        ProfilingError: a device's energy cannot be read, or a rank died.
    """
    plans = power_plans(entry.plan for entry in law.timed)
    counts = [[max(math.ceil(seconds / law.step_s(plan)), 1) for seconds in (_SETTLING_S, _READING_S)] for plan in plans]
    if law.devices == 1:
        readings = next(_readings(reference, setup, plans, counts))
    else:
        try:
            ranks = rank_processes(law.devices, setup.device, setup.cpus)
            values = [astuple(plan) for plan in plans]
            with closing(ranks.run(readings_in_rank, reference, setup.to_dict(), values, counts)) as reports:  # type: ignore[type-var]
                readings = next(reports)
        except RankDiedError as error:
            raise ProfilingError(f"reading the power of {law.devices} devices: {error}") from None
    points = tuple((plan.largest_micro_batch, mean(watts)) for plan, watts in zip(plans, readings, strict=True))
    spread = max((max(watts) - min(watts)) / (2 * mean(watts)) for watts in readings)
    return replace(law, power=points, power_spread=spread)


def power_plans(timed: Iterable[BatchPlan]) -> list[BatchPlan]:
    """The plans under which power is read: of those that were timed, a few sizes in the fewest micro-batches, smallest first.

    A step then takes the time and memory that are known, and computes what a trial's does: of cached embeddings two
    micro-batches, each of them run twice.

    >>> plans = power_plans([BatchPlan(8, 2), BatchPlan(32, 2), BatchPlan(32, 4)])
    >>> [(plan.effective_batch, plan.accumulation) for plan in plans]
    [(8, 2), (32, 2)]
    """
    timed = list(timed)
    fewest = min(plan.accumulation for plan in timed)
    plans = sorted((plan for plan in timed if plan.accumulation == fewest), key=lambda plan: plan.largest_micro_batch)
    places = sorted({round(place * (len(plans) - 1) / (_MOST_SIZES - 1)) for place in range(_MOST_SIZES)})
    return [plans[place] for place in places]


def readings_in_rank(
    reference: str, setup: Mapping[str, Any], plans: Sequence[tuple[Any, ...]], counts: Sequence[Sequence[int]]
) -> Iterator[list[list[float]]]:
    """One rank's part of `with_power`."""
    yield from _readings(reference, TrialSetup.from_dict(setup), [BatchPlan(*plan) for plan in plans], counts)


def _readings(
    reference: str, setup: TrialSetup, plans: Sequence[BatchPlan], counts: Sequence[Sequence[int]]
) -> Iterator[list[list[float]]]:
    """Watts of all devices under each plan, once a round."""
    counter = EnergyCounter(setup.device)
    task = load_task(reference)
    if not isinstance(task, Task):
        raise ProfilingError("power is read while a Task trains, not a training loop of your own")
    run = TrainingRun(task, replace(setup, plan=plans[0]))
    run.modes.train(run.model)
    run.rates.freeze()
    clock, loss_sum = StepClock(run, counts_memory=False), LossSum(run.device)
    # Up and down again, so that a device that grows warm meanwhile does so for all sizes alike.
    order = [place for turn in range(_ROUNDS) for place in list(range(len(plans)))[:: -1 if turn % 2 else 1]]
    loader = run.loader(plans[place] for place in order for _ in range(sum(counts[place])))
    readings: list[list[float]] = [[] for _ in plans]
    for place in order:
        settling, reading = counts[place]
        for _ in range(settling):
            run.train_step(plans[place], loader, 0.5, clock, loss_sum)
        clock.restart()  # synchronises with the GPU
        with PowerReading(counter) as power:
            for _ in range(reading):
                run.train_step(plans[place], loader, 0.5, clock, loss_sum)
            clock.restart()
        # Ranks on CPUs of one machine read the same counter.
        own = power.watts / (ranks_here(plans[place].devices) if setup.device == "cpu" else 1)
        total = run.ranks.mean(torch.tensor([own], device=run.device, dtype=widest_float(run.device))) * run.ranks.count
        readings[place].append(float(total))
    yield readings


class PowerReading:
    """Average power between the first and the last move of a counter while the context lasts."""

    def __init__(self, counter: EnergyCounter) -> None:
        self._counter, self._over = counter, threading.Event()
        self._moves: list[tuple[float, float]] = []  # (seconds, joules), after each move
        self._thread = threading.Thread(target=self._look, daemon=True, name="power")

    def __enter__(self) -> PowerReading:
        self._started = time.perf_counter(), self._counter.joules()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._seconds = time.perf_counter() - self._started[0]

    def _look(self) -> None:
        before = self._started[1]
        while not self._over.wait(_LOOK_S):
            joules = self._counter.joules()
            if joules != before:
                self._moves.append((time.perf_counter(), joules))
                before = joules

    @property
    def watts(self) -> float:
        """The average power.

        Raises:
            ProfilingError: the counter changed less than twice, so no power can be computed.
        """
        if len(self._moves) < 2:
            raise ProfilingError(f"its energy counter changed {len(self._moves)} times in {self._seconds:.2g} s of training")
        first, last = self._moves[0], self._moves[-1]
        return (last[1] - first[1]) / (last[0] - first[0])
