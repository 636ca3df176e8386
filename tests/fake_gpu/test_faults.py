"""What goes wrong on a GPU: memory that ends in every library's words, a failed assertion, neighbours, a broken card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bsearch.objectives import trial
from bsearch.objectives.machine.device_memory import is_out_of_memory, memory_is_short
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.errors import BsearchError
from bsearch.spaces.trial import Measurement
from helpers import bsearch, setup

from fake_gpu import device as fake
from fake_gpu.child import environment, in_child
from fake_gpu.device import ASSERT, MIB, Cards

FAULTY, CONVNET = "fake_gpu.tasks:Faulty", "fake_gpu.tasks:ConvNet"

OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB of which 1.1 GiB is free.",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "Triton Error [CUDA]: out of memory",
    "HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.98 GiB",
    "HIP error: out of memory",
    "XPU out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of 63.98 GiB",
    "MIOpen Error: miopenStatusAllocFailed",
    "MPS backend out of memory (MPS allocated: 18.07 GB, other allocations: 384.00 KB, max allowed: 18.13 GB)",
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes. Error code 12 (Cannot allocate memory)",
]
# Said of other faults too, such as a kernel that is missing, or a library that does not match the driver.
AMBIGUOUS = [
    "GET was unable to find an engine to execute this computation",
    "cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
]
OTHERS = [
    ASSERT,
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
    "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error\nLast error:\nCuda failure 700 'an illegal memory access'",
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes may help.",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
]


@pytest.mark.parametrize("text", OUT_OF_MEMORY)
@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_memory_that_ends_is_known_in_every_librarys_words(text: str, kind: type[RuntimeError]) -> None:
    assert is_out_of_memory(kind(text))
    wrapped = ValueError("while loading")
    wrapped.__cause__ = kind(text)
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_what_may_be_said_of_memory_is_of_memory_where_little_is_free(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_out_of_memory(RuntimeError(text))
    monkeypatch.setattr("bsearch.objectives.machine.device_memory.memory_is_short", lambda: True)
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("text", OTHERS)
def test_other_errors_of_a_gpu_are_not_of_memory(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


# What ends a trial


def outcome_of(reference: str = FAULTY, **options: Any) -> list[Any]:
    """How an attempt ended: the outcome's kind, message and failed micro-batch; or `raised` and the error."""
    try:
        *_, outcome = trial.attempt(reference, setup(**{"device": "gpu", "number": 1, **options}))
    except Exception as error:
        return ["raised", f"{type(error).__name__}: {str(error).splitlines()[0]}", None]
    return [outcome.kind, outcome.message, outcome.micro_batch]  # type: ignore[union-attr]


def trials() -> dict[str, Any]:
    card = fake.card()
    found: dict[str, Any] = {"spellings": [outcome_of(parameters={"fault": text}) for text in OUT_OF_MEMORY]}
    card.neighbour_bytes = card.total_bytes - 30 * MIB
    found["short"] = [memory_is_short(), outcome_of(parameters={"fault": AMBIGUOUS[0]})[0]]
    card.neighbour_bytes = 0
    found["not short"] = [memory_is_short(), outcome_of(parameters={"fault": AMBIGUOUS[0]})[0]]
    found["after them"] = [card.allocator.live_bytes, card.allocator.reserved_bytes]
    wide = {"width": 64}
    card.neighbour_bytes = card.total_bytes - 60 * MIB
    found["neighbour"] = outcome_of(CONVNET, batch=400, budget=800, parameters=wide)
    found["beside it"] = outcome_of(CONVNET, batch=400, accumulation=40, budget=800, parameters=wide)
    card.neighbour_bytes = 0
    found["evaluation"] = evaluation()
    found["assert"] = outcome_of(parameters={"fault": "assert"})
    found["after the assert"] = outcome_of(number=2)
    return found


def evaluation() -> list[Any]:
    """Memory ends in the first evaluation: not the training's micro-batch is to blame."""
    card = fake.card()
    attempt = trial.attempt(CONVNET, setup(device="gpu", batch=10, budget=800, parameters={"width": 256}))
    first = next(attempt)
    assert isinstance(first, Measurement)
    card.limit_bytes = card.allocator.live_bytes + 1 * MIB
    card.allocator.release_cached()
    # A larger batch than training's does not fit.
    *_, outcome = attempt
    card.limit_bytes = float("inf")
    return [outcome.kind, outcome.micro_batch]  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return in_child(trials)


@pytest.mark.long
def test_a_trial_ends_out_of_memory_in_every_librarys_words(found: dict[str, Any]) -> None:
    for text, (kind, message, micro_batch) in zip(OUT_OF_MEMORY, found["spellings"], strict=True):
        assert (kind, message, micro_batch) == ("out_of_memory", text.splitlines()[0], 32)
    assert found["after them"] == [0, 0]


@pytest.mark.long
def test_an_ambiguous_error_is_of_memory_where_little_is_free(found: dict[str, Any]) -> None:
    assert found["short"] == [True, "out_of_memory"]
    assert found["not short"] == [False, "error"]


@pytest.mark.long
def test_a_neighbour_that_takes_memory_ends_a_trial_but_not_a_smaller_micro_batch(
    found: dict[str, Any],
) -> None:
    kind, message, micro_batch = found["neighbour"]
    assert (kind, micro_batch) == ("out_of_memory", 400)
    assert message.startswith("CUDA out of memory. Tried to allocate")
    assert found["beside it"][0] == "complete"


@pytest.mark.long
def test_a_failed_assertion_is_an_outcome_that_names_it(found: dict[str, Any]) -> None:
    kind, message, _ = found["assert"]
    assert kind == "error"
    assert "device-side assert triggered" in message


@pytest.mark.long
def test_a_trial_on_a_broken_card_is_interrupted_and_not_the_tasks_fault(found: dict[str, Any]) -> None:
    assert found["after the assert"][0] == "interrupted"


# What comes of it in a study


def study(name: str, **changes: Any) -> dict[str, Any]:
    """Run a study by the command line; what it printed, and what its database says."""
    folder = Path.cwd() / name
    folder.mkdir()
    os.chdir(folder)
    space = {
        "effective_batch": {"low": 40, "high": 60},
        "reference_rate": {"low": 0.02, "high": 0.5, "at_batch": 64},
    }
    values = {
        "study": name,
        "task": FAULTY,
        "space": {**space, "epochs": 1, **changes.pop("space", {})},
        "devices": {"kind": "gpu"},
        "training": {"evaluations": 1},
        "budget": {"trials": 2, "profile_s": 0},
        **changes,
    }
    Path("study.yaml").write_text(yaml.safe_dump(values))
    result = bsearch("run", "--serial", "study.yaml")
    os.chdir(folder.parent)
    try:
        records = StoredStudy.open(str(folder / "study.yaml")).records
    except BsearchError:  # it was refused before there was a database
        records = []
    return {
        "code": result.exit_code,
        "printed": result.output,
        "trials": [[one.outcome, one.message, one.facts.peak_reserved_bytes or 0] for one in records],
        "attempts": [one.facts.attempts for one in records],
    }


def studies() -> dict[str, Any]:
    found = {
        "well": study(
            "well",
            space={"fault": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"},
        )
    }
    found["assert"] = study("assert", space={"fault": "assert"})
    # For the profile's process; this one's card is already broken.
    os.environ[fake.VARIABLE] = Cards(broken="CUDA error: uncorrectable ECC error encountered").to_variable()
    found["broken"] = study("broken")
    return found


@pytest.fixture(scope="module")
def of_studies() -> dict[str, Any]:
    return in_child(studies)


@pytest.mark.long
@pytest.mark.long
def test_a_study_whose_second_trial_never_fits_goes_on(of_studies: dict[str, Any]) -> None:
    found = of_studies["well"]
    assert found["code"] == 0
    assert [outcome for outcome, _, _ in found["trials"]] == ["complete", "error", "complete"]
    assert found["trials"][0][2] > 0
    assert found["trials"][1][1].startswith(
        "a micro-batch of one sample does not fit: CUDA error: CUBLAS_STATUS_ALLOC_FAILED"
    )
    assert found["attempts"][1] >= 5
    assert "Front of well" in found["printed"]


@pytest.mark.long
@pytest.mark.long
def test_a_study_whose_second_trial_breaks_the_card_ends_in_words_for_its_user(
    of_studies: dict[str, Any],
) -> None:
    found = of_studies["assert"]
    assert "internal error" not in found["printed"]
    assert found["trials"][1][0] == "error"
    assert "device-side assert" in found["trials"][1][1]


@pytest.mark.long
@pytest.mark.long
def test_what_was_finished_before_the_card_broke_is_kept(of_studies: dict[str, Any]) -> None:
    assert of_studies["assert"]["trials"][0][0] == "complete"
    assert "device-side assert triggered" in of_studies["assert"]["printed"]


@pytest.mark.long
@pytest.mark.long
def test_a_card_that_is_broken_from_the_start_ends_the_run_in_words_for_its_user(
    of_studies: dict[str, Any],
) -> None:
    found = of_studies["broken"]
    assert found["code"] != 0
    assert "internal error" not in found["printed"]
    assert "ECC error" in found["printed"]


@pytest.mark.ray
@pytest.mark.long
def test_over_ray_a_trial_that_breaks_its_card_costs_no_other(tmp_path: Path) -> None:
    """Two cards, one trial on each; the process whose card a failed assertion has broken is replaced."""
    program = tmp_path / "nvidia-smi"  # a sign of a card, so that torch is asked
    program.write_text("#!/bin/sh\nexit 6\n")
    program.chmod(0o755)
    values = {
        "study": "over-ray",
        "task": FAULTY,
        "space": {
            "effective_batch": {"low": 40, "high": 60},
            "reference_rate": {"low": 0.02, "high": 0.5, "at_batch": 64},
            "epochs": 1,
            "fault": "assert",
        },
        "devices": {"kind": "gpu"},
        "training": {"evaluations": 1},
        "budget": {"trials": 4, "profile_s": 0},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(values))
    done = subprocess.run(
        [sys.executable, "-m", "bsearch", "run", "study.yaml"],
        cwd=tmp_path,
        env={**environment(Cards(count=2)), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trials = {one.number: one for one in StoredStudy.open(str(tmp_path / "study.yaml")).records}
    assert "device-side assert triggered" in trials[1].message
    assert [one.outcome for number, one in sorted(trials.items()) if number != 1] == ["complete"] * (
        len(trials) - 1
    )
    assert len(trials) == 5 and all(
        one.facts.peak_reserved_bytes for number, one in trials.items() if number != 1
    )
