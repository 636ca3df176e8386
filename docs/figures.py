"""Generate the figures of this documentation with `bsearch report --figures` from one finished study.

    python docs/figures.py cifar.yaml

The study is examples/cifar10.yaml with 60 trials, `confirm: 2` and `memory: {limit: 24MiB}`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
FIGURES = ("front", "memory", "step-time", "rate-batch", "powers-of-two")


def main(study: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = ["--out", f"{folder}/report.html", "--figures", folder]
        subprocess.run([sys.executable, "-m", "bsearch", "report", study, *out], check=True)
        for name in FIGURES:
            shutil.copy(Path(folder) / f"{name}.png", IMAGES / f"cifar10-{name}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
