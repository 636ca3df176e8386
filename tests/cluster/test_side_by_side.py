"""Two studies on one Ray and in one database: each keeps to its limit, and leaves the other's trials alone."""

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

Driver = subprocess.Popen[str]
Span = tuple[float, float]


def started(
    study_file: Callable[..., Path], folder: Path, address: str, name: str, trials: int, **cluster: int
) -> Driver:
    times = folder / name
    times.mkdir()
    path = study_file(
        study=name,
        task=f"{TASKS}:TellsWhenItTrains",
        space=SPACE | {"times": str(times)},
        storage=f"sqlite:///{folder}/both.db",
        budget={"trials": trials},
        stopping="none",
        cluster=cluster,
    )
    environment = {**os.environ, "RAY_ADDRESS": address}
    return subprocess.Popen(
        [BSEARCH, "run", path.rename(folder / f"{name}.yaml")],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def ended(folder: Path, driver: Driver, name: str, trials: int) -> list[Span]:
    """When each trial of a finished study trained."""
    said = driver.communicate(timeout=400)[0]
    assert driver.returncode == 0, said
    kept = optuna.load_study(study_name=name, storage=f"sqlite:///{folder}/both.db").trials
    assert [trial.state.name for trial in kept] == ["COMPLETE"] * trials
    assert (folder / "results" / name / "front.csv").exists()
    return spans(folder, name)


def spans(folder: Path, name: str) -> list[Span]:
    times = [[float(line) for line in path.read_text().split()] for path in (folder / name).iterdir()]
    return sorted((each[0], each[-1]) for each in times if each)


@pytest.mark.long
def test_a_study_keeps_to_its_own_limit_beside_another(
    study_file: Callable[..., Path], tmp_path: Path, ray_address: str
) -> None:
    """One trial at a time each, although Ray has room for more; rows, files and locks are each study's own."""
    names = ("first", "second")
    drivers = [started(study_file, tmp_path, ray_address, name, 5, trials_at_once=1) for name in names]
    trained = [ended(tmp_path, driver, name, 5) for driver, name in zip(drivers, names, strict=True)]
    for one in trained:
        assert all(before[1] <= after[0] for before, after in pairwise(one))
    assert trained[0][0][0] < trained[1][-1][1]
    assert trained[1][0][0] < trained[0][-1][1]
