"""Overhead per trial: bsearch over Ray Tune, bsearch in this process, and plain Optuna for comparison.

    .venv/bin/python benchmarks/overhead.py [--trials 60]

The task does nothing, so the time between the ends of two trials is overhead: suggestion, scheduling, the worker's
reports, and database writes. Trials run one at a time, so that no overhead overlaps with another trial.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import optuna
import yaml
from bsearch.cluster.tune import TuneRunner
from bsearch.objectives.task_code import task_code_hash
from bsearch.search.run.driver import run_study
from bsearch.search.run.events import Event
from bsearch.search.run.serial import SerialRunner
from bsearch.spaces.study.file import read_study
from bsearch.spaces.trial import Measurement, TrialSetup


def nothing(setup: TrialSetup) -> Iterator[Measurement]:
    """A training that takes no time and scores by its batch."""
    yield Measurement(
        samples_seen=setup.samples_budget,
        elapsed_s=1.0 / setup.effective_batch,
        accuracy=setup.learning_rate % 1,
    )


def ours(folder: Path, trials: int, over_ray: bool) -> list[float]:
    """Seconds between the ends of consecutive trials."""
    path = folder / f"study-{over_ray}.yaml"
    study = {
        "study": f"overhead-{over_ray}",
        "task": f"{Path(__file__).resolve()}:nothing",
        "space": {
            "effective_batch": {"low": 8, "high": 1000},
            "reference_rate": {"low": 0.01, "high": 1.0},
            "rule": ["linear", "sqrt"],
            "epochs": {"low": 1, "high": 10},
        },
        "training": {"samples": 1000},
        "budget": {"trials": trials},
        "cluster": {"trials_at_once": 1},
    }
    path.write_text(yaml.safe_dump(study))
    spec = read_study(path)
    ends: list[float] = []

    def notify(event: Event) -> None:
        if event.kind == "ended":
            ends.append(time.perf_counter())

    place = (
        TuneRunner(spec.cluster, spec.devices, folder / "ray.log")
        if over_ray
        else nullcontext(SerialRunner(spec.devices))
    )
    with place as runner:
        run_study(spec, nullcontext(runner), task_code_hash(spec.task), notify=notify)
    return [after - before for before, after in pairwise(ends)]


def plain_optuna(folder: Path, trials: int) -> list[float]:
    """`study.optimize` on its default SQLite storage, with the same parameters and sampler."""
    ends: list[float] = []

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        batch = trial.suggest_int("effective_batch", 8, 1000, log=True)
        rate = trial.suggest_float("reference_rate", 0.01, 1.0, log=True)
        trial.suggest_categorical("rule", ["linear", "sqrt"])
        trial.suggest_int("epochs", 1, 10)
        return 1.0 / batch, rate % 1

    sampler = optuna.samplers.TPESampler(multivariate=True, constant_liar=True, seed=0)
    storage = f"sqlite:///{folder}/plain.db"
    study = optuna.create_study(storage=storage, directions=["minimize", "maximize"], sampler=sampler)
    study.optimize(objective, n_trials=trials, callbacks=[lambda *_: ends.append(time.perf_counter())])
    return [after - before for before, after in pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=60)
    trials = parser.parse_args().trials
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"{'overhead in seconds per trial':<42} median     p90   over plain")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = plain_optuna(folder, trials)
        rows = [
            ("plain study.optimize, default SQLite", plain),
            ("bsearch, in this process (--serial)", ours(folder, trials, over_ray=False)),
            ("bsearch, over Ray Tune", ours(folder, trials, over_ray=True)),
        ]
    for label, seconds in rows:
        median, p90 = statistics.median(seconds), statistics.quantiles(seconds, n=10)[8]
        print(f"{label:<42} {median:6.3f}  {p90:6.3f}   {median / statistics.median(plain):6.2f} x")


if __name__ == "__main__":
    main()
