"""A study that minimizes -m does what one that maximizes m does: the sign is turned in one place (`study.goals.turned`)."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bsearch
import pytest
from bsearch.search.analysis.choice import Choice, chosen_trial
from bsearch.search.run.decisions import suggestion_queue
from bsearch.search.run.training import RESULT
from bsearch.search.store.stored import StoredStudy
from bsearch.search.suggest.stopping import FrontStopping
from bsearch.spaces.front import ParetoFront
from bsearch.spaces.record import TrialRecord
from bsearch.spaces.study.goals import Metric, turned
from conftest import BATCH_AND_RATE, small_study
from helpers import run
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mirror_tasks import SIGNS

TASKS = Path(__file__).parents[2] / "mirror_tasks.py"
NAMES = itertools.count()  # a study of its own for each example
DIRECTIONS = {"gain": "maximize", "deficit": "minimize"}


@pytest.fixture(autouse=True)
def one_suggestion_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many are made ahead depends on the clock."""
    monkeypatch.setattr(suggestion_queue, "_LASTS", 0.0)


def study(
    metric: str,
    optimum: float,
    curved: float,
    task: str = f"{TASKS}:training",
    floor: float | None = None,
    **changes: Any,
) -> dict[str, Any]:
    direction = DIRECTIONS[metric]
    bound = {} if floor is None else {"floor": turned(floor, direction)}
    return small_study(
        task=task,
        space={
            **BATCH_AND_RATE,
            "rule": ["linear", "sqrt"],
            "epochs": {"low": 1, "high": 8},
            "optimum": optimum,
            "curved": curved,
        },
        training={"evaluations": 5, "samples": 1000},
        objectives={"metric": {"name": metric, "direction": direction, **bound}},
        **changes,
    )


def both(write: Callable[..., Path], *budgets: dict[str, Any], **changes: Any) -> list[list[Any]]:
    """What the study does in each direction, run with each of the budgets in turn."""
    found, name = [], next(NAMES)
    for metric in SIGNS:
        steps = []
        for budget in budgets:
            path = write(**study(metric, budget=budget, study=f"{metric}-{name}", **changes))
            result = run(path)
            stored = result.study
            steps.append(
                {
                    "trials": [of(record) for record in stored.records],
                    "stopped": result.stopped.replace(metric, "m"),
                    "front": [trial.number for trial in stored.front.trials],
                    "chosen": [chosen(stored.front, choice, stored) for choice in choices(stored)],
                    "gain": result.gain,
                }
            )
        found.append(steps)
    return found


def of(record: TrialRecord) -> dict[str, Any]:
    """All that is stored of a trial, with what is in the metric's direction as scores."""
    facts = record.facts.to_dict()
    for name in ("stopped_accuracy", "expected_accuracy"):
        if name in facts:
            facts[name] = record.score_of(facts[name])
    if "mean_low" in facts:
        ends = sorted(record.score_of(facts[name]) for name in ("mean_low", "mean_high"))
        facts |= {"mean_low": ends[0], "mean_high": ends[1]}
    facts = {
        name: facts[name]
        for name in facts
        if name not in ("message", "host", "measured_train_s", "others_share")
    }
    return {
        "number": record.number,
        "outcome": record.outcome,
        "parameters": dict(record.parameters),
        **facts,
        "m": record.score,
    }


def choices(stored: StoredStudy) -> list[Choice]:
    best = stored.front.best
    assert best is not None
    assert best.score is not None
    reached = best.score_of(best.score - 0.05)
    return [Choice(trial="best"), Choice(within=0.02), Choice(target=reached)]


def chosen(front: ParetoFront, choice: Choice, stored: StoredStudy) -> int:
    return chosen_trial("m", front, choice, stored.records).number


@pytest.mark.slow
@settings(
    max_examples=4, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(optimum=st.floats(0.002, 0.05), curved=st.floats(0.0, 3.0))
@pytest.mark.long
def test_a_minimized_metric_is_searched_as_a_maximized_one(
    study_file: Callable[..., Path], optimum: float, curved: float
) -> None:
    """Suggestions, early stops, repeats, the front and every choice of it; also where the study resumes."""
    gain, deficit = both(study_file, {"trials": 7}, {"trials": 12}, optimum=optimum, curved=curved, confirm=1)
    assert gain == deficit
    assert any(trial["outcome"] == "complete" for trial in gain[-1]["trials"])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"sampler": "tpe"}, {"sampler": "gp"}, {"floor": 0.5}], ids=str)
def test_so_it_is_by_every_sampler(study_file: Callable[..., Path], changes: dict[str, Any]) -> None:
    changes = dict(changes)
    gain, deficit = both(
        study_file, {"trials": 8, **changes.pop("budget", {})}, optimum=0.01, curved=1.0, **changes
    )
    assert gain == deficit


@pytest.mark.parametrize("metric", SIGNS)
@pytest.mark.slow
def test_the_model_that_is_kept_is_the_best_by_either_direction(
    study_file: Callable[..., Path], metric: str
) -> None:
    """The best is neither the first nor the last trial, and its value ends a study of which it is the target."""
    made = study(metric, 0.01, 1.0, task=f"{TASKS}:Mirrored", sampler="random", stopping="none", study=metric)
    result = run(study_file(**made | {"budget": {"trials": 8, "until": SIGNS[metric] * 9.0}}))
    scores = [record.score or 0.0 for record in result.study.records]
    best = max(range(8), key=lambda number: scores[number])
    assert 0 < best < 7
    assert result.model is not None
    document = json.loads((result.model / RESULT).read_text())
    assert (document["trial"], document[metric]) == (best, result.study.records[best].accuracy)
    # Now the study is as good as it ever was: it stops, and the model stays.
    reached = Metric(name=metric, direction=DIRECTIONS[metric]).score(scores[best])
    again = run(study_file(**made | {"budget": {"trials": 12, "until": reached}}))
    assert again.stopped == f"budget.until: {metric} {reached:g} was reached by trial {best}"
    assert len(again.study.records) == 8
    assert json.loads((result.model / RESULT).read_text()) == document


@settings(max_examples=30)
@given(st.data())
def test_the_same_trials_are_stopped(data: st.DataObject) -> None:
    curve = st.lists(st.floats(0, 1), min_size=4, max_size=4)
    curves = data.draw(st.lists(curve, min_size=8, max_size=12))
    stopped = []
    for direction in ("maximize", "minimize"):
        rule, ends = FrontStopping(Metric(name="m", direction=direction), risk=0.3), []
        for number, values in enumerate(curves):
            places = [
                (fraction, turned(value, direction))
                for fraction, value in zip((0.3, 0.5, 0.7, 1.0), values, strict=True)
            ]
            said = next(
                (fraction for fraction, value in places if rule.report(number, fraction, 1.0, value)), None
            )
            facts = rule.facts(number, stopped=True)
            ends.append(
                (
                    said,
                    facts.expected_accuracy and turned(facts.expected_accuracy, direction),
                    facts.expected_std,
                )
            )
            rule.end(number, 1.0, None if said else places[-1][1])
        stopped.append(ends)
    assert stopped[0] == stopped[1]


def test_only_one_function_turns_a_sign() -> None:
    """Nothing else multiplies by a direction, or asks for it but to say which is better."""
    root = Path(bsearch.__file__).parent
    for path in (*root.glob("s*/**/*.py"), *root.glob("c*/**/*.py")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\bsign \*|_sign\b|\.sign\b", text), path
