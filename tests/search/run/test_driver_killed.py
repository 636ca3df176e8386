"""The driver is killed in mid-study, for real; the same command again finishes the study and loses nothing."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bsearch.search.store.tables import Tables
from conftest import BSEARCH, TASKS
from helpers import SPACE, as_optuna, finished

pytestmark = [pytest.mark.ray]


def rays_of(group: int) -> list[int]:
    """Processes of a session that are still there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(session) == group and state != "Z":
            found.append(int(process.name))
    return found


def start(path: Path, address: str) -> subprocess.Popen[bytes]:
    command = [BSEARCH, "run", path]
    environment = {**os.environ, "RAY_ADDRESS": address}
    return subprocess.Popen(
        command, start_new_session=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def test_a_killed_driver_costs_no_finished_trial(
    study_file: Callable[..., Path], tmp_path: Path, ray_address: str
) -> None:
    path = study_file(task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 6})
    database = tmp_path / "small.db"
    before: dict[int, tuple[float, ...]] = {}
    for kills, enough in [(0, 1), (1, 3)]:
        driver = start(path, ray_address)
        try:
            limit = time.monotonic() + 400
            while len(finished(database)) < enough:
                assert driver.poll() is None, f"the driver ended before kill {kills}"
                assert time.monotonic() < limit
                time.sleep(0.05)
            time.sleep(random.uniform(0, 0.8))
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
        now = finished(database)
        assert before.items() <= now.items()
        before = now
    driver = start(path, ray_address)
    assert driver.wait(timeout=400) == 0
    assert before.items() <= finished(database).items()
    trials = as_optuna(database).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 6


@pytest.mark.long
@pytest.mark.parametrize("line", ["starting Ray", "trying the training code"])
def test_a_driver_that_is_asked_to_go_goes(study_file: Callable[..., Path], line: str) -> None:
    """Where Ray has a handler of its own, and where its core would dump its stacks."""
    path = study_file(task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 30})
    driver = subprocess.Popen(
        [BSEARCH, "run", path],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert driver.stdout is not None
    seen = ""
    while line not in seen:
        seen = driver.stdout.readline()
        assert seen, "the driver ended"
    time.sleep(random.uniform(0, 2))
    driver.terminate()
    rest = driver.communicate(timeout=100)[0].splitlines()
    assert (driver.returncode, rest[-1]) == (143, "terminated"), rest
    assert not any("Traceback" in one or "PC: @" in one for one in rest)
    for _ in range(100):
        if not rays_of(driver.pid):
            break
        time.sleep(0.2)
    assert rays_of(driver.pid) == []


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_driver_costs_no_paused_trial(study_file: Callable[..., Path], tmp_path: Path) -> None:
    path = study_file(
        task=f"{TASKS}:Slow",
        space={"effective_batch": {"low": 16, "high": 23}, "reference_rate": 0.1, "epochs": 1},
        training={"evaluations": 10},
        budget={"hours": 1},
    )
    command, url = [BSEARCH, "run", path, "--serial"], f"sqlite:///{tmp_path}/small.db"

    def paused() -> set[int]:
        with contextlib.suppress(Exception):  # not created yet, or being written
            return {
                one.number for one in Tables(url, create=False).trials("small") if one.outcome == "paused"
            }
        return set()

    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + 300
        while not paused():
            assert driver.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.02)
    finally:
        driver.kill()
        driver.wait()
    left = paused()
    output = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert output.returncode == 0, output.stdout
    trials = as_optuna(url).trials
    assert {trial.state.name for trial in trials} == {"COMPLETE"}
    for number in left:  # from where they were left, never anew
        facts = trials[number].user_attrs
        assert facts["resumed_at"] == round(facts["stopped_fraction"] * facts["samples_budget"])


def test_ctrl_c_of_the_whole_group_stops_cleanly_and_leaves_no_process(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = study_file(task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 30})
    with (tmp_path / "out").open("wb") as out:
        driver = subprocess.Popen([BSEARCH, "run", path], start_new_session=True, stdout=out, stderr=out)
        limit = time.monotonic() + 400
        while not finished(tmp_path / "small.db"):
            assert driver.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < limit
            time.sleep(0.05)
        os.killpg(driver.pid, signal.SIGINT)  # as a terminal does
        said = [tmp_path / "out", tmp_path / "results" / "small" / "ray.log"]
        assert driver.wait(timeout=400) == 130, "\n".join(one.read_text() for one in said)
    output = (tmp_path / "out").read_text()
    assert "interrupted (SIGINT). To resume: bsearch run" in output
    assert "Traceback" not in output
    for _ in range(100):
        if not rays_of(driver.pid):
            break
        time.sleep(0.2)
    assert rays_of(driver.pid) == []
    trials = as_optuna(tmp_path / "small.db").trials
    assert {trial.user_attrs["outcome"] for trial in trials} <= {"complete", "stopped", "interrupted"}
