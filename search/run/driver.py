"""The driver around a study's life: which study it is, what it begins with, its heartbeat, and how Ctrl-C ends it."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ...spaces.errors import Fault, LauncherError, StudyFileError
from ...spaces.planning import common_batches, known_seconds, legal_words, price_words, profile_faults
from ...spaces.storage import masked
from ...spaces.study import StudySpec
from ..analysis.pareto import study_front
from ..store.database import AWAY_LIMIT_S, DatabaseAway, Patience, network_storage
from ..store.lock import HEARTBEAT_S
from ..store.optuna_storage import trial_record
from ..store.records import Records
from ..store.stored import StoredStudy, study_identity
from ..suggest.suggester import Suggester
from ..suggest.warm_start import past_trials
from .profiles import prices_of, repriced_profiles, study_profiles
from .runner import Event, Runner
from .study_run import StudyRun


@dataclass(frozen=True, slots=True)
class StudyResult:
    """What a run of a study came to."""

    study: StoredStudy
    stopped: str  # why it ended before its budget; empty where it met it
    failure: str  # why it cannot go on; empty where it can
    interrupted: bool
    elapsed_s: float


def study_name(records: Records, spec: StudySpec, identity: Mapping[str, Any], *, fresh: bool) -> str:
    """The full name under which this study file's study is kept: its newest with the same identity.

    Raises:
        StudyFileError: the file changed in what may not change; with the differences.
    """
    kept = records.studies(spec.study)
    if not kept:
        return spec.study
    if fresh:
        return f"{spec.study}-{len(kept) + 1}"
    for study in reversed(kept):
        if study.identity == identity:
            return study.name
    newest = kept[-1]
    if {**newest.identity, "task": identity["task"]} == identity and not records.any_counted(newest.name):
        return newest.name  # its code never finished a trial, so mending it changes no experiment
    changes = list(differences(kept[-1].identity, identity))
    raise StudyFileError(
        [
            *(Fault(key, _changed(key, old, new)) for key, old, new in changes),
            Fault(
                "",
                f"study {kept[-1].name} was begun with other settings, and its trials would not compare with new ones. "
                "Put them back, begin afresh with --new, or give the study another name (warm_start: lets it learn from "
                "this one).",
            ),
        ]
    )


def _changed(key: str, old: Any, new: Any) -> str:
    changed = ": the task's file has changed since" if key == "task.code" else ""
    return f"was {old}, now {new}{changed}"


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every leaf in which two JSON values differ, as (key path, old, new)."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from differences(old.get(name), new.get(name), f"{key}.{name}".removeprefix("."))
    elif old != new:
        yield key, old, new


def run_study(
    spec: StudySpec,
    runner: Runner,
    task_hash: str,
    *,
    fresh: bool = False,
    notify: Callable[[Event], None] = lambda event: None,
    watch: Callable[[StudyRun], None] = lambda run: None,
) -> StudyResult:
    """Run a study, or go on with it, until its budget is met or it is stopped.

    Args:
        task_hash: the training code's identity.
        fresh: begin a new study beside an older one of the same file.
        watch: is given the run before its first trial, to show it live.

    Raises:
        StudyFileError: the study cannot be run as it is written, or changed since it was begun.
        ObjectiveError: the training code does not work.
        LauncherError: the storage cannot be used or another driver holds the study.
    """
    assert spec.storage is not None
    patience = Patience(spec.storage, lambda text: notify(Event("message", text=text)), AWAY_LIMIT_S)
    records = Records(spec.storage, patience=patience)
    if kind := network_storage(records.engine):
        text = (
            f"the database lies on a network file system ({kind}), where SQLite is slow; a local disk or PostgreSQL is faster"
        )
        notify(Event("message", text=text))
    identity = study_identity(spec, task_hash)
    name = study_name(records, spec, identity, fresh=fresh)
    # Until a trial counts, the newest laws are as good as any, and the task's code may have been mended.
    prices = (records.prices(name) or {}) if records.any_counted(name) else None
    if prices is not None and not any(prices.values()):
        if spec.budget.profile_s:
            text = "the study was begun with the clock's times and stays with them; --new begins one with known times"
            notify(Event("message", text=text))
        spec = spec.changed({"budget": {"profile_s": 0}})
    kinds = study_profiles(spec, runner, task_hash, records, lambda text: notify(Event("message", text=text)))
    priced_on, profiles = next(iter(kinds.items()))
    if prices is not None:
        kinds[priced_on] = profiles = repriced_profiles(profiles, prices)
    legal = common_batches(spec, kinds)
    everywhere = [profile for of_kind in kinds.values() for profile in of_kind.values()]
    if faults := [fault for profile in everywhere for fault in profile_faults(spec, profile, legal)]:
        raise StudyFileError(dict.fromkeys(faults))
    law = known_seconds(spec, profiles)
    past = past_trials(spec, identity, law)
    if past:
        notify(Event("message", text=f"warm start: {len(past)} trials of {', '.join(spec.warm_start)} lie in this space"))
    kept = spec.model_dump(mode="json") | {"storage": masked(records.url)}
    records.keep_study(name, spec.study, identity, kept)
    records.take(name)
    try:
        records.keep_prices(name, prices_of(profiles))
        driven_s = next(study.driver_s for study in records.studies(spec.study) if study.name == name)
        suggester = Suggester(
            records.url,
            name,
            spec.domains(),
            spec.objectives,
            sampler=spec.sampler,
            seed=spec.training.seed,
            legal=legal,
            known_seconds=law,
            past=past,
            patience=patience,
            alone=True,
        )
        run = StudyRun(spec, name, suggester, records, kinds, runner.device, task_hash, notify, driven_s)
        notify(Event("message", text=legal_words(spec, legal, everywhere)))
        if len(kinds) > 1:
            names = [kind or "others" for kind in kinds]
            notify(Event("message", text=f"devices: {', '.join(names)}; training times are those of {names[0]}"))
        for words in price_words(spec, profiles.values()):
            notify(Event("message", text=words))
        run.queue_start()
        run.recover()
        watch(run)
        with _heartbeat(run, records), _interrupts(run, patience) as interrupted:
            try:
                runner.run(run)
            except KeyboardInterrupt:
                if not run.stopping:
                    raise
            finally:
                run.sweep()
        met = run.counted >= spec.budget.trials  # a stop that came with the last trial's end stopped nothing
        ended = tuple(map(trial_record, suggester.kept_trials()))
        front = study_front(ended, spec.objectives)
        result = StudyResult(
            study=StoredStudy(records.url, name, spec, identity, driven_s + run.elapsed_s(), ended, front),
            stopped="" if met and not run.failure else run.stopping,
            failure=run.failure,
            interrupted=interrupted.is_set() and not met,
            elapsed_s=run.elapsed_s(),
        )
        suggester.close()
        return result
    finally:
        records.release(name)
        records.close()


@contextmanager
def _heartbeat(run: StudyRun, records: Records) -> Iterator[None]:
    """Signs of life while the study runs; they also count its hours and see when it is no longer ours."""
    over = threading.Event()
    limit_s = math.inf if run.spec.budget.hours is None else run.spec.budget.hours * 3600 - run.driven_s

    def beat() -> None:
        while True:
            ended = over.wait(min(HEARTBEAT_S, max(0.05, limit_s - run.elapsed_s())))
            ours = True
            # A database that is away or full is not another driver; whoever needs it meanwhile waits, or tells.
            with suppress(DatabaseAway, LauncherError):
                ours = records.beat(run.name, run.driven_s + run.elapsed_s())
            if ended:
                return
            if records.vanished():
                run.fail(f"the database {masked(records.url)} was deleted while the study ran; its trials are gone with it")
            elif not ours:
                run.fail("another driver took the study over")
            if run.elapsed_s() >= limit_s and not run.stopping:
                run.stopping = f"budget.hours: {run.spec.budget.hours:g} h are used up"

    thread = threading.Thread(target=beat, name="bsearch-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _interrupts(run: StudyRun, patience: Patience) -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM stop the study cleanly; a second one does not wait."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()
        patience.over = True
        run.stopping = run.stopping or f"interrupted ({signal.Signals(number).name})"
        run.notify(Event("message", text="stopping: running trials are cut off and go on with the next run"))
        if run.interruptible:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
