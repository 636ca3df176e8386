"""Laws: a training that has to be done by a moment trains on fewer samples rather than for longer, and never on more."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.objectives import trial
from bsearch.objectives.parallel.data_parallel import Ranks
from bsearch.objectives.state import time_left
from bsearch.objectives.state.time_left import TimeLeft
from bsearch.spaces.trial import Measurement, Outcome
from helpers import setup
from hypothesis import given
from hypothesis import strategies as st

TASKS = Path(__file__).parent.parent / "tasks_for_tests.py"


class Clock:
    """A clock that a test moves."""

    now = 1000.0

    def time(self) -> float:
        return self.now


def trained(
    step_s: list[float], steps: int, within_s: float, evaluate_s: float, points: Any = None
) -> tuple[int, float]:
    """Steps of a training of so many that has to be done within some seconds, and its seconds; steps slow down in parts.

    It evaluates on its way and at its end, where the test and saving take as long.
    """
    clock, made = Clock(), setup(batch=10, budget=10 * steps, training={"evaluations": 5})
    left = TimeLeft(replace(made, ends_by=clock.now + within_s), 0, points)
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(time_left, "time", clock)
        done = 0
        while 10 * done < left.samples:
            left.update(done, 10 * done, Ranks())
            clock.now += step_s[done * len(step_s) // steps]
            done += 1
            if 10 * done >= left.due:
                clock.now += evaluate_s
                left.evaluated(evaluate_s, 10 * done)
    return done, clock.now + 2 * evaluate_s - 1000.0


@given(st.floats(0.01, 1.0), st.integers(50, 400), st.floats(1.2, 5.0), st.floats(0.0, 5.0))
def test_one_that_fits_is_whole(step_s: float, steps: int, room: float, evaluate_s: float) -> None:
    done, _ = trained([step_s], steps, room * (step_s * steps + 7 * evaluate_s) + 5.0, evaluate_s)
    assert done == steps


@given(
    st.lists(st.floats(0.02, 0.3), min_size=1, max_size=4),
    st.integers(100, 400),
    st.floats(0.2, 1.5),
    st.floats(0.0, 2.0),
)
def test_one_that_slows_down_ends_in_time(
    step_s: list[float], steps: int, share: float, evaluate_s: float
) -> None:
    within_s = max(share * sum(step_s) / len(step_s) * steps, 40 * max(step_s) + 2.0) + 7 * evaluate_s
    done, took_s = trained(step_s, steps, within_s, evaluate_s)
    assert done <= steps
    # It looks at the clock every eight steps, so it may be late by as many of the slowest.
    assert took_s <= within_s + 8 * max(step_s)


def test_passes_are_set_aside_as_they_come() -> None:
    assert trained([1.0], 90, 198.0, 20.0, lambda samples: (300, 600, 900))[0] == 90


def attempt(reference: str, made: object) -> tuple[list[Measurement], Outcome]:
    reports = list(trial.attempt(reference, made))  # type: ignore[arg-type]
    *measurements, outcome = reports
    assert isinstance(outcome, Outcome)
    return [one for one in measurements if isinstance(one, Measurement)], outcome


@pytest.mark.slow
@pytest.mark.parametrize("reference", [f"{TASKS}:Slow", f"{TASKS}:slow_loop"])
def test_a_real_training_is_shortened_with_its_schedule_and_leaves_its_model(
    reference: str, tmp_path: Path
) -> None:
    # Ten seconds of training in three.
    made = setup(batch=16, budget=16 * 400, training={"evaluations": 4, "schedule": "linear"})
    made = replace(
        made, parameters={"sleeps_s": 10.0}, model_folder=str(tmp_path / "model"), ends_by=time.time() + 4.0
    )
    measurements, outcome = attempt(reference, made)
    assert outcome.kind == "complete", outcome.message
    last = measurements[-1]
    assert last.samples_seen < 0.5 * made.samples_budget
    assert last.facts["shortened_to"] == last.samples_seen / made.samples_budget
    assert not any("shortened_to" in one.facts for one in measurements[:-1])
    assert last.samples_seen % 16 == 0
    saved = next((tmp_path / "model").glob("*.pt"))
    assert torch.load(saved, weights_only=True)
    if (optimizer := tmp_path / "model" / "optimizer.pt").exists():
        # The rate has fallen as far as at the end of a whole training.
        assert torch.load(optimizer, weights_only=True)["param_groups"][0]["lr"] < 0.02 * made.learning_rate


def test_one_with_time_enough_is_as_without(tmp_path: Path) -> None:
    made = setup(batch=16, budget=400)
    plain, _ = attempt(f"{TASKS}:Points", made)
    timed, outcome = attempt(f"{TASKS}:Points", replace(made, ends_by=time.time() + 60.0))
    assert outcome.kind == "complete"
    assert [one.scores for one in plain] == [one.scores for one in timed]
    assert "shortened_to" not in timed[-1].facts


def test_a_model_of_the_search_leaves_the_test_set_alone(tmp_path: Path) -> None:
    made = setup(batch=16, budget=400, model_folder=str(tmp_path / "model"))
    with_test, _ = attempt("bsearch.objectives.digits:Digits", made)
    without, _ = attempt("bsearch.objectives.digits:Digits", replace(made, scores_test=False))
    assert "test_accuracy" in with_test[-1].facts
    assert not any(name.startswith("test_") for name in without[-1].facts)
