"""How far from the best a larger training is with the settings that `bsearch ask --scale` predicts from smaller ones.

    .venv/bin/python benchmarks/scale_up.py tables [--only digits] [--seeds 20] [--trials 20]
    .venv/bin/python benchmarks/scale_up.py ladder [--images FOLDER] [--optimizer adamw] [--trials 20]

`tables` looks trials up in measured tables (benchmarks/tables.py; SGD with momentum, and AdamW on three ladders of sizes): for
each of `--seeds` studies, so many random trials at each small size. Printed is how far each way's setting is below the best of
the large size, and below the prediction's, mean and standard error over studies. "unchanged" and the published laws begin at
the best trial of the largest size tried; those "of the fit" begin at what scale-up's own fit takes for the best there.

`ladder` trains one study of each: digits, and with FOLDER, which holds CIFAR-10's train/ and test/, a small convolutional
network on 16 x 16 pixels; widths 1, 2, 4 and samples 1, 3, 10. At the large end as many are trained at random, then half as
many around the best of them. Compared are the prediction, the smaller best carried over unchanged, each published law alone,
and what the search at the large end found; each setting is trained with further seeds. Which of the search's three best counts
is chosen by half of these seeds, and its accuracy is that of the other half: the best of three means would flatter it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from bsearch.extras.scale_up.fit import scale_up
from bsearch.extras.scale_up.scaled_up import LAWS, ScaledUp
from bsearch.objectives.trial import start_attempt
from bsearch.objectives.vision import small_cnn
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.training import Training
from bsearch.spaces.trial import Measurement, TrialSetup
from problems import Table
from scipy.interpolate import RegularGridInterpolator
from tables import TABLES

Setting = tuple[float, float]  # batch and rate


def record(
    number: int, setting: Setting, samples: int, epochs: float, parameters: float, optimizer: str, accuracy: float
) -> TrialRecord:
    facts = TrialFacts(
        epochs=epochs,
        effective_batch=round(setting[0]),
        learning_rate=setting[1],
        samples_budget=samples,
        optimizer=optimizer,
        model_parameters=int(parameters),
    )
    outcome: Any = "complete" if accuracy > 0 else "diverged"
    return TrialRecord(number, outcome, {"effective_batch": round(setting[0])}, facts, 1.0, accuracy or None)


def settings_of(found: ScaledUp, made: Sequence[TrialRecord]) -> dict[str, Setting]:
    """What each way would train."""
    largest = [one for one in made if one.accuracy and one.facts.samples_budget == found.begin.samples]
    largest = [one for one in largest if one.facts.model_parameters == found.begin.parameters] or largest
    best = max(largest, key=lambda one: one.accuracy or 0.0).facts
    begin = replace(found, carried=(float(best.effective_batch or 1), float(best.learning_rate or 1)))
    ways = {"predicted": (found.batch.value, found.best.learning_rate.value), "unchanged": begin.carried}
    ways |= {law.name: begin.by_law(law) for law in LAWS}
    return ways | {"unchanged, of the fit": found.carried} | {f"{law.name}, of the fit": found.by_law(law) for law in LAWS}


# ---------------------------------------------------------------- tables

CASES: dict[str, tuple[str, Sequence[dict[str, float]], dict[str, float]]] = {
    "digits, epochs 2 and 4 to 16": ("digits", [{"epochs": 2}, {"epochs": 4}], {"epochs": 16}),
    "digits, epochs 4 to 16": ("digits", [{"epochs": 4}], {"epochs": 16}),
    "cifar, epochs 1 and 2 to 8": ("cifar", [{"epochs": 1, "width": 8}, {"epochs": 2, "width": 8}], {"epochs": 8, "width": 8}),
    "cifar, the same and twice as wide": (
        "cifar",
        [{"epochs": epochs, "width": 8} for epochs in (1, 2)],
        {"epochs": 8, "width": 16},
    ),
    "cifar, two widths": (
        "cifar",
        [{"epochs": epochs, "width": width} for epochs in (1, 2) for width in (8, 16)],
        {"epochs": 8, "width": 16},
    ),
    "digits' ladder": (
        "digits-ladder",
        [{"epochs": epochs, "width": width} for epochs in (1, 3) for width in (16, 32)],
        {"epochs": 10, "width": 64},
    ),
    # One epoch looks like one pass over the data, so the published prior applies, though the large size repeats them.
    "digits' ladder, from one size": ("digits-ladder", [{"epochs": 1, "width": 16}], {"epochs": 10, "width": 64}),
    "cifar's ladder": (
        "cifar-ladder",
        [{"epochs": 4, "train_samples": samples, "width": width} for samples in (1000, 3000) for width in (8, 16)],
        {"epochs": 4, "train_samples": 10000, "width": 32},
    ),
    "digits' ladder, from two lengths": (
        "digits-ladder",
        [{"epochs": epochs, "width": 16} for epochs in (1, 3)],
        {"epochs": 10, "width": 64},
    ),
    "cifar's ladder, two amounts of data": (
        "cifar-ladder",
        [{"epochs": 4, "train_samples": samples, "width": 8} for samples in (1000, 3000)],
        {"epochs": 4, "train_samples": 10000, "width": 32},
    ),
    "cifar once, 1,500 and 5,000 to 50,000": (
        "cifar-once",
        [{"epochs": 1, "train_samples": samples, "width": width} for samples in (1500, 5000) for width in (8, 16)],
        {"epochs": 1, "train_samples": 50000, "width": 32},
    ),
    "cifar once, 5,000 and 15,000 to 50,000": (
        "cifar-once",
        [{"epochs": 1, "train_samples": samples, "width": width} for samples in (5000, 15000) for width in (8, 16)],
        {"epochs": 1, "train_samples": 50000, "width": 32},
    ),
    "cifar once, one width": (
        "cifar-once",
        [{"epochs": 1, "train_samples": samples, "width": 8} for samples in (1500, 5000)],
        {"epochs": 1, "train_samples": 50000, "width": 32},
    ),
    "cifar once, from one size": (
        "cifar-once",
        [{"epochs": 1, "train_samples": 5000, "width": 8}],
        {"epochs": 1, "train_samples": 50000, "width": 32},
    ),
    "cifar's ladder, from one size": (
        "cifar-ladder",
        [{"epochs": 4, "train_samples": 1000, "width": 8}],
        {"epochs": 4, "train_samples": 10000, "width": 32},
    ),
}


class Surface:
    """A table's accuracies at one size, interpolated over the logarithms of batch and rate."""

    def __init__(self, table: Table, name: str, size: dict[str, float]) -> None:
        self.reference = TABLES[name]["reference_batch"]
        batches, rates = table.grid[0], table.grid[1]
        runs = {
            (batch, rate): [curve[-1] for curve in table.curves[(batch, rate, *(size[key] for key in table.names[2:]))]]
            for batch in batches
            for rate in rates
        }
        values = np.array([[runs[batch, rate] for rate in rates] for batch in batches])  # (batches, rates, seeds)
        axes = (np.log(batches), np.log(rates))
        self.low, self.high = (np.array([axis[end] for axis in axes]) for end in (0, -1))
        self.runs = [RegularGridInterpolator(axes, values[:, :, seed]) for seed in range(values.shape[2])]
        fine = np.stack(np.meshgrid(*(np.linspace(*ends, 60) for ends in zip(self.low, self.high, strict=True))), -1)
        self.best = float(np.mean([run(fine.reshape(-1, 2)) for run in self.runs], axis=0).max())

    def _at(self, setting: Setting) -> list[float]:
        """Accuracy of each seed; beyond the table that of its edge."""
        batch, rate = setting
        point = np.clip(np.log([batch, rate / math.sqrt(batch / self.reference)]), self.low, self.high)
        return [float(one(point)[0]) for one in self.runs]

    def true(self, setting: Setting) -> float:
        return statistics.fmean(self._at(setting))

    def run(self, setting: Setting, seed: int) -> float:
        return self._at(setting)[seed % len(self.runs)]

    def random(self, rng: np.random.Generator) -> Setting:
        batch, rate = np.exp(self.low + (self.high - self.low) * rng.random(2))
        return float(batch), float(rate * math.sqrt(batch / self.reference))


def parameters_of(name: str, size: dict[str, float]) -> float:
    if name.startswith("digits"):
        return 267.0 * size.get("width", 64) + 170
    return float(sum(one.numel() for one in small_cnn(int(size["width"]), 10).parameters()))


def samples_of(name: str, size: dict[str, float]) -> int:
    return int(size.get("train_samples", TABLES[name]["samples"]) * size["epochs"])


def from_tables(cases: Sequence[str], seeds: int, trials: int) -> None:
    for label in cases:
        name, small, large = CASES[label]
        optimizer = TABLES[name]["parameters"].get("optimizer", "sgd")
        table = Table(name, 0.0)
        surfaces = [Surface(table, name, size) for size in small]
        target = Surface(table, name, large)
        samples = [samples_of(name, size) for size in (*small, large)]
        parameters = [parameters_of(name, size) for size in (*small, large)]
        below: dict[str, list[float]] = {}
        exponents: dict[str, list[float]] = {}
        for seed in range(seeds):
            rng, made = np.random.default_rng(seed), []
            for number in range(trials * len(small)):
                place = number % len(small)
                setting = surfaces[place].random(rng)
                accuracy = surfaces[place].run(setting, int(rng.integers(100)))
                epochs = small[place]["epochs"]
                made.append(record(number, setting, samples[place], epochs, parameters[place], optimizer, accuracy))
            found = scale_up(label, made, samples[-1] / max(samples[:-1]), parameters[-1] / max(parameters[:-1]))
            for way, setting in settings_of(found, made).items():
                below.setdefault(way, []).append(target.best - target.true(setting))
            for key, (_, after) in found.exponents.items():
                exponents.setdefault(key, []).append(after.value)
        show(label, target.best, below)
        print("  exponents, mean:", ", ".join(f"{key} {statistics.fmean(each):.2f}" for key, each in exponents.items()))


def show(label: str, best: float, below: dict[str, list[float]]) -> None:
    print(f"\n{label}: best {best:.4f}; points below it, median, mean, worst; below the prediction; share within 1 %")
    for way, each in below.items():
        points = 100 * np.array(each)
        near = np.mean(points <= best)
        worse = points - 100 * np.array(below["predicted"])
        error = worse.std(ddof=1) / math.sqrt(len(worse))
        print(
            f"  {way:23} {np.median(points):6.2f} {points.mean():6.2f} {points.max():6.2f}   "
            f"{worse.mean():+6.2f} ± {error:.2f}   {near:4.0%}",
            flush=True,
        )


# ---------------------------------------------------------------- ladder

LADDERS: dict[str, dict[str, Any]] = {
    "digits": {
        "task": "bsearch.objectives.digits:Digits",
        "samples": 1197,
        "epochs": {1: 1, 3: 3, 10: 10},
        "widths": {1: 16, 2: 32, 4: 64},
        "batch": (4, 256),
        "rate": (3e-4, 1e-1),
        "parameters": {},
    },
    "cifar": {
        "task": "bsearch.objectives.vision:Vision",
        "samples": None,  # its own of each size
        "epochs": {1: 4, 3: 4, 10: 4},
        "train": {1: 1000, 3: 3000, 10: 10000},
        "widths": {1: 8, 2: 16, 4: 32},
        "batch": (8, 512),
        "rate": (2e-4, 5e-2),
        "parameters": {"dataset": "folder", "image_size": 16, "evaluation_samples": 2000, "augment": "flip"},
    },
}
SMALL, LARGE = ((1, 1), (3, 1), (1, 2), (3, 2)), (10, 4)  # data and width


def trained(
    ladder: dict[str, Any], size: tuple[int, int], setting: Setting, seed: int, optimizer: str, root: str
) -> TrialRecord:
    data, width = size
    samples = ladder["samples"] or ladder["train"][data]
    parameters = {**ladder["parameters"], "width": ladder["widths"][width], "optimizer": optimizer}
    if ladder["samples"] is None:
        parameters |= {"train_samples": samples, "root": root}
    setup = TrialSetup(
        study="ladder",
        number=0,
        attempt=0,
        plan=BatchPlan(min(round(setting[0]), samples)),
        optimizer=OptimizerSettings(setting[1]),
        samples_budget=samples * ladder["epochs"][data],
        training=Training(evaluations=1, seed=seed),
        epochs=ladder["epochs"][data],
        parameters=parameters,
    )
    facts, accuracy = {}, 0.0
    for report in start_attempt(ladder["task"], setup):
        if isinstance(report, Measurement):
            accuracy, facts = report.accuracy, {**facts, **report.facts}
    name = str(facts.get("optimizer", optimizer))
    passes = float(ladder["epochs"][data])
    return record(seed, setting, setup.samples_budget, passes, float(facts["model_parameters"]), name, accuracy)


def climb(name: str, trials: int, repeats: int, optimizer: str, root: str) -> None:
    ladder, rng = LADDERS[name], np.random.default_rng(0)

    def draw(around: Setting | None = None) -> Setting:
        if around is None:
            return tuple(float(math.exp(rng.uniform(*np.log(ladder[key])))) for key in ("batch", "rate"))  # type: ignore[return-value]
        return around[0] * math.exp(rng.normal(0, 0.5)), around[1] * math.exp(rng.normal(0, 0.4))

    def run(size: tuple[int, int], setting: Setting, seed: int = 0) -> TrialRecord:
        return trained(ladder, size, setting, seed, optimizer, root)

    made = [run(size, draw()) for size in SMALL for _ in range(trials)]
    large = [run(LARGE, draw()) for _ in range(trials)]
    best = max(large, key=lambda one: one.accuracy or 0)
    middle = float(best.facts.effective_batch or 1), float(best.facts.learning_rate or 1)
    large += [run(LARGE, draw(middle)) for _ in range(trials // 2)]
    begin = max(one.facts.model_parameters or 1 for one in made)
    samples = max(one.facts.samples_budget or 0 for one in made)
    there = large[0].facts
    found = scale_up(name, made, (there.samples_budget or 0) / samples, (there.model_parameters or 1) / begin)
    ways: dict[str, list[Setting]] = {way: [setting] for way, setting in settings_of(found, made).items()}
    tops = sorted(large, key=lambda one: one.accuracy or 0, reverse=True)[:3]
    ways["searched"] = [(float(one.facts.effective_batch or 1), float(one.facts.learning_rate or 1)) for one in tops]
    print(f"\n{name}, {optimizer}: {len(made)} small trainings at {len(SMALL)} sizes, {len(large)} at the large end")
    for key, both in found.exponents.items():
        print(f"  {key:15}", " -> ".join(f"{one.value:5.2f} ({one.low:.2f} to {one.high:.2f})" for one in both))
    print(f"  way                      batch     rate  accuracy, standard error ({repeats} seeds)")
    for way, settings in ways.items():
        runs = [[run(LARGE, one, seed).accuracy or 0.0 for seed in range(1, repeats + 1)] for one in settings]
        place = max(range(len(runs)), key=lambda place: statistics.fmean(runs[place][: repeats // 2]))
        counted = runs[place] if len(runs) == 1 else runs[place][repeats // 2 :]
        error = statistics.stdev(counted) / math.sqrt(len(counted))
        batch, rate = settings[place]
        print(f"  {way:23} {batch:6.0f} {rate:8.5f}  {statistics.fmean(counted):.4f} {error:.4f}", flush=True)
    print(f"  intervals: batch {found.batch}, rate {found.best.learning_rate}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tables", "ladder"])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=20, help="at each small size")
    parser.add_argument("--repeats", type=int, default=10, help="seeds of each of a ladder's settings at the large end")
    parser.add_argument("--only", choices=[*LADDERS], help="one task")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--images", default="", metavar="FOLDER")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.what == "tables":
        from_tables([one for one in CASES if one.startswith(options.only or "")], options.seeds, options.trials)
        return
    names: list[str] = ["digits", *(["cifar"] if options.images else [])]
    for name in names:
        if options.only in (None, name):
            climb(name, options.trials, options.repeats, options.optimizer, options.images)


if __name__ == "__main__":
    main()
