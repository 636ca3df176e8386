"""Stored rows altered at random: a row that cannot be read is left out by name, and everything else is shown as before.

BSEARCH_SEED=202648 pytest tests/rough/test_stored_rows.py     # the cases of a week again
"""

# ruff: noqa: S608  # the statements are this file's own

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import warnings
from contextlib import closing, suppress
from datetime import date
from pathlib import Path
from typing import Any

import bsearch
import pytest
import yaml
from click.testing import Result
from conftest import BASELINE, BATCH_AND_RATE
from helpers import bsearch as run
from tiny import POINTS, in_words

KIND = "rows trusted to have this version's shape"
CASES = 32
# The year and ISO week: other cases every week, and the same ones in a week.
SEED = int(os.environ.get("BSEARCH_SEED") or date.today().strftime("%G%V"))
STUDY: dict[str, Any] = {
    "study": "small",
    "task": "tasks.py:Points",
    "space": {
        **BATCH_AND_RATE,
        "rule": ["linear", "sqrt"],
        "epochs": 2,
    },
    "training": {"evaluations": 2},
    "baseline": [BASELINE],
    "budget": {"trials": 6, "profile_s": 0.5},
    "confirm": 1,
}


def written(folder: Path, **changes: Any) -> Path:
    """A study file and its task in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "tasks.py").write_text(POINTS)
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that has met its budget; not to be changed."""
    path = written(tmp_path_factory.mktemp("finished"))
    result = run("run", path, "--serial")
    assert result.exit_code == 0, result.output
    return path.parent


def copy_of(finished: Path, folder: Path) -> Path:
    shutil.copytree(
        finished, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("results", "__pycache__")
    )
    # Under a new path the task is another file of the same code.
    return folder / "study.yaml"


def sql(path: Path, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as database, database:
        database.text_factory = bytes
        return database.execute(statement, values).fetchall()


def trial_rows(database: Path) -> dict[Any, tuple[Any, ...]]:
    return {row[0]: row for row in sql(database, "SELECT number, * FROM bsearch_trial WHERE study = 'small'")}


# What a value may be replaced with, in SQL and inside of a JSON document.
SQL_VALUES: tuple[Any, ...] = (
    *(
        None,
        "",
        "abc",
        "[]",
        "{}",
        "null",
        "5",
        5,
        -1,
        0,
        0.5,
        1e308,
        float("inf"),
        -float("inf"),
        2**62,
        b"\xff\x00",
    ),
    "\ufffd\x00",
    *('{"a": NaN}', "[NaN, Infinity]", "[1]", "\u202egnp\x1b[31m", "9999-99-99T99:99:99"),
)
JSON_VALUES: tuple[Any, ...] = (
    *(
        None,
        "",
        "abc",
        [],
        {},
        True,
        -1,
        0,
        5,
        0.5,
        1e308,
        float("nan"),
        float("inf"),
        -float("inf"),
        2**70,
        "\ud800",
        [1, "a"],
    ),
)
DOCUMENTS = {
    "bsearch_study": ("identity", "spec", "step_times", "best_rates"),
    "bsearch_profile": ("about", "profile"),
    "bsearch_trial": ("parameters", "facts", "objectives"),
    "bsearch_attempt": ("setup",),
    "bsearch_measurement": ("scores",),
}
TABLES = (*DOCUMENTS, "bsearch_trial", "bsearch_trial")  # twice as often: they are the results


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON document."""
    inner = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


def altered_document(draw: random.Random, text: str) -> str:
    document = json.loads(text)
    path = draw.choice(places(document))
    if not path:
        return json.dumps(draw.choice(JSON_VALUES))
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    match draw.randrange(4):
        case 0 if isinstance(parent, dict):
            del parent[path[-1]]
        case 1 if isinstance(parent, dict):
            parent["a_key_of_a_newer_version"] = draw.choice(JSON_VALUES)
        case _:
            parent[path[-1]] = draw.choice(JSON_VALUES)
    return json.dumps(document)


def alter(draw: random.Random, database: Path) -> tuple[str, Any]:
    """Alter a row; returns what was done, and the number of the trial that it changed, if it did."""
    while True:
        table = draw.choice(TABLES)
        (rowid,) = draw.choice(sql(database, f"SELECT rowid FROM {table}"))
        columns = [row[1].decode() for row in sql(database, f"PRAGMA table_info({table})")]
        number = (
            sql(database, f"SELECT number FROM {table} WHERE rowid = ?", rowid)[0][0]
            if "trial" in table
            else None
        )
        kind = draw.choice(("document", "document", "column", "delete"))
        if kind == "delete":
            sql(database, f"DELETE FROM {table} WHERE rowid = ?", rowid)
            return f"a row of {table} deleted ({number})", number
        column = draw.choice(DOCUMENTS[table] if kind == "document" else columns)
        ((text,),) = sql(database, f"SELECT {column} FROM {table} WHERE rowid = ?", rowid)
        if kind == "document" and text is None:
            continue
        value = altered_document(draw, text.decode()) if kind == "document" else draw.choice(SQL_VALUES)
        try:
            sql(database, f"UPDATE {table} SET {column} = ? WHERE rowid = ?", value, rowid)
        except (sqlite3.IntegrityError, UnicodeEncodeError):
            continue
        return f"{table}.{column} of row {rowid} ({number}) = {value!r:.300}", number


def walk(path: Path, number: int) -> dict[str, Result]:
    """Every command that reads a study."""
    url = f"sqlite:///{path.parent}/small.db"
    return {
        "show": run("show", path),
        "show --all": run("show", path, "--all"),
        "show --all --json": run("show", f"{url}#small", "--all", "--json"),
        "show --pick": run("show", path, "--pick", number),
        "export --to csv": run("export", path, "--all"),
        "export --to json": run("export", path, "--to", "json"),
        "ask": run("ask", path),
    }


def trials_of(shown: Result) -> dict[int, Any]:
    return {trial["trial"]: trial for trial in json.loads(shown.stdout)["all"]}


HOLDERS = {
    "nonsense": "nonsense",
    "empty": "",
    "two colons": "::",
    "no process": "host:pid:2026-01-01 00:00:00 UTC x-y",
    "no time": "vm:12:then x-y",
    "a process that cannot be": f"{os.uname().nodename}:{10**30}:2026-01-01 00:00:00 UTC -y",
    "this process": f"{os.uname().nodename}:{os.getpid()}:2026-01-01 00:00:00 UTC -y",
    "a number": 7,
    "bytes": b"\xff:\x00:",
    "controls": "\x1b[31m:7:2026",
}


@pytest.mark.long
def test_a_holder_of_any_form_holds_until_its_lock_expires(
    attack: Any, finished: Path, tmp_path: Path
) -> None:
    now = "(julianday('now') - 2440587.5) * 86400.0"
    for place, (name, holder) in enumerate(HOLDERS.items()):
        path = copy_of(finished, tmp_path / str(place))
        database = path.parent / "small.db"
        for alive in (True, False):
            change = f"UPDATE bsearch_study SET holder = ?, heartbeat_at = {now if alive else 'NULL'}"
            sql(database, change, holder)
            with attack(f"{name}, {'alive' if alive else 'long gone'}: show and check"):
                in_words(run("show", path), 0)
                in_words(run("check", path, "--machine", "--serial"))
            with attack(f"{name}, {'alive' if alive else 'long gone'}: run"):
                said = in_words(run("run", path, "--serial", "--trials", 7 if alive else 8))
                if not alive:
                    assert "Front of small" in said, said
                elif name not in ("a process that cannot be", "empty"):  # it has ended, and nobody holds it
                    assert "has been running it since" in said and "\x1b" not in said, said


@pytest.mark.parametrize("part", range(4))
def test_any_row_may_be_altered(attack: Any, finished: Path, tmp_path: Path, part: int) -> None:
    before = trials_of(run("show", f"sqlite:///{finished}/small.db", "--all", "--json"))
    for case in range(part, CASES, 4):
        draw = random.Random(f"{SEED}-{case}")
        path = copy_of(finished, tmp_path / str(case))
        database = path.parent / "small.db"
        what, number = alter(draw, database)
        with attack(f"BSEARCH_SEED={SEED}, case {case}: {what}"):
            walked = walk(path, number if isinstance(number, int) and 0 <= number < 6 else 3)
            for command, result in walked.items():
                try:
                    # A study's results outlive any other row: only its own may end a command that shows them.
                    in_words(
                        result,
                        *(() if "bsearch_study" in what or command in ("show --pick", "ask") else (0,)),
                    )
                except AssertionError as error:
                    raise AssertionError(f"{command}: {error}") from None
            if (shown := walked["show --all --json"]).exit_code == 0:
                now = trials_of(shown)
                others = {other: trial for other, trial in before.items() if other != number}
                same = ("outcome", "accuracy", "train_s", "effective_batch", "learning_rate")
                assert all(now[other][key] == trial[key] for other, trial in others.items() for key in same)
                if number in before and (
                    number not in now or now[number]["outcome"] not in ("complete", "stopped")
                ):
                    assert f"trial {number}" in shown.stderr + walked["show --all"].output, (
                        "left out without a word"
                    )
            if case % 3 == 0:
                in_words(run("report", path))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    with suppress(bsearch.BsearchError):
                        bsearch.Study(str(path)).front.to_frame()
            kept = trial_rows(database)
            in_words(run("run", path, "--serial"))
            now_kept = trial_rows(database)
            assert all(
                now_kept.get(other) == row for other, row in kept.items() if row[3] != b"interrupted"
            ), "a row changed"
