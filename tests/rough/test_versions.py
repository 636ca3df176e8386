"""Databases of an earlier version, and of a pretended newer one: shown, exported and resumed, or refused in words."""

from __future__ import annotations

import gzip
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from conftest import BATCH_AND_RATE
from helpers import bsearch as run
from tiny import POINTS, in_words

KIND = "databases of other versions"
pytestmark = pytest.mark.long
DATA = Path(__file__).parents[1] / "data" / "databases"
# The study in 0d7e093-points.sql.gz, written by that commit: its driver was killed in its ninth trial.
STUDY: dict[str, Any] = {
    "study": "small",
    "task": "tasks.py:Points",
    "space": BATCH_AND_RATE,
    "training": {"evaluations": 2},
    "baseline": [{"effective_batch": 64, "reference_rate": 0.1}],
    "stopping": "none",
    "confirm": 1,
    "budget": {"trials": 12, "profile_s": 0.5},
}


def earlier(folder: Path) -> Path:
    """The study file of the study as 0d7e093 left it."""
    folder.mkdir(exist_ok=True)
    (folder / "tasks.py").write_text(POINTS)
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(STUDY, sort_keys=False))
    change(path, gzip.decompress((DATA / "0d7e093-points.sql.gz").read_bytes()).decode())
    return path


def change(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path.parent / "small.db")) as database, database:
        database.executescript(script)


def trials(path: Path) -> dict[int, tuple[Any, ...]]:
    with closing(sqlite3.connect(path.parent / "small.db")) as database:
        return {row[1]: row for row in database.execute("SELECT * FROM bsearch_trial ORDER BY number")}


LOOK = {
    "show": ("show", "study.yaml"),
    "show --all": ("show", "study.yaml", "--all", "--json"),
    "show --pick": ("show", "study.yaml", "--pick", "3"),
    "export --to csv": ("export", "study.yaml", "--all"),
    "export --to yaml": ("export", "study.yaml", "--to", "yaml", "--pick", "within:5%"),
    "report": ("report", "study.yaml"),
}


def look(path: Path, command: str) -> Result:
    name, file, *options = LOOK[command]
    return run(name, path.parent / file, *options)


def test_a_database_of_the_commit_before_is_shown_and_goes_on(attack: Any, tmp_path: Path) -> None:
    path = earlier(tmp_path / "earlier")
    before = trials(path)
    for command in LOOK:
        with attack(command):
            result = look(path, command)
            in_words(result, 0)
            assert "left out" not in result.stderr, result.stderr
    with attack("run"):
        said = in_words(run("run", path, "--serial"), 0)
        now = trials(path)
        ended = {number: row for number, row in before.items() if row[2] == "complete"}
        assert len(ended) == 8 and {number: now[number] for number in ended} == ended, said
        assert sum(row[2] == "complete" for row in now.values()) == 12


NEWER = {
    "a column with data": "ALTER TABLE bsearch_trial ADD COLUMN dream TEXT; UPDATE bsearch_trial SET dream = 'of ' || number;",
    "a column of attempts": "ALTER TABLE bsearch_attempt ADD COLUMN dream TEXT NOT NULL DEFAULT 'x';",
    "a table": "CREATE TABLE bsearch_dream (study TEXT, dream TEXT); INSERT INTO bsearch_dream VALUES ('small', 'x');",
    "a key of the study": "UPDATE bsearch_study SET spec = json_set(spec, '$.dream', json('{\"depth\": 3}'));",
    "a key of a section": "UPDATE bsearch_study SET spec = json_set(spec, '$.training.glow', 0.5);",
    "a sampler": "UPDATE bsearch_study SET spec = json_set(spec, '$.sampler', 'oracle');",
    "a fact": "UPDATE bsearch_trial SET facts = json_set(facts, '$.dream', json('[1, {\"a\": null}]'));",
    "an outcome": "UPDATE bsearch_trial SET outcome = 'evolved' WHERE number = 3;",
    "a third value": "UPDATE bsearch_trial SET objectives = json_insert(objectives, '$[#]', 7.5) WHERE number = 3;",
    "a key of setups": "UPDATE bsearch_attempt SET setup = json_set(setup, '$.glow', 0.5);",
    "a key of profiles": "UPDATE bsearch_profile SET profile = json_set(profile, '$.glow', 0.5);",
    "a key of step times": 'UPDATE bsearch_study SET step_times = replace(step_times, \'"devices"\', \'"glow":1,"devices"\');',
}
# What is said of it, by every command that shows trials.
SAID = {
    "a key of the study": "spec.dream",
    "a key of a section": "spec.training.glow",
    "a sampler": "spec.sampler",
    "an outcome": "trial 3 of study small (bsearch_trial): outcome: expected one of",
    "a third value": "trial 3 of study small (bsearch_trial): objectives: expected 2 numbers",
}


def test_what_a_newer_version_adds_is_left_alone_and_said(attack: Any, tmp_path: Path) -> None:
    for place, (name, script) in enumerate(NEWER.items()):
        path = earlier(tmp_path / str(place))
        change(path, script)
        before = trials(path)
        for command in LOOK:
            with attack(f"{name}: {command}"):
                result = look(path, command)
                if name == "a key of setups" and command == "export --to yaml":
                    # Those settings would not be the ones that were trained.
                    assert "glow" in in_words(result, 1, 2)
                else:
                    in_words(result, 0)
                    assert result.stderr.count(SAID.get(name, "")) == 1 or name not in SAID, result.stderr
        with attack(f"{name}: run"):
            result = run("run", path, "--serial")
            in_words(result, 0)
            assert SAID.get(name, "") in result.output
            now = trials(path)
            ended = {number: row for number, row in before.items() if row[2] in ("complete", "evolved")}
            assert {number: now[number] for number in ended} == ended
            if name == "a column with data":
                assert {row[-1] for number, row in now.items() if number in before} == {
                    f"of {number}" for number in before
                }


def test_what_would_not_be_the_same_experiment_is_refused_by_name(attack: Any, tmp_path: Path) -> None:
    path = earlier(tmp_path / "identity")
    change(path, "UPDATE bsearch_study SET identity = json_set(identity, '$.training.glow', 0.5);")
    before = trials(path)
    with attack("show"):
        in_words(look(path, "show"), 0)
    with attack("run"):
        assert "training.glow" in in_words(run("run", path, "--serial"), 2)
        assert trials(path) == before
    path = earlier(tmp_path / "schema")
    change(
        path,
        "UPDATE bsearch_alembic_version SET version_num = '9999'; ALTER TABLE bsearch_trial ADD COLUMN dream TEXT;",
    )
    for command in (*LOOK, "run"):
        with attack(f"a newer schema: {command}"):
            result = run("run", path, "--serial") if command == "run" else look(path, command)
            assert "schema 9999, known here up to" in in_words(result, 1)
    for key, spec in {
        "training": "json_set(spec, '$.training.precision', 'fp3')",
        "objectives": "json_set(spec, '$.objectives.metric.direction', 'sideways')",
    }.items():
        path = earlier(tmp_path / key)
        change(path, f"UPDATE bsearch_study SET spec = {spec}")  # noqa: S608  # our own
        with attack(f"results are read by {key}"):
            said = in_words(look(path, "show"), 1)
            assert f"study small (bsearch_study): spec.{key}." in said
