"""What a trial changes in its process is not there in the next one."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from users import small_study

KIND = "a trial changes the next one in its process"
pytestmark = pytest.mark.long

# What a trial does to its process, and how the next would find it.
CHANGES = {
    "torch's default dtype": ("torch.set_default_dtype(torch.float64)", "torch.get_default_dtype()"),
    "torch's default device": ("torch.set_default_device('meta')", "torch.zeros(1).device"),
    "determinism": (
        "torch.use_deterministic_algorithms(True)",
        "torch.are_deterministic_algorithms_enabled()",
    ),
    "matmul precision": (
        "torch.set_float32_matmul_precision('medium')",
        "torch.get_float32_matmul_precision()",
    ),
    "TF32 by the new name": ("torch.backends.fp32_precision = 'tf32'", "torch.backends.fp32_precision"),
    "TF32 in cuDNN": ("torch.backends.cudnn.allow_tf32 = False", "torch.backends.cudnn.allow_tf32"),
    "cudnn.enabled": ("torch.backends.cudnn.enabled = False", "torch.backends.cudnn.enabled"),
    "cudnn.benchmark": ("torch.backends.cudnn.benchmark = True", "torch.backends.cudnn.benchmark"),
    "cudnn.deterministic": (
        "torch.backends.cudnn.deterministic = True",
        "torch.backends.cudnn.deterministic",
    ),
    "flash attention": (
        "torch.backends.cuda.enable_flash_sdp(False)",
        "torch.backends.cuda.flash_sdp_enabled()",
    ),
    "threads": ("torch.set_num_threads(7)", "torch.get_num_threads()"),
    "grad mode": ("torch.set_grad_enabled(False)", "torch.is_grad_enabled()"),
    "anomaly detection": ("torch.autograd.set_detect_anomaly(True)", "torch.is_anomaly_enabled()"),
    "autocast": ("torch.set_autocast_enabled('cpu', True)", "torch.is_autocast_enabled('cpu')"),
    "denormal numbers": ("torch.set_flush_denormal(True)", "float(torch.full((1,), 1e-39) * 0.5) == 0.0"),
    "a hook of all modules": (
        "torch.nn.modules.module.register_module_forward_hook(lambda *given: None)",
        "len(torch.nn.modules.module._global_forward_hooks)",
    ),
    "an environment variable": ("os.environ['MY_SWITCH'] = '1'", "os.environ.get('MY_SWITCH')"),
    "a changed environment variable": ("os.environ['HOME'] = '/nowhere'", "os.environ.get('HOME')"),
    "a removed environment variable": ("os.environ.pop('PATH')", "'PATH' in os.environ"),
    "the working directory": ("os.chdir('/')", "os.getcwd()"),
    "the umask": ("os.umask(0o077)", "Path('/proc/self/status').read_text().partition('Umask:')[2][:6]"),
    "sys.path": ("sys.path.insert(0, '/nowhere')", "sys.path[0]"),
    "a signal handler": ("signal.signal(signal.SIGUSR2, print)", "signal.getsignal(signal.SIGUSR2) is print"),
    "an alarm": ("signal.alarm(1000)", "signal.getitimer(signal.ITIMER_REAL)[0] > 0"),
    "warnings as errors": (
        "warnings.simplefilter('error')",
        "warnings.filters[0][0] == 'error' and warnings.filters[0][1] is None",
    ),
    "the recursion limit": ("sys.setrecursionlimit(400)", "sys.getrecursionlimit()"),
    "garbage collection": ("gc.disable()", "gc.isenabled()"),
    "the decimal context": ("decimal.getcontext().prec = 3", "decimal.getcontext().prec"),
    "NumPy's errors": ("np.seterr(all='raise')", "np.geterr()"),
    "the locale": ("locale.setlocale(locale.LC_ALL, 'C.UTF-8')", "locale.setlocale(locale.LC_ALL)"),
    "a socket's timeout": ("socket.setdefaulttimeout(1e-6)", "socket.getdefaulttimeout()"),
    "a limit on open files": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (150, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
        "resource.getrlimit(resource.RLIMIT_NOFILE)[0]",
    ),
    "the cores": (
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
        "sorted(os.sched_getaffinity(0))",
    ),
    "Python's random numbers": ("random.seed(99)", "random.random()"),
    "NumPy's random numbers": ("np.random.seed(99)", "np.random.rand()"),
    "torch's random numbers": ("torch.manual_seed(99)", "float(torch.rand(()))"),
}

TASK = """
import decimal, gc, json, locale, os, random, resource, signal, socket, sys, time, warnings
from pathlib import Path
import numpy as np
import torch
import pytest
from bsearch import Measurement

def train(setup):
    if setup.samples_budget > 24:
        found = {name: repr(eval(look)) for name, (change, look) in CHANGES.items()}
        Path(FOLDER, f"{setup.number}.json").write_text(json.dumps(found))
    yield Measurement(setup.samples_budget // 2, 1.0, accuracy=0.5 + setup.number / 100)
    change = WHICH(setup.number)
    if setup.samples_budget > 24:
        for name in change:
            exec(CHANGES[name][0])
    if setup.number == FAILS:
        raise ValueError("on purpose")
    yield Measurement(setup.samples_budget, 2.0, accuracy=0.5 + setup.number / 100)
"""


def found(folder: Path, which: str, trials: int, fails: int = -1) -> list[dict[str, Any]]:
    """What each trial finds as it begins; every trial of `which` makes changes before it ends."""
    text = f"CHANGES = {CHANGES!r}\nFOLDER = {str(folder)!r}\nFAILS = {fails}\nWHICH = {which}\n{TASK}"
    (folder / "task.py").write_text(text)
    study = small_study(
        task=f"{folder}/task.py:train",
        training={"samples": 64, "evaluations": 2},
        budget={"trials": trials},
        stopping="none",
        sampler="random",
        storage=f"sqlite:///{folder}/apart.db",
    )
    ran(study)
    files = [folder / f"{number}.json" for number in range(trials)]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def ran(study: dict[str, Any]) -> str:
    """Runs a study in a process of its own, since what leaks would change this one; returns what it prints."""
    program = f"import bsearch\nprint([trial.accuracy for trial in bsearch.run({study!r}, serial=True, progress=False).trials])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout + done.stderr


def test_each_is_set_back(attack: Any, tmp_path: Path) -> None:
    """One change a trial: the next finds what the first trial found."""
    names = [*CHANGES]
    made = found(tmp_path, "lambda number: [*CHANGES][number : number + 1]", len(names) + 1)
    with closing(sqlite3.connect(tmp_path / "apart.db")) as connection:
        facts = [
            json.loads(row[0])
            for row in connection.execute("SELECT facts FROM bsearch_trial ORDER BY number")
        ]
    for number, name in enumerate(names):
        with attack(name):
            assert made[number + 1][name] == made[0][name]
        if "random numbers" not in name and made[0][name] != made[number][name]:
            with attack(f"{name}: said"):
                assert "process" in str(facts[number]), facts[number]


def test_all_at_once_after_an_error_too(attack: Any, tmp_path: Path) -> None:
    skipped = ("torch's default device", "sys.path", "the recursion limit")
    which = f"lambda number: [name for name in CHANGES if name not in {skipped}] if number == 1 else []"
    made = found(tmp_path, which, 3, fails=1)
    for name in CHANGES:
        with attack(f"after an error: {name}"):
            assert made[2][name] == made[0][name]


def test_the_same_setting_has_one_result(attack: Any, tmp_path: Path) -> None:
    """Settings that are trained twice, with a trial in between that sets a default dtype."""
    (tmp_path / "task.py").write_text(
        "import torch\nfrom bsearch import Measurement\n\ndef train(setup):\n"
        "    exact = float(torch.tensor(1 / 3)) == 1 / 3\n"
        "    if setup.number == 1:\n        torch.set_default_dtype(torch.float64)\n"
        "    yield Measurement(setup.samples_budget, 1.0, accuracy=0.9 if exact else 0.5)\n"
    )
    study = small_study(
        task=f"{tmp_path}/task.py:train",
        training={"samples": 64, "evaluations": 1},
        budget={"trials": 4},
        storage=f"sqlite:///{tmp_path}/same.db",
    )
    with attack("a default dtype"):
        assert "[0.5, 0.5, 0.5, 0.5]" in ran(study)
