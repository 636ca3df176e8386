"""The front and the count of the trials that have ended, whenever they are looked at."""

from __future__ import annotations

from bsearch.search.analysis.pareto import study_front
from bsearch.search.run.decisions.ended import EndedTrials
from bsearch.spaces.record import TrialFacts, TrialRecord, counted
from bsearch.spaces.study.goals import Objectives
from hypothesis import given
from hypothesis import strategies as st

AT = "2026-11-28T00:00:00"


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
    assert ended.counted == counted(done) == len(trials)
