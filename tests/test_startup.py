"""What starts imports no more than it needs: commands that only read neither torch, Ray, SciPy, Optuna nor what drives a study;
a driver no torch and no experiment tracker; its workers nothing of the search.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from bsearch.cluster.machines import resources_of
from bsearch.cluster.tune import trainable
from conftest import TASKS
from ray import cloudpickle

# Where the agent of any Ray listens by default.
AGENT_PORT = 52365
HEAVY = {"torch", "ray", "scipy", "optuna", "bsearch.search.run.study_run"}
COMMANDS = {
    "show": ["show", "{study}"],
    "show a trial": ["show", "{study}", "--pick", "0"],
    "show all": ["show", "{study}", "--all"],
    "export": ["export", "{study}"],
    "export to a trainer": ["export", "{study}", "--to", "pytorch"],
    "report": ["report", "{study}", "--out", "{folder}/report.html"],
    "schema": ["check", "--schema"],
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
    assert "bsearch.commands.group" in imported
    assert done.returncode == 0 or name == "jobs", done.stderr  # there is no Slurm here
    assert not imported & (HEAVY | {"sqlalchemy", "numpy"} if name == "help" else HEAVY)


@pytest.mark.slow
def test_a_finished_study_starts_no_ray_and_imports_no_torch(finished_study: Path, tmp_path: Path) -> None:
    code = CODE.format(arguments=["run", str(finished_study)])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Front of small" in done.stdout
    assert "starting Ray" not in done.stdout
    assert not set(json.loads(done.stderr.splitlines()[-1])) & {"torch", "ray"}


@pytest.mark.slow
def test_a_worker_imports_nothing_of_the_search() -> None:
    sent = cloudpickle.dumps(trainable(partial(resources_of, cores=1, gpus=1, kind="A100")))
    code = "import json, pickle, sys; pickle.loads(sys.stdin.buffer.read()); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], input=sent, check=True, capture_output=True)
    imported = json.loads(done.stdout)
    assert "bsearch.cluster.worker" in imported
    assert not {"torch", "scipy.stats", "optuna", "bsearch.cluster.tune"}.intersection(imported)
    assert not [name for name in imported if name.startswith("bsearch.search")]


ON_RAY = """
import json, socket, sys
import bsearch
from bsearch.cluster.connection import start_local_ray
from ray._private import worker
taken = socket.create_server(("127.0.0.1", {port})) if {port} else None
start_local_ray(1)
done = len(bsearch.run({study!r}).trials)
print(json.dumps([done, worker._global_node.dashboard_agent_listen_port, sorted(sys.modules)]))
"""


@pytest.mark.ray
def test_a_driver_imports_no_torch_and_no_tracker_and_waits_for_no_port_that_is_taken(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = study_file(task=f"{TASKS}:Points", budget={"trials": 1})
    with socket.socket() as usual:  # another Ray on this machine may have it
        free = usual.connect_ex(("127.0.0.1", AGENT_PORT)) != 0
    code = ON_RAY.format(port=AGENT_PORT if free else 0, study=str(path))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    trials, port, imported = json.loads(done.stdout.splitlines()[-1])
    assert trials == 1
    assert port not in (0, AGENT_PORT)
    assert not {"torch", "mlflow", "wandb"}.intersection(imported)


@pytest.mark.long
@pytest.mark.slow
def test_beside_a_running_study_no_thread_imports_what_all_queries_go_through(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    """SQLAlchemy's ORM takes part in every query from the middle of its import on."""
    path = study_file(task=f"{TASKS}:Points", budget={"trials": 3, "profile_s": 0.5})
    code = f"""
import sys, threading
class Imports:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("sqlalchemy.orm") and threading.current_thread() is not threading.main_thread():
            print("imported in a thread:", name)
sys.meta_path.insert(0, Imports())
{CODE.format(arguments=["run", str(path), "--serial"])}"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sqlalchemy.orm" in json.loads(done.stderr.splitlines()[-1])
    assert "imported in a thread" not in done.stdout
