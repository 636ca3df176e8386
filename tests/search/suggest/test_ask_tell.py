"""Ask and tell: the search without Ray, with a loop and a scheduler of one's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import bsearch.search.suggest.ask_tell as room
import pytest
from bsearch.search.suggest.ask_tell import Search
from bsearch.spaces.errors import StudyFileError, TaskError

SPACE: dict[str, Any] = {
    "effective_batch": {"low": 8, "high": 1024, "log": True},
    "reference_rate": {"low": 1e-3, "high": 1.0, "log": True},
    "optimizer": "sgd",
}


def pretended(parameters: Any, fraction: float = 1.0) -> tuple[float, float]:
    batch, rate = parameters["effective_batch"], parameters["learning_rate"]
    away = math.log(rate / 0.1) - 0.5 * math.log(batch / 256)
    return 100 / batch + 0.1, (0.95 - 0.05 * math.log2(batch) / 10 - 0.02 * away**2) * (0.7 + 0.3 * fraction)


def test_the_example_in_its_own_words_runs() -> None:
    lines = [line[4:] for line in (room.__doc__ or "").splitlines() if line.startswith("    ")]

    def train(effective_batch: int, learning_rate: float) -> Any:
        for tenth in range(1, 11):
            parameters = {"effective_batch": effective_batch, "learning_rate": learning_rate}
            yield tenth / 10, *pretended(parameters, tenth / 10)

    names: dict[str, Any] = {"Search": Search, "train": train}
    exec("\n".join(lines), names)  # noqa: S102  # the documented example, as it stands
    assert names["search"].ended == 40
    assert names["search"].front().trials
    assert {record.outcome for record in names["search"].records()} <= {"complete", "stopped"}


def test_the_rule_makes_the_learning_rate() -> None:
    search = Search(SPACE, rule="sqrt", reference_batch=64)
    values = search.ask().parameters
    batch, rate = float(values["effective_batch"]), float(values["reference_rate"])
    assert values["learning_rate"] == pytest.approx(rate * math.sqrt(batch / 64))
    assert values["optimizer"] == "sgd"


def test_suggestions_side_by_side_differ_and_a_database_remembers(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/outside.db"
    search = Search(SPACE, rule="sqrt", storage=url)
    asked = [search.ask() for _ in range(4)]
    assert len({one.parameters["effective_batch"] for one in asked}) == 4
    for one in asked:
        assert not search.report(one.number, 0.5, *pretended(one.parameters, 0.5))
        search.tell(one.number, *pretended(one.parameters))
    again = Search(SPACE, rule="sqrt", storage=url)
    assert again.ended == 4
    assert again.ask().number == 4
    assert [trial.number for trial in again.front().trials] == [
        trial.number for trial in search.front().trials
    ]
    assert len(again._early_stopping.finished) == 4


def test_every_outcome_ends_as_it_should() -> None:
    search = Search(
        SPACE, rule="linear", sampler="random", direction="minimize", metric="val_loss", stopping="none"
    )
    for outcome, values in {
        "complete": (1.0, 0.5),
        "diverged": (1.0, math.nan),
        "error": (None, None),
        "stopped": (1.0, 0.7),
    }.items():
        number = search.ask().number
        search.report(number, 0.3, 1.0, 0.7)
        search.tell(number, *values, outcome)  # type: ignore[arg-type]
    assert [record.outcome for record in search.records()] == ["complete", "diverged", "error", "stopped"]
    assert search.ended == 3
    assert search.records()[3].facts.stopped_fraction == 0.3
    assert search.records()[3].facts.stopped_accuracy == 0.7
    assert [trial.number for trial in search.front().trials] == [0]


def test_what_is_told_wrongly_changes_nothing() -> None:
    search = Search(SPACE, rule="sqrt")
    number = search.ask().number
    wrong: list[tuple[Any, ...]] = [
        (-1.0, 0.5),
        (math.inf, 0.5),
        (1.0, math.nan),
        (None, 0.5),
        (1.0, 0.5, "compleet"),
    ]
    for values in wrong:
        with pytest.raises(TaskError, match="trial 0: expected"):
            search.tell(number, *values)
    for fraction in (0, -1, 50, math.nan):
        with pytest.raises(TaskError, match="expected a fraction"):
            search.report(number, fraction, 1.0, 0.5)
    with pytest.raises(TaskError, match="expected the number of a trial that was asked"):
        search.tell(7, 1.0, 0.5)
    assert not search.report(number, 0.5, 1.0, math.nan)
    search.tell(number, 1.0, 0.5, "stopped")  # never reported
    with pytest.raises(TaskError, match="trial 0: outcome: expected 'stopped', as recorded, got 'complete'"):
        search.tell(number, 2.0, 0.9)
    assert not search.report(number, 0.7, 1.0, 0.1)
    (record,) = search.records()
    assert (record.outcome, record.accuracy, record.values, search.ended) == ("stopped", 0.5, None, 1)


def test_known_seconds_keep_what_does_not_fit_from_being_proposed() -> None:
    def seconds(parameters: Any) -> float:
        return math.nan if parameters["effective_batch"] > 200 else 100 / parameters["effective_batch"]

    search = Search(SPACE, rule="sqrt", known_seconds=seconds)
    batches = []
    for _ in range(14):
        one = search.ask()
        batches.append(one.parameters["effective_batch"])
        search.tell(one.number, *pretended(one.parameters))
    assert max(batches) <= 200  # type: ignore[type-var]


def test_all_faults_at_once() -> None:
    with pytest.raises(StudyFileError) as caught:
        Search({"batch": {"low": 9, "high": 3}, "rate": {"lo": 1}})
    assert {"space.batch", "space.rate"} <= {
        fault.key.rpartition(".low")[0] or fault.key for fault in caught.value.faults
    }
    with pytest.raises(StudyFileError) as caught:
        Search({"rule": ["auto", "sqrt"]}, direction="max")  # type: ignore[arg-type]
    assert [fault.key for fault in caught.value.faults] == ["direction", "space.rule"]
    with pytest.raises(StudyFileError, match="stopping: expected one of front, none; got 'fornt'"):
        Search(SPACE, stopping="fornt")


def test_a_trial_is_told_twice_alike_or_not_at_all() -> None:
    search = Search(SPACE)
    number = search.ask().number
    search.tell(number, 1.0, 0.9)
    search.tell(number, 1.0, 0.9)
    for other in ({"accuracy": 0.8}, {"train_s": 2.0}, {"outcome": "error"}):
        with pytest.raises(
            TaskError, match=rf"trial {number}: {next(iter(other))}: expected .*, as recorded"
        ):
            search.tell(number, **{"train_s": 1.0, "accuracy": 0.9, **other})  # type: ignore[arg-type]
    assert search.records()[number].accuracy == 0.9


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({}, "space: expected at least one parameter, got none"),
        ({"lr": {"low": 1, "hgh": 2}}, "space.lr.high: missing required key\nspace.lr.hgh: unknown key"),
    ],
)
def test_a_space_that_is_wrong_is_refused_in_words(space: dict[str, Any], words: str) -> None:
    with pytest.raises(StudyFileError) as caught:
        Search(space)
    assert words in str(caught.value)
