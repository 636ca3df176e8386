"""Every way in which training code can end or misbehave: its trial ends in words that say how, and all others complete."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import bsearch
import pytest
from users import small_study

KIND = "a user's code that ends in its own way"
pytestmark = pytest.mark.long

# What a trial does in the midst of its training, and a word that its message must have.
RAISED = {
    "a panic of Rust": (
        "class PanicException(BaseException): pass\nraise PanicException('called unwrap on None')",
        "PanicException",
    ),
    "CancelledError": ("import asyncio\nraise asyncio.CancelledError('cancelled')", "CancelledError"),
    "GeneratorExit": ("raise GeneratorExit('gone')", "GeneratorExit"),
    "a BaseException": ("raise BaseException('base')", "BaseException"),
    "SystemExit": ("raise SystemExit(3)", "SystemExit"),
    "StopIteration": ("raise StopIteration", "StopIteration"),
    "an exception group": ("raise ExceptionGroup('several', [ValueError('one')])", "several"),
    "a message that raises": (
        "class Bad(Exception):\n    def __str__(self): raise ValueError\nraise Bad",
        "Bad",
    ),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
    "a string": ("yielded = 'a string'", "str"),
    "None": ("yielded = None", "NoneType"),
    "a lambda among its facts": ("facts = {'f': lambda: 0}", "facts"),
    "an ordinary error": ("raise ValueError('plain')", "plain"),
    "a failed assertion": ("assert False, 'no'", "AssertionError"),
}

TASK = """
import os, signal, sys, threading, time
from bsearch import Measurement

def never():
    while True:
        time.sleep(0.01)

def train(setup):
    names = [*CODE]
    place = (setup.number - 1) // 2
    bad = setup.samples_budget > 24 and setup.number % 2 and place < len(names)
    yield Measurement(setup.samples_budget // 2, 1.0, accuracy=0.5 + setup.number / 1000)
    given = {"facts": {}, "never": never}
    if bad:
        exec(CODE[names[place]], given)
    if "yielded" in given:
        yield given["yielded"]
    yield Measurement(setup.samples_budget, 2.0, accuracy=0.5 + setup.number / 1000, facts=given["facts"])
"""


def trials(folder: Path, code: dict[str, str], **options: Any) -> tuple[list[dict[str, Any]], str]:
    """The trials of a study in which every second one misbehaves, and all that was printed."""
    (folder / "task.py").write_text(f"CODE = {code!r}\n{TASK}")
    study = small_study(
        task=f"{folder}/task.py:train",
        training={"samples": 64, "evaluations": 2},
        budget={"trials": options.pop("complete")},
        stopping="none",
        sampler="random",
        storage=f"sqlite:///{folder}/exits.db",
        **options.pop("changes", {}),
    )
    program = f"import bsearch\nbsearch.run({study!r}, **{options!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=400, check=False
    )
    assert (folder / "exits.db").exists(), done.stdout + done.stderr
    with closing(sqlite3.connect(folder / "exits.db")) as connection:
        connection.row_factory = sqlite3.Row
        rows = [dict(row) for row in connection.execute("SELECT * FROM bsearch_trial ORDER BY number")]
    return [{**row, **json.loads(row["facts"])} for row in rows], done.stdout + done.stderr


def test_what_a_trial_raises(attack: Any, tmp_path: Path) -> None:
    found, printed = trials(
        tmp_path, {name: code for name, (code, _) in RAISED.items()}, complete=len(RAISED) + 1, serial=True
    )
    for place, (name, (_, word)) in enumerate(RAISED.items()):
        with attack(name):
            assert len(found) > 2 * place + 2, printed[-400:]
            assert found[2 * place + 1]["outcome"] == "error", found[2 * place + 1]
            assert word in found[2 * place + 1]["message"], found[2 * place + 1]["message"]
            assert found[2 * place + 2]["outcome"] == "complete"
    with attack("nothing is printed as ours"):
        assert "internal error" not in printed and "Traceback" not in printed, printed[-400:]


def test_what_is_raised_before_the_first_trial(attack: Any, tmp_path: Path) -> None:
    cases = {}
    for where in ("import", "constructor", "data", "first"):
        for name in ("a panic of Rust", "CancelledError", "GeneratorExit", "a BaseException", "SystemExit"):
            code = RAISED[name][0].replace("\n", "\n        ")
            file = tmp_path / f"task{len(cases)}.py"
            file.write_text(
                f"from bsearch import Measurement, Task\n{RAISED[name][0] if where == 'import' else ''}\nclass Bad(Task):\n"
                f"    def __init__(self):\n        {code if where == 'constructor' else 'pass'}\n"
                f"    def data(self, setup):\n        {code}\n    def model(self, setup):\n        pass\n"
                f"def train(setup):\n    if True:\n        {code}\n    yield 1\n"
            )
            task = f"{file}:{'train' if where == 'first' else 'Bad'}"
            storage = f"sqlite:///{tmp_path}/early.db"
            cases[f"{where}: {name}"] = small_study(
                study=file.stem, task=task, storage=storage, training={"samples": 64}
            )
    program = (
        f"import bsearch, json\nsaid = {{}}\nfor name, study in {cases!r}.items():\n    try:\n"
        "        bsearch.run(study, serial=True, progress=False)\n"
        "    except bsearch.BsearchError as error:\n        said[name] = str(error)\n"
        "    except BaseException:\n        pass\nprint(json.dumps(said))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    said = json.loads(done.stdout.splitlines()[-1])
    for name in cases:
        with attack(name):
            assert RAISED[name.partition(": ")[2]][1] in said[name]


def test_a_training_that_fails_raises_in_python(attack: Any, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "import os\nfrom bsearch import Measurement\n\ndef train(setup):\n"
        "    if os.environ.get('FAIL'):\n        raise ValueError('on purpose')\n"
        "    yield Measurement(setup.samples_budget, 1.0, accuracy=0.5 + setup.number / 100)\n"
    )
    study = small_study(
        task=f"{tmp_path}/task.py:train",
        training={"samples": 64, "evaluations": 1},
        budget={"trials": 2},
        storage=f"sqlite:///{tmp_path}/train.db",
    )
    ran = bsearch.run(study, serial=True, progress=False)
    with attack("what it returns reads well"):
        made = ran.train(out=tmp_path / "out", serial=True, say=lambda line: None)
        assert "complete" in repr(made) and "0.51" in repr(made) and str(tmp_path / "out") in repr(made), (
            repr(made)
        )
        assert len(repr(made)) < 400, repr(made)
    os.environ["FAIL"] = "1"
    try:
        with attack("one that fails raises"):
            try:
                ran.train(out=tmp_path / "failed", serial=True, say=lambda line: None)
            except bsearch.BsearchError as error:
                assert "on purpose" in str(error)
            else:
                raise AssertionError("it returned")
    finally:
        del os.environ["FAIL"]


def test_cleaning_up_is_no_outcome(attack: Any, tmp_path: Path) -> None:
    """A generator that raises, or goes on, as it is closed: its trial has ended by what came before."""
    for name, cleanup in {
        "raises": "raise ValueError('late')",
        "goes on": "yield 3",
        "exits": "raise SystemExit(4)",
    }.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        (folder / "task.py").write_text(
            "from bsearch import Measurement\n\ndef train(setup):\n    try:\n"
            "        yield Measurement(setup.samples_budget // 2, 1.0, accuracy=float('nan') if setup.number == 1 else 0.5)\n"
            "        yield Measurement(setup.samples_budget, 2.0, accuracy=0.5)\n"
            f"    except GeneratorExit:\n        {cleanup}\n"
        )
        study = small_study(
            task=f"{folder}/task.py:train",
            training={"samples": 64, "evaluations": 2},
            budget={"trials": 3},
            stopping="none",
            storage=f"sqlite:///{folder}/late.db",
        )
        with attack(name):
            found = bsearch.run(study, serial=True, progress=False).trials
            assert [trial.outcome for trial in found] == ["complete", "diverged", "complete"]


# On workers of their own.
ON_RAY = {
    "raises": ("raise ValueError('plain')", "error", "plain"),
    "os._exit(3)": ("import os\nos._exit(3)", "error", "code 3"),
    "SIGSEGV": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "error", "SIGSEGV"),
    "SIGKILL": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "error", "SIGKILL"),
    "a string": ("yielded = 'text'", "error", "str"),
    "a BaseException": ("raise BaseException('base')", "error", "BaseException"),
    "no working directory": (
        "import os, shutil, tempfile\nos.chdir(tempfile.mkdtemp())\nshutil.rmtree(os.getcwd())",
        "complete",
        "working directory",
    ),
    "a default dtype": ("import torch\ntorch.set_default_dtype(torch.float64)", "complete", "default dtype"),
    "no more file handles": (
        "import os, resource\nhard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))\nkept = []\nwhile True: kept.append(os.open('/dev/null', 0))",
        "error",
        "open files",
    ),
    "5 MB printed": ("print('x' * 5_000_000)", "complete", ""),
    "a message of 5 MB": ("raise ValueError('x' * 5_000_000)", "error", "ValueError"),
    "no heed of SIGTERM": (
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *given: time.sleep(100))",
        "complete",
        "SIGTERM",
    ),
    "an environment variable": ("import os\nos.environ['MY_SWITCH'] = '1'", "complete", "MY_SWITCH"),
    "a thread that never ends": (
        "import threading\nthreading.Thread(target=never, name='never', daemon=True).start()",
        "complete",
        "never",
    ),
    "a lambda among its facts": ("facts = {'f': lambda: 0}", "error", "facts"),
    "recursion": ("def f(): f()\nf()", "error", "RecursionError"),
    "MemoryError": ("raise MemoryError('none left')", "error", "none left"),
}


@pytest.mark.ray
def test_one_of_every_kind_on_ray(attack: Any, tmp_path: Path) -> None:
    changes = {"cluster": {"trials_at_once": 1}}
    complete = len(ON_RAY) + 1 + sum(outcome == "complete" for _, outcome, _ in ON_RAY.values())
    code = {name: code for name, (code, _, _) in ON_RAY.items()}
    found, printed = trials(tmp_path, code, complete=complete, changes=changes)
    for place, (name, (_, outcome, word)) in enumerate(ON_RAY.items()):
        with attack(f"on Ray: {name}"):
            assert len(found) > 2 * place + 1, printed[-400:]
            trial = found[2 * place + 1]
            assert trial["outcome"] == outcome, trial
            assert word in str(trial), trial
        with attack(f"on Ray: beside {name}"):
            assert len(found) > 2 * place + 2, printed[-400:]
            assert found[2 * place + 2]["outcome"] == "complete", found[2 * place + 2]
    with attack("on Ray: nothing is printed as ours"):
        assert "internal error" not in printed and "Traceback" not in printed, printed[-400:]
