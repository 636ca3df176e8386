"""Fronts of means: intervals, probabilities and ties equal a slow twin's, and the least certain setting is repeated first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bsearch.search.analysis.confirm import averaged, front_probabilities, next_repeat, next_seed
from bsearch.search.analysis.pareto import study_front
from bsearch.search.analysis.run_noise import RunNoise, run_noise
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.goals import Metric, Objectives
from hypothesis import given
from hypothesis import strategies as st

OBJECTIVES = Objectives()


def run(
    number: int, seconds: float, accuracy: float, repeats: int | None = None, outcome: str = "complete"
) -> TrialRecord:
    facts = TrialFacts(repeats=repeats)
    return TrialRecord(number, outcome, {"effective_batch": 10}, facts, seconds, accuracy)  # type: ignore[arg-type]


def test_a_setting_counts_once_with_its_mean() -> None:
    records = [
        run(0, 1.0, 0.8),
        run(1, 2.0, 0.9),
        run(2, 1.0, 0.7, 0),
        run(3, 1.0, 0.9, 0),
        run(4, 1.0, 0.1, 0, "diverged"),
    ]
    means = averaged(records, OBJECTIVES)
    assert [(one.number, one.facts.runs, one.facts.failed_runs) for one in means] == [(0, 3, 1), (1, 1, None)]
    noise = run_noise([[0.8, 0.7, 0.9], [0.9]], [1.0, 2.0])
    assert noise is not None
    # The first run was as good as its repeats: what is left of the bias is the prior's.
    assert noise.bias == pytest.approx(0.8 * 4 / (4 + 2 / 3), abs=0.05)
    # The one that takes twice as long has half the variance of the line, to which the repeated one is shrunk.
    assert noise.stds[1] < noise.stds[0] == pytest.approx(0.1, rel=0.1)
    assert noise.freedom.tolist() == [6, 4]
    expected, errors = noise.means([[0.8, 0.7, 0.9], [0.9]])
    assert [one.accuracy for one in means] == pytest.approx(expected)
    assert expected == pytest.approx(np.array([0.8, 0.9]) - noise.bias * noise.stds / [3, 1])
    assert errors == pytest.approx(
        noise.stds * np.sqrt([1 / 3 + (noise.bias_std / 3) ** 2, 1 + noise.bias_std**2])
    )
    # Student's t, 90 %: 1.943 for six degrees of freedom, 2.132 for four.
    assert [one.half_interval for one in means] == pytest.approx(errors * [1.943, 2.132], rel=1e-3)


def test_without_repeats_nothing_changes() -> None:
    records = [run(0, 1.0, 0.8), run(1, 2.0, 0.9), run(2, 3.0, 0.7)]
    assert averaged(records, OBJECTIVES) == records
    assert [one.number for one in study_front(records, OBJECTIVES).trials] == [0, 1]


def test_a_lucky_run_loses_its_place() -> None:
    lucky = [run(0, 1.0, 0.8), run(1, 0.9, 0.85), run(2, 0.9, 0.6, 1), run(3, 0.9, 0.65, 1)]
    assert [one.number for one in study_front(lucky, OBJECTIVES).trials] == [1, 0]
    accuracy = study_front(lucky, OBJECTIVES).trials[0].accuracy
    assert accuracy is not None and 0.6 < accuracy < 0.7  # the first run without its bias


def test_neighbours_within_the_noise_are_ties() -> None:
    records = [run(0, 1.0, 0.80), run(1, 1.1, 0.805), run(2, 2.0, 0.99)]
    records += [run(3, 1.0, 0.82, 0), run(4, 1.0, 0.78, 0), run(5, 1.1, 0.825, 1), run(6, 1.1, 0.785, 1)]
    means = {one.number: one for one in averaged(records, OBJECTIVES)}
    assert means[1].facts.ties == (0,)
    assert means[2].facts.ties == ()
    assert means[2].facts.front_probability > 0.99


def test_a_loss_is_better_when_lower() -> None:
    objectives = Objectives(metric=Metric(name="val_loss", direction="minimize"))
    runs = [run(0, 1.0, 0.5), run(1, 1.0, 0.52, 0), run(2, 2.0, 0.1), run(3, 3.0, 0.9)]
    records = [replace(one, direction="minimize") for one in runs]
    probabilities = {one.number: one.facts.front_probability for one in averaged(records, objectives)}
    assert probabilities[0] == 1.0
    assert probabilities[2] > 0.95
    assert probabilities[3] < 0.05


@pytest.mark.long
@given(
    st.lists(st.tuples(st.integers(1, 5), st.floats(0, 1)), min_size=1, max_size=7),
    st.floats(0.01, 0.5),
)
@pytest.mark.slow
def test_probabilities_equal_monte_carlo(points: list[tuple[int, float]], error: float) -> None:
    taken, accuracy = np.array(points, float).T
    found = front_probabilities(taken, accuracy, np.full(len(points), error), np.full(len(points), 1000))
    rng = np.random.default_rng(1)
    hits = np.zeros(len(points))
    for _ in range(1000):
        drawn = accuracy + error * rng.standard_normal(len(points))
        for one in range(len(points)):
            rivals = [other for other in range(len(points)) if other != one and taken[other] <= taken[one]]
            hits[one] += all(drawn[one] > drawn[other] for other in rivals)
    assert found == pytest.approx(hits / 1000, abs=0.08)


def test_the_least_certain_setting_is_repeated_first() -> None:
    records = [run(0, 1.0, 0.2), run(1, 2.0, 0.8), run(2, 3.0, 0.81), run(3, 2.5, 0.3)]
    records += [run(4, 1.0, 0.21, 0), run(5, 1.0, 0.18, 0)]
    front = [one.number for one in study_front(records, OBJECTIVES).trials]
    assert front == [0, 1, 2]
    # 0.81 after 0.8 with noise of 0.015: both uncertain; the far worse trial 3 never, trial 0 has its runs.
    assert next_repeat(records, OBJECTIVES, 2, {}, front) in (1, 2)
    assert next_repeat(records, OBJECTIVES, 2, {2: 1}, front) == 1
    assert next_repeat(records, OBJECTIVES, 2, {1: 1}, front) == 2
    assert next_repeat(records, OBJECTIVES, 2, {1: 2, 2: 2}, front) is None


def test_runs_that_failed_count_and_half_of_them_take_a_setting_off_the_front() -> None:
    records = [run(0, 1.0, 0.8), run(1, 2.0, 0.9), run(2, 2.0, 0.1, 1, "diverged")]
    assert [one.number for one in study_front(records, OBJECTIVES).trials] == [0]
    records.append(run(3, 2.0, 0.91, 1))
    front = study_front(records, OBJECTIVES).trials
    assert [(one.number, one.facts.failed_runs) for one in front] == [(0, None), (1, 1)]
    assert next_repeat(records, OBJECTIVES, 2, {}, [0, 1]) == 0
    assert next_repeat(records, OBJECTIVES, 2, {0: 2}, [0, 1]) is None


def noise_of(groups: list[list[float]], seconds: list[float]) -> RunNoise:
    noise = run_noise(groups, seconds)
    assert noise is not None
    return noise


def test_a_setting_that_hardly_learns_lends_its_precision_to_no_other() -> None:
    stds = noise_of([[0.1, 0.1001], [0.5, 0.6], [0.5, 0.58]], [1.0, 1.0, 1.0]).stds
    assert stds[0] < stds[1] / 1.08


@pytest.mark.slow
@given(st.floats(-2, 0), st.floats(0.001, 0.1), st.floats(0, 2), st.integers(0, 10_000))
def test_noise_that_falls_with_time_and_bias_are_found(
    slope: float, level: float, bias: float, seed: int
) -> None:
    """At both ends of the front the estimated is near the true standard deviation, and means are not optimistic."""
    rng = np.random.default_rng(seed)
    seconds = np.geomspace(0.1, 100, 60)
    true = level * seconds ** (slope / 2)
    groups = [[rng.normal(0.5 + bias * std, std), *rng.normal(0.5, std, 2)] for std in true]
    noise = noise_of(groups, seconds.tolist())
    for third in (slice(0, 20), slice(20, 40), slice(40, 60)):
        assert 0.5 < np.median(noise.stds[third] / true[third]) < 1.6
    means, errors = noise.means(groups)
    # They share the estimate of the bias, so their mean is off by more than 60 independent ones would be.
    assert abs(np.mean((means - 0.5) / errors)) < 0.8
    assert abs(noise.bias - bias) < 5 * noise.bias_std


def test_equal_runs_are_no_division_by_zero() -> None:
    noise = noise_of([[0.5, 0.5], [0.7, 0.7]], [1.0, 2.0])
    assert np.isfinite(noise.stds).all() and (noise.stds < 1e-6).all()


def test_seeds_are_never_used_twice() -> None:
    assert next_seed([], 7) == 8
    assert next_seed([8, 9, 11], 7) == 10
