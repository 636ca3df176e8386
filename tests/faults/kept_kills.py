"""Random SIGKILLs of studies that keep a model, half of them while one is replaced: what is kept is whole, or is brought back.

python tests/faults/kept_kills.py --minutes 8
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STUDY = """
study: kept
task: bsearch.objectives.digits:Digits
space:
  effective_batch: {{low: 16, high: 512}}
  reference_rate: {{low: 0.005, high: 0.5, at_batch: 64}}
  epochs: {{low: 1, high: 12}}
budget: {{by: 10m, profile_s: 1, keep: {folder}/model}}
"""


def fault_of(folder: Path) -> str:
    """What is wrong with a kept model; empty where it is whole."""
    try:
        manifest = json.loads((folder / "training.json").read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    broken = [
        name for name, digest in manifest.items()
        if not (folder / name).is_file() or hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest
    ]  # fmt: skip
    return f"not as its manifest says: {broken}" if broken else ""


def looked_at(folder: Path) -> int:
    """A number that changes as soon as a model is being replaced."""
    try:
        return hash((os.stat(folder).st_mtime_ns, *sorted(os.listdir(folder))))
    except OSError:
        return 0


def main(minutes: float, seed: int) -> None:
    dice, until, kills, replaced, broken = random.Random(seed), time.monotonic() + 60 * minutes, 0, 0, list[str]()
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            (folder / "s.yaml").write_text(STUDY.format(folder=folder))
            command = [sys.executable, "-m", "bsearch", "run", "s.yaml", "--serial"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
            for _ in range(dice.randint(3, 8)):
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                begun, at_replacement = time.monotonic(), dice.random() < 0.5
                wait_s, before = dice.uniform(2, 14), looked_at(folder)
                while time.monotonic() - begun < 40 and process.poll() is None:
                    changed = looked_at(folder) != before and time.monotonic() - begun > 4
                    if (at_replacement and changed) or (not at_replacement and time.monotonic() - begun > wait_s):
                        break
                    before = looked_at(folder)
                    time.sleep(0.0005)
                time.sleep(dice.uniform(0, 0.01) if at_replacement else 0)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills, replaced = kills + 1, replaced + at_replacement
                model, previous = folder / "model", folder / ".model.bsearch-before"
                if model.exists() and (fault := fault_of(model)):
                    broken.append(f"kill {kills}: {fault}")
                if not model.exists() and previous.exists() and (fault := fault_of(previous)):
                    broken.append(f"kill {kills}: the one before: {fault}")
        print(f"{kills} kills, {replaced} of them at a replacement; broken: {broken or 'nothing'}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    main(arguments.minutes, arguments.seed)
