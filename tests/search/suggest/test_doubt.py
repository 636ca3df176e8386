"""Old runs are believed as far as they predict the study's own trials."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bsearch.search.suggest.priors.doubt import Doubt
from bsearch.search.suggest.priors.warm_start import names_sources, prior_trials
from bsearch.search.suggest.trial_history import Observations, PausedTrials
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.learning_rate import OptimizerSettings, scaled_settings
from bsearch.spaces.study.file import resolve_study, study_from_dict
from bsearch.spaces.study.spec import StudySpec
from hypothesis import given
from hypothesis import strategies as st


def observed(own: int, earlier: int, shift: float, seed: int) -> Observations:
    """Own trials of a hill, and earlier ones of a hill that lies elsewhere by a shift."""
    rng = np.random.default_rng(seed)
    points = rng.random((own + earlier, 2))
    is_own = np.arange(own + earlier) >= earlier
    middle = np.where(is_own, 0.5, 0.5 + shift)
    accuracy = 1 - ((points - middle[:, None]) ** 2).sum(1)
    nothing, none = np.empty((0, 2)), np.empty(0)
    count = own + earlier
    return Observations(
        points,
        np.ones((count, 1)),
        accuracy,
        np.zeros(count),
        is_own,
        nothing,
        nothing,
        np.full(count, np.nan),
        np.full(count, np.nan),
        PausedTrials(none.astype(int), nothing, none, none, none, none.astype(bool)),
    )


@pytest.mark.slow
@given(st.integers(0, 1000), st.integers(6, 12))
def test_doubt_grows_with_how_wrong_they_are(seed: int, own: int) -> None:
    same, far = (Doubt().of(observed(own, 30, shift, seed)).std[0] for shift in (0.0, 0.6))
    assert 0 < same < far


def test_own_trials_are_as_they_were() -> None:
    before = observed(5, 20, 0.3, 0)
    after = Doubt().of(before)
    assert (after.std[before.own] == 0).all()
    assert (after.score == before.score).all()
    alone = observed(5, 0, 0.0, 0)
    assert Doubt().of(alone) is alone


def spec(folder: Path, **changes: object) -> StudySpec:
    keys = {
        "study": "new",
        "task": "bsearch.objectives.digits:Digits",
        "space": {
            "effective_batch": {"low": 8, "high": 500},
            "reference_rate": {"low": 0.001, "high": 10, "at_batch": 64},
            "rule": "linear",
            "epochs": {"low": 2, "high": 10},
        },
        "warm_start": ["runs.csv"],
    }
    return resolve_study(study_from_dict({**keys, **changes}), folder, None)


ROWS = ((8, 0.01, 2, 0.8), (64, 0.1, 5, 0.9), (100, 0.3, 10, 0.95), (512, 0.3, 10, 0.5), (100, 0.3, 20, 0.99))


def table(folder: Path, metric: str = "accuracy") -> None:
    lines = [f"bs,lr,epochs,val_{metric}", *(",".join(map(str, row)) for row in ROWS)]
    (folder / "runs.csv").write_text("\n".join(lines))


def test_rates_are_references_of_the_studys_rule_and_times_its_own(tmp_path: Path) -> None:
    table(tmp_path, "accuracy")
    study = spec(tmp_path, objectives={"metric": "val_accuracy"})
    assert names_sources(study)
    found = prior_trials(study, {}, lambda parameters: 7.0)
    assert [(one["effective_batch"], one["epochs"], accuracy) for one, _, accuracy in found] == [
        (8, 2, 0.8),
        (64, 5, 0.9),
        (100, 10, 0.95),
    ]
    for (parameters, taken, _), (batch, rate, _, _) in zip(found, ROWS, strict=False):
        reference = OptimizerSettings(parameters["reference_rate"])
        scaled = scaled_settings("linear", reference, reference_batch=64, effective_batch=batch)
        assert scaled.learning_rate == pytest.approx(rate)
        assert taken == 7.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"objectives": {"metric": "recall"}},
            "expected runs with recall, this study's metric; got bs, epochs, lr, val_accuracy",
        ),
        (
            {
                "objectives": {"metric": "val_accuracy"},
                "space": {"effective_batch": 7, "reference_rate": 0.1},
            },
            "expected runs in this study's space, got none",
        ),
        ({"objectives": {"metric": "val_accuracy"}, "warm_start": ["runs.tsv", "runs.csv"]}, "runs.tsv"),
        (
            {
                "objectives": {"metric": "val_accuracy"},
                "space": {
                    "effective_batch": {"low": 1, "high": 200},
                    "reference_rate": {"low": 1e-6, "high": 9},
                    "train_s": 9,
                },
            },
            "expected runs in this study's space, got none (4 by epochs",
        ),
    ],
)
def test_what_cannot_be_learned_from_is_refused(
    changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    table(tmp_path)
    with pytest.raises(StudyFileError) as told:
        prior_trials(spec(tmp_path, **changes), {}, lambda parameters: 1.0)
    assert said in str(told.value)
