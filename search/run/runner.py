"""What runs attempts: the `Runner` interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Protocol

from ...spaces.laws.device import DeviceProfile, ProfileRequest
from ...spaces.trial import Measurement, Outcome, TrialSetup

if TYPE_CHECKING:
    from .study_run import StudyRun


class Runner(Protocol):
    """Where attempts run. It ends when `StudyRun.next_attempt` returns None or `StudyRun.ending` is at `STOPPED`.

    At `LEAVING` it ends as soon as no attempt trains any more.
    """

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """What one trial runs on here."""

    @property
    def owns_workers(self) -> bool:
        """Whether attempts run on this machine, in processes that this one started."""

    @property
    def cores(self) -> int:
        """CPU cores for each of a trial's devices."""

    @property
    def slots(self) -> int:
        """Trials that run side by side."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices here by their vendors' names, those with the most slots first; `""` where they are unnamed."""

    def device_id(self, kind: str = "") -> str:
        """Identifies the device that profiles are valid for; known without asking a worker."""

    def profile(self, reference: str, request: ProfileRequest, kind: str = "") -> DeviceProfile:
        """Profile the task on a worker's device of a kind."""

    def attempt(self, reference: str, setup: TrialSetup) -> Iterator[Measurement | Outcome]:
        """Run one attempt outside a study; the last report is its outcome. Closing it stops the attempt."""

    def leave(self) -> bool:
        """Ask the running attempts to write a checkpoint and end, from a signal handler; False where they cannot."""

    def run(self, study: StudyRun) -> None:
        """Run attempts until there are none; every attempt taken is ended, unless the study is stopping."""
