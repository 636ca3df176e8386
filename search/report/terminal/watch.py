"""Following a study that another process runs, through its database: the same picture as its driver shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ....spaces.errors import NoStudyError
from ....spaces.readable import out_of, plural, seconds
from ....spaces.record import TrialRecord, counted
from ....spaces.study.spec import StudySpec
from ....spaces.trial import COUNTED, Measurement, TrialSetup
from ...analysis.pareto import study_front
from ...run.decisions.eta import Span
from ...run.view import StudyView, span_of, study_view
from ...store.database import UNAVAILABLE_LIMIT_S, RetryPolicy
from ...store.lock import Driver
from ...store.rows import AttemptRow, MeasurementRow, StudyRow
from ...store.stored import StoredStudy
from ...store.tables import Tables
from ...store.trials import Trials
from ...store.url import shown_url
from .live import LiveView

# Attempts from which the time left is estimated; older ones say little about the present pace.
_LATEST_ATTEMPTS = 100
# A study that somebody is starting in another window has a driver within this time.
_BEGINS_S, _LOOKS_S = 60.0, 1.0
# Seconds between two looks at the database.
_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class WatchEnd:
    """Why there is nothing left to watch; `done` if the study has met its budget."""

    why: str
    done: bool


def begun_study(open_study: Callable[[], StoredStudy], say: Callable[[str], None]) -> StoredStudy:
    """A study, which a driver that is about to begin may yet have to create.

    Raises:
        NoStudyError: no driver has begun within a minute.
    """
    until, said = time.monotonic() + _BEGINS_S, False
    while True:
        try:
            return open_study()
        except NoStudyError:
            if time.monotonic() > until:
                raise
            if not said:
                say(f"waiting up to {_BEGINS_S:.0f} s for the study to begin ...")
            said = True
        time.sleep(_LOOKS_S)


def watch_study(study: StoredStudy, show: LiveView, budget: int = 0) -> WatchEnd:
    """Show a study that another process drives, until its budget is met or it has no driver.

    Reads only. An unavailable database is retried for as long as a driver would.

    Args:
        budget: trials of the study file's, which may have been raised since the study ran.

    Raises:
        StorageError: the database stayed unavailable.
    """
    retry_policy = RetryPolicy(study.url, show.say, UNAVAILABLE_LIMIT_S)
    tables = Tables(study.url, create=False, retry_policy=retry_policy)
    seen: list[StudyView] = []  # the latest, once there is one
    shown: set[tuple[int, bool]] = set()
    begins_until: float | None = time.monotonic() + _BEGINS_S
    try:
        trials = Trials(tables, study.name)
        while True:
            # Read before the trials, so that those a driver ended before it exited are among them.
            driver, row = tables.lock.driver(study.name), tables.study(study.name)
            if row is None or tables.vanished():
                return WatchEnd(f"{study.name} is gone from {shown_url(study.url)}: it was deleted.", False)
            trials.refresh()
            spec = row.study
            view = _view(
                row, spec, list(trials), tables.latest_attempts(study.name, _LATEST_ATTEMPTS), driver
            )
            if not seen:
                if view.counted:
                    show.say(f"{out_of(view.counted, view.trials, ' of ')} trials are done")
                show.show(lambda: seen[-1] if seen else None)
            elif news := [
                record for record in view.records if (record.number, record.has_ended) not in shown
            ]:
                for record in sorted(news, key=lambda record: record.ended_at):
                    show.ended(record, view.counted, view.trials, view.front.metric)
            seen[:], shown = [view], {(record.number, record.has_ended) for record in view.records}
            if driver is not None:
                begins_until = None
            end = _end(view, spec, row, driver, budget)
            if end is not None and (end.done or begins_until is None or time.monotonic() > begins_until):
                return end
            time.sleep(_EVERY_S)
    finally:
        tables.close()


def driver_sentence(study: StoredStudy) -> str:
    """Who runs a study now, or that nobody does although trials have begun; empty where none has."""
    tables = study.tables()
    try:
        driver = tables.lock.driver(study.name)
    finally:
        tables.close()
    if driver is not None and not driver.gone:
        return f"{study.name} is {_driver_words(driver)}."
    begun = sum(record.outcome == "running" for record in study.records)
    if driver is None and not begun:
        return ""
    left = f"; {plural(begun, 'trial')} had begun" if begun else ""
    return f"No driver is running {study.name}{left}. `bsearch run` resumes it."


def studies_now(url: str, names: Collection[str]) -> dict[str, StudyView]:
    """These studies of a storage as they stand now, by the name in their study files; the newest of several of one name.

    Raises:
        StorageError: the storage cannot be read.
    """
    tables = Tables(url, create=False)
    found: dict[str, StudyView] = {}
    try:
        for row in {row.base_name: row for row in tables.studies() if row.base_name in names}.values():
            attempts = tables.latest_attempts(row.name, _LATEST_ATTEMPTS)
            driver = tables.lock.driver(row.name)
            found[row.base_name] = _view(row, row.study, tables.trials(row.name), attempts, driver)
    finally:
        tables.close()
    return found


def progress_facts(view: StudyView) -> dict[str, Any]:
    """A study's progress in numbers, for a table of jobs and as JSON.

    `best` is the front's best value of the metric, `eta_s` the estimated seconds left; None where there is none.
    """
    best = view.front.best.accuracy if view.front.best else None
    eta_s = view.eta_s if view.running else None
    return {
        "done": view.counted,
        "trials": view.trials,
        "metric": view.front.metric,
        "best": best,
        "eta_s": eta_s,
    }


def _view(
    stored: StudyRow,
    spec: StudySpec,
    records: list[TrialRecord],
    attempts: list[tuple[AttemptRow, TrialSetup, MeasurementRow | None]],
    driver: Driver | None,
) -> StudyView:
    now_s = time.time()
    by_number = {record.number: record for record in records}
    running: list[tuple[TrialSetup, Measurement | None, str, Span]] = []
    ended: list[Span] = []
    for row, setup, last in attempts:
        record = by_number.get(row.number)
        if record is None:
            continue
        measured = None if last is None else last.measurement()
        known_s = record.train_s if record.facts.train_s_source == "known" else None
        started_s = _epoch_s(row.started_at)
        if row.ended_at:
            counts = row.outcome in COUNTED and record.counts
            ended.append(span_of(setup, measured, known_s, started_s, _epoch_s(row.ended_at), counts=counts))
        elif record.outcome == "running" and driver is not None and not driver.gone:
            host = record.facts.host or ""
            running.append((setup, measured, host, span_of(setup, measured, known_s, started_s)))
    done = tuple(record for record in records if record.has_ended or record.outcome == "paused")
    return study_view(
        stored.name,
        spec,
        study_front(done, spec.objectives),
        done,
        running,
        ended,
        now_s=now_s,
        counted=counted(records),
        elapsed_s=stored.driver_s if driver is None else max(now_s - driver.since.timestamp(), 0.0),
        driven_s=stored.driver_s,
        driver="" if driver is None else _driver_words(driver),
        deadline=stored.deadline,
    )


def _driver_words(driver: Driver) -> str:
    since = driver.since.astimezone().strftime("%Y-%m-%d %H:%M")
    return f"run by process {driver.process} on {driver.host} since {since}, seen {max(driver.silent_s, 0):.0f} s ago"


def _end(
    view: StudyView, spec: StudySpec, stored: StudyRow, driver: Driver | None, budget: int
) -> WatchEnd | None:
    if driver is not None and not driver.gone:
        return None
    most = max(view.trials, budget)
    done = f"{view.counted} of {most} trials are done"
    if view.counted >= most:
        return WatchEnd(f"{view.name} is done: {done}.", True)
    if spec.budget.hours is not None and stored.driver_s >= spec.budget.hours * 3600:
        return WatchEnd(
            f"{view.name} is done: budget.hours: {spec.budget.hours:g} h are used up; {done}.", True
        )
    spent = sum(record.facts.spent or 0.0 for record in view.records)
    if spec.budget.cost is not None and spent >= spec.budget.cost:
        return WatchEnd(f"{view.name} is done: budget.cost: {spec.budget.cost:g} is spent; {done}.", True)
    if driver is None:
        return WatchEnd(f"No driver is running {view.name}: {done}. `bsearch run` resumes it.", False)
    return WatchEnd(
        f"The driver of {view.name} is gone: process {driver.process} on {driver.host} sent its last heartbeat "
        f"{seconds(max(driver.silent_s, 0.0))} ago; {done}. `bsearch run` resumes it.",
        False,
    )


def _epoch_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
