"""A front over devices: every setting on every one of them, by what it costs or takes there."""

from __future__ import annotations

from typing import Literal

import pytest
from bsearch.search.analysis.retime import Placement, front_over_devices
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.goals import Metric, Objectives, Speed
from hypothesis import given
from hypothesis import strategies as st

settings = st.lists(st.tuples(st.floats(1, 100), st.floats(0, 1), st.integers(1, 4)), min_size=1, max_size=6)


@given(
    settings,
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from(["maximize", "minimize"]),
    st.sampled_from(["train_s", "device_s"]),
    st.booleans(),
)
def test_nothing_beats_the_front_and_it_beats_the_rest(
    trained: list[tuple[float, float, int]],
    cards: list[tuple[float, float]],
    priced: bool,
    direction: Literal["maximize", "minimize"],
    speed: Literal["train_s", "device_s"],
    third: bool,
) -> None:
    objectives = Objectives(metric=Metric(direction=direction), speed=speed, second_speed="energy_j" if third else None)
    placements = []
    for card, (factor, price) in enumerate(cards):
        for number, (seconds, accuracy, devices) in enumerate(trained):
            facts = TrialFacts(devices=devices, price=price if priced else None, watts=100.0 + 50 * number * card)
            trial = TrialRecord(number, "complete", {}, facts, factor * seconds, accuracy, direction=direction)
            speeds: tuple[Speed, ...] = ("cost" if priced else speed, *(("energy_j",) if third else ()))
            placements.append(Placement(f"card {card}", trial, speeds))

    def taken(one: Placement) -> tuple[float, ...]:
        """The slow twin of `taken`."""
        assert one.trial.train_s is not None
        assert one.trial.facts.watts is not None
        devices = one.trial.facts.devices or 1
        price = one.trial.facts.price
        energy = (one.trial.train_s * one.trial.facts.watts,) if third else ()
        if price is None:
            return (one.trial.train_s * (devices if speed == "device_s" else 1), *energy)
        return (price * devices * one.trial.train_s / 3600, *energy)

    def beats(one: Placement, other: Placement) -> bool:
        assert one.trial.accuracy is not None
        assert other.trial.accuracy is not None
        gain = (one.trial.accuracy - other.trial.accuracy) * (1 if direction == "maximize" else -1)
        less = [a - b for a, b in zip(one.taken, other.taken, strict=True)]
        return gain >= 0 and max(less) <= 0 and (gain > 0 or min(less) < 0)

    assert all(one.taken == pytest.approx(taken(one)) for one in placements)
    front = front_over_devices(placements, objectives)
    assert [one.taken for one in front] == sorted(one.taken for one in front)
    on_front = set(map(id, front))
    for one in placements:
        assert any(beats(other, one) for other in placements) == (id(one) not in on_front)
