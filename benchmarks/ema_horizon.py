"""Is an average of weights as good at every batch when its horizon is the same in samples, rather than in steps?

    .venv/bin/python benchmarks/ema_horizon.py [--seeds 3]

Digits, a small network, 40 epochs at a constant rate (rule sqrt from 0.02 at batch 128). The decay is 0.97 per step at batch
128: an average over three and a half epochs. Each line is one batch and one `training.ema_scaling`: the decay per step; the
horizon in samples, the steps until a weight's share is 1/e times the batch; and the mean and standard deviation over seeds of
the accuracy of the averaged and of the raw weights at the end.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator

from bsearch.objectives.digits import Digits
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.learning_rate import OptimizerSettings, scaled_settings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.training import Training
from bsearch.spaces.trial import TrialSetup

EPOCHS, REFERENCE_BATCH, REFERENCE_RATE, DECAY = 40, 128, 0.02, 0.97
BATCHES = (16, 128, 1024)


def setup_of(batch: int, scaling: str, seed: int, samples: int = 1) -> TrialSetup:
    reference = OptimizerSettings(REFERENCE_RATE)
    return TrialSetup(
        study="ema",
        number=0,
        attempt=0,
        plan=BatchPlan(batch),
        optimizer=scaled_settings("sqrt", reference, reference_batch=REFERENCE_BATCH, effective_batch=batch),
        samples_budget=samples,
        training=Training(schedule="constant", evaluations=1, seed=seed, ema=DECAY, ema_scaling=scaling),
        epochs=EPOCHS,
        rule="sqrt",
        reference_batch=REFERENCE_BATCH,
    )


def accuracies(batch: int, scaling: str, seed: int) -> tuple[float, float]:
    """Of the averaged and of the raw weights at the end of a training."""
    task = Digits()
    samples = EPOCHS * len(task.data(setup_of(batch, scaling, seed)).train)  # type: ignore[arg-type]
    run = TrainingRun(task, setup_of(batch, scaling, seed, samples))
    *_, last = run.measurements()
    run.average.values.clear()  # without an average, the weights themselves are evaluated
    return last.scores["accuracy"], run.evaluate()["accuracy"]


def lines(seeds: int) -> Iterator[str]:
    yield f"{'batch':>5}  {'scaling':9}  {'decay':>8}  {'horizon':>8}  {'averaged':>16}  {'raw':>16}"
    for batch in BATCHES:
        for scaling in ("half_life", "constant"):
            decay = setup_of(batch, scaling, 0).ema_decay(batch)
            each = zip(*(accuracies(batch, scaling, seed) for seed in range(seeds)), strict=True)
            means = (f"{statistics.mean(one):.4f} ± {statistics.stdev(one):.4f}" for one in each)
            averaged, raw = means
            yield f"{batch:5}  {scaling:9}  {decay:8.5f}  {batch / -math.log(decay):8.0f}  {averaged:>16}  {raw:>16}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    if seeds < 2:
        parser.error(f"--seeds: expected at least 2, whose standard deviation is shown, got {seeds}")
    for line in lines(seeds):
        print(line, flush=True)
