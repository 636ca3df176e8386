"""How often a stated interval of training times held, and how often the one that a study's first half widened did.

    python benchmarks/track_record.py [--studies 5]

Studies of digits, each on an idle machine and beside a process that keeps every core busy: the first half of their trials
widens the interval, the second half is what it is tried on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bsearch.search.report.track_record import Settled
from bsearch.search.run.opening import widened

STUDY = """
study: record
task: bsearch.objectives.digits:Digits
space:
  effective_batch: {{low: {low}, high: {high}}}
  reference_rate: {{low: 0.01, high: 1.0, at_batch: 64}}
  epochs: {{low: 2, high: {epochs}}}
training: {{evaluations: 5}}
budget: {{trials: 24, profile_s: 10}}
"""
SPACES = ((8, 1000, 20), (16, 256, 10), (64, 512, 40), (8, 64, 5), (128, 1000, 60))


def settled(folder: Path, space: tuple[int, int, int], *options: str) -> list[Settled]:
    """Run a study, and read its record."""
    (folder / "study.yaml").write_text(
        STUDY.format(**dict(zip(("low", "high", "epochs"), space, strict=True)))
    )
    bsearch = [sys.executable, "-m", "bsearch"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    subprocess.run(
        [*bsearch, "run", "study.yaml", *options],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )
    shown = subprocess.run(
        [*bsearch, "show", "study.yaml", "--record", "--json"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )
    rows: list[dict[str, Any]] = json.loads(shown.stdout)["settled"]
    return [
        Settled(*(row[name] for name in ("trial", "what", "predicted", "came", "stated"))) for row in rows
    ]


def main(studies: int) -> None:
    print(
        f"{'space':>16} {'machine':>8} {'trials':>7} {'stated':>8} {'median error':>13} {'held':>6} {'widened':>8} {'held':>6}"
    )
    for space in SPACES[:studies]:
        for machine, spinning in (("idle", 0), ("busy", os.cpu_count() or 1)):
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(spinning)]
            try:
                with tempfile.TemporaryDirectory() as folder:
                    times = [one for one in settled(Path(folder), space) if one.what == "training time"]
            finally:
                for other in others:
                    other.kill()
            errors, stated = [one.error for one in times], times[0].stated or 0.0
            first, second = errors[: len(errors) // 2], errors[len(errors) // 2 :]
            wide = widened(stated, first) or stated
            held = [sum(abs(error) <= width for error in second) / len(second) for width in (stated, wide)]
            off = median(map(abs, errors))
            print(
                f"{'{} to {} x {}'.format(*space):>16} {machine:>8} {len(errors):7} {stated:8.1%} {off:13.1%} {held[0]:6.0%} "
                f"{wide:8.1%} {held[1]:6.0%}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=5)
    main(parser.parse_args().studies)
