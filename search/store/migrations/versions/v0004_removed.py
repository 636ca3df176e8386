"""Without branches, batch_schedule and stopping: halving, which were removed (docs/decisions/0057); budget.min_gain."""

from typing import Any

import sqlalchemy as sa
from bsearch.search.store.migrations.rewriting import rewrite

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    studies = sa.table("bsearch_study", *(sa.column(name) for name in ("name", "spec")))
    attempts = sa.table("bsearch_attempt", *(sa.column(name) for name in ("study", "number", "attempt", "setup")))
    rewrite(studies, ("name",), {"spec": _without})
    rewrite(attempts, ("study", "number", "attempt"), {"setup": _without})


def _without(document: dict[str, Any]) -> None:
    """A study's file or a trial's setup. The study's identity stays, so that one that used them is not gone on with."""
    document.pop("branches", None)
    for section in ("training", "space"):
        for key in ("branches", "batch_schedule"):
            (document.get(section) or {}).pop(key, None)
    if "until_worth" in (document.get("budget") or {}):
        document["budget"]["min_gain"] = document["budget"].pop("until_worth")
    if (document.get("stopping") or {}).get("kind") == "halving":
        document["stopping"]["kind"] = "none"
