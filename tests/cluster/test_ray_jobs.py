"""The launcher for Ray clusters keeps the contract of all, on a real head that asks for a token."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from bsearch.cluster.submit.ray_jobs import RaySubmitter
from bsearch.cluster.submit.submitter import Submission, Submitter
from bsearch.spaces.errors import ClusterError, StudyFileError
from bsearch.spaces.study.submit import Submit
from helpers import as_optuna
from ray._private.authentication_test_utils import reset_auth_token_state
from submitter_contract import TRIALS, SubmitterContract, until


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def naming(text: str) -> list[str]:
    """Processes whose command line or environment holds a text."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            if command and text.encode() in command + (process / "environ").read_bytes():
                found.append(command.decode().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture(scope="class")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The dashboard's URL of a Ray started for these tests alone; its token is in the environment."""
    scratch = Path(f"/tmp/bsearch-test-{secrets.token_hex(3)}")  # noqa: S108 (Ray's sockets need a short path)
    port, dashboard, agent, client = free_ports(4)
    token = secrets.token_hex(16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", token)
        patch.setenv("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        reset_auth_token_state()  # this process may have used Ray without one
        command = ["ray", "start", "--head", "--block", f"--port={port}", f"--dashboard-port={dashboard}"]
        command += [
            "--include-dashboard=true",
            f"--dashboard-agent-listen-port={agent}",
            f"--ray-client-server-port={client}",
        ]
        command += ["--num-cpus=2", "--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={scratch}"]
        log = tmp_path_factory.mktemp("ray") / "log"
        # Of our own path nothing: the cluster shall have from us what we send.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, start_new_session=True
            )
        try:
            url = f"http://127.0.0.1:{dashboard}"
            submitter = RaySubmitter(Submit.model_validate({"launcher": f"ray@{url}"}))

            def up() -> bool:
                assert process.poll() is None, log.read_text()
                try:
                    return submitter.jobs() == []
                except ClusterError:
                    return False

            until(up)
            yield url
        finally:
            process.terminate()
            process.wait(60)
            until(lambda: naming(str(scratch)) == [], 30)
            subprocess.run(["rm", "-rf", scratch], check=True)
    reset_auth_token_state()


@pytest.mark.cluster
class TestRaySubmitter(SubmitterContract):
    NAMES = (*SubmitterContract.NAMES, ("launcher", "ray@"))

    @pytest.fixture
    def settings(self, head: str) -> dict[str, Any]:
        return {"launcher": f"ray@{head}", "environment": ["HOME"]}

    @pytest.fixture
    def submitter(self, settings: dict[str, Any]) -> Submitter:
        return RaySubmitter(Submit.model_validate(settings))

    def storage(self, folder: Path) -> dict[str, str]:
        return {"storage": f"sqlite:///{folder}/small.db"}

    def ended(self, submission: Submission) -> None:
        folder = submission.spec.folder.parent
        trials = as_optuna(folder / "small.db").trials
        assert [trial.state.name for trial in trials] == ["COMPLETE"] * TRIALS
        # The driver and its workers ran what was sent, not what is installed here.
        ran = set((folder / "imported").read_text().splitlines())
        assert ran
        assert all("/runtime_resources/py_modules_files/" in path for path in ran), ran

    def test_a_wrong_token_is_told(self, submitter: Submitter, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
        reset_auth_token_state()
        with pytest.raises(ClusterError, match=r"authentication failed. Set RAY_AUTH_MODE=token"):
            submitter.jobs()
        monkeypatch.undo()
        reset_auth_token_state()
        assert isinstance(submitter.jobs(), list)

    def test_ray_address_does_not_overrule_the_one_asked_for(
        self, submitter: Submitter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
        assert isinstance(submitter.jobs(), list)


def test_where_nobody_answers_it_is_told() -> None:
    submitter = RaySubmitter(Submit.model_validate({"launcher": "ray@http://127.0.0.1:9"}))
    with pytest.raises(
        ClusterError,
        match=r"Ray at http://127.0.0.1:9: cannot be reached: .*in the launcher: ray@http://host:8265",
    ):
        submitter.jobs()


@pytest.mark.parametrize("storage", [None, "sqlite:///small.db", "sqlite:///:memory:"])
def test_a_database_that_would_die_with_the_job_is_refused(
    study_file: Callable[..., Path], storage: str | None
) -> None:
    made = Submission.read(study_file(storage=storage), None, {"launcher": "ray"})
    with pytest.raises(
        StudyFileError,
        match=r"storage: expected a database that outlives the job .*sqlite:////shared/small.db",
    ):
        RaySubmitter(made.settings).plan(made)


def test_only_what_a_job_needs_travels_and_the_rest_is_told(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text("x = 1")
    for name in (
        "net/layers.py",
        "data/cifar.bin",
        "data.csv",
        "results/front.csv",
        "old.db",
        "model.pt",
        ".env",
        "big.npz",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "big.npz").write_bytes(bytes(11 << 20))
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("")
    path = study_file(task="tasks.py:x", storage="postgresql+psycopg://me@db/s")
    made = Submission.read(path, None, {"launcher": "ray"})
    plan = RaySubmitter(made.settings).plan(made)
    assert "\n".join(
        f"  - {name}"
        for name in ("data.csv", "datasets/__init__.py", "net/layers.py", "study.yaml", "tasks.py")
    ) in (plan.text)
    assert "not sent: .env, big.npz (11.0 MiB), data/, model.pt, old.db, results/" in plan.notes


def test_a_task_outside_the_folder_is_refused(study_file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path.parent / "tasks.py").write_text("x = 1")
    for task in ("../tasks.py:x", f"{tmp_path.parent}/tasks.py:x"):
        made = Submission.read(
            study_file(task=task, storage="postgresql+psycopg://me@db/s"), None, {"launcher": "ray"}
        )
        with pytest.raises(StudyFileError, match=r"task: expected a path inside the study's folder"):
            RaySubmitter(made.settings).plan(made)


def test_machines_that_are_asked_of_a_running_cluster_are_told(study_file: Callable[..., Path]) -> None:
    made = Submission.read(
        study_file(submit={"nodes": 2, "cpus_per_node": 8}),
        "postgresql+psycopg://me@db/s",
        {"launcher": "ray"},
    )
    notes = RaySubmitter(made.settings).plan(made).notes
    assert (
        "ignored, because the cluster's machines are already running: submit.cpus_per_node, submit.nodes"
        in notes
    )


def test_a_template_adds_what_ray_knows_and_nothing_else(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    made = Submission.read(
        study_file(
            storage="postgresql+psycopg://me@db/s", submit={"template": "job.yaml", "environment": ["HOME"]}
        ),
        None,
        {},
    )
    (tmp_path / "job.yaml").write_text(
        "entrypoint: nice {{ command }} --serial\nentrypoint_num_cpus: 2\nruntime_env: {pip: [einops], env_vars: {A: b}}\n"
    )
    request = yaml.safe_load(RaySubmitter(made.settings).plan(made).text)
    assert request["entrypoint"] == "nice python -m bsearch run study.yaml --serial"
    assert request["entrypoint_num_cpus"] == 2
    assert request["metadata"] == {"bsearch_study": "small"}
    assert request["runtime_env"] == {
        "working_dir": ["job.yaml", "study.yaml"],
        "pip": ["einops"],
        "env_vars": {"A": "b", "HOME": "(value set here)"},
    }
    for line, message in [
        ("entrypoint_cpus: 2", "expected keys among .*entrypoint_num_cpus.*; got entrypoint_cpus"),
        ("metadata: {a: b}", "expected keys among .*; got metadata"),
        ("runtime_env: {working_dir: .}", "without working_dir, which is the study's folder"),
        ("runtime_env: {env_vars: {HOME: /}}", "without those that are set where you submit; got HOME"),
        ("- a", "invalid YAML, once its placeholders are filled in"),
    ]:
        (tmp_path / "job.yaml").write_text(f"entrypoint: {{{{ command }}}}\n{line}\n")
        with pytest.raises(StudyFileError, match=message):
            RaySubmitter(made.settings).plan(made)


def test_a_password_is_not_printed(study_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hush")
    made = Submission.read(
        study_file(submit={"environment": ["SECRET_KEY"]}), "postgresql+psycopg://me:hush@db/s", {}
    )
    plan = RaySubmitter(made.settings).plan(made)
    assert "SECRET_KEY" in plan.text
    assert "hush" not in plan.text
