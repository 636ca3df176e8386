"""Whether one side is better: told where it is, and not where it is not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bsearch.search.analysis.gaussian_process import fitted
from bsearch.search.compare.difference import Difference, Runs, _evidence, difference
from bsearch.search.compare.referee import Comparison, targets, verdict
from bsearch.search.store.stored import StoredStudy
from bsearch.search.suggest.space_transform import SpaceTransform, distribution
from bsearch.spaces.domain import Range
from bsearch.spaces.front import ParetoFront
from bsearch.spaces.study.file import study_from_dict
from conftest import small_study
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

DOMAINS = {
    "effective_batch": Range(low=8, high=512, log=True),
    "learning_rate": Range(low=0.003, high=1.0, log=True),
}
SPACE = SpaceTransform({name: distribution(domain) for name, domain in DOMAINS.items()})
SPACES = [(SPACE, SPACE)]
NOISE = 0.004


def runs(count: int, seed: int, gain: float = 0.0, moved: float = 0.0, slower: float = 1.0) -> Runs:
    """Runs of a training whose best accuracy is .95, at batch 32 and a rate of .06 times e^moved; larger batches are faster."""
    rng = np.random.default_rng(seed)
    batches, rates = np.exp(rng.uniform(math.log(8), math.log(512), count)), np.exp(rng.uniform(-5, 0, count))
    off = np.log(rates) - math.log(0.06) - moved
    scores = (
        0.95 - 0.006 * off**2 - 0.005 * np.log(batches / 32) ** 2 + gain + NOISE * rng.standard_normal(count)
    )
    seconds = slower * (300 / batches + 3)
    parameters: list[dict[str, Any]] = [
        {"effective_batch": round(batch), "learning_rate": rate}
        for batch, rate in zip(batches, rates, strict=True)
    ]
    return Runs(parameters, seconds, scores, [])


@pytest.mark.parametrize(("gain", "expected"), [(0.03, "better"), (-0.03, "worse")])
@pytest.mark.parametrize("moved", [0.0, 1.2])
def test_a_change_is_told_where_its_best_is(gain: float, expected: str, moved: float) -> None:
    found = difference(SPACES, (runs(24, 1), runs(24, 2, gain, moved)))
    assert verdict(found, 0.0, 1.0, -1) == expected
    assert abs(found.drawn[-1].mean() - gain) < 3 * found.drawn[-1].std() + 0.003
    first, second = (one["learning_rate"] for one in found.best)
    assert abs(math.log(second / first) - moved) < 0.8
    assert 0.3 * NOISE < found.noise < 3 * NOISE


def test_studies_called_alike_are_told_apart_by_their_folders() -> None:
    old, new, here = (
        StoredStudy(
            "sqlite:///s.db", "s", study_from_dict(small_study(task=task)), {}, 0.0, (), ParetoFront(())
        )
        for task in ("work/old/tasks.py:New", "work/new/tasks.py:New", "tasks.py:New")
    )
    for second, name in ((new, "s (work/new)"), (here, "s (sqlite:///s.db)")):
        compared = Comparison((old, second), (0, 0), "train_s", None, 0.0, 1.0, None)
        assert compared.names == ("s (work/old)", name)


def test_equals_are_called_seldom() -> None:
    """Of twenty pairs of equals, whose best settings lie elsewhere in half, at most two."""
    each = (difference(SPACES, (runs(16, seed), runs(16, 100 + seed, moved=seed % 2))) for seed in range(20))
    said = [verdict(found, 0.0, 1.0, -1) for found in each]
    assert said.count("cannot tell") >= 18


def normal(mean: float, std: float, count: int) -> Difference:
    return Difference(np.ones(1), np.array([[mean - std, mean + std]]), ({}, {}), None, NOISE, count)


@given(st.floats(-9, 9), st.floats(0.1, 3), st.integers(6, 500), st.floats(-3, 3), st.floats(0.1, 1.0))
def test_an_early_look_asks_for_more(
    mean: float, std: float, count: int, margin: float, share: float
) -> None:
    """By the root of the share of the budget that is used; a margin moves what is compared."""
    said, last = verdict(normal(mean, std, count), margin, share, 0), (mean + margin) * math.sqrt(share)
    assert said == verdict(normal(last, std, count), 0.0, 1.0, 0)
    assert {"better": "worse", "worse": "better"}.get(said, said) == verdict(
        normal(-mean, std, count), -margin, share, 0
    )
    assert said == "cannot tell" or abs(last) >= 2 * std


def test_all_looks_together_call_few_equals() -> None:
    """Of evidence that grows with the budget, as a random walk does: 5 % at most, less with few runs."""
    walks = np.random.default_rng(0).standard_normal((4000, 4)).cumsum(axis=1) / 2
    called = [
        any(
            verdict(normal(z / math.sqrt(s), 1.0, 10**6), 0.0, s, 0) != "cannot tell"
            for z, s in zip(walk[1:], (0.5, 0.75, 1.0), strict=True)
        )
        for walk in walks
    ]
    assert 0.01 < np.mean(called) < 0.035


def test_sides_are_compared_at_the_times_that_both_have() -> None:
    found = difference(SPACES, (runs(24, 1), runs(24, 2, 0.03, slower=5.0)))
    assert found.seconds[0] > 15
    assert (np.diff(found.seconds) > 0).all()
    # Within few seconds the slower side has only its fast settings.
    assert found.drawn[0].mean() < found.drawn[-1].mean()


def test_sides_whose_rates_lie_elsewhere_are_told_by_their_places() -> None:
    """As those of another optimizer do."""
    own = DOMAINS | {"learning_rate": Range(low=0.00006, high=0.02, log=True)}
    wide = DOMAINS | {"learning_rate": Range(low=0.00006, high=1.0, log=True)}
    whole, other = (
        SpaceTransform({name: distribution(domain) for name, domain in one.items()}) for one in (wide, own)
    )
    first, second = runs(24, 1), runs(24, 2, 0.02)
    for one in second.parameters:
        one["learning_rate"] /= 50  # type: ignore[index]
    found, by_value = (
        difference(spaces, (first, second)) for spaces in ([(whole, whole), (SPACE, other)], [(whole, whole)])
    )
    assert verdict(found, 0.0, 1.0, -1) == "better"
    assert found.drawn[-1].std() < by_value.drawn[-1].std()
    assert abs(math.log(found.best[1]["learning_rate"] * 50 / found.best[0]["learning_rate"])) < 0.8


@given(st.integers(0, 2**32 - 1), st.integers(3, 9), st.floats(0.01, 100), st.floats(-9, 9))
def test_places_are_chosen_by_the_density_of_the_scores(
    seed: int, count: int, unit: float, middle: float
) -> None:
    rng = np.random.default_rng(seed)
    values = middle + unit * rng.standard_normal(count)
    process = fitted(rng.random((count, 3)), values)
    density = multivariate_normal(cov=process.factor @ process.factor.T)
    expected = density.logpdf((values - values.mean()) / values.std()) + count / 2 * math.log(2 * math.pi)
    assert _evidence(process, values) == pytest.approx(expected)


def test_runs_of_one_seed_are_believed_less() -> None:
    """All runs of a side share a seed, or each has its own."""
    sides = runs(24, 1), runs(24, 2, 0.01)
    own, shared, unknown = (
        difference(SPACES, (replace(sides[0], seeds=seeds), replace(sides[1], seeds=seeds)))
        for seeds in ([*range(24)], [0] * 24, [])
    )
    stds = [float(found.drawn[-1].std()) for found in (own, shared, unknown)]
    assert stds[1] > 1.15 * stds[0]
    assert stds[2] == stds[0]


def test_the_budget_is_looked_at_thrice() -> None:
    for each in range(6, 60):
        looks = targets(each)
        assert looks[-1] == each
        assert looks[0] >= 6
        assert looks == sorted(set(looks))
