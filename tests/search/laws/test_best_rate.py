"""The best rate against the batch, found again in trials whose best rate is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from bsearch.search.analysis.rates import BestRates, Estimate, RateAt
from bsearch.search.laws.best_rate import _Ridge, best_rates
from bsearch.search.report.sentences import rule_verdict
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.record import TrialFacts, TrialRecord


def power(exponent: float, rate: float = 0.1) -> Callable[[float], float]:
    return lambda batch: rate * (batch / 256) ** exponent


def trials(
    best: Callable[[float], float],
    count: int = 60,
    seed: int = 0,
    *,
    noise: float = 0.01,
    curvature: float = 0.02,
) -> list[TrialRecord]:
    """Random trials of a task whose accuracy falls with the distance from the best rate, and steeper above it."""
    rng = np.random.default_rng(seed)
    records = []
    for number in range(count):
        batch = round(math.exp(rng.uniform(math.log(8), math.log(2048))))
        rate = math.exp(rng.uniform(math.log(1e-3), 0)) * math.sqrt(batch / 256)
        epochs, optimizer = int(rng.integers(1, 20)), str(rng.choice(["sgd", "adam"]))
        away = math.log(rate / best(batch))
        accuracy = (
            0.9
            - 0.3 / math.sqrt(epochs)
            - 0.03 * math.log(batch / 8)
            - curvature * away**2 * (1.5 if away > 0 else 1)
        )
        accuracy += 0.02 * (optimizer == "adam") + noise * rng.standard_normal()
        parameters = {
            "effective_batch": batch,
            "reference_rate": rate,
            "epochs": epochs,
            "optimizer": optimizer,
        }
        facts = TrialFacts(effective_batch=batch, learning_rate=rate, rule="sqrt")
        records.append(TrialRecord(number, "complete", parameters, facts, 1.0, accuracy))
    return records


@pytest.mark.slow
def test_the_exponent_is_found_again_and_its_interval_mostly_holds_it() -> None:
    held = []
    for seed, exponent in enumerate([0.0, 0.25, 0.5, 0.75, 1.0, 0.5]):
        found = best_rates("made", trials(power(exponent), 40, seed), [256])
        held.append(found.exponent.holds(exponent))
        assert found.exponent.value == pytest.approx(exponent, abs=0.15)
        assert found.exponent.high - found.exponent.low < 0.6
        [rate] = [one.learning_rate for one in found.rates if one.effective_batch == 256]
        assert rate.value == pytest.approx(0.1, rel=0.5)
        assert found.bend is None
    assert sum(held) >= 5


def test_a_fit_is_a_minimum_in_every_direction() -> None:
    batches, rates, others, values = np.random.default_rng(0).uniform(0, 3, (4, 12))
    ridge = _Ridge(batches, rates, others[:, None], values - (rates - batches) ** 2)
    least, best = ridge._fitted(ridge.prior, slice(None), 500)
    for place, (low, high) in enumerate(ridge.bounds):
        for step in (-0.01, 0.01):
            moved = best.copy()
            moved[place] = np.clip(moved[place] + step, low, high)
            assert ridge._fitted(moved, slice(None), 0)[0] >= least


def test_the_same_trials_always_say_the_same() -> None:
    records = trials(power(0.5))
    assert best_rates("made", records) == best_rates("made", records)


def test_units_and_reference_batches_change_nothing() -> None:
    records = trials(power(0.5), 40)
    # Another reference batch is another reference rate for the same rate; rates in other units move the ridge, not its slope.
    moved = [
        replace(
            record,
            parameters={**record.parameters, "reference_rate": 0.5 * record.parameters["reference_rate"]},
            facts=replace(record.facts, learning_rate=10 * record.facts.learning_rate),
        )
        for record in records
    ]
    before, after = best_rates("made", records, [256]), best_rates("made", moved, [256])
    assert after.exponent.value == pytest.approx(before.exponent.value, abs=0.02)
    assert after.rates[1].learning_rate.value == pytest.approx(
        10 * before.rates[1].learning_rate.value, rel=0.1
    )


def test_a_loss_to_minimize_is_read_as_an_accuracy_turned_round() -> None:
    records = trials(power(0.5), 40)
    turned = [
        replace(record, accuracy=-record.accuracy, direction="minimize")
        for record in records
        if record.accuracy is not None
    ]
    assert best_rates("made", turned) == best_rates("made", records)


def test_failed_trials_are_left_out_and_counted() -> None:
    records = trials(power(0.5), 40)
    failed = [replace(record, outcome="diverged", accuracy=1e9) for record in trials(power(0.5), 5, seed=1)]
    exploded = [replace(record, accuracy=-1e6) for record in trials(power(0.5), 3, seed=2)]
    before, after = best_rates("made", records), best_rates("made", [*records, *failed, *exploded])
    assert after.exponent.value == pytest.approx(before.exponent.value, abs=0.05)
    assert (before.trials, after.trials) == (40 - before.left_out, before.trials)
    assert after.left_out == before.left_out + 8


def test_noise_alone_discriminates_no_rules() -> None:
    found = best_rates("made", trials(power(0.5), 40, curvature=0.0, noise=0.05))
    assert all(found.holds.values())
    assert rule_verdict(found).startswith("the data do not distinguish the rules: exponent ")


@pytest.mark.slow
def test_a_rate_that_saturates_is_said_to_and_its_rates_follow_both_slopes() -> None:
    def saturating(batch: float) -> float:
        return 0.3 / (1 + 64 / batch)

    found = best_rates("made", trials(saturating, 150, noise=0.005), [16, 1024])
    assert found.bend is not None
    assert not any(found.holds.values())
    assert "no power of the batch holds throughout. Try rule: saturating" in rule_verdict(found)
    for rate in found.rates[1:-1]:
        assert rate.learning_rate.value == pytest.approx(saturating(rate.effective_batch), rel=0.5)


def test_a_best_rate_beyond_those_tried_is_not_trusted() -> None:
    found = best_rates("made", trials(power(0.5, rate=20.0), 40), [64, 256])
    assert not found.trusted
    assert (
        "lies at the edge of the rates tried, so no rule can be excluded. Search a wider space.reference_rate"
        in rule_verdict(found)
    )


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.41, 0.70, "exponent 0.55 [0.41, 0.70]: sqrt holds, constant and linear do not."),
        (0.41, 1.10, "exponent 0.55 [0.41, 1.10]: sqrt and linear hold, constant does not."),
        (
            0.52,
            0.58,
            "exponent 0.55 [0.52, 0.58]: constant, sqrt and linear do not hold. Write rule: power, exponent: 0.55.",
        ),
        (
            -0.2,
            1.40,
            "the data do not distinguish the rules: exponent 0.55 [-0.20, 1.40]. "
            "More trials near batches 8 and 64, at many rates, would help.",
        ),
    ],
)
def test_the_verdict_in_words(low: float, high: float, words: str) -> None:
    rates = tuple(RateAt(batch, Estimate(0.1, 0.05, 0.2), edge=False) for batch in (8, 64))
    assert rule_verdict(BestRates(Estimate(0.55, low, high), rates, 30, 0, None)) == words


def test_what_cannot_be_compared_is_told() -> None:
    records = trials(power(0.5), 40)
    with pytest.raises(
        StudyFileError,
        match="study made: expected at least 20 complete trials to distinguish the rules, got 19",
    ):
        best_rates("made", records[:19])
    one_batch = [replace(record, facts=replace(record.facts, effective_batch=64)) for record in records]
    with pytest.raises(
        StudyFileError,
        match=r"space.effective_batch: expected batches that differ by half at least, got 64 to 64",
    ):
        best_rates("made", one_batch)
    one_rate = [replace(record, facts=replace(record.facts, learning_rate=0.1)) for record in records]
    with pytest.raises(
        StudyFileError, match=r"space.reference_rate: expected rates that differ at the same batch, got none"
    ):
        best_rates("made", one_rate)
