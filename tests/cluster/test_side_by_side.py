"""Two studies on one Ray and in one database: each has its share of the devices, and leaves the other's trials alone."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import optuna
import pytest
from bsearch.cluster.fair_share import Others
from bsearch.cluster.searcher import REFRESH_S, StudySearcher
from conftest import BSEARCH, TASKS
from helpers import SPACE, setup
from hypothesis import given

pytestmark = [pytest.mark.ray]

Driver = subprocess.Popen[str]
Span = tuple[float, float]


def started(study_file: Callable[..., Path], folder: Path, address: str, name: str, trials: int, **cluster: int) -> Driver:
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
        [BSEARCH, "run", path.rename(folder / f"{name}.yaml")], env=environment, stdout=subprocess.PIPE, text=True
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


def at_once(spans: list[Span], begin: float, end: float) -> int:
    """The most of these that trained at the same moment of an interval."""
    moments = [moment for moment, _ in spans if begin <= moment <= end]
    return max((sum(first <= moment <= last for first, last in spans) for moment in moments), default=0)


@pytest.mark.long
def test_a_study_that_comes_later_gets_its_share_and_leaves_it(
    study_file: Callable[..., Path], tmp_path: Path, ray_address: str
) -> None:
    # More trials than it can do meanwhile: how far either gets depends on the machine, what each holds does not.
    first = started(study_file, tmp_path, ray_address, "first", 10_000)
    try:
        while len(list((tmp_path / "first").iterdir())) < 4:
            assert first.poll() is None
            time.sleep(0.1)
        second = started(study_file, tmp_path, ray_address, "second", 8)
        later = ended(tmp_path, second, "second", 8)
        begun, over = later[0][0], later[-1][1]
        wait_for = time.monotonic() + 120
        while at_once(spans(tmp_path, "first"), over, time.time()) < 2:  # what the second left is used
            assert first.poll() is None
            assert time.monotonic() < wait_for
            time.sleep(0.1)
    finally:
        first.terminate()
        said = first.communicate(timeout=120)[0]
    assert first.returncode == 143, said
    earlier = spans(tmp_path, "first")
    settled = begun + REFRESH_S
    assert at_once(later, settled, over) == 1
    assert at_once(earlier, settled, over) == 1
    assert at_once(earlier, 0, begun) == 2


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


@given(fit=st.integers(0, 64), held=st.lists(st.integers(0, 64), min_size=2, max_size=5), wait=st.booleans())
def test_shares_are_all_devices_and_none_twice(fit: int, held: list[int], wait: bool) -> None:
    studies = [Others(len(held), place) for place in range(len(held))]
    fair = [one.share(fit, 0, 0, wait=True) for one in studies]
    assert sum(fair) == fit
    assert max(fair) - min(fair) <= 1
    free = max(fit - sum(held), 0)
    for one, had, least in zip(studies, held, fair, strict=True):
        share = one.share(fit, had, free, wait=wait)
        assert least <= share <= fit
        # Nobody gives way to none that waits, nor takes what is not free.
        assert wait or share >= min(had, fit)
        assert share <= max(least, had + free)


def test_who_waits_for_what_it_could_not_have_takes_nothing_from_others() -> None:
    gpus = {"CPU": 32.0, "GPU": 4.0}
    mine = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:H100": 0.001}
    for pending, waits in [
        ({"CPU": 8.0, "GPU": 1.0}, True),
        ({"CPU": 8.0, "GPU": 2.0}, True),
        ({"CPU": 8.0, "GPU": 4.0}, False),  # more than its share
        ({"CPU": 4.0}, False),  # no GPU
        ({"GPU": 1.0, "accelerator_type:A100": 0.001}, False),
        ({"GPU": 1.0, "accelerator_type:H100": 0.001}, True),
    ]:
        assert Others(2, 0, [pending], total=gpus).wait(mine) is waits, pending
    assert Others(2, 0, profiles=True, total=gpus).wait(mine)


@pytest.mark.parametrize(("share", "left_over"), [(None, False), (2, True), (1, True)])
def test_idle_devices_at_a_budgets_end_are_left_to_another_study_if_there_is_one(share: int | None, left_over: bool) -> None:
    """Two devices; one attempt runs, the process of another is idle, and the study has no attempt for it."""
    attempts: list[Any] = [setup(), "wait"]
    study: Any = SimpleNamespace(
        spec=SimpleNamespace(devices=SimpleNamespace(counts=(1,)), task="t:T"),
        next_attempt=lambda free: attempts.pop(0),
        setups=lambda number: {},
        begun=lambda number: None,
        leaving="",
    )
    runner: Any = SimpleNamespace(slots=2, fair_share=lambda held: share, placed=lambda devices: (1,), devices_of=len)
    searcher = StudySearcher(study, runner)
    assert searcher.suggest("one")["shares"] == (1,)
    searcher.begun("one")
    searcher.count_idle([SimpleNamespace(bundles=[{"CPU": 1}])])
    # Until the study says so, an attempt for it may come; more than its share it gives up at once.
    assert searcher.holds_too_many() is (share == 1)
    if share == 1:
        assert searcher.suggest("two") is None
        assert attempts == ["wait"]  # not even asked
    else:
        assert searcher.suggest("two") is None
        assert not attempts
    assert searcher.holds_too_many() is left_over
    searcher.count_idle([])
    assert searcher.holds_too_many() is False
