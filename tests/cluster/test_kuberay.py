"""KubeRay's launcher keeps the contract of all, with a kubectl on PATH that checks what it is given."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from bsearch.cluster.submit.kuberay import KubeRaySubmitter, job_name
from bsearch.cluster.submit.submitter import Job, Submission, Submitter
from bsearch.spaces.errors import ClusterError, StudyFileError
from bsearch.spaces.study.submit import Submit
from submitter_contract import TRIALS, SubmitterContract

sys.path.insert(0, str(Path(__file__).parent.parent / "fake_kubectl"))
from fake_kubectl import faults, program, tell, template

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake Kubernetes' folder, its kubectl on PATH."""
    folder = tmp_path / "kube"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{program(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_KUBE", str(folder))
    return folder


class TestKubeRaySubmitter(SubmitterContract):
    NAMES = (*SubmitterContract.NAMES, ("launcher", "kuberay@"))
    REMEMBERS_STOPPED = False  # its objects are deleted

    @pytest.fixture(autouse=True)
    def _kube(self, kube: Path) -> None:
        self.folder = kube

    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, Any]:
        return {"launcher": "kuberay", "template": template(tmp_path)}

    @pytest.fixture
    def submitter(self, settings: dict[str, Any]) -> Submitter:
        return KubeRaySubmitter(Submit.model_validate(settings))

    def storage(self, folder: Path) -> dict[str, str]:
        return {"storage": "sqlite:////data/small.db"}

    def carry_on(self, submission: Submission, job: Job) -> None:
        submitter = KubeRaySubmitter(submission.settings)
        assert submitter.logs(job.id) == ""
        tell(self.folder, job.id, jobDeploymentStatus="Initializing")
        assert submitter.job(job.id).state == "pending"
        running = {"jobDeploymentStatus": "Running", "startTime": "2026-11-21T07:00:00Z"}
        tell(self.folder, job.id, "[1/4] trial 0 complete\n", jobStatus="RUNNING", **running)
        assert submitter.job(job.id).state == "running"
        assert submitter.job(job.id).started is not None
        printed = f"[1/4] trial 0 complete\n[{TRIALS}/{TRIALS}] trial 4 complete\n"
        tell(self.folder, job.id, printed, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")

    def stopped(self, submission: Submission) -> None:
        assert list(self.folder.rglob("*.json")) == []

    def test_a_stopped_job_stops(self, submitter: Submitter, submission: Submission) -> None:
        tell_running = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
        submit = submitter.submit

        def submit_and_run(submission: Submission) -> Job:
            job = submit(submission)
            tell(self.folder, job.id, **tell_running)
            return job

        submitter.submit = submit_and_run  # type: ignore[method-assign]  # the operator's hand
        super().test_a_stopped_job_stops(submitter, submission)


EVERYTHING = {
    "launcher": "kuberay@vision",
    "nodes": 2,
    "gpus_per_node": 4,
    "cpus_per_node": 32,
    "hours": 8,
    "environment": ["WANDB_API_KEY"],
}


@pytest.fixture
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a job whose template has lines of a user's own."""
    changes = {
        "# - {name": "- {name",
        "metadata: {}": "metadata: {labels: {kueue.x-k8s.io/queue-name: gpus}}",
        "nvidia.com/gpu": "amd.com/gpu",
        "    rayVersion:": "    authOptions: {mode: token}\n    rayVersion:",
        'cpu: "{{ cpus }}"': 'cpu: "{{ cpus }}", memory: 256Gi',
        "/data": "/shared",
        "            automountServiceAccountToken: false\n": "            serviceAccountName: trainer\n",
    }
    return EVERYTHING | {"template": template(tmp_path_factory.mktemp("template"), **changes)}


@pytest.fixture
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"launcher": "kuberay", "template": template(tmp_path_factory.mktemp("template"))}


def submission(study_file: Callable[..., Path], given: str | None = None, **changes: Any) -> Submission:
    made = Submission.read(study_file(**changes), given, {})
    return Submission(made.spec, made.file, made.storage, made.given_storage, suffix="3f2a1b")


def test_the_manifest_is_as_it_was_agreed(study_file: Callable[..., Path], everything: dict[str, Any], tmp_path: Path) -> None:
    # To agree on a new text: BSEARCH_WRITE_GOLDEN=1 pytest tests/test_kuberay.py -k agreed, and read the diff.
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "layers.py").write_text("WIDTH = 8\n")
    (tmp_path / "mean.npy").write_bytes(b"\x93NUMPY")
    made = submission(study_file, submit=everything)
    text = KubeRaySubmitter(made.settings).plan(made).text
    text = text.replace(everything["template"], "/templates/rayjob.yaml").replace(version("ray"), "2.60.0")
    golden = GOLDEN / "rayjob.yaml"
    if os.environ.get("BSEARCH_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert [faults(one) for one in yaml.safe_load_all(text)] == [[], []]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"backofLimit": 3}, "'backofLimit' was unexpected"),
        ({"ttlSecondsAfterFinished": "600"}, "'600' is not of type 'integer'"),
        ({"submissionMode": "Kubernetes"}, "'Kubernetes' is not one of"),
        ({"entrypoint": ""}, "should be non-empty"),
    ],
)
def test_the_schema_refuses_what_kuberay_would(
    study_file: Callable[..., Path], everything: dict[str, Any], changes: dict[str, Any], fault: str
) -> None:
    made = submission(study_file, submit=everything)
    _, job = yaml.safe_load_all(KubeRaySubmitter(made.settings).plan(made).text)
    assert any(fault in one for one in faults({**job, "spec": {**job["spec"], **changes}}))


def test_all_that_a_job_lacks_is_told_at_once(study_file: Callable[..., Path]) -> None:
    made = submission(study_file, task="nowhere.py:Mine", devices={"kind": "gpu"}, submit={"environment": ["HOME"]})
    with pytest.raises(StudyFileError) as error:
        KubeRaySubmitter(made.settings).plan(made)
    assert [fault.key for fault in error.value.faults] == [
        "task",
        "submit.gpus_per_node",
        "submit.template",
        "submit.environment[0]",
        "storage",
    ]
    assert "values for REGISTRY/IMAGE:TAG and CLAIM" in str(error.value)
    assert "Write there: - {name: HOME, valueFrom: {secretKeyRef: {name: SECRET, key: HOME}}}" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "hours", "message"),
    [
        ({"{{ seconds }}": "3600"}, 1, "expected {{ seconds }} in the template, got none"),
        ({'num-gpus: "{{ gpus }}"': 'num-gpus: "1"', ', nvidia.com/gpu: "{{ gpus }}"': ""}, None, "expected {{ gpus }} in the"),
        ({"minReplicas: {{ nodes }}": "minReplicas: {{ nods }}"}, None, ":49: expected placeholders among"),
        ({"kind: RayJob": "kind: RayCluster"}, None, "expected a manifest of kind RayJob, got 'RayCluster'"),
        ({"metadata: {}": "metadata: {name: mine}"}, None, "metadata.name: expected none, since bsearch sets it"),
        ({"metadata: {}": "metadata: {namespace: b}"}, None, "Write launcher: kuberay@NAMESPACE"),
        ({"mountPath: /study": "mountPath: /elsewhere"}, None, "expected the study's volume at /study"),
        ({"spec:\n  entry": "spec: [\n  entry"}, None, "invalid YAML, once its placeholders are filled in"),
    ],
)
def test_a_template_that_cannot_work_is_refused_by_line(
    study_file: Callable[..., Path], tmp_path: Path, changes: dict[str, str], hours: int | None, message: str
) -> None:
    settings = {"launcher": "kuberay", "template": template(tmp_path, **changes)} | ({"hours": hours} if hours else {})
    made = submission(study_file, storage="sqlite:////data/small.db", submit=settings)
    with pytest.raises(StudyFileError) as error:
        KubeRaySubmitter(made.settings).plan(made)
    assert message in str(error.value)
    assert f"{tmp_path}/rayjob.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("storage", "given", "fault"),
    [
        (
            "sqlite:////home/me/small.db",
            None,
            "storage: expected a database on a volume that the template mounts (/data), got 'sqlite:////home",
        ),
        ("sqlite:////data/../small.db", None, "storage: expected a database on a volume that the template mounts (/data)"),
        (
            None,
            "postgresql://me:hush@db/s",
            "Store it in a secret and name that in env of the head: - {name: BSEARCH_STORAGE,",
        ),
        (
            "postgresql://me:hush@db/s",
            None,
            "storage: expected a URL without a password, which would be readable in the manifest",
        ),
    ],
)
def test_a_storage_that_pods_cannot_reach_or_all_can_read_is_refused(
    study_file: Callable[..., Path], usual: dict[str, Any], storage: str | None, given: str | None, fault: str
) -> None:
    made = submission(study_file, given, storage=storage, submit=usual)
    with pytest.raises(StudyFileError) as error:
        KubeRaySubmitter(made.settings).plan(made)
    assert fault in str(error.value)
    assert "hush" not in str(error.value)


def test_a_folder_too_large_for_a_config_map_is_told(
    study_file: Callable[..., Path], usual: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "words.txt").write_text("word\n" * 200_000)
    made = submission(study_file, storage="sqlite:////data/small.db", submit=usual)
    with pytest.raises(StudyFileError, match=r"at most 900 KiB to send, got 977 KiB \(words.txt 977 KiB, study.yaml"):
        KubeRaySubmitter(made.settings).plan(made)


@pytest.mark.parametrize("study", ["A.Study_of-Mine", "x" * 100, "0-.-"])
def test_a_study_of_any_name_gets_a_name_that_kubernetes_takes(
    study_file: Callable[..., Path], usual: dict[str, Any], kube: Path, study: str
) -> None:
    made = submission(study_file, study=study, storage=f"sqlite:////data/{study}.db", submit=usual)
    submitter = KubeRaySubmitter(made.settings)
    job = submitter.submit(made)
    assert (job.id, job.study) == (job_name(made), study)
    assert submitter.jobs() == [job]


def test_what_kubernetes_refuses_is_told_in_its_words(
    study_file: Callable[..., Path], usual: dict[str, Any], kube: Path
) -> None:
    (kube / "default").write_text("")  # a folder that cannot be made
    made = submission(study_file, storage="sqlite:////data/small.db", submit=usual)
    with pytest.raises(ClusterError, match=r"kubectl apply: failed with exit code 1: "):
        KubeRaySubmitter(made.settings).submit(made)


def test_where_kubectl_is_not_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match=r"kubectl: no such program on PATH"):
        KubeRaySubmitter(Submit()).jobs()


def test_states_are_told_in_our_words(study_file: Callable[..., Path], usual: dict[str, Any], kube: Path) -> None:
    made = submission(study_file, storage="sqlite:////data/small.db", submit=usual)
    submitter = KubeRaySubmitter(made.settings)
    id = submitter.submit(made).id
    for status, state in [
        ({"jobDeploymentStatus": "Retrying", "jobStatus": "FAILED"}, "pending"),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED"}, "failed"),
        ({"jobDeploymentStatus": "Suspended"}, "stopped"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, "stopped"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SOMETHING"}, "unknown"),
    ]:
        tell(kube, id, **status)
        assert submitter.job(id).state == state
    assert json.loads((kube / "default" / "rayjob" / f"{id}.json").read_text())["kind"] == "RayJob"
