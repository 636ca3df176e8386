"""Running a study from the driver: open it, profile the devices, drive its trials, conclude.

Around the trials: which stored study a file resumes, the heartbeat, and what Ctrl-C does.
"""

from __future__ import annotations

import _thread
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from ...objectives.task_code import task_packages
from ...spaces.deadline import Deadline
from ...spaces.errors import Fault, StorageError, StudyFileError, TerminatedError
from ...spaces.laws.device import DeviceProfile
from ...spaces.laws.examination import overall
from ...spaces.planning import CostKey, common_batches, known_taken
from ...spaces.profile_request import profile_faults
from ...spaces.readable import plural, seconds
from ...spaces.record import TrialRecord, counted
from ...spaces.study.spec import StudySpec
from ...spaces.trial import UNTIMED_SAMPLES
from ..analysis.blow_ups import told_apart
from ..analysis.pareto import study_front
from ..laws.best_rate import with_rates
from ..store.database import UNAVAILABLE_LIMIT_S, DatabaseUnavailable, RetryPolicy, network_storage
from ..store.lock import HEARTBEAT_S
from ..store.rows import StudyRow
from ..store.stored import (
    StoredStudy,
    codes,
    has_grown,
    is_same_experiment,
    study_identity,
    with_codes,
    without_code,
)
from ..store.tables import Tables
from ..store.trials import Trials
from ..store.url import shown_url
from ..suggest.priors.warm_start import prior_trials, study_suggester
from ..suggest.space_transform import SearchSpace
from ..suggest.suggester import Suggester
from .decisions.ending import Stage
from .decisions.spending import Spending, device_names, prices_of
from .events import Event
from .finish import Finish, finish_of
from .kept_model import KeptModel, kept_model
from .opening import feasible_batches_sentence, step_time_summary
from .profiles import StepTimes, step_times_json, study_profiles, with_stored_step_times
from .runner import Runner
from .study_run import WORTH_OF, StudyRun
from .training import kept

# A training that ends by the deadline may be so late; then it is stopped.
_LATE_S = 2.0
# A study that is done so much later, or whose model has had a smaller share of its training, is not what was asked for.
_MUCH_LATER_S, _MOSTLY = 10.0, 0.5
# How long running attempts may take to write their checkpoints once the driver is told to stop, which must not take long:
# Kubernetes and Ray's jobs kill after 30 s.
LEAVES_S = 15.0

Profiles = Mapping[str, Mapping[CostKey, DeviceProfile]]  # by kind of device


@dataclass(frozen=True, slots=True)
class StudyResult:
    """How a run of a study ended.

    Args:
        stopped: why it ended before its budget; empty where it met it.
        failure: why it cannot continue; empty if it can.
        interrupted: the signal that ended it before its budget was met, if one did.
        elapsed_s: of this run.
        model: the folder of the model that it keeps; None where it keeps none.
        deadline: when it had to be done.
        gain: the share by which another `WORTH_OF` trials are expected to enlarge the front's hypervolume; None if unknown.
    """

    study: StoredStudy
    stopped: str
    failure: str
    interrupted: signal.Signals | None
    elapsed_s: float
    gain: float | None = None
    model: Path | None = None
    deadline: Deadline | None = None


@dataclass(frozen=True, slots=True)
class _OpenStudy:
    """A study that is about to run: its name and identity in the storage, and how it is timed.

    Args:
        step_times: the stored laws that time its trials; None before its first finished trial, {} where the clock does.
        driven_s: driver time of earlier runs.
        began_at: when this run began, in seconds since 1970.
        kept: where it keeps its model; None where it keeps none.
    """

    spec: StudySpec
    tables: Tables
    name: str
    identity: Mapping[str, Any]
    step_times: StepTimes | None
    driven_s: float
    began_at: float
    kept: KeptModel | None


def run_study(
    spec: StudySpec,
    runner: AbstractContextManager[Runner],
    task_hash: str,
    *,
    new: bool = False,
    same_experiment: bool = False,
    notify: Callable[[Event], None] = lambda event: None,
    watch: Callable[[StudyRun], None] = lambda run: None,
) -> StudyResult:
    """Run a study, or resume it, until its budget is met or it is stopped.

    Args:
        runner: entered only where there is something to run, which is when Ray starts.
        task_hash: the training code's identity.
        new: create a new study beside an older one of the same file.
        same_experiment: resume although the training code has changed: the change does not affect what trials measure.
        watch: is given the run before its first trial, to show it live.

    Raises:
        StudyFileError: the study cannot be run as it is written, or changed since it was created.
        TaskError: the training code does not work.
        StorageError: the storage cannot be used or another driver holds the study.
        ClusterError: Ray cannot be started or reached.
    """
    assert spec.storage is not None
    retry_policy = RetryPolicy(
        spec.storage, lambda text: notify(Event("message", text=text)), UNAVAILABLE_LIMIT_S
    )
    tables = Tables(spec.storage, retry_policy=retry_policy)
    try:
        study = _open(spec, tables, task_hash, notify, time.time(), new=new, same_experiment=same_experiment)
        if (finished := _finished(study, notify)) is not None:
            return finished
        with runner as opened:
            study = replace(study, spec=study.spec.with_cores(opened.cores))
            profiles, feasible = _profile(study, opened, task_hash, notify)
            return _drive(study, opened, profiles, feasible, task_hash, notify, watch)
    finally:
        tables.close()


def _open(
    spec: StudySpec,
    tables: Tables,
    task_hash: str,
    notify: Callable[[Event], None],
    began_at: float,
    *,
    new: bool,
    same_experiment: bool,
) -> _OpenStudy:
    """The study as found in its storage, or under a new name there, and how its trials are timed."""
    if kind := network_storage(tables.engine):
        text = f"the database is on a network file system ({kind}), where SQLite is slow; a local disk or PostgreSQL is faster"
        notify(Event("message", text=text))
    name, identity = identified(
        tables, spec, study_identity(spec, task_hash), new=new, same_experiment=same_experiment
    )
    packages = task_packages(spec.task)
    row, trials = tables.study(name), tables.trials(name)
    if row is not None:
        row.say_what_goes()
        if row.identity["space"] != identity["space"]:
            notify(
                Event(
                    "message",
                    text=f"the study goes on in wider ranges, with its {plural(len(trials), 'trial')} so far",
                )
            )
        for text in _changed_packages(row.identity["task"].get("packages"), packages):
            notify(Event("message", text=text))
    identity = {**identity, "task": {**identity["task"], "packages": packages}}
    # Before any trial counts, the newest laws are as good as any, and the task's code may have been fixed.
    step_times = (row.step_times or {}) if row is not None and counted(trials) else None
    if step_times is not None and not any(step_times.values()):
        if spec.budget.profile_s:
            text = (
                "this study's trials are timed by wall-clock time, which cannot change now; create a new study (--new, or "
                "new=True in Python) to use known times"
            )
            notify(Event("message", text=text))
        spec = spec.changed({"budget": {"profile_s": 0}})
    model = None
    if spec.budget.keeps_model:  # before anything is timed: a folder that cannot be used is told at once
        model = kept_model(
            spec, name, trials, lambda training: kept(name, identity, spec.task, task_hash, training)
        )
    driven_s = 0.0 if row is None else row.driver_s
    return _OpenStudy(spec, tables, name, identity, step_times, driven_s, began_at, model)


def _finished(study: _OpenStudy, notify: Callable[[Event], None]) -> StudyResult | None:
    """The result of a study whose budget is met and whose trials are all settled; None where there is something to do."""
    row, trials = study.tables.study(study.name), study.tables.trials(study.name)
    if row is None or any(not record.has_ended and record.outcome != "interrupted" for record in trials):
        return None
    done, budget, stopped = counted(trials), study.spec.budget.trials, ""
    if done >= budget:
        notify(Event("message", text=f"{study.name} has met its budget: {done} of {budget} trials are done"))
    elif not (stopped := _passed(study, row.deadline) or Spending(study.spec, {}, trials).over(0.0)):
        return None
    if row.identity["space"] == study.identity["space"]:  # a wider one is searched first
        _store(study)
    return StudyResult(
        StoredStudy.open(study.tables.url, study.name),
        stopped,
        _unmet(study, trials),
        interrupted=None,
        elapsed_s=0.0,
        model=None if study.kept is None or study.kept.score is None else study.kept.folder,
    )


def _passed(study: _OpenStudy, deadline: Deadline | None) -> str:
    """That a study's deadline, as it is still written, has passed; else empty."""
    if deadline is None or deadline.given != study.spec.budget.by:
        return ""
    if deadline.ends_at > study.began_at:
        return ""
    at = datetime.fromtimestamp(deadline.ends_at).astimezone()
    return f"the deadline ({deadline.given}) passed at {at:%Y-%m-%d %H:%M}"


def _store(study: _OpenStudy) -> None:
    spec = study.spec.model_dump(mode="json") | {"storage": shown_url(study.tables.url)}
    study.tables.save_study(study.name, study.spec.study, study.identity, spec)
    if study.spec.budget.by is None:
        study.tables.save_deadline(study.name, None)  # an earlier run may have had one


def _stored(study: _OpenStudy, trials: list[TrialRecord], driver_s: float) -> StoredStudy:
    records = told_apart(trials)
    front = study_front(records, study.spec.objectives)
    return StoredStudy(study.tables.url, study.name, study.spec, study.identity, driver_s, records, front)


def _profile(
    study: _OpenStudy, runner: Runner, task_hash: str, notify: Callable[[Event], None]
) -> tuple[dict[str, dict[CostKey, DeviceProfile]], tuple[int, int]]:
    """Profiles of every kind of device, the one that times the study first, and the effective batches they can plan."""
    spec, tables = study.spec, study.tables

    def say(text: str) -> None:
        notify(Event("message", text=text))

    profiles = study_profiles(spec, runner, task_hash, tables, say, first_run=study.step_times is None)
    if study.step_times is not None:
        timed_on = next(iter(profiles))
        profiles[timed_on] = with_stored_step_times(profiles[timed_on], study.step_times)
    feasible = common_batches(spec, profiles)
    everywhere = [profile for of_kind in profiles.values() for profile in of_kind.values()]
    if faults := [fault for profile in everywhere for fault in profile_faults(spec, profile, feasible)]:
        raise StudyFileError(dict.fromkeys(faults))
    return profiles, feasible


def _drive(
    study: _OpenStudy,
    runner: Runner,
    profiles: dict[str, dict[CostKey, DeviceProfile]],
    feasible: tuple[int, int],
    task_hash: str,
    notify: Callable[[Event], None],
    watch: Callable[[StudyRun], None],
) -> StudyResult:
    """Hold the study's lock and run its trials."""
    spec, tables, name = study.spec, study.tables, study.name
    laws = next(iter(profiles.values()))  # of the kind that times the study
    now, price = prices_of(spec, device_names(profiles), runner.device, tables.trials(name))
    if price != next(iter(now.values())):
        text = f"costs are at a price of {price:g} an hour, as when this study began; create a new study (--new) for today's"
        notify(Event("message", text=text))
    law = known_taken(spec, laws, price)
    timed = (
        spec.changed({"space": {"train_s": None, "samples": UNTIMED_SAMPLES}}) if spec.space.train_s else None
    )
    prior = prior_trials(
        spec, study.identity, law, None if timed is None else known_taken(timed, laws, price)
    )
    if spec.warm_start:
        text = f"warm start: {len(prior)} trials of {', '.join(spec.warm_start)} are in this space"
        notify(Event("message", text=text))
    if tables.study(name) is None:
        _store(study)  # the lock is its row's
    tables.lock.acquire(name)
    try:
        _store(study)
        tables.save_step_times(name, step_times_json(laws))
        if study.kept is not None:
            study.kept.begin(tables.trials(name))
        with tables.buffered(name):
            # Another driver may have added to it before we held the lock.
            row = tables.study(name)
            assert row is not None
            study = replace(study, driven_s=row.driver_s)
            space = SearchSpace.of(spec.domains(), feasible)
            trials = Trials(tables, name, objectives=spec.objectives)
            suggester = study_suggester(spec, space, law, prior, trials=len(trials))
            finish = finish_of(spec, row.deadline, study.began_at, space, law, study.kept, list(trials))
            run = StudyRun(
                *(
                    spec,
                    name,
                    suggester,
                    space,
                    trials,
                    tables,
                    profiles,
                    runner.device,
                    task_hash,
                    notify,
                    row.driver_s,
                ),
                owns_workers=runner.owns_workers,
                finish=finish,
            )
            for text in _opening_messages(spec, profiles, feasible, trials):
                notify(Event("message", text=text))
            interrupted = _run_trials(run, runner, tables, finish, watch)
            return _conclude(study, run, suggester, interrupted)
    except StorageError as error:
        if tables.vanished():  # what was asked of a new, empty one is no news
            raise StorageError(_deleted(tables)) from error
        raise
    finally:
        tables.lock.release(name)


def _run_trials(
    run: StudyRun, runner: Runner, tables: Tables, finish: Finish | None, watch: Callable[[StudyRun], None]
) -> signal.Signals | None:
    """Run the trials of a study that this driver holds; returns the signal that interrupted it, if one did."""
    run.recover()
    _save_deadline(tables, run.name, finish)  # the same for whoever resumes
    run.check_target()
    run.check_cost()  # counting what the trials of earlier drivers have cost
    watch(run)
    with _heartbeat(run, tables, finish), _interrupts(run, runner, tables.retry_policy) as interrupted:
        try:
            runner.run(run)
        except KeyboardInterrupt:
            if run.ending.stage < Stage.STOPPED:
                raise
        finally:
            run.sweep()
    return interrupted[0] if interrupted else None


def _deleted(tables: Tables) -> str:
    return f"the database {shown_url(tables.url)} was deleted while the study ran, and its trials with it"


def _opening_messages(
    spec: StudySpec, profiles: Profiles, feasible: tuple[int, int], records: Iterable[TrialRecord]
) -> Iterator[str]:
    """What is known before the first trial: feasible batches, kinds of devices, accuracy of the known times."""
    everywhere = [profile for of_kind in profiles.values() for profile in of_kind.values()]
    yield feasible_batches_sentence(spec, feasible, everywhere)
    if len(profiles) > 1:
        names = [kind or "others" for kind in profiles]
        yield f"devices: {', '.join(names)}; training times are those of {names[0]}"
    if (examination := overall(profile.examination for profile in everywhere)) is not None:
        yield from examination.lines
    yield from dict.fromkeys(profile.neighbours for profile in everywhere if profile.neighbours)
    if any(profile.validates_on_training for profile in everywhere):
        yield "the validation data are the training data: the front shows what trials memorise"
    yield from step_time_summary(spec, next(iter(profiles.values())).values(), records)


def _save_deadline(tables: Tables, name: str, finish: Finish | None) -> None:
    deadline = None if finish is None else finish.deadline
    tables.save_deadline(name, None if deadline is None else asdict(deadline))


def _conclude(
    study: _OpenStudy, run: StudyRun, suggester: Suggester, interrupted: signal.Signals | None
) -> StudyResult:
    """The result of a run that is over, from the database."""
    # A stop during the last trial stopped nothing.
    met = run.ended.counted >= study.spec.budget.trials
    interrupted = None if met else interrupted
    trials = study.tables.trials(study.name)
    if run.finish is not None:
        run.finish.kept.clean(trials)
    gain = suggester.expected_gain(run.trials, WORTH_OF) if run.finish is None else None
    # The fit takes seconds: it is stored, so that commands that only read need not repeat it.
    stored = with_rates(_stored(study, trials, study.driven_s + run.elapsed_s()))
    assert stored.rates is not None
    study.tables.save_best_rates(study.name, stored.rates.to_dict())
    return StudyResult(
        study=stored,
        stopped="" if met and not run.failure else run.ending.why,
        failure=run.failure or ("" if interrupted else _not_as_asked(run) or _unmet(study, trials)),
        interrupted=interrupted,
        elapsed_s=run.elapsed_s(),
        gain=gain,
        model=None if run.finish is None or run.finish.kept.score is None else run.finish.kept.folder,
        deadline=None if run.finish is None else run.finish.deadline,
    )


def _not_as_asked(run: StudyRun) -> str:
    """In what a study that was to keep a model by some time did not do so; empty where it did."""
    finish = run.finish
    shares = [one.facts.shortened_to or 1.0 for one in run.ended.done if one.outcome == "complete"]
    if finish is None or not (shares or run.spec.budget.cost):
        return ""
    if finish.kept.score is None:
        many = f"though {plural(len(shares), 'trial')}" if shares else "since no trial"
        return f"budget.keep: no model is in {finish.kept.folder}, {many} completed"
    if shares and max(shares) < _MOSTLY:
        return f"budget.by: no training had more than {max(shares):.0%} of its length: the time was too short for this space"
    limit = finish.deadline
    late_s = 0.0 if limit is None else time.time() - limit.ends_at
    return f"budget.by: finished {seconds(late_s)} after the deadline" if late_s > _MUCH_LATER_S else ""


def _unmet(study: _OpenStudy, trials: Sequence[TrialRecord]) -> str:
    """Why a study that has ended is without what it was run for; empty where it is not."""
    kept, target = study.kept, study.spec.budget.until
    outcomes = [record.outcome for record in trials if record.has_ended]
    if outcomes and "complete" not in outcomes:
        return f"none of {plural(len(outcomes), 'trial')} completed"
    if kept is None or target is None or kept.score is None or kept.score >= kept.metric.score(target):
        return ""
    got = f"the model that was kept, trial {kept.trial}, has {kept.metric.score(kept.score):.6g}"
    return f"budget.until: {kept.metric.name} {target:g} was not reached; {got}"


def identified(
    tables: Tables, spec: StudySpec, identity: Mapping[str, Any], *, new: bool, same_experiment: bool
) -> tuple[str, Mapping[str, Any]]:
    """The full name under which this study file's study is stored, and its identity with all code that its trials ran.

    Of several studies of the file, the newest with the same identity, or one whose ranges lie within the file's.

    Raises:
        StudyFileError: something changed that may not change; with the differences.
    """
    rows = tables.studies(spec.study)
    if not rows:
        return spec.study, identity
    if new:
        return f"{spec.study}-{len(rows) + 1}", identity
    for row in reversed(rows):
        if is_same_experiment(row.identity, identity):
            return row.name, with_codes(identity, codes(row.identity))
    for row in reversed(rows):
        if has_grown(row.identity, identity):
            return row.name, with_codes(identity, codes(row.identity))
    newest = rows[-1]
    only_code = without_code(newest.identity) == without_code(identity)
    if only_code and same_experiment:
        return newest.name, with_codes(identity, codes(newest.identity))
    if {**newest.identity, "task": identity["task"]} == identity and not counted(tables.trials(newest.name)):
        return newest.name, identity  # its code never finished a trial, so fixing it changes no experiment
    advice = (
        "Restore the old settings, create a new study (--new, or new=True in Python), or choose another name (with "
        "warm_start: the new study learns from this one)."
    )
    if only_code:
        advice += " If the change does not affect the results, resume with --same-experiment (same_experiment=True in Python)."
    what = f"study {newest.name} was created with different settings, so its trials cannot be compared with new ones. {advice}"
    raise StudyFileError([*_change_faults(newest, spec, identity), Fault("", what)])


def _changed_packages(before: Any, now: Mapping[str, str]) -> Iterator[str]:
    """What is said where installed packages differ from the last run's; `before` is as a database has it."""
    was = before if isinstance(before, Mapping) else {}
    changed = [
        f"{name} {was[name]}, now {now[name]}" for name in now if was.get(name, now[name]) != now[name]
    ]
    if changed:
        yield f"packages that the task imports have changed since the last run, which may change results: {'; '.join(changed)}"


def _change_faults(stored: StudyRow, spec: StudySpec, identity: Mapping[str, Any]) -> Iterator[Fault]:
    """A fault for every value that may not change and did; identities leave out defaults, which the specs hold."""
    new_spec = spec.model_dump(mode="json")
    for key, old, new in differences(with_codes(stored.identity), identity):
        was = _at(stored.spec, key) if old is None else old
        now = _at(new_spec, key) if new is None else new
        reason = (
            ": the task's code has changed since, not only its comments or layout"
            if key == "task.code"
            else ""
        )
        if (
            key == "space.effective_batch.high"
            and isinstance(was, int)
            and isinstance(now, int)
            and now > was
        ):
            reason = ": larger batches than those were not timed"
        yield Fault(key, f"was {was}, now {now}{reason}")


def _at(spec: Mapping[str, Any], key: str) -> Any:
    """The value at a key path, None where there is none."""
    value: Any = spec
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every leaf in which two JSON values differ, as (key path, old, new)."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from differences(old.get(name), new.get(name), f"{key}.{name}".removeprefix("."))
    elif old != new:
        yield key, old, new


@contextmanager
def _heartbeat(run: StudyRun, tables: Tables, finish: Finish | None) -> Iterator[None]:
    """Heartbeats while the study runs; they also count its hours and its cost, and notice when the study is no longer ours and
    when what was reported could not be written.
    """
    over = threading.Event()
    limit = None if finish is None else finish.deadline
    limit_s = math.inf if run.spec.budget.hours is None else run.spec.budget.hours * 3600 - run.driven_s

    def beat() -> None:
        while True:
            left_s = limit_s - run.elapsed_s()
            if limit is not None:
                left_s = min(left_s, limit.left_s(slowdown=1.0) + _LATE_S)
            ended = over.wait(min(HEARTBEAT_S, max(0.05, left_s)))
            ours = True
            # A database that is unavailable or full is not another driver; calls that need it meanwhile retry or raise.
            with suppress(DatabaseUnavailable, StorageError):
                ours = tables.lock.heartbeat(run.name, run.driven_s + run.elapsed_s())
            if ended:
                return
            if tables.vanished():
                run.fail(_deleted(tables))
            elif not ours:
                run.fail("another driver took the study over")
            run.check_cost()
            if (error := tables.late_error()) is not None:
                run.crash(error)
            if limit is not None and limit.left_s(slowdown=1.0) <= -_LATE_S:
                run.ending.reach(Stage.STOPPED, f"its time is up ({limit.given})")
            if run.elapsed_s() >= limit_s:
                run.ending.reach(Stage.STOPPED, f"budget.hours: {run.spec.budget.hours:g} h are used up")

    thread = threading.Thread(target=beat, name="bsearch-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _interrupts(run: StudyRun, runner: Runner, retry_policy: RetryPolicy) -> Iterator[list[signal.Signals]]:
    """Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 stop the study cleanly: running attempts have a moment to write their checkpoints. A
    second signal stops it at once. Yields the list of signals received so far.
    """
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    here, expired = os.getpid(), list[bool]()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != here:
            raise SystemExit(128 + number)  # a process of a loader, which has this handler too
        # Which shells send again.
        if (expired and not run.interruptible) or (received and number == signal.SIGHUP):
            return
        # Schedulers send USR1, USR2 or XCPU before a job's time is up, a terminal that closes HUP: treated as SIGTERM.
        received.append(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        raised = KeyboardInterrupt if received[0] == signal.SIGINT else TerminatedError
        if len(received) > 1:
            raise raised
        run.ending.reach(Stage.LEAVING, f"interrupted ({received[0].name})")
        if run.ending.stage is Stage.LEAVING and run.running.train and runner.leave():
            text = "stopping: running trials save a checkpoint and resume from it in the next run; repeat to stop at once"
            run.notify(Event("message", text=text))
            patience.start()
            return
        run.notify(
            Event("message", text="stopping: running trials are interrupted and resume with the next run")
        )
        stop_now()
        if run.interruptible:
            raise raised

    def stop_now() -> None:
        retry_policy.cancelled = True
        run.ending.reach(Stage.STOPPED, run.ending.why)

    def expire() -> None:
        stop_now()
        expired.append(True)
        if run.interruptible:
            _thread.interrupt_main(received[0])

    patience = threading.Timer(LEAVES_S, expire)
    patience.daemon = True
    stops = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` has it
        stops.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in stops}
    try:
        yield received
    finally:
        patience.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
