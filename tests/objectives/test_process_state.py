"""A process is after a training as it was before, and says what was changed."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from bsearch.objectives.machine.process_state import THREADS, _settings, adopt, kept_process


def test_reading_everything_changes_nothing() -> None:
    with kept_process() as changes:
        pass
    assert (str(changes), changes.left) == ("", [])
    names = [setting.name for setting in _settings()]
    assert len({*names}) == len(names)  # each is told apart by its name


def test_what_is_changed_is_set_back_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_SWITCH", raising=False)
    with pytest.raises(ValueError, match="on purpose"), kept_process() as changes:
        os.environ["MY_SWITCH"] = "1"
        torch.set_default_dtype(torch.float64)
        raise ValueError("on purpose")
    assert torch.get_default_dtype() == torch.float32
    assert "MY_SWITCH" not in os.environ
    assert str(changes) == (
        "changed torch's default dtype, environment variables MY_SWITCH in its process, which was set back after it"
    )


def test_what_bsearch_sets_for_a_training_is_not_the_trainings_change() -> None:
    before = torch.get_num_threads()
    try:
        with kept_process() as changes:
            torch.set_num_threads(before + 1)
            adopt(THREADS)
        assert str(changes) == ""
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_a_thread_of_the_users_that_runs_on_is_left_behind() -> None:
    over = threading.Event()
    thread = threading.Thread(target=wait_for, args=(over,), name="mine", daemon=True)
    with kept_process() as changes:
        thread.start()
    over.set()
    thread.join()
    assert changes.left == ["threads that run on (mine)"]


def wait_for(event: threading.Event) -> None:
    while not event.is_set():
        time.sleep(0.01)


def test_it_takes_less_than_a_millisecond() -> None:
    fastest = min(once() for _ in range(20))
    assert fastest < 1e-3


def once() -> float:
    begun = time.perf_counter()
    with kept_process():
        pass
    return time.perf_counter() - begun
