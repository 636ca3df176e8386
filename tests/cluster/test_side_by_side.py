"""Two studies on one Ray and in one database: each keeps to its share of the devices, and leaves the other's trials alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import optuna
import pytest
from conftest import BSEARCH, TASKS
from helpers import SPACE

pytestmark = [pytest.mark.ray]


def test_two_studies_share_a_ray_and_a_database(study_file: Callable[..., Path], tmp_path: Path, ray_address: str) -> None:
    storage = f"sqlite:///{tmp_path}/both.db"
    drivers = []
    for name in ("one", "two"):
        path = study_file(
            study=name,
            task=f"{TASKS}:Slow",
            space=SPACE,
            storage=storage,
            budget={"trials": 5},
            cluster={"trials_at_once": 1},
        )
        own = path.rename(tmp_path / f"{name}.yaml")
        environment = {**os.environ, "RAY_ADDRESS": ray_address}
        drivers.append(subprocess.Popen([BSEARCH, "run", own], env=environment, stdout=subprocess.PIPE, text=True))
    said = [driver.communicate(timeout=400)[0] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0], said
    spans = []
    for name in ("one", "two"):
        trials = optuna.load_study(study_name=name, storage=storage).trials
        assert [trial.state.name for trial in trials] == ["COMPLETE"] * 5
        assert (tmp_path / "results" / name / "front.csv").exists()
        for before, after in pairwise(trials):  # one at a time, although Ray has room for more
            assert before.datetime_complete is not None
            assert after.datetime_start is not None
            assert before.datetime_complete <= after.datetime_start
        spans.append((trials[0].datetime_start, trials[-1].datetime_complete))
    (begun, ended), (other_begun, other_ended) = spans
    assert begun < other_ended  # type: ignore[operator]
    assert other_begun < ended  # type: ignore[operator]
