"""What follows from an attempt's end, for every outcome; and where each outcome has its words, its colour and its line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from bsearch.search.report.notes import _outcome
from bsearch.search.run.decisions.after import LOST_ATTEMPTS, SAME_ERRORS, Done, Failed, History, Retry, after
from bsearch.search.run.decisions.attempt import Attempt
from bsearch.search.run.decisions.planner import Planner
from bsearch.spaces.front import ParetoFront
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.laws.step_time import StepTime
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.planning import known_train_s
from bsearch.spaces.record import TrialRecord
from bsearch.spaces.study.file import read_study
from bsearch.spaces.trial import (
    COUNTED,
    LEFT,
    NODE_DIED,
    Measurement,
    Outcome,
    OutcomeKind,
    Suggestion,
    TrialSetup,
)
from helpers import setup
from hypothesis import given
from hypothesis import strategies as st

KINDS = get_args(OutcomeKind)


def attempt(seen: int = 0) -> Attempt:
    made = setup()
    measured = [Measurement(seen, 1.0, 0.5)] if seen else []
    return Attempt(Suggestion(made.number, {}), made, "cpu", None, measurements=measured)


@pytest.mark.parametrize("kind", KINDS)
def test_only_interruptions_and_too_little_memory_are_retried(kind: OutcomeKind) -> None:
    smaller = setup(16)
    follows = after(attempt(), Outcome(kind, "why"), History(), smaller)
    match kind:
        case "interrupted":
            assert follows == Retry(replace(setup(), attempt=1), "trial 0: interrupted: why")
        case "out_of_memory":
            assert follows == Retry(replace(smaller, attempt=1), "trial 0: out of memory: why")
        case _:
            assert follows == Done(Outcome(kind, "why"))


def test_out_of_memory_with_nothing_smaller_left_is_an_error() -> None:
    follows = after(attempt(), Outcome("out_of_memory", "full", "where", micro_batch=1), History())
    assert follows == Done(Outcome("error", "a micro-batch of one sample does not fit: full", "where"))


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["lost", NODE_DIED, LEFT])), max_size=12))
def test_a_worker_that_dies_without_progress_is_the_trials_fault(losses: list[tuple[int, str]]) -> None:
    """The slow twin counts deaths of workers alone since samples were last gained."""
    history, reached, without = History(), 0, 0
    for seen, why in losses:
        alone = why == "lost"
        if why != LEFT:
            without = int(alone) if seen > reached else without + alone
            reached = max(reached, seen)
        outcome = Outcome("interrupted", why)
        follows = after(attempt(seen), outcome, history)
        assert isinstance(follows, Retry) == (why == LEFT or without < LOST_ATTEMPTS)
        assert not isinstance(follows, Retry) or (follows.words == "") == (why == LEFT)
        history = history.after_loss(attempt(seen), outcome)


def test_equal_errors_in_a_row_end_the_study_and_others_between_them_do_not() -> None:
    history = History(budget=100)
    for number in range(SAME_ERRORS - 1):
        outcome = Outcome("error", f"batch {number} of /some/path{number} at 0x{number}f")
        assert after(attempt(), outcome, history) == Done(outcome)
        history = history.after_end(outcome)
    last = Outcome("error", "batch 77 of /another at 0xff")
    follows = after(attempt(), last, history)
    assert isinstance(follows, Failed) and follows.outcome == last
    assert follows.why == f"{SAME_ERRORS} trials in a row failed with the same error: {last.message}"
    for kind in ("complete", "paused", "stopped"):
        between = history.after_end(Outcome(kind))  # type: ignore[arg-type]
        assert after(attempt(), last, between) == Done(last)


def test_more_failures_than_the_budget_end_the_study() -> None:
    history = History(failed=2 + SAME_ERRORS, budget=2)
    follows = after(attempt(), Outcome("error", "another"), history)
    assert isinstance(follows, Failed) and "more than budget.trials allows" in follows.why
    assert after(attempt(), Outcome("complete"), history) == Done(Outcome("complete"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_outcome_has_its_words_and_its_line_in_the_documents(kind: OutcomeKind) -> None:
    ended = TrialRecord(0, kind, {}, train_s=1.0, accuracy=0.5, ended_at="2026-01-01T00:00:00")
    words = _outcome(ended, ParetoFront(()))
    assert ("Complete" in words) == (kind == "complete")
    table = (Path(__file__).parents[3] / "docs" / "faults.md").read_text()
    line = next(line for line in table.splitlines() if line.startswith(f"| `{kind}`"))
    assert ("| yes |" in line) == (kind in COUNTED)


LAWS = tuple(StepTime(((1, 0.002), (64, 0.06)), 0.001 * devices, devices=devices) for devices in (1, 2))
PROFILE = DeviceProfile("cpu", "a device", 1000, step_times=LAWS, largest_micro_batch=40)


@pytest.mark.parametrize("kind", ["timed", "other"])
@pytest.mark.parametrize("fewer", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_the_next_attempt_trains_the_same_batch_on_all_devices_and_is_timed_by_one_law(
    study_file: Callable[..., Path], kind: str, fewer: bool, full: bool
) -> None:
    """After one on fewer devices, and after one that ran out of memory."""
    spec = read_study(study_file(devices={"per_trial": 2, "kind": "cpu"}))
    slow = replace(PROFILE, largest_micro_batch=9)
    planner = Planner(spec, "small", {"timed": {(): PROFILE}, "other": {(): slow}}, "cpu", "hash")
    first = planner.first(
        Suggestion(3, {**spec.fixed(), "effective_batch": 119, "reference_rate": 0.1, "rule": "linear"})
    )
    attempt = replace(first, kind=kind, setup=planner.everywhere(first)[kind])
    whole = attempt.setup.plan
    assert (whole.devices, planner.expected_s(attempt)) == (2, known_train_s(PROFILE, attempt.setup))
    if fewer:
        fewer_devices = planner.on_fewer(attempt, 1)
        assert fewer_devices is not None
        attempt.setup = fewer_devices
        assert (fewer_devices.plan.devices, planner.expected_s(attempt)) == (1, None)
    failed = attempt.setup.plan.largest_micro_batch
    ended: TrialSetup | None = attempt.setup
    if full:
        ended = planner.smaller(attempt, Outcome("out_of_memory", micro_batch=failed))
    assert ended is not None
    following = planner.again(attempt, replace(ended, attempt=5, evaluation_batch=7))
    setup = following.setup
    assert (setup.attempt, setup.evaluation_batch, following.devices, following.kind) == (5, 7, 2, kind)
    assert (setup.effective_batch, setup.plan.devices) == (119, 2)
    assert setup.plan.largest_micro_batch < failed if full else setup.plan == whole
    assert following.known_s == (known_train_s(PROFILE, setup) if kind == "timed" else first.known_s)
    for half in (3, 1, None):  # what ran out of memory was no micro-batch
        smaller = planner.smaller(following, Outcome("out_of_memory"))
        assert (smaller and smaller.evaluation_batch) == half
        following.setup = smaller or setup
    following.setup = replace(setup, plan=BatchPlan(119, 60, 2))
    assert planner.smaller(following, Outcome("out_of_memory", micro_batch=1)) is None
