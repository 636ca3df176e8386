"""Tasks as others lay them out: packages, relative imports, decorators; a change is noticed, and what runs is what is there."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from conftest import BATCH_AND_RATE, BSEARCH

KIND = "tasks in other people's layouts"
pytestmark = pytest.mark.long
YIELDS = "    yield bsearch.Measurement(setup.samples_budget, 0.1, accuracy={value})\n"
TRAIN = "import bsearch\n{imports}\ndef train(setup):\n" + YIELDS

# Files of a folder, the task, and the file whose change makes another experiment.
LAYOUTS: dict[str, tuple[dict[str, str], str, str]] = {
    "a module beside it": (
        {"tasks.py": TRAIN.format(imports="import model", value="model.VALUE"), "model.py": "VALUE = 0.5\n"},
        "tasks.py:train",
        "model.py",
    ),
    "a package beside it": (
        {
            "tasks.py": TRAIN.format(imports="from net import VALUE", value="VALUE"),
            "net/__init__.py": "from .layers import VALUE\n",
            "net/layers.py": "VALUE = 0.5\n",
        },
        "tasks.py:train",
        "net/layers.py",
    ),
    "a module of a package beside it": (
        {
            "tasks.py": TRAIN.format(imports="import net.layers.deep as deep", value="deep.VALUE"),
            "net/__init__.py": "",
            "net/layers/__init__.py": "",
            "net/layers/deep.py": "VALUE = 0.5\n",
        },
        "tasks.py:train",
        "net/layers/deep.py",
    ),
    "a folder without __init__": (
        {
            "tasks.py": TRAIN.format(imports="from net import layers", value="layers.VALUE"),
            "net/layers.py": "VALUE = 0.5\n",
        },
        "tasks.py:train",
        "net/layers.py",
    ),
    "an absolute import within its package": (
        {
            "proj/__init__.py": "",
            "proj/tasks.py": TRAIN.format(imports="from proj.model import VALUE", value="VALUE"),
            "proj/model.py": "VALUE = 0.5\n",
        },
        "proj/tasks.py:train",
        "proj/model.py",
    ),
    "a relative import within its package": (
        {
            "proj/__init__.py": "",
            "proj/tasks.py": TRAIN.format(imports="from .model import VALUE", value="VALUE"),
            "proj/model.py": "VALUE = 0.5\n",
        },
        "proj/tasks.py:train",
        "proj/model.py",
    ),
    "a relative import without a package": (
        {
            "tasks.py": TRAIN.format(imports="from .model import VALUE", value="VALUE"),
            "model.py": "VALUE = 0.5\n",
        },
        "tasks.py:train",
        "model.py",
    ),
    "a relative import of a module": (
        {
            "tasks.py": TRAIN.format(imports="from . import model", value="model.VALUE"),
            "model.py": "VALUE = 0.5\n",
        },
        "tasks.py:train",
        "model.py",
    ),
    "module:name beside the study file": (
        {
            "proj/__init__.py": "",
            "proj/tasks.py": TRAIN.format(imports="from proj.model import VALUE", value="VALUE"),
            "proj/model.py": "VALUE = 0.5\n",
        },
        "proj.tasks:train",
        "proj/model.py",
    ),
    "a package as a task": (
        {
            "proj/__init__.py": TRAIN.format(imports="from .model import VALUE", value="VALUE"),
            "proj/model.py": "VALUE = 0.5\n",
        },
        "proj:train",
        "proj/model.py",
    ),
    "a package's __init__": (
        {
            "proj/__init__.py": "VALUE = 0.5\n",
            "proj/tasks.py": TRAIN.format(imports="from . import VALUE", value="VALUE"),
        },
        "proj/tasks.py:train",
        "proj/__init__.py",
    ),
    "an import inside a function": (
        {
            "tasks.py": "import bsearch\ndef train(setup):\n    from late import VALUE\n"
            + YIELDS.format(value="VALUE"),
            "late.py": "VALUE = 0.5\n",
        },
        "tasks.py:train",
        "late.py",
    ),
    "a name with a dash": (
        {
            "my-tasks.v2.py": TRAIN.format(imports="import model", value="model.VALUE"),
            "model.py": "VALUE = 0.5\n",
        },
        "my-tasks.v2.py:train",
        "model.py",
    ),
    "a decorated generator": (
        {
            "tasks.py": "import functools, bsearch\nfrom model import VALUE\ndef logged(f):\n    @functools.wraps(f)\n"
            "    def g(*a): return f(*a)\n    return g\n@logged\ndef train(setup):\n"
            + YIELDS.format(value="VALUE"),
            "model.py": "VALUE = 0.5\n",
        },
        "tasks.py:train",
        "model.py",
    ),
    "a lambda": (
        {
            "tasks.py": "import bsearch\nfrom model import VALUE\ndef inner(setup, value):\n"
            + YIELDS.format(value="value")
            + "train = lambda setup: inner(setup, VALUE)\n",
            "model.py": "VALUE = 0.5\n",
        },
        "tasks.py:train",
        "model.py",
    ),
    "a partial": (
        {
            "tasks.py": "import functools, bsearch\nfrom model import VALUE\ndef inner(setup, value):\n"
            + YIELDS.format(value="value")
            + "train = functools.partial(inner, value=VALUE)\n",
            "model.py": "VALUE = 0.5\n",
        },
        "tasks.py:train",
        "model.py",
    ),
    "a spawned pool": (
        {
            "tasks.py": "import multiprocessing, bsearch\nfrom model import VALUE\ndef double(x): return x\n"
            "def train(setup):\n    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
            "        value = pool.map_async(double, [VALUE]).get(60)[0]\n" + YIELDS.format(value="value"),
            "model.py": "VALUE = 0.5\n",
        },
        "tasks.py:train",
        "model.py",
    ),
}


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def study(folder: Path, task: str, **changes: object) -> Path:
    values = {
        "study": "small",
        "task": task,
        "space": BATCH_AND_RATE,
        "training": {"samples": 4000, "evaluations": 1},
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(values | {"budget": {"trials": 2, "profile_s": 0}} | changes))
    return path


def bsearch(*arguments: object, limit_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BSEARCH, *map(str, arguments)], capture_output=True, text=True, timeout=limit_s, check=False
    )


def accuracies(path: Path) -> set[float]:
    with closing(sqlite3.connect(path.parent / "small.db")) as connection:
        rows = connection.execute(
            "SELECT objectives FROM bsearch_trial WHERE outcome = 'complete'"
        ).fetchall()
    return {json.loads(objectives)[1] for (objectives,) in rows}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_runs_and_its_change_is_noticed(attack, tmp_path: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    files, task, changed = LAYOUTS[name]
    written(tmp_path, files)
    path = study(tmp_path, task)
    with attack(f"{name}: runs"):
        done = bsearch("run", path, "--serial")
        assert done.returncode == 0, done.stdout + done.stderr
        assert accuracies(path) == {0.5}
    (tmp_path / changed).write_text(files[changed].replace("0.5", "0.9"))
    with attack(f"{name}: a change of {changed} is another experiment"):
        done = bsearch("run", path, "--serial")
        assert done.returncode == 2, done.stdout + done.stderr
        assert "task.code" in done.stdout + done.stderr


def test_a_file_edited_in_a_notebook_is_trained_as_it_is_now(attack, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for name in ("a module beside it", "a package beside it", "a relative import within its package"):
        files, task, changed = LAYOUTS[name]
        folder = tmp_path / name.replace(" ", "-")
        written(folder, files)
        path = study(folder, task)
        script = (
            "import bsearch, pathlib, sys\n"
            f"found = []\nfor value in ('0.5', '0.75'):\n"
            f"    file = pathlib.Path({str(folder / changed)!r})\n"
            f"    file.write_text({files[changed]!r}.replace('0.5', value))\n"
            f"    study = bsearch.run({str(path)!r}, serial=True, new=True, progress=False)\n"
            "    found.append({trial.accuracy for trial in study.trials if trial.accuracy})\n"
            "print(found)\n"
        )
        with attack(name):
            done = subprocess.run(
                [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
            )
            assert done.stdout.splitlines()[-1:] == ["[{0.5}, {0.75}]"], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import argparse\nargparse.ArgumentParser().parse_args(['--no'])\n", "tasks.py:2"),
        ("import sys\nsys.exit(3)\n", "tasks.py:2"),
        ("import os\nos.environ['NOT_THERE']\n", "tasks.py:2"),
        ("import torch\ntorch.zeros(2) + torch.zeros(3)\n", "tasks.py:2"),
        ("from nowhere_at_all import x\n", "'nowhere_at_all', which is not installed"),
        ("def train(setup)\n", "tasks.py:1: syntax error"),
        ("def train(setup): return 1\n", "a function that yields nothing"),
        ("train = lambda setup: 1\n", "expected"),
        ("train = 3\n", "got a int"),
        ("other = 3\n", "to define 'train'"),
        ("from .nowhere import x\n", "tasks.py"),
        ("from ..nowhere import x\n", "tasks.py"),
    ],
)
def test_what_cannot_be_imported_is_said_at_its_line(attack, tmp_path: Path, text: str, said: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "tasks.py").write_text(text)
    with attack(text):
        done = bsearch("run", study(tmp_path, "tasks.py:train"), "--serial")
        assert done.returncode in (1, 2), done.stdout + done.stderr
        assert said in done.stdout + done.stderr, done.stdout + done.stderr
        assert "internal error" not in done.stderr


LOADERS = """
import torch
from bsearch import Data, Task
from torch import nn
from torch.utils.data import Dataset
class Points(Dataset):
    def __len__(self): return 400
    def __getitem__(self, at): return torch.tensor([at / 400.0, 1.0]), at % 2
def collate(rows):
    return torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
class Mine(Task):
    def data(self, setup): return Data(Points(), Points(), collate=collate)
    def model(self, setup): return nn.Linear(2, 2)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_loader_workers_start_in_every_way(attack, tmp_path: Path, method: str) -> None:  # type: ignore[no-untyped-def]
    start = f"import multiprocessing\nmultiprocessing.set_start_method({method!r}, force=True)\n"
    (tmp_path / "tasks.py").write_text(start.replace("\n", "\n", 1) + LOADERS)
    path = study(
        tmp_path,
        "tasks.py:Mine",
        space=BATCH_AND_RATE | {"epochs": 1},
        training={"evaluations": 1, "workers": 2},
    )
    with attack(method):
        done = bsearch("run", path, "--serial", limit_s=240)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(accuracies(path)) >= 1
