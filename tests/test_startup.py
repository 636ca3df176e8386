"""What starts imports no more than it needs: commands that only read neither torch, Ray, SciPy, Optuna nor what drives a study;
a driver no torch and no experiment tracker; its workers nothing of the search.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import pytest
from bsearch.cluster.machines import resources_of
from bsearch.cluster.tune import trainable
from bsearch.commands.group import SECTIONS
from conftest import BSEARCH, TASKS
from ray import cloudpickle

# Where the agent of any Ray listens by default.
AGENT_PORT = 52365
HEAVY = {"torch", "ray", "scipy", "optuna", "bsearch.search.run.study_run"}
TO_HELP = HEAVY | {"sqlalchemy", "numpy"}
TO_FIT = {"torch", "ray", "scipy.stats", "bsearch.search.run.study_run"}
# Arguments, and what they may not import. `check`, `profile`, `train` and `dashboard` do more than read.
COMMANDS = {
    "show": (["show", "{study}"], HEAVY),
    "show a trial": (["show", "{study}", "--pick", "0"], HEAVY),
    "show all": (["show", "{study}", "--all"], HEAVY),
    "export": (["export", "{study}"], HEAVY),
    "export to a trainer": (["export", "{study}", "--to", "pytorch"], HEAVY),
    "report": (["report", "{study}", "--out", "{folder}/report.html"], HEAVY),
    "show elsewhere": (["show", "{study}", "--profile", "{study}"], HEAVY),
    "schema": (["check", "--schema"], TO_HELP),
    "submit": (["submit", "{study}", "--launcher", "slurm", "--dry-run"], TO_HELP),
    "jobs": (["jobs", "status", "--launcher", "slurm"], TO_HELP),
    "init": (["init", "{folder}/new"], TO_HELP),
    "ask": (["ask", "{study}"], TO_FIT - {"scipy.stats"}),  # which draws points as the search does
    "ask a batch": (["ask", "{study}", "--batch", "64"], TO_FIT),
    "compare": (["compare", "{runs}", "{runs}", "--metric", "accuracy"], TO_FIT),
    "help": (["--help"], TO_HELP),
    **{f"{name} --help": ([name, "--help"], TO_HELP) for section in SECTIONS.values() for name in section},
}
# Exit codes of the others: there is no Slurm here, a study is no profile, and equals cannot be told apart.
ENDS = {"jobs": 1, "show elsewhere": 2, "compare": 2}
# CPU seconds over those of `optuna --help`; measured .23, 1.4 and 1.9 (docs/log.md).
MOST = {"--help": 0.9, "show": 3.0, "report": 4.5}
CODE = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from bsearch.__main__ import main
sys.argv = ["bsearch", *{arguments!r}]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_only_reads_imports_nothing_heavy(
    name: str, finished_study: Path, tmp_path: Path
) -> None:
    arguments, heavy = COMMANDS[name]
    runs = tmp_path / "runs.csv"
    runs.write_text(
        "batch_size,lr,seconds,accuracy\n"
        + "".join(f"{16 << run},0.{run + 1},{20 + run},0.9{run}\n" for run in range(6))
    )
    arguments = [part.format(study=finished_study, folder=tmp_path, runs=runs) for part in arguments]
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(arguments=arguments)],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    *said, modules = done.stderr.splitlines()
    imported = set(json.loads(modules))
    assert "bsearch.commands.group" in imported
    assert done.returncode == ENDS.get(name, 0), (done.stdout, said)
    assert not imported & heavy


def cpu_s(*command: str | Path) -> float:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return usage.ru_utime + usage.ru_stime


@pytest.mark.slow
@pytest.mark.long
def test_commands_start_in_proportion_to_other_programs(finished_study: Path, tmp_path: Path) -> None:
    arguments = {
        "--help": [],
        "show": [finished_study],
        "report": [finished_study, "--out", tmp_path / "report.html"],
    }
    ratios = dict[str, list[float]]()
    for _ in range(3):
        other = cpu_s(BSEARCH.with_name("optuna"), "--help")
        for name, more in arguments.items():
            ratios.setdefault(name, []).append(cpu_s(BSEARCH, name, *more) / other)
    assert {name: median(several) for name, several in ratios.items() if median(several) > MOST[name]} == {}


@pytest.mark.slow
def test_a_finished_study_starts_no_ray_and_imports_no_torch(finished_study: Path, tmp_path: Path) -> None:
    code = CODE.format(arguments=["run", str(finished_study)])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True
    )
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
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
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
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sqlalchemy.orm" in json.loads(done.stderr.splitlines()[-1])
    assert "imported in a thread" not in done.stdout
