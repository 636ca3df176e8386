"""Texts of a mebibyte, bits that flip, files not to send, permissions: bounded time, nothing trusted unseen, nothing sent."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import pytest
import yaml
from conftest import BATCH_AND_RATE, BSEARCH

KIND = "bounds: long texts, damaged checkpoints, files not to send"
pytestmark = pytest.mark.long
SEED = int(os.environ.get("BSEARCH_SEED", date.today().isocalendar().week))
MIB = 1 << 20
UNITS = [
    "?pass",
    "&token=",
    "://a:",
    "@",
    "a",
    "postgresql://u:@",
    "'",
    "password=",
    "//",
    "\\",
    "(",
    "[",
    "{{",
    "0",
    " ",
    "\n",
]
UNITS += ["#", "é", "%2", ".", "a: "]
TASK = """
import bsearch
def Points(setup: bsearch.TrialSetup):
    yield bsearch.Measurement(setup.samples_budget, 0.1, accuracy=0.5)
"""
FAILS = """
import bsearch
def Points(setup: bsearch.TrialSetup):
    if setup.number % 2:
        raise ValueError("x" * 5_000_000)
    yield bsearch.Measurement(setup.samples_budget, 0.1, accuracy=0.5)
"""
TRAINS = """
import torch
from bsearch import Data, Task
from torch import nn
from torch.utils.data import TensorDataset
class Mine(Task):
    def data(self, setup):
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(512, 8, generator=generator)
        data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
        return Data(data, data)
    def model(self, setup): return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
"""


def study(folder: Path, code: str, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tasks.py").write_text(code)
    values = {
        "study": "small",
        "task": "tasks.py:Points",
        "space": BATCH_AND_RATE,
        "training": {"samples": 4000, "evaluations": 1},
        "budget": {"trials": 2, "profile_s": 0},
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


def bsearch(*arguments: object, limit_s: float = 60, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BSEARCH, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        **options,
    )  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("number", range(len(UNITS)))
def test_a_mebibyte_of_anything_is_read_or_refused_soon(attack, tmp_path: Path, number: int) -> None:  # type: ignore[no-untyped-def]
    text = UNITS[number] * ((MIB - 300) // len(UNITS[number].encode()))
    for key in ("storage", "task", "study"):
        with attack(f"{key}: a mebibyte of {UNITS[number]!r}"):
            path = tmp_path / "study.yaml"
            path.write_text(
                f"study: x\ntask: nowhere.py:Mine\nspace: {{effective_batch: {{low: 1, high: 9}}}}\n{key}: |\n  "
                + text.replace("\n", "\n  ")
            )
            done = bsearch("check", path, limit_s=20)
            assert "Traceback" not in done.stderr
            assert len(done.stdout + done.stderr) < 100_000


def test_an_error_of_five_megabytes_is_cut_where_it_is_stored_and_shown(attack, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = study(tmp_path, FAILS, budget={"trials": 4, "profile_s": 0})
    with attack("run"):
        done = bsearch("run", path, "--serial")
        assert len(done.stdout + done.stderr) < 100_000
    with attack("stored"):
        assert (tmp_path / "small.db").stat().st_size < 2 * MIB
    for more in (["--all"], ["--json"], ["--pick", "1"]):
        with attack(f"show {more}"):
            done = bsearch("show", path, *more)
            assert len(done.stdout + done.stderr) < 200_000
    path = study(tmp_path / "always", FAILS.replace("setup.number % 2", "True"))
    with attack("at the first try"):
        done = bsearch("run", path, "--serial")
        assert 0 < len(done.stdout + done.stderr) < 100_000


def test_a_flipped_bit_of_a_checkpoint_is_noticed(attack, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A driver that is killed leaves checkpoints; of each one bit is flipped before the trial resumes."""
    template = tmp_path / "template"
    path = study(
        template,
        TRAINS,
        task="tasks.py:Mine",
        space={
            "effective_batch": {"low": 16, "high": 20},
            "reference_rate": {"low": 0.02, "high": 0.5, "at_batch": 64},
            "epochs": 3000,
        },
        training={"evaluations": 100},
        cluster={"checkpoints": "checkpoints", "checkpoint_every_s": 0, "trials_at_once": 1},
        budget={"trials": 1, "profile_s": 0},
    )
    driver = subprocess.Popen(
        [BSEARCH, "run", path, "--serial"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    limit = time.monotonic() + 60
    while not (found := list(template.rglob("*.pt"))):
        assert driver.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.05)
    time.sleep(1)
    driver.kill()
    driver.wait()
    (file,) = found
    whole, dice = file.read_bytes(), random.Random(SEED)
    script = tmp_path / "load.py"
    script.write_text(LOADS)
    flips = [dice.randrange(len(whole) * 8) for _ in range(150)]
    files = []
    for number, at in enumerate(flips):
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
        files.append(tmp_path / f"{number}.pt")
        files[-1].write_bytes(damaged)
    done = subprocess.run(
        [sys.executable, script, file, *files], capture_output=True, text=True, timeout=120, check=False
    )
    intact, *outcomes = done.stdout.splitlines()
    assert intact == "resumed", done.stdout + done.stderr
    for at, outcome in zip(flips, outcomes, strict=True):
        with attack(f"bit {at} of {len(whole) * 8} flipped (seed {SEED})"):
            assert outcome.startswith("began again: the checkpoint could not be read")
            assert "weights_only" not in outcome


# Reads each file as an attempt does; its own experiment is taken as right, for that is stored in it.
LOADS = """
import io, sys, torch
from bsearch.objectives.state.checkpoint import Checkpoint
saved = open(sys.argv[1], "rb").read()
content = io.BytesIO(saved[saved.index(b"PK\\x03\\x04"):])
experiment = torch.load(content, weights_only=True)["experiment"]
for path in sys.argv[1:]:
    checkpoint = Checkpoint(path, 60.0, experiment)
    state = checkpoint.load()
    print("resumed" if state is not None else "began again: " + checkpoint.facts().get("checkpoint", ""))
"""


def test_links_and_keys_are_not_sent(attack, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    secret = tmp_path / "home" / "id_ed25519"
    secret.parent.mkdir()
    key = "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\n-----END OPENSSH PRIVATE KEY-----\n"
    secret.write_text(key)
    folder = tmp_path / "study"
    path = study(folder, TASK, storage="sqlite:////shared/small.db")
    (folder / "notes.txt").symlink_to(secret)
    (folder / "linked").symlink_to(secret.parent)
    for name in ("server.pem", "id_rsa", "tls.key", "gcp-credentials.json", "plain.txt"):
        (folder / name).write_text(key)
    done = bsearch("submit", path, "--launcher", "ray", "--dry-run")
    sent = done.stdout + done.stderr
    for name in (
        "notes.txt",
        "linked",
        "server.pem",
        "id_rsa",
        "tls.key",
        "gcp-credentials.json",
        "plain.txt",
    ):
        with attack(name):
            assert done.returncode == 0, sent
            assert name in sent.partition("not sent")[2].partition("\n")[0]
    with attack("a module of that name"):
        (folder / "secrets.py").write_text("VALUE = 1\n")
        sent = bsearch("submit", path, "--launcher", "ray", "--dry-run")
        assert "secrets.py" not in (sent.stdout + sent.stderr).partition("not sent")[2].partition("\n")[0]
    with attack("a task that is a link to outside"):
        (folder / "tasks.py").rename(tmp_path / "tasks.py")
        (folder / "tasks.py").symlink_to(tmp_path / "tasks.py")
        assert bsearch("submit", path, "--launcher", "ray", "--dry-run").returncode == 2


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002, 0o027])
def test_files_have_the_permissions_that_the_umask_leaves(attack, tmp_path: Path, umask: int) -> None:  # type: ignore[no-untyped-def]
    path = study(tmp_path, TASK)
    with attack(f"umask {umask:03o}"):
        assert bsearch("run", path, "--serial", umask=umask).returncode == 0
        assert bsearch("report", path, "--out", tmp_path / "r.html", umask=umask).returncode == 0
        files = [file for file in [*(tmp_path / "results").rglob("*"), tmp_path / "r.html"] if file.is_file()]
        assert {oct(file.stat().st_mode & 0o777) for file in files} == {oct(0o666 & ~umask)}


def test_a_million_of_anything_is_refused(attack, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for changes in (
        {"training": {"samples": 400, "evaluations": 1, "workers": 10**6}},
        {"devices": {"per_trial": 10**9}},
    ):
        with attack(str(changes)):
            done = bsearch("check", study(tmp_path, TASK, **changes))
            assert done.returncode == 2, done.stdout + done.stderr
            assert "expected" in done.stderr
