"""Time whole optimizer steps, to fit the law of `spaces.laws.step_time` to them.

Timed steps are those of a trial: its model, loader, schedule and micro-batches, with a learning rate of zero so that
parameters do not change. Plans are timed in random order, round after round, so that load on the machine affects all alike.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from functools import partial, reduce
from operator import add
from statistics import median
from typing import Any

from ...spaces.errors import ProfilingError, TaskError
from ...spaces.laws.device import DeviceProfile, ProfileRequest
from ...spaces.laws.step_time import PRECISION, StepTime, TimedPlan, refined_plans, timing_plans
from ...spaces.plan import BatchPlan
from ...spaces.trial import TrialSetup
from ..adapters.loop_task import uses_loop
from ..data.batches import in_order
from ..engine import Engine
from ..loading import load_task
from ..machine import accelerator
from ..machine.device_memory import is_out_of_memory, release_memory
from ..machine.processor import HostLoad, OtherPrograms, waited_s
from ..parallel.meeting import RankDiedError
from ..parallel.rank_processes import over_ranks
from ..steps.step_clock import trains_alone
from ..task import Task
from ..training import TrainingRun
from .exchange import exchange_over
from .fit import FEWEST_ROUNDS, fit_step_time, leave_one_out, with_uncertainty
from .held import Held, Steps, step_of

# Consecutive steps to average, by the seconds of one step at most. The first step after a change of shape is up to 1.45
# times slower and is dropped. Averages of three short steps were slower than in training, of ten they are not (docs/log.md).
_DROPPED = 1
_TIMED_STEPS = ((0.05, 10), (0.3, 3), (math.inf, 1))
# Steps to average before it is known how long they take.
_FIRST_STEPS = 3
# Samples for timing evaluation, and rounds in which it is timed.
_EVALUATION_SAMPLES, _EVALUATION_ROUNDS = 512, 3
# A smaller share of the machine's cores changes times less than they vary anyway.
_SHARED = 0.02
# At most this share of a time is left out as a wait.
_MOST_LEFT_OUT = 0.9
# Minimum rounds before the law's interval is checked.
_MIN_ROUNDS = 5

_NOT_KNOWN = HostLoad(0.0)


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement of every plan: seconds of a step, and seconds of it spent waiting for input.

    `evaluations` are seconds to evaluate a sample: none, one, or one per plan, in batches of the plan's micro-batch size.
    `load` is what happened on the machine meanwhile; the waits for a core in it, if any, are left out of the steps.
    """

    steps: tuple[tuple[float, float], ...]
    evaluations: tuple[float, ...] = ()
    load: HostLoad = _NOT_KNOWN


def timed_rounds(
    reference: str, setup: TrialSetup, plans: Sequence[BatchPlan], evaluates_each: bool = False
) -> Iterator[Round]:
    """Time the plans in endless rounds; all plans must be for the same number of devices.

    Args:
        evaluates_each: time evaluation in every round, in batches of each plan's size, rather than a few times in total.

    Raises:
        ProfilingError: a rank died.
    """
    (devices,) = {plan.devices for plan in plans}
    if devices == 1:
        yield from _rounds(reference, setup, plans, evaluates_each)
        return
    values = [astuple(plan) for plan in plans]
    try:
        ranks = over_ranks(
            devices,
            setup.device,
            setup.cpus,
            rounds_in_rank,
            reference,
            setup.to_dict(),
            values,
            evaluates_each,
        )
        with closing(ranks) as rounds:  # type: ignore[type-var]
            yield from rounds
    except RankDiedError as error:
        raise ProfilingError(f"timing steps on {devices} devices: {error}") from None


def rounds_in_rank(
    reference: str, setup: Mapping[str, Any], plans: Sequence[tuple[Any, ...]], evaluates_each: bool
) -> Iterator[Round]:
    """One rank's part of `timed_rounds`."""
    yield from _rounds(
        reference, TrialSetup.from_dict(setup), [BatchPlan(*plan) for plan in plans], evaluates_each
    )


def _rounds(
    reference: str, setup: TrialSetup, plans: Sequence[BatchPlan], evaluates_each: bool
) -> Iterator[Round]:
    training, setup = load_task(reference), replace(setup, plan=plans[0])
    if not isinstance(training, Task) and not uses_loop(training):
        raise TaskError(
            f"task {reference}: expected a Task, got a generator, whose steps cannot be timed separately"
        )
    with closing(Held(training, setup)) as held:
        timing = _Timing(held.engine, plans, evaluates_each)
        while True:
            yield held.run(timing.round)


class _Timing:
    """Times plans of a training, round after round."""

    def __init__(self, engine: Engine, plans: Sequence[BatchPlan], evaluates_each: bool) -> None:
        self._engine, self._plans, self._evaluates_each = engine, plans, evaluates_each
        setup = engine.setup
        # Waits of the training's thread for a core, which are other programs' doing, are no part of a step's time.
        self._leaves_out_waits = setup.device == "cpu" and trains_alone(setup)
        self._counts, self._number = [_FIRST_STEPS] * len(plans), 0
        # Loader processes fetch some micro-batches ahead, so steps are counted beforehand: who asks first decides.
        self._decided: dict[tuple[int, int], int] = {}
        self._orders = orders(len(plans))
        self._loader = engine.loader(
            plans[index]
            for number, order in enumerate(orders(len(plans)))
            for index in order
            for _ in range(self._dropped_steps(index) + self._timed_steps(number, index))
        )

    def _dropped_steps(self, index: int) -> int:
        """Number of steps before the timed ones, which use up the batches that were fetched during other plans."""
        return _DROPPED + -(-self._engine.fetched_ahead // self._plans[index].accumulation)

    def _timed_steps(self, number: int, index: int) -> int:
        """Number of timed steps in a round; loaders deliver in bursts, several of which must be covered."""
        covering = -(-2 * self._engine.fetched_ahead // self._plans[index].accumulation)
        return self._decided.setdefault((number, index), max(self._counts[index], covering))

    def round(self, engine: Any) -> Steps:
        """The next `Round`."""
        setup, number, order = engine.setup, self._number, next(self._orders)
        before = HostLoad.now(waits=self._leaves_out_waits)
        steps: dict[int, tuple[float, float]] = {}
        evaluations: dict[int, float | None] = {}
        for index in order:
            steps[index] = yield from self._timed(index)
            if number == 0 and not setup.training.workers:
                step_s = engine.ranks.max_over_ranks(steps[index][0])
                self._counts[index] = next(count for limit_s, count in _TIMED_STEPS if step_s <= limit_s)
            if self._evaluates_each:
                evaluations[index] = evaluation_s(engine, self._plans[index].largest_micro_batch)
        if not self._evaluates_each and number < _EVALUATION_ROUNDS:
            evaluations[0] = evaluation_s(engine, setup.evaluation_batch or _EVALUATION_SAMPLES)
        self._number += 1
        return Round(
            tuple(steps[index] for index in range(len(self._plans))),
            tuple(took_s for index in sorted(evaluations) if (took_s := evaluations[index]) is not None),
            HostLoad.now(waits=self._leaves_out_waits) - before,
        )

    def _timed(self, index: int) -> Steps:
        """Seconds of a step, and seconds of it spent waiting for input."""
        steps = self._timed_steps(self._number, index)
        yield from self._taken(index, self._dropped_steps(index))
        for_input_s, waited_before = self._loader.waited_s, waited_s() or 0.0
        elapsed_s = yield from self._taken(index, steps)
        if self._leaves_out_waits:
            elapsed_s -= min((waited_s() or 0.0) - waited_before, _MOST_LEFT_OUT * elapsed_s)
        return elapsed_s / steps, (self._loader.waited_s - for_input_s) / steps

    def _taken(self, index: int, steps: int) -> Steps:
        """Take so many steps; returns their seconds together: a GPU runs asynchronously."""
        engine, plan = self._engine, self._plans[index]
        accelerator.synchronize(engine.device)
        started = time.perf_counter()
        for _ in range(steps):
            yield from step_of(engine, engine.micro_batches(plan, self._loader), plan.effective_batch)
        accelerator.synchronize(engine.device)
        return time.perf_counter() - started


def evaluation_s(run: Engine, batch: int) -> float | None:
    """Seconds to evaluate one sample in batches of this size, after one batch of warm-up; a loop evaluates by itself."""
    if not isinstance(run, TrainingRun):
        return None
    count = min(max(_EVALUATION_SAMPLES, 2 * batch * run.ranks.count), len(run.data.validation))  # type: ignore[arg-type]
    keys = in_order(count, min(batch, -(-count // run.ranks.count)), run.setup.seed)
    run.evaluate(keys[: run.ranks.count])
    started = time.perf_counter()
    run.evaluate(keys)
    return (time.perf_counter() - started) / count


def orders(count: int) -> Iterator[list[int]]:
    """Random orders of the plans, the same in every rank; the first ascends by size, as a warm-up."""
    rng = random.Random(0)
    yield list(range(count))
    while True:
        yield rng.sample(range(count), count)


def measured_step_time(
    rounds: Iterator[Round], plans: Sequence[BatchPlan], limit_s: float, *, on_cpu: bool = False
) -> StepTime:
    """Fit the law to rounds until its interval is below 2 % or the time limit is reached; at least one round.

    What other programs used of a CPU meanwhile, and what its host gave to other virtual machines, widens the interval: how
    much that slows a step is not known. So timing continues within the limit until enough rounds had the CPU.

    The first round is a warm-up: it is dropped if there are others, and the limit counts from its end.
    """
    started, others = math.inf, OtherPrograms()
    measured: list[Round] = []
    law: StepTime | None = None
    for measured_round in rounds:
        measured.append(measured_round)
        started = min(started, time.perf_counter())
        expired = time.perf_counter() - started >= limit_s
        if not expired and (len(measured) <= _MIN_ROUNDS or len(measured) % 3):
            continue
        law = with_uncertainty(fitted(measured, plans))
        law = disturbed(law, others.share() if on_cpu else 0.0, law.stolen)
        if expired or (law.interval is not None and law.interval < PRECISION):
            break
    assert law is not None
    return law


# A law that misses a timed plan by more than this, when fitted without it, is refined there.
_MISFIT = 0.03
# Refinements at most.
_REFINEMENTS = 4


def refined_step_time(
    rounds_of: Callable[[list[BatchPlan]], Iterator[Round]], plans: list[BatchPlan], limit_s: float
) -> StepTime:
    """Time, look where the law fits worst, and time more sizes there; half of the time is kept for the final plans.

    On a GPU a step takes hardly longer with more samples until the device is busy, and much longer from then on: the law
    bends at a size that is not known beforehand.

    Args:
        rounds_of: starts timing these plans.
    """
    started = time.perf_counter()
    for _ in range(_REFINEMENTS):
        with closing(rounds_of(plans)) as rounds:  # type: ignore[type-var]  # a generator
            law = measured_step_time(rounds, plans, limit_s / (2 * _REFINEMENTS))
        fewest = min(plan.accumulation for plan in plans)
        errors = {
            plan: error for plan, error in leave_one_out(law.timed).items() if plan.accumulation == fewest
        }
        worst = max(errors, key=lambda plan: errors[plan], default=None)
        finer = plans if worst is None else refined_plans(plans, worst.largest_micro_batch)
        if (
            worst is None
            or errors[worst] < _MISFIT
            or finer == plans
            or time.perf_counter() - started > limit_s / 2
        ):
            break
        plans = finer
    with closing(rounds_of(plans)) as rounds:  # type: ignore[type-var]
        return measured_step_time(rounds, plans, max(limit_s - (time.perf_counter() - started), limit_s / 2))


def fitted(rounds: Sequence[Round], plans: Sequence[BatchPlan]) -> StepTime:
    """The law of rounds in which these plans were timed; the first round, a warm-up, is left out if there are others.

    What a control group's limit costs is a property of the machine, as its cores are. It comes in bursts, longer than a small
    step and shorter than a training: so it is left out of each step, and added to all alike.
    """
    used = calm(rounds[1:] or rounds)
    load = reduce(add, (timed_round.load for timed_round in used))
    held_back = min(load.held_back_share or 0.0, _MOST_LEFT_OUT)
    timed = [
        TimedPlan(
            plan,
            tuple(timed_round.steps[index][0] / (1 - held_back) for timed_round in used),
            median(timed_round.steps[index][1] for timed_round in used),
        )
        for index, plan in enumerate(plans)
    ]
    evaluations = [timed_round.evaluations[0] for timed_round in rounds if timed_round.evaluations]
    return replace(
        fit_step_time(timed),
        evaluate_sample_s=median(evaluations) if evaluations else None,
        stolen=load.stolen_share or 0.0,
        held_back=held_back,
    )


def calm(rounds: Sequence[Round]) -> Sequence[Round]:
    """The rounds in which the machine's host left it its cores; all of them where those are too few for an interval.

    A low quantile of all is still that of the calmest.
    """
    found = [timed_round for timed_round in rounds if (timed_round.load.stolen_share or 0.0) < _SHARED]
    return found if len(found) >= FEWEST_ROUNDS else rounds


def disturbed(law: StepTime, others: float, stolen: float) -> StepTime:
    """The law of times taken while others had these shares of the machine."""
    others, stolen = (share if share > _SHARED else 0.0 for share in (others, stolen))
    interval = None if law.interval is None else math.hypot(law.interval, others, stolen)
    return replace(law, others=others, stolen=stolen, interval=interval)


def with_step_times(
    reference: str, profile: DeviceProfile, request: ProfileRequest, among: Sequence[int]
) -> DeviceProfile:
    """The profile with a step-time law for each number of devices among these, if the study allots time for it.

    Raises:
        ProfilingError: a rank died.
    """
    refused = (
        request.highest > (profile.training_set or request.highest)
        or profile.unused_parameters
        or profile.other_costs
    )
    if not request.timing_s or refused:
        return profile  # no need to time what the driver will refuse anyway
    laws = [*profile.step_times]
    for devices in sorted({*request.devices} & {*among}):
        smallest = profile.smallest_micro_batch
        share = request.largest_share(profile.training_set, devices)
        cap = profile.cap_on(devices, None) or share
        if profile.embedding == "cached":
            share = max(share // 2, smallest)
        plans_up_to = partial(
            timing_plans,
            smallest,
            devices=devices,
            dense=profile.kind == "gpu",
            activation_checkpointing=profile.activation_checkpointing,
            embedding=profile.embedding if profile.splits else "whole",
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
            law = replace(
                law, exchange=exchange_over(devices, setup.device, setup.cpus, profile.gradient_bytes)
            )
        laws.append(law)
    profile = replace(profile, step_times=tuple(laws), timing_s=request.timing_s)
    others = tuple(
        with_step_times(reference, alternative, request, among) for alternative in profile.alternatives
    )
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
                return refined_step_time(
                    lambda chosen: timed_rounds(reference, setup, chosen), plans, limit_s
                )
            with closing(timed_rounds(reference, setup, plans)) as rounds:  # type: ignore[type-var]  # a generator
                return measured_step_time(rounds, plans, limit_s, on_cpu=setup.device == "cpu")
        except Exception as error:
            largest = max(plan.largest_micro_batch for plan in plans) // 2
            if not is_out_of_memory(error) or largest < setup.smallest_micro_batch:
                raise
        release_memory(setup.device)
        plans = plans_up_to(largest)
