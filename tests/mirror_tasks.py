"""A made-up training whose metric is maximized or, with the other sign, minimized; it invents its clock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from bsearch.objectives.task import Data, Score, Task
from bsearch.spaces.trial import Measurement, TrialSetup
from tasks_for_tests import points
from torch import nn

# The names of the metric, and the sign with which the training reports it.
SIGNS = {"gain": 1.0, "deficit": -1.0}


def quality(setup: TrialSetup, fraction: float) -> float:
    """Higher is better: falls with the distance from the best rate, rises along the training; each seed differs a little."""
    optimum, curved = float(setup.parameters["optimum"]), float(setup.parameters["curved"])
    away = math.log(setup.learning_rate / (optimum * setup.effective_batch**0.5))
    luck = math.sin(12.9898 * setup.seed + 78.233 * math.log(setup.effective_batch)) * 0.01
    return 1 - 0.1 * away**2 - math.exp(-setup.epochs * fraction / (1 + curved * abs(away))) / 2 + luck


def training(setup: TrialSetup) -> Iterator[Measurement]:
    evaluations = setup.training.evaluations
    for number in range(1, evaluations + 1):
        fraction = number / evaluations
        value = SIGNS[setup.metric] * quality(setup, fraction)
        seen = round(setup.samples_budget * fraction)
        yield Measurement(seen, seen * (1e-4 + 1e-2 / setup.effective_batch), scores={setup.metric: value})


class Mirrored(Task):
    """The same as a Task, which leaves a model."""

    def data(self, setup: TrialSetup) -> Data:
        return Data(points(400, 0), points(20, 1))

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Linear(2, 2)

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Mapping[str, Score]:
        return {
            name: Score(sign * quality(setup, 1.0) * len(batch[1]), len(batch[1]))
            for name, sign in SIGNS.items()
        }
