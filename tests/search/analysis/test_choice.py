"""One point of a front is chosen by its number, or how near the best it is."""

import numpy as np
import pytest
from bsearch.search.analysis.choice import (
    Choice,
    chance_to_reach,
    chosen_trial,
    fastest_within,
    settings_reaching,
)
from bsearch.search.analysis.pareto import front_of
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.front import ParetoFront
from bsearch.spaces.record import TrialFacts, TrialRecord
from hypothesis import given
from hypothesis import strategies as st

points = st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 1)), min_size=1, max_size=12)


def front(pairs: list[tuple[float, float]], direction: str = "maximize") -> ParetoFront:
    records = [
        TrialRecord(number, "complete", {}, TrialFacts(), *pair, direction=direction)
        for number, pair in enumerate(pairs)
    ]
    return front_of(records, direction=direction)


@given(points, st.floats(0, 1), st.sampled_from(["maximize", "minimize"]))
def test_the_fastest_within_is_near_enough_and_none_faster_is(pairs, share, direction):
    members = front(pairs, direction).trials
    best = members[-1].accuracy
    chosen = fastest_within(front(pairs, direction), share)
    near = [trial for trial in members if abs(trial.accuracy - best) <= share * abs(best)]
    assert chosen in near
    assert chosen.train_s == min(trial.train_s for trial in near)


@given(points, st.floats(0, 1), st.sampled_from(["maximize", "minimize"]))
def test_a_target_is_reached_by_the_fastest_of_all_that_reach_it(pairs, target, direction):
    settings = [
        TrialRecord(number, "complete", {}, TrialFacts(), *pair, direction=direction)
        for number, pair in enumerate(pairs)
    ]
    good = [
        one
        for one in settings
        if (one.accuracy >= target if direction == "maximize" else one.accuracy <= target)
    ]
    reaching = settings_reaching(front(pairs, direction), settings, target).trials
    assert {one.number for one in reaching} == {one.number for one in good}
    assert [one.train_s for one in reaching] == sorted(one.train_s for one in good)
    if good:
        chosen = chosen_trial("s", front(pairs, direction), Choice(target=target))
        assert chosen.train_s == reaching[0].train_s
    else:
        with pytest.raises(StudyFileError, match="no trial reaches"):
            chosen_trial("s", front(pairs, direction), Choice(target=target))


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_the_chance_to_reach_a_target_is_that_of_the_mean(direction):
    one = TrialRecord(
        0, "complete", {}, TrialFacts(mean_low=0.4, mean_high=0.6), 1.0, 0.5, direction=direction
    )
    assert chance_to_reach(one, 0.5) == pytest.approx(0.5)
    # The ends of a 90 % interval.
    low, high = (chance_to_reach(one, target) for target in (0.4, 0.6))
    assert (low, high) == pytest.approx((0.95, 0.05) if direction == "maximize" else (0.05, 0.95))
    assert chance_to_reach(TrialRecord(1, "complete", {}, TrialFacts(), 1.0, 0.5), 0.4) is None


@given(points)
def test_within_nothing_is_the_best(pairs):
    assert fastest_within(front(pairs), 0.0).accuracy == front(pairs).trials[-1].accuracy


def test_not_asked_the_fastest_that_is_nearly_the_best_is_chosen():
    bent = front([(1, 0.1), (2, 0.8), (50, 0.899), (100, 0.9)])
    assert chosen_trial("s", bent).number == chosen_trial("s", bent, Choice(within=0.01)).number == 2
    assert (
        chosen_trial("s", bent, Choice(trial="best")).number
        == chosen_trial("s", bent, Choice(trial=3)).number
        == 3
    )


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"trial": 7}, "trial 7 is not on its front; expected one of 0, 1"),
        ({"trial": "last"}, "trial: expected a trial's number or best, got 'last'"),
        ({"trial": -1}, "trial: expected a trial's number or best, got -1"),
        ({"trial": 1.0}, r"trial: expected a trial's number or best, got 1\.0"),
        ({"trial": np.int64(7)}, "trial 7 is not on its front; expected one of 0, 1"),
        ({"trial": 0, "within": 0.1}, "one of trial, within, target and cheapest-to"),
        ({"cheapest_to": 0.9}, "no trial reaches accuracy 0.9"),
        ({"cheapest_to": 0.5}, "expected trials with a cost, which devices.prices gives them; got none"),
        ({"target": 0.9}, "no trial reaches accuracy 0.9; the best, trial 1, has 0.8"),
        ({"target": 0.80000001}, "no trial reaches accuracy 0.80000001; the best, trial 1, has 0.8"),
    ],
)
def test_a_choice_that_cannot_be_made_says_why(asked, words):
    with pytest.raises(StudyFileError, match=words):
        found = front([(1, 0.1), (2, 0.8)])
        chosen_trial("s", found, Choice(**asked), found.trials)


def test_the_cheapest_may_be_slower_than_the_front():
    """With one device it takes longer than the front's member with four, and costs less; too poor ones count for nothing."""
    rows = [(10.0, 0.9, 4), (30.0, 0.9, 1), (5.0, 0.5, 1), (40.0, 0.95, 1)]
    records = [
        TrialRecord(number, "complete", {}, TrialFacts(devices=devices, price=2.0), seconds, accuracy)
        for number, (seconds, accuracy, devices) in enumerate(rows)
    ]
    found = front_of(records)
    assert [one.number for one in found.trials] == [2, 0, 3]
    assert chosen_trial("s", found, Choice(cheapest_to=0.9), records).number == 1
    assert chosen_trial("s", found, Choice(target=0.9), records).number == 0


def test_an_empty_front_has_nothing_to_choose():
    with pytest.raises(StudyFileError, match="no finished trial"):
        chosen_trial("s", ParetoFront(()))
