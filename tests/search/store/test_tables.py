"""The storage: one driver at a time, nothing lost wherever it dies, changes reported."""

from __future__ import annotations

import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from bsearch.objectives import task_code
from bsearch.search.analysis.retime import KnownDevice, retimed
from bsearch.search.report.sentences import front_summary
from bsearch.search.report.terminal.watch import studies_now
from bsearch.search.run.driver import differences
from bsearch.search.run.events import Event
from bsearch.search.run.study_run import StudyRun
from bsearch.search.store import lock
from bsearch.search.store.database import DatabaseUnavailable, RetryPolicy, transaction
from bsearch.search.store.lock import LOCK_EXPIRES_S
from bsearch.search.store.stored import StoredStudy, codes
from bsearch.search.store.tables import Tables
from bsearch.search.store.write_buffer import WriteBuffer
from bsearch.search.suggest.optuna.database import open_storage
from bsearch.spaces.boundary.secrets import masked
from bsearch.spaces.errors import StorageError, StudyFileError
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.planning import training_cost
from bsearch.spaces.trial import Measurement, Outcome, TrialSetup
from conftest import TASKS
from helpers import as_optuna, run, setup
from open_database import open_database


@pytest.fixture
def tables(url: str) -> Tables:
    kept = Tables(url)
    kept.save_study("law", "law", {"a": 1}, {"b": 2})
    return kept


def sql(tables: Tables, statement: str, **values: object) -> None:
    with tables.engine.begin() as connection:
        connection.execute(sa.text(statement), values)


def test_what_was_written_is_read_back(tables: Tables) -> None:
    made = setup(37, 2)
    tables.start_attempt(made)
    tables.add_measurement(
        made,
        Measurement(100, 0.5, 0.25, {"accuracy": 0.25, "val_loss": float("nan")}, train_loss=float("inf")),
    )
    tables.end_attempt(made, Outcome("complete", "fine"))
    (row,) = tables.attempts("law")
    assert (row.outcome, row.message) == ("complete", "fine")
    assert TrialSetup.from_dict(row.setup) == made
    (point,) = tables.curve("law", 0)
    assert (point.samples_seen, point.accuracy, point.train_loss) == (100, 0.25, None)


def test_the_database_is_set_up_for_one_writer_and_many_readers(tmp_path: Path) -> None:
    with Tables(f"sqlite:///{tmp_path}/small.db").engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 1


def test_one_driver_holds_a_study(tables: Tables, url: str) -> None:
    tables.lock.acquire("law")
    tables.lock.acquire("law")  # it is ours already
    other = Tables(url)
    with pytest.raises(
        StorageError,
        match=rf"study law: process {os.getpid()} on {socket.gethostname()} has been running it since 20.* UTC ",
    ):
        other.lock.acquire("law")
    assert tables.lock.heartbeat("law", 2.5)
    assert not other.lock.heartbeat("law", 1.0)
    tables.lock.release("law")
    other.lock.acquire("law")
    assert not tables.lock.heartbeat("law", 1.0)
    assert tables.studies()[0].driver_s == 2.5


def test_a_dead_holder_is_followed_at_once_here_and_after_its_lock_expires_elsewhere(
    tables: Tables, url: str
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    other = Tables(url)

    def held_by(holder: str, age_s: float) -> None:
        sql(
            tables,
            "UPDATE bsearch_study SET holder = :holder, heartbeat_at = :at",
            holder=holder,
            at=time.time() - age_s,
        )

    held_by(f"{socket.gethostname()}:{gone.pid}:noon x", 1.0)
    other.lock.acquire("law")
    # The number of a dead driver may be another process's by now, and a living one's clock may have jumped.
    held_by(re.sub(r"(\.\d+)-", r"\g<1>0-", tables.lock.holder), 1.0)
    other.lock.acquire("law")
    # Killed, but its parent has not waited for it yet.
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from bsearch.search.store.lock import _Holder; print(_Holder.here(), flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    theirs = child.stdout.readline().strip()
    held_by(theirs, 1.0)
    with pytest.raises(StorageError, match=f"process {child.pid} on"):
        other.lock.acquire("law")
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    other.lock.acquire("law")
    child.communicate()
    held_by(theirs, 1.0)  # and now it has
    other.lock.acquire("law")
    held_by(tables.lock.holder, 2 * LOCK_EXPIRES_S)
    with pytest.raises(StorageError, match=f"process {os.getpid()} on"):
        other.lock.acquire("law")
    held_by("elsewhere:1:noon x", 1.0)
    with pytest.raises(StorageError, match="process 1 on elsewhere has been running it since noon"):
        other.lock.acquire("law")
    held_by("elsewhere:1:noon x", LOCK_EXPIRES_S + 1)
    other.lock.acquire("law")


def test_a_holder_whose_process_cannot_be_checked_from_here_holds_until_its_lock_expires(
    tables: Tables, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, in another container of this one, written by a version that left no mark, or another user's."""
    other, here = Tables(url), socket.gethostname()
    namespace = re.search(r" (\d+)\.", tables.lock.holder)
    assert namespace is not None

    def held_by(holder: str, at: float | None) -> None:
        sql(tables, "UPDATE bsearch_study SET holder = :holder, heartbeat_at = :at", holder=holder, at=at)

    def assert_held_until_it_expires(holder: str) -> None:
        # The database's clock may have been set back.
        for silent_s in (
            0.5,
            0.5 - LOCK_EXPIRES_S,
            LOCK_EXPIRES_S - 2,
        ):
            held_by(holder, time.time() - silent_s)
            with pytest.raises(StorageError, match=r"process \d+ on .* has been running it since noon"):
                other.lock.acquire("law")
        for silent_s in (LOCK_EXPIRES_S + 1, -LOCK_EXPIRES_S - 3, -1e6):
            held_by(holder, time.time() - silent_s)
            other.lock.acquire("law")
        held_by(holder, None)  # nothing says that it was ever alive
        other.lock.acquire("law")

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        assert_held_until_it_expires(f"elsewhere:{living.pid}:noon {namespace[1]}.1-x")
        assert_held_until_it_expires(f"{here}:{living.pid}:noon {namespace[1]}0.1-x")
        assert_held_until_it_expires(f"{here}:{living.pid}:noon x")
        assert living.poll() is None  # asking did it no harm
        living.communicate(b"\n")

    def refused(process: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    assert_held_until_it_expires(f"{here}:1:noon x")


def test_who_drives_a_study_is_asked_of_any_name(tables: Tables) -> None:
    assert tables.lock.driver("law") is None
    assert tables.lock.driver("no such study") is None
    tables.lock.acquire("law")
    driver = tables.lock.driver("law")
    assert driver is not None
    assert (driver.host, driver.process, driver.gone) == (socket.gethostname(), str(os.getpid()), False)
    assert 0 <= driver.silent_s < LOCK_EXPIRES_S


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_drivers_own_clock_neither_steals_a_lock_nor_keeps_it(
    tables: Tables, url: str, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, elsewhere = time.time, Tables(url)
    elsewhere.lock.holder = "elsewhere:1:noon x"
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3600)
    elsewhere.lock.acquire("law")
    assert elsewhere.lock.heartbeat("law", 1.0)
    monkeypatch.setattr(time, "time", real)
    with pytest.raises(StorageError, match="last heartbeat 0 s ago"):
        tables.lock.acquire("law")
    sql(tables, "UPDATE bsearch_study SET heartbeat_at = heartbeat_at - :past", past=LOCK_EXPIRES_S + 1)
    monkeypatch.setattr(time, "time", lambda: real() - hours * 3600)
    tables.lock.acquire("law")


@pytest.mark.parametrize("before", [None, "elsewhere:1:noon x"])
def test_of_many_drivers_at_once_exactly_one_wins(url: str, before: str | None) -> None:
    drivers = [Tables(url) for _ in range(6)]
    drivers[0].save_study("law", "law", {}, {})
    start = threading.Barrier(len(drivers))

    def race(driver: Tables) -> bool:
        start.wait()
        try:
            driver.lock.acquire("law")
        except StorageError as error:
            assert re.search("has been running it since|has just taken it", str(error))
            return False
        return True

    with ThreadPoolExecutor(len(drivers)) as threads:
        for _ in range(5):
            sql(drivers[0], "UPDATE bsearch_study SET holder = :holder, heartbeat_at = 0", holder=before)
            won = [driver for driver, wins in zip(drivers, threads.map(race, drivers), strict=True) if wins]
            assert len(won) == 1
            assert [driver for driver in drivers if driver.lock.held("law")] == won


def test_a_holder_that_comes_to_life_keeps_its_study(
    tables: Tables, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Tables(url)
    elsewhere.lock.holder = "elsewhere:1:noon x"
    elsewhere.lock.acquire("law")

    def meanwhile(holder: str, silent_s: float) -> bool:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(elsewhere.lock.heartbeat, "law", 1.0).result()
        return True

    monkeypatch.setattr("bsearch.search.store.lock._is_gone", meanwhile)
    with pytest.raises(StorageError, match="another driver has just taken it"):
        tables.lock.acquire("law")
    assert elsewhere.lock.held("law")


@pytest.mark.slow
def test_processes_that_begin_an_empty_database_at_once_all_succeed(url: str) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload(["bsearch.search.suggest.optuna.database", "psycopg"])
    start = context.Barrier(4)
    processes = [context.Process(target=open_database, args=(url, start)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert [study.name for study in Tables(url).studies()] == ["law"]
    assert optuna.get_all_study_names(open_storage(url)) == []


@pytest.mark.slow
def test_a_database_that_is_locked_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bsearch.search.store.database.BUSY_S", 0.05)
    monkeypatch.setattr("bsearch.search.store.database._LOCKED_S", 0.1)
    messages: list[str] = []
    url = f"sqlite:///{tmp_path}/small.db"
    tables = Tables(url, retry_policy=RetryPolicy(url, messages.append, 60.0))
    other = sqlite3.connect(tmp_path / "small.db", check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    threading.Timer(3.0, other.rollback).start()
    tables.save_study("law", "law", {}, {})
    assert [study.name for study in tables.studies()] == ["law"]
    assert messages[0] == "the database does not answer (database is locked); retrying for up to 1 min"
    assert messages[1].startswith("the database answers again, after ")
    assert len(messages) == 2
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(
        StorageError, match=r"small.db: the database has not answered for \d s: database is locked\. "
    ):
        Tables(url, retry_policy=_answered(RetryPolicy(url, messages.append, 0.5))).save_study(
            "law", "law", {}, {}
        )
    with pytest.raises(
        StorageError, match=r"small.db: the database does not answer: database is locked\. Check that"
    ):
        RetryPolicy(url, messages.append, 0.5)(lambda: open_and_write(url))
    other.close()


def test_who_has_locked_a_database_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bsearch.search.store.database.BUSY_S", 0.05)
    url = f"sqlite:///{tmp_path}/small.db"
    Tables(url)
    file = str(tmp_path / "small.db")
    code = f"import sqlite3; c = sqlite3.connect({file!r}); c.execute('BEGIN EXCLUSIVE'); print(1); input()"
    with subprocess.Popen(
        [sys.executable, "-uc", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        other.stdout.readline()
        messages: list[str] = []
        threading.Timer(1.0, lambda: other.communicate("\n")).start()
        Tables(url, retry_policy=RetryPolicy(url, messages.append, 60.0)).save_study("law", "law", {}, {})
    assert f"locked by process {other.pid})" in messages[0]


def test_a_server_that_is_away_is_told_with_its_address() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StorageError, match=r"the database does not answer: .*Check that it is running there"):
        Tables("postgresql+psycopg://nobody@127.0.0.1:1/none")


def test_where_no_study_was_stored_none_is_seen_and_nothing_made(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        studies_now(f"sqlite:///{tmp_path}/none.db", ["small"])
    assert not list(tmp_path.iterdir())


def test_the_lock_is_asked_for_again_until_the_database_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/small.db"
    tables = Tables(url, retry_policy=_answered(RetryPolicy(url, limit_s=60.0)))
    tables.save_study("law", "law", {}, {})

    def away(url: str, engine: sa.Engine) -> Any:
        monkeypatch.setattr(lock, "transaction", transaction)
        raise DatabaseUnavailable("it is away")

    for asked in (tables.lock.acquire, tables.lock.held, tables.lock.driver, tables.lock.release):
        monkeypatch.setattr(lock, "transaction", away)
        asked("law")
        assert lock.transaction is transaction  # it was away, once


def _answered(retry_policy: RetryPolicy) -> RetryPolicy:
    retry_policy(lambda: None)
    return retry_policy


def open_and_write(url: str) -> None:
    with transaction(url, Tables(url).engine) as connection:
        connection.execute(sa.text("UPDATE bsearch_study SET spec = ''"))


def test_what_is_written_twice_is_as_written_once(tables: Tables) -> None:
    made = setup(37, 2)
    measured = Measurement(100, 0.5, 0.25, {"accuracy": 0.25}, train_loss=1.0)
    about = json.dumps({"task": ["Law", "1"], "request": {"setup": {"parameters": {}, "training": {}}}})
    profile = DeviceProfile("cpu", "CPU", 400)
    for _ in range(2):
        tables.save_study("law", "law", {"a": 1}, {"b": 3})
        tables.save_profile(about, profile.to_dict())
        tables.start_attempt(made)
        tables.add_measurement(made, measured)
        tables.end_attempt(made, Outcome("complete"))
    assert [study.spec for study in tables.studies()] == [{"b": 3}]
    assert (len(tables.attempts("law")), len(tables.curve("law", 0))) == (1, 1)
    assert tables.profile(about) == profile


def test_a_newer_schema_is_refused(tables: Tables, url: str) -> None:
    sql(tables, "UPDATE bsearch_alembic_version SET version_num = '9999'")
    with pytest.raises(StorageError, match="a newer bsearch has written it"):
        Tables(url)


def test_optuna_keeps_its_own_version_table(study_file: Callable[..., Path], url: str) -> None:
    run(study_file(task=f"{TASKS}:Points", budget={"trials": 1}, storage=url))
    assert len(as_optuna(url).trials) == 1
    tables = sa.inspect(Tables(url).engine).get_table_names()
    assert {name for name in tables if name.startswith("bsearch_")} == {
        "bsearch_study",
        "bsearch_trial",
        "bsearch_attempt",
        "bsearch_measurement",
        "bsearch_profile",
        "bsearch_alembic_version",
    }


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("nonsense", "expected an SQLAlchemy URL such as sqlite:///study.db or postgresql.*; got 'nonsense'"),
        ("oracel://u:secret@h/d", r"no such kind of database.*got 'oracel://u:\*\*\*@h/d'"),
        (
            "mysql+pymysql://u:secret@h/d",
            r"driver 'pymysql' is not installed. Install it: pip install pymysql; got .*\*\*\*",
        ),
        ("sqlite:////sys/study/study.db", "expected a writable folder, but /sys/study: "),
    ],
)
def test_a_storage_that_cannot_be_is_told(named: str, message: str) -> None:
    with pytest.raises(StudyFileError, match=message) as error:
        Tables(named)
    assert "secret" not in str(error.value)


def test_a_database_that_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "no.db").write_text(
        "this is no database, and long enough to be looked at by SQLite as one " * 20
    )
    with pytest.raises(StorageError, match=r"no.db: the database refused: file is not a database"):
        Tables(f"sqlite:///{tmp_path}/no.db")
    with pytest.raises(StorageError, match="no such database yet"):
        Tables(f"sqlite:///{tmp_path}/missing.db", create=False)


def test_passwords_are_masked() -> None:
    assert masked("postgresql+psycopg://u:secret@h/d") == "postgresql+psycopg://u:***@h/d"


def test_a_changed_study_is_refused_with_what_changed(study_file: Callable[..., Path]) -> None:
    run(study_file(task=f"{TASKS}:Points", budget={"trials": 1}))
    changed = study_file(task=f"{TASKS}:NeedsTwo", budget={"trials": 1}, training={"evaluations": 3})
    with pytest.raises(StudyFileError) as error:
        run(changed)
    lines = str(error.value).splitlines()
    assert "task.name: was Points, now NeedsTwo" in lines
    assert "training.evaluations: was 2, now 3" in lines
    assert "create a new study (--new, or new=True in Python)" in lines[-1]
    assert run(changed, new=True).study.name == "small-2"
    # Each file goes on with its own study.
    assert run(changed).study.name == "small-2"
    assert run(study_file(task=f"{TASKS}:Points", budget={"trials": 1})).study.name == "small"
    # What was at its default is told, too.
    defaults = study_file(
        task=f"{TASKS}:Points", budget={"trials": 1}, training={"clip_norm": 1.5, "schedule": "linear"}
    )
    with pytest.raises(StudyFileError) as error:
        run(defaults)
    assert "training.schedule: was cosine, now linear" in str(error.value).splitlines()


def test_code_that_never_finished_a_trial_may_be_mended(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    start = [{"effective_batch": 64, "reference_rate": 0.1, "rule": "sqrt"}]
    path = study_file(task="tasks.py:Mine", baseline=start, budget={"trials": 2})
    good = (
        f"import sys; sys.path.insert(0, {str(TASKS.parent)!r})\nfrom tasks_for_tests import Points, Raises\n"
    )
    (tmp_path / "tasks.py").write_text(good + "class Mine(Raises): pass\n")
    assert "failed with the same error" in run(path).failure
    # A new process would import the file anew.
    for name in [
        name for name in sys.modules if name.startswith("bsearch_task_") and name.endswith("_tasks")
    ]:
        del sys.modules[name]
    (tmp_path / "tasks.py").write_text(good + "class Mine(Points): pass\n")
    result = run(path)
    assert (result.study.name, result.failure) == ("small", "")
    complete = [record for record in result.study.records if record.outcome == "complete"]
    assert [record.facts.baseline for record in complete] == [0, None]
    (tmp_path / "tasks.py").write_text(good + "class Mine(Points): depth = 2\n")
    with pytest.raises(StudyFileError, match=r"task\.code: was .*\n.*resume with --same-experiment"):
        run(path)


def test_another_version_of_an_installed_package_is_said_and_goes_on(
    study_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks.py").write_text(
        "import torch\nfrom bsearch import Measurement\n"
        "def train(setup):\n    yield Measurement(setup.samples_budget, 1.0, accuracy=0.5)\n"
    )
    training = {"samples": 4000, "evaluations": 1}
    path = study_file(task="tasks.py:train", training=training, budget={"trials": 1})
    assert not run(path).failure
    monkeypatch.setattr(task_code, "version", lambda name: "99.0")
    said: list[str] = []
    path = study_file(task="tasks.py:train", training=training, budget={"trials": 2})
    result = run(path, notify=lambda event: said.append(event.text))
    assert (result.study.name, len(result.study.records)) == ("small", 2)
    assert any(f"torch {version('torch')}, now 99.0" in text for text in said), said


@pytest.mark.slow
def test_a_comment_changes_no_experiment_and_a_change_of_code_may_be_declared_the_same(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = study_file(task="tasks.py:Mine", budget={"trials": 1})
    tasks = tmp_path / "tasks.py"
    code = f"import sys; sys.path.insert(0, {str(TASKS.parent)!r})\nfrom tasks_for_tests import Points\nclass Mine(Points):\n"
    tasks.write_text(code + "    depth = 2\n")
    first = run(path).study
    tasks.write_text("'Mine.'\n" + code + "    'Points.'\n    depth = (2)  # layers\n")
    assert run(study_file(task="tasks.py:Mine", budget={"trials": 2})).study.identity == first.identity
    tasks.write_text(code + "    layers = 2\n")
    again = study_file(task="tasks.py:Mine", budget={"trials": 3})
    with pytest.raises(StudyFileError, match=r"has changed since, not only its comments or layout"):
        run(again)
    study = run(again, same_experiment=True).study
    assert study.name == first.name and len(study.records) == 3
    (old,), (new, *earlier) = codes(first.identity), codes(study.identity)
    assert earlier == [old] and new != old
    # The file opens the study that it would resume, and its earlier code is no other code.
    assert StoredStudy.open(str(again)).name == study.name
    assert f"resumed with --same-experiment: {old}, now {new}." in list(front_summary(study))[-1]
    # A profile of either code is of this study.
    tables, task = study.tables(), study.identity["task"]
    for profiled, notes in ((old, 0), (new, 0), ("another", 1)):
        device = KnownDevice("card", {"name": "Mine", "code": profiled}, training_cost(study.spec), ())
        found = retimed(study.spec, task, [], tables.setups(study.name), device)
        assert sum("other code" in note for note in found.notes) == notes
    # From here on both are the study's code.
    assert run(study_file(task="tasks.py:Mine", budget={"trials": 4})).study.identity == study.identity
    tasks.write_text(code + "    depth = 2\n")
    assert codes(run(study_file(task="tasks.py:Mine", budget={"trials": 5})).study.identity) == (old, new)


def test_differences_name_the_keys() -> None:
    assert list(differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4})) == [
        ("a.c", 2, 3),
        ("d", None, 4),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("last", range(6))
def test_a_driver_that_died_at_any_commit_loses_nothing_and_repeats_nothing(
    study_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, applied: bool
) -> None:
    url = f"sqlite:///{tmp_path}/small.db"
    own = {"effective_batch": 41, "reference_rate": 0.17, "rule": "linear"}
    path = study_file(task=f"{TASKS}:Points", budget={"trials": 3}, baseline=[own], storage=url)

    class Died(BaseException):
        """As SIGKILL would: nothing of ours may run after it."""

    commits, commit = [0], WriteBuffer.commit

    def die(writes: WriteBuffer) -> None:
        if not writes._writes:
            return
        commits[0] += 1
        if commits[0] <= last or applied:
            commit(writes)
        if commits[0] > last:
            raise Died

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(WriteBuffer, "commit", die)
        patch.setattr(WriteBuffer, "close", lambda self: None)
        patch.setattr(WriteBuffer, "_commit_in_time", lambda self: None)
        patch.setattr(StudyRun, "sweep", lambda self: self.suggestions.close())
        run(path)
    left = Tables(url).trials("small")
    assert sum(trial.outcome == "running" for trial in left) <= 1
    events: list[Event] = []
    run(path, notify=events.append)
    trials = Tables(url).trials("small")
    assert [trial.outcome for trial in trials] == ["complete"] * 3
    assert own.items() <= trials[0].parameters.items()
    for before in left:
        assert trials[before.number].parameters == before.parameters
        assert not before.has_ended or trials[before.number] == before
    ended = {trial.number for trial in left if trial.has_ended}
    assert [event.record.number for event in events if event.record is not None] == sorted({0, 1, 2} - ended)
    attempts = [row.attempt for row in Tables(url).attempts("small")]
    assert sum(attempts) == len(left) - len(ended)  # what was running was tried once more, and nothing else
