"""The Runner in this process keeps the contract of all Runners."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
from bsearch.search.run.serial import SerialRunner
from bsearch.spaces.study import StudySpec
from runner_contract import RunnerContract


class TestSerialRunner(RunnerContract):
    @pytest.fixture
    def runner(self) -> Callable[[StudySpec], AbstractContextManager[SerialRunner]]:
        return lambda spec: nullcontext(SerialRunner(spec.devices))
