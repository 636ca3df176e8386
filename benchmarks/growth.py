"""Does a batch that grows as the rate falls (seesaw) train as well in less time?

    .venv/bin/python benchmarks/growth.py [--seeds 8] [--gpt-seeds 4]

Each line is one setting, trained with a constant and with a growing batch, seeds in turn: steps, the mean and standard error of
the validation loss, the difference of the losses (paired by seed) and the median ratio of their training times by the clock.
Rates are roughly the best for the constant batch. Digits: a small network, a cosine schedule over 8 epochs. GPT: examples/gpt,
one layer of width 48, one epoch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bsearch.objectives.loading import load_task
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.training import Training
from bsearch.spaces.trial import TrialSetup

GPT = f"{Path(__file__).parents[1] / 'examples' / 'gpt' / 'tasks.py'}:GPT"
DIGITS = "bsearch.objectives.digits:Digits"
SETTINGS: list[tuple[str, str, str, int, float, dict[str, Any]]] = [
    ("digits, SGD, linear", DIGITS, "linear", 8, 0.03, {"optimizer": "sgd"}),
    ("digits, SGD, linear", DIGITS, "linear", 32, 0.1, {"optimizer": "sgd"}),
    ("digits, SGD, linear", DIGITS, "linear", 128, 0.3, {"optimizer": "sgd"}),
    ("digits, AdamW, sqrt", DIGITS, "sqrt", 8, 0.003, {"optimizer": "adamw"}),
    ("digits, AdamW, sqrt", DIGITS, "sqrt", 32, 0.006, {"optimizer": "adamw"}),
    ("digits, AdamW, sqrt", DIGITS, "sqrt", 128, 0.012, {"optimizer": "adamw"}),
    ("GPT, AdamW, sqrt", GPT, "sqrt", 8, 0.004, {"width": 48, "depth": 1}),
    ("GPT, AdamW, sqrt", GPT, "sqrt", 32, 0.008, {"width": 48, "depth": 1}),
]


def trained(task: Any, rule: str, batch: int, rate: float, parameters: dict[str, Any], epochs: float, **training: Any) -> Any:
    """The last measurement of a training of so many epochs."""
    first = TrialSetup(
        study="growth",
        number=0,
        attempt=0,
        plan=BatchPlan(batch),
        optimizer=OptimizerSettings(rate),
        samples_budget=1,
        training=Training(schedule="cosine", warmup=0.05, evaluations=1, **training),
        epochs=epochs,
        rule=rule,
        parameters=parameters,
    )
    samples = round(epochs * len(task.data(first).train))
    *_, last = TrainingRun(task, TrialSetup.from_dict({**first.to_dict(), "samples_budget": samples})).measurements()
    return last


def lines(seeds: dict[str, int]) -> Iterator[str]:
    for name, reference, rule, batch, rate, parameters in SETTINGS:
        task = load_task(reference)
        epochs = 8.0 if reference == DIGITS else 1.0
        pairs = [
            [
                trained(task, rule, batch, rate, parameters, epochs, seed=seed, batch_schedule=kind)
                for kind in ("constant", "seesaw")
            ]
            for seed in range(seeds[reference])
        ]
        losses = [
            [next(one.scores[m] for m in ("val_loss", "bits_per_byte") if m in one.scores) for one in pair] for pair in pairs
        ]
        differences = [grown / constant - 1 for constant, grown in losses]
        error = statistics.stdev(differences) / len(differences) ** 0.5
        ratio = statistics.median(grown.elapsed_s / constant.elapsed_s for constant, grown in pairs)
        steps = [one.facts["steps"] for one in pairs[0]]
        means = [statistics.mean(column) for column in zip(*losses, strict=True)]
        yield (
            f"{name:20} {batch:5} {steps[0]:6} {steps[1]:6} {means[0]:9.4f} {means[1]:9.4f} "
            f"{100 * statistics.mean(differences):+7.1f} ± {100 * error:.1f} % {ratio:8.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--gpt-seeds", type=int, default=4)
    arguments = parser.parse_args()
    print(f"{'setting':20} {'batch':>5} {'steps':>6} {'grown':>6} {'loss':>9} {'grown':>9} {'difference':>16} {'time':>8}")
    for line in lines({DIGITS: arguments.seeds, GPT: arguments.gpt_seeds}):
        print(line, flush=True)


if __name__ == "__main__":
    main()
