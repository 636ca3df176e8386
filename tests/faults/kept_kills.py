"""Random SIGKILLs of studies that keep a model, half of them while one is replaced: what is kept is whole, or is brought back.

python tests/faults/kept_kills.py --minutes 8 [--ray]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
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
budget: {{by: 2m, profile_s: 1, keep: {folder}/model}}
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


class Killed:
    """A study that is killed again and again, and then let run to its end."""

    def __init__(self, folder: Path, ray: bool) -> None:
        (folder / "s.yaml").write_text(STUDY.format(folder=folder))
        self.folder, self.log = folder, folder / "log.txt"
        self._command = [sys.executable, "-m", "bsearch", "run", "s.yaml", *(() if ray else ("--serial",))]
        # A stack of every thread is written at SIGABRT.
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONFAULTHANDLER": "1",
        }
        self._slower = 3 if ray else 1

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            command = [*self._command, *options]
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, dice: random.Random, at_replacement: bool) -> None:
        process, begun, before = self.start(), time.monotonic(), looked_at(self.folder)
        wait_s = self._slower * dice.uniform(2, 14)
        while (lasted := time.monotonic() - begun) < 40 * self._slower and process.poll() is None:
            changed = looked_at(self.folder) != before and lasted > 4
            if (at_replacement and changed) or (not at_replacement and lasted > wait_s):
                break
            before = looked_at(self.folder)
            time.sleep(0.0005)
        time.sleep(dice.uniform(0, 0.01) if at_replacement else 0)
        end_session(process.pid, signal.SIGKILL)
        process.wait()

    def faults(self) -> list[str]:
        model, previous = self.folder / "model", self.folder / ".model.bsearch-kept" / "before"
        kept = [model] if model.exists() else [previous] if previous.exists() else []
        return [f"{path.name}: {fault}" for path in kept if (fault := fault_of(path))]

    def finish(self, patience_s: float) -> list[str]:
        """Let it run; what is wrong with its end. One that hangs leaves its stacks in the log."""
        process = self.start("--within", "100s")  # anew: kills may have used up what it was given
        try:
            code = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            process.wait(20)
            shutil.copy(self.log, Path(tempfile.gettempdir()) / f"hung-{process.pid}.txt")
            return [f"no end after {patience_s:.0f} s: {self.log.read_text()[-6000:]}"]
        finally:
            end_session(process.pid, signal.SIGKILL)
        model = [] if (self.folder / "model").exists() else ["no model at the end"]
        return [
            *([f"exit code {code}: {self.log.read_text()[-1500:]}"] if code else []),
            *model,
            *self.faults(),
        ]


def end_session(pid: int, number: signal.Signals) -> None:
    """A signal to every process of the session, whatever its group: Ray's daemons have their own."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == pid:
                os.kill(int(stat.parent.name), number)


def main(minutes: float, seed: int, ray: bool) -> None:
    dice, until, kills, replaced, broken = (
        random.Random(seed),
        time.monotonic() + 60 * minutes,
        0,
        0,
        list[str](),
    )
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory() as text:
            study = Killed(Path(text), ray)
            for _ in range(dice.randint(3, 8)):
                at_replacement = dice.random() < 0.5
                study.kill(dice, at_replacement)
                kills, replaced = kills + 1, replaced + at_replacement
                broken += [f"kill {kills}: {fault}" for fault in study.faults()]
            broken += [f"after kill {kills}: {fault}" for fault in study.finish(900)]
        print(
            f"{kills} kills, {replaced} of them at a replacement; broken: {broken or 'nothing'}", flush=True
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ray", action="store_true")
    arguments = parser.parse_args()
    main(arguments.minutes, arguments.seed, arguments.ray)
