"""Where every trial takes the same known time, the front is one point, and the search is for the best metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
import pytest
from bsearch.search.analysis.choice import Choice, chosen_trial
from bsearch.search.suggest.ask_tell import Search
from bsearch.search.suggest.front_model import _expected_improvement

TIME_S, PARAMETERS = 300.0, 12
SPACE = {f"x{place}": {"low": 0.0, "high": 1.0} for place in range(PARAMETERS)}


def loss(parameters: Mapping[str, Any], seed: int) -> float:
    """A bowl, of whose parameters some matter much more than others."""
    rng = np.random.default_rng((seed, 1))
    best, weights = rng.uniform(0.2, 0.8, PARAMETERS), np.exp(rng.normal(0, 1.2, PARAMETERS))
    away = np.array([parameters[name] for name in SPACE]) - best
    return 3.3 + math.log1p(16 * float(weights @ away**2 / weights.sum()))


def searched(trials: int, seed: int, *, known: bool = True) -> Search:
    search = Search(
        SPACE,
        known_seconds=(lambda _: TIME_S) if known else None,
        direction="minimize",
        metric="bits",
        stopping="none",
        seed=seed,
    )
    rng = np.random.default_rng(seed)
    for _ in range(trials):
        suggestion = search.ask()
        value, seconds = (
            loss(suggestion.parameters, seed),
            TIME_S * (1 if known else math.exp(0.01 * rng.standard_normal())),
        )
        search.tell(suggestion.number, seconds, value)
    return search


def test_what_points_are_worth_is_their_expected_improvement() -> None:
    search = searched(20, seed=3)
    suggester: Any = search._suggester
    known = suggester._known()
    model = suggester._model(suggester._observations(search.records()), known)
    proposed, improvement = next(model.best(suggester.transform, known, np.random.default_rng(0)))
    points = np.vstack([proposed, np.random.default_rng(1).random((500, PARAMETERS)), model.points])
    mean, std = model.score_model.predict(points)
    # Of score on its scale, which is linear from here on up, above the incumbent's mean.
    expected = _expected_improvement(mean - model.score_model.mean_at(model.points).max(), std)
    worth = model.worth(points, known(points))
    assert np.isfinite(worth).all() and improvement > 0
    assert np.corrcoef(worth, expected)[0, 1] > 0.98  # by quadrature over a kink
    assert expected[0] > 0.95 * expected.max()


def test_the_front_is_its_best_trial_and_the_gain_is_a_share() -> None:
    search = searched(20, seed=0)
    front, best = search.front(), min(record.accuracy or math.inf for record in search.records())
    assert [trial.accuracy for trial in front.trials] == [best]
    assert {
        chosen_trial("s", front, choice).accuracy
        for choice in (Choice(), Choice(trial="best"), Choice(within=0.0))
    } == {best}
    gain = search._suggester.expected_gain(search.records(), 5)
    assert gain is not None and 0 < gain < 1


def test_a_trial_is_compared_with_all_others() -> None:
    search = Search(SPACE, known_seconds=lambda _: TIME_S, direction="minimize", seed=0)
    for trial in range(8):
        number = search.ask().number
        for tenth in range(1, 10):
            search.report(number, tenth / 10, TIME_S, 5 - tenth / 10 + 0.01 * trial)
        search.tell(number, TIME_S, 4 + 0.01 * trial)
    worst, good = search.ask().number, search.ask().number
    assert [search.report(number, 0.5, TIME_S, value) for number, value in ((worst, 9.0), (good, 4.4))] == [
        True,
        False,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_it_is_at_least_as_fast_as_tpe(known: bool) -> None:
    """Seconds that are not known, and alike but for their noise, change little."""
    ours, theirs = [], []
    for seed in range(3):
        ours.append(min(record.accuracy or math.inf for record in searched(35, seed, known=known).records()))
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(multivariate=True, seed=seed))
        study.optimize(
            lambda trial, seed=seed: loss({name: trial.suggest_float(name, 0, 1) for name in SPACE}, seed), 35
        )
        theirs.append(study.best_value)
    assert np.mean(ours) < np.mean(theirs) - 0.05, (ours, theirs)
