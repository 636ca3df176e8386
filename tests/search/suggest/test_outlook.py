"""What one more training would reach: its rows, their devices and their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from bsearch.search.suggest.front_suggester import FrontSuggester
from bsearch.search.suggest.outlook import Outlook
from bsearch.spaces.record import TrialFacts, TrialRecord
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

COUNTS: list[BaseDistribution] = [IntDistribution(1, 4), CategoricalDistribution((1, 4))]


def outlook_of(devices: BaseDistribution, speedup: float) -> Outlook:
    """After twelve random trials, of which each further device saves a share of the time."""
    space = {
        "effective_batch": IntDistribution(8, 512, log=True),
        "learning_rate": FloatDistribution(1e-3, 1.0, log=True),
        "epochs": IntDistribution(1, 30, log=True),
        "devices": devices,
    }

    def known_s(parameters: Mapping[str, Any]) -> float:
        return float(parameters["epochs"] * (1 + 64 / parameters["effective_batch"]) / parameters["devices"] ** speedup)

    suggester, rng = FrontSuggester(space, known_seconds=known_s, by_time=True), np.random.default_rng(0)
    trials = []
    for number in range(12):
        point = suggester.transform.round_to_feasible(rng.random((1, suggester.transform.width)))[0]
        parameters = suggester.transform.decode(point)
        accuracy = (
            0.5 + 0.1 * math.log(parameters["epochs"]) / math.log(30) - 0.05 * abs(math.log(parameters["learning_rate"] / 0.1))
        )
        values = known_s(parameters), accuracy
        trials.append(TrialRecord.of(number, "complete", parameters, TrialFacts(train_s=values[0]), values))
    seen = suggester.outlook(trials)
    assert seen is not None
    return seen


@pytest.mark.parametrize("devices", COUNTS)
@pytest.mark.parametrize(("speedup", "fastest"), [(0.8, 4), (-0.2, 1)])
def test_trainings_to_come_are_on_as_many_devices_as_are_fastest(
    devices: BaseDistribution, speedup: float, fastest: int
) -> None:
    seen = outlook_of(devices, speedup)
    to_come = ~seen.done
    assert to_come.any()
    assert (seen.devices[to_come] == fastest).all()
    for row in np.flatnonzero(to_come)[:20]:
        parameters = seen.parameters(int(row))
        assert parameters["devices"] == fastest
        known_s = parameters["epochs"] * (1 + 64 / parameters["effective_batch"]) / fastest**speedup
        assert seen.seconds[row] == pytest.approx(known_s, rel=1e-6)


def test_what_is_measured_lies_around_what_is_reached_on_average() -> None:
    seen = outlook_of(COUNTS[0], 0.8)
    assert seen.measured.shape == seen.reached.shape
    assert (seen.measured.std(axis=0) >= 0.9 * seen.reached.std(axis=0)).mean() > 0.9
    assert np.median(np.median(seen.measured, axis=0) - np.median(seen.reached, axis=0)) == pytest.approx(0.0, abs=0.01)
