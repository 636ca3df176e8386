"""A table of trials, filled from Optuna's, which were their only home before (docs/decisions/0058); objectives.second_speed."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op
from bsearch.search.store.migrations.rewriting import rewrite

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# Of Optuna 3.0 to 5.0, the newest when this was written.
_studies = sa.table("studies", sa.column("study_id"), sa.column("study_name"))
_trials = sa.table(
    "trials",
    *(sa.column(name) for name in ("trial_id", "number", "study_id", "state")),
    sa.column("datetime_start", sa.DateTime),
    sa.column("datetime_complete", sa.DateTime),
)
_parameters = sa.table("trial_params", *map(sa.column, ("trial_id", "param_name", "param_value", "distribution_json")))
_values = sa.table("trial_values", *map(sa.column, ("trial_id", "objective", "value", "value_type")))
_user, _system = (
    sa.table(f"trial_{whose}_attributes", *map(sa.column, ("trial_id", "key", "value_json"))) for whose in ("user", "system")
)
_attempts = sa.table("bsearch_attempt", *map(sa.column, ("study", "number", "attempt", "ended_at", "result")))
# Trials in one query: databases limit the number of bound values.
_CHUNK = 500


def upgrade() -> None:
    there = sa.inspect(op.get_bind()).get_table_names()
    if "bsearch_trial" in there:  # MySQL commits each table as it is made
        op.drop_table("bsearch_trial")
    table = op.create_table(
        "bsearch_trial",
        sa.Column("study", sa.String(120), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("outcome", sa.String(20), nullable=False),
        sa.Column("parameters", sa.Text, nullable=False),
        sa.Column("facts", sa.Text, nullable=False),
        sa.Column("objectives", sa.Text),
        sa.Column("violation", sa.Float, nullable=False),
        sa.Column("started_at", sa.String(40), nullable=False),
        sa.Column("ended_at", sa.String(40)),
    )
    if "trials" in there:
        for study_id, name in _ours():
            if rows := list(_rows(study_id, name)):
                op.bulk_insert(table, rows)
    op.drop_column("bsearch_attempt", "result")
    studies = sa.table("bsearch_study", *map(sa.column, ("name", "identity", "spec")))
    rewrite(studies, ("name",), {"identity": _with_second_speed, "spec": _with_second_speed})


def _with_second_speed(document: dict[str, Any]) -> None:
    objectives = document.get("objectives") or {}
    if "also" in objectives:
        objectives["second_speed"] = objectives.pop("also")


def _ours() -> list[tuple[int, str]]:
    """Ids and names of Optuna's studies that bsearch has written: those that it ran, and those of `Search`."""
    named: Any = sa.select(sa.column("name")).select_from(sa.table("bsearch_study"))
    told = (
        sa.select(_trials.c.study_id)
        .join(_user, _user.c.trial_id == _trials.c.trial_id)
        .where(_user.c.key == "outcome")
        .distinct()
    )
    ours = sa.or_(_studies.c.study_name.in_(named), _studies.c.study_id.in_(told))
    return [(row.study_id, row.study_name) for row in op.get_bind().execute(sa.select(_studies).where(ours))]


def _rows(study_id: int, name: str) -> Iterator[dict[str, Any]]:
    connection = op.get_bind()
    # An attempt's end was written before Optuna was told of it.
    ended = {
        row.number: (result, row.ended_at)
        for row in connection.execute(sa.select(_attempts).where(_attempts.c.study == name).order_by(_attempts.c.attempt))
        if (result := json.loads(row.result or "{}"))  # none where the trial was not over
    }
    trials = connection.execute(sa.select(_trials).where(_trials.c.study_id == study_id).order_by(_trials.c.number)).all()
    for first in range(0, len(trials), _CHUNK):
        some = trials[first : first + _CHUNK]
        ids = [trial.trial_id for trial in some]
        parameters: dict[int, dict[str, Any]] = defaultdict(dict)
        for row in _of(_parameters, ids):
            parameters[row.trial_id][row.param_name] = _parameter(row.param_value, row.distribution_json)
        values: dict[int, dict[int, float]] = defaultdict(dict)
        for row in _of(_values, ids):
            values[row.trial_id][row.objective] = {"INF_POS": math.inf, "INF_NEG": -math.inf}.get(row.value_type, row.value)
        user, system = _attributes(_user, ids), _attributes(_system, ids)
        for trial in some:
            facts = user[trial.trial_id]
            outcome, paused = facts.pop("outcome", None), facts.pop("paused", False)
            if "expected_also" in facts:
                facts["expected_second"] = facts.pop("expected_also")
            objectives: list[float] | None = [value for _, value in sorted(values[trial.trial_id].items())]
            constraints, at = system[trial.trial_id].get("constraints"), trial.datetime_complete
            at = at and f"{at.isoformat(timespec='milliseconds')}+00:00"
            if trial.state in ("RUNNING", "WAITING"):
                objectives = None
                if trial.number in ended:
                    result, at = ended[trial.number]
                    facts |= result["facts"]
                    outcome, objectives, constraints = facts.pop("outcome"), result["values"], [result["constraint"] or 0.0]
                else:
                    outcome, at = "paused" if paused or outcome == "paused" else "interrupted", None
            began = trial.datetime_start
            yield {
                "study": name,
                "number": trial.number,
                "outcome": outcome or "error",
                # A trial that was queued, or whose driver was killed while it asked for it.
                "parameters": json.dumps({**system[trial.trial_id].get("fixed_params", {}), **parameters[trial.trial_id]}),
                "facts": json.dumps(facts),
                "objectives": json.dumps(objectives) if objectives and trial.state not in ("PRUNED", "FAIL") else None,
                "violation": max(constraints or [0.0]),
                "started_at": f"{began.isoformat(timespec='milliseconds')}+00:00" if began else "",
                "ended_at": at,
            }


def _of(table: Any, ids: list[int]) -> Iterable[Any]:
    return op.get_bind().execute(sa.select(table).where(table.c.trial_id.in_(ids)))


def _attributes(table: Any, ids: list[int]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for row in _of(table, ids):
        found[row.trial_id][row.key] = json.loads(row.value_json)
    return found


def _parameter(stored: float, distribution: str) -> Any:
    """A parameter's value from the number and the distribution that Optuna stores for it."""
    described = json.loads(distribution)
    if described["name"] == "CategoricalDistribution":
        return described["attributes"]["choices"][int(stored)]
    return int(stored) if described["name"].startswith("Int") else stored
