"""How a script ends: by `os._exit` it ends itself, and not the process that runs the trial."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from bsearch.objectives.script.script import run_script
from bsearch.spaces.errors import TaskError
from helpers import setup

SCRIPT = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
LR = 0.1
EPOCHS = 2
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(40, 3), torch.randint(2, (40,))), BATCH, shuffle=True)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
for epoch in range(EPOCHS):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    print(f"accuracy: {0.5 + epoch / 10}")
ENDS
"""
TOLD = {"batch": "BATCH", "rate": "LR", "epochs": "EPOCHS", "metric": "accuracy:"}


def trained(folder: Path, ends: str) -> list[float | None]:
    (folder / "train.py").write_text(SCRIPT.replace("ENDS", ends))
    made = setup(10, 1, 80, 0.1, training={"schedule": "constant", "warmup": 0.0}, folder=str(folder))
    return [one.accuracy for one in run_script(replace(made, epochs=2), "train.py", **TOLD)]


def test_a_script_that_ends_its_process_ends_itself(tmp_path: Path) -> None:
    before = os._exit
    assert trained(tmp_path, "os._exit(0)") == [0.5, 0.6]
    assert os._exit is before


def test_an_exit_code_is_an_error_of_the_script(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"train.py: it ended with exit code 3. It last wrote: accuracy: 0.5"):
        trained(tmp_path, "os._exit(3)")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from Python 3.12 on, beside threads
def test_a_child_of_the_script_ends_by_itself(tmp_path: Path) -> None:
    ends = "child = os.fork()\nif not child:\n    os._exit(7)\nassert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7"
    assert trained(tmp_path, ends) == [0.5, 0.6]
