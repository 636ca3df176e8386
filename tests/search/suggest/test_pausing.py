"""Pausing: what the rest of a training is expected to add is arithmetic, and a paused trial is resumed or given up once."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bsearch.search.analysis.gaussian_process import Plain
from bsearch.search.suggest.ask_tell import Search
from bsearch.search.suggest.pausing import RUNG, GapKernel, PauseAtRung
from bsearch.search.suggest.priors.batch_rate_prior import (
    ANCHORS,
    BatchRate,
    ScorePrior,
    first_point,
    first_points,
)
from bsearch.search.suggest.space_transform import SpaceTransform
from bsearch.search.suggest.trial_history import PausedTrials
from bsearch.spaces.errors import StudyFileError, TaskError
from bsearch.spaces.record import TrialFacts
from bsearch.spaces.study.goals import Metric
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

SPACE: dict[str, BaseDistribution] = {
    "effective_batch": IntDistribution(8, 512, log=True),
    "reference_rate": FloatDistribution(1e-3, 1.0, log=True),
}
PLACE = BatchRate.of(SpaceTransform(SPACE))
assert PLACE is not None
PRIOR = ScorePrior(PLACE)
KERNEL = GapKernel(PRIOR, PRIOR.means, PLACE.rate)
WRITTEN = {
    "effective_batch": {"low": 8, "high": 1024, "log": True},
    "reference_rate": {"low": 1e-3, "high": 1.0, "log": True},
}


@given(st.integers(0, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_gaps_are_those_of_one_joint_normal(known: int, paused: int, seed: int) -> None:
    """The slow twin: the covariance of all gaps written out, and conditioned by the textbook's formula."""
    rng = np.random.default_rng(seed)
    places, gaps, shares = (
        rng.random((known + paused, 2)),
        rng.normal(0.3, 0.5, known),
        rng.uniform(0.3, 0.5, known + paused),
    )
    mean, covariance = KERNEL.predicted(places[:known], gaps, shares[:known], places[known:], shares[known:])
    z = PRIOR.coordinates(places, PRIOR.means)
    whole = np.empty((known + paused, known + paused))
    for i, (one, here) in enumerate(zip(z, places, strict=True)):
        for j, (other, there) in enumerate(zip(z, places, strict=True)):
            r = math.sqrt(sum(((one - other) / np.exp(PRIOR.means[:2])) ** 2))
            matern = (1 + math.sqrt(5) * r + 5 * r * r / 3) * math.exp(-math.sqrt(5) * r)
            rates = (2 * here[1] - 1) * (2 * there[1] - 1)
            whole[i, j] = 0.5 + rates + 0.5 * matern + 0.15 * (i == j)
    expected = 0.3 * (1 - shares)
    inverse = np.linalg.inv(whole[:known, :known])
    away = gaps - expected[:known]
    scale = (away @ inverse @ away + 3 * 0.16 * (1 - shares[known:].mean())) / (known + 3)
    cross = whole[known:, :known]
    assert mean == pytest.approx(expected[known:] + cross @ inverse @ away)
    assert covariance == pytest.approx(scale * (whole[known:, known:] - cross @ inverse @ cross.T))
    assert np.linalg.eigvalsh(covariance).min() > 0


def test_what_curves_do_is_unknown_until_one_like_it_went_on() -> None:
    low, high = np.array([0.5, 0.1]), np.array([0.5, 0.9])
    assert KERNEL.is_unknown(low, np.empty((0, 2)))
    assert not KERNEL.is_unknown(low, np.array([low, low]))
    # Another rate says little, even at the same batch; one beside it and some on either side say enough.
    assert KERNEL.is_unknown(low, np.array([high, high]))
    assert not KERNEL.is_unknown(np.array([0.5, 0.5]), np.array([low, high, [0.5, 0.4]]))
    plain = GapKernel(Plain(2), Plain(2).means, None)
    assert not plain.is_unknown(low, np.array([high, high]))


def test_the_anchors_are_fast_trials_at_both_ends_of_the_rate() -> None:
    points = np.random.default_rng(0).random((512, 2))
    times = -points[:, 0]
    for number, rate in zip(
        range(first_points(True), first_points(True) + ANCHORS), (0.85, 0.15), strict=True
    ):
        chosen = first_point(PLACE, points, times, number, 2, np.random.default_rng(1), anchors=True)  # type: ignore[arg-type]
        assert chosen[0] >= np.quantile(points[:, 0], 0.9)
        assert chosen[1] == pytest.approx(rate, abs=0.16)


def test_a_trial_is_paused_at_its_first_report_at_the_rung_and_once() -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    def is_new_ground(number: int, others: Collection[int]) -> bool:
        asked.append((number, tuple(others)))
        return not others

    pausing = PauseAtRung(Metric(direction="minimize"), is_new_ground)
    assert [pausing.report(0, tenth / 10, 1.0, 0.1 * tenth) for tenth in range(1, 11)] == [False] * 10
    assert asked == [(0, ())]  # it goes on, and is not asked about again
    assert [pausing.report(1, tenth / 10, 1.0, 0.1 * tenth) for tenth in range(1, 4)] == [False, False, True]
    facts = pausing.facts(1, stopped=False)
    assert (facts.stopped_fraction, facts.stopped_accuracy) == (0.3, pytest.approx(0.3))
    pausing.resume(1)
    # A resumed attempt reports again what its checkpoint holds.
    assert not any(pausing.report(1, tenth / 10, 1.0, 0.1 * tenth) for tenth in range(1, 11))
    pausing.end(1, 1.0, None)
    assert pausing.report(2, RUNG, 1.0, 0.3)
    assert asked[-1] == (2, (0,))  # what failed tells nothing


def curve(parameters: Any) -> tuple[float, list[float]]:
    """Seconds, and accuracies at tenths: high rates rise late."""
    batch, rate = parameters["effective_batch"], parameters["reference_rate"]
    away = math.log(rate / 0.1)
    final = 0.9 - 0.03 * math.log2(batch) / 10 - 0.02 * away**2
    late = 0.5 / (1 + math.exp(-away))
    return 100 / batch + 0.1, [final * (1 - late * (1 - tenth / 10)) for tenth in range(1, 11)]


def trained(search: Search, paused: dict[int, int], resumed: list[int]) -> None:
    """Run one suggestion until it ends or is paused."""
    suggestion = search.ask()
    seconds, accuracies = curve(suggestion.parameters)
    begun = round(10 * suggestion.resumes_from)
    assert begun == paused.pop(suggestion.number, 0)
    resumed += [suggestion.number] * (begun > 0)
    for tenth, accuracy in list(enumerate(accuracies, start=1))[begun:]:
        if search.report(suggestion.number, tenth / 10, seconds, accuracy):
            paused[suggestion.number] = tenth
            search.tell(suggestion.number, seconds, accuracy, "paused")
            return
    search.tell(suggestion.number, seconds, accuracies[-1])


@pytest.mark.slow
def test_a_search_resumes_what_it_paused_and_a_database_remembers_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/search.db"
    paused: dict[int, int] = {}
    resumed: list[int] = []
    search = Search(WRITTEN, by_time=True, pauses=True, storage=url, known_seconds=lambda one: curve(one)[0])
    for _ in range(100):
        trained(search, paused, resumed)
        if search.ended > 7 and paused:
            break
    assert len(resumed) == len(set(resumed)) >= 3
    assert paused
    records = {record.number: record for record in search.records()}
    assert {number for number, record in records.items() if record.outcome == "paused"} == set(paused)
    assert all(records[number].trained_share == tenth / 10 for number, tenth in paused.items())
    assert search.ended == sum(record.outcome == "complete" for record in records.values())
    # Another process goes on with them.
    again = Search(WRITTEN, by_time=True, pauses=True, storage=url, known_seconds=lambda one: curve(one)[0])
    assert again.ended == search.ended
    before = len(resumed)
    for _ in range(20):
        trained(again, paused, resumed)
    assert len(resumed) > before
    assert len(resumed) == len(set(resumed))


def test_a_search_that_cannot_resume_does_not_pause() -> None:
    with pytest.raises(StudyFileError, match="pauses: expected sampler front"):
        Search(WRITTEN, sampler="tpe", pauses=True)


def test_a_metric_that_is_no_number_at_the_rung_is_not_kept() -> None:
    pausing = PauseAtRung(Metric(), lambda number, others: False)
    assert not any(
        pausing.report(0, tenth / 10, 1.0, value) for tenth, value in ((1, 0.1), (2, 0.2), (3, math.nan))
    )
    assert pausing.facts(0, stopped=False) == TrialFacts()


def test_many_paused_trials_do_not_slow_an_ask_down() -> None:
    """Of more than a hundred, those that train again and the best for their time are kept."""
    rng = np.random.default_rng(0)
    seconds, accuracy, waiting = rng.random(300), rng.random(300), rng.random(300) > 0.1
    trials = PausedTrials(np.arange(300), rng.random((300, 2)), seconds, np.full(300, 0.3), accuracy, waiting)
    kept = trials.best(100)
    assert len(kept) == 100
    assert set(np.flatnonzero(~waiting)) <= set(kept.numbers)
    best = {
        one
        for one in range(300)
        if not any(accuracy[other] > accuracy[one] for other in range(300) if seconds[other] <= seconds[one])
    }
    assert best <= set(kept.numbers)


def test_nothing_is_paused_that_was_not_to_be() -> None:
    search = Search(WRITTEN, by_time=True, pauses=True)
    suggestion = search.ask()
    with pytest.raises(TaskError, match="expected `report` to have said so"):
        search.tell(suggestion.number, 1.0, 0.5, "paused")
    assert search.records()[0].outcome == "running"


def test_where_time_ends_the_search_fast_trials_are_worth_more() -> None:
    """A front in the making, where the slow end promises more but costs a hundred times as much."""

    def mean_seconds(by_time: bool) -> float:
        search = Search(WRITTEN, stopping="none", by_time=by_time, known_seconds=lambda one: curve(one)[0])
        taken = []
        for _ in range(14):
            suggestion = search.ask()
            seconds, accuracies = curve(suggestion.parameters)
            taken.append(seconds)
            search.tell(suggestion.number, seconds, accuracies[-1])
        return float(np.mean(taken[2:]))

    assert mean_seconds(True) < 0.8 * mean_seconds(False)
