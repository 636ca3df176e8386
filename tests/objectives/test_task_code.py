"""A task's identity covers what it imports, and its file is a module that other processes find."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from bsearch.objectives.loading import load_task
from bsearch.objectives.task_code import task_code_hash, task_packages, task_sources
from bsearch.objectives.task_modules import module_name
from hypothesis import given
from hypothesis import strategies as st

TRAIN = "from bsearch import Measurement\ndef train(setup):\n    yield Measurement(1, 0.1, accuracy=0.5)\n"


def written(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


# Files, and those that are followed from the first.
LAYOUTS: list[tuple[dict[str, str], set[str]]] = [
    (
        {"tasks.py": "import a", "a.py": "from b import c", "b.py": "", "c.py": ""},
        {"tasks.py", "a.py", "b.py"},
    ),
    (
        {"tasks.py": "import a.b", "a/__init__.py": "", "a/b.py": "", "a/c.py": ""},
        {"tasks.py", "a/__init__.py", "a/b.py"},
    ),
    (
        {"tasks.py": "from a import b", "a/b.py": "from . import c", "a/c.py": ""},
        {"tasks.py", "a/b.py", "a/c.py"},
    ),
    ({"tasks.py": "import a", "a.py": "", "a/b.py": ""}, {"tasks.py", "a.py"}),
    (
        {
            "p/t.py": "from p.q.m import x",
            "p/__init__.py": "",
            "p/q/__init__.py": "",
            "p/q/m.py": "from ..r import y",
            "p/r.py": "",
        },
        {"p/t.py", "p/__init__.py", "p/q/__init__.py", "p/q/m.py", "p/r.py"},
    ),
    (
        {"tasks.py": "def f():\n  try:\n    import a\n  except ImportError: pass", "a.py": ""},
        {"tasks.py", "a.py"},
    ),
    ({"tasks.py": "import torch, json, numpy.linalg, bsearch"}, {"tasks.py"}),
    ({"tasks.py": "import a", "a.py": "import tasks"}, {"tasks.py", "a.py"}),
    ({"tasks.py": "from a import *", "a.py": "syntax error("}, {"tasks.py", "a.py"}),
]


@pytest.mark.parametrize(("files", "followed"), LAYOUTS)
def test_every_import_of_ones_own_is_followed(
    tmp_path: Path, files: dict[str, str], followed: set[str]
) -> None:
    folder, task = written(tmp_path, files), next(iter(files))
    assert set(task_sources(folder / task)) == {folder / name for name in followed}
    before = task_code_hash(f"{folder / task}:train")
    for name in files:
        if name.endswith(".py"):
            (folder / name).write_text(files[name] + "\nchanged = 1\n")
            assert (task_code_hash(f"{folder / task}:train") != before) == (name in followed), name
            (folder / name).write_text(files[name])


def test_a_module_on_the_path_is_followed_and_an_installed_one_has_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = written(
        tmp_path / "elsewhere", {"theirs_of_the_test/__init__.py": "", "theirs_of_the_test/net.py": "X = 1"}
    )
    monkeypatch.syspath_prepend(str(elsewhere))
    text = "import torch, os\nfrom theirs_of_the_test import net\nfrom bsearch import Task\n"
    folder = written(tmp_path / "study", {"tasks.py": text})
    assert elsewhere / "theirs_of_the_test" / "net.py" in task_sources(folder / "tasks.py")
    assert list(task_packages(f"{folder / 'tasks.py'}:train")) == ["torch"]


def test_the_identity_of_files_beside_each_other_is_as_it_was(tmp_path: Path) -> None:
    """Studies of earlier versions go on."""
    files = {
        "tasks.py": "import model\nfrom torch import nn\ndef train(setup):\n    yield 1\n",
        "model.py": "import other\nVALUE = 0.5\n",
        "other.py": "X = 1\n",
    }
    assert task_code_hash(f"{written(tmp_path, files) / 'tasks.py'}:train") == "697d68c2db9b8ffc"


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=20),
    st.text(max_size=20),
)
def test_a_file_has_one_name_and_no_other_has_it(stem: str, folder: str) -> None:
    path = Path(f"/nowhere/{folder}".replace("\0", ""), f"{stem}.py")
    assert module_name(path) != module_name(path.with_name(f"{stem}x.py"))
    assert module_name(path) != module_name(Path("/elsewhere", path.name))
    assert all(part.isidentifier() for part in module_name(path).split("."))


def test_what_a_file_defines_is_pickled_by_its_name(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "it's 50% of é",
        {"my.tasks.py": TRAIN, "tasks.py": TRAIN + "from .model import x\n", "model.py": "x = 1"},
    )
    for name in ("my.tasks.py", "tasks.py"):
        train = load_task(f"{folder / name}:train")
        pickled = pickle.dumps(train)
        del sys.modules[train.__module__]
        assert pickle.loads(pickled).__module__ == train.__module__  # noqa: S301  # our own
