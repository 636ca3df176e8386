"""Machines with devices of two kinds share one study."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import optuna
import pytest
from bsearch.cluster.tune import TuneRunner
from bsearch.cluster.worker import gpu_memory
from bsearch.objectives.task_code import task_code_hash
from bsearch.search.run.driver import run_study
from bsearch.search.store.tables import Tables
from bsearch.spaces.study.file import read_study
from fake_gpu.child import environment
from fake_gpu.device import VARIABLE, Cards
from helpers import as_optuna

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def no_token_of_others() -> None:
    """A process reads Ray's token once, and tests before these may have had one of their own."""
    from ray._raylet import AuthenticationTokenLoader

    AuthenticationTokenLoader.instance().reset_cache()


@pytest.fixture
def two_kinds() -> Iterator[str]:
    """A Ray of two machines whose devices are of two kinds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster as Machines

        machines = Machines(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "include_dashboard": False,
                "resources": {"accelerator_type:FAST": 1},
            },
        )
        machines.add_node(num_cpus=2, resources={"accelerator_type:SMALL": 1})
        try:
            yield machines.address
        finally:
            machines.shutdown()


@pytest.mark.ray
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
                spec,
                nullcontext(runner),
                task_code_hash(spec.task),
                new=True,
                notify=lambda event: messages.append(event.text),
            )
        study = Tables(str(spec.storage)).studies()[-1].name
        return messages, as_optuna(str(spec.storage), study).trials

    messages, trials = go()
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 8
    assert {trial.user_attrs["device_kind"] for trial in trials} == {"FAST", "SMALL"}
    assert {trial.user_attrs["train_s_source"] for trial in trials} == {"known"}
    assert any("training times are those of SMALL" in text for text in messages)
    # Known times hang on the batch alone, not on where a trial ran.
    assert any("on a FAST" in text for text in messages)
    assert any("on a SMALL" in text for text in messages)
    _, trials = go(accelerator_type="FAST")
    # One kind: nothing to tell.
    assert "device_kind" not in {name for trial in trials for name in trial.user_attrs}


def nvidia_smi(folder: Path, mebibytes: int) -> Path:
    """A folder with a stand-in for NVIDIA's program, which says how much memory its GPUs have."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho {mebibytes}\n")
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("mebibytes", "name"), [(81920, "80GB"), (40960, "40GB"), (81559, "80GB"), (16384, "16GB")]
)
def test_memory_of_cards_is_told_as_they_are_named(
    mebibytes: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{nvidia_smi(tmp_path / 'bin', mebibytes)}:{os.environ['PATH']}")
    assert gpu_memory() == name
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory() == ""


@pytest.mark.parametrize(
    ("visible", "name"),
    [(None, "80GB"), ("", "80GB"), ("1", "40GB"), ("1, 0", "40GB"), ("-1", ""), ("MIG-1f0a", "80GB")],
)
def test_memory_is_that_of_the_gpus_that_may_be_used(
    visible: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in has a card of 80 GB and one of 40, and knows none of a negative number."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\nfor one; do case "$one" in --id=1*) echo 40960; exit;; --id=-*) exit 6;; esac; done\n'
        "echo 81920; echo 40960\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_memory() == name


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.long
def test_cards_of_one_name_and_two_sizes_are_two_kinds(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    """Ray's name is the same for both; three such machines, one of them smaller, and shares of their GPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster as Machines

        machines = Machines(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for number, mebibytes in enumerate((81920, 81920, 40960)):
                path = f"{nvidia_smi(tmp_path / str(number), mebibytes)}:{os.environ['PATH']}"
                resources = {"accelerator_type:A100": 1}
                # Ray is told of GPUs, and torch in its workers finds them, too.
                gpus = {name: environment(Cards(count=2))[name] for name in ("PYTHONPATH", VARIABLE)}
                machines.add_node(
                    num_cpus=6, num_gpus=2, resources=resources, env_vars={"PATH": path, **gpus}
                )
            spec = read_study(
                study_file(devices={"kind": "gpu", "per_trial": 0.5}, cluster={"address": machines.address})
            )
            with TuneRunner(spec.cluster, spec.devices, tmp_path / "ray.log") as runner:
                assert runner.kinds == ("A100 80GB", "A100 40GB")
                assert runner.cores == 1  # half of the three cores of a GPU
                assert runner.slots == 3 * 2 * 2
                assert runner.device_id("A100 40GB") != runner.device_id("A100 80GB")
        finally:
            machines.shutdown()
