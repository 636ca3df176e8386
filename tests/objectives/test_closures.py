"""Optimizers that compute a step's gradient themselves are refused by name, and only those."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from bsearch.objectives.optimizers import needs_closure
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.errors import TaskError
from bsearch.spaces.trial import TrialSetup
from helpers import Net, setup
from rank_jobs import SAM, OwnGroups
from torch import nn


class Asserts(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "it needs one"


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        *(
            (kind, f"got {kind.__name__} with a closure, which computes it again")
            for kind in (torch.optim.LBFGS, SAM, Asserts)
        ),
        (OwnGroups, "whose base has its own. Write self.param_groups = self.base.param_groups"),
    ],
)
def test_a_task_whose_optimizer_cannot_be_driven_is_refused(optimizer: Any, words: str) -> None:
    class Mine(Net):
        def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
            return optimizer(model.parameters(), lr=setup.learning_rate)  # type: ignore[no-any-return]

    with pytest.raises(TaskError, match=f"Mine.optimizer: expected an optimizer .*{words}"):
        TrainingRun(Mine(), setup(8))


def test_only_optimizers_that_say_so_need_a_closure() -> None:
    weights = [nn.Parameter(torch.zeros(2, 2))]
    for name, kind in vars(torch.optim).items():
        if (
            inspect.isclass(kind)
            and issubclass(kind, torch.optim.Optimizer)
            and kind is not torch.optim.Optimizer
        ):
            assert needs_closure(kind(weights)) == (name == "LBFGS"), name
    assert needs_closure(Asserts(weights, lr=0.1)) and needs_closure(SAM(weights, lr=0.1))
