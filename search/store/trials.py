"""A study's trials in the driver's memory, written through to their table."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import overload

from ...spaces.record import TrialFacts, TrialRecord, TrialResult
from ...spaces.study.goals import Objectives
from ...spaces.trial import OutcomeKind, Parameter
from .tables import Tables


class Trials(Sequence[TrialRecord]):
    """A study's trials by number. What changes is written at once, or with the tables' buffer.

    Args:
        tables: None keeps them in memory alone.
        study: its full name there.
        known: in memory alone, those to begin with.
        objectives: of the study.
    """

    def __init__(
        self,
        tables: Tables | None = None,
        study: str = "",
        known: Sequence[TrialRecord] = (),
        objectives: Objectives | None = None,
    ) -> None:
        self._tables, self._study, self._objectives = tables, study, objectives
        self._trials = list(known) if tables is None else tables.trials(study, objectives=objectives)
        self._adding = threading.Lock()

    @overload
    def __getitem__(self, place: int) -> TrialRecord: ...
    @overload
    def __getitem__(self, place: slice) -> list[TrialRecord]: ...
    def __getitem__(self, place: int | slice) -> TrialRecord | list[TrialRecord]:
        return self._trials[place]

    def __len__(self) -> int:
        return len(self._trials)

    def __iter__(self) -> Iterator[TrialRecord]:
        return iter(list(self._trials))  # others may begin meanwhile, in another thread

    def begin(self, parameters: Mapping[str, Parameter], facts: TrialFacts = TrialFacts()) -> TrialRecord:  # noqa: B008  # immutable
        """A new trial, running from here on. A driver's is written with what its attempt adds to it (`change`), or its end."""
        with self._adding:
            while True:
                started, direction = _now(), (self._objectives or Objectives()).metric.direction
                trial = TrialRecord.of(
                    len(self), "running", dict(parameters), facts, started_at=started, direction=direction
                )
                if self._tables is None or self._tables.writes is not None:
                    self._trials.append(trial)
                    return trial
                if self._tables.add_trial(self._study, trial):
                    self._trials.append(trial)
                    return trial
                self.refresh()

    def refresh(self) -> None:
        """Read what other processes have added or changed; not for a driver, which has its study to itself."""
        if self._tables is not None:
            self._trials[:] = self._tables.trials(
                self._study, dict(enumerate(self._trials)), self._objectives
            )

    def change(self, number: int, facts: TrialFacts, outcome: OutcomeKind | None = None) -> TrialRecord:
        """Add facts to a trial, and perhaps change its outcome, without ending it; returns the changed trial."""
        trial = self[number]
        return self._saved(trial.changed(outcome or trial.outcome, facts))

    def resume(self, number: int) -> TrialRecord:
        """Mark a paused or interrupted trial as running again; returns the changed trial."""
        return self._saved(self[number].changed("running"))

    def end(self, number: int, result: TrialResult) -> TrialRecord:
        """End a trial with its result; returns the ended trial. One that has already ended stays as it is."""
        trial = self[number]
        return trial if trial.has_ended else self._saved(trial.ended(result, _now()))

    def commit(self) -> None:
        """Write what is buffered.

        Raises:
            StorageError: the database refuses, or stays unavailable.
        """
        if self._tables is not None and self._tables.writes is not None:
            self._tables.writes.commit()

    def _saved(self, trial: TrialRecord) -> TrialRecord:
        self._trials[trial.number] = trial
        if self._tables is not None:
            self._tables.save_trial(self._study, trial)
        return trial


def _now() -> str:
    return datetime.now().isoformat(timespec="milliseconds")
