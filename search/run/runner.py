"""TODO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from ...spaces.device import DeviceProfile, ProfileRequest
from ...spaces.trial import Measurement, TrialRecord, TrialSetup
from .study_run import StudyRun

Wait = Literal["wait"]


class Runner(Protocol):
    """Where attempts run. It ends when `StudyRun.next_attempt` gives None or `StudyRun.stopping` says why."""

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """What one trial runs on here."""

    @property
    def slots(self) -> int:
        """Trials that run side by side."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices here by their makers' names, those with the most room first; `""` where they tell none."""

    def device_id(self, kind: str = "") -> str:
        """What makes profiles of one device useless for another; known without asking a worker."""

    def profile(self, reference: str, request: ProfileRequest, kind: str = "") -> DeviceProfile:
        """Try the training code on a worker's device of a kind."""

    def run(self, study: StudyRun) -> None:
        """Run attempts until there are none; every attempt taken is ended, unless the study is stopping."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something a person who watches wants to know."""

    kind: Literal["studied", "started", "measured", "ended", "message"]
    setup: TrialSetup | None = None
    measurement: Measurement | None = None
    record: TrialRecord | None = None
    text: str = ""
