"""The Runner in this very process: one trial after the other, no cluster; for small studies, checks and tests."""

from __future__ import annotations

from contextlib import closing
from typing import Literal

import torch

from ..objectives.probe import profile_objective
from ..objectives.trial import start_attempt
from ..spaces.device import DeviceProfile
from ..spaces.study import Devices
from ..spaces.trial import Measurement, TrialSetup
from .study_run import StudyRun


class SerialRunner:
    """Runs each attempt where the driver runs."""

    slots = 1

    def __init__(self, devices: Devices) -> None:
        self.device: Literal["cpu", "gpu"] = devices.kind_with(torch.cuda.device_count())

    def profile(self, reference: str, setup: TrialSetup) -> DeviceProfile:
        return profile_objective(reference, setup)

    def run(self, study: StudyRun) -> None:
        while True:
            setup = study.next_attempt()
            if setup is None or setup == "wait":  # nothing else runs here that could bring more
                return
            with closing(start_attempt(study.spec.task, setup)) as attempt:  # type: ignore[type-var]  # a generator
                for report in attempt:
                    if not isinstance(report, Measurement):
                        study.ended(setup.number, report)
                    elif not study.measured(setup.number, report):
                        return
