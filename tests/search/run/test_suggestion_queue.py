"""Suggestions made ahead: as many as trials end meanwhile, never more than wanted, their errors told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from bsearch.search.run.decisions.suggestion_queue import SuggestionQueue
from bsearch.search.store.trials import Trials
from bsearch.search.suggest.front_suggester import FrontSuggester
from bsearch.search.suggest.samplers import suggester_of
from bsearch.search.suggest.space_transform import SearchSpace
from bsearch.spaces.domain import Range
from bsearch.spaces.errors import StorageError
from bsearch.spaces.record import TrialFacts, TrialResult
from bsearch.spaces.study.goals import Objectives

SPACE = SearchSpace.of(
    {
        "effective_batch": Range(low=1, high=1000, log=True),
        "reference_rate": Range(low=0.01, high=1.0, log=True),
    }
)


@contextmanager
def queue(
    sampler: str = "front", ending: Callable[[float], int] = lambda seconds: 0
) -> Iterator[SuggestionQueue]:
    made = SuggestionQueue(suggester_of(sampler, SPACE, Objectives()), Trials(), ending)
    try:
        yield made
    finally:
        made.close()


def trials_of(made: SuggestionQueue) -> Trials:
    assert isinstance(made._trials, Trials)
    return made._trials


def taken(made: SuggestionQueue, running: int, most: int = 100) -> int:
    """The trial of the next suggestion, waited for, which begins."""
    while (one := made.take(running, 1, most=most)) == "wait":
        assert made._preparing is not None
        made._preparing.exception()
    assert isinstance(one, dict)
    return trials_of(made).begin(one).number


def end(made: SuggestionQueue, number: int) -> None:
    trials_of(made).end(
        number, TrialResult("complete", TrialFacts(train_s=1.0 + number), (1.0 + number, 0.5 + 0.01 * number))
    )


def test_beside_few_trials_each_suggestion_knows_all_that_ended() -> None:
    with queue() as made:
        for running in (0, 1, 3, 7):
            end(made, taken(made, running))
            assert len(made) == 0
            assert made._preparing is None


@pytest.mark.parametrize(
    ("running", "ending", "most", "ahead"),
    [(8, 0, 100, 2), (16, 0, 100, 2), (256, 3, 100, 20), (256, 3, 5, 5), (4, 2, 9, 3)],
)
def test_one_fit_serves_many_trials(running: int, ending: int, most: int, ahead: int) -> None:
    with queue(ending=lambda seconds: ending) as made:
        for _ in range(8):
            end(made, taken(made, 0, 1))
        numbers = []
        for still in range(ahead):
            if not still:
                numbers.append(taken(made, running, most))
                assert len(made) == ahead - 1
                continue
            # Ready: they are handed out at once.
            one = made.take(running, 1, most=1)
            assert isinstance(one, dict)
            numbers.append(trials_of(made).begin(one).number)
        assert numbers == list(range(8, 8 + ahead))
        assert len({one.parameters["effective_batch"] for one in trials_of(made)[8:]}) > ahead // 2
        assert made.asks >= 8 + ahead


@pytest.mark.parametrize(("free", "most", "ahead"), [(12, 100, 12), (12, 5, 5), (1000, 2000, 64)])
def test_one_fit_serves_all_free_devices(free: int, most: int, ahead: int) -> None:
    with queue() as made:
        for _ in range(8):
            end(made, taken(made, 0, 1))
        while made.take(1, free, most=most) == "wait":
            assert made._preparing is not None
            made._preparing.exception()
        assert len(made) == ahead - 1


def test_a_paused_trial_is_resumed_once() -> None:
    with queue() as made:
        trials = trials_of(made)
        paused = trials.begin({"effective_batch": 10, "reference_rate": 0.1}).number
        trials.change(paused, TrialFacts(), "paused")
        made._ready.extend([paused, paused, {"effective_batch": 11, "reference_rate": 0.1}])
        assert made.take(1, 1, most=1) == paused
        trials.resume(paused)
        assert made.take(0, 1, most=1) == {"effective_batch": 11, "reference_rate": 0.1}


@pytest.mark.parametrize("running", [0, 3])
def test_an_error_in_its_thread_is_told(running: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*what: Any, **which: Any) -> None:
        raise StorageError("full")

    with queue() as made:
        monkeypatch.setattr(made._suggester, "suggest", refuse)
        with pytest.raises(StorageError, match="full"):
            taken(made, running)


def test_a_runner_waits_only_where_nothing_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    go, suggest = threading.Event(), FrontSuggester.suggest

    def slow(self: FrontSuggester, *what: Any, **which: Any) -> Any:
        go.wait(30)
        return suggest(self, *what, **which)

    monkeypatch.setattr(FrontSuggester, "suggest", slow)
    with queue() as made:
        assert made.take(1, 1, most=2) == "wait"
        assert made.take(1, 1, most=2) == "wait"
        go.set()
        assert taken(made, 1) == 0
