"""What a launcher of batch jobs does, in one vocabulary, and the registry of those there are."""

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

from ...spaces.errors import ClusterError, Fault, StudyFileError
from ...spaces.study import StudySpec, near_miss
from ...spaces.study_file import parse_study, read_study, study_from_dict
from ...spaces.submit import Submit

State = Literal["pending", "running", "succeeded", "failed", "stopped", "unknown"]
OVER = frozenset({"succeeded", "failed", "stopped"})


@dataclass(frozen=True, slots=True)
class Job:
    """A batch job as its cluster tells it; times are aware."""

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
    """A study on its way to a cluster.

    Args:
        spec: the study, read and settled, with the submit section that holds.
        file: its file.
        storage: the URL as the user wrote it in the file; None where the file says none.
        given_storage: the URL that --storage or BSEARCH_STORAGE gives in its place.
        suffix: what tells this job from others of the study.
    """

    spec: StudySpec
    file: Path
    storage: str | None = None
    given_storage: str | None = None
    suffix: str = field(default_factory=lambda: secrets.token_hex(3))

    @classmethod
    def read(cls, file: Path, storage: str | None, changes: Mapping[str, Any], **places: str | None) -> Submission:
        """The study in a file; `changes` and `places` as `submit_settings` takes them.

        Raises:
            StudyFileError: all faults of the file, or a change that its key does not take.
        """
        spec = read_study(file, storage=storage)
        written = parse_study(file.read_text(encoding="utf-8"), file=str(file)).storage
        return cls(_changed(spec, changes, places), file.resolve(), written, storage)

    @property
    def settings(self) -> Submit:
        return self.spec.submit

    def storage_faults(self, hint: str) -> list[Fault]:
        """A fault where the database would lie in the job's own folder and die with it."""
        url = self.given_storage or self.storage
        path = (url or "").removeprefix("sqlite:///")
        if url is not None and (not url.startswith("sqlite:") or path.startswith(("/", "~"))):
            return []
        came = "none, which is SQLite in the study's folder" if url is None else repr(url)
        return [Fault("storage", f"expected a database that outlives the job and that it can reach, got {came}. {hint}")]

    def travel_faults(self) -> list[Fault]:
        """A fault where the task's file does not come along with the study's folder."""
        if ".py:" not in self.spec.task:
            return []
        path, written = Path(self.spec.task.rpartition(":")[0]), parse_study(self.file.read_text(encoding="utf-8")).task
        if Path(written).expanduser().is_absolute() or not path.is_relative_to(self.spec.folder):
            return [
                Fault(
                    "task",
                    f"expected a path inside the study's folder, for that is what travels; got {written!r}. "
                    "Write tasks.py:Name, with tasks.py beside the study file",
                )
            ]
        return []

    def checkpoint_notes(self, shared: str | None = None) -> tuple[str, ...]:
        """A note where trials keep their checkpoints on one machine alone.

        Args:
            shared: a folder that all the job's machines see.
        """
        kept = self.spec.cluster.checkpoints
        if kept is None or "://" in kept or not Path(kept).is_relative_to(self.spec.folder):
            return ()
        example = f"{shared.rstrip('/')}/checkpoints" if shared else "/shared/checkpoints or s3://bucket/checkpoints"
        return (
            "a trial whose machine dies begins anew, for cluster.checkpoints lies in the study's folder, which the job's "
            f"machines do not share; write {example} and it goes on",
        )

    def task_faults(self) -> list[Fault]:
        path = self.spec.task.rpartition(":")[0]
        return [Fault("task", f"{path}: no such file")] if path.endswith(".py") and not Path(path).is_file() else []

    def machine_faults(self) -> list[Fault]:
        """What the asked machines lack for one trial."""
        devices, asked = self.spec.devices, self.settings
        most = max(devices.counts)
        faults = []
        if devices.kind == "gpu" and asked.gpus_per_node < most:
            faults.append(
                Fault("submit.gpus_per_node", f"expected at least the {most} of one trial, got {asked.gpus_per_node}")
            )
        if asked.cpus_per_node < devices.cpus * most:
            faults.append(
                Fault(
                    "submit.cpus_per_node",
                    f"expected at least the {devices.cpus * most} of one trial, got {asked.cpus_per_node}",
                )
            )
        return faults

    def environment_faults(self) -> list[Fault]:
        """The named variables that are not set here."""
        return [
            Fault(f"submit.environment[{index}]", f"expected a variable that is set where you submit, got {name}, which is not")
            for index, name in enumerate(self.settings.environment)
            if name not in os.environ
        ]

    def environment(self) -> dict[str, str]:
        """The named variables with their values here, and the storage that was given in the file's place."""
        given = {"BSEARCH_STORAGE": self.given_storage} if self.given_storage else {}
        return {name: os.environ[name] for name in self.settings.environment} | given


@dataclass(frozen=True, slots=True)
class Plan:
    """What a submission would send: the script, manifest or request to read, and what to know about it."""

    text: str
    notes: tuple[str, ...] = ()


class Submitter(Protocol):
    """A launcher: sends studies to one kind of cluster and tells what became of them.

    Made of a study's submit section, or of the default one. `place` holds the options that another command needs to find
    the same cluster, such as `--address`. What a cluster says wrong is a ClusterError.
    """

    place: tuple[str, ...]

    def __init__(self, settings: Submit) -> None: ...

    def plan(self, submission: Submission) -> Plan:
        """What `submit` would send; sends nothing.

        Raises:
            StudyFileError: all that keeps the study from running there.
        """

    def submit(self, submission: Submission) -> Job:
        """Send the study and tell its job.

        Raises:
            StudyFileError: as `plan`.
            ClusterError: the cluster refuses.
        """

    def jobs(self) -> list[Job]:
        """Our jobs the cluster remembers, newest first."""

    def job(self, id: str) -> Job:
        """One job.

        Raises:
            ClusterError: there is none of this id.
        """

    def logs(self, id: str) -> str:
        """What the job has printed so far; empty before it starts."""

    def stop(self, id: str) -> None:
        """End a job; one that is over stays as it is."""


PLACES = {"address": "ray", "namespace": "kuberay"}  # whose each place is


def submit_settings(file: Path | None, changes: Mapping[str, Any], **places: str | None) -> Submit:
    """The submit section of a study file, or the default one, with keys changed.

    Args:
        changes: keys of the section; those that are None stay.
        places: `address` of Ray, `namespace` of Kubernetes.

    Raises:
        StudyFileError: all faults of the file, or a change that its key does not take.
    """
    nothing = {"study": "none", "task": "none:none", "space": {"effective_batch": 1, "reference_rate": 1}}
    return _changed(read_study(file) if file else study_from_dict(nothing), changes, places).submit


def _changed(spec: StudySpec, changes: Mapping[str, Any], places: Mapping[str, str | None]) -> StudySpec:
    given = {key: value for key, value in changes.items() if value is not None}
    launcher = given.get("launcher", spec.submit.launcher)
    for key, value in places.items():
        if value is not None:
            if launcher in {"ray", "slurm", "kuberay"} - {PLACES[key]}:
                raise StudyFileError(f"--{key} goes with launcher {PLACES[key]}, got it with {launcher}")
            section = getattr(spec.submit, PLACES[key])
            given[PLACES[key]] = {**section.model_dump(exclude_unset=True), key: value}
    return spec.changed({"submit": given}) if given else spec


# Ours are known here too, so that a checkout finds them whose metadata are older than it.
GROUP = "bsearch.submitters"
OURS = tuple(
    EntryPoint(name, f"bsearch.cluster.submit.{module}:{attribute}", GROUP)
    for name, module, attribute in (
        ("ray", "ray_jobs", "RaySubmitter"),
        ("slurm", "slurm", "SlurmSubmitter"),
        ("kuberay", "kuberay", "KubeRaySubmitter"),
    )
)


def open_submitter(settings: Submit) -> Submitter:
    """The launcher that `settings.launcher` names.

    Raises:
        StudyFileError: none is named, or there is none of this name.
        ClusterError: a plug-in cannot be loaded.
    """
    known = {point.name: point for point in (*entry_points(group=GROUP), *OURS)}
    name = settings.launcher
    if name is None:
        raise StudyFileError(
            Fault("submit.launcher", f"expected one of {', '.join(sorted(known))}; got none. Write it, or --launcher")
        )
    if name not in known:
        raise StudyFileError(
            Fault("submit.launcher", f"expected one of {', '.join(sorted(known))}; got {name!r}.{near_miss(name, known)}")
        )
    try:
        made: Submitter = known[name].load()(settings)
    except (ImportError, AttributeError) as error:
        raise ClusterError(f"launcher {name}: its plug-in {known[name].value} cannot be loaded: {error}") from error
    return made


def checked_id(id: str, pattern: str, example: str) -> str:
    """A job's id where it has the form of one; ids become arguments of programs and parts of URLs.

    Raises:
        ClusterError: it does not.
    """
    if not re.fullmatch(pattern, id):
        raise ClusterError(f"expected the id of a job, such as {example}, got {id!r}. `bsearch jobs list` tells them.")
    return id


def followed(submitter: Submitter, id: str, every_s: float = 2.0, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """What a job prints, piece by piece, until it is over."""
    told = 0
    while True:
        over = submitter.job(id).state in OVER  # asked first, so that the last piece is read after the end
        text = submitter.logs(id)
        if len(text) > told:
            yield text[told:]
            told = len(text)
        if over:
            return
        sleep(every_s)


def output(arguments: Sequence[str], *, given: str | None = None, timeout_s: float = 60, **options: Any) -> str:
    """What one of the cluster's programs prints; never through a shell.

    Raises:
        ClusterError: it is not installed, fails, or does not answer in time.
    """
    program = arguments[0]
    if shutil.which(program) is None:
        raise ClusterError(f"{program}: no such program on PATH. Run this where the cluster's commands are, or install it.")
    try:
        done = subprocess.run(  # noqa: S603 (a list of checked arguments)
            list(arguments), input=given, capture_output=True, text=True, timeout=timeout_s, check=False, **options
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{program}: no answer within {timeout_s:g} s. Look whether the cluster is up.") from None
    if done.returncode:
        said = " ".join((done.stderr.strip() or done.stdout.strip() or "nothing").split())
        raise ClusterError(f"{' '.join(arguments[:2])}: failed with exit code {done.returncode}: {said}")
    return str(done.stdout)


__all__ = ["OVER", "Job", "Plan", "State", "Submission", "Submitter", "followed", "open_submitter", "submit_settings"]
