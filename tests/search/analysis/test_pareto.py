"""The front against a slow double loop, and what is said about its points."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import pytest
from bsearch.search.analysis.pareto import front_members, front_of, study_front
from bsearch.search.report.export import csv_text, study_document, trial_document
from bsearch.search.report.page.draw import plotly_document
from bsearch.search.report.page.figures import front_figure
from bsearch.search.report.page.study_data import StudyData
from bsearch.search.report.sentences import best_sentence, comparison, step_sentence
from bsearch.search.report.stdio.console import json_text
from bsearch.search.report.terminal.tables import front_plot
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.front import ParetoFront
from bsearch.spaces.names import Direction
from bsearch.spaces.readable import seconds
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.file import study_from_dict
from bsearch.spaces.study.goals import Objectives, turned
from conftest import small_study
from hypothesis import given
from hypothesis import strategies as st

numbers = st.integers(0, 6).map(float) | st.floats(0, 1e6)
points = st.lists(st.tuples(numbers, numbers), max_size=30)


def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] <= b[0] and a[1] <= b[1] and a != b


def record(
    number: int, train_s: float, accuracy: float, outcome: str = "complete", **facts: object
) -> TrialRecord:
    return TrialRecord(
        number, outcome, {"effective_batch": 10 + number}, TrialFacts.of(facts), train_s, accuracy
    )  # type: ignore[arg-type]


def drawn_front(records: list[TrialRecord], front: ParetoFront) -> dict[str, Any]:
    study = StoredStudy("sqlite:///s.db", "s", study_from_dict(small_study()), {}, 0.0, tuple(records), front)
    return plotly_document(front_figure(StudyData(study)))


@given(points)
def test_the_front_is_what_no_other_point_beats(points: list[tuple[float, float]]) -> None:
    slow = [index for index, point in enumerate(points) if not any(beats(other, point) for other in points)]
    # The fastest first; of equal ones, both, and the earlier first.
    assert [*front_members(points)] == sorted(slow, key=points.__getitem__)


@given(points, st.integers(0, 6).map(float), st.sampled_from(["minimize", "maximize"]))
def test_below_a_floor_nothing_is_on_the_front_unless_nothing_reaches_it(
    points: list[tuple[float, float]], floor: float, direction: Literal["minimize", "maximize"]
) -> None:
    bounded = Objectives.model_validate(
        {"metric": {"name": "m", "direction": direction, "floor": turned(floor, direction)}}
    )
    plain = Objectives.model_validate({"metric": {"name": "m", "direction": direction}})
    trials = [
        TrialRecord(
            number, "complete", {}, TrialFacts(), seconds, turned(score, direction), direction=direction
        )
        for number, (seconds, score) in enumerate(points)
    ]
    reaching = [trial for trial in trials if (trial.score or 0.0) >= floor]
    assert study_front(trials, bounded) == study_front(reaching or trials, plain)


def test_only_complete_trials_are_on_the_front() -> None:
    outcomes = ["diverged", "stopped", "infeasible", "error", "interrupted", "running"]
    records = [record(number, 0.1, 0.99, outcome) for number, outcome in enumerate(outcomes)]
    assert [trial.number for trial in front_of([*records, record(9, 5.0, 0.2)]).trials] == [9]
    assert front_of([]).trials == ()


def test_a_metric_to_minimize_turns_the_front() -> None:
    made = [record(0, 1.0, 0.5), record(1, 2.0, 0.3), record(2, 3.0, 0.4)]
    records = [replace(one, direction="minimize") for one in made]
    assert [trial.number for trial in front_of(records, "val_loss", "minimize").trials] == [0, 1]


def front_and_records() -> tuple[ParetoFront, list[TrialRecord]]:
    records = [
        record(0, 10.0, 0.90, baseline=0),
        record(1, 1.0, 0.50),
        record(2, 4.0, 0.90),
        record(3, 9.0, 0.95),
        record(4, 40.0, 0.96),
        record(5, 2.0, 0.1, "diverged"),
    ]
    return front_of(records), records


def test_the_end_compares_the_front_with_the_baseline() -> None:
    front, records = front_and_records()
    assert [trial.number for trial in front.trials] == [1, 2, 3, 4]
    assert list(comparison(front, records)) == [
        "Baseline (trial 0: accuracy 0.9 in 10 s) -> trial 2 has at least its accuracy (0.9) in 4 s (-60% time); "
        "trial 3 has accuracy 0.95 (+0.05) in its time or less."
    ]
    best = [record(0, 1.0, 0.99, baseline=0), record(1, 2.0, 0.5)]
    assert "is on the front" in next(iter(comparison(front_of(best), best)))
    lost = [record(0, 1.0, 0.1, "diverged", baseline=0)]
    assert "diverged" in next(iter(comparison(front_of(lost), lost)))


def test_a_metric_to_minimize_is_compared_with_the_baseline_too() -> None:
    made = [
        record(0, 10.0, 0.10, baseline=0),
        record(1, 4.0, 0.10),
        record(2, 9.0, 0.05),
        record(3, 1.0, 0.5),
    ]
    records = [replace(one, direction="minimize") for one in made]
    assert list(comparison(front_of(records, "val_loss", "minimize"), records)) == [
        "Baseline (trial 0: val_loss 0.1 in 10 s) -> trial 1 has at least its val_loss (0.1) in 4 s (-60% time); "
        "trial 2 has val_loss 0.05 (-0.05) in its time or less."
    ]


def test_a_step_from_what_is_nearly_the_best_is_told_in_numbers() -> None:
    front, _ = front_and_records()
    assert (
        best_sentence(front)
        == "Best accuracy: 0.96 in 40 s (trial 4). No faster trial comes within 1 % of it."
    )
    assert (
        step_sentence(front)
        == "The next faster one, trial 3, takes 78% less time, with accuracy 0.95 (-0.01)."
    )
    assert step_sentence(front_of([record(0, 1.0, 0.5)])) is None
    assert step_sentence(front_of([])) is None


def test_exports_hold_the_front() -> None:
    front, records = front_and_records()
    document = study_document("s", "sqlite:///s.db", front, records)
    assert document["trials"] == {"complete": 5, "diverged": 1}
    rows = document["front"]
    lines = csv_text(rows).splitlines()
    assert lines[0].startswith("trial,outcome,on_front,train_s,accuracy,effective_batch")
    assert lines[1].startswith("1,complete,True,1.0,0.5,11")
    assert csv_text([trial_document(record, front) for record in records]).count("\n") == 7
    assert '"front": [' in json_text(document)
    assert drawn_front(records, front)["traces"]


@pytest.mark.parametrize("records", [[], [record(0, 1.0, 0.5)], [record(0, 1.0, 0.5), record(1, 1.0, 0.5)]])
def test_small_fronts_are_drawn_without_fuss(records: Iterable[TrialRecord]) -> None:
    records = list(records)
    front = front_of(records)
    front_plot(front, records, 80)
    assert bool(drawn_front(records, front)["traces"]) == bool(records)


def test_seconds_are_said_as_people_say_them() -> None:
    assert [seconds(value) for value in (None, math.nan, 0.5, 61, 3600)] == [
        "-",
        "-",
        "0.5 s",
        "1 min 1 s",
        "1 h 0 min",
    ]


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_front_begins_where_a_model_is_better_than_untrained(direction: Direction, sign: int) -> None:
    """However the metric is turned and wherever its zero is; what only a few samples tell is not held against a trial."""
    objectives = Objectives.model_validate({"metric": {"name": "m", "direction": direction}})

    def trial(number: int, loss: float, untrained: float | None = 2.3) -> TrialRecord:
        of, began = (
            turned(-(loss * 1.0) + sign, direction),
            untrained and turned(-untrained + sign, direction),
        )
        facts = TrialFacts(extra={} if began is None else {"untrained": began})
        return TrialRecord.of(number, "complete", {}, facts, (1.0 + number, of), direction=direction)

    blown, barely, best = trial(0, 1e22), trial(1, 2.4), trial(2, 0.2)
    assert [one.number for one in study_front([blown, barely, best], objectives).trials] == [1, 2]
    assert [one.number for one in study_front([blown], objectives).trials] == [0]  # there is nothing else
    unknown = [trial(0, 1e22, None), trial(1, 2.4, None), trial(2, 0.2, None)]
    assert [one.number for one in study_front(unknown, objectives).trials] == [0, 1, 2]
