"""Stages about speed: the training loop against the plainest one, and known step times."""

from __future__ import annotations

import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....objectives.digits import Digits
from ....objectives.profiling.step_time import Round, timed_rounds
from ....objectives.task import Task
from ....objectives.training import TrainingRun
from ....spaces.laws.step_time import timing_plans
from ....spaces.plan import BatchPlan
from ....spaces.trial import TrialSetup
from ..claims import Claim, Data, Fact
from ..measured import law_of, rounded
from ..stage import Found, Stage
from .tasks import IMAGES, SMALL_GPT, TINY_GPT, TOKENS, Images, setup_of, small_model, task_of

# Seconds of one burst of steps.
_BURST_S = 0.15

Steps = Callable[[int], float]


def our_loop(task: Task, setup: TrialSetup) -> Steps:
    """A function that runs a number of steps of our loop and returns their seconds."""
    run, plan, device = TrainingRun(task, setup), setup.plan, setup.device
    run.model.train()
    loader = run.loader(itertools.repeat(plan))
    summed = torch.zeros((), dtype=torch.float64, device=run.device)

    def steps(count: int) -> float:
        _wait(device)
        started = time.perf_counter()
        for number in range(count):
            run.rates.set(0.1 + number / 1000)
            summed.add_(run.step(run.micro_batches(plan, loader), plan.effective_batch))
        _wait(device)
        return time.perf_counter() - started

    return steps


def plain_loop(task: Task, batch: int, device: str, parameters: dict[str, Any]) -> Steps:
    """The same of the plainest loop: shuffle, index tensors that lie on the device, cross-entropy, backward, step."""
    setup = setup_of(BatchPlan(batch), device, parameters)
    place = "cuda" if device == "gpu" else "cpu"
    inputs, labels = (part.to(place) for part in task.data(setup).train.tensors)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = task.model(setup).to(place)
    optimizer = task.optimizer(model, setup)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10**6)

    def chunks() -> Iterator[Tensor]:
        while True:
            yield from (
                part for part in torch.split(torch.randperm(len(labels)), batch) if len(part) == batch
            )

    indices = chunks()
    summed = torch.zeros((), device=place)

    def steps(count: int) -> float:
        _wait(device)
        started = time.perf_counter()
        for index in itertools.islice(indices, count):
            if device == "gpu":
                # As an index on the CPU, it would wait for the GPU twice.
                index = index.to(place, non_blocking=True)
            loss = nn.functional.cross_entropy(model(inputs[index]), labels[index])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            summed.add_(loss.detach())
        _wait(device)
        return time.perf_counter() - started

    return steps


def compared(
    first: Callable[[], Steps], second: Callable[[], Steps], rounds: int, builds: int = 7
) -> list[list[tuple[float, float]]]:
    """Seconds of a step of each of two loops, burst by burst, for each time they were built.

    Both are built anew several times, since where their tensors happen to lie moves a step by a few percent for as long as they
    live; then they run in bursts, in alternating order.

    Args:
        rounds: bursts of each in total, at least one a build.
    """
    bursts = []
    for _ in range(builds):
        first_loop, second_loop = first(), second()
        first_loop(5)
        count = max(5, int(_BURST_S / (first_loop(5) / 5)))
        second_loop(5)
        built = []
        for number in range(-(-rounds // builds)):
            order = (first_loop, second_loop) if number % 2 else (second_loop, first_loop)
            seconds = {id(loop): loop(count) / count for loop in order}
            built.append((seconds[id(first_loop)], seconds[id(second_loop)]))
        bursts.append(built)
    return bursts


def loop(stage: Stage) -> Iterator[Found]:
    """Our loop against the plainest one on the same model and batch; on a GPU also its synchronisations."""
    torch.set_num_threads(1)
    small, parameters_of_small = small_model(stage.device)
    cases: list[tuple[str, Task, dict[str, Any], int]] = [
        ("digits net", Digits(), {}, 64),
        ("digits net", Digits(), {}, 1000),
    ]
    cases += [(small, Images(), parameters_of_small, batch) for batch in (32, 256)]
    rounds = 7 if stage.quick else 21
    shares: list[tuple[str, Steps]] = []
    for name, task, parameters, batch in cases:
        if stage.expired:
            yield Fact(f"{name}, batch {batch}", "not measured: out of time")
            continue
        build_ours = partial(our_loop, task, setup_of(BatchPlan(batch), stage.device, parameters))
        build_plain = partial(plain_loop, task, batch, stage.device, parameters)
        bursts = compared(build_ours, build_plain, rounds, builds=3 if stage.quick else 7)
        yield Data("overhead", f"{name}, batch {batch}", {"bursts": rounded(bursts)})
        if stage.device == "gpu":
            ours, plain = build_ours(), build_plain()
            ours(3), plain(3)
            yield Claim(
                f"synchronisations in 10 steps that torch reports: {name}, batch {batch}",
                0,
                float(_synchronisations(ours, 10)),
                unit="",
            )
            yield Fact(
                f"synchronisations of the minimal loop: {name}, batch {batch}",
                str(_synchronisations(plain, 10)),
            )
            shares.append((f"share of time in kernels: {name}, batch {batch}", ours))
    for text, steps in shares:  # last: a profiler may slow what runs after it
        yield Fact(text, f"{100 * _busy_share(steps, 20):.0f} %")


def _synchronisations(steps: Steps, count: int) -> int:
    """Waits for the GPU in this number of steps, without those that time them."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps(count)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchron" in str(warning.message) for warning in caught)


def _busy_share(steps: Steps, count: int) -> float:
    """The share of time in which kernels run."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    seconds = steps(count)
    with torch.profiler.profile(activities=activities) as profile:
        steps(count)
    # Operators on the CPU carry their kernels' time once more.
    on_gpu = [event for event in profile.key_averages() if event.device_type.name == "CUDA"]
    kernels_us = sum(event.self_device_time_total for event in on_gpu if not event.is_user_annotation)
    return float(kernels_us) / 1e6 / seconds


def known_times(stage: Stage) -> Iterator[Found]:
    """The law of step time on plans that it was not fitted to, timed in the same rounds; then in steady training."""
    small, parameters_of_small = small_model(stage.device)
    cases: list[tuple[str, str, dict[str, Any]]] = [(small, IMAGES, parameters_of_small)]
    if not stage.quick:
        cases.append(("small GPT", TOKENS, SMALL_GPT if stage.device == "gpu" else TINY_GPT))
    for name, reference, parameters in cases:
        limit_s = stage.left_s / 2 if name != cases[-1][0] else stage.left_s * 0.7
        yield from law_against(
            stage, name, reference, setup_of(BatchPlan(2), stage.device, parameters), 512, limit_s
        )


def law_against(
    stage: Stage, name: str, reference: str, setup: TrialSetup, highest: int, limit_s: float
) -> Iterator[Found]:
    """The law of a model's step time, fitted up to `highest`, on plans that it was not fitted to; then in steady training."""
    plans = timing_plans(2, highest, dense=stage.device == "gpu")
    rng = random.Random(1)
    unseen: list[BatchPlan] = []
    while len(unseen) < 12:
        plan = BatchPlan(round(4 * (highest / 4) ** rng.random()), rng.choice((1, 1, 2, 3)))
        if plan.effective_batch // plan.accumulation >= 2 and plan not in [*plans, *unseen]:
            unseen.append(plan)
    rounds = rounds_within(reference, replace(setup, smallest_micro_batch=2), [*plans, *unseen], limit_s)
    timings = Data("step times", name, {**timed_values([*plans, *unseen], rounds), "fitted": len(plans)})
    yield timings
    predicted_s = law_of(timings).step_s(unseen[0])
    bursts = _sustained(stage, our_loop(task_of(reference), replace(setup, plan=unseen[0])), predicted_s)
    short = [timed_round.steps[len(plans)][0] for timed_round in rounds[1:]]
    yield Data("sustained", name, rounded({"predicted_s": predicted_s, "short": short, "bursts": bursts}))


def rounds_within(
    reference: str, setup: TrialSetup, plans: Sequence[BatchPlan], limit_s: float
) -> list[Round]:
    """Rounds over these plans for so many seconds; four at least, the first a warm-up."""
    rounds: list[Round] = []
    started = time.monotonic()
    with closing(timed_rounds(reference, setup, plans)) as timed:  # type: ignore[type-var]  # a generator
        for timed_round in timed:
            rounds.append(timed_round)
            if time.monotonic() - started > limit_s and len(rounds) > 3:
                return rounds
    return rounds


def timed_values(plans: Sequence[BatchPlan], rounds: Sequence[Round]) -> dict[str, Any]:
    """Plans and their rounds, as a report holds them."""
    batches = [(plan.effective_batch, plan.accumulation) for plan in plans]
    return {"plans": batches, "rounds": [rounded(timed_round.steps) for timed_round in rounds]}


def _sustained(stage: Stage, steps: Steps, step_s: float) -> list[float]:
    """Seconds of a step in training that goes on, burst by burst."""
    steps(5)
    count = max(5, int(_BURST_S / step_s))
    bursts: list[float] = []
    ends = time.monotonic() + min(5.0 if stage.quick else 20.0, max(stage.left_s, 2.0))
    while time.monotonic() < ends or len(bursts) < 8:
        bursts.append(steps(count) / count)
    return bursts


def compiled(stage: Stage) -> Iterator[Found]:
    """How many graphs `compile: true` makes for the three sizes of a trial: two of its micro-batches, and a remainder."""
    if stage.device != "gpu":
        return
    from torch._dynamo.utils import counters

    run = TrainingRun(
        Images(), setup_of(BatchPlan(333, 2), "gpu", {"model": "resnet18", "image_size": 32}, compile=True)
    )
    run.model.train()
    plans = [BatchPlan(333, 2), BatchPlan(333, 2), BatchPlan(41)] * 2
    loader = run.loader(plans)
    counters.clear()
    for plan in plans:
        run.step(run.micro_batches(plan, loader), plan.effective_batch)
    graphs = int(counters["stats"]["unique_graphs"])
    yield Claim("graphs compiled for 167, 166 and 41 samples", 3, float(graphs), unit="graphs")


def _wait(device: str) -> None:
    if device == "gpu":
        torch.cuda.synchronize()
