"""NePS's PriMO without priors, with its defaults: MOASHA for as many trainings as parameters but at least 3,
then Bayesian optimization.

A trial may end at a rung, and continue from there later. After MOASHA it always trains to the end.
"""

import logging
import time
import warnings
from typing import Any

import numpy as np
import torch
from neps.optimizers.algorithms import primo
from neps.optimizers.ask_and_tell import AskAndTell
from neps.space import HPOFloat, HPOInteger, SearchSpace
from neps.state import Trial
from protocol import Peer, serve


class NePS(Peer):
    package = "neural-pipeline-search"

    def __init__(self, space: dict[str, dict[str, Any]], seed: int, reference: list[float]) -> None:
        np.random.seed(seed)
        torch.manual_seed(seed)
        elements = {
            name: (HPOInteger if one["integer"] else HPOFloat)(one["low"], one["high"], log=one["log"])
            for name, one in space.items()
        }
        whole = SearchSpace({**elements, "tenths": HPOInteger(1, 10, is_fidelity=True)})
        # With fewer than three, as for one parameter, none has trained to the end by then, and PriMO raises.
        self.asker = AskAndTell(primo(whole, prior_centers={}, initial_design_size=max(3, len(space))))
        self.names: dict[int, str] = {}

    def ask(self, number: int) -> dict[str, Any]:
        trials = self.asker.trials
        try:
            asked = self.asker.optimizer(trials, None, None)
        except ValueError:  # of NePS 0.17.0, where all trials of a rung still run
            asked = self.asker.optimizer(
                {name: trial for name, trial in trials.items() if trial.report is not None}, None, None
            )
        name = asked.id
        if name in trials:  # NePS gives two that run at once the same name, and would keep the later one only
            _, rung, which = name.partition("_")
            name = f"{max(int(each.split('_')[0]) for each in trials) + 1}{rung}{which}"
        now = time.time()
        trials[name] = Trial.new(
            trial_id=name,
            location="",
            config=asked.config,
            previous_trial=asked.previous_config_id,
            previous_trial_location="",
            time_sampled=now,
            worker_id="0",
        )
        trials[name].set_evaluating(time_started=now, worker_id="0")
        self.names[number] = name
        parameters = dict(asked.config)
        answer = {"until": int(parameters.pop("tenths")) / 10, "parameters": parameters}
        earlier = [one for one, told in self.names.items() if told == asked.previous_config_id]
        return {**answer, "continues": earlier[0]} if earlier else answer

    def tell(self, number: int, fraction: float, values: list[float]) -> None:
        self.asker.tell(self.names[number], {"objective_to_minimize": values})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    serve(NePS)
