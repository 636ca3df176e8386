"""How long a driver that was killed takes to have its first trial moving again: wall clock and its own CPU seconds.

    .venv/bin/python benchmarks/restart.py [--repeats 12]

A digits study with trials of some seconds is killed with SIGKILL in the middle of one, and started again. Counted is the
time from the start of the program until a worker reports (first what its checkpoint holds, as training begins again): with
a Ray of the driver's own, which died with it, and with one that it had joined, which lives.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

BIN = Path(sys.executable).parent
TASK = """
import time
from bsearch.objectives.digits import Digits


class Slow(Digits):
    def loss(self, model, batch, setup):
        if setup.samples_budget > 1:
            time.sleep(0.02)
        return super().loss(model, batch, setup)
"""


def study(folder: Path, trials: int) -> Path:
    (folder / "tasks.py").write_text(TASK)
    content = {
        "study": "restart",
        "task": "tasks.py:Slow",
        "space": {
            "effective_batch": {"low": 32, "high": 64},
            "reference_rate": {"low": 0.03, "high": 0.6, "at_batch": 64},
            "epochs": 12,
        },
        "training": {"evaluations": 40},
        "devices": {"per_trial": 1, "kind": "cpu"},
        "budget": {"trials": trials, "profile_s": 5},
        "stopping": "none",
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def measured(folder: Path) -> int:
    """Measurements so far."""
    with contextlib.suppress(sqlite3.Error):
        connection = sqlite3.connect(f"file:{folder}/restart.db?mode=ro", uri=True)
        with contextlib.closing(connection):
            return int(connection.execute("SELECT COUNT(*) FROM bsearch_measurement").fetchone()[0])
    return 0


def cpu_s(process: int) -> float:
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def restarts(path: Path, repeats: int, **variables: str) -> tuple[list[float], list[float]]:
    """Seconds by the clock and of the driver's CPU, of each start but the first."""
    walls, cpus = [], []
    for number in range(repeats + 1):
        before, started = measured(path.parent), time.perf_counter()
        driver = subprocess.Popen(
            [BIN / "bsearch", "run", path],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **variables},
        )
        while measured(path.parent) <= before:
            assert driver.poll() is None, "the study ended"
            time.sleep(0.1)  # asking takes time from what is measured
        if number:
            walls.append(time.perf_counter() - started)
            cpus.append(cpu_s(driver.pid))
        time.sleep(random.uniform(1.0, 4.0))
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        time.sleep(3.0)  # its Ray, if it had one of its own, ends
    return walls, cpus


def line(name: str, walls: list[float], cpus: list[float]) -> str:
    place = max(round(0.95 * len(walls)) - 1, 0)
    figures = (statistics.median(walls), sorted(walls)[place], statistics.median(cpus), sorted(cpus)[place])
    return f"{name:<22}" + "".join(f"{value:>12.1f}" for value in figures) + f"{len(walls):>8}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=12)
    options = parser.parse_args()
    print(f"{'':<22}{'wall s':>12}{'95 %':>12}{'CPU s':>12}{'95 %':>12}{'starts':>8}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as text:
        folder = Path(text)
        (folder / "own").mkdir()
        (folder / "joined").mkdir()
        print(line("a Ray of its own", *restarts(study(folder / "own", 100), options.repeats)), flush=True)
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
        head = subprocess.Popen(
            [
                BIN / "ray",
                "start",
                "--head",
                "--block",
                "--port=6399",
                "--node-ip-address=127.0.0.1",
                "--include-dashboard=false",
            ],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            time.sleep(8)
            variables = {name: environment[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
            figures = restarts(
                study(folder / "joined", 100), options.repeats, RAY_ADDRESS="127.0.0.1:6399", **variables
            )
            print(line("a Ray that it joined", *figures))
        finally:
            os.killpg(head.pid, signal.SIGTERM)
            head.wait()


if __name__ == "__main__":
    main()
