"""The Runner over Ray Tune keeps the contract of all Runners, and loses nothing when its workers die."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import optuna
import pytest
from bsearch.cluster.tune import TuneRunner
from bsearch.search.records import Records
from bsearch.spaces.errors import LauncherError
from bsearch.spaces.study import Cluster, Devices, StudySpec
from runner_contract import Run, RunnerContract, kept_path

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]


class TestTuneRunner(RunnerContract):
    @pytest.fixture
    def runner(self, ray_address: str, tmp_path: Path) -> Callable[[StudySpec], AbstractContextManager[TuneRunner]]:
        return lambda spec: TuneRunner(
            spec.cluster.model_copy(update={"address": ray_address}), spec.devices, tmp_path / "ray.log"
        )

    def test_a_killed_worker_costs_an_attempt_and_no_trial(self, go: Run, kept: Callable[[], optuna.Study]) -> None:
        go("KillsItsWorker", budget={"trials": 4})
        trials = kept().trials
        assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
        assert trials[1].user_attrs["attempts"] == 2
        rows = Records(f"sqlite:///{kept_path(kept())}").attempts("small", 1)
        assert [row["outcome"] for row in rows] == ["interrupted", "complete"]
        assert rows[0]["setup"]["optimizer"] == rows[1]["setup"]["optimizer"]

    def test_a_trial_that_always_kills_its_worker_is_an_error(self, go: Run, kept: Callable[[], optuna.Study]) -> None:
        result = go("AlwaysKillsItsWorker", budget={"trials": 3})
        trials = kept().trials
        assert trials[1].state.name == "FAIL"
        assert "its worker died 3 times in a row" in trials[1].user_attrs["message"]
        assert sum(trial.state.name == "COMPLETE" for trial in trials) == 3
        assert result.failure == ""


def test_a_cluster_that_is_not_there_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(LauncherError, match=r"cluster.address 127.0.0.1:1: Ray could not be reached"),
        TuneRunner(Cluster(address="127.0.0.1:1"), Devices(), tmp_path / "ray.log"),
    ):
        pass


def test_devices_that_are_not_there_are_told(ray_address: str, tmp_path: Path) -> None:
    with (
        pytest.raises(
            LauncherError, match=r"a trial on 1 device needs 1 CPUs, 1 GPUs on one machine; there are machines with 2 CPUs"
        ),
        TuneRunner(Cluster(address=ray_address), Devices(kind="gpu"), tmp_path / "ray.log"),
    ):
        pass
