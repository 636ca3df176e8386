"""Generate the figures of this documentation from the page of one finished study, in the browser that the tests use.

    python docs/figures.py cifar.yaml

The study is examples/cifar10.yaml with 60 trials, `confirm: 2` and `memory: {limit: 24MiB}`.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
FIGURES = ("front", "memory", "step-time", "rate-batch", "powers-of-two")
TAKE = "name => Plotly.toImage(document.getElementById('plot-' + name), {format: 'png', width: 960, height: 600})"


def main(study: str) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "report.html"
        subprocess.run([sys.executable, "-m", "bsearch", "report", study, "--out", str(page_file)], check=True)
        page = playwright.chromium.launch().new_page()
        page.goto(page_file.as_uri())
        for name in FIGURES:
            page.wait_for_selector(f"#plot-{name} .main-svg")
            content = page.evaluate(TAKE, name).partition(",")[2]
            (IMAGES / f"cifar10-{name}.png").write_bytes(base64.b64decode(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
