"""The task of tests/objectives/test_whole_run.py, apart so that ranks can load it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from bsearch.objectives.task import Data, Loss, Score, Task
from bsearch.spaces.trial import TrialSetup
from torch import Tensor, nn
from torch.utils.data import TensorDataset

KINDS = ("samples", "weights", "ignored", "tokens", "sparse", "drawn")
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)


def data(kind: str) -> tuple[Tensor, Tensor]:
    """600 samples of four places each; `sparse`: one label in fifty counts, so that whole micro-batches have none."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(600, 4, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 5, (600, 4), generator=generator)
    kept = {"ignored": 0.7, "tokens": 0.4, "sparse": 0.02}.get(kind, 1.0)
    if kind == "ignored":
        labels[torch.rand(600, generator=generator) > kept] = -100
    else:
        labels[torch.rand(600, 4, generator=generator) > kept] = -100
    return inputs, labels


def drawn_by(kind: str) -> np.ndarray | None:
    """The weights by which samples are drawn; `drawn`: every seventh never."""
    return np.arange(600.0) % 7 if kind == "drawn" else None


def model(setup: TrialSetup) -> nn.Module:
    torch.manual_seed(setup.seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).double()


class Recorded(Task):
    """Keeps the norm of every step's gradient, and the parameters after it."""

    kind, dtype = "samples", torch.float64

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def data(self, setup: TrialSetup) -> Data:
        inputs, labels = data(str(setup.parameters.get("kind", self.kind)))
        both = TensorDataset(inputs.to(self.dtype), labels)
        return Data(both, both, weights=drawn_by(str(setup.parameters.get("kind", self.kind))))

    def model(self, setup: TrialSetup) -> nn.Module:
        return model(setup).to(self.dtype)

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9, nesterov=True)
        norms: list[float] = []

        def before(*_: Any) -> None:
            norms.append(float(torch.cat([one.grad.flatten() for one in model.parameters()]).norm()))

        def after(*_: Any) -> None:
            self.steps.append(
                (norms[-1], torch.cat([one.detach().flatten() for one in model.parameters()]).tolist())
            )

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return optimizer

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        inputs, labels = batch
        weights = WEIGHTS if setup.parameters.get("kind", self.kind) == "weights" else None
        logits, labels = model(inputs).flatten(0, -2), labels.flatten()
        total = nn.functional.cross_entropy(logits, labels, weights, reduction="sum")
        counted = labels[labels != -100]
        return Loss(total, len(counted) if weights is None else weights[counted].sum())

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        inputs, labels = batch
        right = (model(inputs).argmax(-1) == labels).sum()
        norm = float(torch.cat([one.flatten() for one in model.parameters()]).norm())
        return {"accuracy": Score(right, labels.numel()), "norm": Score(norm * len(inputs), len(inputs))}


class Reported(Recorded):
    """The same with a plain optimizer, for ranks."""

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9, nesterov=True)
