"""`examples/agent`: its verdicts decide what is kept."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "agent"


@pytest.mark.slow
@pytest.mark.long
def test_an_edit_called_better_is_committed_and_one_called_worse_is_reset(tmp_path: Path) -> None:
    example, folder = tmp_path / "example", tmp_path / "work"
    shutil.copytree(EXAMPLE, example, ignore=shutil.ignore_patterns("__pycache__"))
    tasks = example / "tasks.py"
    tasks.write_text(tasks.read_text().replace("WIDTH = 24", "WIDTH = 2"))
    command = [
        sys.executable,
        str(example / "loop.py"),
        str(folder),
        "--trials",
        "12",
        "--candidates",
        "wide",
        "mislabel",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wide, mislabel, _ = done.stdout.splitlines()
    assert re.fullmatch(r"wide +better +\+0\.\d{4} \[\+.*\]  kept", wide), done.stdout
    assert re.fullmatch(r"mislabel +worse +-0\.\d{4} \[-.*\]  reset", mislabel), done.stdout
    log = subprocess.run(
        ["git", "log", "--format=%s"], cwd=folder, capture_output=True, text=True, check=True
    )
    assert log.stdout.splitlines() == ["wide", "As it was"]
    code = (folder / "tasks.py").read_text()
    assert "WIDTH = 96" in code
    assert "torch.where" not in code


@pytest.mark.slow
@pytest.mark.long
def test_an_edit_that_does_not_train_is_reset_with_the_reason(tmp_path: Path) -> None:
    example, folder = tmp_path / "example", tmp_path / "work"
    shutil.copytree(EXAMPLE, example, ignore=shutil.ignore_patterns("__pycache__"))
    (example / "candidates.py").write_text(r"""CANDIDATES = [("shape", r"nn\.Linear\(64", "nn.Linear(63")]""")
    done = subprocess.run(
        [sys.executable, str(example / "loop.py"), str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"shape +failed .*63.* reset\n", done.stdout), done.stdout
    assert "nn.Linear(64" in (folder / "tasks.py").read_text()
