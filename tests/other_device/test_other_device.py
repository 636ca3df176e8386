"""Trainings and studies on an accelerator that is not CUDA's: nothing says `cuda` by habit, or takes double precision for
granted.
"""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from bsearch.objectives.machine import accelerator
from bsearch.objectives.machine.gpus import usable_gpus
from conftest import BSEARCH, small_study
from device_trainings import (
    CONVNET,
    CONVOLVED,
    DIGITS,
    LOOP,
    SAME,
    SIMILAR,
    check_similar,
    curve,
    flat,
    resumed,
)
from fake_gpu.child import TESTS, returned

from other_device.build import environment

pytestmark = pytest.mark.long

GPT_OPTIONS = {"parameters": {"width": 32, "depth": 1}, "budget": 96, "metric": "bits_per_byte"}
GPT = (f"{TESTS.parent / 'examples' / 'gpt' / 'tasks.py'}:GPT", GPT_OPTIONS)
# Without double precision: their models are in it, or torch's loss scaler needs it.
DOUBLE = {"gradient caching", "two towers", "fp16, scaled"}


def trainings() -> dict[str, Any]:
    found: dict[str, Any] = {"usable": asdict(usable_gpus(tries=True)), "same": {}, "similar": {}}
    for name, (reference, options) in {**SAME, "gpt": GPT}.items():
        found["same"][name] = [curve(reference, **options), curve(reference, device="gpu", **options)]
    for name, (reference, options, _) in SIMILAR.items():
        found["similar"][name] = [curve(reference, **options), curve(reference, device="gpu", **options)]
    found["resumed"] = {"convnet": resumed(CONVNET), "own loop": resumed(LOOP)}
    found["left"] = used_bytes()
    found["too large"] = curve(CONVNET, device="gpu", batch=400, budget=800, parameters={"width": 6000})
    found["left then"] = used_bytes()
    return found


def in_single() -> dict[str, Any]:
    cases = {**SAME, "gpt": GPT, **{name: case[:2] for name, case in SIMILAR.items()}}
    return {
        name: [curve(reference, **options), curve(reference, device="gpu", **options)]
        for name, (reference, options) in cases.items()
        if name not in DOUBLE
    }


def used_bytes() -> int:
    free, total = accelerator.memory_info()
    return total - free


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return returned(trainings, environment())


@pytest.fixture(scope="module")
def found_in_single() -> dict[str, Any]:
    return returned(in_single, environment(TWIN_WITHOUT_DOUBLE="1"))


def test_it_is_asked_as_any_gpu_is(found: dict[str, Any]) -> None:
    total = 1 << 30
    (one,) = found["usable"]["gpus"]
    assert 0 < one.pop("free_bytes") <= total
    assert one == {"name": "a twin of the host", "capability": [0, 0], "total_bytes": total, "fault": ""}
    assert not found["usable"]["reason"]


@pytest.mark.parametrize("name", [*SAME, "gpt"])
def test_losses_and_scores_are_the_cpus(found: dict[str, Any], name: str) -> None:
    on_cpu, on_device = found["same"][name]
    assert len(on_cpu) == 2
    if name == "gpt":  # the plain formula of attention, instead of the CPU's kernel
        assert flat(on_device) == pytest.approx(flat(on_cpu), rel=1e-5)
    elif name in CONVOLVED:
        assert flat(on_device) == pytest.approx(flat(on_cpu), rel=1e-6)
    else:
        assert on_device == on_cpu


@pytest.mark.parametrize("name", SIMILAR)
def test_other_precisions_are_close_to_the_cpus(found: dict[str, Any], name: str) -> None:
    check_similar(*found["similar"][name], SIMILAR[name][2])


@pytest.mark.parametrize("name", [name for name in (*SAME, "gpt", *SIMILAR) if name not in DOUBLE])
def test_a_device_without_double_precision_trains_all_the_same(
    found_in_single: dict[str, Any], name: str
) -> None:
    on_cpu, on_device = found_in_single[name]
    assert flat(on_device) == pytest.approx(
        flat(on_cpu), rel=1e-2 if "bf16" in name else 1e-5, abs=0.02 if "bf16" in name else 0
    )


@pytest.mark.parametrize("name", ["convnet", "own loop"])
def test_a_training_resumes_from_its_checkpoint_to_the_same_bits(found: dict[str, Any], name: str) -> None:
    case = found["resumed"][name]
    assert case["left"] == "interrupted"
    assert case["again"] == case["whole"]
    assert case["resumed_at"][-1]


def test_memory_is_given_back_and_running_out_of_it_is_known_as_such(found: dict[str, Any]) -> None:
    assert found["left"] == found["left then"] == 0
    (refused,) = found["too large"]
    assert refused.startswith("out_of_memory: twin out of memory.")


@pytest.mark.long
def test_a_study_finds_and_uses_it(tmp_path: Path) -> None:
    study = small_study(task=DIGITS, budget={"trials": 2, "profile_s": 2}, devices={"kind": "gpu"})
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    command = [BSEARCH, "run", "study.yaml", "--serial"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[2/2]" in done.stderr + done.stdout
    assert "1.00 GiB per device" in done.stderr + done.stdout
