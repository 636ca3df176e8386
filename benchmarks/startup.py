"""How long commands take to answer: CPU seconds and peak memory of whole processes, beside other programs' `--help`.

    .venv/bin/python benchmarks/startup.py [--study study.yaml] [--repeats 5]

The study should have met its budget; without one, commands that need a study are left out. Printed is the median of user plus
system seconds, the wall clock, and the largest resident set, each command after one warm-up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
ALWAYS = {
    "import bsearch": [sys.executable, "-c", "import bsearch"],
    "bsearch --help": [BIN / "bsearch", "--help"],
    "bsearch check --schema": [BIN / "bsearch", "check", "--schema"],
    "optuna --help": [BIN / "optuna", "--help"],
    "ray --help": [BIN / "ray", "--help"],
    "import torch": [sys.executable, "-c", "import torch"],
}
OF_A_STUDY = {
    "bsearch show": ["show", "{study}"],
    "bsearch show --all": ["show", "{study}", "--all"],
    "bsearch export": ["export", "{study}"],
    "bsearch export --to hf": ["export", "{study}", "--to", "hf"],
    "bsearch ask STUDY": ["ask", "{study}"],
    "bsearch report": ["report", "{study}", "--out", "{folder}/report.html"],
    "bsearch run, finished": ["run", "{study}", "--out", "{folder}"],
}


def taken(command: list[str | Path]) -> tuple[float, float, float]:
    """CPU seconds, wall seconds and MB of one process with its children."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime, wall_s, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        commands: dict[str, list[str | Path]] = {name: list(command) for name, command in ALWAYS.items()}
        if options.study is not None:
            for name, parts in OF_A_STUDY.items():
                commands[name] = [
                    BIN / "bsearch",
                    *(part.format(study=options.study, folder=folder) for part in parts),
                ]
        print(f"{'':<26}{'CPU s':>8}{'wall s':>8}{'MB':>7}")
        for name, command in commands.items():
            taken(command)
            runs = [taken(command) for _ in range(options.repeats)]
            cpu, wall, size = (statistics.median(column) for column in zip(*runs, strict=True))
            print(f"{name:<26}{cpu:>8.2f}{wall:>8.2f}{size:>7.0f}", flush=True)


if __name__ == "__main__":
    main()
