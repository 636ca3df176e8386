"""A front's columns: a cell for each trial, whatever was measured and searched, and the same in each drawing."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from bsearch.search.analysis.pareto import front_of
from bsearch.search.report.columns import front_columns, some_members, trial_columns
from bsearch.search.report.notes import study_note
from bsearch.spaces.front import ParetoFront
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.file import study_from_dict
from conftest import small_study
from hypothesis import given
from hypothesis import strategies as st


def made(
    count: int, direction: Literal["minimize", "maximize"] = "maximize", rules: int = 1, **facts: Any
) -> ParetoFront:
    sign = 1 if direction == "maximize" else -1
    trials = [
        TrialRecord(
            number,
            "complete",
            {"effective_batch": 8 * number, "rule": ("sqrt", "linear")[number % rules], "width": 3},
            TrialFacts(learning_rate=0.1 * number, micro_batch=4, accumulation=2 * number, **facts),
            1.0 + number,
            sign * (0.5 + number / 100),
            direction=direction,
        )
        for number in range(count)
    ]
    return front_of(trials, "score", direction)


@given(st.integers(0, 5), st.integers(1, 5), st.booleans(), st.sampled_from([None, 0.52]), st.integers(1, 2))
def test_each_column_has_a_cell_for_each_trial(
    count: int, most: int, repeated: bool, target: float | None, rules: int
) -> None:
    front = made(
        count,
        rules=rules,
        **({"mean_low": 0.4, "mean_high": 0.6, "runs": 2, "front_probability": 0.9} if repeated else {}),
    )
    members = some_members(front, most)
    columns = front_columns(front, members, target)
    assert all(len(column.cells) == len(members) == min(count, most) for column in columns)
    assert all(len(column.cells) == count for column in trial_columns(front.trials, front))
    names = [column.name for column in columns]
    assert names[:3] == ["trial", "train_s", "score"]
    assert ("+/-" in names) == (repeated and count > 0) != ("micro\nx acc." in names)
    several = len({member.settings["rule"] for member in members}) > 1
    assert ("rule" in names) == (several or "+/-" not in names)


def test_both_ends_of_a_front_are_among_some_of_its_members() -> None:
    front = made(30)
    for most in range(2, 31):
        chosen = [trial.number for trial in some_members(front, most)]
        assert (chosen[0], chosen[-1], len(set(chosen))) == (0, 29, most)
        assert chosen == sorted(chosen)


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_a_studys_note_has_the_same_columns_and_the_best_trial(
    direction: Literal["minimize", "maximize"],
) -> None:
    front = made(4, direction)
    note = study_note("s", study_from_dict(small_study()), front, 4.0, ["Said."], study="s.yaml", page="/p")
    head, _, *rows = [line.split(" | ") for line in note.splitlines() if line.startswith("| ")]
    columns = front_columns(front)
    assert len(head) == len(columns) and [len(row) for row in rows] == [len(columns)] * 4
    assert rows[3][0] == "| [3](/p/trials?numbers=3)"
    assert "- Best score: " in note and "(trial 3)." in note and "- Said." in note
