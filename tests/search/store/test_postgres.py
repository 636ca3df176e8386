"""A study on a real PostgreSQL: two drivers, a server that crashes and comes back, answers that are lost, passwords."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from bsearch.search.run.events import Event
from bsearch.search.store.tables import Tables
from conftest import BSEARCH, TASKS
from helpers import SPACE, bsearch, run
from postgres_server import PASSWORD, PostgresServer, free_port
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

pytestmark = [pytest.mark.postgres, pytest.mark.cluster]
# CI has no time for the half minute that a real restart takes.
AWAY_S = float(os.environ.get("BSEARCH_TEST_AWAY_S", "5"))


def wait_for(what: Callable[[], bool], driver: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 400
    while not what():
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.05)


@contextmanager
def driving(path: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    driver = subprocess.Popen(
        [BSEARCH, "run", path, "--serial"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield driver
    finally:
        driver.kill()
        driver.communicate()


def test_a_study_runs_and_is_shown_and_exported(
    postgres: PostgresServer, study_file: Callable[..., Path]
) -> None:
    url = postgres.new_database()
    path = study_file(budget={"trials": 4}, storage=url)
    for arguments in (
        ["run", path, "--serial"],
        ["show", path, "--all"],
        ["show", url],
        ["export", url, "--to", "json"],
    ):
        result = bsearch(*arguments)
        assert result.exit_code == 0, result.output
        assert PASSWORD not in result.output
    assert [record.outcome for record in Tables(url, create=False).trials("small")] == ["complete"] * 4
    assert postgres.states(url) == {"complete": 4}


def test_the_second_driver_is_told_who_holds_the_study_and_follows_a_killed_one(
    postgres: PostgresServer, study_file: Callable[..., Path]
) -> None:
    url = postgres.new_database()
    path = study_file(task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 4}, storage=url)
    with driving(path) as first:
        wait_for(lambda: postgres.states(url)["complete"] >= 1, first)
        refused = bsearch("run", path, "--serial")
        assert refused.exit_code == 1
        assert (
            f"study small: process {first.pid} on {os.uname().nodename} has been running it since 20"
            in refused.output
        )
        wait_for(lambda: postgres.states(url)["running"] == 1, first)  # not between two trials
        first.send_signal(signal.SIGKILL)
        first.wait()
    done = postgres.states(url)["complete"]
    assert postgres.states(url)["running"] == 1
    again = bsearch("run", path, "--serial")
    assert again.exit_code == 0, again.output
    assert f"resuming: {done} of 4 trials are done" in again.output
    assert postgres.states(url) == {"complete": 4}


@pytest.mark.timeout(600)
def test_a_server_that_crashes_and_comes_back_costs_nothing(
    postgres: PostgresServer, study_file: Callable[..., Path]
) -> None:
    url = postgres.new_database()
    path = study_file(task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 5}, storage=url)
    with driving(path) as driver:
        wait_for(lambda: postgres.states(url)["complete"] >= 2, driver)
        with postgres.away(AWAY_S):
            pass
        output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, output
    assert output.count("the database does not answer (") == 1
    assert output.count("the database answers again, after ") == 1
    assert "Traceback" not in output
    assert postgres.states(url) == {"complete": 5}
    assert Counter(row.number for row in Tables(url).attempts("small")) == dict.fromkeys(range(5), 1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_server_that_fails_over_to_another_port_is_followed(
    postgres: PostgresServer, study_file: Callable[..., Path]
) -> None:
    """As to a standby: the URL names both, and one of them answers."""
    here, there = postgres.port, free_port()
    url = postgres.new_database()
    database = url.rpartition("/")[2]
    both = (
        f"postgresql+psycopg://ann:{PASSWORD}@/{database}?host=127.0.0.1:{here}&host=127.0.0.1:{there}"
        "&target_session_attrs=read-write"
    )
    path = study_file(task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 5}, storage=both)
    with driving(path) as driver:
        wait_for(lambda: postgres.states(url)["complete"] >= 2, driver)
        with postgres.away(AWAY_S):
            postgres.port = there
        output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, output
    assert output.count("the database does not answer (") == 1
    assert output.count("the database answers again, after ") == 1
    assert "Traceback" not in output
    assert PASSWORD not in output
    assert postgres.states(url) == {"complete": 5}
    assert Counter(row.number for row in Tables(both).attempts("small")) == dict.fromkeys(range(5), 1)
    shown = bsearch("show", path, "--all")
    assert shown.exit_code == 0, shown.output
    assert PASSWORD not in shown.output


def test_a_connection_that_is_only_cut_is_made_anew_without_a_word(
    postgres: PostgresServer, study_file: Callable[..., Path]
) -> None:
    url = postgres.new_database()
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid()"
    )

    def notify(event: Event) -> None:
        if event.kind == "message":
            messages.append(event.text)
        if event.kind == "measured":
            postgres.sql(cut, url.rpartition("/")[2])

    messages: list[str] = []
    run(study_file(task=f"{TASKS}:Points", budget={"trials": 4}, storage=url), notify=notify)
    assert postgres.states(url) == {"complete": 4}
    assert not [text for text in messages if "the database" in text]


@pytest.mark.parametrize("seed", [1, 3])
def test_what_was_written_without_an_answer_is_not_written_twice(
    seed: int, postgres: PostgresServer, study_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections break while they commit, half of them after the server has done it."""
    url = postgres.new_database()
    rng = random.Random(seed)
    commit = PGDialect_psycopg.do_commit
    lost = [0]

    def breaks(dialect: PGDialect_psycopg, connection: Any) -> None:
        if connection.closed or rng.random() > 0.27 or not losing:
            return commit(dialect, connection)
        lost[0] += 1
        if rng.random() < 0.5:
            commit(dialect, connection)
        connection.dbapi_connection.close()
        raise psycopg.OperationalError("consuming input failed: server closed the connection unexpectedly")

    start = [
        {"effective_batch": 64, "reference_rate": 0.1, "rule": "sqrt"},
        {"effective_batch": 32, "reference_rate": 0.1, "rule": "linear"},
    ]
    path = study_file(task=f"{TASKS}:Points", budget={"trials": 8}, confirm=1, baseline=start, storage=url)
    monkeypatch.setattr(PGDialect_psycopg, "do_commit", breaks)
    losing = False

    def watch(run: object) -> None:
        nonlocal losing
        losing = True

    result = run(path, watch=watch)
    losing = False
    assert lost[0] > 3
    assert postgres.states(url) == {"complete": 8}
    assert Counter(record.facts.baseline for record in result.study.records) == {0: 1, 1: 1, None: 6}
    repeats = [
        (record.facts.repeats, record.facts.seed)
        for record in result.study.records
        if record.facts.repeats is not None
    ]
    assert len(repeats) == len(set(repeats)) > 0
    tables = Tables(url)
    assert [row.outcome for row in tables.attempts("small")] == ["complete"] * 8
    assert all(len(tables.curve("small", number)) == 2 for number in range(8))


def words_of_children(process: int) -> str:
    """The command lines of a process's descendants and of whatever else shares its session, but for its own."""
    said = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            session = int((one / "stat").read_text().rpartition(")")[2].split()[3])
            if session == process and int(one.name) != process:
                said.append((one / "cmdline").read_text().replace("\0", " "))
        except (OSError, ValueError):
            continue
    return "\n".join(said)


@pytest.mark.long
def test_the_password_is_nowhere_to_be_read(
    postgres: PostgresServer, study_file: Callable[..., Path], tmp_path: Path
) -> None:
    url = postgres.new_database()
    database = url.rpartition("/")[2]
    # One trial fails, and the last word on it is its traceback.
    path = study_file(task=f"{TASKS}:RaisesForSome", budget={"trials": 3}, storage=url)
    out = (tmp_path / "out").open("wb")
    run = subprocess.Popen(
        [BSEARCH, "run", path, "--json"],
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        stdout=out,
        stderr=out,
        cwd=tmp_path,
    )
    seen = ""
    try:
        while run.poll() is None:
            seen = max(seen, words_of_children(run.pid), key=len)
            time.sleep(0.5)
    finally:
        run.kill()
    out.close()
    output = (tmp_path / "out").read_text()
    assert "raylet" in seen
    texts = {"command lines": seen, "output": output}
    for file in (tmp_path / "results").rglob("*"):
        if file.is_file():
            texts[str(file)] = file.read_bytes().decode(errors="replace")
    tables = postgres.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'", database)
    assert ("bsearch_study",) in tables
    for (table,) in tables:
        texts[f"table {table}"] = str(postgres.sql(f'SELECT * FROM "{table}"', database))  # noqa: S608
    wrong = url.replace(database, "nowhere")
    other = url.replace("+psycopg", "+nothing")
    for arguments in (["show", url, "--json"], ["show", wrong], ["--debug", "show", wrong], ["show", other]):
        shown = bsearch(*arguments).output
        assert "***" in shown
        texts[f"bsearch {' '.join(arguments[:2])}"] = shown
    assert [name for name, text in texts.items() if PASSWORD in text] == []
    assert "postgresql+psycopg://ann:***@" in texts["table bsearch_study"]
