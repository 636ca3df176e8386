"""A trial is read as it was written; Optuna's copy of it says the same; and old databases are brought up to date."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import optuna
import pytest
import sqlalchemy as sa
from bsearch.objectives import digits
from bsearch.search.store import schema
from bsearch.search.store.rows import StudyRow
from bsearch.search.store.tables import Tables
from bsearch.search.store.trials import Trials
from bsearch.search.suggest.optuna.copy import record_of
from bsearch.search.suggest.optuna.database import OptunaDatabase
from bsearch.search.suggest.space_transform import SearchSpace
from bsearch.spaces.domain import Choices, Range
from bsearch.spaces.errors import LeftOutWarning, StorageError
from bsearch.spaces.record import TrialFacts, TrialRecord, TrialResult
from bsearch.spaces.study.cluster import Cluster
from bsearch.spaces.study.goals import Objectives
from bsearch.spaces.trial import OutcomeKind
from helpers import as_optuna, setup
from helpers import bsearch as invoked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.distributions import IntDistribution

DATA = Path(__file__).parents[2] / "data" / "databases"
SPACE = SearchSpace.of(
    {
        "effective_batch": Range(low=1, high=4096, log=True),
        "reference_rate": Range(low=1e-5, high=10.0, log=True),
        "width": Choices(choices=("a", "b", True)),
        "layers": Range(low=2, high=20, step=3),
    }
)
PARAMETERS = {
    "effective_batch": st.integers(1, 4096),
    "reference_rate": st.floats(1e-5, 10.0),
    "width": st.sampled_from(["a", "b", True]),
    "layers": st.sampled_from(range(2, 21, 3)),
}
PLAIN = st.one_of(st.integers(-5, 5), st.text(max_size=5), st.lists(st.integers(0, 3), max_size=2))
FACTS = st.fixed_dictionaries(
    {},
    optional={
        "train_s": st.floats(0.1, 9.0),
        "betas": st.just([0.9, 0.99]),
        "learning_rate": st.floats(1e-5, 1.0),
        "message": st.text(max_size=5),
        "something else": PLAIN,
    },
)
SECONDS = st.floats(0, 1e30)
RESULTS = get_args(OutcomeKind)


@st.composite
def lives(draw: st.DrawFn) -> list[Any]:
    """A trial's parameters, and what becomes of it: facts, a pause, a result."""
    names = draw(st.sets(st.sampled_from(sorted(PARAMETERS))))
    life: list[Any] = [{name: draw(PARAMETERS[name]) for name in names}, TrialFacts.of(draw(FACTS))]
    if draw(st.booleans()):
        life.append(draw(st.sampled_from(["paused", "interrupted"])))
    if draw(st.booleans()):
        outcome = draw(st.sampled_from(RESULTS))
        finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
        values = (draw(SECONDS), draw(finite)) if outcome in ("complete", "diverged") else None
        violation = draw(st.floats(0.1, 9.0)) if outcome == "infeasible" else 0.0
        life.append(TrialResult(outcome, TrialFacts.of(draw(FACTS)), values, violation))
    return life


def lived(trials: Trials, life: list[Any]) -> None:
    parameters, facts, *rest = life
    number = trials.begin(parameters, facts).number
    for step in rest:
        if isinstance(step, TrialResult):
            trials.end(number, step)
        else:
            trials.change(number, TrialFacts(host="h"), step)
            trials.resume(number)


def without_dates(record: TrialRecord) -> TrialRecord:
    extra = {name: value for name, value in record.facts.extra.items() if name != "ended_at"}
    return replace(
        record,
        started_at="",
        ended_at="" if not record.ended_at else "once",
        facts=replace(record.facts, extra=extra),
    )


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(several=st.lists(lives(), max_size=6), steps=st.lists(st.booleans(), min_size=6, max_size=6))
def test_a_trial_is_read_as_it_was_written_and_its_copy_says_the_same(
    several: list[list[Any]], steps: list[bool], tmp_path_factory: Any
) -> None:
    url = f"sqlite:///{tmp_path_factory.mktemp('twin')}/twin.db"
    trials = Trials(Tables(url), "twin")
    copy = OptunaDatabase(url, "twin", Objectives(), SPACE)
    for life, copied in zip(several, steps, strict=False):
        lived(trials, life)
        if copied:  # as a trial goes, or all at the end
            copy.update(trials)
    assert Tables(url, create=False).trials("twin") == list(trials)
    copy.close()
    again = OptunaDatabase(url, "twin", Objectives(), SPACE)  # another process
    again.update(trials)
    assert again.update(trials) == []
    study = optuna.load_study(study_name="twin", storage=url)
    assert [trial.number for trial in study.trials] == [trial.number for trial in trials]
    for ours, theirs in zip(trials, study.trials, strict=True):
        assert theirs.state.is_finished() == ours.has_ended
        if ours.has_ended:
            # Optuna's dashboard would draw a front through the values of a trial that diverged.
            read, written = record_of(theirs, "maximize"), replace(ours, violation=0.0)
            if ours.outcome == "diverged":
                assert read.values is None
                read, written = (
                    replace(each, train_s=None, accuracy=None, values=None) for each in (read, written)
                )
            assert without_dates(read) == without_dates(written)
            feasible = ours.outcome not in ("diverged", "infeasible")
            assert all((bound <= 0) == feasible for bound in theirs.constraints.values())
        else:
            assert (theirs.params, theirs.user_attrs) == (
                ours.parameters,
                {"outcome": ours.outcome, **ours.facts.to_dict()},
            )


def test_what_goes_on_is_seen_and_what_ended_is_read_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/twin.db"
    trials = Trials(Tables(url), "twin")
    for _ in range(2):
        trials.begin({"effective_batch": 4})
    trials.end(0, TrialResult("complete", values=(1.0, 0.5)))
    reader = Trials(Tables(url, create=False), "twin")
    before = list(reader)
    assert [record.outcome for record in before] == ["complete", "running"]
    trials.end(1, TrialResult("error"))
    trials.begin({"effective_batch": 5})
    reader.refresh()
    assert [record.outcome for record in reader] == ["complete", "error", "running"]
    assert reader[0] is before[0]
    assert list(reader) == list(trials)


def test_a_trial_that_was_deleted_is_missed(tmp_path: Path) -> None:
    """A trial's number is its place: no other takes it, at the end neither where an attempt tells that it was there."""
    url = f"sqlite:///{tmp_path}/twin.db"
    tables = Tables(url)
    trials = Trials(tables, "twin")
    for batch in (4, 5, 6, 7):
        trials.begin({"effective_batch": batch})
    tables.start_attempt(replace(setup(), study="twin", number=3))
    with tables.engine.begin() as connection:
        connection.execute(sa.delete(schema.trials).where(schema.trials.c.number.in_((1, 3))))
    with pytest.warns(
        LeftOutWarning, match=r"left out: trials 1, 3 of study twin \(bsearch_trial\): its row is missing"
    ):
        again = Trials(tables, "twin")
    assert [trial.outcome for trial in again] == ["running", "unreadable", "running", "unreadable"]
    assert again.begin({"effective_batch": 8}).number == 4
    with pytest.warns(LeftOutWarning):
        stored = Tables(url, create=False).trials("twin")
    assert stored == list(again)


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("objectives", "[1.5]", "objectives: expected 2 numbers, got [1.5]"),
        ("objectives", "[NaN, 0.5]", "objectives: expected a finite number >= 0, got nan"),
        ("objectives", None, "objectives: expected the values of a complete trial, got none"),
        ("facts", '{"train_s": Infinity}', "facts.train_s: expected a finite number >= 0, got inf"),
        ("facts", '{"repeats": 9}', "facts.repeats: expected an earlier trial, got 9"),
        ("parameters", "nonsense", "parameters: expected JSON, got 'nonsense'"),
        ("outcome", "evolved", "outcome: expected one of complete, "),
        (
            "started_at",
            "yesterday",
            "started_at: expected a time such as 2026-01-31T12:00:00+00:00, got 'yesterday'",
        ),
    ],
)
def test_a_trial_that_cannot_be_read_keeps_its_number_and_its_row(
    tmp_path: Path, column: str, value: Any, why: str
) -> None:
    url = f"sqlite:///{tmp_path}/twin.db"
    tables = Tables(url)
    trials = Trials(tables, "twin")
    for _ in range(2):
        trials.begin({"effective_batch": 4}, TrialFacts(baseline=0))
        trials.end(len(trials) - 1, TrialResult("complete", values=(1.0, 0.5)))
    with tables.engine.begin() as connection:
        connection.execute(
            sa.update(schema.trials).where(schema.trials.c.number == 0).values({column: value})
        )
    with pytest.warns(
        LeftOutWarning, match=re.escape(f"left out: trial 0 of study twin (bsearch_trial): {why}")
    ):
        bad, good = Trials(tables, "twin")
    assert (bad.outcome, bad.has_ended, bad.counts, good) == ("unreadable", True, 0.0, trials[1])


def test_facts_that_only_earlier_versions_know_are_kept_beside_the_others(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/twin.db"
    tables = Tables(url)
    Trials(tables, "twin").begin({"effective_batch": 4})
    noise = {"noise_scale": 182.3, "noise_scale_low": 0.0, "noise_scale_high": 418.0}
    with tables.engine.begin() as connection:
        connection.execute(sa.update(schema.trials).values(facts=json.dumps({"seed": 3, **noise})))
    [trial] = Trials(tables, "twin")
    assert (trial.outcome, trial.facts.seed, trial.facts.extra) == ("running", 3, noise)


def test_a_study_of_a_newer_version_is_read_without_what_it_adds() -> None:
    spec = {
        "study": "new",
        "task": "tasks.py:New",
        "space": {"effective_batch": 8, "reference_rate": 0.1},
        "dream": 1,
    }
    spec |= {"training": {"seed": 3, "glow": True}, "sampler": "oracle"}
    spec["cluster"] = {"address": "auto", "trials_at_once": "few"}
    with pytest.warns(LeftOutWarning) as said:
        read = StudyRow({"name": "new", "spec": json.dumps(spec)}).study
    assert (read.training.seed, read.sampler, read.cluster) == (3, "front", Cluster())
    words = {str(warning.message).partition("): ")[2].partition(":")[0] for warning in said}
    assert words == {"spec.dream", "spec.training.glow", "spec.sampler", "spec.cluster.trials_at_once"}
    spec["training"]["precision"] = "fp3"
    with pytest.raises(
        StorageError, match=r"study new \(bsearch_study\): spec.training.precision: .*got 'fp3'.*--new"
    ):
        _ = StudyRow({"name": "new", "spec": json.dumps(spec)}).study


@pytest.mark.parametrize("change", ["added", "ended", "other", "told"])
def test_a_copy_that_others_have_written_is_made_anew_with_their_notes(tmp_path: Path, change: str) -> None:
    notes = pytest.importorskip("optuna_dashboard")
    url = f"sqlite:///{tmp_path}/twin.db"
    trials = Trials(Tables(url), "twin")
    for batch in (4, 5):
        trials.begin({"effective_batch": batch})
    trials.end(0, TrialResult("complete", values=(1.0, 0.5)))
    copy = OptunaDatabase(url, "twin", Objectives(), SPACE)
    copy.update(trials[:1] if change == "other" else trials)
    study = optuna.load_study(study_name="twin", storage=url)
    notes.save_note(study, "Ours")
    notes.save_note(optuna.Trial(study, study.trials[0]._trial_id), "The first")
    if change in ("ended", "told"):
        study.tell(1, [3.0, 0.9])
    else:
        study.enqueue_trial({"effective_batch": 9})
        study.ask({"effective_batch": IntDistribution(1, 4096, log=True)})
    trials.end(1, TrialResult("complete", values=(3.0, 0.8)) if change == "told" else TrialResult("error"))
    copy.update(trials)  # the process that has written it so far
    again = OptunaDatabase(url, "twin", Objectives(), SPACE)
    again.update(trials)
    assert again.update(trials) == []
    study = optuna.load_study(study_name="twin", storage=url)
    assert [trial.params for trial in study.trials] == [trial.parameters for trial in trials]
    assert [trial.values for trial in study.trials] == [
        trial.values and list(trial.values) for trial in trials
    ]
    noted = [study, *(optuna.Trial(study, trial._trial_id) for trial in study.trials)]
    assert [notes.get_note(one) for one in noted] == ["Ours", "The first", ""]
    assert study.metric_names == ["train_s", "accuracy"]
    assert Tables(url, create=False).trials("twin") == list(trials)


@pytest.mark.parametrize("theirs", ["", "second", "third"])
@pytest.mark.parametrize("trial", [None, 0])
def test_a_note_is_replaced_until_a_person_changes_it(tmp_path: Path, trial: int | None, theirs: str) -> None:
    """Also where an update is killed before or after a note is saved, and where the person restores an earlier one."""
    notes = pytest.importorskip("optuna_dashboard")
    trials = Trials()
    trials.begin({"effective_batch": 4})
    copy = OptunaDatabase(f"sqlite:///{tmp_path}/twin.db", "twin", Objectives(), SPACE)
    copy.update(trials)
    study = optuna.load_study(study_name="twin", storage=copy.storage)
    noted = study if trial is None else optuna.Trial(study, study.trials[trial]._trial_id)

    def write(text: str, save: Any = notes.save_note) -> str:
        copy.update(trials)
        copy.annotate({trial: text}, notes.get_note, save)
        return str(notes.get_note(noted))

    def killed(noted: Any, text: str) -> None:
        if text == "second":
            notes.save_note(noted, text)
        raise KeyboardInterrupt

    for text in ("first", "second"):
        with pytest.raises(KeyboardInterrupt):
            write(text, killed)
        assert write(text) == text
    assert write("third") == "third"
    notes.save_note(noted, theirs)
    assert write("fourth") == ("fourth" if theirs == "third" else theirs)


def test_a_study_of_somebody_else_is_left(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/twin.db"
    study = optuna.create_study(study_name="twin", storage=url, directions=["minimize", "maximize"])
    study.tell(study.ask({"effective_batch": IntDistribution(1, 4096, log=True)}), [3.0, 0.9])
    with pytest.raises(
        StorageError, match="it holds another study named twin, whose trials are none of bsearch's"
    ):
        OptunaDatabase(url, "twin", Objectives(), SPACE).update(Trials())
    assert [trial.values for trial in study.trials] == [[3.0, 0.9]]


def test_settings_outside_of_what_is_searched_are_copied(tmp_path: Path) -> None:
    """The user's own may lie there."""
    url = f"sqlite:///{tmp_path}/twin.db"
    trials = Trials()
    trials.begin({"effective_batch": 9000, "reference_rate": 1e-7, "layers": 3})
    OptunaDatabase(url, "twin", Objectives(), SPACE).update(trials)
    (copy,) = optuna.load_study(study_name="twin", storage=url).trials
    assert copy.params == trials[0].parameters


def test_the_newest_revision_is_the_one_we_write() -> None:
    assert max(schema.known_revisions()) == schema.HEAD


def dump(commit: str) -> str:
    """A database that a commit has written, as SQL."""
    return gzip.decompress((DATA / f"{commit}.sql.gz").read_bytes()).decode()


@pytest.fixture
def old(tmp_path: Path) -> str:
    """The URL of a database of commit d3bcd352, whose driver was killed beside finished and running trials of digits."""
    with closing(sqlite3.connect(tmp_path / "digits.db")) as database, database:
        database.executescript(dump("d3bcd352"))
    return f"sqlite:///{tmp_path}/digits.db"


def test_a_new_database_is_what_the_first_revision_was(tmp_path: Path, old: str) -> None:
    def columns(engine: sa.Engine) -> dict[str, list[tuple[str, str, bool, bool]]]:
        found = sa.inspect(engine)
        return {
            table: [
                (column["name"], str(column["type"]), column["nullable"], bool(column["primary_key"]))
                for column in found.get_columns(table)
            ]
            for table in found.get_table_names()
            if table.startswith("bsearch_")
        }

    new = Tables(f"sqlite:///{tmp_path}/new.db").engine
    assert columns(new) == columns(sa.create_engine(old, poolclass=sa.NullPool))


@pytest.mark.slow
def test_a_study_of_the_commit_before_is_shown_and_goes_on(tmp_path: Path, old: str) -> None:
    tables = Tables(old, create=False)
    before, attempts, curves = tables.trials("digits"), tables.attempts("digits"), tables.curves("digits")
    assert sum(trial.has_ended for trial in before) == len(before) - 1
    with closing(sqlite3.connect(tmp_path / "digits.db")) as database:
        stored = database.execute(
            "SELECT number, outcome, parameters, facts, objectives FROM bsearch_trial"
        ).fetchall()
    for trial, (number, outcome, parameters, facts, objectives) in zip(before, stored, strict=True):
        assert (trial.number, trial.outcome, trial.parameters) == (number, outcome, json.loads(parameters))
        assert json.loads(json.dumps(trial.facts.to_dict())) == json.loads(facts)
        assert list(trial.values or ()) == json.loads(objectives or "[]")
    path = tmp_path / "digits.yaml"
    path.write_text((Path(digits.__file__).parents[1] / "examples" / "digits.yaml").read_text())

    def bsearch(*arguments: object) -> str:
        result = invoked(*arguments)
        assert result.exit_code == 0, result.output
        assert "left out" not in result.output
        return result.output

    complete = sum(trial.outcome == "complete" for trial in before)
    assert json.loads(bsearch("show", path, "--json"))["trials"]["complete"] == complete
    bsearch("show", path, "--all")
    bsearch("run", path, "--serial", "--trials", len(before) + 1, "--same-experiment")
    trials = tables.trials("digits")
    assert [trial for trial, was in zip(trials, before, strict=False) if was.has_ended] == before[:-1]
    assert trials[len(before) - 1].outcome in ("complete", "stopped", "diverged")
    assert tables.attempts("digits")[: len(attempts) - 1] == attempts[:-1]
    now = tables.curves("digits")
    assert [now[trial.number] for trial in before[:-1]] == [curves[trial.number] for trial in before[:-1]]
    copied = as_optuna(tmp_path / "digits.db", "digits").trials
    assert [trial.user_attrs["outcome"] for trial in copied] == [trial.outcome for trial in trials]


# The first tables that bsearch has had, in SQLite; the five migrations from there on went when they became one.
FIRST = """
CREATE TABLE bsearch_alembic_version (
    version_num VARCHAR(32) NOT NULL, CONSTRAINT bsearch_alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE bsearch_study (
    name VARCHAR(120) NOT NULL, base_name VARCHAR(120) NOT NULL, identity TEXT NOT NULL, spec TEXT NOT NULL,
    created_at VARCHAR(40) NOT NULL, driver_s FLOAT NOT NULL, holder VARCHAR(200), heartbeat_at FLOAT, PRIMARY KEY (name)
);
CREATE TABLE bsearch_profile (
    "key" VARCHAR(64) NOT NULL, about TEXT NOT NULL, profile TEXT NOT NULL, measured_at VARCHAR(40) NOT NULL,
    PRIMARY KEY ("key")
);
CREATE TABLE bsearch_attempt (
    study VARCHAR(120) NOT NULL, number INTEGER NOT NULL, attempt INTEGER NOT NULL, setup TEXT NOT NULL,
    started_at VARCHAR(40) NOT NULL, ended_at VARCHAR(40), outcome VARCHAR(20), message TEXT, traceback TEXT, result TEXT,
    PRIMARY KEY (study, number, attempt)
);
CREATE TABLE bsearch_measurement (
    study VARCHAR(120) NOT NULL, number INTEGER NOT NULL, attempt INTEGER NOT NULL, samples_seen BIGINT NOT NULL,
    elapsed_s FLOAT NOT NULL, accuracy FLOAT, train_loss FLOAT, scores TEXT NOT NULL,
    PRIMARY KEY (study, number, attempt, samples_seen)
);
INSERT INTO bsearch_study VALUES ('old', 'old', '{}', '{}', '2026', 1.5, NULL, NULL);
"""


@pytest.mark.parametrize("revision", ["0001", "0005"])
@pytest.mark.parametrize("create", [False, True])
def test_a_database_of_an_older_revision_is_refused_with_what_reads_it(
    tmp_path: Path, revision: str, create: bool
) -> None:
    file = tmp_path / "old.db"
    with closing(sqlite3.connect(file)) as database, database:
        database.executescript(FIRST)
        database.execute("INSERT INTO bsearch_alembic_version VALUES (?)", (revision,))
        before = list(database.iterdump())
    with pytest.raises(
        StorageError,
        match=rf"old.db: an older bsearch has written it \(schema {revision}, known here from 0006 on\). "
        "Open it once with commit 0d7e093",
    ):
        Tables(f"sqlite:///{file}", create=create)
    with closing(sqlite3.connect(file)) as database:
        assert list(database.iterdump()) == before


# Of a later version, whose schema has one more column.
NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "0007", "0006"

def upgrade():
    op.add_column("bsearch_trial", sa.Column("dream", sa.Text))
    for number in range(400):
        changed = sa.text("UPDATE bsearch_trial SET dream = :dream WHERE number = :number")
        op.execute(changed.bindparams(dream=f"of {number}", number=number))
"""
OPEN = """
import sys
from pathlib import Path
from bsearch.search.store import schema
from bsearch.search.store.tables import Tables
schema.HEAD, schema._MIGRATIONS = "0007", Path(sys.argv[2])
print("begin", flush=True)
Tables(sys.argv[1])
"""


@pytest.fixture
def next_version(tmp_path: Path) -> Path:
    """The folder of migrations of a version whose newest is 0007."""
    folder = tmp_path / "migrations"
    shutil.copytree(
        Path(schema.__file__).parent / "migrations", folder, ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "versions" / "v0007_dream.py").write_text(NEXT)
    return folder


@pytest.mark.slow
def test_a_migration_that_is_killed_goes_on(tmp_path: Path, next_version: Path) -> None:
    url = f"sqlite:///{tmp_path}/small.db"
    tables = Tables(url)
    trials = Trials(tables, "small")
    for batch in range(1, 401):
        trials.begin({"effective_batch": batch})
    killed, written = 0, tables.trials("small")
    for wait_s in (0.05, 0.1, 0.15, 0.2, 0.3, None):
        command = [sys.executable, "-c", OPEN, url, str(next_version)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            if wait_s is not None:
                time.sleep(wait_s)
                process.kill()
            process.wait(60)
        with tables.engine.connect() as connection:
            killed += schema.revision_of(connection) == "0006"
    assert killed
    with tables.engine.connect() as connection:
        assert schema.revision_of(connection) == "0007"
        dreams = (
            connection.execute(sa.text("SELECT dream FROM bsearch_trial ORDER BY number")).scalars().all()
        )
    assert dreams == [f"of {number}" for number in range(400)]
    assert tables.trials("small") == written


def test_a_study_that_an_older_driver_runs_is_not_changed_under_it(
    tmp_path: Path, next_version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/small.db"
    tables = Tables(url)
    tables.save_study("old", "old", {}, {})
    tables.lock.acquire("old")
    monkeypatch.setattr(schema, "HEAD", "0007")
    monkeypatch.setattr(schema, "_MIGRATIONS", next_version)
    with pytest.raises(
        StorageError,
        match=rf"study old: an older bsearch has been running it since .* \(process {os.getpid()} ",
    ):
        Tables(url, create=False)
    with tables.engine.connect() as connection:
        assert schema.revision_of(connection) == "0006"
    tables.lock.release("old")
    Tables(url, create=False)
    with tables.engine.connect() as connection:
        assert schema.revision_of(connection) == "0007"


def test_a_file_that_was_deleted_is_missed_also_where_another_is_in_its_place(tmp_path: Path) -> None:
    """A connection that is opened after the deletion makes an empty one."""
    file = tmp_path / "a.db"
    tables = Tables(f"sqlite:///{file}")
    assert not tables.vanished()
    tables.close()  # its log is written into it
    file.rename(tmp_path / "b.db")
    assert tables.vanished()
    file.touch()
    assert tables.vanished()
    file.unlink()
    shutil.copy(tmp_path / "b.db", file)  # another number, but it is all there
    assert not tables.vanished()
