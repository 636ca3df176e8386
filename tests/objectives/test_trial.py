"""Each end of an attempt on the worker, provoked for real."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bsearch.objectives.attempts import start_attempt
from bsearch.objectives.loading import load_task
from bsearch.objectives.task_code import task_code_hash
from bsearch.spaces.errors import TaskError
from bsearch.spaces.trial import Measurement, Outcome, TrialSetup
from conftest import TASKS
from helpers import setup


def ending(name: str, **changes: object) -> Outcome:
    last = list(start_attempt(f"{TASKS}:{name}", setup(**changes)))[-1]  # type: ignore[arg-type]
    assert isinstance(last, Outcome)
    return last


def test_a_task_and_a_loop_of_ones_own_both_complete() -> None:
    assert ending("Points").kind == "complete"
    assert ending("own_loop").kind == "complete"


def test_numpys_numbers_are_numbers() -> None:
    made = Measurement(samples_seen=np.int64(3), elapsed_s=np.float32(0.5), accuracy=np.float64(0.25))  # type: ignore[arg-type]
    assert json.loads(json.dumps(made.to_dict()))["samples_seen"] == 3
    with pytest.raises(
        TaskError, match="elapsed_s: expected a finite number >= 0, the seconds of training, got inf"
    ):
        Measurement(samples_seen=1, elapsed_s=float("inf"))


def test_a_loss_that_overflows_is_a_diverged_trial_with_its_last_measurement() -> None:
    reports = list(start_attempt(f"{TASKS}:Explodes", setup(32, budget=4000, rate=1e6)))
    assert isinstance(reports[-2], Measurement)
    assert reports[-2].samples_seen < 4000
    assert reports[-1].kind == "diverged"


def test_an_exception_is_an_error_with_the_users_line_and_a_traceback() -> None:
    outcome = ending("Raises")
    assert outcome.kind == "error"
    assert outcome.message.startswith("Raises: ValueError: the score is not ready (")
    assert f"{TASKS}:" in outcome.message
    assert "Traceback" in outcome.traceback


def test_what_exits_is_an_error_with_its_line() -> None:
    outcome = ending("IsEndedBy", parameters={"file": "train.py"})
    assert (outcome.kind, outcome.message) == ("error", "IsEndedBy: SystemExit: 1 (train.py:1)")


def test_memory_that_runs_out_without_a_word_has_its_type() -> None:
    assert ending("RunsOut") == Outcome("out_of_memory", "MemoryError")


def test_torchs_memory_error_names_the_micro_batch() -> None:
    outcome = ending("SmallMemory", batch=200, accumulation=2)
    assert (outcome.kind, outcome.micro_batch) == ("out_of_memory", 100)
    assert ending("SmallMemory", batch=200, accumulation=4).kind == "complete"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "stops_short",
            "expected a last Measurement after setup.samples_budget = 400 samples, within less than one step of 32",
        ),
        ("yields_dicts", "expected to yield Measurement, got dict"),
        ("not_a_generator", "got a function that yields nothing"),
        ("a_number", "got a int"),
        ("Point", "to define 'Point', but it does not"),
    ],
)
def test_a_broken_contract_is_told(name: str, message: str) -> None:
    outcome = ending(name)
    assert outcome.kind == "error"
    assert message in outcome.message
    assert outcome.traceback == ""


def test_closing_an_attempt_closes_the_users_generator(tmp_path: Path) -> None:
    task = tmp_path / "mine.py"
    task.write_text(
        "from bsearch import Measurement\n"
        "import pathlib\n"
        "def train(setup):\n"
        "    try:\n"
        "        for seen in range(1, 100):\n"
        "            yield Measurement(samples_seen=seen, elapsed_s=seen, accuracy=0.5)\n"
        "    finally:\n"
        f"        pathlib.Path({str(tmp_path / 'closed')!r}).touch()\n"
    )
    attempt = start_attempt(f"{task}:train", setup())
    assert isinstance(next(attempt), Measurement)
    assert isinstance(attempt, Iterator)
    attempt.close()  # type: ignore[attr-defined]
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("def train(:\n", r"mine.py:1: syntax error"),
        ("import no_such_package\n", "it imports 'no_such_package', which is not installed"),
        ("raise RuntimeError('no GPU')\n", r"importing it failed at .*mine.py:1: RuntimeError: no GPU"),
        (
            "from bsearch import Task\nclass train(Task): pass\n",
            "expected the methods data and model, missing data, model",
        ),
    ],
)
def test_a_task_file_that_cannot_be_loaded_says_why(tmp_path: Path, content: str, message: str) -> None:
    task = tmp_path / "mine.py"
    task.write_text(content)
    with pytest.raises(TaskError, match=message):
        load_task(f"{task}:train")


def test_a_missing_task_says_where_it_was_looked_for() -> None:
    with pytest.raises(TaskError, match=r"task file /nowhere/tasks.py: no such file"):
        load_task("/nowhere/tasks.py:Mine")
    with pytest.raises(TaskError, match=r"no module named 'nowhere'. Refer to a file as path/file.py:name"):
        load_task("nowhere.tasks:Mine")


def test_a_tasks_identity_follows_its_file_and_its_neighbours(tmp_path: Path) -> None:
    task, neighbour = tmp_path / "mine.py", tmp_path / "models.py"
    task.write_text("import os\nfrom models import Net\n")
    neighbour.write_text("class Net: pass\n")
    first = task_code_hash(f"{task}:Mine")
    assert first == task_code_hash(f"{task}:Mine")
    assert first != task_code_hash(f"{task}:Other")
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    assert first == task_code_hash(f"{task}:Mine")
    neighbour.write_text("class Net:\n    depth = 3\n")
    assert first != task_code_hash(f"{task}:Mine")


@pytest.mark.parametrize(
    ("code", "same"),
    [
        ("def f(x):\n    return 2 * x + .5\n", True),
        ("# f\ndef f(x):\n    'Twice.'\n\n    return ((2*x)\n            + 0.5)  # twice\n", True),
        ("'A module.'\ndef f(x): return 2 * x + .5", True),
        ("def f(x):\n    return 2 * x - .5\n", False),
        ("def f(x):\n    'Twice.'\n    'more'\n    return 2 * x + .5\n", False),
        ("def f(y):\n    return 2 * y + .5\n", False),
        ("async def f(x):\n    return 2 * x + .5\n", False),
        ("def f(x):\n    return 2 * x + .5\nf = None\n", False),
        ("def f(x):\n    return 2 * x + '.5'\n", False),
        ("def f(x) return 2\n", False),
    ],
)
def test_comments_and_layout_are_no_part_of_a_tasks_identity(tmp_path: Path, code: str, same: bool) -> None:
    task = tmp_path / "mine.py"
    task.write_text("def f(x):\n    return 2 * x + .5\n")
    first = task_code_hash(f"{task}:f")
    task.write_text(code)
    assert (task_code_hash(f"{task}:f") == first) == same


def test_a_setup_travels_as_a_dict() -> None:
    made = setup(37, 2, parameters={"width": 3, "name": "a"}, training={"betas": [0.8, 0.9]})
    assert TrialSetup.from_dict(made.to_dict()) == made
    assert os.getpid()


def test_a_loop_of_ones_own_begins_with_the_trials_seed() -> None:
    def accuracy(seed: int) -> float | None:
        first = next(iter(start_attempt(f"{TASKS}:drawing_loop", setup(training={"seed": seed}))))
        assert isinstance(first, Measurement)
        return first.accuracy

    assert accuracy(3) == accuracy(3) != accuracy(4)
