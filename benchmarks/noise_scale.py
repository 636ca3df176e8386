"""The cost of measuring the gradient noise scale, as a share of a step.

    .venv/bin/python benchmarks/noise_scale.py [--seconds 10]

Within one run, measured steps alternate with plain ones, so that load from other processes affects both alike. The printed cost
is the difference of their medians over the plain median; reading the estimate (here once in 64 measured steps) is added to the
former. One device uses the thread's CPU time, which other processes disturb less; two use the wall clock.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator

import torch
from bsearch.objectives.digits import Digits
from bsearch.objectives.parallel.rank_processes import RankProcesses
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.plan import BatchPlan
from training_loop import Images, setup_of


def seconds_of_steps(name: str, plan: BatchPlan, seconds: float) -> Iterator[tuple[float, float, int]]:
    """Median seconds of a plain and of a measured step, and the number of each."""
    torch.set_num_threads(1)
    task = {"digits net": Digits, "small_cnn 16x16": Images}[name]()
    run = TrainingRun(task, setup_of(plan))
    run.model.train()
    loader = run.loader(itertools.repeat(plan))
    # On one device everything runs in this thread; ranks wait for one another.
    clock = time.thread_time if plan.devices == 1 else time.perf_counter
    taken: dict[bool, list[float]] = {False: [], True: []}
    readings = []
    # Every rank must run the same number of rounds, whatever its own clock measures.
    started = time.perf_counter()
    for _ in range(10):
        run.step(run.micro_batches(plan, loader), plan.effective_batch)
    rounds = max(2, int(seconds / run.ranks.longest((time.perf_counter() - started) / 10) / 128))
    for _ in range(rounds):
        for number in range(128):
            started = clock()
            run.noise.active = bool(number % 2)
            run.step(run.micro_batches(plan, loader), plan.effective_batch)
            taken[run.noise.active].append(clock() - started)
        started = clock()
        run.noise.read(run.ranks.mean)
        readings.append((clock() - started) / 64)
    measured = statistics.median(taken[True]) + statistics.median(readings)
    yield statistics.median(taken[False]), measured, len(taken[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    seconds = parser.parse_args().seconds
    plans = [BatchPlan(batch, k) for batch, k in ((16, 2), (64, 2), (64, 4), (256, 2), (1000, 4))]
    print("a plain step and a measured one                 plain ms  measured ms   cost     steps")
    ranks = RankProcesses(2, "cpu", 1)
    for name, some in (("digits net", plans), ("small_cnn 16x16", plans[1:4])):
        for plan in [*some, BatchPlan(64, 1, 2), BatchPlan(256, 2, 2)]:
            job = (seconds_of_steps, name, plan, seconds)
            plain, measured, steps = next(job[0](*job[1:])) if plan.devices == 1 else next(iter(ranks.run(*job)))
            what = f"{name} B {plan.effective_batch}, k {plan.accumulation}, d {plan.devices}"
            print(
                f"{what:<46} {plain * 1e3:9.3f}  {measured * 1e3:11.3f}  {measured / plain - 1:+6.2%}  {steps:>8}", flush=True
            )
    ranks.close()


if __name__ == "__main__":
    main()
