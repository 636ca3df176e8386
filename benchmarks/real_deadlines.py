"""Real studies over Ray with a deadline: when they are done, what they said on the way, and the model that they leave.

    python benchmarks/real_deadlines.py --runs 20 --within 180 --at-once 2

Digits with up to 200 epochs. Every second one has a busy process beside it, and every fourth driver is killed with SIGKILL
between 30 and 75 % of its time and started again by the same command. The metric is computed again from the kept weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from bsearch.objectives.digits import Digits
from bsearch.search.report.terminal.deadline import deadline_line
from bsearch.search.store.rows import StudyRow
from bsearch.search.store.tables import Tables
from bsearch.spaces.trial import TrialSetup

STUDY = """
study: digits
task: bsearch.objectives.digits:Digits
space:
  effective_batch: {low: 8, high: 1000}
  reference_rate: {low: 0.01, high: 1.0, at_batch: 64}
  rule: [linear, sqrt]
  epochs: {low: 2, high: 200}
training: {evaluations: 5, seed: SEED}
budget: {profile_s: 8}
cluster: {trials_at_once: 1}
"""
BSEARCH = Path(sys.executable).parent / "bsearch"
BUSY = "while True: pass"


def one(number: int, within_s: int, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    (folder / "study.yaml").write_text(STUDY.replace("SEED", str(number)))
    rng = random.Random(number)
    busy = subprocess.Popen([sys.executable, "-c", BUSY]) if number % 2 else None
    command = [str(BSEARCH), "run", "study.yaml", "--within", f"{within_s}s", "--keep", "model"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    killed_at = rng.uniform(0.3, 0.75) * within_s if number % 4 == 3 else None
    began, said = time.time(), ""
    try:
        with (folder / "out.txt").open("w") as out:
            running = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True
            )
            while running.poll() is None:
                now = time.time() - began
                if not said and now > within_s / 3:
                    said = planned(folder) or "-"
                if killed_at is not None and now > killed_at:
                    killed_at = None
                    os.killpg(running.pid, signal.SIGKILL)
                    running.wait()
                    running = subprocess.Popen(
                        command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True
                    )
                time.sleep(0.2)
        ended = time.time() - began
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
    row = {
        "run": number,
        "busy": bool(number % 2),
        "killed": number % 4 == 3,
        "rc": running.returncode,
        "said": said,
    }
    row["before_s"] = round(within_s - ended, 1)
    document = json.loads((folder / "model" / "training.json").read_text())
    row |= {
        "accuracy": round(document["accuracy"], 4),
        "reloaded": round(reloaded(folder / "model", document), 4),
    }
    with closing(sqlite3.connect(next(folder.glob("*.db")))) as connection:
        facts = [json.loads(text) for (text,) in connection.execute("select facts from bsearch_trial")]
    row |= {"trials": len(facts)}
    row["shortened"] = sum(each.get("shortened_to") is not None for each in facts)
    return row


def planned(folder: Path) -> str:
    database = next(folder.glob("*.db"), None)
    if database is None:
        return ""
    tables = Tables(f"sqlite:///{database}", create=False)
    try:
        rows: list[StudyRow] = tables.studies()
        return "" if not rows or rows[0].deadline is None else deadline_line(rows[0].deadline)
    finally:
        tables.close()


def reloaded(folder: Path, document: dict[str, Any]) -> float:
    """The accuracy of the weights in a folder, on the validation data."""
    task, setup = Digits(), document["setup"]
    made = TrialSetup.from_dict(
        {**setup, "checkpoint": None, "model_folder": None, "device": "cpu", "cpus": 1, "folder": "."}
    )
    model = task.model(made)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    model.eval()
    validation = task.data(made).validation
    samples = [validation[index] for index in range(len(validation))]
    inputs, labels = (torch.stack([torch.as_tensor(sample[place]) for sample in samples]) for place in (0, 1))
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--within", type=int, default=180)
    parser.add_argument("--at-once", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.at_once) as threads:
        rows = threads.map(
            lambda number: one(number, arguments.within, Path(folder) / str(number)), range(arguments.runs)
        )
        for row in rows:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
