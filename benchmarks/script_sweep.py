"""A script as it is, searched by bsearch and by a sweep: Optuna's TPE around `subprocess`, as sweep tools do it.

    .venv/bin/python benchmarks/script_sweep.py [--trials 12] [--seeds 3]

Both search the same batches, rates and epochs of the script of `script_overhead.py`, which prints its accuracy; the sweep reads
the wall clock around the script's passes, as it has no other. Printed are lines that the user writes, trials lost, seconds in
all, and the share of the union of both fronts' area (log seconds, accuracy) that each front has, with each of its settings
trained again alone and timed by the script itself: both are judged by the same clock.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna
from problems import hypervolume
from script_overhead import SCRIPT

BIN = Path(sys.executable).parent
EVALUATES = """
    model.eval()
    with torch.no_grad():
        print("accuracy:", (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item())
    model.train()
"""
SWEEP = """
import re, subprocess, sys, time, optuna
def objective(trial):
    batch = trial.suggest_int("batch", 8, 466, log=True)
    rate = trial.suggest_float("rate", 0.005, 2.0, log=True)
    epochs = trial.suggest_int("epochs", 1, 4)
    command = [sys.executable, "train.py", f"--batch-size={batch}", f"--lr={rate}", f"--epochs={epochs}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return sum(map(float, re.findall("seconds: (.*)", done.stdout))), float(re.findall("accuracy: (.*)", done.stdout)[-1])
study = optuna.create_study(directions=["minimize", "maximize"], sampler=optuna.samplers.TPESampler(seed=int(sys.argv[2])))
study.optimize(objective, n_trials=int(sys.argv[1]), catch=(RuntimeError,))
for trial in study.best_trials:
    print("FRONT", trial.params["batch"], trial.params["rate"], trial.params["epochs"])
print("LOST", sum(trial.state != optuna.trial.TrialState.COMPLETE for trial in study.trials))
"""


def ours(folder: Path, trials: int, seed: int) -> tuple[list[tuple[float, float, float]], int]:
    settings = ["--set", f"budget.trials={trials}", "--set", f"training.seed={seed}"]
    command = [BIN / "bsearch", "run", "--serial", *settings, "--", "python", "train.py"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    shown = subprocess.run(
        [BIN / "bsearch", "show", "study.yaml", "--json"],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    document = json.loads(shown.stdout)
    front = [(one["effective_batch"], one["learning_rate"], one["epochs"]) for one in document["front"]]
    return front, document["trials"].get("error", 0)


def theirs(folder: Path, trials: int, seed: int) -> tuple[list[tuple[float, float, float]], int]:
    (folder / "sweep.py").write_text(SWEEP)
    done = subprocess.run(
        [sys.executable, "sweep.py", str(trials), str(seed)],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    front = [tuple(map(float, found)) for found in re.findall(r"FRONT (\S+) (\S+) (\S+)", done.stdout)]
    return front, int(re.findall(r"LOST (\d+)", done.stdout)[0])  # type: ignore[return-value]


def again(folder: Path, setting: tuple[float, float, float]) -> tuple[float, float]:
    """Seconds and accuracy of a setting, by the script itself: medians of three."""
    batch, rate, epochs = setting
    command = [
        sys.executable,
        "train.py",
        f"--batch-size={batch:.0f}",
        f"--lr={rate}",
        f"--epochs={math.ceil(epochs)}",
    ]
    outputs = [
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
        for _ in range(3)
    ]
    seconds = [sum(map(float, re.findall("seconds: (.*)", output))) for output in outputs]
    return statistics.median(seconds), statistics.median(
        float(re.findall("accuracy: (.*)", output)[-1]) for output in outputs
    )


def main(trials: int, seeds: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    lines = {"bsearch": 0, "sweep": len(SWEEP.strip().splitlines())}
    print(f"{'seed':>4} {'who':<8}{'lines':>6}{'lost':>6}{'s':>7}{'points':>8}{'area':>8}")
    for seed in range(seeds):
        fronts = {}
        for who, search in (("bsearch", ours), ("sweep", theirs)):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                (folder / "train.py").write_text(SCRIPT + EVALUATES)
                began = time.monotonic()
                front, lost = search(folder, trials, seed)
                took = time.monotonic() - began
                fronts[who] = [again(folder, setting) for setting in front], lost, took
        points = [point for front, _, _ in fronts.values() for point in front]
        ends = min(seconds for seconds, _ in points), max(seconds for seconds, _ in points), 0.1
        whole = hypervolume(points, *ends)
        for who, (front, lost, took) in fronts.items():
            share = hypervolume(front, *ends) / whole
            print(
                f"{seed:>4} {who:<8}{lines[who]:>6}{lost:>6}{took:>7.0f}{len(front):>8}{share:>8.3f}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    main(**vars(parser.parse_args()))
