"""Generate the figures of this documentation from the page of one finished study, in the browser that the tests use.

    python docs/figures.py digits examples/digits.yaml front
    python docs/figures.py cifar10 cifar.yaml memory step-time rate-batch

The second is examples/cifar10.yaml with 60 trials, `confirm: 2` and `memory: {limit: 24MiB}`.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
TAKE = """name => {
  const {data, layout} = document.getElementById('plot-' + name);
  const white = {...layout, paper_bgcolor: 'white', plot_bgcolor: 'white'};
  return Plotly.toImage({data, layout: white}, {format: 'png', width: 960, height: 600});
}"""


def main(name: str, study: str, *figures: str) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "report.html"
        subprocess.run(
            [sys.executable, "-m", "bsearch", "report", study, "--out", str(page_file)], check=True
        )
        page = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        ).new_page()
        page.goto(page_file.as_uri())
        for figure in figures:
            page.wait_for_selector(f"#plot-{figure} .main-svg")
            content = page.evaluate(TAKE, figure).partition(",")[2]
            (IMAGES / f"{name}-{figure}.png").write_bytes(base64.b64decode(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
