"""A small study for attacks by a task's own code."""

from __future__ import annotations

from typing import Any

SPACE = {
    "effective_batch": {"low": 16, "high": 64},
    "reference_rate": {"low": 0.02, "high": 0.5},
    "epochs": 1,
}


def small_study(**changes: Any) -> dict[str, Any]:
    """A study of which top-level keys may be replaced; its trials are timed by the clock."""
    study = {"study": "small", "task": "bsearch.objectives.digits:Digits", "space": SPACE, **changes}
    study["budget"] = {"profile_s": 0, "trials": 4, **study.get("budget", {})}
    return study
