"""What trials count towards the budget: whatever is paused, resumed and ended in which order, nothing is counted twice."""

from __future__ import annotations

import pytest
from bsearch.search.analysis.pareto import study_front
from bsearch.search.run.decisions.ended import EndedTrials
from bsearch.spaces.record import TrialFacts, TrialRecord, counted
from bsearch.spaces.study.goals import Objectives
from hypothesis import given
from hypothesis import strategies as st

AT = "2026-11-28T00:00:00"


def record(number: int, outcome: str, share: float | None = None) -> TrialRecord:
    values = (1.0, 0.5) if outcome == "complete" else None
    facts = TrialFacts(rung_fraction=share)
    return TrialRecord.of(number, outcome, {}, facts, values, ended_at=AT if outcome == "complete" else "")  # type: ignore[arg-type]


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.3, 0.9), st.sampled_from(["paused", "running", "complete"])), max_size=8))
def test_what_is_counted_and_what_running_trials_will_add_are_whole_trials(trials: list[tuple[float, str]]) -> None:
    ended = EndedTrials([], Objectives())
    for number, (share, stage) in enumerate(trials):
        ended.pause(record(number, "paused", share))
        if stage != "paused":
            ended.resume(record(number, "running", share))
        if stage == "complete":
            ended.end(record(number, "complete", share))
    running = [number for number, (_, stage) in enumerate(trials) if stage == "running"]
    complete = sum(stage == "complete" for _, stage in trials)
    paused = sum(share for share, stage in trials if stage == "paused")
    assert abs(ended.counted + ended.to_train(running) - (complete + len(running) + paused)) < 1e-5
    assert set(ended.paused) == {number for number, (_, stage) in enumerate(trials) if stage == "paused"}
    # As another run reads it from the database: resumed trials are running there, and count as much as they had trained.
    stored = [record(n, stage, share) for n, (share, stage) in enumerate(trials) if stage != "running"]
    assert abs(EndedTrials(stored, Objectives()).counted - counted(stored)) < 1e-5


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.booleans(), st.booleans()), max_size=14))
def test_the_front_after_every_end_is_that_of_all_trials(trials: list[tuple[int, int, bool, bool]]) -> None:
    ended, done = EndedTrials([], Objectives()), []
    for number, (seconds, tenths, repeats, looks) in enumerate(trials):
        facts = TrialFacts(repeats=0) if repeats and number else TrialFacts()
        done.append(TrialRecord.of(number, "complete", {}, facts, (float(seconds), tenths / 10), ended_at=AT))
        ended.end(done[-1])
        if looks:
            assert ended.front() == study_front(done, Objectives())
    assert ended.front() == study_front(done, Objectives())
