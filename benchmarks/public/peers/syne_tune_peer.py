"""Syne Tune's MOASHA with its defaults: random settings, and rungs at 1, 3 and 9 tenths, of which the best third continues.

`Ranks` repairs syne-tune 0.16.0, whose default priority returns which trial comes first, second, ... where its caller expects
the rank of each; that is to MOASHA's advantage.
"""

from datetime import datetime
from typing import Any

import numpy as np
from protocol import Peer, serve
from syne_tune.backend.trial_status import Trial
from syne_tune.config_space import lograndint, loguniform, randint, uniform
from syne_tune.optimizer.scheduler import SchedulerDecision
from syne_tune.optimizer.schedulers.multiobjective.moasha import MOASHA
from syne_tune.optimizer.schedulers.multiobjective.multiobjective_priority import MOPriority
from syne_tune.optimizer.schedulers.multiobjective.non_dominated_priority import (
    compute_epsilon_net,
    pareto_efficient,
)

DOMAINS = {
    (True, True): lograndint,
    (True, False): randint,
    (False, True): loguniform,
    (False, False): uniform,
}


class Ranks(MOPriority):
    """Front by front, and within a front from the fastest on, the farthest remaining one next."""

    def priority_unsafe(self, objectives: np.ndarray) -> np.ndarray:
        ranks = np.empty(len(objectives), dtype=int)
        left, placed = np.arange(len(objectives)), 0
        while left.size:
            first = pareto_efficient(objectives[left])
            ranks[left[first]] = placed + compute_epsilon_net(objectives[left[first]], dim=0)
            left, placed = left[~first], placed + int(first.sum())
        return ranks


class SyneTune(Peer):
    package = "syne-tune"
    reports = True

    def __init__(self, space: dict[str, dict[str, Any]], seed: int, reference: list[float]) -> None:
        np.random.seed(seed)  # MOASHA draws from this global state, whatever seed it is given
        domains = {
            name: DOMAINS[one["integer"], one["log"]](one["low"], one["high"]) for name, one in space.items()
        }
        self.scheduler = MOASHA(
            domains,
            metrics=["seconds", "error"],
            time_attr="tenths",
            max_t=10,
            multiobjective_priority=Ranks(),
        )
        self.trials: dict[int, Trial] = {}

    def ask(self, number: int) -> dict[str, Any]:
        parameters = {name: float(value) for name, value in self.scheduler.suggest().config.items()}
        self.trials[number] = Trial(number, parameters, datetime.now())
        self.scheduler.on_trial_add(self.trials[number])
        return {"parameters": parameters}

    def report(self, number: int, fraction: float, values: list[float]) -> bool:
        result = {"tenths": round(10 * fraction), "seconds": values[0], "error": values[1]}
        return self.scheduler.on_trial_result(self.trials[number], result) == SchedulerDecision.STOP

    def tell(self, number: int, fraction: float, values: list[float]) -> None:
        self.scheduler.on_trial_remove(self.trials[number])


if __name__ == "__main__":
    serve(SyneTune)
