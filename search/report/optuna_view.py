"""A study as Optuna's dashboard shows it: a copy of its trials in Optuna's tables, with written notes.

It is kept by a thread beside the study, which no trial waits for, and brought up to date by the next run, by
`bsearch dashboard` and by `bsearch export --to optuna`. Nothing is read back from it (docs/decisions/0058).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from ...spaces.errors import BsearchError
from ...spaces.front import ParetoFront
from ...spaces.readable import shell_word
from ...spaces.record import TrialRecord, counted
from ...spaces.study.spec import StudySpec
from ..run.study_run import StudyRun
from ..store.stored import StoredStudy
from ..store.tables import Tables
from ..store.url import shown_url
from ..suggest.optuna.database import OptunaDatabase
from ..suggest.space_transform import SearchSpace
from .notes import study_note, trial_note
from .sentences import front_summary

PAGES = "/dashboard/studies"
# Seconds between two updates, and after one that failed.
_EVERY_S, _RETRY_S = 1.0, 30.0
# From this many trials on only members of the front and failures have a note: the dashboard compares each trial with each note,
# at every request (2,000 of both took 5 s; docs/decisions/0058).
_NOTED = 300
# How long a driver whose study is over waits for the last update.
_LAST_S = 20.0


class OptunaView:
    """The copy of one study.

    Args:
        url: of the database that the study is in.
        to: of the database that holds the copy; not given, the same.

    Raises:
        StorageError: that cannot be opened, or holds something else of this name.
    """

    def __init__(self, url: str, name: str, spec: StudySpec, to: str | None = None) -> None:
        self._name, self._spec = name, spec
        self._study = shell_word(f"{shown_url(url)}#{name}")  # as commands name it
        self._tables = Tables(url, create=False)
        self._copy = OptunaDatabase(to or url, name, spec.objectives, SearchSpace.of(spec.domains()))
        self._front: ParetoFront | None = None  # as of the last update
        self._summary: Sequence[str] = ()
        self._tracebacks: dict[int, str] = {}

    @property
    def page(self) -> str:
        """Where the dashboard serves it."""
        return f"{PAGES}/{self._copy.id}"

    def update(self, records: Sequence[TrialRecord], front: ParetoFront, summary: Sequence[str] = ()) -> None:
        """Copy what has changed, and rewrite the notes that it changes.

        Args:
            summary: sentences about the front.

        Raises:
            StorageError: the database refuses, or it holds a study of this name that is no copy.
        """
        changed = {record.number for record in self._copy.update(records)}
        functions = _note_functions()
        if functions is None or not (changed or self._front is None or summary != self._summary):
            return
        # Only notes of current and former members of the front, and of repeats of both, mention the front.
        members = {
            trial.number
            for version in (front, self._front)
            if version is not None
            for trial in version.trials
        }
        notes: dict[int | None, str] = {
            record.number: trial_note(record, front, study=self._study, traceback=self._traceback(record))
            for record in records
            if record.outcome != "running"
            and (
                record.setting in members
                or (record.number in changed and (record.number < _NOTED or record.outcome == "error"))
            )
        }
        done = counted(records)
        notes[None] = study_note(
            self._name, self._spec, front, done, summary, study=self._study, page=self.page
        )
        self._copy.annotate(notes, *functions)
        self._front, self._summary = front, summary

    def close(self) -> None:
        self._copy.close()
        self._tables.close()

    def _traceback(self, record: TrialRecord) -> str:
        if record.outcome != "error":
            return ""
        if record.number not in self._tracebacks:
            attempts = self._tables.attempts(self._name, record.number)
            self._tracebacks[record.number] = next(
                (row.traceback for row in reversed(attempts) if row.traceback), ""
            )
        return self._tracebacks[record.number]


def copy_now(stored: StoredStudy, to: str | None = None) -> OptunaView:
    """A study's copy, up to date, with sentences about its front where they need no new fit.

    A copy beside the study that a running driver keeps up to date is left to that driver.

    Args:
        to: as for `OptunaView`.

    Raises:
        StorageError: as `OptunaView`.
    """
    view = OptunaView(stored.url, stored.name, stored.spec, to)
    with closing(stored.tables()) as tables:
        driver = tables.lock.driver(stored.name)
    if to is not None or driver is None or driver.gone:
        view.update(
            stored.records,
            stored.front,
            tuple(front_summary(stored)) if stored.current_rates() is not None else (),
        )
    return view


@contextmanager
def kept_copy(say: Callable[[str], None]) -> Iterator[Callable[[StudyRun], None]]:
    """Context manager that keeps a run's copy up to date; yields the function that starts this, once the run is known.

    Args:
        say: called with the reason when the copy cannot be kept up to date.
    """
    threads: list[_Keeping] = []

    def start(run: StudyRun) -> None:
        threads.append(_Keeping(run, say))
        threads[-1].start()

    try:
        yield start
    finally:
        for thread in threads:
            thread.over.set()
            thread.join(_LAST_S)


class _Keeping(threading.Thread):
    """Keeps the copy of a study that this process drives."""

    def __init__(self, run: StudyRun, say: Callable[[str], None]) -> None:
        super().__init__(name="bsearch-optuna", daemon=True)
        self._run, self._say = run, say
        self.over = threading.Event()
        self._view: OptunaView | None = None
        self._said = ""

    def run(self) -> None:
        last, wait_s = False, _EVERY_S
        while not last:
            last, wait_s = self.over.wait(wait_s), _EVERY_S
            try:
                self._update()
            except Exception as error:  # a failure of the copy must not end the study
                self._close()
                wait_s = _RETRY_S
                said = str(error) if isinstance(error, BsearchError) else f"{type(error).__name__}: {error}"
                if self._said != said:
                    self._said = said
                    self._say(f"the copy for Optuna's dashboard is not up to date: {said}")
        self._close()

    def _close(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    def _update(self) -> None:
        run = self._run
        self._view = self._view or OptunaView(run.tables.url, run.name, run.spec)
        self._view.update(list(run.trials), run.ended.front())


def _note_functions() -> tuple[Any, Any] | None:
    """The dashboard's functions that read and write a note; None where it is not installed."""
    try:
        from optuna_dashboard import get_note, save_note
    except ImportError:
        return None
    return get_note, save_note
