"""Blow-ups at a finite loss: which trials they are, that nothing else is, and that no estimate lies beside them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from bsearch.search.analysis.blow_ups import FEWEST, told_apart
from bsearch.search.analysis.cliff import Cliff
from bsearch.search.analysis.pareto import study_front
from bsearch.search.laws.best_rate import best_rates
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.goals import Objectives
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

LOSS = Objectives.model_validate({"metric": {"name": "val_loss", "direction": "minimize"}})


def made(
    seed: int, count: int, share: float, cliff: float, sizes: int = 1
) -> tuple[list[TrialRecord], set[int]]:
    """Trials around a best rate of .003 at batch 64 whose loss rises with the square of the distance, and those that blew up.

    Args:
        share: of rates beyond the cliff, which lies so many e-folds above the best rate.
    """
    rng = np.random.default_rng(seed)
    records, blew = [], set()
    for number in range(count):
        times = 3.0 ** (number % sizes)
        batch = round(math.exp(rng.uniform(math.log(16), math.log(256))))
        beyond = share > 0 and rng.random() < share
        v = rng.uniform(cliff, cliff + 1) if beyond else rng.uniform(-2.5, cliff - 0.05)
        loss = 2.4 + 0.3 * times**-0.3 + 0.02 * math.log(batch / 64) ** 2 + 0.05 * v**2 + rng.normal(0, 0.005)
        if beyond:
            loss = rng.uniform(5.5, 7.0)
            blew.add(number)
        rate = 0.003 * times**-0.2 * math.exp(v) * math.sqrt(batch / 64)
        facts = TrialFacts(
            epochs=1.0,
            effective_batch=batch,
            learning_rate=rate,
            samples_budget=round(1e6 * times),
            optimizer="AdamW",
            model_parameters=round(1e6 * times),
        )
        values = {"effective_batch": batch, "reference_rate": rate}
        ended = (1e4 / batch, loss)
        records.append(
            TrialRecord(number, "complete", values, facts, *ended, values=ended, direction="minimize")
        )
    return records, blew


def apart(records: list[TrialRecord]) -> set[int]:
    return {record.number for record in told_apart(records) if record.outcome == "diverged"}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    count=st.integers(20, 60),
    share=st.sampled_from([0.05, 0.1, 0.2]),
    cliff=st.floats(0.3, 1.5),
)
def test_what_lies_far_below_at_high_rates_blew_up_and_nothing_else(
    seed: int, count: int, share: float, cliff: float
) -> None:
    records, blew = made(seed, count, share, cliff)
    assume(2 * len(blew) < count)  # where half did, the median is theirs
    assert apart(records) == {number for number in blew if has_witness(records[number], records)}


def has_witness(record: TrialRecord, others: list[TrialRecord]) -> bool:
    """Whether a lower rate for its batch did better with as few steps of the same samples."""
    batch, rate = record.facts.effective_batch or 1, record.facts.learning_rate or 1.0
    return any(
        (other.accuracy or 9.0) < 5
        and (other.facts.effective_batch or 1) >= batch
        and (other.facts.learning_rate or 1.0) / math.sqrt(other.facts.effective_batch or 1)
        < rate / math.sqrt(batch)
        for other in others
    )


PLACES = st.tuples(
    st.integers(1, 64),
    st.floats(1e-4, 1.0),
    st.integers(1, 8),
    st.sampled_from([1, 2]),
    st.floats(0.1, 9.0),
    st.floats(0.1, 9.0),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(PLACES, min_size=FEWEST, max_size=40), st.sampled_from(["minimize", "maximize"]))
def test_whatever_the_trials_are_their_front_stays(
    places: list[tuple[Any, ...]], direction: Literal["minimize", "maximize"]
) -> None:
    """A short training with a large batch learns little, lies far below the others, and is the fastest point of a front."""
    records = []
    for number, (batch, rate, epochs, devices, seconds, value) in enumerate(places):
        facts = TrialFacts(
            effective_batch=batch, learning_rate=rate, samples_budget=1000 * epochs, devices=devices
        )
        records.append(
            TrialRecord(
                number, "complete", {}, facts, seconds, value, values=(seconds, value), direction=direction
            )
        )
    objectives = Objectives.model_validate({"metric": {"name": "value", "direction": direction}})
    assert told_apart(told_apart(records)) == told_apart(records)
    assert study_front(told_apart(records), objectives).trials == study_front(records, objectives).trials


def test_a_setting_that_was_trained_again_is_not_told_apart() -> None:
    records, blew = made(3, 30, 0.2, 0.5)
    first = min(apart(records))
    again = replace(records[first], number=30, facts=records[first].facts | TrialFacts(repeats=first))
    assert first in blew
    assert first not in apart([*records, again])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), count=st.integers(0, 60), cliff=st.floats(0.3, 3.0))
# Few results that fall steeply on both sides, and the few of a thousand that a fit with small coefficients took for blow-ups.
@example(seed=255, count=12, cliff=3.0)
@example(seed=83, count=12, cliff=3.0)
@example(seed=899, count=20, cliff=3.0)
@example(seed=102, count=15, cliff=2.0)
@example(seed=694, count=12, cliff=1.5)
def test_where_nothing_blew_up_nothing_is_told_apart(seed: int, count: int, cliff: float) -> None:
    records, _ = made(seed, count, 0.0, cliff)
    assert told_apart(records) == tuple(records)


@given(seed=st.integers(0, 999), shift=st.floats(-100, 100), scale=st.floats(0.01, 100))
@settings(max_examples=20, deadline=None)
def test_units_of_the_metric_and_its_direction_change_nothing(seed: int, shift: float, scale: float) -> None:
    records, _ = made(seed, 30, 0.15, 0.6)
    moved = [
        replace(record, accuracy=shift - scale * (record.accuracy or 0), direction="maximize")
        for record in records
    ]
    flipped = {record.number for record in told_apart(moved) if record.outcome == "diverged"}
    assert flipped == apart(records)


def test_too_low_a_rate_is_a_result() -> None:
    records, _ = made(0, 30, 0.0, 0.5)
    lowest = min(
        records,
        key=lambda record: (record.facts.learning_rate or 0) / math.sqrt(record.facts.effective_batch or 1),
    )
    unlearned = [replace(record, accuracy=6.9) if record is lowest else record for record in records]
    assert apart(unlearned) == set()
    assert apart(unlearned[: FEWEST - 1]) == set()


def test_a_blow_up_is_on_no_front_and_says_why() -> None:
    records, _ = made(3, 30, 0.2, 0.5)
    blew = apart(records)
    front = study_front(told_apart(records), LOSS)
    assert not blew & {record.number for record in front.trials}
    first = told_apart(records)[min(blew)]
    message = first.facts.message
    assert first.message == message
    assert message is not None
    assert message.startswith("blew up: half of the other trials ended below 2.")
    assert told_apart(told_apart(records)) == told_apart(records)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [1, 3])
@settings(max_examples=1, deadline=None)
@given(seed=st.integers(0, 999), share=st.sampled_from([0.05, 0.1, 0.2]), cliff=st.floats(0.3, 1.2))
@example(seed=0, share=0.2, cliff=0.3)
def test_no_estimate_is_contradicted_by_its_neighbours(
    sizes: int, seed: int, share: float, cliff: float
) -> None:
    """The best rate does not lie where trials blow up: at the size that trials were made for, below the cliff."""
    records, _ = made(seed, 40 * sizes, share, cliff, sizes)
    largest = 3.0 ** (sizes - 1)

    def away(batch: float, rate: float) -> float:
        return math.log(rate / (0.003 * largest**-0.2 * math.sqrt(batch / 64)))

    of_largest = [record for record in records if record.facts.samples_budget == round(1e6 * largest)]
    for rate in best_rates("made", of_largest).rates:
        assert away(rate.effective_batch, rate.learning_rate.value) < cliff


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=1, deadline=None)
@given(seed=st.integers(0, 999))
@example(seed=158)
def test_failures_of_another_cause_move_no_estimate(seed: int) -> None:
    """Trials that diverge wherever they are, as with a precision of their own, say nothing of rates."""
    records, _ = made(seed, 60, 0.0, 0.8)
    others, _ = made(seed + 1000, 25, 0.0, 0.8)
    failed = [
        replace(one, number=60 + one.number, outcome="diverged", accuracy=None, values=None) for one in others
    ]
    alone, beside = (best_rates("made", some, [64]) for some in (records, [*records, *failed]))
    assert beside.rates[1].learning_rate.value == pytest.approx(alone.rates[1].learning_rate.value, rel=0.05)


@given(seed=st.integers(0, 999), cliff=st.floats(-1, 1))
@settings(max_examples=20, deadline=None)
def test_the_chance_to_fail_rises_with_the_rate_across_the_cliff(seed: int, cliff: float) -> None:
    points = np.random.default_rng(seed).uniform(-2, 2, (40, 2))
    failed = (points[:, 1] > cliff).astype(float)
    chance = Cliff.fitted(points, failed).chance
    line = np.column_stack([np.zeros(50), np.linspace(-2, 2, 50)])
    assert (np.diff(chance(line)) >= 0).all()
    assert ((chance(points) > 0.5) == (failed > 0)).mean() > 0.9
