"""Laws of a schedule of one's own: that of the same formula trains to the same bits; a faulty one is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bsearch.objectives.loading import schedule_of
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.training import TrainingRun
from bsearch.search.store.stored import study_identity
from bsearch.spaces.errors import StudyFileError, TaskError
from bsearch.spaces.laws.device import ProfileRequest
from bsearch.spaces.schedule import SCHEDULES
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.study.file import read_study, study_from_dict
from conftest import TASKS
from helpers import setup
from tasks_for_tests import Noisy

FORMULAS = {
    "constant": "1.0",
    "wsd": "min(1.0, (1.0 - done) / 0.2)",
    "linear": "1.0 - done",
    "cosine": "0.5 * (1.0 + math.cos(math.pi * done))",
}


def written(folder: Path, formula: str, warmup: float = 0.0, name: str = "schedules.py") -> Path:
    file = folder / name
    done = f"max((fraction - {warmup}) / (1.0 - {warmup}), 0.0)"
    file.write_text(f"import math\n\ndef mine(fraction):\n    done = {done}\n    return {formula}\n")
    return file


def test_each_built_in_has_its_formula_here() -> None:
    assert FORMULAS.keys() == SCHEDULES.keys()


@pytest.mark.parametrize("warmup", [0.0, 0.3])
@pytest.mark.parametrize("name", FORMULAS)
def test_one_that_computes_a_built_ins_formula_trains_to_the_same_bits(
    tmp_path: Path, name: str, warmup: float
) -> None:
    written(tmp_path, FORMULAS[name], warmup)
    runs = []
    for schedule in (name, "schedules.py:mine"):
        training = {"schedule": schedule, "warmup": warmup, "ema": 0.9}
        run = TrainingRun(
            Noisy(), setup(37, 3, budget=400, training=training, folder=str(tmp_path), smallest_micro_batch=2)
        )
        scores = [(one.scores, one.train_loss) for one in run.measurements()]
        runs.append((scores, [*run.model.state_dict().values(), *run.averages]))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("nowhere.py:mine", "nowhere.py: no such file"),
        ("schedules.py:yours", "to define 'yours', but it does not"),
        ("schedules.py:math", "expected a function of the fraction of the budget, got module"),
        ("no_such_module:mine", "no module named 'no_such_module'"),
        ("raises.py:mine", "it failed at 1 of the budget: ZeroDivisionError"),
        (
            "negative.py:mine",
            "expected a finite share of the peak rate >= 0 at 0.51 of the budget, got -0.02",
        ),
        ("infinite.py:mine", "at 0 of the budget, got nan"),
        ("words.py:mine", "at 0 of the budget: expected a number, got 'slow'"),
    ],
)
def test_a_faulty_one_is_refused_before_the_first_trial(tmp_path: Path, schedule: str, words: str) -> None:
    for name, formula in (
        ("schedules.py", "1.0"),
        ("raises.py", "1 / (1 - fraction)"),
        ("negative.py", "1 - 2 * fraction"),
        ("infinite.py", "math.inf - math.inf"),
        ("words.py", "'slow'"),
    ):
        written(tmp_path, formula, name=name)
    made = setup(training={"schedule": schedule, "samples": 400}, folder=str(tmp_path))
    for task in ("Points", "own_loop"):
        with pytest.raises(TaskError) as error:
            profile_task(f"{TASKS}:{task}", ProfileRequest(made, Memory(), highest=32))
        assert words in str(error.value) and "schedule" in str(error.value)


def test_its_code_belongs_to_the_studys_identity_and_its_place_does_not(tmp_path: Path) -> None:
    def identity(folder: Path, formula: str) -> object:
        folder.mkdir(exist_ok=True)
        written(folder, formula)
        study = folder / "study.yaml"
        study.write_text(
            "study: s\ntask: tasks.py:Mine\ntraining: {schedule: schedules.py:mine}\n"
            "space: {effective_batch: {low: 8, high: 64}, reference_rate: 0.1}\n"
        )
        return study_identity(read_study(study), "code")

    first = identity(tmp_path / "a", "1.0 - done")
    assert identity(tmp_path / "b", "1.0 - done  # as before") == first
    assert identity(tmp_path / "a", "1.0 - done / 2") != first
    (tmp_path / "a" / "schedules.py").unlink()
    with pytest.raises(TaskError, match=r"training\.schedule: schedules\.py:mine: .*no such file"):
        study_identity(read_study(tmp_path / "a" / "study.yaml"), "code")


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"schedule": "cosin"}, "Did you mean 'cosine'?"),
    ],
)
def test_where_its_shape_would_have_to_be_known_it_is_refused_by_name(
    training: dict[str, object], words: str
) -> None:
    space = {
        "effective_batch": {"low": 8, "high": 64},
        "reference_rate": 0.1,
        "epochs": {"low": 1, "high": 4},
    }
    with pytest.raises(StudyFileError) as error:
        study_from_dict(
            {
                "study": "s",
                "task": "tasks.py:Mine",
                "space": space,
                "training": {"schedule": "schedules.py:mine", **training},
            }
        )
    assert words in str(error.value)


def test_a_module_may_have_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written(tmp_path, "1.0 - done", name="schedules_of_a_module.py")
    monkeypatch.syspath_prepend(tmp_path)
    found = schedule_of(setup(training={"schedule": "schedules_of_a_module:mine"}))
    assert callable(found) and [found(each / 4) for each in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_built_ins_are_not_looked_for(name: str) -> None:
    assert schedule_of(setup(training={"schedule": name})) == name
