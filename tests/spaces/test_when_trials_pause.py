"""Trials are paused where time limits a search over trainings of one length, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
from bsearch.spaces.study.file import parse_study

BASE: dict[str, Any] = {
    "space": "{effective_batch: {low: 8, high: 64}, reference_rate: 0.1, epochs: 9}",
    "budget": "{hours: 1}",
}


@pytest.mark.parametrize(
    ("changes", "pauses"),
    [
        ({}, True),
        ({"budget": "{cost: 3}", "devices": "{prices: {cpu: 1}}"}, True),
        ({"budget": "{trials: 40}"}, False),
        ({"budget": "{trials: 40, hours: 1}"}, False),
        (
            {"space": "{effective_batch: 8, reference_rate: {low: 0.1, high: 1}, epochs: {low: 2, high: 9}}"},
            False,
        ),
        ({"budget": "{by: 1h}"}, False),
        ({"budget": "{hours: 1}", "stopping": "none"}, False),
        ({"sampler": "tpe"}, False),
        ({"training": "{evaluations: 1}"}, False),
        ({"cluster": "{checkpoints: null}"}, False),
    ],
)
def test_they_do_where_it_was_found_to_pay(changes: dict[str, str], pauses: bool) -> None:
    keys = {"study": "x", "task": "tasks.py:X", **BASE, **changes}
    assert parse_study("".join(f"{key}: {value}\n" for key, value in keys.items())).pauses is pauses
