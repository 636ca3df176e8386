"""No training goes on from the weights of another, on any of the roads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bsearch.objectives.model.own_weights import own_weights
from bsearch.objectives.trial import start_attempt
from bsearch.spaces.errors import TaskError
from helpers import run, setup
from torch import nn

KEPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from bsearch import Data, Loop, Measurement, Task

NET = nn.Linear(6, 3)
DATA = TensorDataset(torch.randn(400, 6), torch.randint(0, 3, (400,)))

class Kept(Task):
    def data(self, setup): return Data(DATA, DATA)
    def model(self, setup):
        {anew}
        return NET

def bare(setup):
    optimizer = torch.optim.SGD(NET.parameters(), lr=setup.learning_rate)
    NET(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    yield Measurement(setup.samples_budget, 1.0, 0.5)

def kit(setup):
    optimizer = torch.optim.SGD(NET.parameters(), lr=setup.learning_rate)
    loop = Loop(setup, Data(DATA, DATA), {{"net": NET}}, {{"net": optimizer}})
    for step in loop:
        for part in step:
            (part.weight * NET(part.batch[0]).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            yield loop.measure(accuracy=0.5)
"""


@pytest.mark.parametrize("road", ["Kept", "bare", "kit"])
def test_a_model_of_the_module_is_trained_once(tmp_path: Path, road: str) -> None:
    (tmp_path / "tasks.py").write_text(KEPT.format(anew="pass"))
    first, second = ([*start_attempt(f"{tmp_path}/tasks.py:{road}", setup(budget=64))][-1] for _ in range(2))
    assert first.kind == "complete", first
    assert second.kind == "error"
    assert "Make it anew for each" in second.message


def test_one_that_is_set_back_may_be_used_again(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(KEPT.format(anew="NET.reset_parameters()"))
    kinds = [[*start_attempt(f"{tmp_path}/tasks.py:Kept", setup(budget=64))][-1].kind for _ in range(2)]
    assert kinds == ["complete"] * 2


def test_what_is_frozen_may_be_shared() -> None:
    shared = nn.Linear(2, 2).requires_grad_(False)
    for _ in range(2):
        head = nn.Linear(2, 2)
        optimizer = torch.optim.SGD([*shared.parameters(), *head.parameters()], lr=0.1)
        with own_weights():
            for _ in range(3):
                head(shared(torch.ones(1, 2))).sum().backward()
                optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("anew", ["pass", "NET.reset_parameters()"])
def test_it_is_refused_before_the_first_trial(
    study_file: Callable[..., Path], tmp_path: Path, anew: str
) -> None:
    (tmp_path / "tasks.py").write_text(KEPT.format(anew=anew))
    path = study_file(task="tasks.py:Kept", budget={"trials": 2})
    if anew == "pass":
        with pytest.raises(TaskError, match="expected a new model from each call, got 2 of 2"):
            run(path)
    else:
        assert [record.outcome for record in run(path).study.records] == ["complete"] * 2
