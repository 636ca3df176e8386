"""Changes of a real training, judged by `bsearch compare`, beside the truth by brute force.

    .venv/bin/python benchmarks/real_changes.py [--trials 20 40 80] [--changes wsd adamw ...]

Digits in four epochs. The truth is the difference of both sides' best settings: of a grid of batches and rates with two seeds,
the best eight are trained with twenty new seeds each. Comparisons resume: the one of 40 trials has the 20 of the one before.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from bsearch.objectives.attempts import start_attempt
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.training import Training
from bsearch.spaces.trial import Measurement, TrialSetup

BSEARCH = Path(sys.executable).with_name("bsearch")
TASKS = '''
import torch
from bsearch.objectives.digits import Digits
from torch.utils.data import TensorDataset


class Plain(Digits):
    """As it is."""


class Shifted(Digits):
    """With a bug: one training label in fifty is that of the sample before."""

    def data(self, setup):
        data = super().data(setup)
        images, labels = data.train.tensors
        wrong = torch.arange(len(labels)) % 50 == 0
        return type(data)(TensorDataset(images, torch.where(wrong, labels.roll(1), labels)), data.validation)
'''
STUDY: dict[str, Any] = {
    "task": "tasks.py:Plain",
    "space": {
        "effective_batch": {"low": 8, "high": 256},
        "reference_rate": {"low": 0.005, "high": 1.0, "at_batch": 64},
        "rule": "sqrt",
        "epochs": 4,
    },
    "budget": {"profile_s": 3},
}
CHANGES: dict[str, dict[str, Any]] = {
    "wsd": {"training": {"schedule": "wsd"}},
    "adamw": {
        "space": {"optimizer": "adamw", "reference_rate": {"low": 0.0002, "high": 0.05, "at_batch": 64}}
    },
    "smoothing": {"space": {"label_smoothing": 0.1}},
    "narrow": {"space": {"width": 16}},
    "shifted": {"task": "tasks.py:Shifted"},
    **{f"itself-{seed}": {"training": {"seed": seed}} for seed in range(1, 11)},
}
BATCHES, RATES, SEEDS = (8, 12, 18, 27, 40, 60, 90, 140), 9, 2
FINALISTS, NEW_SEEDS = 8, 20


def study(name: str, change: dict[str, Any]) -> dict[str, Any]:
    made = {"study": name, **STUDY, **{key: value for key, value in change.items() if key != "space"}}
    made["space"] = STUDY["space"] | change.get("space", {})
    return made


def score(made: dict[str, Any], folder: Path, batch: int, rate: float, seed: int) -> float:
    """Of one training; 0 where it diverged."""
    setup = TrialSetup(
        study="truth",
        number=0,
        attempt=0,
        plan=BatchPlan(batch),
        optimizer=OptimizerSettings(rate * math.sqrt(batch / 64)),
        samples_budget=1197 * 4,
        training=Training(**{**made.get("training", {}), "evaluations": 1, "seed": seed}),
        epochs=4,
        parameters={
            key: made["space"][key]
            for key in ("optimizer", "label_smoothing", "width")
            if key in made["space"]
        },
        folder=str(folder),
    )
    task = made["task"] if ".py" not in made["task"] else f"{folder}/{made['task']}"
    *measured, _ = start_attempt(task, setup)
    return next((one.accuracy or 0.0 for one in reversed(measured) if isinstance(one, Measurement)), 0.0)


def truth(made: dict[str, Any], folder: Path) -> tuple[float, float]:
    """The mean of the best setting, over new seeds, and its standard error: of the few that are best on a grid."""
    ends = made["space"]["reference_rate"]
    grid = [*product(BATCHES, np.geomspace(ends["low"], ends["high"], RATES))]
    first = {one: np.mean([score(made, folder, *one, 100 + seed) for seed in range(SEEDS)]) for one in grid}
    best = sorted(grid, key=lambda one: -first[one])[:FINALISTS]
    again = [
        [score(made, folder, *one, 200 + 50 * place + seed) for seed in range(NEW_SEEDS)]
        for place, one in enumerate(best)
    ]
    means = sorted((float(np.mean(scores)) for scores in again), reverse=True)
    error = float(np.mean([np.std(scores, ddof=1) for scores in again])) / math.sqrt(NEW_SEEDS)
    return float(np.mean(means[:3])), error  # of three, as the best of several is lucky


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, nargs="+", default=[20, 40, 80])
    parser.add_argument("--changes", nargs="+", default=list(CHANGES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'change':10s} {'truth':>16s}  "
        + "  ".join(f"{f'{trials} trials':34s}" for trials in options.trials)
    )
    main_truth = None
    for name in options.changes:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "tasks.py").write_text(TASKS)
            sides = study("main", {}), study(name, CHANGES[name])
            for side in sides:
                (folder / f"{side['study']}.yaml").write_text(yaml.safe_dump(side))
            main_truth = main_truth or truth(sides[0], folder)
            change_truth = truth(sides[1], folder)
            said = []
            for trials in options.trials:
                command = [
                    BSEARCH,
                    "compare",
                    "main.yaml",
                    f"{name}.yaml",
                    "--serial",
                    "--trials",
                    str(trials),
                    "--json",
                ]
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
                if done.returncode == 3:
                    raise SystemExit(done.stderr)
                found = json.loads(done.stdout)
                last = found["within"][-1]
                runs = sum(side["runs"] for side in found["sides"])
                said.append(
                    f"{found['verdict']:11s} {last['difference']:+.4f} [{last['low']:+.4f}, {last['high']:+.4f}] {runs}"
                )
            gap = change_truth[0] - main_truth[0]
            print(
                f"{name:10s} {gap:+.4f} ± {math.hypot(change_truth[1], main_truth[1]):.4f}  "
                + "  ".join(said),
                flush=True,
            )


if __name__ == "__main__":
    main()
