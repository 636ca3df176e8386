"""The Runner over Ray Tune keeps the contract of all Runners, and loses nothing when its workers die."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import optuna
import pytest
from bsearch.cluster.tune import TuneRunner
from bsearch.objectives.task_code import task_code_hash
from bsearch.search.run.driver import run_study
from bsearch.search.store.records import Records
from bsearch.spaces.errors import ClusterError, StudyFileError
from bsearch.spaces.study import Cluster, Devices, StudySpec
from bsearch.spaces.study_file import read_study
from runner_contract import Run, RunnerContract, kept_path

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]


class TestTuneRunner(RunnerContract):
    @pytest.fixture
    def runner(self, ray_address: str, tmp_path: Path) -> Callable[[StudySpec], AbstractContextManager[TuneRunner]]:
        return lambda spec: TuneRunner(spec.cluster, spec.devices, tmp_path / "ray.log")

    def test_a_killed_worker_costs_an_attempt_and_no_trial(self, go: Run, kept: Callable[[], optuna.Study]) -> None:
        go("KillsItsWorker", budget={"trials": 4})
        trials = kept().trials
        assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
        assert trials[1].user_attrs["attempts"] == 2
        rows = Records(f"sqlite:///{kept_path(kept())}").attempts("small", 1)
        assert [row["outcome"] for row in rows] == ["interrupted", "complete"]
        assert rows[0]["setup"]["optimizer"] == rows[1]["setup"]["optimizer"]

    @pytest.mark.long
    def test_a_trial_that_always_kills_its_worker_is_an_error(self, go: Run, kept: Callable[[], optuna.Study]) -> None:
        result = go("AlwaysKillsItsWorker", budget={"trials": 3})
        trials = kept().trials
        assert trials[1].state.name == "FAIL"
        assert "its worker died 3 times in a row" in trials[1].user_attrs["message"]
        assert sum(trial.state.name == "COMPLETE" for trial in trials) == 3
        assert result.failure == ""

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


@pytest.fixture
def two_kinds() -> Iterator[str]:
    """A Ray of two machines whose devices are of two kinds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster as Machines

        machines = Machines(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "resources": {"accelerator_type:FAST": 1}},
        )
        machines.add_node(num_cpus=1, resources={"accelerator_type:SMALL": 1})
        try:
            yield machines.address
        finally:
            machines.shutdown()


@pytest.mark.cluster
@pytest.mark.long
def test_mixed_kinds_share_a_study_priced_on_one_of_them(
    study_file: Callable[..., Path], tmp_path: Path, two_kinds: str
) -> None:
    def go(**devices: Any) -> tuple[list[str], list[optuna.trial.FrozenTrial]]:
        spec = read_study(
            study_file(
                devices=devices,
                budget={"trials": 8, "profile_s": 1},
                cluster={"address": two_kinds},
                sampler="random",
                stopping="none",
            )
        )
        messages: list[str] = []
        with TuneRunner(spec.cluster, spec.devices, tmp_path / "ray.log") as runner:
            run_study(
                spec, nullcontext(runner), task_code_hash(spec.task), new=True, notify=lambda event: messages.append(event.text)
            )
        study = spec.study if len(optuna.get_all_study_names(str(spec.storage))) == 1 else f"{spec.study}-2"
        return messages, optuna.load_study(study_name=study, storage=str(spec.storage)).trials

    messages, trials = go(time_on="SMALL")
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 8
    assert {trial.user_attrs["device_kind"] for trial in trials} == {"FAST", "SMALL"}
    assert {trial.user_attrs["train_s_source"] for trial in trials} == {"known"}
    assert any("training times are those of SMALL" in text for text in messages)
    # Known times hang on the batch alone, not on where a trial ran.
    assert any("on a FAST" in text for text in messages)
    assert any("on a SMALL" in text for text in messages)
    _, trials = go(accelerator_type="FAST")
    assert "device_kind" not in {name for trial in trials for name in trial.user_attrs}  # one kind: nothing to tell
    with pytest.raises(StudyFileError, match=r"devices.time_on: expected a kind of device that is here \(FAST, SMALL\)"):
        go(time_on="A100")


def test_a_cluster_that_is_not_there_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match=r"cluster.address 127.0.0.1:1: Ray could not be reached"),
        TuneRunner(Cluster(address="127.0.0.1:1"), Devices(), tmp_path / "ray.log"),
    ):
        pass


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
            ClusterError, match=r"a trial on 1 device needs 1 CPUs, 1 GPUs on one machine; there are machines with 2 CPUs"
        ),
        TuneRunner(Cluster(address=ray_address), Devices(kind="gpu"), tmp_path / "ray.log"),
    ):
        pass
