"""A driver's writes: in order, few commits, none lost where the reply to a commit is, an error told at the next write."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from bsearch.search.store import write_buffer
from bsearch.search.store.database import DatabaseUnavailable, RetryPolicy
from bsearch.search.store.tables import Tables
from bsearch.search.store.trials import Trials
from bsearch.search.store.write_buffer import WriteBuffer
from bsearch.spaces.errors import StorageError
from bsearch.spaces.record import TrialFacts, TrialResult
from bsearch.spaces.trial import Measurement, Outcome
from conftest import TASKS
from helpers import run, setup


@contextmanager
def commits(engine: sa.Engine) -> Iterator[list[int]]:
    """How many statements each transaction that wrote had."""
    counted: list[int] = []
    open_now = [0]

    def execute(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        open_now[0] += statement.split()[0] in ("INSERT", "UPDATE", "DELETE")

    def commit(connection: Any) -> None:
        counted.extend([open_now[0]] * bool(open_now[0]))
        open_now[0] = 0

    sa.event.listen(engine, "before_cursor_execute", execute)
    sa.event.listen(engine, "commit", commit)
    yield counted
    sa.event.remove(engine, "before_cursor_execute", execute)
    sa.event.remove(engine, "commit", commit)


@pytest.fixture
def tables(url: str) -> Tables:
    kept = Tables(url)
    kept.save_study("law", "law", {}, {})
    kept.lock.acquire("law")
    return kept


def test_many_writes_are_one_commit_and_read_as_if_written_at_once(tables: Tables) -> None:
    alone = [replace(setup(8, 2), number=number) for number in range(3)]

    def write() -> None:
        for one in alone:
            tables.start_attempt(one)
            for seen in (100, 200):
                tables.add_measurement(one, Measurement(seen, 0.5, 0.25))
            tables.end_attempt(one, Outcome("complete"))

    with tables.buffered("law"), commits(tables.engine) as counted:
        write()
        assert counted == []
        rows = tables.attempts("law")  # reads what was written
        assert len(counted) == 1
    assert [row.outcome for row in rows] == ["complete"] * 3
    times = {"started_at", "ended_at"}
    kept = [row.model_dump(exclude=times) for row in rows], tables.curves("law")
    write()
    assert [row.model_dump(exclude=times) for row in tables.attempts("law")] == kept[0]
    assert tables.curves("law") == kept[1]


def test_what_is_not_committed_follows_in_time(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_buffer, "LATEST_S", 0.05)
    elsewhere = Tables(tables.url)
    with tables.buffered("law"):
        tables.start_attempt(setup(3, 2))
        limit = time.monotonic() + 30
        while not elsewhere.attempts("law"):
            assert time.monotonic() < limit
            time.sleep(0.01)


@pytest.mark.parametrize("lost_after", [False, True])
def test_a_commit_without_a_reply_is_written_again(
    url: str, lost_after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been applied, or not."""
    policy = RetryPolicy(url, limit_s=60.0)
    tables = Tables(url, retry_policy=policy)
    tables.save_study("law", "law", {}, {})
    tables.lock.acquire("law")
    real, tries = write_buffer.transaction, []

    @contextmanager
    def cut(*where: Any) -> Iterator[Any]:
        tries.append(1)
        if len(tries) == 1 and not lost_after:
            raise DatabaseUnavailable("cut")
        with real(*where) as connection:
            yield connection
        if len(tries) == 1:
            raise DatabaseUnavailable("cut")

    monkeypatch.setattr(write_buffer, "transaction", cut)
    made = replace(setup(8, 2), number=3)
    with tables.buffered("law"):
        tables.start_attempt(made)
        tables.add_measurement(made, Measurement(100, 0.5, 0.25))
        tables.end_attempt(made, Outcome("complete"))
    assert len(tries) == 2
    assert len(tables.attempts("law")) == 1
    assert len(tables.curve("law", 3)) == 1


def test_a_trial_begins_and_ends_in_a_transaction_each(tables: Tables) -> None:
    trials = Trials(tables, "law")
    with tables.buffered("law"), commits(tables.engine) as counted:
        for number in range(3):
            trials.begin({"effective_batch": 8 + number})
            made = replace(setup(8, 2), number=number)
            trials.change(number, TrialFacts(learning_rate=0.1))
            tables.start_attempt(made)
            trials.commit()
            tables.add_measurement(made, Measurement(100, 0.5, 0.25))
            tables.end_attempt(made, Outcome("complete"))
            trials.end(number, TrialResult("complete", TrialFacts(train_s=1.5), (1.5, 0.5)))
            trials.commit()
            assert len(counted) == 2 * (number + 1)
    assert Tables(tables.url, create=False).trials("law") == list(trials)
    assert [trial.facts.learning_rate for trial in trials] == [0.1] * 3


def test_a_run_writes_a_trials_row_as_it_starts_as_it_trains_and_as_it_ends(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    found: Counter[tuple[str, str]] = Counter()

    def execute(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        verb, *words = statement.split()
        if verb in ("INSERT", "UPDATE"):
            found[verb, words[verb == "INSERT"]] += 1

    sa.event.listen(sa.Engine, "before_cursor_execute", execute)
    try:
        path = study_file(
            task=f"{TASKS}:Points", budget={"trials": 6}, storage=f"sqlite:///{tmp_path}/small.db"
        )
        assert not run(path).failure
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", execute)
    # A new row costs an update that finds none, and an insert. The machine is known with the first measurement.
    assert (found["INSERT", "bsearch_trial"], found["UPDATE", "bsearch_trial"]) == (6, 6 * 3)
    assert (found["INSERT", "bsearch_attempt"], found["UPDATE", "bsearch_attempt"]) == (6, 6 * 2)


def test_a_driver_whose_study_was_taken_over_writes_nothing_more(tables: Tables) -> None:
    trials = Trials(tables, "law")
    with tables.buffered("law"):
        trials.begin({"effective_batch": 8})
        trials.change(0, TrialFacts(learning_rate=0.1))
        trials.commit()
        with tables.engine.begin() as connection:
            connection.execute(
                sa.text("UPDATE bsearch_study SET holder = 'another:1:2026-01-01 00:00:00 UTC x-y'")
            )
        trials.end(0, TrialResult("complete", values=(1.0, 0.5)))
        with pytest.raises(
            StorageError, match="study law: another driver took it over; this one writes nothing more"
        ):
            trials.commit()
        tables.drop_writes()
    (trial,) = Tables(tables.url, create=False).trials("law")
    assert trial.outcome == "running"


def test_processes_that_share_a_search_number_their_trials_one_after_another(url: str) -> None:
    one, other = Trials(Tables(url), "shared"), Trials(Tables(url), "shared")
    numbers = [
        trials.begin({"x": place}).number for place, trials in enumerate([one, other, other, one, other])
    ]
    assert numbers == [0, 1, 2, 3, 4]
    one.end(1, TrialResult("complete", values=(1.0, 0.5)))
    other.refresh()
    assert [trial.parameters["x"] for trial in other] == numbers
    assert other[1].values == (1.0, 0.5)


def buffer(path: Path) -> WriteBuffer:
    tables = Tables(f"sqlite:///{path}/small.db")
    return WriteBuffer(tables.url, tables.engine, tables.retry_policy)


@pytest.mark.parametrize(
    "why", [sa.exc.OperationalError("INSERT", {}, Exception("disk full")), ValueError("disk full")]
)
def test_an_error_is_told_once_and_what_was_to_be_written_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: Exception
) -> None:
    monkeypatch.setattr(write_buffer, "LATEST_S", 0.02)
    writes, written, broken = buffer(tmp_path), [], [True]

    def write(connection: Any) -> None:
        if broken[0]:
            raise why
        written.append("it")

    writes.add(write)
    with pytest.raises((StorageError, ValueError), match="disk full"):
        writes.commit()
    limit = time.monotonic() + 30
    while (error := writes.failed()) is None:  # by the thread
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert "disk full" in str(error)
    broken[0] = False
    writes.close()
    assert written == ["it"]


def test_what_is_dropped_is_not_written(tmp_path: Path) -> None:
    writes, written = buffer(tmp_path), []
    keep: Callable[[str], Callable[[Any], None]] = lambda what: lambda connection: written.append(what)  # noqa: E731
    writes.add(keep("dropped"))
    writes.drop()
    for what in "abc":
        writes.add(keep(what))
    writes.close()
    assert written == ["a", "b", "c"]
