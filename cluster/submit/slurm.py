"""Jobs in a Slurm queue: a script that starts Ray on all nodes, runs the study, and requeues itself if time runs out.

The nodes share the study's folder. Values of the user that go into the script are validated where the study is read
(`spaces.study.submit`) and quoted here.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ...spaces.errors import ClusterError, Fault, StudyFileError
from ...spaces.study.submit import Submit
from .submitter import Job, Plan, State, Submission, checked_id, output

STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING"), "pending"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED"), "running"),
    "COMPLETED": "succeeded",
    "CANCELLED": "stopped",
    **dict.fromkeys(
        ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED", "LAUNCH_FAILED"), "failed"
    ),
}
# An array's state is the first of these that any of its tasks is in.
_ARRAY_ORDER: tuple[State, ...] = ("running", "pending", "failed", "stopped", "succeeded", "unknown")
DAYS = 7  # of history that `jobs` lists
STOP_S = 120  # before the time limit, for the study and Ray to stop
JOIN_S = 300  # for all nodes to join Ray

SCRIPT = r"""
export RAY_USAGE_STATS_ENABLED=0 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # by then the study has stopped
{setup}

set -u
stopping=0 child= again= token= scratch= cluster=
# Slurm sends USR1 to this script only, {stop_s} s before the time limit, and TERM to the study as well.
trap 'stopping=$((stopping + 1)); again=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' USR1
trap 'stopping=$((stopping + 1))' TERM INT

# Runs a command so that signals reach it, and returns its exit code: bash's wait returns early on a signal.
step() {{
  [ "$stopping" = 0 ] || return 130
  local woken=$stopping code next
  "$@" &
  child=$!
  [ "$woken" = "$stopping" ] || kill -TERM "$child" # a signal that arrived just before this line
  wait "$child"; code=$?
  while [ "$woken" != "$stopping" ]; do
    woken=$stopping
    wait "$child"; next=$?
    [ "$next" = 127 ] || code=$next # 127: it had already exited and been waited for
  done
  child=
  return "$code"
}}

nodes=$SLURM_JOB_NUM_NODES
on_every_node=(srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --overlap --export=ALL --kill-on-bad-exit=0)

finish() {{
  trap - EXIT
  if [ -n "$cluster" ]; then
    kill -TERM "$cluster" 2>/dev/null
    timeout 30 tail --pid="$cluster" -f /dev/null || kill -KILL "$cluster" 2>/dev/null
  fi
  [ -z "$scratch" ] || "${{on_every_node[@]}}" rm -rf -- "$scratch" </dev/null
  [ -z "$token" ] || rm -f -- "$token"
}}
trap finish EXIT

# This job's own Ray: a separate port and folder, and a token that only this user can read.
address=$(hostname -I | cut -d ' ' -f 1)
port=$((20000 + SLURM_JOB_ID % 1200 * 10))
scratch=$(mktemp -d /tmp/bsearch-XXXXXX) || exit 1
token=$(mktemp {results}/.ray-token-XXXXXX) || exit 1 # mode 600
head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$token"
unset RAY_AUTH_TOKEN RAY_ADDRESS
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token"

# This script runs on the first node.
"${{on_every_node[@]}}" --cpus-per-task={cpus}{srun_gpus} bash -c '
  same="--num-cpus={cpus} --num-gpus={gpus} --min-worker-port=0 --max-worker-port=0"
  same="$same --dashboard-agent-listen-port=$(($2 + 2 + SLURM_NODEID % 8))"
  if [ "$SLURM_NODEID" = 0 ]; then
    exec ray start --block --head --node-ip-address="$1" --port="$2" --temp-dir="$3" --include-dashboard=false \
      --ray-client-server-port=$(($2 + 1)) $same
  fi
  until (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; do sleep 1; done
  exec ray start --block --address="$1:$2" $same
' ray "$address" "$port" "$scratch" </dev/null >>{results}/"ray-$SLURM_JOB_ID.log" 2>&1 &
cluster=$!

export RAY_ADDRESS="$address:$port"
step python -m bsearch.cluster.submit.joined "$nodes" {join_s} && step bsearch run {study}
code=$?

if [ -n "$again" ] && [[ $code = 130 || $code = 143 ]] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then
  finish
  echo "bsearch: time limit reached before the study finished: requeued"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


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
                Fault("", f"expected a study file whose path has only printable characters, got {str(submission.file)!r}")
            )
        if faults:
            raise StudyFileError(faults)
        return Plan(self._script(submission), (f"all nodes of the job must share {folder}",))

    def submit(self, submission: Submission) -> Job:
        text = self.plan(submission).text
        _results(submission).mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, **submission.environment()}
        submitted = output(["sbatch", "--parsable"], given=text, env=variables, cwd=submission.spec.folder)
        id = submitted.strip().partition(";")[0]
        return self.job(checked_id(id, _ID, "4711"))

    def _script(self, submission: Submission) -> str:
        settings, slurm = submission.settings, submission.settings.slurm
        folder, results = submission.spec.folder, _results(submission)
        # `export` passes the named variables with their values; with NONE the job gets a login environment.
        log = str(results).replace("\\", "\\\\").replace("%", "%%") + ("/slurm-%A_%a.log" if slurm.array else "/slurm-%j.log")
        options: dict[str, object] = {
            "job-name": f"bsearch-{submission.spec.study}",
            "chdir": folder,
            "output": log,
            "open-mode": "append",
            "export": ",".join(submission.environment()) or "NONE",
            "partition": slurm.partition,
            "account": slurm.account,
            "qos": slurm.qos,
            "constraint": slurm.constraint,
            "nodes": settings.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": settings.cpus_per_node,
            "gpus-per-node": settings.gpus_per_node if settings.gpus_per_node and not slurm.gres else None,
            "gres": slurm.gres,
            "mem": settings.memory_per_node and f"{settings.memory_per_node >> 20}M",
            "time": settings.hours and math.ceil(settings.hours * 60),  # minutes
            "array": slurm.array,
            "requeue" if slurm.requeues else "no-requeue": True,
            "signal": f"B:USR1@{STOP_S}",
            **slurm.options,
        }
        setup = slurm.setup or (f"export PATH={shlex.quote(str(self._programs))}:$PATH",)
        return (
            "#!/bin/bash\n"
            + "".join(_sbatch_lines(options))
            + SCRIPT.format(
                setup="\n".join(setup),
                results=shlex.quote(str(results)),
                cpus=settings.cpus_per_node,
                gpus=settings.gpus_per_node,
                srun_gpus=f" --gpus-per-node={settings.gpus_per_node}" if settings.gpus_per_node and not slurm.gres else "",
                study=shlex.quote(submission.file.name),
                requeues=slurm.requeues,
                stop_s=STOP_S,
                join_s=JOIN_S,
            )
        )

    def jobs(self) -> list[Job]:
        newest = sorted(
            _found([]).values(), key=lambda entry: entry[0].submitted or datetime.min.replace(tzinfo=UTC), reverse=True
        )
        return [job for job, _ in newest]

    def job(self, id: str) -> Job:
        return self._job(id)[0]

    def _job(self, id: str) -> tuple[Job, str]:
        """A job and its working folder; of an array, the task that comes first in `_ARRAY_ORDER`."""
        checked_id(id, _ID, "4711")
        found = [entry for name, entry in _found([f"--jobs={id}"]).items() if name == id or name.startswith(f"{id}_")]
        if not found:
            raise ClusterError(f"Slurm: no job {id} of bsearch. `bsearch jobs status --launcher slurm` lists the jobs there.")
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


def _sbatch_lines(options: Mapping[str, object]) -> Sequence[str]:
    """`#SBATCH` lines, whose values sbatch unquotes; options that are None or false are omitted."""
    return [
        f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}") + "\n"
        for name, value in options.items()
        if value is not None and value is not False
    ]


def _found(options: list[str]) -> dict[str, tuple[Job, str]]:
    """Our jobs and their working folders by id: from the queue if it lists the job, else from accounting."""
    # Names come last: other users' job names may contain any character.
    columns = "--format=JobID,State,Submit,Start,WorkDir,JobName"
    queries = [
        ("sacct", ["--allocations", "--noheader", "--parsable2", f"--starttime=now-{DAYS}days", columns, *options]),
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
                found[id] = Job(id, name.removeprefix("bsearch-"), "slurm", job_state, _time(submitted), started_at), folder
    return found


def _time(text: str) -> datetime | None:
    """Slurm reports local times."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        return None


__all__ = ["SlurmSubmitter"]
