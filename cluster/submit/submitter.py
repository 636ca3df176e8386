"""The interface of launchers of batch jobs, and their registry."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, Protocol

from ...spaces.boundary.storage import is_url
from ...spaces.deadline import moment_of, names_zone
from ...spaces.errors import ClusterError, Fault, StudyFileError, near_miss
from ...spaces.study.file import parse_study, read_study, study_from_dict
from ...spaces.study.spec import StudySpec
from ...spaces.study.submit import Submit
from .template import Template

State = Literal["pending", "running", "succeeded", "failed", "stopped", "unknown"]
OVER = frozenset({"succeeded", "failed", "stopped"})


@dataclass(frozen=True, slots=True)
class Job:
    """A batch job as its cluster reports it; times are timezone-aware."""

    id: str
    study: str
    launcher: str
    state: State
    submitted: datetime | None = None
    started: datetime | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "study": self.study,
            "launcher": self.launcher,
            "state": self.state,
            "submitted_at": self.submitted and self.submitted.isoformat(timespec="seconds"),
            "started_at": self.started and self.started.isoformat(timespec="seconds"),
        }


@dataclass(frozen=True, slots=True)
class Submission:
    """A study to be sent to a cluster.

    Args:
        spec: the study as read, with the submit section in effect.
        file: its file.
        storage: the URL as written in the file; None if the file has none.
        given_storage: the URL that replaces it, from the command line or BSEARCH_STORAGE.
        suffix: distinguishes this job from others of the study.
    """

    spec: StudySpec
    file: Path
    storage: str | None = None
    given_storage: str | None = None
    suffix: str = field(default_factory=lambda: secrets.token_hex(3))

    @classmethod
    def read(cls, file: Path, storage: str | None, changes: Mapping[str, Any]) -> Submission:
        """The study in a file; `changes` as for `submit_settings`.

        Raises:
            StudyFileError: all faults of the file, or an invalid change.
        """
        spec = read_study(file, storage=storage)
        written = parse_study(file.read_text(encoding="utf-8"), file=str(file)).storage
        return cls(_changed(spec, changes), file.resolve(), written, storage)

    @property
    def settings(self) -> Submit:
        return self.spec.submit

    def template(self, usual: str) -> Template:
        """The template of the study file, or the `usual` one of ours.

        Raises:
            StudyFileError: it cannot be read.
        """
        return Template.of(self.settings.template, self.spec.folder, usual)

    def storage_faults(self, hint: str) -> list[Fault]:
        """A fault if the database would be in the job's own folder and be deleted with it."""
        url = self.given_storage or self.storage
        path = (url or "").removeprefix("sqlite:///")
        if url is not None and (not url.startswith("sqlite:") or path.startswith(("/", "~"))):
            return []
        got = "none, which means SQLite in the study's folder" if url is None else repr(url)
        return [
            Fault(
                "storage",
                f"expected a database that outlives the job and that it can reach, got {got}. {hint}",
            )
        ]

    def travel_faults(self) -> list[Fault]:
        """A fault if the file of the task, or of its schedule, is not inside the study's folder, which is all that is sent."""
        faults, schedule = [], self.spec.training.schedule
        place = Path(schedule.rpartition(":")[0]).expanduser()
        if ".py:" in schedule and not (self.spec.folder / place).resolve().is_relative_to(self.spec.folder):
            faults.append(
                Fault(
                    "training.schedule",
                    f"expected a path inside the study's folder, because only that folder is sent; got {schedule!r}",
                )
            )
        if ".py:" not in self.spec.task:
            return faults
        path = Path(self.spec.task.rpartition(":")[0])
        written = parse_study(self.file.read_text(encoding="utf-8")).task
        if Path(written).expanduser().is_absolute() or not path.resolve().is_relative_to(
            self.spec.folder.resolve()
        ):
            return [
                Fault(
                    "task",
                    f"expected a path inside the study's folder, because only that folder is sent; got {written!r}. "
                    "Write tasks.py:Name, with tasks.py next to the study file",
                ),
                *faults,
            ]
        return faults

    def checkpoint_notes(self) -> tuple[str, ...]:
        """A note if the checkpoints are on a single machine."""
        folder = self.spec.cluster.checkpoints
        if folder is None or is_url(folder) or not Path(folder).is_relative_to(self.spec.folder):
            return ()
        return (
            "a trial whose machine dies starts over, because cluster.checkpoints is in the study's folder, which the job's "
            "machines do not share; set it to /shared/checkpoints or s3://bucket/checkpoints to resume such trials",
        )

    def task_faults(self) -> list[Fault]:
        path = self.spec.task.rpartition(":")[0]
        missing = path.endswith(".py") and not Path(path).is_file()
        faults = [Fault("task", f"{path}: no such file")] if missing else []
        return [*faults, *self._deadline_faults()]

    def _deadline_faults(self) -> list[Fault]:
        """A fault if the deadline is a moment of this machine's time zone, which the job's machines may not share."""
        by = self.spec.budget.by
        if by is None or names_zone(by):
            return []
        try:
            example = moment_of(by, datetime.now().astimezone()).isoformat(timespec="minutes")
        except StudyFileError as error:
            return [*error.faults]
        message = (
            f"expected a moment with its time zone in a job, or a duration, got {by}. Write {example}, or 2h."
        )
        return [Fault("budget.by", message)]

    def machine_faults(self) -> list[Fault]:
        """What the requested machines lack for one trial."""
        devices, requested = self.spec.devices, self.settings
        most = max(devices.counts)
        faults = []
        nodes, cores = requested.nodes, devices.cores("cpu")
        on = "" if nodes == 1 else f" on {nodes} machines"
        if devices.kind == "gpu" and requested.gpus_per_node * nodes < most:
            message = (
                f"expected at least {-(-most // nodes)}{on}, for the {most} devices of one trial, got "
                f"{requested.gpus_per_node}"
            )
            faults.append(Fault("submit.gpus_per_node", message))
        if requested.cpus_per_node // cores * nodes < most:
            message = (
                f"expected at least {-(-most // nodes) * cores}{on}, for the {most * cores} cores of one trial, got "
                f"{requested.cpus_per_node}"
            )
            faults.append(Fault("submit.cpus_per_node", message))
        return faults

    def environment_faults(self) -> list[Fault]:
        """The variables of submit.environment that are not set here."""
        return [
            Fault(
                f"submit.environment[{index}]",
                f"expected a variable that is set where you submit, got {name}, which is not set",
            )
            for index, name in enumerate(self.settings.environment)
            if name not in os.environ
        ]

    def environment(self) -> dict[str, str]:
        """The variables of submit.environment with their values here, and the storage that replaces the file's."""
        given = {"BSEARCH_STORAGE": self.given_storage} if self.given_storage else {}
        return {name: os.environ[name] for name in self.settings.environment} | given


@dataclass(frozen=True, slots=True)
class Plan:
    """What a submission would send: the text of the script or request, and notes on it."""

    text: str
    notes: tuple[str, ...] = ()


class Submitter(Protocol):
    """A launcher: sends studies to one kind of cluster and reports on their jobs.

    Created from a study's submit section, or the default one. `place` is where another command finds the same cluster, as
    `--launcher NAME@PLACE`; empty where the name is enough. Errors of the cluster are raised as ClusterError.
    """

    place: str

    def __init__(self, settings: Submit) -> None: ...

    def plan(self, submission: Submission) -> Plan:
        """What `submit` would send, without sending it.

        Raises:
            StudyFileError: everything that prevents the study from running there.
        """

    def submit(self, submission: Submission) -> Job:
        """Send the study and return its job.

        Raises:
            StudyFileError: as `plan`.
            ClusterError: the cluster refuses it.
        """

    def jobs(self) -> list[Job]:
        """Our jobs that the cluster still lists, newest first."""

    def job(self, id: str) -> Job:
        """One job.

        Raises:
            ClusterError: there is no such job.
        """

    def logs(self, id: str) -> str:
        """The job's output so far; empty before it starts."""

    def stop(self, id: str) -> None:
        """Stop a job; no effect on one that has ended."""


def submit_settings(file: Path | None, changes: Mapping[str, Any]) -> Submit:
    """The submit section of a study file, or the default one, with changes applied.

    Args:
        changes: keys of the section; None leaves a key unchanged.

    Raises:
        StudyFileError: all faults of the file, or an invalid change.
    """
    placeholder = {"study": "none", "task": "none:none", "space": {"effective_batch": 1, "reference_rate": 1}}
    return _changed(read_study(file) if file else study_from_dict(placeholder), changes).submit


def _changed(spec: StudySpec, changes: Mapping[str, Any]) -> StudySpec:
    given = {key: value for key, value in changes.items() if value is not None}
    return spec.changed({"submit": given}) if given else spec


# Ours are also listed here, so that a checkout with outdated metadata finds them.
GROUP = "bsearch.submitters"
OURS = tuple(
    EntryPoint(name, f"bsearch.cluster.submit.{module}:{attribute}", GROUP)
    for name, module, attribute in (
        ("ray", "ray_jobs", "RaySubmitter"),
        ("slurm", "slurm", "SlurmSubmitter"),
    )
)


def open_submitter(settings: Submit) -> Submitter:
    """The launcher that `settings.launcher` names.

    Raises:
        StudyFileError: none is named, or the name is unknown.
        ClusterError: a plug-in cannot be loaded.
    """
    known = {point.name: point for point in (*entry_points(group=GROUP), *OURS)}
    name = (settings.launcher or "").partition("@")[0]
    if not name:
        raise StudyFileError(
            Fault(
                "submit.launcher",
                f"expected one of {', '.join(sorted(known))}; got none. Set it in the study file, or pass launcher",
            )
        )
    if name not in known:
        raise StudyFileError(
            Fault(
                "submit.launcher",
                f"expected one of {', '.join(sorted(known))}; got {name!r}.{near_miss(name, known)}",
            )
        )
    try:
        submitter: Submitter = known[name].load()(settings)
    except (ImportError, AttributeError) as error:
        raise ClusterError(
            f"launcher {name}: its plug-in {known[name].value} cannot be loaded: {error}"
        ) from error
    return submitter


def checked_id(id: str, pattern: str, example: str) -> str:
    """A job's id, validated: ids become arguments of programs and parts of URLs.

    Raises:
        ClusterError: the id is malformed.
    """
    if not re.fullmatch(pattern, id):
        raise ClusterError(
            f"expected the id of a job, such as {example}, got {id!r}. `bsearch jobs status` lists them."
        )
    return id


def followed(
    submitter: Submitter, id: str, every_s: float = 2.0, sleep: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """A job's output, piece by piece, until it ends."""
    printed = 0
    while True:
        over = submitter.job(id).state in OVER  # checked first, so that the last piece is read after the end
        text = submitter.logs(id)
        if len(text) > printed:
            yield text[printed:]
            printed = len(text)
        if over:
            return
        sleep(every_s)


def output(
    arguments: Sequence[str], *, given: str | None = None, timeout_s: float = 60, **options: Any
) -> str:
    """The output of one of the cluster's programs, run without a shell.

    Raises:
        ClusterError: it is not installed, fails, or does not answer in time.
    """
    program = arguments[0]
    if shutil.which(program) is None:
        raise ClusterError(
            f"{program}: no such program on PATH. Run this where the cluster's commands are installed, or install it."
        )
    try:
        done = subprocess.run(  # noqa: S603 (a list of checked arguments)
            list(arguments),
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            **options,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"{program}: no answer within {timeout_s:g} s. Check that the cluster is up."
        ) from None
    if done.returncode:
        message = " ".join((done.stderr.strip() or done.stdout.strip() or "nothing").split())
        raise ClusterError(f"{' '.join(arguments[:2])}: failed with exit code {done.returncode}: {message}")
    return str(done.stdout)
