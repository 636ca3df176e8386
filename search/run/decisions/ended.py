"""The trials of a study that do not train now: those that have ended, and those that are paused."""

from __future__ import annotations

from collections.abc import Iterable

from ....spaces.front import ParetoFront
from ....spaces.record import TrialRecord, counted
from ....spaces.study.goals import Objectives
from ...analysis.pareto import study_front

# Ended trials after which it is said that nothing reaches the metric's floor.
_SAID_AFTER = 10


class EndedTrials:
    """What counts towards the budget so far, and the front.

    Attributes:
        done: trials that have ended, in the order of their ends.
        counted: how many of them count.
        paused: by number, those that may go on.
    """

    def __init__(self, records: Iterable[TrialRecord], objectives: Objectives) -> None:
        records, self._objectives = list(records), objectives
        self.done = [record for record in records if record.has_ended]
        self.counted = counted(self.done)
        self.paused = {record.number: record for record in records if record.is_paused}
        self._front, self._repeats = (0, study_front([], objectives)), False  # of the first so many of `done`

    def end(self, record: TrialRecord) -> None:
        """A trial has ended."""
        self.done.append(record)
        self.counted += record.counts

    def far_from_floor(self) -> str | None:
        """What is said once, when so many trials have ended and none reaches the metric's floor; else None."""
        if len(self.done) != _SAID_AFTER:
            return None
        metric, best = self._objectives.metric, self.front().best
        if best is None or best.score is None or best.score >= metric.least_score:
            return None
        return (
            f"none of {_SAID_AFTER} trials reaches {metric.name} {metric.floor:.12g}; the best, trial {best.number}, has "
            f"{best.accuracy:.6g}: until one does, the search goes on without that bound"
        )

    def front(self) -> ParetoFront:
        """The front of `done`; a live view asks several times a second."""
        known, front = self._front
        if known != (ended := len(self.done)):
            new = self.done[known:ended]
            # A repeat changes its setting's mean, and all that was beside it; any other trial meets the front alone.
            self._repeats = self._repeats or any(record.is_repeat for record in new)
            front = study_front(
                self.done[:ended] if self._repeats else [*front.trials, *new], self._objectives
            )
            self._front = ended, front
        return front
