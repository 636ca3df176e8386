"""Jobs on Kubernetes: a RayJob for the KubeRay operator, which creates a cluster for the study and deletes it afterwards.

The study's folder is sent in a ConfigMap; the image contains Ray, bsearch and what the task imports.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import shlex
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import yaml

from ...search.store.url import has_secret
from ...spaces.boundary.storage import sqlite_parts, sqlite_url
from ...spaces.errors import ClusterError, Fault, StudyFileError
from ...spaces.study.submit import Submit
from .files import StudyFiles, study_files
from .submitter import Job, Plan, State, Submission, checked_id, output

LARGEST = 900 << 10  # bytes; a ConfigMap holds 1 MiB, and base64 and file names add to it
STUDY_FOLDER = "/study"
MANAGED = "app.kubernetes.io/managed-by"
STUDY = "bsearch/study"
HEAD = {"cpu": "2", "memory": "8Gi"}  # for the driver and Ray's own servers; trials run on the workers
STATES: dict[str, State] = {"RUNNING": "running", "STOPPED": "stopped", "SUCCEEDED": "succeeded", "FAILED": "failed"}
_ID = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


class KubeRaySubmitter:
    """Applies the manifest with `kubectl`, whose configuration selects the cluster."""

    def __init__(self, settings: Submit) -> None:
        self._settings = settings
        self._namespace = settings.kuberay.namespace
        self.place = self._namespace

    def plan(self, submission: Submission) -> Plan:
        faults = [
            *submission.task_faults(),
            *submission.travel_faults(),
            *submission.machine_faults(),
            *self._faults(submission),
        ]
        if faults:
            raise StudyFileError(faults)
        files = study_files(submission.spec.folder, LARGEST, "submit.kuberay")
        notes = [f"not sent: {', '.join(files.left_out)}"] if files.left_out else []
        objects = [config_map(submission, files), ray_job(submission, files)]
        options = submission.settings.kuberay
        checkpoint_notes = submission.checkpoint_notes(options.mount_path if options.storage_claim else None)
        return Plan(yaml.safe_dump_all(objects, sort_keys=False), (*notes, *checkpoint_notes))

    def _faults(self, submission: Submission) -> list[Fault]:
        options = submission.settings.kuberay
        faults = []
        if options.image is None:
            faults.append(
                Fault("submit.kuberay.image", "expected an image with Ray, bsearch and what the task imports, got none")
            )
        if submission.settings.environment and options.environment_secret is None:
            faults.append(
                Fault(
                    "submit.kuberay.environment_secret",
                    "expected a secret with the variables of submit.environment, because their "
                    "values are not written into manifests; got none",
                )
            )
        if options.database_secret is not None:
            return faults
        where = sqlite_url(f"{options.mount_path}/{submission.spec.study}.db")
        if submission.given_storage and not submission.given_storage.startswith("sqlite:"):
            faults.append(
                Fault(
                    "submit.kuberay.database_secret",
                    "expected a secret with the storage's URL, which would otherwise be readable in the manifest; got none",
                )
            )
            return faults
        found = submission.storage_faults(
            f"Write storage: {where} and submit.kuberay.storage_claim, or a secret with its URL, database_secret: {{name: ...}}"
        )
        url = submission.given_storage or submission.storage or ""
        if has_secret(url):
            found = [
                Fault(
                    "storage",
                    "expected a URL without a password, which would be readable in the manifest; got one with a password. "
                    "Store the URL in a secret: submit.kuberay.database_secret: {name: ...}",
                )
            ]
        if not found and url.startswith("sqlite:") and not (options.storage_claim and _inside(url, options.mount_path)):
            found = [
                Fault(
                    "storage",
                    f"expected a database on the claim mounted at {options.mount_path}, got {url!r}. "
                    f"Write storage: {where}, and submit.kuberay.storage_claim",
                )
            ]
        return faults + found

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


def _inside(url: str, folder: str) -> bool:
    parts = sqlite_parts(url)
    return parts is not None and posixpath.normpath(parts[0]).startswith(f"{folder}/")


def _metadata(submission: Submission) -> dict[str, Any]:
    return {
        "name": job_name(submission),
        "namespace": submission.settings.kuberay.namespace,
        "labels": {MANAGED: "bsearch"},
        "annotations": {STUDY: submission.spec.study},
    }


def config_map(submission: Submission, files: StudyFiles) -> dict[str, Any]:
    """The study's files, under keys that a ConfigMap allows; `ray_job` maps them back to their paths."""
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


def ray_job(submission: Submission, files: StudyFiles) -> dict[str, Any]:
    """The RayJob: a head that runs no trials, and one worker per node."""
    settings, options = submission.settings, submission.settings.kuberay
    results = f"{options.mount_path if options.storage_claim else '/tmp'}/results/{submission.spec.study}"  # noqa: S108 (in the pod)
    study = f"{STUDY_FOLDER}/{submission.file.name}"
    worker = {"cpu": str(settings.cpus_per_node)}
    if settings.memory_per_node:
        worker["memory"] = f"{settings.memory_per_node >> 20}Mi"
    gpus = {options.gpu_resource: str(settings.gpus_per_node)} if settings.gpus_per_node else {}
    spec: dict[str, Any] = {
        "entrypoint": shlex.join(["bsearch", "run", study, "--out", results]),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": options.keep_s,
        "backoffLimit": options.retries,
        "submissionMode": "K8sJobMode",
        "submitterPodTemplate": {
            "spec": _plain_pod(submission, "ray-job-submitter", {"cpu": "500m", "memory": "1Gi"}) | {"restartPolicy": "Never"}
        },
        "rayClusterSpec": {
            "rayVersion": options.ray_version or version("ray"),
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},  # noqa: S104 (in its pod)
                "template": {"spec": _pod(submission, files, "ray-head", HEAD)},
            },
            "workerGroupSpecs": [
                {
                    "groupName": "workers",
                    "replicas": settings.nodes,
                    "minReplicas": settings.nodes,
                    "maxReplicas": settings.nodes,
                    "rayStartParams": {"num-cpus": str(settings.cpus_per_node), "num-gpus": str(settings.gpus_per_node)},
                    "template": {"spec": _pod(submission, files, "ray-worker", worker | gpus)},
                }
            ],
        },
    }
    if settings.hours:
        spec["activeDeadlineSeconds"] = round(settings.hours * 3600)
    if options.token:
        spec["rayClusterSpec"]["authOptions"] = {"mode": "token"}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": _metadata(submission), "spec": spec}


def _pod(submission: Submission, files: StudyFiles, name: str, resources: dict[str, str]) -> dict[str, Any]:
    """One of Ray's pods. The study is mounted at the same path in all: workers load the task from the driver's path."""
    options = submission.settings.kuberay
    mounts = [{"name": "study", "mountPath": STUDY_FOLDER, "readOnly": True}]
    items = [{"key": f"file-{index}", "path": str(path)} for index, path in enumerate(files.kept)]
    volumes: list[dict[str, Any]] = [{"name": "study", "configMap": {"name": job_name(submission), "items": items}}]
    if options.storage_claim:
        mounts.append({"name": "storage", "mountPath": options.mount_path})
        volumes.append({"name": "storage", "persistentVolumeClaim": {"claimName": options.storage_claim}})
    pod = _plain_pod(submission, name, resources)
    pod["containers"][0] |= {"env": _variables(submission, storage=name == "ray-head"), "volumeMounts": mounts}
    return pod | {"volumes": volumes}


def _plain_pod(submission: Submission, name: str, resources: dict[str, str]) -> dict[str, Any]:
    options = submission.settings.kuberay
    container = {
        "name": name,
        "image": options.image,
        "imagePullPolicy": options.pull_policy,
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    user = options.run_as_user
    context = {"runAsNonRoot": True, "runAsUser": user, "fsGroup": user, "seccompProfile": {"type": "RuntimeDefault"}}
    # A training job has no access to the Kubernetes API unless it was given a service account.
    account = (
        {"serviceAccountName": options.service_account} if options.service_account else {"automountServiceAccountToken": False}
    )
    return {"containers": [container], "securityContext": context, **account}


def _variables(submission: Submission, *, storage: bool) -> list[dict[str, Any]]:
    options = submission.settings.kuberay
    variables: list[dict[str, Any]] = [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}]
    for name in submission.settings.environment:
        variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": options.environment_secret, "key": name}}})
    if storage and options.database_secret:
        secret = {"name": options.database_secret.name, "key": options.database_secret.key}
        variables.append({"name": "BSEARCH_STORAGE", "valueFrom": {"secretKeyRef": secret}})
    elif storage and submission.given_storage:
        variables.append({"name": "BSEARCH_STORAGE", "value": submission.given_storage})  # a path on the claim, so not secret
    return variables


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


__all__ = ["KubeRaySubmitter", "config_map", "job_name", "ray_job"]
