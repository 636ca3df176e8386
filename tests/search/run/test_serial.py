"""The Runner in this process keeps the contract of all Runners."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from bsearch.search.run.serial import SerialRunner
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.study.devices import Devices
from bsearch.spaces.study.spec import StudySpec
from conftest import TASKS
from helpers import run
from runner_contract import RunnerContract, StudyContract


class TestSerialRunner(RunnerContract, StudyContract):
    @pytest.fixture
    def runner(self) -> Callable[[StudySpec], AbstractContextManager[SerialRunner]]:
        return lambda spec: nullcontext(SerialRunner(spec.devices))


def test_a_share_of_a_cpu_is_refused() -> None:
    with pytest.raises(
        StudyFileError, match=r"devices\.per_trial: expected a whole number .* run on CPUs here, got 0\.5"
    ):
        SerialRunner(Devices.model_validate({"per_trial": 0.5}))


@pytest.mark.parametrize(("cpus", "cores"), [("auto", 1), (2, 2)])
def test_a_trial_on_a_cpu_takes_one_core_unless_told_otherwise(cpus: int | str, cores: int) -> None:
    assert SerialRunner(Devices.model_validate({"kind": "cpu", "cpus": cpus})).cores == cores


def test_a_trial_that_does_not_fit_one_sample_ends_and_the_study_goes_on(
    study_file: Callable[..., Path],
) -> None:
    path = study_file(task=f"{TASKS}:SecondNeverFits", budget={"trials": 3})
    run(path)
    records = StoredStudy.open(str(path)).records
    assert [one.outcome for one in records] == ["complete", "error", "complete", "complete"]
    assert records[1].message == "a micro-batch of one sample does not fit: tried to allocate 1 samples"
