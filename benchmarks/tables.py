"""Train every setting of the measured tables in which benchmarks/search.py looks up its trials.

    .venv/bin/python benchmarks/tables.py digits          # 720 settings x 3 seeds, ten minutes on one core
    .venv/bin/python benchmarks/tables.py cifar FOLDER    # 640 x 3, forty minutes; FOLDER holds the images' train/ and test/

`digits-ladder` (ten minutes) and `cifar-ladder FOLDER` (half an hour) have AdamW.

A row is one training by bsearch's own loop: its settings, seconds of training, and the accuracy at each tenth of its budget
(those under wsd: at its end). An interrupted table is resumed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bsearch.objectives.attempts import start_attempt
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.training import Training
from bsearch.spaces.trial import Measurement, TrialSetup

DATA = Path(__file__).parent / "data"
SEEDS = (0, 1, 2)
FRACTIONS = 10

TABLES: dict[str, dict[str, Any]] = {
    "digits": {
        "task": "bsearch.objectives.digits:Digits",
        "samples": 1197,
        "reference_batch": 64,
        "settings": {
            "effective_batch": (8, 11, 16, 22, 31, 44, 62, 88, 125, 177, 250, 353, 500, 707, 1000),
            "reference_rate": tuple(round(10**power, 5) for power in np.linspace(-2.3, 0.3, 12)),
            "epochs": (2, 4, 8, 16),
        },
        "parameters": {},
        "training": {},
    },
    "cifar": {
        "task": "bsearch.objectives.vision:Vision",
        "samples": 4000,
        "reference_batch": 128,
        "settings": {
            "effective_batch": (8, 16, 31, 62, 125, 250, 500, 1000, 2000, 4000),
            "reference_rate": tuple(round(10**power, 5) for power in np.linspace(-2.3, 0.1, 8)),
            "epochs": (1, 2, 4, 8),
            "width": (8, 16),
        },
        "parameters": {
            "dataset": "folder",
            "image_size": 16,
            "train_samples": 4000,
            "evaluation_samples": 1000,
            "augment": "flip",
        },
        "training": {},
    },
}
# The same under wsd, evaluated at the end alone; as many samples of warm-up in all.
for _name, _fixed in (("digits", {}), ("cifar", {"width": 8})):
    TABLES[f"{_name}-wsd"] = TABLES[_name] | {
        "settings": {
            name: values for name, values in TABLES[_name]["settings"].items() if name not in _fixed
        },
        "parameters": TABLES[_name]["parameters"] | _fixed,
        "training": {"schedule": "wsd", "evaluations": 1},
    }
# AdamW at several sizes. Larger sizes of digits repeat
# its images, those of CIFAR-10 have more of them.
LADDER: dict[str, Any] = {"optimizer": "adamw"}
TABLES["digits-ladder"] = {
    "task": "bsearch.objectives.digits:Digits",
    "samples": 1197,
    "reference_batch": 64,
    "settings": {
        "effective_batch": (4, 7, 13, 24, 43, 78, 142, 256),
        "reference_rate": tuple(round(10**power, 5) for power in np.linspace(-3.3, -0.9, 9)),
        "epochs": (1, 3, 10),
        "width": (16, 32, 64),
    },
    "parameters": LADDER,
    "training": {"evaluations": 1},
}
TABLES["cifar-ladder"] = {
    "task": "bsearch.objectives.vision:Vision",
    "samples": None,
    "reference_batch": 64,
    "settings": {
        "effective_batch": (8, 16, 32, 64, 128, 256, 512),
        "reference_rate": tuple(round(10**power, 5) for power in np.linspace(-3.6, -1.2, 8)),
        "epochs": (4,),
        "train_samples": (1000, 3000, 10000),
        "width": (8, 16, 32),
    },
    "sizes": ((1000, 8), (3000, 8), (1000, 16), (3000, 16), (10000, 32)),  # samples and width
    "parameters": LADDER
    | {"dataset": "folder", "image_size": 16, "evaluation_samples": 2000, "augment": "flip"},
    "training": {"evaluations": 1},
}
# One pass over the data, as the published laws have it, and a larger factor between the smallest sizes and the largest.
TABLES["cifar-once"] = {
    "task": "bsearch.objectives.vision:Vision",
    "samples": None,
    "reference_batch": 64,
    "settings": {
        "effective_batch": (4, 8, 16, 32, 64, 128, 256),
        "reference_rate": tuple(round(10**power, 5) for power in np.linspace(-3.6, -1.2, 8)),
        "epochs": (1,),
        "train_samples": (1500, 5000, 15000, 50000),
        "width": (8, 16, 32),
    },
    "sizes": ((1500, 8), (5000, 8), (15000, 8), (1500, 16), (5000, 16), (15000, 16), (50000, 32)),
    "parameters": LADDER
    | {"dataset": "folder", "image_size": 16, "evaluation_samples": 5000, "augment": "flip"},
    "training": {"evaluations": 1},
}


def trained(name: str, settings: dict[str, Any], seed: int, root: str) -> tuple[float, list[float]]:
    """Seconds of one training, and its accuracies."""
    table = TABLES[name]
    batch, epochs = settings["effective_batch"], settings["epochs"]
    rate = settings["reference_rate"] * math.sqrt(batch / table["reference_batch"])
    parameters = table["parameters"] | {
        key: value for key, value in settings.items() if key in ("width", "train_samples")
    }
    samples = settings.get("train_samples", table["samples"])
    warmup = 0.05 * (min(table["settings"]["epochs"]) / epochs if "schedule" in table["training"] else 1)
    setup = TrialSetup(
        study="table",
        number=0,
        attempt=0,
        plan=BatchPlan(batch),
        optimizer=OptimizerSettings(rate),
        samples_budget=samples * epochs,
        training=Training(**{"evaluations": FRACTIONS, "seed": seed, "warmup": warmup, **table["training"]}),
        epochs=epochs,
        parameters=parameters | ({"root": root} if root else {}),
    )
    *measured, _ = start_attempt(table["task"], setup)
    taken = [one for one in measured if isinstance(one, Measurement)]
    scores = {one.samples_seen / setup.samples_budget: one.accuracy for one in taken}
    # A large step may pass several tenths at once; they all get the accuracy after it.
    parts = setup.training.evaluations
    curve = [
        next(value for at, value in scores.items() if at >= part / parts - 1e-9)
        for part in range(1, parts + 1)
    ]
    return taken[-1].elapsed_s, curve


def settings_of(name: str) -> Iterator[dict[str, Any]]:
    table, sizes = TABLES[name]["settings"], TABLES[name].get("sizes")
    for values in product(*table.values()):
        settings = dict(zip(table, values, strict=True))
        if sizes is None or (settings["train_samples"], settings["width"]) in sizes:
            yield settings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("root", nargs="?", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = DATA / f"{options.table}.csv"
    done = set()
    if file.exists():
        with file.open() as stored:
            done = {
                tuple(row[key] for key in [*TABLES[options.table]["settings"], "seed"])
                for row in csv.DictReader(stored)
            }
    with file.open("a") as out:
        writer = csv.writer(out, lineterminator="\n")
        if not done:
            writer.writerow([*TABLES[options.table]["settings"], "seed", "train_s", "curve"])
        for seed in TABLES[options.table].get("seeds", SEEDS):
            for settings in settings_of(options.table):
                if tuple(map(str, [*settings.values(), seed])) in done:
                    continue
                try:
                    train_s, curve = trained(options.table, settings, seed, options.root)
                except StopIteration:  # diverged: it counts as chance level from there on
                    train_s, curve = math.nan, []
                writer.writerow(
                    [*settings.values(), seed, f"{train_s:.5f}", " ".join(f"{value:.4f}" for value in curve)]
                )
                out.flush()
    with file.open("rb") as plain, gzip.open(file.with_suffix(".csv.gz"), "wb") as packed:
        packed.write(plain.read())
    file.unlink()


if __name__ == "__main__":
    main()
