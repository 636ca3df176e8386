"""Trainers with callbacks as generators: the threads alternate, end when closed, and raise in the consumer."""

from __future__ import annotations

import gc
import threading
import time
import traceback
import weakref
from collections.abc import Iterator

import pytest
import torch
from bsearch.objectives.adapters.as_generator import Report, Stopped, as_generator


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def counting(report: Report[int]) -> None:
    for number in range(5):
        report(number)


def test_everything_told_arrives_in_order() -> None:
    assert list(as_generator(counting)) == [0, 1, 2, 3, 4]
    assert list(as_generator(lambda report: None)) == []


def test_nothing_begins_before_it_is_asked_for_and_a_generator_never_asked_leaves_nothing() -> None:
    begun = []
    made = as_generator(lambda report: begun.append(1))  # type: ignore[var-annotated]
    del made
    gc.collect()
    assert begun == []


def test_the_trainer_waits_while_a_measurement_is_looked_at() -> None:
    steps = []

    def train(report: Report[int]) -> None:
        for number in range(3):
            steps.append(number)
            report(number)

    for number in as_generator(train):
        time.sleep(0.05)  # a slow consumer
        assert steps == list(range(number + 1))


def test_closing_ends_the_training_there_and_frees_what_it_held() -> None:
    class Model:
        pass

    cleaned, held = [], []

    def train(report: Report[int]) -> None:
        model = Model()
        held.append(weakref.ref(model))
        try:
            counting(report)
        except Exception:
            cleaned.append("an error of the trainer's")  # which a stop is not
        finally:
            cleaned.append(len(held))

    run = as_generator(train)
    assert next(run) == 0
    assert next(run) == 1
    run.close()  # type: ignore[attr-defined]
    assert cleaned == [1]
    assert held[0]() is None


def test_a_trainer_that_swallows_the_stop_is_told_again_at_its_next_step() -> None:
    steps = []

    def train(report: Report[int]) -> None:
        try:
            report(0)
        except BaseException:
            steps.append("swallowed")
        for step in range(1000):
            report.raise_if_stopped()
            steps.append(str(step))

    run = as_generator(train)
    next(run)
    run.close()  # type: ignore[attr-defined]
    assert steps == ["swallowed"]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("too large"), ValueError("mine"), KeyboardInterrupt(), SystemExit(3)]
)
def test_what_a_trainer_raises_is_raised_as_itself_with_its_own_lines(error: BaseException) -> None:
    def users_own_line() -> None:
        raise error

    def train(report: Report[int]) -> None:
        report(0)
        users_own_line()

    run = as_generator(train)
    assert next(run) == 0
    with pytest.raises(type(error)) as raised:
        next(run)
    assert raised.value is error
    assert "users_own_line" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_an_interrupted_consumer_ends_a_training_that_is_between_measurements() -> None:
    stopped = []

    def train(report: Report[int]) -> None:
        report(0)
        main = threading.main_thread().ident
        assert main is not None
        import signal

        signal.pthread_kill(main, signal.SIGINT)  # Ctrl-C while the trainer trains
        try:
            while True:
                report.raise_if_stopped()
                time.sleep(0.001)
        except Stopped:
            stopped.append(True)
            raise

    run = as_generator(train)
    next(run)
    with pytest.raises(KeyboardInterrupt):
        next(run)
    assert stopped == [True]


def test_torch_is_set_in_the_training_as_it_is_where_it_is_pulled() -> None:
    def train(report: Report[tuple[bool, int]]) -> None:
        report((torch.is_grad_enabled(), torch.get_num_threads()))

    assert list(as_generator(train)) == [(True, torch.get_num_threads())]
    with torch.no_grad():
        assert next(iter(as_generator(train)))[0] is False
    assert torch.is_grad_enabled()
