"""Early stopping: what curves promise holds as often as it says, and nothing that could matter is stopped."""

from __future__ import annotations

import csv
import gzip
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from bsearch.search.suggest.pausing import PauseAtRung
from bsearch.search.suggest.stopping import (
    _FAR_WEIGHT,
    _NEAR,
    _PRIOR_CURVES,
    _PRIOR_STD,
    _SLOPE_STD,
    LEAST_CURVES,
    Curve,
    EarlyStopping,
    FinishedCurves,
    FrontStopping,
    NoEarlyStopping,
    _regressed,
    expectation,
)
from bsearch.spaces.study.goals import Metric
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import stdtr

TABLE = Path(__file__).parents[3] / "benchmarks" / "data" / "digits.csv.gz"


def measured_curves(seed: int) -> list[tuple[float, list[float]]]:
    """(seconds, accuracies at tenths) of trainings of digits, in an order of rng."""
    with gzip.open(TABLE, "rt") as file:
        rows = [
            (float(row["train_s"]), [float(value) for value in row["curve"].split()])
            for row in csv.DictReader(file)
        ]
    whole = [row for row in rows if len(row[1]) == 10]
    order = np.random.default_rng(seed).permutation(len(whole))
    return [whole[index] for index in order]


def finished(curves: list[tuple[float, list[float]]]) -> FinishedCurves:
    known = FinishedCurves()
    for number, (seconds, values) in enumerate(curves):
        known.put(number, Curve(seconds, [(tenth + 1) / 10 for tenth in range(10)], values))
    return known


@given(
    st.lists(
        st.dictionaries(st.sampled_from([n / 7 for n in range(1, 8)]), st.floats(-9, 9), min_size=1),
        max_size=30,
    ),
    st.floats(0.01, 1),
)
def test_all_curves_at_once_are_as_each_by_itself(each: list[dict[float, float]], fraction: float) -> None:
    known = FinishedCurves()
    for number, curve in enumerate(each):
        known.put(number, Curve(1.0, [2.0], [0.0]))
        known.put(number, Curve(number + 1.0, sorted(curve), [curve[at] for at in sorted(curve)]))
    alone = [
        np.interp(fraction, sorted(curve), [curve[at] for at in sorted(curve)], left=np.nan) for curve in each
    ]
    np.testing.assert_allclose(known.at(fraction), alone, atol=1e-12)
    assert known.taken.tolist() == [number + 1.0 for number in range(len(each))]
    if each:
        known.drop(0)
        assert np.isnan(known.last).tolist() == [True] + [False] * (len(each) - 1)


def played(stopping: EarlyStopping, curves: list[tuple[float, list[float]]]) -> tuple[list[int], int, int]:
    """Run trainings one after another.

    Returns:
        The stopped ones, how many of them would have risen above the front at their time, and how many in all would have.
    """
    stopped, ended, wrong, risers = [], [], 0, 0
    for number, (seconds, values) in enumerate(curves):
        rises = values[-1] > max((end for taken, end in ended if taken <= seconds), default=-1.0)
        risers += rises
        for tenth, value in enumerate(values, start=1):
            if stopping.report(number, tenth / 10, seconds, value):
                stopped.append(number)
                wrong += rises
                break
        else:
            ended.append((seconds, values[-1]))
            stopping.end(number, seconds, values[-1])
    return stopped, wrong, risers


@given(st.lists(st.tuples(*[st.floats(-2, 2)] * 2, st.floats(0, 1)), min_size=1), st.floats(-2, 2))
def test_a_prediction_is_that_of_weighted_ridge_regression(
    curves: list[tuple[float, float, float]], here: float
) -> None:
    """Of the remaining change on the score so far: the intercept is free, and the prior is worth two curves."""
    known, target, similarity = np.array(curves).T
    mean, std, freedom = _regressed(known, target, here, similarity)
    weights = np.exp(-0.5 * ((known - here) / _NEAR) ** 2) * similarity + _FAR_WEIGHT
    rows, at = np.column_stack([np.ones(len(known)), known]), np.array([1.0, here])
    covariance = np.linalg.inv(rows.T * weights @ rows + np.diag([0.0, (_PRIOR_STD / _SLOPE_STD) ** 2]))
    fitted = covariance @ (rows.T * weights @ (target - known))
    left = weights @ (target - known - rows @ fitted) ** 2 + _PRIOR_CURVES * _PRIOR_STD**2
    assert freedom == pytest.approx(weights.sum() + _PRIOR_CURVES)
    assert (mean, std) == pytest.approx(
        (here + at @ fitted, math.sqrt(left / freedom * (1 + at @ covariance @ at)))
    )


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.6, 0.9])
def test_promises_hold_about_as_often_as_they_say(fraction: float) -> None:
    """Real curves: few come to less than the 5 % point, and few to more than the 95 % point."""
    above = []
    for seed in range(4):
        curves = measured_curves(seed)
        known = finished(curves[:40])
        for seconds, values in curves[40:100]:
            seen = round(10 * fraction)
            promised = expectation(
                Curve(seconds, [(tenth + 1) / 10 for tenth in range(seen)], values[:seen]), known
            )
            assert promised is not None
            away = (float(promised.scale.of(np.array([values[-1]]))[0]) - promised.mean) / promised.std
            above.append(float(stdtr(promised.degrees_of_freedom, -away)))
    assert np.mean(np.array(above) > 0.95) < 0.15
    assert np.mean(np.array(above) < 0.05) < 0.15


@pytest.mark.slow
def test_of_those_that_would_rise_above_the_front_no_more_than_the_risk_are_stopped() -> None:
    plays = [played(FrontStopping(Metric(), risk=0.05), measured_curves(seed)[:150]) for seed in range(8)]
    assert sum(len(stopped) for stopped, _, _ in plays) > 600
    assert sum(wrong for _, wrong, _ in plays) / sum(risers for _, _, risers in plays) < 0.06


def test_more_risk_stops_more() -> None:
    counts = [
        len(played(FrontStopping(Metric(), risk), measured_curves(0)[:100])[0]) for risk in (0.001, 0.05, 0.4)
    ]
    assert counts[0] < counts[1] < counts[2]


def test_the_fastest_is_never_stopped_and_nothing_before_curves_are_known() -> None:
    curves = measured_curves(1)
    stopping = FrontStopping(Metric(), 0.05)
    for number, (seconds, values) in enumerate(curves[:40]):
        for tenth, value in enumerate(values, start=1):
            assert not stopping.report(number, tenth / 10, seconds, value) or number >= LEAST_CURVES
        stopping.end(number, seconds, values[-1])
    fastest = min(seconds for seconds, _ in curves) / 2
    assert not any(stopping.report(99, (tenth + 1) / 10, fastest, 0.05) for tenth in range(9))
    slowest = max(seconds for seconds, _ in curves) * 2
    assert any(stopping.report(100, (tenth + 1) / 10, slowest, 0.05) for tenth in range(9))


@given(st.floats(0.55, 1.0))
def test_what_reaches_no_floor_is_stopped_once_a_trial_does(floor: float) -> None:
    """However fast it is: before that, only a trial that is no slower than one on the front."""
    ended = [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85]
    stopping = FrontStopping(Metric(floor=floor), 0.05)
    for number, end in enumerate(ended):
        stopping.learn(number, 10.0, [(tenth / 10, tenth * end / 10) for tenth in range(1, 11)], done=True)

    def stops(taken: float, end: float) -> bool:
        return any(stopping.report(99, tenth / 10, taken, tenth * end / 10) for tenth in range(1, 10))

    assert stops(9.9, 0.01) is (floor <= max(ended))
    assert not stops(9.9, floor) and not stops(0.0, floor)
    assert stops(10.1, 0.01)


@pytest.mark.parametrize("pauses", [False, True])
def test_a_stopping_that_read_the_past_decides_as_one_that_saw_it(pauses: bool) -> None:
    curves = measured_curves(2)[:60]
    made = (
        partial(PauseAtRung, is_new_ground=lambda number, others: not others)
        if pauses
        else partial(FrontStopping, risk=0.05)
    )
    saw, reads = made(Metric()), made(Metric())
    stopped = set(played(saw, curves)[0])
    for number, (seconds, _) in enumerate(curves):
        # As the database keeps them: what was reported, and whether it trained to its end.
        curve = saw.curves[number]
        kept = list(zip(curve.fractions, curve.scores, strict=True))
        reads.learn(number, seconds, kept, done=number not in stopped)
        if number not in stopped:
            reads.resume(number)
    for seconds, values in measured_curves(3)[:30]:
        said = [
            [one.report(1000, (tenth + 1) / 10, seconds, value) for tenth, value in enumerate(values)]
            for one in (saw, reads)
        ]
        assert said[0] == said[1]
        for one in (saw, reads):
            one.curves.pop(1000)


def test_an_interrupted_trial_begins_its_curve_again() -> None:
    stopping = NoEarlyStopping(Metric())
    for fraction, accuracy in ((0.1, 0.2), (0.2, 0.3), (0.1, 0.25), (0.2, 0.35), (0.3, 0.5)):
        stopping.report(0, fraction, 1.0, accuracy)
    assert stopping.end(0, 1.0, 0.6) == [(0.1, 0.25), (0.2, 0.35), (0.3, 0.5), (1.0, 0.6)]
    assert not stopping.curves
