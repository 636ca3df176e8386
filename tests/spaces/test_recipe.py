"""Settings of `training` that are searched in `space`, and ranges in steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bsearch.search.store.trials import Trials
from bsearch.search.suggest.samplers import suggester_of
from bsearch.search.suggest.space_transform import SearchSpace
from bsearch.spaces.domain import Range, count_of, every_value_of
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.planning import cost_keys, optimizer_settings, training_cost, trial_setup
from bsearch.spaces.profile_request import profile_faults, profiling_setup
from bsearch.spaces.record import TrialResult
from bsearch.spaces.study.file import study_from_dict
from bsearch.spaces.study.goals import Objectives
from bsearch.spaces.study.spec import StudySpec
from bsearch.spaces.trial import Suggestion
from conftest import TASKS
from helpers import run
from hypothesis import given
from hypothesis import strategies as st

PROFILE = DeviceProfile(device="cpu", kind="cpu", training_set=400)


def study(space: dict[str, Any], **keys: Any) -> StudySpec:
    space = {"effective_batch": {"low": 8, "high": 64}, "reference_rate": 0.1, "epochs": 1, **space}
    return study_from_dict({"study": "s", "task": "tasks.py:Mine", "space": space, **keys})


def test_a_trial_gets_its_own_recipe_and_the_rest_from_the_study() -> None:
    space = {
        "schedule": ["constant", "cosine"],
        "warmup": {"low": 0, "high": 0.3},
        "clip_norm": {"low": 0.1, "high": 10},
        "precision": ["fp32", "bf16"],
        "beta2": {"low": 0.9, "high": 0.999},
    }
    spec = study(space, training={"evaluations": 3})
    parameters = {"schedule": "constant", "warmup": 0.1, "clip_norm": 2.0, "precision": "bf16", "beta2": 0.95}
    others = {
        "effective_batch": 16,
        "reference_rate": 0.1,
        "rule": "sqrt",
        "epochs": 1,
        "weight_decay": 0.0,
        "devices": 1,
    }
    setup = trial_setup(spec, "s", Suggestion(0, {**others, **parameters}), PROFILE, "cpu")
    training = setup.training
    assert (training.schedule, training.warmup, training.clip_norm, training.precision) == (
        "constant",
        0.1,
        2.0,
        "bf16",
    )
    assert training.evaluations == 3
    assert setup.betas == setup.training.betas == (0.9, 0.95)
    assert not setup.parameters
    # Each precision is profiled; what a step costs otherwise depends on no other part of the recipe.
    assert cost_keys(spec) == [(("precision", "fp32"),), (("precision", "bf16"),)]
    assert profiling_setup(spec, "cpu", (("precision", "bf16"),)).training.precision == "bf16"
    assert training_cost(spec)["clip_norm"] == 0.1 and "precision" not in training_cost(spec)


@pytest.mark.parametrize(
    ("space", "training", "words"),
    [
        ({"warmup": 0.1}, {"warmup": 0.2}, "space.warmup: expected it or training.warmup, got both"),
        ({"beta1": 0.8}, {"betas": [0.8, 0.999]}, "space.beta1: expected it or training.betas, got both"),
        ({"schedule": ["cosin"]}, {}, "Did you mean 'cosine'?"),
        ({"precision": ["fp32", "fp8"]}, {}, "got 'fp8'"),
        ({"warmup": {"low": 0, "high": 1}}, {}, "expected a number >= 0 and < 1, got 1"),
        ({"clip_norm": 0}, {}, "expected a number above 0"),
        ({}, {"ema": 1.0}, "training.ema: expected a number"),
        (
            {"effective_batch": {"low": 16, "high": 64, "step": 0.5}},
            {},
            "expected a step of whole numbers, got 0.5",
        ),
        (
            {"warmup": {"choices": [0.0, 0.1], "changes_cost": True}},
            {},
            "expected changes_cost on a parameter of the task",
        ),
        (
            {"width": {"low": 2, "high": 8, "step": 4}},
            {},
            "expected a whole number of steps from low to high, got 1.5 of 4",
        ),
        (
            {"width": {"low": 2, "high": 8, "step": 2, "log": True}},
            {},
            "expected a step or a logarithmic scale",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(
    space: dict[str, Any], training: dict[str, Any], words: str
) -> None:
    with pytest.raises(StudyFileError) as error:
        study(space, training=training)
    assert words in str(error.value)


def test_a_half_life_of_beta2_reaches_the_trial_and_needs_an_optimizer_that_gets_it() -> None:
    profile = DeviceProfile("cpu", "here", 1000, optimizer="AdamW")
    for kind, beta2 in (("constant", 0.999), ("half_life", 0.999**2)):
        spec = study({"rule": ["linear", "sqrt"]}, training={"beta2_scaling": kind})
        parameters = {
            **spec.fixed(),
            "effective_batch": 2 * spec.space.reference_batch,
            "reference_rate": 0.1,
        }
        made = trial_setup(spec, "s", Suggestion(0, {**parameters, "rule": "linear"}), profile, "cpu")
        assert made.betas == pytest.approx((0.9, beta2))
        assert made.learning_rate == pytest.approx(0.2)
    assert profiling_setup(spec, "cpu").betas != (0.9, 0.999)
    (fault,) = profile_faults(spec, replace(profile, applies_betas=False))
    assert str(fault).startswith("training.beta2_scaling: expected a task whose AdamW gets betas=setup.betas")
    with pytest.raises(
        StudyFileError, match=r"training\.beta2_scaling: expected constant with rule adam_sde"
    ):
        study({"rule": "adam_sde"}, training={"beta2_scaling": "half_life"})


@given(st.floats(0.5, 20.0), st.floats(0.5, 20.0), st.integers(8, 64))
def test_a_decay_in_shares_of_the_training_is_that_of_the_studys_longest(
    epochs: float, longest: float, batch: int
) -> None:
    # Wang & Aitchison 2024: B / (rate x decay x samples) is one number, whatever a trial's length.
    spec = study(
        {"rule": "adamw_tau", "weight_decay": 0.1, "epochs": {"low": min(epochs, longest), "high": longest}}
    )
    if epochs <= longest:
        made = optimizer_settings(spec, batch, epochs, spec.fixed())
        reference = spec.space.reference_batch / (0.1 * 0.1 * longest)
        assert batch / (made.learning_rate * made.weight_decay * epochs) == pytest.approx(reference)


def test_an_average_of_weights_is_the_trials_own_and_a_part_of_the_cost() -> None:
    spec = study({}, training={"ema": 0.95})
    profile = DeviceProfile("cpu", "here", 1000)
    parameters = {**spec.fixed(), "effective_batch": 2 * spec.space.reference_batch, "reference_rate": 0.1}
    made = trial_setup(spec, "s", Suggestion(0, {**parameters, "rule": "sqrt"}), profile, "cpu")
    assert made.ema_decay(made.effective_batch) == pytest.approx(0.95**2)
    assert type(made).from_dict(made.to_dict()) == made
    assert training_cost(spec)["ema"] == 0.95
    assert training_cost(study({}))["ema"] is None
    assert study({}, training={"ema": 0.9}).identity() != study({}).identity()


def test_an_average_of_weights_is_refused_with_fsdp2_by_name() -> None:
    devices = {"per_trial": 2, "sharding": "fsdp2"}
    with pytest.raises(
        StudyFileError, match=r"training\.ema: expected no average of weights with devices\.sharding: fsdp2"
    ):
        study({}, training={"ema": 0.9}, devices=devices)


def test_betas_that_no_optimizer_gets_are_refused() -> None:
    profile = DeviceProfile("cpu", "cpu", 400, optimizer="Lion", applies_betas=False)
    (fault,) = profile_faults(study({"beta2": {"low": 0.9, "high": 0.999}}), profile)
    assert "expected a task whose Lion gets betas=setup.betas" in str(fault)


@given(st.integers(-5, 50), st.integers(1, 7), st.integers(0, 6), st.booleans())
def test_a_range_in_steps_holds_its_own_values_alone(low: int, step: int, steps: int, whole: bool) -> None:
    scale = 1 if whole else 0.25
    domain = Range(low=low * scale, high=(low + step * steps) * scale, step=step * scale)
    values = [(low + step * number) * scale for number in range(steps + 1)]
    assert all(map(domain.contains, values))
    assert not any(domain.contains(value + scale * step / 2) for value in values)
    assert count_of(domain) == (len(values) if whole else None)
    assert not whole or every_value_of(domain) == values


def test_suggestions_keep_their_steps() -> None:
    domains = {"width": Range(low=16, high=64, step=16), "dropout": Range(low=0.0, high=0.5, step=0.125)}
    trials, suggester = (
        Trials(),
        suggester_of("front", SearchSpace.of({**study({}).domains(), **domains}), Objectives()),
    )
    for _ in range(12):
        (proposal,) = suggester.suggest(trials)
        assert isinstance(proposal, dict)
        width, dropout = float(proposal["width"]), float(proposal["dropout"])
        assert domains["width"].contains(width) and domains["dropout"].contains(dropout)
        trials.end(trials.begin(proposal).number, TrialResult("complete", values=(width, dropout)))


def test_whole_numbers_with_changes_cost_are_profiled_one_by_one() -> None:
    spec = study({"depth": {"low": 2, "high": 6, "step": 2, "changes_cost": True}})
    assert cost_keys(spec) == [(("depth", 2),), (("depth", 4),), (("depth", 6),)]


def test_too_many_combinations_are_refused_where_the_file_is_read() -> None:
    costly = {"choices": [1, 2, 3, 4, 5], "changes_cost": True}
    with pytest.raises(
        StudyFileError, match=r"^space\.depth: expected at most 16 .*; got 25 \(5 of depth, 5 of width\)"
    ):
        study({"depth": costly, "width": costly})
    with pytest.raises(StudyFileError, match=r"space\.depth: expected at most 16 combinations"):
        study({"depth": {"low": 1, "high": 10**15, "changes_cost": True}})
    with pytest.raises(StudyFileError, match=r"space\.depth: expected choices or a range of integers"):
        study({"depth": {"low": 0.5, "high": 1.5, "changes_cost": True}})


@pytest.mark.slow
def test_a_study_searches_its_recipe(study_file: Callable[..., Path]) -> None:
    space = {
        "effective_batch": {"low": 20, "high": 80},
        "reference_rate": 0.1,
        "epochs": 1,
        "schedule": ["constant", "cosine"],
        "warmup": {"low": 0.0, "high": 0.4, "step": 0.1},
        "clip_norm": {"low": 0.1, "high": 10},
        "precision": ["fp32", "bf16"],
    }
    study = run(study_file(task=f"{TASKS}:Points", space=space, budget={"trials": 6, "profile_s": 0.2})).study
    assert [record.outcome for record in study.records] == ["complete"] * 6
    for record in study.records:
        training = study.setup_of(record).training
        assert {
            name: record.parameters[name] for name in ("schedule", "warmup", "clip_norm", "precision")
        } == {name: getattr(training, name) for name in ("schedule", "warmup", "clip_norm", "precision")}
    assert len({record.parameters["precision"] for record in study.records}) == 2
