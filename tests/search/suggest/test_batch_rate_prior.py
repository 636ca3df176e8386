"""What the sampler knows of batches and rates beforehand: exact in its arithmetic, and harmless where it is wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from bsearch.search.analysis import gaussian_process
from bsearch.search.analysis.gaussian_process import Plain, Structure, conditioned, fitted
from bsearch.search.suggest.optuna.sampler import FrontSampler
from bsearch.search.suggest.priors.batch_rate_prior import (
    BARE,
    SCALED,
    BatchRate,
    ScorePrior,
    SecondsPrior,
    first_point,
    first_points,
)
from bsearch.search.suggest.space_transform import SpaceTransform
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

BATCH, RATE = IntDistribution(8, 512, log=True), FloatDistribution(1e-3, 1.0, log=True)
SPACE: dict[str, BaseDistribution] = {
    "epochs": IntDistribution(1, 8),
    "effective_batch": BATCH,
    "kind": CategoricalDistribution(("a", "b")),
    "reference_rate": RATE,
}
PLACE = BatchRate(0, 2, np.array([4.0, 1.0, 5.0]), BARE)


def test_it_finds_batch_and_rate_and_how_far_they_reach() -> None:
    place = BatchRate.of(SpaceTransform(SPACE))
    assert place is not None
    assert (place.batch, place.rate, place.slope) == (1, 4, SCALED)
    assert place.widths == pytest.approx([1.0, math.log(64), 1.0, 1.0, math.log(1000)])
    bare = BatchRate.of(SpaceTransform({"effective_batch": BATCH, "learning_rate": RATE}))
    unscaled = BatchRate.of(SpaceTransform(SPACE), scaled=False)
    assert bare is not None
    assert unscaled is not None
    assert bare.slope == unscaled.slope == BARE


@pytest.mark.parametrize(
    "space",
    [
        {"effective_batch": BATCH},
        {"reference_rate": RATE, "epochs": BATCH},
        {"effective_batch": IntDistribution(8, 64), "reference_rate": RATE},
        {"effective_batch": BATCH, "reference_rate": FloatDistribution(0.02, 1.0)},
        {"effective_batch": CategoricalDistribution((8, 512)), "reference_rate": RATE},
    ],
)
def test_other_spaces_have_the_vague_prior(space: dict[str, BaseDistribution]) -> None:
    assert BatchRate.of(SpaceTransform(space)) is None


def test_a_wide_range_is_on_a_log_scale_however_it_is_searched() -> None:
    logs, even = (
        SpaceTransform({"effective_batch": IntDistribution(8, 512, log=log), "reference_rate": RATE})
        for log in (True, False)
    )
    for batch in (8, 64, 511):
        assert (logs.encode({"effective_batch": batch}) == even.encode({"effective_batch": batch})).all()
        assert (
            even.decode(even.encode({"effective_batch": batch, "reference_rate": 0.1}))["effective_batch"]
            == batch
        )
    assert str(BatchRate.of(even)) == str(BatchRate.of(logs))


@pytest.mark.parametrize("structure", [ScorePrior(PLACE), SecondsPrior(PLACE), None])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_finite_differences(
    structure: Structure | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, seen = np.random.default_rng(seed), {}

    def minimize(loss: Any, start: Any, **options: Any) -> Any:
        seen["loss"], seen["start"] = loss, start
        return found(loss, start, **options)

    found = gaussian_process.minimize
    monkeypatch.setattr(gaussian_process, "minimize", minimize)
    fitted(rng.random((12, 3)), rng.standard_normal(12), structure=structure)
    at = seen["start"] + rng.normal(0.0, 0.3, len(seen["start"]))
    slopes = seen["loss"](at)[1]
    steps = 1e-6 * np.eye(len(at))
    numeric = [(seen["loss"](at + step)[0] - seen["loss"](at - step)[0]) / 2e-6 for step in steps]
    assert slopes == pytest.approx(numeric, rel=1e-5, abs=1e-5 * np.abs(slopes).max())


@pytest.mark.parametrize("structure", [Plain(3), ScorePrior(PLACE), SecondsPrior(PLACE)])
def test_the_process_is_the_textbooks(structure: Structure) -> None:
    """The slow twin: the conditional of a joint normal, written out point by point."""
    rng = np.random.default_rng(0)
    points, values, others = rng.random((9, 3)), rng.standard_normal(9), rng.random((4, 3))
    free, log_noise, mean, std = structure.means + 0.1, math.log(0.02), 0.3, 1.7
    process = conditioned(points, values, free, log_noise, mean, std, structure=structure)

    def covariance(some: np.ndarray, more: np.ndarray) -> np.ndarray:
        a, b = structure.coordinates(some, free), structure.coordinates(more, free)
        features = structure.features(a), structure.features(b)

        def of(i: int, j: int) -> float:
            r = math.sqrt(
                sum(((x - y) / math.exp(s)) ** 2 for x, y, s in zip(a[i], b[j], free[:3], strict=True))
            )
            matern = (1 + math.sqrt(5) * r + 5 * r * r / 3) * math.exp(-math.sqrt(5) * r)
            return matern + float(features[0][i] @ features[1][j])

        return np.array([[of(i, j) for j in range(len(more))] for i in range(len(some))])

    def prior(some: np.ndarray) -> np.ndarray:
        return structure.mean(structure.coordinates(some, free))

    inverse = np.linalg.inv(covariance(points, points) + (math.exp(log_noise) + 1e-8) * np.eye(9))
    cross = covariance(others, points)
    expected = mean + std * (prior(others) + cross @ inverse @ ((values - mean) / std - prior(points)))
    spread = std * np.sqrt(np.diag(covariance(others, others) - cross @ inverse @ cross.T))
    got_mean, got_std = process.predict(others)
    assert got_mean == pytest.approx(expected, rel=1e-6)
    assert got_std == pytest.approx(spread, rel=1e-5)
    assert process.mean_at(others) == pytest.approx(expected, rel=1e-6)


def test_a_fit_finds_the_slope_of_the_ridge() -> None:
    rng = np.random.default_rng(1)
    for slope in (0.2, 0.7, 1.2):
        points = rng.random((40, 3))
        z = (points - 0.5) * PLACE.widths
        values = -((z[:, 2] - slope * z[:, 0]) ** 2) + 0.2 * z[:, 0] + 0.01 * rng.standard_normal(40)
        process = fitted(points, values, structure=ScorePrior(PLACE))
        assert process.free[-1] == pytest.approx(slope, abs=0.1)


def test_first_points_are_spread_over_times_and_lie_on_the_ridge() -> None:
    rng = np.random.default_rng(2)
    points = rng.random((512, 3))
    log_seconds = 3.0 * (1 - points[:, 0])
    taken = [first_point(PLACE, points, log_seconds, number, 3, rng) for number in range(first_points(True))]
    assert [point[0] for point in taken] == pytest.approx([0.7, 0.1], abs=0.05)
    drawn = np.array([first_point(PLACE, points, None, number % 3, 3, rng) for number in range(300)])
    assert {round(value, 2) for value in drawn[:, 0]} == {0.5, 0.15, 0.85}
    away = drawn[:, 2] - (0.5 + 0.7 * (drawn[:, 0] - 0.5) * 4 / 5)
    assert abs(away.mean()) < 0.02
    assert away.std() == pytest.approx(0.08, rel=0.15)
    beyond = {round(first_point(PLACE, points, None, number, 3, rng)[0], 6) for number in (3, 4)}
    assert beyond == {round(points[0, 0], 6)}


def test_a_space_with_categories_and_conditions_is_asked_from_the_first_trial_on() -> None:
    import optuna

    conditions = {"reference_rate": {"kind": ["a"]}}
    study = optuna.create_study(
        directions=["minimize", "maximize"], sampler=FrontSampler(space=SPACE, conditions=conditions, seed=1)
    )
    for _ in range(8):
        trial = study.ask(SPACE)
        rate = trial.params.get("reference_rate", 0.1)
        study.tell(trial, (100 / trial.params["effective_batch"], 1.0 - abs(math.log(rate / 0.1)) / 10))
    assert len(study.trials) == 8
