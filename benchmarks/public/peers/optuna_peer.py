"""Optuna's samplers for several objectives, with their defaults: `tpe` and `gp` (logEHVI)."""

import sys
import warnings
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from protocol import Peer, serve

SAMPLERS = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}


class Optuna(Peer):
    package = "optuna"

    def __init__(self, space: dict[str, dict[str, Any]], seed: int, reference: list[float]) -> None:
        self.space: dict[str, BaseDistribution] = {
            name: (IntDistribution if domain["integer"] else FloatDistribution)(
                domain["low"], domain["high"], log=domain["log"]
            )
            for name, domain in space.items()
        }
        self.study = optuna.create_study(
            directions=["minimize"] * 2, sampler=SAMPLERS[sys.argv[1]](seed=seed)
        )
        self.trials: dict[int, optuna.Trial] = {}

    def ask(self, number: int) -> dict[str, Any]:
        self.trials[number] = self.study.ask(self.space)
        return {"parameters": self.trials[number].params}

    def tell(self, number: int, fraction: float, values: list[float]) -> None:
        self.study.tell(self.trials[number], values)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    serve(Optuna)
