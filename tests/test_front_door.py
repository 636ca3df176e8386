"""`import bsearch`: the public names are these, they all resolve, and nothing heavy comes along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import bsearch
import pytest
from bsearch.spaces.errors import BsearchError

# The public interface: adding a name here is a promise to keep it.
PUBLIC = {
    *("run", "report", "Study", "Search", "FrontSampler", "plan_batch"),
    *(
        "Task",
        "Data",
        "Loss",
        "Score",
        "WholeSet",
        "balanced",
        "Loop",
        "Measurement",
        "TrialSetup",
        "Checkpoint",
    ),
    *("BsearchError", "StudyFileError", "TaskError", "ProfilingError", "InfeasiblePlanError"),
    *("StorageError", "ClusterError", "NoStudyError", "OutputError", "LeftOutWarning"),
}


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has imported after some code."""
    code += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_public_names_are_these() -> None:
    assert set(bsearch.__all__) == PUBLIC
    assert list(bsearch.__all__) == sorted(bsearch.__all__)
    assert set(dir(bsearch)) >= PUBLIC | {"__version__"}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_resolves_and_says_what_it_is(name: str) -> None:
    value = getattr(bsearch, name)
    assert value.__name__ == name
    assert value.__doc__


def test_every_error_is_public_and_of_one_tree() -> None:
    errors = {kind for kind in _subclasses(BsearchError) if kind.__module__ == BsearchError.__module__}
    assert {kind.__name__ for kind in errors} == {name for name in PUBLIC if name.endswith("Error")} - {
        "BsearchError"
    }


def _subclasses(kind: type) -> set[type]:
    return {*kind.__subclasses__(), *(below for one in kind.__subclasses__() for below in _subclasses(one))}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'reprice'"):
        _ = bsearch.reprice


def test_importing_bsearch_imports_nothing_heavy() -> None:
    imported = modules_after("import bsearch")
    assert not imported & {
        "torch",
        "ray",
        "optuna",
        "sqlalchemy",
        "numpy",
        "scipy",
        "pydantic",
        "rich",
        "click",
    }


def test_a_study_opens_without_torch_ray_and_optuna(finished_study: Path) -> None:
    imported = modules_after(
        f"import bsearch; s = bsearch.Study({str(finished_study)!r}); s.front, s.trials, s.best"
    )
    assert not imported & {"torch", "ray", "optuna", "scipy.stats"}


def test_no_module_of_ours_is_shadowed_by_a_public_name() -> None:
    # `bsearch.search` and `bsearch.Search` differ in case alone; a submodule import must not replace a public name.
    import bsearch.search.run.driver

    assert isinstance(bsearch.search, ModuleType)
    assert callable(bsearch.run)


@pytest.mark.slow
def test_a_task_may_be_given_as_the_class_itself(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Cifar: ...\ndef local():\n    class Inner: ...\n    return Inner\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mine; from bsearch.cluster.study import reference_of\n"
        "from bsearch.objectives.digits import Digits\n"
        "from bsearch.spaces.errors import StudyFileError\n"
        "print(reference_of(mine.Cifar)); print(reference_of(Digits))\n"
        "for other in (mine.local(), mine.Cifar(), 3):\n"
        "    try: reference_of(other)\n"
        "    except StudyFileError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    own, ours, *refused = done.stdout.splitlines()
    assert (own, ours) == (f"{tmp_path}/mine.py:Cifar", "bsearch.objectives.digits:Digits")
    assert len(refused) == 3 and all(
        "task: expected a class or function that workers can import" in line for line in refused
    )
