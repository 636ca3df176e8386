"""The Runner over Ray Tune keeps the contract of all Runners, and loses nothing when its workers die."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import optuna
import pytest
import ray
from bsearch.cluster.connection import nodes
from bsearch.cluster.searcher import LaunchOrder
from bsearch.cluster.tune import TuneRunner
from bsearch.cluster.tune_internals import end_at_once, resources_counted_by
from bsearch.search.run.decisions.ending import Stage
from bsearch.search.run.events import Event
from bsearch.search.store.tables import Tables
from bsearch.spaces.errors import ClusterError, StudyFileError
from bsearch.spaces.study.cluster import Cluster
from bsearch.spaces.study.devices import Devices
from bsearch.spaces.study.spec import StudySpec
from ray import tune
from ray.tune import tune as tune_module
from ray.tune.experiment import Trial
from runner_contract import Run, RunnerContract, StudyContract, kept_path

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture
def runner(ray_address: str, tmp_path: Path) -> Callable[[StudySpec], AbstractContextManager[TuneRunner]]:
    return lambda spec: TuneRunner(spec.cluster, spec.devices, tmp_path / "ray.log")


@pytest.mark.long
class TestStudiesOverTune(StudyContract):
    pass


class TestTuneRunner(RunnerContract):
    @pytest.mark.long
    def test_short_trials_need_no_more_processes_than_slots(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        remembered: list[int] = []

        def count(event: Event) -> None:
            if event.kind == "ended":
                remembered.append(sum(type(one) is Trial for one in gc.get_objects()))

        go("TellsItsProcess", budget={"trials": 30}, stopping="none", notify=count)
        processes = Counter(trial.user_attrs["process"] for trial in kept().trials)
        assert len(processes) == 2, processes
        # Tune itself would remember every one.
        assert len(remembered) == 30
        assert max(remembered) <= 10, remembered

    @pytest.mark.long
    def test_an_attempt_that_waits_for_machines_that_have_gone_is_taken_back(
        self, go: Run, kept: Callable[[], optuna.Study], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As after a machine is lost: for a while trials are given shares that no machine has."""
        placed, begun = TuneRunner.placed, time.monotonic()

        def lost(self: TuneRunner, devices: int) -> tuple[int, ...]:
            return placed(self, devices) if time.monotonic() - begun > 8 else (1000,) * devices

        monkeypatch.setattr(TuneRunner, "placed", lost)
        texts: list[str] = []
        go("Points", budget={"trials": 3}, stopping="none", notify=lambda event: texts.append(event.text))
        assert time.monotonic() - begun > 8
        assert [trial.state.name for trial in kept().trials] == ["COMPLETE"] * 3
        assert all(trial.user_attrs["attempts"] == 1 for trial in kept().trials)
        assert not any("interrupted" in text for text in texts)

    @pytest.mark.long
    def test_ray_is_not_left_while_tunes_thread_is_in_one_of_its_calls(
        self, go: Run, kept: Callable[[], optuna.Study], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That ends the process with SIGSEGV now and then, after a second Ctrl-C."""
        fit, disconnect = tune.Tuner.fit, ray.shutdown
        begun, ended, at_shutdown, signalled = list[int](), list[int](), list[bool](), list[int]()

        def fitted(self: tune.Tuner) -> Any:
            begun.append(1)
            try:
                return fit(self)
            finally:
                ended.append(1)

        def shutdown(*args: Any, **kwargs: Any) -> None:
            at_shutdown.append(len(ended) == len(begun))
            disconnect(*args, **kwargs)

        def stop(event: Event) -> None:
            if event.kind == "ended" and not signalled:
                for number in (signal.SIGINT, signal.SIGINT):
                    signalled.append(number)
                    os.kill(os.getpid(), number)
                    time.sleep(0.3)

        monkeypatch.setattr(tune.Tuner, "fit", fitted)
        monkeypatch.setattr(ray, "shutdown", shutdown)
        with contextlib.suppress(KeyboardInterrupt):
            go("Slow", budget={"trials": 30}, notify=stop)
        assert len(signalled) == 2
        assert begun
        assert all(at_shutdown)
        assert 1 <= sum(trial.state.name == "COMPLETE" for trial in kept().trials) < 30

    def test_a_study_may_stop_between_a_suggestion_and_its_start(
        self, go: Run, kept: Callable[[], optuna.Study], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tune has no folder for such a trial, and looked for it."""
        added, usual = list[str](), LaunchOrder.on_trial_add

        def add(self: LaunchOrder, controller: Any, trial: Any) -> None:
            usual(self, controller, trial)
            added.append(trial.trial_id)
            if len(added) == 2:
                self._searcher._study.ending.reach(Stage.STOPPED, "the test stops it")

        monkeypatch.setattr(LaunchOrder, "on_trial_add", add)
        analysis = tune_module.ExperimentAnalysis
        go("Slow", budget={"trials": 30})
        assert tune_module.ExperimentAnalysis is analysis  # as a user's own runs of Tune need it
        assert len(added) == 2
        assert all(trial.user_attrs["outcome"] in ("interrupted", "stopped") for trial in kept().trials)

    @pytest.mark.long
    def test_a_killed_worker_costs_an_attempt_and_no_trial(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        go("KillsItsWorker", budget={"trials": 4})
        trials = kept().trials
        assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
        assert trials[1].user_attrs["attempts"] == 2
        rows = Tables(f"sqlite:///{kept_path(kept())}").attempts("small", 1)
        assert [row.outcome for row in rows] == ["interrupted", "complete"]
        assert rows[0].setup["optimizer"] == rows[1].setup["optimizer"]

    @pytest.mark.long
    def test_a_trial_that_always_kills_its_worker_is_an_error(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        result = go("AlwaysKillsItsWorker", budget={"trials": 3})
        trials = kept().trials
        assert trials[1].state.name == "FAIL"
        assert "its worker died 3 times in a row" in trials[1].user_attrs["message"]
        assert sum(trial.state.name == "COMPLETE" for trial in trials) == 3
        assert result.failure == ""

    @pytest.mark.long
    def test_a_killed_worker_costs_the_work_since_its_checkpoint_alone(
        self, go: Run, kept: Callable[[], optuna.Study], tmp_path: Path
    ) -> None:
        evaluated = tmp_path / "evaluated"
        evaluated.mkdir()
        go(
            "DiesOnceInTheMiddle",
            space={
                "effective_batch": {"low": 8, "high": 64},
                "reference_rate": {"low": 0.02, "high": 0.1, "at_batch": 64},
                "epochs": 2,
                "evaluated": str(evaluated),
            },
            training={"evaluations": 10},
            budget={"trials": 2},
            cluster={"trials_at_once": 2, "checkpoint_every_s": 0},
            stopping="none",
        )
        trials = kept().trials
        assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2
        assert [trial.user_attrs["attempts"] for trial in trials] == [2, 2]
        # Died in the sixth evaluation: the fifth was kept.
        assert all(0.4 <= trial.user_attrs["resumed_at"] / 800 <= 0.7 for trial in trials)


def test_a_cluster_that_is_not_there_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match=r"cluster.address 127.0.0.1:1: Ray could not be reached"),
        TuneRunner(Cluster(address="127.0.0.1:1"), Devices(), tmp_path / "ray.log"),
    ):
        pass


@pytest.mark.usefixtures("ray_address")
def test_resources_are_counted_as_ray_counts_them_and_a_head_that_is_gone_raises() -> None:
    usual, rays = ray.cluster_resources, ray.cluster_resources()
    with resources_counted_by(nodes):
        assert ray.cluster_resources() == rays

    def gone() -> list[dict[str, Any]]:
        raise ConnectionError("Ray's head does not say which machines there are")

    with resources_counted_by(gone), pytest.raises(ConnectionError):
        ray.cluster_resources()
    assert ray.cluster_resources is usual


def test_a_run_whose_ray_is_gone_waits_for_no_process() -> None:
    class Controller:
        cleaned = 0

        def _cleanup_trials(self) -> None:
            self.cleaned += 1

    controller, gone = Controller(), False
    for _ in range(3):  # as each trial is added
        end_at_once(controller, lambda: gone)
    controller._cleanup_trials()
    assert controller.cleaned == 1
    gone = True
    controller._cleanup_trials()
    assert controller.cleaned == 1


def test_a_connection_to_another_cluster_is_left_alone(ray_address: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        for port, told in (
            (1, "refused"),
            (other.getsockname()[1], f"connected to another one already, at {ray_address}"),
        ):
            with (
                pytest.raises(
                    ClusterError, match=rf"cluster.address 127.0.0.1:{port}: Ray could not be reached.*{told}"
                ),
                TuneRunner(Cluster(address=f"127.0.0.1:{port}"), Devices(), tmp_path / "ray.log"),
            ):
                pass
    assert ray.get_runtime_context().gcs_address == ray_address


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "http://127.0.0.1:8265"])
def test_an_address_of_another_kind_is_told_what_to_do_instead(address: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match=r"expected host:port .* `bsearch submit --launcher ray`"),
        TuneRunner(Cluster(address=address), Devices(), tmp_path / "ray.log"),
    ):
        pass


def test_devices_that_are_not_there_are_told(ray_address: str, tmp_path: Path) -> None:
    with (
        pytest.raises(
            StudyFileError, match=r"devices.kind: expected a GPU that trials can use; torch can use no GPU"
        ),
        TuneRunner(Cluster(address=ray_address), Devices(kind="gpu"), tmp_path / "ray.log"),
    ):
        pass
