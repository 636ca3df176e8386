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
from alembic import command
from alembic.config import Config
from bsearch.cli import main
from bsearch.objectives import digits
from bsearch.search.store import schema
from bsearch.search.store.database import RetryPolicy
from bsearch.search.store.lock import StudyLock
from bsearch.search.store.rows import StudyRow
from bsearch.search.store.stored import StoredStudy
from bsearch.search.store.tables import Tables
from bsearch.search.store.trials import StoredTrials, Trials, stored_trials
from bsearch.search.suggest.optuna.copy import record_of
from bsearch.search.suggest.optuna.database import OptunaDatabase, open_storage
from bsearch.search.suggest.space_transform import SearchSpace
from bsearch.spaces.domain import Choices, Range
from bsearch.spaces.errors import LeftOutWarning, StorageError
from bsearch.spaces.record import TrialFacts, TrialRecord, TrialResult
from bsearch.spaces.study.goals import Objectives
from bsearch.spaces.trial import OutcomeKind, TrialSetup
from click.testing import CliRunner
from helpers import as_optuna, setup
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

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
        record, started_at="", ended_at="" if not record.ended_at else "once", facts=replace(record.facts, extra=extra)
    )


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
    assert stored_trials(url, "twin") == list(trials)
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
                read, written = (replace(each, train_s=None, accuracy=None, values=None) for each in (read, written))
            assert without_dates(read) == without_dates(written)
            feasible = ours.outcome not in ("diverged", "infeasible")
            assert all((bound <= 0) == feasible for bound in theirs.constraints.values())
        else:
            assert (theirs.params, theirs.user_attrs) == (ours.parameters, {"outcome": ours.outcome, **ours.facts.to_dict()})


def test_what_goes_on_is_seen_and_what_ended_is_read_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/twin.db"
    trials = Trials(Tables(url), "twin")
    for _ in range(2):
        trials.begin({"effective_batch": 4})
    trials.end(0, TrialResult("complete", values=(1.0, 0.5)))
    with StoredTrials(url, "twin") as reader:
        before = reader.read()
        assert [record.outcome for record in before] == ["complete", "running"]
        trials.end(1, TrialResult("error"))
        trials.begin({"effective_batch": 5})
        after = reader.read()
        assert [record.outcome for record in after] == ["complete", "error", "running"]
        assert after[0] is before[0]
        assert after == list(trials)


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
    with pytest.warns(LeftOutWarning, match=r"left out: trials 1, 3 of study twin \(bsearch_trial\): its row is missing"):
        again = Trials(tables, "twin")
    assert [trial.outcome for trial in again] == ["running", "unreadable", "running", "unreadable"]
    assert again.begin({"effective_batch": 8}).number == 4
    with pytest.warns(LeftOutWarning):
        stored = stored_trials(url, "twin")
    assert stored == list(again)


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("objectives", "[1.5]", "objectives: expected 2 or 3 numbers, got [1.5]"),
        ("objectives", "[NaN, 0.5]", "objectives: expected a finite number >= 0, got nan"),
        ("objectives", None, "objectives: expected the values of a complete trial, got none"),
        ("facts", '{"train_s": Infinity}', "facts.train_s: expected a finite number >= 0, got inf"),
        ("facts", '{"repeats": 9}', "facts.repeats: expected an earlier trial, got 9"),
        ("parameters", "nonsense", "parameters: expected JSON, got 'nonsense'"),
        ("outcome", "evolved", "outcome: expected one of complete, "),
        ("started_at", "yesterday", "started_at: expected a time such as 2026-01-31T12:00:00+00:00, got 'yesterday'"),
    ],
)
def test_a_trial_that_cannot_be_read_keeps_its_number_and_its_row(tmp_path: Path, column: str, value: Any, why: str) -> None:
    url = f"sqlite:///{tmp_path}/twin.db"
    tables = Tables(url)
    trials = Trials(tables, "twin")
    for _ in range(2):
        trials.begin({"effective_batch": 4}, TrialFacts(baseline=0))
        trials.end(len(trials) - 1, TrialResult("complete", values=(1.0, 0.5)))
    with tables.engine.begin() as connection:
        connection.execute(sa.update(schema.trials).where(schema.trials.c.number == 0).values({column: value}))
    with pytest.warns(LeftOutWarning, match=re.escape(f"left out: trial 0 of study twin (bsearch_trial): {why}")):
        bad, good = Trials(tables, "twin")
    assert (bad.outcome, bad.has_ended, bad.counts, good) == ("unreadable", True, 0.0, trials[1])


def test_a_study_of_a_newer_version_is_read_without_what_it_adds() -> None:
    spec = {"study": "new", "task": "tasks.py:New", "space": {"effective_batch": 8, "reference_rate": 0.1}, "dream": 1}
    spec |= {"training": {"seed": 3, "glow": True}, "sampler": "oracle"}
    with pytest.warns(LeftOutWarning) as said:
        read = StudyRow({"name": "new", "spec": json.dumps(spec)}).study
    assert (read.training.seed, read.sampler) == (3, "front")
    words = {str(warning.message).partition("): ")[2].partition(":")[0] for warning in said}
    assert words == {"spec.dream", "spec.training.glow", "spec.sampler"}
    spec["training"]["precision"] = "fp3"
    with pytest.raises(StorageError, match=r"study new \(bsearch_study\): spec.training.precision: .*got 'fp3'.*--new"):
        _ = StudyRow({"name": "new", "spec": json.dumps(spec)}).study


@pytest.mark.parametrize("change", ["added", "ended", "other", "told"])
def test_a_copy_that_others_have_written_is_left_and_changes_nothing(tmp_path: Path, change: str) -> None:
    url = f"sqlite:///{tmp_path}/twin.db"
    trials = Trials(Tables(url), "twin")
    for batch in (4, 5):
        trials.begin({"effective_batch": batch})
    trials.end(0, TrialResult("complete", values=(1.0, 0.5)))
    copy = OptunaDatabase(url, "twin", Objectives(), SPACE)
    copy.update(trials[:1] if change == "other" else trials)
    study = optuna.load_study(study_name="twin", storage=url)
    if change in ("ended", "told"):
        study.tell(1, [3.0, 0.9])
    else:
        study.enqueue_trial({"effective_batch": 9})
        study.ask({"effective_batch": IntDistribution(1, 4096, log=True)})
    trials.end(1, TrialResult("complete", values=(3.0, 0.8)) if change == "told" else TrialResult("error"))
    there = [(trial.state, trial.params) for trial in study.trials]
    with pytest.raises(StorageError, match=r"trial 1 (is COMPLETE|has other (parameters|values)) there|it holds 3 trials"):
        OptunaDatabase(url, "twin", Objectives(), SPACE).update(trials)
    assert [(trial.state, trial.params) for trial in study.trials] == there
    assert stored_trials(url, "twin") == list(trials)


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


def old_database(folder: Path, revision: str) -> tuple[str, sa.Engine]:
    """An SQLite database with our tables as they were at a revision."""
    url = f"sqlite:///{folder}/old.db"
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).parent / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    return url, engine


OLD_SPACE: dict[str, Any] = {
    "effective_batch": IntDistribution(1, 4096, log=True),
    "reference_rate": FloatDistribution(1e-5, 10.0, log=True),
    "width": CategoricalDistribution(["a", 1, 2.5, True, None]),
    "layers": IntDistribution(2, 20, step=3),
}


@st.composite
def optunas_trials(draw: st.DrawFn) -> optuna.trial.FrozenTrial:
    """A trial in any state, as versions before wrote it, with attributes of ours and of others."""
    state = draw(st.sampled_from(list(TrialState)))
    params = {
        "effective_batch": draw(st.integers(1, 4096)),
        "reference_rate": draw(st.floats(1e-5, 10.0)),
        "width": draw(st.sampled_from(["a", 1, 2.5, True, None])),
        "layers": draw(st.sampled_from(range(2, 21, 3))),
    }
    names = draw(st.sets(st.sampled_from(sorted(params))))
    values = None
    if state == TrialState.COMPLETE:
        finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
        values = [draw(SECONDS), draw(finite)]
    attributes = draw(FACTS)
    if state.is_finished():
        attributes["outcome"] = draw(st.sampled_from(["complete", "stopped", "error"] if values else ["stopped", "error"]))
    elif draw(st.booleans()):
        attributes |= {"paused": True, "rung_fraction": 0.3, "rung_accuracy": 0.5}
    return create_trial(
        state=state,
        params={name: params[name] for name in names},
        distributions={name: OLD_SPACE[name] for name in names},
        values=values,
        user_attrs=attributes,
        system_attrs={"constraints": [2.5]} if state == TrialState.PRUNED else {},
    )


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(several=st.lists(optunas_trials(), min_size=1, max_size=6))
def test_an_older_databases_trials_are_those_that_optuna_reads(
    several: list[optuna.trial.FrozenTrial], tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("old")
    url, engine = old_database(folder, "0004")
    add_study(engine, "old", {})
    study = optuna.create_study(storage=open_storage(url), study_name="old", directions=["minimize", "maximize"])
    for trial in several:
        study.add_trial(trial)
    foreign = optuna.create_study(storage=url, study_name="foreign")
    foreign.add_trial(create_trial(value=1.0))
    Tables(url, create=False)
    assert stored_trials(url, "foreign") == []
    for ours, theirs in zip(stored_trials(url, "old"), study.get_trials(), strict=True):
        assert ours.number == theirs.number
        if theirs.state.is_finished():
            assert replace(ours, violation=0.0) == record_of(theirs, "maximize")
            assert ours.violation == (2.5 if theirs.state == TrialState.PRUNED else 0.0)
        else:
            assert (ours.parameters, ours.has_ended, ours.values) == (theirs.params, False, None)
            assert ours.outcome == ("paused" if theirs.user_attrs.get("paused") else "interrupted")
            assert ours.facts.to_dict() == {name: value for name, value in theirs.user_attrs.items() if name != "paused"}


def test_an_end_that_optuna_was_not_told_of_is_an_end(tmp_path: Path) -> None:
    """The driver was killed between its two writes."""
    url, engine = old_database(tmp_path, "0004")
    add_study(engine, "old", {})
    study = optuna.create_study(storage=open_storage(url), study_name="old", directions=["minimize", "maximize"])
    study.ask({"effective_batch": OLD_SPACE["effective_batch"]})
    facts = {"outcome": "complete", "train_s": 1.5, "accuracy": 0.5}
    result = {"state": "COMPLETE", "values": [1.5, 0.5], "constraint": 0.0, "facts": facts}
    study.ask({"effective_batch": OLD_SPACE["effective_batch"]})
    with engine.begin() as connection:
        for number, attempt, outcome, written in (
            (0, 0, "interrupted", {}),
            (0, 1, "complete", result),
            (1, 0, "out_of_memory", {}),
        ):
            connection.execute(
                sa.text(
                    "INSERT INTO bsearch_attempt VALUES ('old', :number, :attempt, '{}', '2026-01-01T00:00:00.000+00:00', "
                    "'2026-01-01T00:00:02.000+00:00', :outcome, '', '', :result)"
                ),
                {"number": number, "attempt": attempt, "outcome": outcome, "result": json.dumps(written)},
            )
    trial, open_one = Tables(url).trials("old")
    assert (trial.outcome, trial.values, trial.train_s, trial.has_ended) == ("complete", (1.5, 0.5), 1.5, True)
    assert (open_one.outcome, open_one.has_ended) == ("interrupted", False)


@pytest.mark.slow
def test_a_migration_that_is_killed_goes_on(tmp_path: Path) -> None:
    url, engine = old_database(tmp_path, "0004")
    add_study(engine, "old", {})
    study = optuna.create_study(storage=open_storage(url), study_name="old", directions=["minimize", "maximize"])
    facts = {f"fact_{place}": place for place in range(20)} | {"outcome": "complete"}
    study.add_trials(
        create_trial(
            params={"effective_batch": number},
            distributions={"effective_batch": OLD_SPACE["effective_batch"]},
            values=[1.0 * number, 0.5],
            user_attrs=facts,
        )
        for number in range(1, 401)
    )
    command = "from bsearch.search.store.tables import Tables; print('begin', flush=True); Tables(__import__('sys').argv[1])"
    killed = 0
    for wait_s in (0.05, 0.1, 0.15, 0.2, 0.3):
        with subprocess.Popen([sys.executable, "-c", command, url], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(wait_s)
            process.kill()
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.connect() as connection:
            killed += schema.revision_of(connection) == "0004"
    assert killed
    assert [trial.values for trial in Tables(url).trials("old")] == [(float(number), 0.5) for number in range(1, 401)]


def test_a_study_that_an_older_driver_runs_is_not_changed_under_it(tmp_path: Path) -> None:
    url, engine = old_database(tmp_path, "0004")
    add_study(engine, "old", {})
    holder = StudyLock(url, engine, RetryPolicy(url)).holder  # of a process that lives: this one
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE bsearch_study SET holder = :holder, heartbeat_at = 0"), {"holder": holder})
    with pytest.raises(
        StorageError, match=rf"study old: an older bsearch has been running it since .* \(process {os.getpid()} "
    ):
        Tables(url, create=False)
    with engine.begin() as connection:
        assert schema.revision_of(connection) == "0004"
        connection.execute(sa.text("UPDATE bsearch_study SET holder = NULL"))
    Tables(url, create=False)


def add_study(engine: sa.Engine, name: str, spec: dict[str, Any]) -> None:
    with engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO bsearch_study VALUES (:name, :name, '{}', :spec, '2026', 1.5, NULL, NULL, NULL, NULL)"),
            {"name": name, "spec": json.dumps(spec)},
        )


def test_an_older_database_takes_the_names_of_the_first_release(tmp_path: Path) -> None:
    """Written as revision 0002 wrote it: `start:`, `objectives.accuracy`, `price_on`, prices."""
    url, engine = old_database(tmp_path, "0002")
    optuna.create_study(storage=open_storage(url), study_name="old", directions=["minimize", "minimize"]).add_trial(
        create_trial(state=TrialState.FAIL, user_attrs={"start": 0, "departure": 0.5, "outcome": "error"})
    )
    spec = {
        "study": "old",
        "task": "tasks.py:Old",
        "space": {"effective_batch": {"low": 8, "high": 64}, "reference_rate": 0.1},
        "objectives": {"speed": "train_s", "accuracy": {"metric": "val_loss", "direction": "minimize"}},
        "devices": {"price_on": "A100"},
        "start": [{"effective_batch": 16}],
    }
    identity = {
        "objectives": {"accuracy": {"metric": "val_loss", "direction": "minimize"}},
        "task": {"name": "Old", "code": "1"},
    }
    with engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO bsearch_study VALUES ('old', 'old', :identity, :spec, '2026', 1.5, NULL, NULL, :prices)"),
            {"identity": json.dumps(identity), "spec": json.dumps(spec), "prices": json.dumps({"[]": []})},
        )
    tables = Tables(url)
    (row,) = tables.studies()
    assert tables.step_times("old") == {"[]": []}
    assert row.best_rates is None
    assert row.identity["objectives"] == {"metric": {"name": "val_loss", "direction": "minimize"}}
    read = row.study
    assert (read.objectives.metric.name, read.objectives.metric.direction) == ("val_loss", "minimize")
    assert (read.devices.time_on, read.baseline) == ("A100", ({"effective_batch": 16},))
    (trial,) = stored_trials(url, "old")
    assert (trial.facts.baseline, trial.facts.train_s_error, dict(trial.facts.extra)) == (0, 0.5, {})


def test_an_older_database_loses_the_options_that_were_removed_and_nothing_else(tmp_path: Path) -> None:
    """Written as revision 0003 wrote it: with branches, a batch that may grow, and halving."""
    url, engine = old_database(tmp_path, "0003")
    now = replace(setup(16, budget=64, parameters={"width": 3}, training={"warmup": 0.1}), study="old", largest_micro_batch=16)
    written = now.to_dict()
    written = {
        **written,
        "branches": [[0.5, 32]],
        "training": {**written["training"], "branches": True, "batch_schedule": "seesaw"},
    }
    spec = {
        "study": "old",
        "task": "tasks.py:Old",
        "space": {"effective_batch": {"low": 8, "high": 64}, "reference_rate": 0.1, "batch_schedule": ["constant", "seesaw"]},
        "training": {"branches": False, "warmup": 0.1},
        "stopping": {"kind": "halving"},
        "budget": {"trials": 9, "until_worth": 0.01},
    }
    identity = {"space": {"batch_schedule": ["constant", "seesaw"]}, "task": {"name": "Old", "code": "1"}}
    with engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO bsearch_study VALUES ('old', 'old', :identity, :spec, '2026', 1.5, NULL, NULL, NULL, NULL)"),
            {"identity": json.dumps(identity), "spec": json.dumps(spec)},
        )
        connection.execute(
            sa.text("INSERT INTO bsearch_attempt VALUES ('old', 0, 0, :setup, '2026-01-01', NULL, NULL, NULL, NULL, NULL)"),
            {"setup": json.dumps(written)},
        )
    tables = Tables(url)
    (row,) = tables.studies()
    read = row.study
    assert (read.stopping.kind, read.training.warmup, read.budget.min_gain) == ("none", 0.1, 0.01)
    assert row.identity == identity  # another experiment than any that can be written now
    (attempt,) = tables.attempts("old", 0)
    assert TrialSetup.from_dict(attempt["setup"]) == now


@pytest.mark.slow
def test_a_study_of_an_earlier_version_is_shown_and_goes_on(tmp_path: Path) -> None:
    """Of commit 4c685d1, whose driver was killed beside finished, paused and running trials of digits."""
    with closing(sqlite3.connect(tmp_path / "digits.db")) as database, database:
        database.executescript(gzip.decompress((DATA / "4c685d1.sql.gz").read_bytes()).decode())
        values = "SELECT number, value FROM trials JOIN trial_values USING (trial_id) WHERE objective = 1"
        before = dict(database.execute(values).fetchall())
    example = Path(digits.__file__).parents[1] / "examples" / "digits.yaml"
    path = tmp_path / "digits.yaml"
    path.write_text(example.read_text() + "\nstopping: pause\n")

    def bsearch(*arguments: object) -> str:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result.output

    assert json.loads(bsearch("show", path, "--json"))["trials"] == {"complete": 7, "interrupted": 1, "paused": 2}
    bsearch("run", path, "--serial", "--trials", "10", "--same-experiment")
    trials = StoredStudy.open(str(path)).records
    assert all(trials[number].accuracy == accuracy for number, accuracy in before.items())
    assert trials[9].outcome == "complete" and (trials[9].facts.attempts or 0) > 1
    assert {trials[number].outcome for number in (7, 8)} <= {"complete", "paused"}
    copied = as_optuna(tmp_path / "digits.db", "digits").trials
    assert [trial.user_attrs["outcome"] for trial in copied] == [trial.outcome for trial in trials]


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
