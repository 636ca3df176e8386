"""Jobs on an existing Ray cluster, through Ray's Jobs API."""

from __future__ import annotations

import json
import logging
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from inspect import signature
from pathlib import Path
from typing import Any

import yaml

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # set before Ray is imported, which reads it once

from ray.exceptions import AuthenticationError, RayError
from ray.job_submission import JobSubmissionClient

from ... import __version__
from ...objectives.machine.environment import environment
from ...spaces.errors import ClusterError, Fault, StudyFileError
from ...spaces.readable import readable_bytes
from ...spaces.study.submit import Submit
from .files import copy_package, study_files
from .submitter import Job, Plan, State, Submission, checked_id
from .template import Template

STATES: dict[str, State] = {
    "PENDING": "pending",
    "RUNNING": "running",
    "STOPPED": "stopped",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
}
_MACHINES = {"nodes", "gpus_per_node", "cpus_per_node"}
STUDY, SUBMITTED = "bsearch_study", "bsearch_submitted"
_OURS = ("submission_id", "metadata")  # arguments of `submit_job` that are not the template's


for _name in (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
):
    logging.getLogger(_name).setLevel(logging.WARNING)  # they log every upload


class RaySubmitter:
    """Sends the study's folder and this package to a running cluster, where the driver runs on the head node."""

    def __init__(self, settings: Submit) -> None:
        self._settings = settings
        self.place = settings.place
        variables = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
        self.address = settings.place or next(filter(None, map(os.environ.get, variables)), "auto")

    def plan(self, submission: Submission) -> Plan:
        faults = [
            *submission.task_faults(),
            *submission.travel_faults(),
            *submission.environment_faults(),
            *submission.storage_faults(
                f"Write storage: sqlite:////shared/{submission.spec.study}.db, a path that the cluster's head can write, "
                "or postgresql+psycopg://user@host/db"
            ),
        ]
        template = submission.template("ray.yaml")
        request = _request(submission, template, [f"bsearch {__version__} of this installation"])
        faults += _request_faults(request, template, submission)
        if faults:
            raise StudyFileError(faults)
        files = study_files(submission.spec.folder)
        sent = [str(path) for path in files.kept]
        shown = _completed(
            request, submission, sent, dict.fromkeys(submission.environment(), "(value set here)")
        )
        notes = [
            f"sends {len(sent)} file{'s' * (len(sent) != 1)} from {submission.spec.folder}, {readable_bytes(files.bytes)}"
        ]
        if unused := sorted(_MACHINES & self._settings.model_fields_set):
            notes.append(
                f"ignored, because the cluster's machines are already running: submit.{', submit.'.join(unused)}"
            )
        if files.left_out:
            notes.append(f"not sent: {', '.join(files.left_out)}")
        text = yaml.safe_dump({"address": self.address, **shown}, sort_keys=False)
        return Plan(text, (*notes, *submission.checkpoint_notes(), *template.notes))

    def submit(self, submission: Submission) -> Job:
        self.plan(submission)
        files = study_files(submission.spec.folder)
        with tempfile.TemporaryDirectory(prefix="bsearch-submit-") as scratch, self._client() as client:
            folder = str(files.copy_to(Path(scratch) / "study"))
            # Not as a wheel: for every job Ray would pip install all its dependencies, torch included.
            package = [str(path) for path in copy_package(Path(scratch))]
            request = _request(submission, submission.template("ray.yaml"), package)
            request = _completed(request, submission, folder, submission.environment())
            request["metadata"][SUBMITTED] = datetime.now(UTC).isoformat(timespec="seconds")
            id = _submit_with_retries(lambda: client.submit_job(**request))
        return self.job(id)

    def jobs(self) -> list[Job]:
        with self._client() as client:
            found = [self._job(job) for job in client.list_jobs() if STUDY in (job.metadata or {})]
        return sorted(found, key=lambda job: job.submitted or datetime.min.replace(tzinfo=UTC), reverse=True)

    def job(self, id: str) -> Job:
        with self._client(id) as client:
            return self._job(client.get_job_info(id))

    def logs(self, id: str) -> str:
        with self._client(id) as client:
            return str(client.get_job_logs(id))

    def stop(self, id: str) -> None:
        with self._client(id) as client:
            client.stop_job(id)

    @staticmethod
    def _job(details: Any) -> Job:
        metadata = details.metadata or {}
        started = details.start_time and datetime.fromtimestamp(details.start_time / 1000, UTC)
        submitted = metadata.get(SUBMITTED)
        state = STATES.get(str(details.status), "unknown")
        return Job(
            details.submission_id or details.job_id,
            metadata.get(STUDY, ""),
            "ray",
            state,
            datetime.fromisoformat(submitted) if submitted else started or None,
            (started or None) if state != "pending" else None,
        )

    @contextmanager
    def _client(self, id: str | None = None) -> Iterator[JobSubmissionClient]:
        """A client whose errors are translated to ClusterError."""
        if id is not None:
            checked_id(id, r"[A-Za-z0-9][A-Za-z0-9._-]*", "bsearch-digits-3f2a1b")
        where = f"Ray at {self.address}"
        try:
            # Ray lets its address variables override any address it is given; here the configured address takes precedence.
            with environment({} if self.address == "auto" else {"RAY_API_SERVER_ADDRESS": self.address}):
                client = JobSubmissionClient()
            yield client
        except AuthenticationError as error:
            raise ClusterError(
                f"{where}: authentication failed. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the "
                "cluster's token."
            ) from error
        except (ConnectionError, RayError, OSError, ValueError) as error:
            raise ClusterError(
                f"{where}: cannot be reached: {_first_line(error)}. Name its dashboard in the launcher: ray@http://host:8265."
            ) from error
        except RuntimeError as error:
            message = _first_line(error)
            if id is not None and ("404" in message or "does not exist" in message):
                raise ClusterError(
                    f"{where}: no job {id}. `bsearch jobs status` lists the jobs there."
                ) from error
            raise ClusterError(f"{where}: refused: {message}") from error


def _request(submission: Submission, template: Template, package: list[str]) -> dict[str, Any]:
    """The template as arguments of Ray's `submit_job`."""
    values = {
        # Ray passes this to a shell. If the package is only on the path, there is no `bsearch` program.
        "command": f"python -m bsearch run {shlex.quote(submission.file.name)}",
        "study": submission.spec.study,
        "package": ", ".join(map(json.dumps, package)),
    }
    return template.mapping(values, required=("command",))


def _request_faults(request: dict[str, Any], template: Template, submission: Submission) -> Iterator[Fault]:
    known = {*signature(JobSubmissionClient.submit_job).parameters} - {"self", "job_id", *_OURS}
    if unknown := sorted({*map(str, request)} - known):
        yield template.fault(f"expected keys among {', '.join(sorted(known))}; got {', '.join(unknown)}")
    runtime = request.get("runtime_env", {})
    if (
        not isinstance(runtime, dict)
        or not isinstance(runtime.get("env_vars", {}), dict)
        or "working_dir" in runtime
    ):
        message = (
            "expected runtime_env with options of Ray's, and without working_dir, which is the study's folder"
        )
        yield template.fault(f"{message}; got {runtime!r}")
    elif twice := sorted(submission.environment().keys() & runtime.get("env_vars", {}).keys()):
        yield template.fault(
            f"expected env_vars without those that are set where you submit; got {', '.join(twice)}"
        )


def _completed(
    request: dict[str, Any], submission: Submission, folder: str | list[str], variables: dict[str, str]
) -> dict[str, Any]:
    """The request with what bsearch adds: its name, the study's folder and environment variables."""
    study, runtime = submission.spec.study, request.get("runtime_env", {})
    variables = runtime.get("env_vars", {}) | variables
    ours = {"submission_id": f"bsearch-{study}-{submission.suffix}", "metadata": {STUDY: study}}
    return ours | request | {"runtime_env": {"working_dir": folder} | runtime | {"env_vars": variables}}


def _submit_with_retries(submit: Callable[[], str], limit_s: float = 60.0) -> str:
    """Submit, retrying while a head that has just started does not accept jobs yet."""
    end = time.monotonic() + limit_s
    while True:
        try:
            return submit()
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(1.0)


def _first_line(error: Exception) -> str:
    return next(
        (line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
