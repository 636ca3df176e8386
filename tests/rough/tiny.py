"""A study of milliseconds with its task beside it, and commands in this process, for the attacks here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from click.testing import Result

BSEARCH = Path(sys.executable).parent / "bsearch"
TASK = """
import torch
from bsearch import Data, Task
from torch.utils.data import TensorDataset

class Points(Task):
    def data(self, setup):
        inputs = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
        return Data(data, data)

    def model(self, setup):
        return torch.nn.Linear(2, 2)
"""
# Of more samples, and another validation set; a stored database holds the hash of this code (`test_versions.py`).
POINTS = """
import torch
from bsearch import Data, Task

def points(samples, seed):
    inputs = torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())

class Points(Task):
    def data(self, setup):
        return Data(points(400, 0), points(101, 1))

    def model(self, setup):
        return torch.nn.Linear(2, 2)
"""


def tiny_study(folder: Path, task: str = TASK, **changes: Any) -> Path:
    """Write `study.yaml` and `tasks.py` into a folder; keys of the study may be replaced."""
    study = {
        "study": "small",
        "task": "tasks.py:Points",
        "space": {
            "effective_batch": {"low": 8, "high": 16},
            "reference_rate": {"low": 0.1, "high": 0.5},
            "epochs": 1,
        },
        "training": {"evaluations": 1},
        "devices": {"kind": "cpu"},
        "budget": {"trials": 2},
        **changes,
    }
    study["budget"] = {"profile_s": 0, **study["budget"]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tasks.py").write_text(task)
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(study))
    return file


def in_words(result: Result, *exit_codes: int) -> str:
    error = result.exception
    assert error is None or isinstance(error, SystemExit), repr(error)
    assert "internal error" not in result.output and "Traceback" not in result.output, result.output
    assert result.exit_code in (exit_codes or (0, 1, 2)), f"exit code {result.exit_code}: {result.output}"
    return result.output
