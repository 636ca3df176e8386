"""Warm start: an earlier study of the same task teaches the next one, and nothing else does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bsearch.search.run.driver import StudyResult
from bsearch.search.run.events import Event
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.trial import TrialSetup
from helpers import run
from tasks_for_tests import Points
from torch import nn


def ran(path: Path) -> tuple[StudyResult, list[str]]:
    said = []

    def notify(event: Event) -> None:
        if event.kind == "message":
            said.append(event.text)

    return run(path, notify=notify), said


@pytest.fixture
def earlier(study_file: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Runs a first study, then gives files of later ones in the same storage."""
    storage = f"sqlite:///{tmp_path}/both.db"
    budget = {"trials": 10, "profile_s": 0.3}
    ran(study_file(study="first", storage=storage, budget=budget, stopping="none"))

    def later(**changes: Any) -> Path:
        return study_file(
            **{"study": "second", "storage": storage, "budget": budget, "warm_start": ["first"], **changes}
        )

    return later


@pytest.mark.long
@pytest.mark.slow
def test_an_earlier_study_spares_the_first_points(earlier: Callable[..., Path]) -> None:
    result, said = ran(earlier(budget={"trials": 3, "profile_s": 0.3}))
    assert "warm start: 10 trials of first are in this space" in said
    # Its own front is drawn from its own trials alone.
    assert len(result.study.records) == 3
    assert {trial.number for trial in result.study.front.trials} <= {0, 1, 2}
    cold, _ = ran(earlier(study="third", warm_start=None, budget={"trials": 3, "profile_s": 0.3}))
    assert [one.parameters for one in cold.study.records] != [one.parameters for one in result.study.records]


@pytest.mark.slow
def test_trials_outside_the_space_are_left_out(earlier: Callable[..., Path]) -> None:
    space = {
        "effective_batch": {"low": 16, "high": 60},
        "reference_rate": {"low": 0.02, "high": 0.5, "at_batch": 64},
        "rule": "linear",
        "epochs": 2,
    }
    _, said = ran(earlier(space=space, budget={"trials": 1, "profile_s": 0.3}))
    # Where none of the ten is inside, nothing is said.
    assert all(int(words.split()[2]) < 10 for words in said if words.startswith("warm start"))


@pytest.mark.slow
def test_what_teaches_nothing_is_refused(earlier: Callable[..., Path]) -> None:
    with pytest.raises(StudyFileError, match=r"warm_start\.0: .*expected the same training"):
        ran(earlier(study="other", training={"schedule": "linear"}))
    with pytest.raises(StudyFileError, match=r"warm_start\.0: .*has no study named 'frist'"):
        ran(earlier(warm_start=["frist"]))
    with pytest.raises(StudyFileError, match=r"expected budget\.profile_s above 0"):
        ran(earlier(budget={"trials": 3, "profile_s": 0}))
    with pytest.raises(StudyFileError, match="expected sampler: front"):
        ran(earlier(sampler="tpe"))


class OnADevice(Points):
    """As slow as the environment says that the device is."""

    def model(self, setup: TrialSetup) -> nn.Module:
        model = super().model(setup)
        model.register_forward_hook(lambda *_: time.sleep(float(os.environ["SECONDS_OF_A_PASS"])))
        return model


@pytest.mark.slow
@pytest.mark.long
def test_equal_seconds_of_another_device_are_another_training(
    study_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = {
        "effective_batch": {"low": 16, "high": 64},
        "reference_rate": {"low": 0.01, "high": 1},
        "train_s": 0.3,
    }
    studies = {
        "task": f"{__file__}:OnADevice",
        "space": space,
        "budget": {"trials": 3, "profile_s": 1},
        "stopping": "none",
    }
    told = {}
    for name, seconds, earlier in (("fast", 0.01, []), ("again", 0.01, ["fast"]), ("slow", 0.05, ["fast"])):
        monkeypatch.setenv("SECONDS_OF_A_PASS", str(seconds))
        # One profile is stored for one machine, which this is.
        storage = f"sqlite:///{tmp_path}/{'slow' if name == 'slow' else 'fast'}.db"
        path = study_file(
            **studies, study=name, storage=storage, warm_start=[f"{one}.yaml" for one in earlier]
        )
        path.rename(tmp_path / f"{name}.yaml")
        told[name] = [text for text in ran(tmp_path / f"{name}.yaml")[1] if text.startswith("warm start")]
    assert told == {
        "fast": [],
        "again": ["warm start: 3 trials of fast.yaml are in this space"],
        "slow": ["warm start: 0 trials of fast.yaml are in this space"],
    }
