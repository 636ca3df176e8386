"""Database files as they are found: without their log, cut, foreign, read-only, and beside what killed writers left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import bsearch
import pytest
import yaml
from conftest import BATCH_AND_RATE
from helpers import bsearch as run
from tiny import POINTS, in_words

KIND = "database files lost, cut, foreign or read-only"
pytestmark = pytest.mark.long
BSEARCH = Path(sys.executable).parent / "bsearch"
STUDY: dict[str, Any] = {
    "study": "small",
    "task": "tasks.py:Points",
    "space": BATCH_AND_RATE,
    "training": {"evaluations": 2},
    "sampler": "random",
    "stopping": "none",
    "budget": {"trials": 16, "profile_s": 0},
}
RETURNS = "        return Data("
KILLED = """
        import os, signal
        if str(setup.number) == os.environ.get("KILLED_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
"""
TASK = POINTS.replace(RETURNS, KILLED.lstrip("\n") + RETURNS)


def written(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tasks.py").write_text(TASK)
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(STUDY, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study whose driver was killed in its 13th trial; not to be changed."""
    path = written(tmp_path_factory.mktemp("killed"))
    done = subprocess.run(
        [BSEARCH, "run", path, "--serial"],
        env={**os.environ, "KILLED_AT": "12"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return path.parent


@pytest.fixture(scope="module")
def finished(killed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same study once it has met its budget, all in one file; not to be changed."""
    folder = copy_of(killed, tmp_path_factory.mktemp("finished"))
    assert run("run", folder / "study.yaml", "--serial").exit_code == 0
    with closing(sqlite3.connect(folder / "small.db")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for file in ("small.db-wal", "small.db-shm"):
        (folder / file).unlink(missing_ok=True)
    return folder


def copy_of(folder: Path, to: Path) -> Path:
    return Path(
        shutil.copytree(
            folder, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("results", "__pycache__")
        )
    )


def shown(path: Path) -> int:
    """How many complete trials a study shows."""
    result = run("show", path, "--json")
    in_words(result, 0)
    return int(json.loads(result.stdout)["trials"].get("complete", 0))


def test_a_lost_log_costs_the_latest_trials_alone(attack: Any, killed: Path, tmp_path: Path) -> None:
    with attack("all files are there"):
        assert shown(copy_of(killed, tmp_path / "whole") / "study.yaml") == 12
    for lost in (["small.db-wal"], ["small.db-wal", "small.db-shm"]):
        folder = copy_of(killed, tmp_path / str(len(lost)))
        for file in lost:
            (folder / file).unlink()
        with attack(f"{' and '.join(lost)} lost"):
            assert shown(folder / "study.yaml") >= 6
        with attack(f"{' and '.join(lost)} lost, and the study goes on"):
            in_words(run("run", folder / "study.yaml", "--serial"), 0)
            assert shown(folder / "study.yaml") == 16


# Runs commands one after another, and prints the exit code and output of each.
WALK = """
import json, sys
from bsearch.cli import main
from click.testing import CliRunner
walked = (CliRunner().invoke(main, command) for command in json.loads(sys.argv[1]))
print(json.dumps([[result.exit_code, result.stdout, result.stderr] for result in walked]))
"""


def read_only(folder: Path, *commands: list[object]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of commands with a folder mounted read-only; skipped where mounts are not allowed."""
    mounted = f"mount --bind '{folder}' '{folder}' && mount -o remount,bind,ro '{folder}'"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mounted], capture_output=True).returncode:
        pytest.skip("this machine allows no mounts of a user's own")
    script = ["unshare", "-rm", "sh", "-c", f'{mounted} && exec "$@"', "sh", sys.executable, "-c", WALK]
    done = subprocess.run(
        [*script, json.dumps(commands, default=str)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [(code, out, error) for code, out, error in json.loads(done.stdout)]


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_a_colleagues_read_only_folder_is_shown(
    attack: Any, finished: Path, tmp_path: Path, journal: str
) -> None:
    folder = copy_of(finished, tmp_path / journal)
    with closing(sqlite3.connect(folder / "small.db")) as database:
        database.execute({"wal": "PRAGMA journal_mode=wal", "delete": "PRAGMA journal_mode=delete"}[journal])
    before = (folder / "small.db").read_bytes()
    study, url = folder / "study.yaml", f"sqlite:///{folder}/small.db"
    commands: dict[str, list[object]] = {
        "show": ["show", study, "--all", "--json"],
        "show by URL": ["show", url],
        "show --pick": ["show", url, "--pick", 3],
        "export": ["export", study, "--to", "csv"],
        "export --to yaml": ["export", study, "--to", "yaml", "--pick", "within:5%"],
        "report": ["report", study, "--out", tmp_path / "report.html"],
        "ask": ["ask", study],
    }
    commands = commands if journal == "wal" else {name: commands[name] for name in ("show", "export")}
    walked = read_only(folder, *([str(part) for part in command] for command in commands.values()))
    for name, (code, _, error) in zip(commands, walked, strict=True):
        with attack(f"{name} ({journal})"):
            assert code == 0 or "at least 20 complete trials" in error, error
            assert "internal error" not in error, error
    with attack(f"nothing changed ({journal})"):
        assert (folder / "small.db").read_bytes() == before
        assert sum(json.loads(walked[0][1])["trials"].values()) == 16


def test_a_read_only_folder_with_a_log_is_never_shown_as_it_was_before(
    attack: Any, killed: Path, tmp_path: Path
) -> None:
    for lost in ((), ("small.db-shm",)):
        folder = copy_of(killed, tmp_path / str(len(lost)))
        for file in lost:
            (folder / file).unlink()
        with attack(f"a log, without {lost}"):
            ((code, out, error),) = read_only(folder, ["show", str(folder / "study.yaml"), "--json"])
            assert "internal error" not in error, error
            if code:
                assert "opy" in error and "folder" in error, error  # what to do
            else:
                assert json.loads(out)["trials"]["complete"] == 12
    with attack("run says where it could write"):
        ((code, _, error),) = read_only(folder, ["run", str(folder / "study.yaml"), "--serial"])
        assert code in (1, 2) and "internal error" not in error and "writable folder" in error, error


def cut(at: float) -> Any:
    def change(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * at)])

    return change


def statement(sql: str) -> Any:
    def change(path: Path) -> None:
        with closing(sqlite3.connect(path)) as database, database:
            database.executescript(sql)

    return change


SPOILED = {
    "cut in half": cut(0.5),
    "cut by its last tenth": cut(0.9),
    "only its first bytes": cut(0.001),
    "noise": lambda path: path.write_bytes(os.urandom(40_000)),
    "a text": lambda path: path.write_text("study: small\n" * 400),
    "a page of noise in it": lambda path: path.write_bytes(
        path.read_bytes()[:8192] + os.urandom(4096) + path.read_bytes()[12288:]
    ),
    "another program's": lambda path: (
        path.unlink(),
        statement("CREATE TABLE t (x); INSERT INTO t VALUES (1)")(path),
    ),
    "without measurements": statement("DROP TABLE bsearch_measurement"),
    "without trials": statement("DROP TABLE bsearch_trial"),
    "without a column": statement("ALTER TABLE bsearch_trial DROP COLUMN facts"),
    "of an unknown schema": statement("UPDATE bsearch_alembic_version SET version_num = 'x'"),
    "of no schema": statement("DELETE FROM bsearch_alembic_version"),
}


@pytest.mark.parametrize("part", range(2))
def test_a_file_that_is_not_whole_is_told_with_what_helps(
    attack: Any, finished: Path, tmp_path: Path, part: int
) -> None:
    for place, (name, spoil) in list(enumerate(SPOILED.items()))[part::2]:
        folder = copy_of(finished, tmp_path / str(place))
        spoil(folder / "small.db")
        before = (folder / "small.db").read_bytes()
        for command in (("show", "--all"), ("export", "--to", "json"), ("report",), ("run", "--serial")):
            with attack(f"{name}: {command[0]}"):
                result = run(command[0], folder / "study.yaml", *command[1:])
                said = in_words(result)
                if result.exit_code:
                    helps = ("estore", "copy", "another", "Use that version", "bsearch run", "recover")
                    assert any(words in said for words in helps), said
                    assert "is writable, and has free space" not in said, said
                if command[0] != "run":
                    assert (folder / "small.db").read_bytes() == before, "reading changed it"


def test_no_file_is_deleted_by_its_name(attack: Any, finished: Path, tmp_path: Path) -> None:
    """What a killed writer leaves is named as a user's own copy may be."""
    folder = copy_of(finished, tmp_path / "left")
    results = folder / "results" / "small"
    results.mkdir(parents=True)
    files = [results / f".front.csv.{end}" for end in ("previous", "notes", "wxyz_987")]
    for file in files:
        file.write_text("mine")
        os.utime(file, (time.time() - 1e5, time.time() - 1e5))
    in_words(run("run", folder / "study.yaml", "--serial"), 0)
    with attack("somebody's own files"):
        assert [file.read_text() for file in files] == ["mine"] * 3
    with attack("the file itself"):
        assert (results / "front.csv").read_text().startswith("trial,")


class _Late(BaseException):
    """No handler of ordinary errors may take it for one."""


@contextmanager
def within_seconds(seconds: float) -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise _Late(f"blocked for {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Late as error:
        raise AssertionError(str(error)) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_is_no_file_in_a_checkpoints_place_blocks_nothing(attack: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0.pt")
    (tmp_path / "1.pt").mkdir()
    (tmp_path / "2.pt").symlink_to("/dev/tty")
    for place, name in enumerate(("a pipe", "a folder", "a device")):
        with attack(name), within_seconds(5):
            checkpoint = bsearch.Checkpoint(str(tmp_path / f"{place}.pt"), 60.0, "experiment")
            assert checkpoint.load() is None
            assert "could not be read" in str(checkpoint.facts())
