"""The Runner in this process keeps the contract of all Runners."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
from bsearch.search.run.serial import SerialRunner
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.study.devices import Devices
from bsearch.spaces.study.spec import StudySpec
from runner_contract import RunnerContract, StudyContract


class TestSerialRunner(RunnerContract, StudyContract):
    @pytest.fixture
    def runner(self) -> Callable[[StudySpec], AbstractContextManager[SerialRunner]]:
        return lambda spec: nullcontext(SerialRunner(spec.devices))


def test_a_share_of_a_cpu_is_refused() -> None:
    with pytest.raises(StudyFileError, match=r"devices\.per_trial: expected a whole number .* run on CPUs here, got 0\.5"):
        SerialRunner(Devices.model_validate({"per_trial": 0.5}))


@pytest.mark.parametrize(("cpus", "cores"), [("auto", 1), (2, 2)])
def test_a_trial_on_a_cpu_takes_one_core_unless_told_otherwise(cpus: int | str, cores: int) -> None:
    assert SerialRunner(Devices.model_validate({"kind": "cpu", "cpus": cpus})).cores == cores
