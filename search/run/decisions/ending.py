"""How a study ends: what it no longer does, and why."""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """How far a study has ended; each stage includes those before it."""

    GOES_ON = 0
    NO_NEW_TRIALS = 1  # nothing new is suggested; trials that run go on, and front members are still repeated
    LEAVING = 2  # running attempts write their checkpoints and end
    STOPPED = 3  # nothing runs any longer


class Ending:
    """The end of one run of a study, which any thread and a signal handler may bring closer, and nobody puts off.

    >>> ending = Ending()
    >>> ending.reach(Stage.NO_NEW_TRIALS, "no more to gain")
    >>> ending.reach(Stage.STOPPED, "budget.cost is spent")
    >>> ending.reach(Stage.STOPPED, "the driver was interrupted")
    >>> ending.stage.name, ending.why
    ('STOPPED', 'budget.cost is spent')
    """

    def __init__(self) -> None:
        self._reasons: dict[Stage, str] = {}  # set once per stage, atomically

    def reach(self, stage: Stage, why: str) -> None:
        """Go at least this far; the first reason of a stage is kept."""
        self._reasons.setdefault(stage, why)

    @property
    def stage(self) -> Stage:
        return max(list(self._reasons), default=Stage.GOES_ON)

    @property
    def why(self) -> str:
        """The reason of the stage that it has reached; empty while the study goes on."""
        return self._reasons.get(self.stage, "")
