"""Is training time known before it is spent? The law's train_s against the clock's, on plans that were never timed.

    .venv/bin/python benchmarks/step_time.py [--trials 20] [--data FOLDER_OF_IMAGES]

A law is fitted as `bsearch run` does it; then trials with random batches, accumulations and budgets train for real, one at a
time, as an attempt of a study does. Printed is |known / measured - 1| of their training times. Afterwards every trial runs
again with a busy process on each core: the measured time changes, the known one does not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from bsearch.objectives.attempts import start_attempt
from bsearch.objectives.profiling.step_time import measured_step_time, timed_rounds
from bsearch.spaces.laws.step_time import timing_plans
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.training import Training
from bsearch.spaces.trial import Measurement, TrialSetup


def setup_of(parameters: dict[str, Any]) -> TrialSetup:
    return TrialSetup(
        study="known",
        number=0,
        attempt=0,
        plan=BatchPlan(1),
        optimizer=OptimizerSettings(0.01),
        samples_budget=1,
        training=Training(evaluations=1),
        epochs=1,
        parameters=parameters,
    )


def busy() -> None:
    while True:
        sum(range(100_000))


def measured_s(task: str, setup: TrialSetup) -> float:
    """Wall-clock seconds of training, as an attempt reports them."""
    *_, last, outcome = start_attempt(task, setup)
    assert isinstance(last, Measurement), outcome
    return last.elapsed_s


def errors(task: str, parameters: dict[str, Any], high: int, budget_s: float, trials: int) -> None:
    """Print one row a task."""
    setup = setup_of(parameters)
    plans = timing_plans(2, high)
    with closing(timed_rounds(task, setup, plans)) as rounds:  # type: ignore[type-var]
        law = measured_step_time(rounds, plans, 20.0)
    rng = random.Random(1)
    rows = []
    for _ in range(trials):
        batch = round(8 * (high / 8) ** rng.random())
        plan = BatchPlan(batch, rng.choice((1, 1, 2, 3, 4)))
        samples = max(round(budget_s * batch / law.step_s(plan)), 3 * batch)
        trial = replace(setup, plan=plan, samples_budget=samples, smallest_micro_batch=2)
        rows.append((law.train_s(plan, samples, smallest_micro_batch=2), trial))
    quiet = [measured_s(task, trial) / known_s - 1 for known_s, trial in rows]
    busy_processes = [
        multiprocessing.Process(target=busy, daemon=True) for _ in range(multiprocessing.cpu_count())
    ]
    for process in busy_processes:
        process.start()
    loaded = [measured_s(task, trial) / known_s - 1 for known_s, trial in rows[: max(trials // 3, 3)]]
    for process in busy_processes:
        process.kill()
    off = sorted(map(abs, quiet))
    interval = "-" if law.interval is None else f"{law.interval:.1%}"
    name = f"{task.rpartition(':')[2]} {parameters.get('model', '')}"
    print(
        f"{name:<22} {interval:>8}  {statistics.median(off):7.1%}  {off[int(0.95 * (len(off) - 1))]:7.1%}  {off[-1]:7.1%}  "
        f"{statistics.median(quiet):+8.1%}   {statistics.median(loaded):+10.1%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument(
        "--data", type=Path, help="CIFAR-10 as folders of images: train/<class>, test/<class>"
    )
    options = parser.parse_args()
    print("measured against known  interval   median      p95    worst     bias    under load")
    errors("bsearch.objectives.digits:Digits", {}, 1000, 1.0, options.trials)
    if options.data is not None:
        images = {
            "dataset": "folder",
            "root": str(options.data.resolve()),
            "train_samples": 4000,
            "evaluation_samples": 100,
        }
        vision = "bsearch.objectives.vision:Vision"
        errors(vision, images | {"model": "small_cnn", "image_size": 16}, 512, 2.0, options.trials)
        errors(vision, images | {"model": "resnet18", "image_size": 32}, 64, 6.0, options.trials // 2)


if __name__ == "__main__":
    main()
