"""Jobs on Kubernetes: a RayJob for the KubeRay operator, which creates a cluster for the study and deletes it afterwards.

The study's folder is sent in a ConfigMap; the image contains Ray, bsearch and what the task imports.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from ...search.store.url import has_secret
from ...spaces.boundary.storage import sqlite_parts, sqlite_url
from ...spaces.errors import ClusterError, Fault, StudyFileError
from ...spaces.study.submit import Submit
from .files import StudyFiles, study_files
from .submitter import Job, Plan, State, Submission, checked_id, output
from .template import Template

LARGEST = 900 << 10  # bytes; a ConfigMap holds 1 MiB, and base64 and file names add to it
STUDY_FOLDER = "/study"
MANAGED = "app.kubernetes.io/managed-by"
STUDY = "bsearch/study"
_REQUIRED = ("command", "files", "nodes", "cpus", "gpus")  # placeholders of every template
STATES: dict[str, State] = {"RUNNING": "running", "STOPPED": "stopped", "SUCCEEDED": "succeeded", "FAILED": "failed"}
_ID = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


class KubeRaySubmitter:
    """Applies the manifest with `kubectl`, whose configuration selects the cluster."""

    def __init__(self, settings: Submit) -> None:
        self._namespace = self.place = settings.place or "default"

    def plan(self, submission: Submission) -> Plan:
        template = submission.template("kuberay.yaml")
        faults = [*submission.task_faults(), *submission.travel_faults(), *submission.machine_faults()]
        if unedited := [word for word in ("REGISTRY/IMAGE:TAG", "CLAIM") if word in template.text]:
            message = f"expected a manifest of your own, with values for {' and '.join(unedited)}; got {template.path}"
            faults.append(Fault("submit.template", f"{message}. Copy it beside the study file, edit it, and name it here"))
        required = (*_REQUIRED, *["seconds"] * bool(submission.settings.hours))
        job = template.mapping(_values(submission, []), required)
        faults += [*_manifest_faults(job, template, submission), *_storage_faults(job, submission)]
        if faults:
            raise StudyFileError(faults)
        files = study_files(submission.spec.folder, LARGEST, "submit.launcher")
        job = template.mapping(_values(submission, files.kept))
        objects = [config_map(submission, files), job | {"metadata": _metadata(submission, job)}]
        notes = [f"not sent: {', '.join(files.left_out)}"] if files.left_out else []
        shared = next(iter(_mounts(job)), None)
        return Plan(yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False), (*notes, *submission.checkpoint_notes(shared)))

    def submit(self, submission: Submission) -> Job:
        output([*self._kubectl("apply"), "--filename=-"], given=self.plan(submission).text)
        return self.job(job_name(submission))

    def jobs(self) -> list[Job]:
        listed = json.loads(output([*self._kubectl("get"), "rayjobs.ray.io", f"--selector={MANAGED}=bsearch", "--output=json"]))
        found = [_job(item) for item in listed["items"]]
        return sorted(found, key=lambda job: job.submitted or datetime.min.replace(tzinfo=UTC), reverse=True)

    def job(self, id: str) -> Job:
        checked_id(id, _ID, "bsearch-digits-3f2a1b")
        try:
            details = json.loads(output([*self._kubectl("get"), f"rayjobs.ray.io/{id}", "--output=json"]))
        except ClusterError as error:
            if "NotFound" in str(error):
                raise ClusterError(
                    f"Kubernetes, namespace {self._namespace}: no job {id}. `bsearch jobs status` lists the jobs there."
                ) from None
            raise
        return _job(details)

    def logs(self, id: str) -> str:
        self.job(id)
        try:
            # KubeRay's submitter is a Job with the RayJob's name; it prints the study's output.
            return output([*self._kubectl("logs"), f"job/{id}", "--tail=-1"])
        except ClusterError as error:
            if "NotFound" in str(error) or "waiting to start" in str(error):
                return ""  # its pods do not exist yet
            raise

    def stop(self, id: str) -> None:
        self.job(id)
        output([*self._kubectl("delete"), f"rayjobs.ray.io/{id}", f"configmap/{id}", "--ignore-not-found", "--wait=false"])

    def _kubectl(self, verb: str) -> list[str]:
        return ["kubectl", verb, f"--namespace={self._namespace}"]


def job_name(submission: Submission) -> str:
    """The RayJob's name: KubeRay allows 47 characters, because it derives longer names from it."""
    study = re.sub(r"[^a-z0-9]+", "-", submission.spec.study.lower()).strip("-")[:30].strip("-")
    return "-".join(part for part in ("bsearch", study, submission.suffix) if part)


class _Dumper(yaml.SafeDumper):
    """Writes every value where it is used: a template's aliases are for who edits it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _values(submission: Submission, files: Sequence[Path]) -> dict[str, object]:
    """What fills the placeholders of a manifest."""
    settings, given = submission.settings, submission.given_storage
    # The study is mounted at the same path in all pods: workers load the task from the driver's path.
    items = [{"key": f"file-{index}", "path": _path(path, submission)} for index, path in enumerate(files)]
    storage = ["--storage", given] if given and given.startswith("sqlite:") else []  # a path on a volume, so not secret
    return {
        "command": shlex.join(["bsearch", "run", f"{STUDY_FOLDER}/{_path(Path(submission.file.name), submission)}", *storage]),
        "study": submission.spec.study,
        "files": json.dumps({"name": job_name(submission), "items": items}),
        "nodes": settings.nodes,
        "cpus": settings.cpus_per_node,
        "gpus": settings.gpus_per_node,
        "seconds": settings.hours and round(settings.hours * 3600),
        "ray_version": version("ray"),
    }


def _path(path: Path, submission: Submission) -> str:
    """Where a file of the study is mounted; the study file's name needs no quotes there."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", path.name) if path.name == submission.file.name == str(path) else str(path)


def _at(value: Any, *path: str | int) -> Any:
    """The part of a manifest at a path, or None."""
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _in_pods(job: dict[str, Any], key: str) -> list[list[dict[str, Any]]]:
    """A list of each of Ray's containers, such as their env: of the head, and of each group of workers."""
    cluster = _at(job, "spec", "rayClusterSpec")
    workers = _at(cluster, "workerGroupSpecs")
    groups = [_at(cluster, "headGroupSpec"), *(workers if isinstance(workers, list) else [])]
    listed = [_at(group, "template", "spec", "containers", 0, key) for group in groups]
    return [[entry for entry in (entries or []) if isinstance(entry, dict)] for entries in listed]


def _mounts(job: dict[str, Any]) -> list[str]:
    """Where the head has volumes besides the study's."""
    places = [str(mount.get("mountPath")).rstrip("/") for mount in _in_pods(job, "volumeMounts")[0]]
    return [place for place in places if place != STUDY_FOLDER]


def _manifest_faults(job: dict[str, Any], template: Template, submission: Submission) -> list[Fault]:
    faults = []
    if job.get("kind") != "RayJob":
        faults.append(template.fault(f"expected a manifest of kind RayJob, got {job.get('kind')!r}"))
    if not all(any(mount.get("mountPath") == STUDY_FOLDER for mount in mounts) for mounts in _in_pods(job, "volumeMounts")):
        faults.append(template.fault(f"expected the study's volume at {STUDY_FOLDER} in Ray's containers, got none"))
    for key, ours in (("name", job_name(submission)), ("namespace", submission.settings.place or "default")):
        if _at(job, "metadata", key) not in (None, ours):
            hint = "Remove it" if key == "name" else "Write launcher: kuberay@NAMESPACE"
            faults.append(template.fault(f"metadata.{key}: expected none, since bsearch sets it; got one. {hint}"))
    for index, name in enumerate(submission.settings.environment):
        if not all(any(entry.get("name") == name for entry in variables) for variables in _in_pods(job, "env")):
            secret = f"{{name: {name}, valueFrom: {{secretKeyRef: {{name: SECRET, key: {name}}}}}}}"
            message = "expected it in env of the head and the workers, because values are not written into manifests; got none"
            faults.append(Fault(f"submit.environment[{index}]", f"{message}. Write there: - {secret}"))
    return faults


def _storage_faults(job: dict[str, Any], submission: Submission) -> list[Fault]:
    """What keeps the pods from the database, or shows its password."""
    mounts, url = _mounts(job), submission.given_storage or submission.storage or ""
    where = sqlite_url(f"{next(iter(mounts), '/data')}/{submission.spec.study}.db")
    hidden = "env of the head: - {name: BSEARCH_STORAGE, valueFrom: {secretKeyRef: {name: SECRET, key: url}}}"
    written = [entry for entry in _in_pods(job, "env")[0] if entry.get("name") == "BSEARCH_STORAGE"]
    shown = any(has_secret(str(entry.get("value", ""))) for entry in written)
    if shown or (not written and (has_secret(url) or (submission.given_storage and not url.startswith("sqlite:")))):
        message = "expected a URL without a password, which would be readable in the manifest; got one that may have one"
        return [Fault("storage", f"{message}. Store it in a secret and name that in {hidden}")]
    if written:
        return []
    if found := submission.storage_faults(f"Write storage: {where}, on a volume of the template, or name a secret in {hidden}"):
        return found
    parts = sqlite_parts(url)
    if parts is not None and not any(posixpath.normpath(parts[0]).startswith(f"{mount}/") for mount in mounts):
        message = f"expected a database on a volume that the template mounts ({', '.join(mounts) or 'none'}), got {url!r}"
        return [Fault("storage", f"{message}. Write storage: {where}")]
    if parts is not None and submission.given_storage and not re.fullmatch(r"[A-Za-z0-9_./:~?=&-]+", url):
        return [Fault("storage", f"expected a path of letters, digits and '_./:~-', got {url!r}")]
    return []


def _metadata(submission: Submission, job: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Our metadata of an object, beside the template's."""
    written = job.get("metadata") or {}
    return written | {
        "name": job_name(submission),
        "namespace": submission.settings.place or "default",
        "labels": (written.get("labels") or {}) | {MANAGED: "bsearch"},
        "annotations": (written.get("annotations") or {}) | {STUDY: submission.spec.study},
    }


def config_map(submission: Submission, files: StudyFiles) -> dict[str, Any]:
    """The study's files, under keys that a ConfigMap allows; the manifest's `{{ files }}` maps them back to their paths."""
    text: dict[str, str] = {}
    binary: dict[str, str] = {}
    for index, path in enumerate(files.kept):
        content = (files.folder / path).read_bytes()
        try:
            text[f"file-{index}"] = content.decode()
        except UnicodeDecodeError:
            binary[f"file-{index}"] = base64.b64encode(content).decode()
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(submission), "immutable": True, "data": text}
    return manifest | ({"binaryData": binary} if binary else {})


def _job(details: dict[str, Any]) -> Job:
    status, metadata = details.get("status") or {}, details["metadata"]
    deployment, ended = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    if deployment in ("Failed", "ValidationFailed"):
        state: State = "failed"
    elif deployment in ("Suspending", "Suspended"):
        state = "stopped"
    elif ended == "RUNNING" or deployment == "Complete":
        state = STATES.get(ended, "unknown")
    else:
        state = "pending"  # its cluster is being created or recreated
    study = metadata.get("annotations", {}).get(STUDY, "")
    submitted, started = _time(metadata.get("creationTimestamp")), _time(status.get("startTime"))
    return Job(metadata["name"], study, "kuberay", state, submitted, None if state == "pending" else started)


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
