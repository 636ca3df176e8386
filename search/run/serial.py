"""The Runner of one trial after the other, without Ray; for small studies, checks and tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Literal

from ...objectives.attempts import leave, profiled, start_attempt
from ...objectives.machine.device import device_name
from ...objectives.machine.gpus import UsableGpus, usable_gpus
from ...objectives.machine.host import cores_here
from ...objectives.state.leaving import stay
from ...spaces.errors import Fault, StudyFileError
from ...spaces.laws.device import DeviceProfile, ProfileRequest
from ...spaces.study.devices import Devices
from ...spaces.trial import Measurement, Outcome, TrialSetup
from .decisions.ending import Stage
from .study_run import StudyRun


class SerialRunner:
    """Runs each attempt in a process that the driver starts."""

    slots = 1
    kinds = ("",)
    owns_workers = True

    def __init__(self, devices: Devices) -> None:
        self._saves = False  # the running attempt writes checkpoints
        usable = UsableGpus() if devices.kind == "cpu" else usable_gpus()
        self.device: Literal["cpu", "gpu"]
        self.device, sentence = devices.kind_with(usable.count, usable.reason)
        # What the user may not expect: a GPU that cannot be used.
        self.notice = sentence if devices.kind == "auto" and usable.reason else ""
        devices.check_share(self.device)
        have, things = usable.count, "GPUs"
        self.cores = devices.cores(self.device, cores_here() // max(have, 1))
        if self.device == "cpu":
            have, things = cores_here() // self.cores, f"times {self.cores} cores"
        if max(devices.counts) > max(have, 1):
            message = f"expected at most the {have} {things} of this machine, got {max(devices.counts)}"
            raise StudyFileError(Fault("devices.per_trial", message))

    def __enter__(self) -> SerialRunner:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to close."""

    def device_id(self, kind: str = "") -> str:
        return device_name(self.device)

    def profile(self, reference: str, request: ProfileRequest, kind: str = "") -> DeviceProfile:
        return profiled(reference, request)

    def attempt(self, reference: str, setup: TrialSetup) -> Iterator[Measurement | Outcome]:
        return start_attempt(reference, setup)

    def leave(self) -> bool:
        if self._saves:
            leave()
        return self._saves

    def run(self, study: StudyRun) -> None:
        stay()  # whatever was asked of an earlier run
        while True:
            setup = study.next_attempt()
            # Nothing else runs here.
            if setup is None or setup == "wait" or study.ending.stage >= Stage.LEAVING:
                return
            self._saves = setup.checkpoint is not None
            study.begun(setup.number)
            with closing(start_attempt(study.spec.task, setup)) as attempt:  # type: ignore[type-var]  # a generator
                outcome = Outcome("stopped")
                for report in _interruptible(study, attempt):
                    if not isinstance(report, Measurement):
                        outcome = report
                    elif study.report(setup.number, report, socket.gethostname()):
                        break
            if study.ending.stage is Stage.STOPPED and outcome.kind == "stopped":
                return  # interrupted; `StudyRun.sweep` queues it again
            study.end(setup.number, outcome)


def _interruptible(
    study: StudyRun, attempt: Iterator[Measurement | Outcome]
) -> Iterator[Measurement | Outcome]:
    """The attempt's reports; Ctrl-C breaks into the user's code, never into ours between two reports."""
    while True:
        study.interruptible = True
        try:
            report = next(attempt, None)
        finally:
            study.interruptible = False
        if report is None:
            return
        yield report
