"""The trials of a study that do not train now: those that have ended, and those that are paused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

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
    """

    def __init__(self, records: Iterable[TrialRecord], objectives: Objectives) -> None:
        records, self._objectives = list(records), objectives
        self.done = [record for record in records if record.has_ended]
        self._of_done = counted(self.done)
        self._paused: dict[int, TrialRecord] = {}
        self._shares: dict[int, float] = {}  # of their training that paused and resumed trials have had
        for record in records:
            if record.outcome == "paused" and not record.has_ended:
                self.pause(record)
        self._front, self._repeats = (0, study_front([], objectives)), False  # of the first so many of `done`

    @property
    def counted(self) -> float:
        """What trials count towards the budget, paused ones by the share of their training that they have had."""
        return round(self._of_done + sum(list(self._shares.values())), 6)

    @property
    def paused(self) -> Mapping[int, TrialRecord]:
        """Paused trials by number."""
        return MappingProxyType(self._paused)

    def to_train(self, numbers: Iterable[int]) -> float:
        """What running trials will have added to `counted` once they have ended."""
        return sum(1.0 - self._shares.get(number, 0.0) for number in numbers)

    def end(self, record: TrialRecord) -> None:
        """A trial has ended."""
        self.done.append(record)
        self._paused.pop(record.number, None)
        self._shares.pop(record.number, None)
        self._of_done += record.counts

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

    def pause(self, record: TrialRecord) -> None:
        """A trial was paused."""
        self._paused[record.number], self._shares[record.number] = record, record.counts

    def resume(self, record: TrialRecord) -> None:
        """A trial trains again, which may have been paused, now or before it was interrupted."""
        self._paused.pop(record.number, None)
        if record.facts.rung_fraction is not None:
            self._shares[record.number] = record.facts.rung_fraction

    def front(self) -> ParetoFront:
        """The front of `done`; a live view asks several times a second."""
        known, front = self._front
        if known != (ended := len(self.done)):
            new = self.done[known:ended]
            # A repeat changes its setting's mean, and all that was beside it; any other trial meets the front alone.
            self._repeats = self._repeats or any(record.is_repeat for record in new)
            front = study_front(self.done[:ended] if self._repeats else [*front.trials, *new], self._objectives)
            self._front = ended, front
        return front
