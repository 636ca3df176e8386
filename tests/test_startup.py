"""Commands that only read answer at once: they import neither torch nor Ray, and scipy.stats only where a forest is grown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "ray", "scipy.stats"}
COMMANDS = {
    "show": ["show", "{study}"],
    "show a trial": ["show", "{study}", "--trial", "0"],
    "show all": ["show", "{study}", "--all"],
    "export": ["export", "{study}"],
    "export to a trainer": ["export", "{study}", "--to", "pytorch"],
    "report": ["report", "{study}", "--out", "{folder}/report.html"],
    "rules": ["rules"],
    "plan": ["plan", "500", "--cap", "200", "--rate", "0.1"],
    "schema": ["schema"],
    "completion": ["completion", "bash"],
    "jobs": ["jobs", "list", "--launcher", "slurm"],
    "help": ["--help"],
}
CODE = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from bsearch.__main__ import main
sys.argv = ["bsearch", *{arguments!r}]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_only_reads_imports_nothing_heavy(name: str, finished_study: Path, tmp_path: Path) -> None:
    arguments = [part.format(study=finished_study, folder=tmp_path) for part in COMMANDS[name]]
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(arguments=arguments)], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    imported = set(json.loads(done.stderr.splitlines()[-1]))
    assert "bsearch.cli" in imported
    assert done.returncode == 0 or name == "jobs", done.stderr  # there is no Slurm here
    assert not imported & (HEAVY - {"scipy.stats"} if name == "report" else HEAVY)  # scikit-learn's forest, for fANOVA


@pytest.mark.slow
def test_a_finished_study_starts_no_ray_and_imports_no_torch(finished_study: Path, tmp_path: Path) -> None:
    code = CODE.format(arguments=["run", str(finished_study)])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Front of small" in done.stdout
    assert "starting Ray" not in done.stdout
    assert not set(json.loads(done.stderr.splitlines()[-1])) & {"torch", "ray"}
