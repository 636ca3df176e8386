"""Samples to a target by batch, from a study that searched its length."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bsearch.search.laws.samples_by_batch import _crossings, _doublings, samples_by_batch
from helpers import SPACE, bsearch, validated
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

LEARNED: dict[str, BaseDistribution] = {
    "effective_batch": IntDistribution(8, 1024, log=True),
    "reference_rate": FloatDistribution(1e-3, 1.0, log=True),
    "epochs": FloatDistribution(1.0, 16.0, log=True),
}


def accuracy(batch: float, rate: float, epochs: float) -> float:
    """Made up: it rises with the steps' worth of samples, and batches above 100 need more of them."""
    worth = epochs / (1 + batch / 100)
    return 0.95 - 0.3 / (1 + worth) - 0.02 * math.log(rate / 0.03) ** 2


def needed(batch: float, target: float) -> float:
    """Its epochs to a target at the best rate."""
    return (0.3 / (0.95 - target) - 1) * (1 + batch / 100)


def test_it_finds_what_a_made_up_law_needs() -> None:
    rng = np.random.default_rng(0)
    trials = []
    for _ in range(40):
        batch, rate, epochs = (
            math.exp(rng.uniform(math.log(one.low), math.log(one.high))) for one in LEARNED.values()
        )  # type: ignore[attr-defined]
        values = {"effective_batch": round(batch), "reference_rate": rate, "epochs": epochs}
        trials.append((values, accuracy(round(batch), rate, epochs) + 0.002 * rng.standard_normal()))
    found = samples_by_batch(trials, LEARNED, 1000, 0.85, batches=[100])
    assert 100 in found.batches
    for place, batch in enumerate(found.batches):
        true, guess = 1000 * needed(batch, 0.85), found.samples_at(place)
        if true <= found.most:
            assert guess.low / 1.15 <= true <= guess.high * 1.15
        else:
            assert found.reached(place) < 0.5
    critical = found.critical_batch()
    assert critical is not None
    assert critical.low <= 250
    assert critical.value >= 64


@given(
    st.lists(st.lists(st.floats(-2, 2), min_size=2, max_size=6), min_size=1, max_size=4).filter(
        lambda rows: len({len(row) for row in rows}) == 1
    ),
    st.floats(-1, 1),
)
def test_the_first_crossing_is_found(rows: list[list[float]], level: float) -> None:
    logs = np.linspace(0.0, 1.0, len(rows[0]))
    for row, samples in zip(rows, _crossings(np.array(rows), logs, level), strict=True):
        place = next((at for at, value in enumerate(row) if value >= level), None)
        if place is None:
            assert math.isinf(samples)
        elif place == 0:
            assert samples == 1.0
        else:
            assert logs[place - 1] - 1e-9 <= math.log(samples) <= logs[place] + 1e-9


@pytest.mark.slow
@pytest.mark.long
def test_a_study_tells_what_its_target_needs(study_file: Callable[..., Path]) -> None:
    path = study_file(
        space=SPACE | {"epochs": {"low": 1, "high": 4}},
        budget={"trials": 12, "profile_s": 0.3},
        stopping="none",
    )
    assert bsearch("run", path, "--serial").exit_code == 0
    told = bsearch("ask", path, "--until", "0.5", "--batch", "50")
    assert told.exit_code == 0, told.output
    assert "Samples to accuracy 0.5 in small: " in told.output
    document = validated(bsearch("ask", path, "--until", "0.3", "--json").output)
    assert document["target"] == 0.3
    reached = [one["reached"] for one in document["predicted"]]
    assert all(0 <= one <= 1 for one in reached)
    refused = bsearch("ask", path, "--until", "0.3", "--batch", "4097")
    assert refused.exit_code == 2
    assert "--batch: expected a batch in the study's range" in refused.output


def test_samples_double_between_two_batches_and_only_above_the_best_one() -> None:
    batches = np.log([8.0, 16.0, 32.0, 64.0])
    # The second needs more below its best batch; the third does not reach the target at the largest; the last never doubles.
    samples = np.array([[1, 1, 1, 4], [4, 1, 2, 4], [1, 1, 1, math.inf], [math.inf, 1, 1, 1.5]])
    found = _doublings(batches, np.log(samples))
    assert found == pytest.approx([32 * math.sqrt(2), 32, 32 * math.sqrt(2), math.inf])
