"""What the author of a study expects of the optimum: where it begins, how far it reaches, and that it fades."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from bsearch.search.suggest.ask_tell import Search
from bsearch.search.suggest.priors.optimum_prior import OptimumPrior
from bsearch.search.suggest.space_transform import SearchSpace, SpaceTransform
from bsearch.spaces.domain import Range
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.study.file import parse_study
from hypothesis import given
from hypothesis import strategies as st

RATE = {"low": 1e-5, "high": 1.0, "log": True}


def prior_of(domains: dict[str, Any]) -> tuple[SpaceTransform, OptimumPrior]:
    space = SearchSpace.of(domains)
    transform = SpaceTransform(space.searched, space.conditions)
    prior = OptimumPrior.of(transform, space.expected)
    assert prior is not None
    return transform, prior


@given(st.floats(1e-4, 0.1), st.floats(1.5, 8.0))
def test_nine_in_ten_of_what_is_drawn_lie_within_the_factor(best: float, within: float) -> None:
    domains = {
        "other": Range(low=0.0, high=1.0),
        "rate": Range(**RATE, prior=(best / within, best * within)),
    }
    transform, prior = prior_of(domains)
    points = prior.drawn(np.random.default_rng(0).random((4000, 2)), np.random.default_rng(1))
    rates = np.array([one["rate"] for one in transform.decode_many(points)])
    assert ((rates >= 1e-5) & (rates <= 1.0)).all()
    inside = np.mean((rates > best / within) & (rates < best * within))
    assert inside > 0.88  # more, where an end of the range cuts it
    assert inside < 0.92 or best / within**1.5 < 1e-5 or best * within**1.5 > 1.0
    assert (points[:, 0] == np.random.default_rng(0).random((4000, 2))[:, 0]).all()


@pytest.mark.parametrize(
    "domain", [Range(low=0.0, high=0.8, prior=0.3), Range(low=1, high=200, prior=(20, 60))]
)
def test_a_distance_is_one_on_any_scale_of_the_models(domain: Range) -> None:
    """Whole numbers of a wide range are on a log scale for the models, though their prior has a distance."""
    transform, prior = prior_of({"other": Range(low=0.0, high=1.0), "one": domain})
    expected = domain.expected
    assert expected is not None
    values = (
        transform.decode(np.array([0.5, prior.best[0]]))["one"],
        transform.decode(np.array([0.5, prior.best[0] + 1.645 * prior.std[0]])),
    )
    assert values[0] == pytest.approx(expected[0])
    assert values[1]["one"] == pytest.approx(expected[1])


@given(st.lists(st.floats(0, 1), min_size=2, max_size=2), st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_weights_are_bounded_and_fade(point: list[float], ended: int, seed: int) -> None:
    _, prior = prior_of({"rate": Range(**RATE, prior=1e-3), "decay": Range(**RATE, prior=(0.09, 0.11))})
    points, rng = np.array([point, prior.best]), np.random.default_rng(seed)
    tried, accuracy = rng.random((6, 2)), rng.random(6)
    now, later = (
        prior.weights(points, prior.strength(tried, accuracy, count)) for count in (ended, ended + 1)
    )
    assert now[1] == later[1] == 1.0
    assert math.exp(-1) - 1e-12 <= now[0] <= later[0] <= 1.0
    assert prior.weights(points, prior.strength(tried, accuracy, 1000))[0] > 0.999


def test_one_that_is_surer_than_numbers_can_tell_has_a_density() -> None:
    """A width of 0, by rounding, would make every weight NaN, and the choice arbitrary."""
    _, prior = prior_of(
        {
            "other": Range(low=0.0, high=1.0),
            "one": Range(low=0.0, high=1.0, prior=(0.3, math.nextafter(0.3, 1))),
        }
    )
    points = np.array([[0.5, 0.3], [0.5, 0.9]])
    weights = prior.weights(points, prior.strength(points, np.array([0.1, 0.2]), 0))
    assert weights[0] == 1.0 > weights[1] >= math.exp(-1) - 1e-12
    assert prior.drawn(points, np.random.default_rng(0))[:, 1] == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize(("best", "nearest"), [(8, 0.0), (4096, 1.0)])
def test_beyond_the_batches_that_can_be_planned_the_nearest_is_expected(best: int, nearest: float) -> None:
    batch = Range(low=8, high=4096, log=True, prior=(max(best / 1.05, 8), min(best * 1.05, 4096)))
    space = SearchSpace.of({"effective_batch": batch, "other": Range(low=0.0, high=1.0)}, feasible=(64, 128))
    transform = SpaceTransform(space.searched)
    prior = OptimumPrior.of(transform, space.expected)
    assert prior is not None
    rng = np.random.default_rng(0)
    points = prior.drawn(rng.random((50, 2)), rng)
    place = transform.place("effective_batch")
    assert np.abs(points[:, place] - nearest).max() < 0.2
    assert np.isfinite(prior.weights(points, 1.0)).all()


def test_it_is_refuted_by_trials_that_are_worse_the_nearer_they_are() -> None:
    _, prior = prior_of({"other": Range(low=0.0, high=1.0), "rate": Range(**RATE, prior=1e-3)})
    tried = np.random.default_rng(0).random((8, 2))
    density = prior.log_density(tried)
    assert prior.strength(tried, -density, 8) == 0.0
    assert (
        prior.strength(tried, density, 8)
        == prior.strength(tried[:2], -density[:2], 8)
        == pytest.approx(math.exp(-8 / 5))
    )
    assert prior.strength(tried, np.full(8, 0.3), 8) == pytest.approx(math.exp(-8 / 5))


def test_a_parameter_that_does_not_apply_is_neither_near_nor_far() -> None:
    when = {"kind": ["sgd"]}
    domains = parse_study(
        "study: s\ntask: tasks.py:train\nspace:\n  effective_batch: 8\n  reference_rate: 0.1\n  kind: [sgd, adam]\n"
        "  momentum: {low: 0.1, high: 0.9, prior: [0.49, 0.51], when: {kind: sgd}}\n"
    ).domains()
    assert domains["momentum"].when == {"kind": ("sgd",)} != when
    transform, prior = prior_of(dict(domains))
    points = np.array(
        [
            transform.encode(one)
            for one in (
                {"kind": "adam"},
                {"kind": "sgd", "momentum": 0.501},
                {"kind": "sgd", "momentum": 0.9},
            )
        ]
    )
    without, near, far = prior.weights(points, 0.1)
    assert far < without < near


def begun(prior: dict[str, Any], seed: int) -> list[float]:
    """The first rates that are tried, in decades."""
    search = Search(
        {"effective_batch": {"low": 8, "high": 512, "log": True}, "learning_rate": {**RATE, **prior}},
        stopping="none",
        seed=seed,
    )
    return [math.log10(search.ask().parameters["learning_rate"]) for _ in range(3)]


def test_a_search_begins_where_it_is_expected_and_beside_it() -> None:
    """Without one it begins in the middle of the range."""
    lone = [begun({"prior": [1e-4 / 1.5, 1.5e-4]}, seed) for seed in range(12)]
    assert np.median([rates[1] for rates in lone]) == pytest.approx(-2.5, abs=0.6)
    spread = [begun({}, seed) for seed in range(12)]
    assert np.median(spread) == pytest.approx(-2.5, abs=0.6)
    near = [rate for rates in lone for rate in (rates[0], rates[2])]
    assert np.median(near) == pytest.approx(-4, abs=0.15)


def accuracy(parameters: dict[str, Any]) -> float:
    away = math.log10(parameters["one"] / 1e-2), math.log10(parameters["two"] / 1e-3)
    return 0.9 - 0.05 * (away[0] ** 2 + away[1] ** 2)


def best_found(prior: tuple[float, float] | None, trials: int, seed: int) -> float:
    space = {name: {**RATE} for name in ("one", "two")}
    for name, best in zip(space, prior or (), strict=False):
        space[name]["prior"] = best
    search = Search(
        {"effective_batch": {"low": 8, "high": 64, "log": True}, **space}, stopping="none", seed=seed
    )
    values = []
    for _ in range(trials):
        asked = search.ask()
        values.append(accuracy(dict(asked.parameters)))
        search.tell(asked.number, 1.0, values[-1])
    return max(values)


@pytest.mark.slow
def test_a_right_one_helps_early_and_a_wrong_one_is_forgotten() -> None:
    seeds = range(4)
    right, none, wrong = (
        np.array([[best_found(prior, trials, seed) for seed in seeds] for trials in (6, 20)]).mean(axis=1)
        for prior in ((1e-2, 1e-3), None, (1.0, 1e-5))
    )
    assert right[0] > none[0] + 0.01
    assert wrong[1] > none[1] - 0.005
    assert right[1] > none[1] - 0.005


@pytest.mark.parametrize(
    ("domain", "words"),
    [
        (
            "{low: 1e-4, high: 1e-1, prior: 0.5}",
            "expected a prior from 0.0001 to 0.1, of two values the lower",
        ),
        ("{low: 1e-4, high: 1e-1, prior: [1e-3, 1e-4]}", "first; got [0.001, 0.0001]"),
        ("{low: 1e-4, high: 1e-1, prior: [1e-2, 1e-2]}", "first; got [0.01, 0.01]"),
        ("{low: 0.1, high: 0.1, prior: 0.1}", "expected a range to search with a prior, got one value, 0.1"),
        ("{low: 1e-4, high: 1e-1, prior: [1e-4]}", "prior: expected a number, or two such as [1e-4, 1e-3]"),
        ("{low: 1e-4, high: 1e-1, prior: {best: 3e-4}}", "or two such as [1e-4, 1e-3]; got {'best': 0.0003}"),
        ("{low: 1e-4, high: 1e-1, prior: soon}", "prior: expected a number, or two such as"),
    ],
)
def test_what_is_no_prior_is_refused_where_it_stands(domain: str, words: str) -> None:
    with pytest.raises(StudyFileError) as refused:
        parse_study(
            f"study: s\ntask: tasks.py:train\nspace:\n  effective_batch: 8\n  reference_rate: {domain}\n"
        )
    assert words in str(refused.value)
    assert "study.yaml:5: space.reference_rate" in str(refused.value)


@pytest.mark.parametrize("domain", ["{choices: [0.1, 0.2], prior: 0.1}", "{value: 0.1, prior: 0.1}"])
def test_choices_and_single_values_have_none(domain: str) -> None:
    text = f"study: s\ntask: tasks.py:train\nspace:\n  effective_batch: 8\n  reference_rate: 0.1\n  dropout: {domain}\n"
    with pytest.raises(
        StudyFileError, match=r"study.yaml:6: space.dropout.*: expected a prior on a range alone"
    ):
        parse_study(text)


def test_a_sampler_that_would_ignore_it_is_refused() -> None:
    rate = "reference_rate: {low: 0.1, high: 1, prior: 0.3}"
    text = f"study: s\ntask: tasks.py:train\nsampler: tpe\nspace:\n  effective_batch: 8\n  {rate}\n"
    with pytest.raises(StudyFileError, match=r"space.reference_rate: expected sampler: front with a prior"):
        parse_study(text)
    with pytest.raises(StudyFileError, match=r"space.learning_rate: expected sampler front with a prior"):
        Search({"learning_rate": {**RATE, "prior": 1e-3}}, sampler="tpe")


def test_it_is_no_part_of_what_makes_trials_comparable() -> None:
    text = "study: s\ntask: tasks.py:train\nspace:\n  effective_batch: 8\n  reference_rate: {low: 0.1, high: 1%s}\n"
    assert parse_study(text % ", prior: 0.3").identity() == parse_study(text % "").identity()
