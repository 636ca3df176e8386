"""The notebook of the examples runs as it stands: a study, its progress, its front as a table and a plot, an export."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
MOST_LINES = 12


@pytest.mark.docs
@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_notebook_runs_a_study_plots_its_front_and_exports_a_point(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    for name in ("digits.ipynb", "digits.yaml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    notebook: Any = nbformat.read(tmp_path / "digits.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert sum(bool(line.strip()) for cell in code for line in cell.source.splitlines()) <= MOST_LINES
    os.environ["PYTHONWARNINGS"] = "ignore"  # the kernel's own packages warn of one another
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    run, frame, plot, within, export, report = (list(cell.outputs) for cell in code)
    progress = [
        one for one in run if "text/html" in one.get("data", {}) and "<pre" in one["data"]["text/html"]
    ]
    assert any("12/12" in one["data"]["text/html"] for one in progress)
    assert "12 of 12 trials" in run[-1]["data"]["text/html"]
    assert "effective_batch" in frame[-1]["data"]["text/html"]
    assert plot[-1]["data"]["application/vnd.plotly.v1+json"]["data"]
    assert "learning_rate" in within[-1]["data"]["text/plain"]
    assert "TrainingArguments(" in export[-1]["text"]
    assert "report.html" in report[-1]["data"]["text/plain"]
    assert (tmp_path / "results" / "digits" / "report.html").is_file()
