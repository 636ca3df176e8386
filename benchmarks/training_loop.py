"""Step times of our training loop against a minimal hand-written one, and of uneven against even micro-batches.

    .venv/bin/python benchmarks/training_loop.py [--rounds 15]

The plain loop is the usual one: shuffle, index tensors, cross-entropy, backward, step. Ours does the same work on the same
model and batch, and also schedules the rate, keeps the stream of samples exact and checks what the task returns.
Both run in the same process in alternating bursts; the printed ratio is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from bsearch.objectives.digits import Digits
from bsearch.objectives.task import Data, Task
from bsearch.objectives.training import TrainingRun
from bsearch.objectives.vision import small_cnn
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study import Training
from bsearch.spaces.trial import TrialSetup
from torch import nn
from torch.utils.data import TensorDataset


class Images(Task):
    """Three convolutions with BatchNorm on 4,000 random images of 16 x 16 pixels."""

    def data(self, setup: TrialSetup) -> Data:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(4000, 3, 16, 16, generator=generator)
        labels = torch.randint(0, 10, (4000,), generator=generator)
        return Data(TensorDataset(images, labels), TensorDataset(images[:100], labels[:100]))

    def model(self, setup: TrialSetup) -> nn.Module:
        return small_cnn(16, 10)


def setup_of(plan: BatchPlan) -> TrialSetup:
    return TrialSetup(
        study="loop",
        number=0,
        attempt=0,
        plan=plan,
        optimizer=OptimizerSettings(0.01),
        samples_budget=1 << 20,
        training=Training(),
        epochs=1,
    )


def ours(task: Task, plan: BatchPlan) -> Callable[[int], float]:
    """A function that runs `count` steps of our loop and returns the seconds."""
    run = TrainingRun(task, setup_of(plan))
    run.model.train()
    loader = run.loader(itertools.repeat(plan))
    summed = torch.zeros((), dtype=torch.float64)

    def steps(count: int) -> float:
        started = time.perf_counter()
        for number in range(count):
            run.set_rate(0.1 + number / 1000)
            summed.add_(run.step(run.micro_batches(plan, loader), plan.effective_batch))
        return time.perf_counter() - started

    return steps


def plain(task: Task, batch: int) -> Callable[[int], float]:
    """The same for the plain loop."""
    setup = setup_of(BatchPlan(batch))
    inputs, labels = task.data(setup).train.tensors  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = task.model(setup)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10**6)

    def chunks() -> Iterator[torch.Tensor]:
        while True:
            yield from (part for part in torch.randperm(len(labels)).split(batch) if len(part) == batch)

    indices = chunks()
    summed = torch.zeros(())

    def steps(count: int) -> float:
        started = time.perf_counter()
        for index in itertools.islice(indices, count):
            loss = nn.functional.cross_entropy(model(inputs[index]), labels[index])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            summed.add_(loss.detach())
        return time.perf_counter() - started

    return steps


def compared(first: Callable[[int], float], second: Callable[[int], float], rounds: int) -> tuple[float, float, float]:
    """Median seconds of a step of each, and the median over rounds of first / second."""
    count = max(5, int(0.15 / (first(5) / 5)))
    second(5)
    pairs = []
    for number in range(rounds):
        order = (first, second) if number % 2 else (second, first)
        seconds = {id(one): one(count) / count for one in order}
        pairs.append((seconds[id(first)], seconds[id(second)]))
    ratios = [a / b for a, b in pairs]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    tasks: dict[str, Any] = {"digits net": Digits(), "small_cnn 16x16": Images()}
    print("our loop against the plain one               ours ms   plain ms   ours/plain")
    for (name, task), batch in itertools.product(tasks.items(), (64, 256, 1000)):
        mine, theirs, ratio = compared(ours(task, BatchPlan(batch)), plain(task, batch), rounds)
        print(f"{name:<18} B {batch:<5} no accumulation   {mine * 1e3:9.3f}  {theirs * 1e3:9.3f}   {ratio - 1:+9.1%}")
    print("\nuneven against even micro-batches (k = 4)    uneven    even       per sample")
    for name, task in tasks.items():
        for uneven, even in ((501, 500), (999, 1000), (257, 256)):
            plans = [replace(BatchPlan(batch), accumulation=4) for batch in (uneven, even)]
            a, b, ratio = compared(ours(task, plans[0]), ours(task, plans[1]), rounds)
            print(
                f"{name:<18} {uneven} = {plans[0].micro_batches()!s:<26} {a * 1e3:8.3f}  {b * 1e3:8.3f}  "
                f"{ratio * even / uneven - 1:+9.1%}"
            )


if __name__ == "__main__":
    main()
