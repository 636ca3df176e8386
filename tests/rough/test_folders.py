"""A study in a folder of any name: every command finds the same database, beside the study file."""

from __future__ import annotations

import os
import sqlite3
import unicodedata
from pathlib import Path

import pytest
from helpers import bsearch
from tiny import tiny_study

KIND = "folder names"

NAMES = [
    "plain",
    "two words",
    " leading",
    "trailing ",
    "what?1",
    "what?mode=ro&uri=true",
    "a#b",
    "My%20Project",
    "100%",
    "%2F",
    "%",
    "run_13:40",
    "C:",
    "sqlite:",
    "a&b=c",
    "a&password=secret",
    "1+1",
    "ann@host",
    "ann:secret@host",
    "it's",
    'say "hi"',
    "`whoami`",
    "$HOME",
    "~",
    "~root",
    "-dash",
    "--help",
    ".hidden",
    "...",
    "a.py",
    "tasks.py:Points",
    "back\\slash",
    "[red]",
    "{0}",
    "{SCHEMA_VERSION}",
    "*",
    "a;b|c",
    "new\nline",
    "tab\there",
    "esc\x1b[31m",
    "na\u00efve",
    unicodedata.normalize("NFD", "na\u00efve"),
    "\u6279\u91cf",
    "\u202eevil",
    "\U0001f9ea",
    "x" * 255,
    os.fsdecode(b"caf\xe9"),
    ":memory:",
]


def printed(*arguments: str) -> str:
    """What a command prints; it must end well, and with no word of a bug."""
    done = bsearch(*arguments)
    assert done.exit_code == 0, (
        f"{arguments[0]} ended with {done.exit_code}: {done.output!r} {done.exception!r}"
    )
    assert "internal error" not in done.output
    return done.output


def trials_in(database: Path) -> int:
    with sqlite3.connect(os.fsencode(database)) as connection:
        count = int(connection.execute("SELECT COUNT(*) FROM bsearch_trial").fetchone()[0])
    connection.close()
    return count


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_folders(attack, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / name
    file = tiny_study(folder)
    monkeypatch.chdir(folder)
    with attack(f"{name!r}: run"):
        assert "Front of small" in printed("run", "--serial", "study.yaml")
        assert trials_in(folder / "small.db") == 2
        assert [path.name for path in tmp_path.iterdir()] == [name]
    monkeypatch.chdir(tmp_path)
    with attack(f"{name!r}: run again"):
        assert "2 of 2 trials" in printed("run", "--serial", str(file))
        assert trials_in(folder / "small.db") == 2
    with attack(f"{name!r}: show"):
        assert "Front of small" in printed("show", str(file))
    monkeypatch.chdir(folder)
    with attack(f"{name!r}: export"):
        assert printed("export", "study.yaml").startswith("trial,")
    with attack(f"{name!r}: report"):
        printed("report", "study.yaml")
        assert (folder / "results" / "small" / "report.html").is_file()
    with attack(f"{name!r}: train"):
        printed("train", "--serial", "study.yaml", "--pick", "best")
        assert list((folder / "results" / "small").glob("trial-*/*"))
    monkeypatch.chdir(tmp_path)
    with attack(f"{name!r}: nothing elsewhere"):
        assert [path.name for path in tmp_path.iterdir()] == [name]
