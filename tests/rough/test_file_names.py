"""Names of parameters, studies and models that lead out of their folder: nothing outside is written."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from conftest import BATCH_AND_RATE
from helpers import bsearch as entered

KIND = "names used as paths"
TASK = """
import bsearch
def Points(setup: bsearch.TrialSetup):
    yield bsearch.Measurement(setup.samples_budget, 0.1, accuracy=0.5 + 0.0001 * setup.effective_batch)
"""
NAMES = [
    "x/../../../../outside/train",
    "../outside/front",
    "/outside/front",
    "a\\..\\b",
    "..",
    ".",
    "~/x",
    "x\x00y",
    "a:b",
]
NAMES += ["n" * 300, "COM1", "a\nb", " ", "-rf", "%2e%2e/x", "\u202egnp", "é/è", "$HOME", "*", "x?y#z"]


def study_in(folder: Path, *parameters: str) -> Path:
    """A study with parameters of these names, run."""
    folder.mkdir(parents=True)
    (folder / "tasks.py").write_text(TASK)
    study = {
        "study": "small",
        "task": "tasks.py:Points",
        "space": BATCH_AND_RATE | {name: {"low": 1, "high": 9} for name in parameters},
        "training": {"samples": 4000, "evaluations": 1},
        "budget": {"trials": 6, "profile_s": 0},
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study))
    ran = entered("run", path, "--serial")
    assert ran.exit_code == 0, ran.output
    return path


def outside(root: Path, inside: Path) -> set[Path]:
    return {
        path
        for path in root.rglob("*")
        if path != inside and inside not in path.parents and path not in inside.parents
    }


@pytest.mark.long
def test_no_parameter_names_a_file_outside_the_study(attack, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    inside = tmp_path / "a" / "b" / "study"
    path = study_in(inside, *NAMES)
    theirs = tmp_path / "outside"
    theirs.mkdir()
    for ending in ("html", "csv", "json"):
        (theirs / f"train.{ending}").write_text("kept")
    for command in (
        ["report", str(path)],
        ["export", str(path), "--out", str(inside / "x.csv")],
        ["show", str(path), "--all"],
    ):
        said = entered(*command)
        for name in NAMES:
            with attack(f"{command[0]}: a parameter {name!r}"):
                assert said.exit_code == 0, said.output[-300:]
                assert {file.read_text() for file in theirs.iterdir()} == {"kept"}
                assert outside(tmp_path, inside) == {theirs, *theirs.iterdir()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return study_in(tmp_path_factory.mktemp("finished") / "study").parent


@pytest.mark.parametrize("number", range(len(NAMES)))
def test_no_stored_name_leads_out_of_the_results(attack, finished: Path, tmp_path: Path, number: int) -> None:  # type: ignore[no-untyped-def]
    name, folder = NAMES[number], tmp_path / "a" / "b" / "study"
    shutil.copytree(finished, folder)
    with closing(sqlite3.connect(folder / "small.db")) as connection, connection:
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            for column in {"name", "study", "base_name"} & columns if table.startswith("bsearch_") else ():
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = 'small'", (name,))  # noqa: S608
    before, url = set(folder.rglob("*")), f"sqlite:///{folder}/small.db"
    for command in (
        ["report", url],
        ["export", url, "--to", "tensorboard"],
        ["train", url, "--pick", "best", "--serial"],
    ):
        with attack(f"{command[0]}: a stored study {name!r}"), pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            said = entered(*command).output
            assert "Traceback" not in said
            assert "internal error" not in said, said
            assert outside(tmp_path, folder) == set()
            new = {file.relative_to(folder).parts[0] for file in set(folder.rglob("*")) - before}
            assert new <= {"results", "__pycache__", "small.db-wal", "small.db-shm"}, new
