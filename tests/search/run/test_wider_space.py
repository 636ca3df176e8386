"""A study's ranges may grow: what it has trained stays, and what is wider is searched. Nothing else may change."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bsearch.search.store.stored import has_grown
from helpers import bsearch
from hypothesis import given
from hypothesis import strategies as st

SPACE: dict[str, Any] = {
    "effective_batch": {"low": 30, "high": 90},
    "reference_rate": {"low": 0.05, "high": 0.2, "at_batch": 64},
    "width": {"low": 0.5, "high": 2.0},
}


def identity(space: dict[str, Any], code: str = "a") -> dict[str, Any]:
    return {"space": space, "task": {"name": "T", "code": code}, "training": {}}


@given(st.sampled_from(sorted(SPACE)), st.floats(0, 3), st.floats(0, 3))
def test_a_range_grows_where_both_ends_stay_or_go_outwards(name: str, down: float, up: float) -> None:
    old = SPACE[name]
    whole = isinstance(old["low"], int)
    low, high = old["low"] / (1 + down), old["high"] * (1 + up)
    wide = {**old, "low": int(low) if whole else low, "high": int(high) if whole else high}
    # Larger batches than the largest were not timed.
    grows = name != "effective_batch" or wide["high"] == old["high"]
    assert has_grown(identity(SPACE), identity({**SPACE, name: wide})) == grows
    if wide != old:
        assert not has_grown(identity({**SPACE, name: wide}), identity(SPACE))


@pytest.mark.parametrize(
    "space",
    [
        {**SPACE, "effective_batch": {"low": 40, "high": 900}},
        {**SPACE, "reference_rate": {"low": 0.01, "high": 0.9, "at_batch": 128}},
        {**SPACE, "width": {"low": 0.1, "high": 9.0, "log": True}},
        {**SPACE, "width": {"low": 0, "high": 9}},
        {**SPACE, "width": 1.0},
        {**SPACE, "depth": {"low": 1, "high": 3}},
        {name: SPACE[name] for name in ("effective_batch", "reference_rate")},
    ],
)
def test_anything_else_is_another_experiment(space: dict[str, Any]) -> None:
    assert not has_grown(identity(SPACE), identity(space))
    assert not has_grown(identity(SPACE), identity({**SPACE, "width": {"low": 0.1, "high": 9.0}}, code="b"))
    damaged = {**SPACE, "width": {"low": "abc", "high": 2.0}}
    assert not has_grown(identity(damaged), identity(SPACE))


@pytest.mark.slow
def test_a_study_with_a_wider_range_keeps_its_trials_and_goes_on(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "study.yaml"

    def run(batch: Any, trials: int) -> tuple[int, str]:
        space = {"effective_batch": batch, "reference_rate": {"low": 0.05, "high": 0.2}, "epochs": 1}
        written = study_file(space=space, budget={"trials": trials, "profile_s": 0.1})
        assert written == path
        result = bsearch("run", path, "--serial")
        return result.exit_code, " ".join(result.output.split())

    def trials() -> list[tuple[Any, ...]]:
        output = bsearch("export", path, "--to", "json", "--all").output
        names = (
            "trial",
            "outcome",
            "train_s",
            "accuracy",
            "effective_batch",
            "learning_rate",
            "seed",
            "ended_at",
        )
        return [tuple(trial[name] for name in names) for trial in json.loads(output)["all"]]

    assert run({"low": 60, "high": 90}, 3)[0] == 0
    before = trials()
    code, told = run({"low": 8, "high": 90}, 8)
    assert code == 0, told
    assert "the study goes on in wider ranges, with its 3 trials so far" in told
    after = trials()
    assert after[:3] == before
    assert len(after) == 8
    assert any(trial[4] < 60 for trial in after[3:])
    copied = bsearch("export", path, "--to", "optuna")
    assert copied.exit_code == 0, copied.output
    for batch, reason in (({"low": 8, "high": 900}, True), ({"low": 60, "high": 80}, False), (64, False)):
        code, told = run(batch, 9)
        assert code == 2
        assert "space.effective_batch" in told
        assert ("larger batches than those were not timed" in told) == reason
    assert trials() == after
