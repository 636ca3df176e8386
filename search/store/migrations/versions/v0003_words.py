"""The names of the first release (baseline, objectives.metric, time_on, step_times), and a place for fitted rates."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from bsearch.search.store.migrations.rewriting import rewrite

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# User attributes of Optuna's trials.
ATTRIBUTES = {"start": "baseline", "expected_deviation": "expected_std", "departure": "train_s_error"}


def upgrade() -> None:
    op.alter_column("bsearch_study", "prices", new_column_name="step_times")
    op.add_column("bsearch_study", sa.Column("best_rates", sa.Text))
    studies = sa.table("bsearch_study", *(sa.column(name) for name in ("name", "identity", "spec")))
    profiles = sa.table("bsearch_profile", *(sa.column(name) for name in ("key", "profile")))
    attempts = sa.table("bsearch_attempt", *(sa.column(name) for name in ("study", "number", "attempt", "result")))
    rewrite(studies, ("name",), {"identity": _renamed_objectives, "spec": _renamed_spec})
    rewrite(profiles, ("key",), {"profile": _renamed_profile})
    rewrite(attempts, ("study", "number", "attempt"), {"result": _renamed_result})
    _rename_attributes()


def _renamed_objectives(document: dict[str, Any]) -> None:
    objectives = document.get("objectives") or {}
    if "accuracy" in objectives:
        metric = objectives.pop("accuracy")
        if "metric" in metric:
            metric["name"] = metric.pop("metric")
        objectives["metric"] = metric


def _renamed_spec(document: dict[str, Any]) -> None:
    _renamed_objectives(document)
    if "start" in document:
        document["baseline"] = document.pop("start")
    if "price_on" in (document.get("devices") or {}):
        document["devices"]["time_on"] = document["devices"].pop("price_on")


def _renamed_profile(document: dict[str, Any]) -> None:
    if "evaluation_set" in document:
        document["validation_set"] = document.pop("evaluation_set")


def _renamed_result(document: dict[str, Any]) -> None:
    facts = document.get("facts") or {}
    for old, new in ATTRIBUTES.items():
        if old in facts:
            facts[new] = facts.pop(old)


def _rename_attributes() -> None:
    connection = op.get_bind()
    if not sa.inspect(connection).has_table("trial_user_attributes"):
        return  # Optuna makes its tables when the first study is created
    attributes = sa.table("trial_user_attributes", *(sa.column(name) for name in ("trial_id", "key")))
    trials = sa.table("trials", *(sa.column(name) for name in ("trial_id", "study_id")))
    optuna_studies = sa.table("studies", *(sa.column(name) for name in ("study_id", "study_name")))
    ours = (
        sa.select(trials.c.trial_id)
        .join(optuna_studies, optuna_studies.c.study_id == trials.c.study_id)
        .where(optuna_studies.c.study_name.in_(sa.select(sa.column("name")).select_from(sa.table("bsearch_study"))))
    )
    for old, new in ATTRIBUTES.items():
        connection.execute(
            sa.update(attributes).where(attributes.c.key == old, attributes.c.trial_id.in_(ours)).values(key=new)
        )
