"""Jobs in a Slurm queue: a script that starts Ray on all nodes, runs the study, and requeues itself if time runs out.

The script's head is a template, which may be the user's own; what starts Ray is ours (templates/slurm_command.sh). The nodes
share the study's folder.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from ...spaces.errors import ClusterError, Fault, StudyFileError
from ...spaces.study.submit import Submit
from .submitter import Job, Plan, State, Submission, checked_id, output
from .template import Template

STATES: dict[str, State] = {
    **dict.fromkeys(
        ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING"),
        "pending",
    ),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED"), "running"),
    "COMPLETED": "succeeded",
    "CANCELLED": "stopped",
    **dict.fromkeys(
        (
            "FAILED",
            "TIMEOUT",
            "NODE_FAIL",
            "OUT_OF_MEMORY",
            "BOOT_FAIL",
            "DEADLINE",
            "PREEMPTED",
            "LAUNCH_FAILED",
        ),
        "failed",
    ),
}
# An array's state is the first of these that any of its tasks is in.
_ARRAY_ORDER: tuple[State, ...] = ("running", "pending", "failed", "stopped", "succeeded", "unknown")
DAYS = 7  # of history that `jobs` lists
STOP_S = 120  # before the time limit, for the study and Ray to stop
JOIN_S = 300  # for all nodes to join Ray

_SHORT = {
    "a": "array",
    "c": "cpus-per-task",
    "D": "chdir",
    "e": "error",
    "i": "input",
    "J": "job-name",
    "N": "nodes",
}
_SHORT |= {"n": "ntasks", "o": "output", "t": "time", "W": "wait"}
# Lines that a template may not have, and the key of the study file that is written instead.
_OWNED = {
    "nodes": "submit.nodes",
    "cpus-per-task": "submit.cpus_per_node",
    "gpus-per-node": "submit.gpus_per_node",
    "export": "submit.environment",
    **dict.fromkeys(
        ("chdir", "error", "export-file", "get-user-env", "input", "job-name", "ntasks", "ntasks-per-node"),
        "",
    ),
    **dict.fromkeys(("open-mode", "output", "parsable", "signal", "wait", "wrap"), ""),
}


class SlurmSubmitter:
    """Submits the script with `sbatch`, queries `squeue` and `sacct`, and stops jobs with `scancel`."""

    place = ""

    def __init__(self, settings: Submit, programs: Path = Path(sys.executable).parent) -> None:
        self._settings, self._programs = settings, programs

    def plan(self, submission: Submission) -> Plan:
        folder = str(submission.spec.folder)
        faults = [*submission.task_faults(), *submission.machine_faults(), *submission.environment_faults()]
        if not folder.isprintable() or not submission.file.name.isprintable():
            faults.append(
                Fault(
                    "",
                    f"expected a study file whose path has only printable characters, got {str(submission.file)!r}",
                )
            )
        template = submission.template("slurm.sh")
        lines = list(_sbatch_options(template.text))
        faults += _head_faults(template, lines)
        if faults:
            raise StudyFileError(faults)
        text = self._script(submission, template, {name: value for _, name, value, _ in lines})
        return Plan(text, (f"all nodes of the job must share {folder}", *template.notes))

    def submit(self, submission: Submission) -> Job:
        text = self.plan(submission).text
        _results(submission).mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, **submission.environment()}
        submitted = output(["sbatch", "--parsable"], given=text, env=variables, cwd=submission.spec.folder)
        id = submitted.strip().partition(";")[0]
        return self.job(checked_id(id, _ID, "4711"))

    def _script(self, submission: Submission, template: Template, written: Mapping[str, str]) -> str:
        """The template with our lines after its first, and its placeholders filled in."""
        settings, results = submission.settings, _results(submission)
        gpus = settings.gpus_per_node
        gres = any(
            name.startswith("gpus") or (name == "gres" and "gpu" in value) for name, value in written.items()
        )
        log = (
            str(results).replace("\\", "\\\\").replace("%", "%%")
            + f"/slurm-{'%A_%a' if 'array' in written else '%j'}.log"
        )
        options: dict[str, object] = {
            "job-name": f"bsearch-{submission.spec.study}",
            "chdir": submission.spec.folder,
            "output": log,
            "open-mode": "append",
            # `export` passes the named variables with their values; with NONE the job gets a login environment.
            "export": ",".join(submission.environment()) or "NONE",
            "nodes": settings.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": settings.cpus_per_node,
            "gpus-per-node": None if gres or not gpus else gpus,
            "signal": f"B:USR1@{STOP_S}",
        }
        machines: dict[str, object] = {"nodes": settings.nodes, "cpus": settings.cpus_per_node, "gpus": gpus}
        of_command: dict[str, object] = {
            "results": shlex.quote(str(results)),
            "file": shlex.quote(submission.file.name),
            "srun_gpus": f" --gpus-per-node={gpus}" if options["gpus-per-node"] else "",
            "stop_s": STOP_S,
            "join_s": JOIN_S,
        }
        command = Template.of(None, submission.spec.folder, "slurm_command.sh").filled(machines | of_command)
        values = machines | {
            "study": submission.spec.study,
            "command": command.rstrip("\n"),
            "programs": shlex.quote(str(self._programs)),
        }
        first, *rest = template.filled(values, required=("command",)).splitlines(keepends=True)
        ours = [
            f"#SBATCH --{name}={shlex.quote(str(value))}\n"
            for name, value in options.items()
            if value is not None
        ]
        return "".join([first, *ours, *rest])

    def jobs(self) -> list[Job]:
        newest = sorted(
            _found([]).values(),
            key=lambda entry: entry[0].submitted or datetime.min.replace(tzinfo=UTC),
            reverse=True,
        )
        return [job for job, _ in newest]

    def job(self, id: str) -> Job:
        return self._job(id)[0]

    def _job(self, id: str) -> tuple[Job, str]:
        """A job and its working folder; of an array, the task that comes first in `_ARRAY_ORDER`."""
        checked_id(id, _ID, "4711")
        found = [
            entry
            for name, entry in _found([f"--jobs={id}"]).items()
            if name == id or name.startswith(f"{id}_")
        ]
        if not found:
            raise ClusterError(
                f"Slurm: no job {id} of bsearch. `bsearch jobs status --launcher slurm` lists the jobs there."
            )
        job, folder = min(found, key=lambda entry: _ARRAY_ORDER.index(entry[0].state))
        return Job(id, job.study, "slurm", job.state, job.submitted, job.started), folder

    def logs(self, id: str) -> str:
        job, folder = self._job(id)
        files = sorted(Path(folder, "results", job.study).glob(f"slurm-{id}*.log"))
        mine = [file for file in files if re.fullmatch(rf"slurm-{id}(_\d+)?\.log", file.name)]
        return "".join(file.read_text(encoding="utf-8", errors="replace") for file in mine)

    def stop(self, id: str) -> None:
        if self.job(id).state in ("pending", "running", "unknown"):
            output(["scancel", id])


_ID = r"[0-9]+(_[0-9]+)?"


def _results(submission: Submission) -> Path:
    return submission.spec.folder / "results" / submission.spec.study


def _sbatch_options(text: str) -> Iterator[tuple[int, str, str, bool]]:
    """The options in #SBATCH lines: line, long name, value, and whether sbatch reads it there, before any command."""
    read = True
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("#SBATCH"):
            read = read and (not line.strip() or line.startswith("#"))
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:  # an open quote, which sbatch refuses
            words = []
        for word, after in zip(words, [*words[1:], ""], strict=True):
            name, _, value = word.removeprefix("--").partition("=")
            if not word.startswith("--") and word.startswith("-"):
                name, value = _SHORT.get(word[1:2], word[1:2]), word[2:]
            if word.startswith("-"):
                yield number, name, value or ("" if after.startswith("-") else after), read


def _head_faults(template: Template, lines: Iterable[tuple[int, str, str, bool]]) -> Iterator[Fault]:
    first = template.text.partition("\n")[0]
    if not re.match(r"#!.*\bbash\b", first):
        yield template.fault(
            f"expected #!/bin/bash, which runs the lines that bsearch adds; got {first!r}", 1
        )
    for line, name, _, read in lines:
        if name in _OWNED:
            key = f", and write {_OWNED[name]} in the study file" if _OWNED[name] else ""
            yield template.fault(
                f"expected no --{name}, which bsearch adds itself; got one. Remove it{key}", line
            )
        elif not read:
            yield template.fault(
                f"expected --{name} before the first command: sbatch ignores it here. Move it up", line
            )


def _found(options: list[str]) -> dict[str, tuple[Job, str]]:
    """Our jobs and their working folders by id: from the queue if it lists the job, else from accounting."""
    # Names come last: other users' job names may contain any character.
    columns = "--format=JobID,State,Submit,Start,WorkDir,JobName"
    queries = [
        (
            "sacct",
            ["--allocations", "--noheader", "--parsable2", f"--starttime=now-{DAYS}days", columns, *options],
        ),
        ("squeue", ["--me", "--noheader", "--states=all", "--format=%i|%T|%V|%S|%Z|%j", *options]),
    ]
    found: dict[str, tuple[Job, str]] = {}
    for program, arguments in queries:
        try:
            lines = output([program, *arguments]).splitlines()
        except ClusterError:
            if program == "squeue" and (not options or shutil.which(program) is None):
                raise
            continue  # no accounting here, or a job that has left the queue
        for line in lines:
            fields = line.split("|", 5)
            if len(fields) == 6 and fields[5].startswith("bsearch-"):
                id, state, submitted, started, folder, name = fields
                job_state = STATES.get(state.split()[0] if state else "", "unknown")  # CANCELLED by 1000
                started_at = None if job_state == "pending" else _time(started)
                found[id] = (
                    Job(id, name.removeprefix("bsearch-"), "slurm", job_state, _time(submitted), started_at),
                    folder,
                )
    return found


def _time(text: str) -> datetime | None:
    """Slurm reports local times."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        return None
