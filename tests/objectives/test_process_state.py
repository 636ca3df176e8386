"""A process is after a training as it was before, and says what was changed."""

from __future__ import annotations

import decimal
import gc
import os
import resource
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.objectives.loading import load_task
from bsearch.objectives.machine import process_state
from bsearch.objectives.machine.process_state import THREADS, _settings, adopt, kept_process, left_behind
from bsearch.search.run.serial import SerialRunner
from bsearch.spaces.planning import cost_keys
from bsearch.spaces.profile_request import profile_request
from bsearch.spaces.study.file import read_study
from torch.nn.modules.module import register_module_forward_hook


def test_reading_everything_changes_nothing() -> None:
    with kept_process() as changes:
        pass
    assert (str(changes), changes.left) == ("", [])
    names = [setting.name for setting in _settings()]
    assert len({*names}) == len(names)  # each is told apart by its name


FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
CHANGES: dict[str, Callable[[], object]] = {
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch.nn.modules.module._global_forward_hooks": lambda: register_module_forward_hook(print),
    "environment variables HOME, MY_SWITCH": lambda: os.environ.update({"HOME": "/", "MY_SWITCH": "1"}),
    "sys.path": lambda: sys.path.reverse(),
    "warnings raised as errors": lambda: warnings.simplefilter("error", ImportWarning),
    "garbage collection": gc.disable,
    "the decimal context": lambda: decimal.setcontext(decimal.ExtendedContext),
    "the working directory": lambda: os.chdir("/"),
    "the umask": lambda: os.umask(0o007),
    "signal handlers SIGUSR1, SIGUSR2": lambda: [
        signal.signal(one, print) for one in (signal.SIGUSR1, signal.SIGUSR2)
    ],
    "limits RLIMIT_NOFILE": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[0] - 1, FILES[1])),
}


@pytest.mark.parametrize("names", [*([name] for name in CHANGES), [*CHANGES]])
def test_what_is_changed_is_set_back_and_named(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_SWITCH", raising=False)
    before = [setting.read() for setting in _settings()]
    with pytest.raises(ValueError, match="on purpose"), kept_process() as changes:
        for name in names:
            CHANGES[name]()
        raise ValueError("on purpose")
    assert [setting.read() for setting in _settings()] == before
    assert str(changes) == f"changed {', '.join(names)}; restored afterwards"


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
    assert changes.left == ["threads still running (mine)"]


def wait_for(event: threading.Event) -> None:
    while not event.is_set():
        time.sleep(0.01)


def test_a_training_that_is_stopped_early_leaves_word_of_what_it_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no outcome to say so, and its process would be reused."""
    monkeypatch.setattr(process_state, "_left", [])
    over = threading.Event()
    thread = threading.Thread(target=wait_for, args=(over,), name="mine", daemon=True)

    def training() -> Iterator[int]:
        with kept_process():
            thread.start()
            yield 1
            yield 2

    running = training()
    next(running)
    assert left_behind() == ""
    running.close()  # type: ignore[attr-defined]
    over.set()
    thread.join()
    assert left_behind() == "threads still running (mine)"


TASK = """
import os
import torch
from bsearch import Data, Task
class Mine(Task):
    def data(self, setup):
        torch.set_default_dtype(torch.float64)
        os.environ["MY_SWITCH"] = "1"
        data = torch.utils.data.TensorDataset(torch.randn(64, 2), torch.zeros(64, dtype=torch.long))
        return Data(data, data)
    def model(self, setup): return torch.nn.Linear(2, 2)
"""


def test_what_a_profile_changes_is_no_trials_either(
    study_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_SWITCH", raising=False)
    (tmp_path / "tasks.py").write_text(TASK)
    spec = read_study(study_file(task="tasks.py:Mine"))
    runner = SerialRunner(spec.devices)
    runner.profile(spec.task, profile_request(spec, runner.device, cost_keys(spec)[0]), runner.kinds[0])
    assert torch.get_default_dtype() == torch.float32
    assert "MY_SWITCH" not in os.environ


def test_what_lies_beside_a_task_is_found_after_what_loaded_it_first_was_set_back(tmp_path: Path) -> None:
    (tmp_path / "beside_the_task.py").write_text("VALUE = 1\n")
    (tmp_path / "tasks.py").write_text(
        "from beside_the_task import VALUE\ndef train(setup):\n    yield VALUE\n"
    )
    with kept_process():  # as a profile does
        load_task(f"{tmp_path}/tasks.py:train")
    assert str(tmp_path) not in sys.path
    load_task(f"{tmp_path}/tasks.py:train")
    # Processes that a trial starts are given this path.
    assert str(tmp_path) in sys.path
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("users", [False, True])
def test_what_is_older_is_not_garbage_of_a_training_and_is_free_again_after_it(users: bool) -> None:
    old, made = Held(), []
    gc.unfreeze()
    if users:
        gc.freeze()  # by the user, which is theirs to undo
    try:
        with kept_process():
            old.itself = old
            before, new = weakref.ref(old), Held()
            new.itself, after = new, weakref.ref(new)
            made += [before, after]
            del old, new
            assert gc.get_freeze_count() > 1000
            gc.collect()
            assert after() is None
            assert before() is not None
        assert (
            gc.get_freeze_count() > 0
        ) == users  # how many: those that nobody uses any more leave by themselves
        gc.collect()
        assert (before() is None) == (not users)
    finally:
        gc.freeze()


class Held:
    itself: Any = None
