"""Submitting and looking after jobs from the command line, the registry of launchers, and what travels."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
from bsearch.cluster.submit import submitter as registry
from bsearch.cluster.submit.files import copy_package
from bsearch.cluster.submit.submitter import GROUP, OURS, Job, Plan, Submission, open_submitter
from bsearch.spaces.boundary.distribution import DISTRIBUTION
from bsearch.spaces.errors import ClusterError, StudyFileError
from bsearch.spaces.study.file import parse_study, read_study
from bsearch.spaces.study.submit import Submit
from conftest import TASKS
from helpers import bsearch, validated

ROOT = Path(__file__).parents[2]


class Paper:
    """A launcher of somebody else's, that writes jobs on paper."""

    drawer: ClassVar[dict[str, Job]] = {}

    def __init__(self, settings: Submit) -> None:
        self.place = ""

    def plan(self, submission: Submission) -> Plan:
        values = {"study": submission.spec.study, "nodes": submission.settings.nodes}
        return Plan(submission.template("").filled(values))

    def submit(self, submission: Submission) -> Job:
        job = Job(str(len(self.drawer) + 1), submission.spec.study, "paper", "running", datetime.now(UTC))
        return self.drawer.setdefault(job.id, job)

    def jobs(self) -> list[Job]:
        return [*self.drawer.values()]

    def job(self, id: str) -> Job:
        if id not in self.drawer:
            raise ClusterError(f"Paper: no job {id}.")
        return self.drawer[id]

    def logs(self, id: str) -> str:
        return f"[1/4] trial 0 of job {self.job(id).id} complete\n"

    def stop(self, id: str) -> None:
        del self.drawer[self.job(id).id]


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The submit section of a study whose jobs are written on paper."""
    points = [
        EntryPoint("paper", f"{__name__}:Paper", GROUP),
        EntryPoint("torn", "nowhere.at_all:Torn", GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    monkeypatch.setattr(Paper, "drawer", {})
    (tmp_path / "sheet.txt").write_text("{{ study }} on {{ nodes }} sheets\n")
    return {"launcher": "paper", "template": "sheet.txt"}


def test_a_job_is_submitted_looked_after_and_stopped(
    study_file: Callable[..., Path], paper: dict[str, str]
) -> None:
    path = study_file(submit=paper)
    dry = bsearch("submit", path, "--set", "submit.nodes=3", "--dry-run")
    assert (dry.exit_code, dry.output) == (0, "small on 3 sheets\n")
    assert bsearch("jobs", "status", "--study", path).output == "no bsearch jobs there\n"
    sent = bsearch("submit", path)
    assert sent.exit_code == 0, sent.output
    assert sent.stdout.splitlines() == [
        "submitted study small to paper as job 1",
        "Next:",
        "  bsearch jobs status 1 --launcher paper",
        "  bsearch jobs logs 1 --launcher paper --follow",
        "  bsearch jobs stop 1 --launcher paper",
    ]
    where = ["--launcher", "paper"]
    assert "1    small  running" in bsearch("jobs", "status", *where).output
    (listed,) = validated(bsearch("jobs", "status", *where, "--json").stdout)["jobs"]
    one = validated(bsearch("jobs", "status", 1, *where, "--json").stdout)
    assert listed.items() <= one.items()
    assert set(listed) == {"id", "study", "launcher", "state", "submitted_at", "started_at", "progress"}
    sent_at = Paper.drawer["1"].submitted
    assert sent_at is not None and listed["submitted_at"] == sent_at.isoformat(timespec="seconds")
    assert listed["started_at"] is listed["progress"] is None
    assert bsearch("jobs", "status", 1, *where).output.startswith(
        "job 1 of study small: running, submitted 2"
    )
    assert bsearch("jobs", "logs", 1, *where).output == "[1/4] trial 0 of job 1 complete\n"
    assert bsearch("jobs", "stop", 1, *where).output == "stopping job 1\n"
    gone = bsearch("jobs", "status", 1, *where)
    assert (gone.exit_code, gone.output) == (1, "Paper: no job 1.\n")


@pytest.mark.slow
def test_jobs_show_how_far_their_studies_are(
    study_file: Callable[..., Path], paper: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bsearch("submit", study_file(submit=paper)).exit_code == 0
    where = ["--launcher", "paper"]
    monkeypatch.setenv("BSEARCH_STORAGE", f"sqlite:///{tmp_path}/here.db")
    before = bsearch("jobs", "status", *where)
    assert (before.exit_code, "trials" in before.output) == (0, False)  # the job has not begun
    run = ["run", study_file(task=f"{TASKS}:Points", budget={"trials": 3}), "--serial"]
    assert bsearch(*run).exit_code == 0
    (listed,) = validated(bsearch("jobs", "status", *where, "--json").stdout)["jobs"]
    facts = listed["progress"]
    assert (facts["done"], facts["trials"], facts["metric"], facts["eta_s"]) == (3, 3, "accuracy", None)
    assert 0 < facts["best"] <= 1
    assert "  3/3     accuracy " in bsearch("jobs", "status", *where).output
    assert "\n3 of 3 trials are done, the best accuracy is " in bsearch("jobs", "status", 1, *where).output
    # A database that cannot be reached is said, and does not hide the jobs.
    monkeypatch.setenv("BSEARCH_STORAGE", "postgresql+psycopg://127.0.0.1:9/none")
    closed = bsearch("jobs", "status", *where)
    assert closed.exit_code == 0
    assert "1    small  running" in closed.output
    assert "progress is unknown: " in closed.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["jobs", "status"],
            "submit.launcher: expected one of ray, slurm; got none. Set it in the study file, or pass launcher",
        ),
        (
            ["jobs", "status", "--launcher", "slrum"],
            "expected one of ray, slurm; got 'slrum'. Did you mean 'slurm'?",
        ),
        (["jobs", "status", "--launcher", "kuberay"], "expected one of ray, slurm; got 'kuberay'."),
        (
            ["jobs", "status", "--launcher", "ray@http://a; id"],
            "submit.launcher: expected ray@http://host:8265 or ray@host:6379, got 'ray@http://a; id'",
        ),
        (
            ["jobs", "status", "--launcher", "slurm@http://a"],
            "launcher: expected ray, ray@ADDRESS, slurm, or the name of a plug-in alone, got 'slurm@http://a'",
        ),
        (["jobs", "status", "--study", "nowhere.yaml"], "nowhere.yaml: cannot be read: No such file"),
    ],
)
def test_bad_input_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [])  # whatever is installed here
    result = bsearch(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_faults_bear_the_lines_of_the_study_file(study_file: Callable[..., Path]) -> None:
    path = study_file(submit={"launcher": "slurm", "cpus_per_node": 1}, devices={"kind": "gpu", "cpus": 2})
    result = bsearch("submit", path)
    assert result.exit_code == 2
    lines = path.read_text().splitlines()
    gpus, cpus = result.output.splitlines()
    assert gpus.startswith(f"{path}:{lines.index('submit:') + 1}: submit.gpus_per_node: ")
    assert cpus.startswith(f"{path}:{lines.index('  cpus_per_node: 1') + 1}: submit.cpus_per_node: ")


def test_where_a_study_runs_is_no_part_of_what_it_is(study_file: Callable[..., Path]) -> None:
    plain, submitted = (
        read_study(study_file()),
        read_study(study_file(submit={"launcher": "slurm", "nodes": 7})),
    )
    assert plain.identity() == submitted.identity()


def test_all_faults_of_the_section_are_told_with_their_lines() -> None:
    text = """study: a
task: m:x
space: {effective_batch: 3, reference_rate: 0.1}
submit:
  nodes: 0
  launcher: ray@http://a b
  environment: [FINE, NOT-FINE]
  partition: gpu
"""
    with pytest.raises(StudyFileError) as error:
        parse_study(text)
    assert [(fault.line, fault.key) for fault in error.value.faults] == [
        (5, "submit.nodes"),
        (6, "submit.launcher"),
        (7, "submit.environment[1]"),
        (8, "submit.partition"),
    ]


def test_the_package_declares_the_launchers_it_knows() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    assert declared == {point.name: point.value for point in OURS}


def test_a_plug_in_that_cannot_be_loaded_is_told(paper: dict[str, str]) -> None:
    with pytest.raises(
        ClusterError, match=r"launcher torn: its plug-in nowhere.at_all:Torn cannot be loaded: No module"
    ):
        open_submitter(Submit(launcher="torn"))


def test_the_package_that_travels_is_the_wheel_unpacked(tmp_path: Path) -> None:
    package, metadata = copy_package(tmp_path)
    sent = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    tree = {"__init__.py", "__main__.py", "cli.py", "py.typed"}
    for name in ("spaces", "objectives", "search", "cluster", "commands", "extras"):
        files = [
            path for path in (ROOT / name).rglob("*") if path.is_file() and "__pycache__" not in path.parts
        ]
        tree |= {str(path.relative_to(ROOT)) for path in files}
    assert sent == tree
    assert metadata.name.endswith(".dist-info")
    assert f"Name: {DISTRIBUTION}" in (metadata / "METADATA").read_text()
