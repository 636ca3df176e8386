"""Suggestions made ahead: as many as trials end meanwhile, never more than wanted, their errors told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from bsearch.search.run.suggestion_queue import SuggestionQueue
from bsearch.search.suggest.suggester import Suggester
from bsearch.spaces.domain import Range
from bsearch.spaces.errors import StorageError
from bsearch.spaces.study.goals import Objectives
from bsearch.spaces.trial import Suggestion, TrialFacts, TrialResult

DOMAINS = {"effective_batch": Range(low=1, high=1000, log=True), "reference_rate": Range(low=0.01, high=1.0, log=True)}


@contextmanager
def queue(sampler: str = "front", ending: Callable[[float], int] = lambda seconds: 0) -> Iterator[SuggestionQueue]:
    made = SuggestionQueue(Suggester(None, "ahead", DOMAINS, Objectives(), sampler=sampler), ending)
    try:
        yield made
    finally:
        made.close()


def taken(made: SuggestionQueue, running: int, most: int = 100) -> Suggestion:
    """The next suggestion, waited for."""
    while isinstance(one := made.take(running, 1, most=most, new=True), str):
        assert made._preparing is not None
        made._preparing.exception()
    assert one is not None
    return one


def end(made: SuggestionQueue, number: int) -> None:
    facts = TrialFacts(train_s=1.0 + number)
    made._suggester.tell(number, TrialResult("COMPLETE", "complete", facts, (1.0 + number, 0.5 + 0.01 * number)))


def test_beside_few_trials_each_suggestion_knows_all_that_ended() -> None:
    with queue() as made:
        for running in (0, 1, 3, 7):
            assert end(made, taken(made, running).number) is None
            assert made._suggester.ready == 0
            assert made._preparing is None


@pytest.mark.parametrize(
    ("running", "ending", "most", "ahead"), [(8, 0, 100, 2), (16, 0, 100, 2), (256, 3, 100, 20), (256, 3, 5, 5), (4, 2, 9, 3)]
)
def test_one_fit_serves_many_trials(running: int, ending: int, most: int, ahead: int) -> None:
    with queue(ending=lambda seconds: ending) as made:
        for _ in range(8):
            end(made, taken(made, 0, 1).number)
        numbers = []
        for still in range(ahead):
            # Ready: they are handed out at once, and the trial begins then.
            one = taken(made, running, most) if not still else made.take(running, 1, most=1, new=True)
            assert isinstance(one, Suggestion)
            numbers.append(one.number)
            if not still:
                assert made._suggester.ready == ahead - 1
        assert numbers == list(range(8, 8 + ahead))
        assert len({one.params["effective_batch"] for one in made._suggester.trials()[8:]}) > ahead // 2
        assert made.asks >= 8 + ahead


@pytest.mark.parametrize(("free", "most", "ahead"), [(12, 100, 12), (12, 5, 5), (1000, 2000, 64)])
def test_one_fit_serves_all_free_devices(free: int, most: int, ahead: int) -> None:
    with queue() as made:
        for _ in range(8):
            end(made, taken(made, 0, 1).number)
        while made.take(1, free, most=most, new=True) == "wait":
            assert made._preparing is not None
            made._preparing.exception()
        assert made._suggester.ready == ahead - 1


def test_other_samplers_begin_one_trial_at_a_time() -> None:
    with queue("tpe", lambda seconds: 5) as made:
        for number in range(4):
            assert taken(made, 64, 4 - number).number == number
        assert len(made._suggester.trials()) == 4  # none begun that nothing runs


def test_a_queued_trial_goes_before_what_is_ready() -> None:
    with queue() as made:
        for _ in range(4):
            end(made, taken(made, 0, 1).number)
        taken(made, 64)
        assert made._suggester.ready == 4
        made._suggester.enqueue({"effective_batch": 17, "reference_rate": 0.5}, {"repeats": 0})
        assert not made.is_settled
        assert taken(made, 64).parameters["effective_batch"] == 17
        assert made._suggester.ready == 4


@pytest.mark.parametrize("running", [0, 3])
def test_an_error_in_its_thread_is_told(running: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*what: Any, **which: Any) -> None:
        raise StorageError("full")

    with queue() as made:
        monkeypatch.setattr(made._suggester, "prepare", refuse)
        with pytest.raises(StorageError, match="full"):
            taken(made, running)


def test_a_runner_waits_only_where_nothing_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    go, prepare = threading.Event(), Suggester.prepare

    def slow(self: Suggester, *what: Any, **which: Any) -> int:
        go.wait(30)
        return prepare(self, *what, **which)

    monkeypatch.setattr(Suggester, "prepare", slow)
    with queue() as made:
        assert made.take(1, 1, most=2, new=True) == "wait"
        assert made.take(1, 1, most=2, new=True) == "wait"
        go.set()
        assert taken(made, 1).number == 0
