"""What looking at gradients for the noise scale costs, as a share of a step.

    .venv/bin/python benchmarks/noise_scale.py [--seconds 10]

Of one run, steps that are looked at take turns with steps that are not, so that a neighbour's load meets both alike; what is
quoted is the difference of their medians over the plain median, with reading (once in 64 looks here) added to the former. On
one device it is the thread's own time, which other processes disturb less; on two, the clock's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator

import torch
from bsearch.objectives.data_parallel import RankProcesses
from bsearch.objectives.digits import Digits
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.plan import BatchPlan
from training_loop import Images, setup_of


def seconds_of_steps(name: str, plan: BatchPlan, seconds: float) -> Iterator[tuple[float, float, int]]:
    """Median seconds of a plain step and of one that is looked at, and how many there were of each."""
    torch.set_num_threads(1)
    task = {"digits net": Digits, "small_cnn 16x16": Images}[name]()
    run = TrainingRun(task, setup_of(plan))
    run.model.train()
    loader = run.loader(itertools.repeat(plan))
    # On one device everything happens in this thread; ranks wait for one another.
    clock = time.thread_time if plan.devices == 1 else time.perf_counter
    taken: dict[bool, list[float]] = {False: [], True: []}
    readings = []
    # As many on every rank, whatever each one's clock says.
    begun = time.perf_counter()
    for _ in range(10):
        run.step(run.micro_batches(plan, loader), plan.effective_batch)
    rounds = max(2, int(seconds / run.ranks.longest((time.perf_counter() - begun) / 10) / 128))
    for _ in range(rounds):
        for number in range(128):
            begun = clock()
            run.noise.active = bool(number % 2)
            run.step(run.micro_batches(plan, loader), plan.effective_batch)
            taken[run.noise.active].append(clock() - begun)
        begun = clock()
        run.noise.read(run.ranks.mean)
        readings.append((clock() - begun) / 64)
    looked = statistics.median(taken[True]) + statistics.median(readings)
    yield statistics.median(taken[False]), looked, len(taken[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    seconds = parser.parse_args().seconds
    plans = [BatchPlan(batch, k) for batch, k in ((16, 2), (64, 2), (64, 4), (256, 2), (1000, 4))]
    print("a step plain and looked at                      plain ms  looked ms   cost   of steps")
    ranks = RankProcesses(2, "cpu", 1)
    for name, some in (("digits net", plans), ("small_cnn 16x16", plans[1:4])):
        for plan in [*some, BatchPlan(64, 1, 2), BatchPlan(256, 2, 2)]:
            job = (seconds_of_steps, name, plan, seconds)
            plain, looked, steps = next(job[0](*job[1:])) if plan.devices == 1 else next(iter(ranks.run(*job)))
            what = f"{name} B {plan.effective_batch}, k {plan.accumulation}, d {plan.devices}"
            print(f"{what:<46} {plain * 1e3:9.3f}  {looked * 1e3:9.3f}  {looked / plain - 1:+6.2%}  {steps:>8}", flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
