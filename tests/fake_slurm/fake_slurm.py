"""sbatch, srun, squeue, sacct, scancel and scontrol of a Slurm that is one folder, and whose jobs really run.

Called as `fake_slurm.py PROGRAM ARGUMENTS...`; `programs` writes the commands that call it so. The folder, named by
FAKE_SLURM, holds one folder a job. As in Slurm: unknown options are refused, a job's environment is a login's and what
--export names, scancel sends TERM to all of the job, a queue forgets what is over and the accounting does not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

PROGRAMS = ("sbatch", "srun", "squeue", "sacct", "scancel", "scontrol")
OPTIONS = frozenset(
    {
        "job-name",
        "chdir",
        "output",
        "open-mode",
        "export",
        "partition",
        "account",
        "qos",
        "constraint",
        "nodes",
        "gres",
        "mem",
    }
    | {
        "ntasks-per-node",
        "cpus-per-task",
        "gpus-per-node",
        "time",
        "array",
        "requeue",
        "no-requeue",
        "signal",
        "exclude",
    }
)
ROOT = Path(os.environ.get("FAKE_SLURM", "/nowhere"))


def programs(folder: Path) -> Path:
    """Write the commands into a folder for PATH."""
    folder.mkdir()
    for name in PROGRAMS:
        command = folder / name
        command.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} {name} "$@"\n'
        )
        command.chmod(0o755)
    return folder


def read(id: str) -> dict[str, Any]:
    try:
        return json.loads((ROOT / id / "job.json").read_text())
    except OSError:
        sys.exit("slurm_load_jobs error: Invalid job id specified")


def write(id: str, /, **changes: Any) -> None:
    path = ROOT / id / "job.json"
    job = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(job))
    scratch.replace(path)


def now() -> str:
    return datetime.now().isoformat(timespec="seconds")


def sbatch(arguments: list[str]) -> None:
    assert arguments == ["--parsable"], arguments
    script = sys.stdin.read()
    options: dict[str, str] = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            name, _, value = word.removeprefix("--").partition("=")
            if name not in OPTIONS:
                sys.exit(f"sbatch: unrecognized option '--{name}'")
            options[name] = value
    id = str(4711 + len(list(ROOT.iterdir())))
    (ROOT / id).mkdir()
    (ROOT / id / "script").write_text(script)
    named = [] if options["export"] == "NONE" else options["export"].split(",")
    write(id, id=id, options=options, state="PENDING", submit=now(), start="N/A", restarts=0)
    write(id, environment={name: os.environ[name] for name in named if name in os.environ})
    with (ROOT / id / "supervisor.log").open("wb") as log:
        command = [sys.executable, __file__, "supervise", id]
        subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    print(f"{id};fake")


def supervise(arguments: list[str]) -> None:
    """What slurmd does: start the script, and again where it asked to be queued again."""
    (id,) = arguments
    job = read(id)
    options = job["options"]
    output = options["output"].replace("%j", id).replace("%A_%a", f"{id}_1").replace("%%", "%")
    while True:
        if (ROOT / id / "cancelled").exists():
            write(id, state="CANCELLED by 1000")
            return
        restarts = read(id)["restarts"]
        environment = {
            **{
                name: os.environ[name]
                for name in ("HOME", "USER", "LANG", "FAKE_SLURM")
                if name in os.environ
            },
            **job["environment"],
            "PATH": os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": id,
            "SLURM_JOB_NUM_NODES": options["nodes"],
            "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
        }
        with Path(output).open("ab") as log:
            batch = subprocess.Popen(
                ["bash", str(ROOT / id / "script")],
                cwd=options["chdir"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        write(id, state="RUNNING", start=now(), batch=batch.pid)
        code = batch.wait()
        write(id, batch=None, code=code)
        if (ROOT / id / "cancelled").exists():
            continue
        if (ROOT / id / "requeue").exists():
            (ROOT / id / "requeue").unlink()
            write(id, state="PENDING", start="N/A", restarts=restarts + 1)
            time.sleep(0.5)
            continue
        write(id, state="COMPLETED" if code == 0 else "FAILED")
        return


def srun(arguments: list[str]) -> None:
    asked = {}
    while arguments and arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).removeprefix("--").partition("=")
        asked[name] = value
    known = {
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "overlap",
        "export",
        "kill-on-bad-exit",
        "cpus-per-task",
        "gpus-per-node",
    }
    assert set(asked) <= known, asked
    assert asked["export"] == "ALL"
    tasks = [
        subprocess.Popen(
            arguments,
            env={**os.environ, "SLURM_NODEID": str(number), "SLURM_PROCID": str(number)},
            start_new_session=True,
        )
        for number in range(int(asked["ntasks"]))
    ]

    def forward(number: int, _: object) -> None:
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.pid, number)

    signal.signal(signal.SIGTERM, forward)
    sys.exit(max(abs(task.wait()) for task in tasks))


def queried(program: str, arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(program, allow_abbrev=False)
    for flag in ("--me", "--noheader", "--allocations", "--parsable2"):
        parser.add_argument(flag, action="store_true")
    for option in ("--format", "--jobs", "--states", "--starttime"):
        parser.add_argument(option)
    return parser.parse_args(arguments)


def report(program: str, arguments: list[str], keep: Any) -> None:
    asked = queried(program, arguments)
    jobs = [read(path.name) for path in sorted(ROOT.iterdir())]
    jobs = [job for job in jobs if keep(job["state"]) and asked.jobs in (None, job["id"])]
    if program == "squeue" and asked.jobs and not jobs:
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    for job in jobs:
        name = {"%j": job["options"]["job-name"], "%Z": job["options"]["chdir"]}
        facts = {"%i": job["id"], "%T": job["state"], "%V": job["submit"], "%S": job["start"], **name}
        words = asked.format.split("|" if program == "squeue" else ",")
        facts |= {"JobID": facts["%i"], "State": facts["%T"], "Submit": facts["%V"], "Start": facts["%S"]}
        facts |= {"WorkDir": facts["%Z"], "JobName": facts["%j"]}
        print("|".join(facts[word] for word in words))
    if program == "sacct":
        print(f"1|COMPLETED|{now()}|{now()}|/home/other|someone's | own; job")


def squeue(arguments: list[str]) -> None:
    report("squeue", arguments, lambda state: state in ("PENDING", "RUNNING"))


def sacct(arguments: list[str]) -> None:
    report("sacct", arguments, lambda state: True)


def scancel(arguments: list[str]) -> None:
    options, id = arguments[:-1], arguments[-1]
    batch = read(id).get("batch")
    if options == ["--batch", "--signal=USR1"]:
        os.kill(batch, signal.SIGUSR1)
        return
    assert options == [], options
    (ROOT / id / "cancelled").touch()
    if batch:
        os.killpg(batch, signal.SIGTERM)


def scontrol(arguments: list[str]) -> None:
    verb, id = arguments
    assert verb == "requeue", verb
    (ROOT / id / "requeue").touch()
    os.kill(read(id)["batch"], signal.SIGTERM)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2:])
