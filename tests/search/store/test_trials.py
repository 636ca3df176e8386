"""Trials read straight from Optuna's tables are those that Optuna itself reads; and old databases are brought up to date."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from bsearch.search.store import schema
from bsearch.search.store.database import RetryPolicy
from bsearch.search.store.optuna_storage import frozen_record, open_storage
from bsearch.search.store.tables import Tables
from bsearch.search.store.trials import SCHEMA_VERSION, StoredTrials, stored_trials
from bsearch.spaces.errors import StorageError
from bsearch.spaces.study.spec import StudySpec
from bsearch.spaces.trial import TrialSetup
from helpers import setup
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

SPACE: dict[str, Any] = {
    "effective_batch": IntDistribution(1, 4096, log=True),
    "reference_rate": FloatDistribution(1e-5, 10.0, log=True),
    "width": CategoricalDistribution(["a", 1, 2.5, True, None]),
    "layers": IntDistribution(2, 20, step=3),
}


@st.composite
def trials(draw: st.DrawFn) -> optuna.trial.FrozenTrial:
    """A trial in any state, with attributes of ours and of others."""
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
        values = [draw(finite), draw(st.one_of(finite, st.sampled_from([math.inf, -math.inf])))]
    plain = st.one_of(st.integers(-5, 5), st.text(max_size=5), st.lists(st.integers(0, 3), max_size=2))
    attributes = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "outcome": st.sampled_from(["complete", "stopped", "error"]),
                "train_s": st.floats(0.1, 9.0),
                "betas": st.just([0.9, 0.99]),
                "learning_rate": st.floats(1e-5, 1.0),
                "message": st.text(max_size=5),
                "something else": plain,
            },
        )
    )
    return create_trial(
        state=state,
        params={name: params[name] for name in names},
        distributions={name: SPACE[name] for name in names},
        values=values,
        user_attrs=attributes,
    )


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(several=st.lists(trials(), max_size=6))
def test_records_are_those_that_optuna_reads(several: list[optuna.trial.FrozenTrial], tmp_path_factory: Any) -> None:
    url = f"sqlite:///{tmp_path_factory.mktemp('twin')}/twin.db"
    storage = open_storage(url)
    study = optuna.create_study(storage=storage, study_name="twin", directions=["minimize", "maximize"])
    for trial in several:
        study.add_trial(trial)
    assert stored_trials(url, "twin") == [frozen_record(trial) for trial in study.get_trials()]


def test_what_goes_on_is_seen_and_what_ended_is_read_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/twin.db"
    study = optuna.create_study(storage=open_storage(url), study_name="twin", directions=["minimize", "maximize"])
    first, second = study.ask(SPACE), study.ask(SPACE)
    study.tell(first, [1.0, 0.5])
    with StoredTrials(url, "twin", RetryPolicy(url)) as reader:
        before = reader.read()
        assert [record.outcome for record in before] == ["error", "running"]  # nobody said what the first came to
        study.tell(second, [2.0, 0.7])
        study.ask(SPACE)
        after = reader.read()
        assert [record.outcome for record in after] == ["error", "error", "running"]
        assert after[0] is before[0]
        assert after == [frozen_record(trial) for trial in study.get_trials()]


def test_a_schema_that_is_not_optunas_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/twin.db"
    storage = open_storage(url)
    optuna.create_study(storage=storage, study_name="twin")
    assert isinstance(storage, optuna.storages.RDBStorage)
    with storage.engine.begin() as connection:
        assert connection.execute(sa.text("SELECT schema_version FROM version_info")).scalar() == SCHEMA_VERSION
        connection.execute(sa.text("UPDATE version_info SET schema_version = 99"))
    with pytest.raises(StorageError, match=r"expected the tables of Optuna 3\.0 to 5\.0"):
        stored_trials(url, "twin")


def test_the_newest_revision_is_the_one_we_write() -> None:
    assert max(schema.known_revisions()) == schema.HEAD


def old_database(folder: Path, revision: str) -> tuple[str, sa.Engine]:
    """An SQLite database with our tables as they were at a revision."""
    url = f"sqlite:///{folder}/old.db"
    engine = sa.create_engine(url)
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).parent / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    return url, engine


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
    read = StudySpec.model_validate(row.spec)
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
            sa.text("INSERT INTO bsearch_attempt VALUES ('old', 0, 0, :setup, '2026', NULL, NULL, NULL, NULL, NULL)"),
            {"setup": json.dumps(written)},
        )
    tables = Tables(url)
    (row,) = tables.studies()
    read = StudySpec.model_validate(row.spec)
    assert (read.stopping.kind, read.training.warmup, read.budget.min_gain) == ("none", 0.1, 0.01)
    assert row.identity == identity  # another experiment than any that can be written now
    (attempt,) = tables.attempts("old", 0)
    assert TrialSetup.from_dict(attempt["setup"]) == now
