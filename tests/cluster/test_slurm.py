"""Slurm's launcher keeps the contract of all, with programs on PATH that really start what the script asks for."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bsearch.cluster.submit.slurm import SlurmSubmitter
from bsearch.cluster.submit.submitter import Job, Submission, Submitter
from bsearch.spaces.errors import ClusterError, StudyFileError
from bsearch.spaces.study.submit import Submit
from helpers import as_optuna
from helpers import finished as finished_trials
from submitter_contract import TRIALS, SubmitterContract, until

sys.path.insert(0, str(Path(__file__).parent.parent / "fake_slurm"))
from fake_slurm import programs

GOLDEN = Path(__file__).parent.parent / "golden"


def processes_of(folder: Path) -> dict[int, str]:
    """Command lines of what the jobs of this Slurm started and is still there."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if f"FAKE_SLURM={folder}".encode() in variables and any(
                one.startswith(b"SLURM_JOB_ID=") for one in variables
            ):
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return {number: command for number, command in found.items() if command}  # zombies have none


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The fake Slurm's folder, its programs on PATH."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{programs(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    yield folder
    for job in folder.iterdir():
        (job / "cancelled").touch()
    for number in processes_of(folder):  # only where a test failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


@pytest.mark.cluster
class TestSlurmSubmitter(SubmitterContract):
    @pytest.mark.long
    def test_a_study_runs_to_its_end(self, submitter: Submitter, submission: Submission) -> None:
        super().test_a_study_runs_to_its_end(submitter, submission)

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        names = [name for name in ("PYTHONPATH",) if name in os.environ]
        return {"launcher": "slurm", "nodes": 2, "cpus_per_node": 1, "environment": names}

    @pytest.fixture
    def submitter(self, settings: dict[str, Any], slurm: Path) -> Submitter:
        return SlurmSubmitter(Submit.model_validate(settings))

    def carry_on(self, submission: Submission, job: Job) -> None:
        """The time runs out in the middle: the job queues itself again and the study goes on."""
        database = submission.spec.folder / "small.db"

        def finished() -> int:
            if not database.exists():
                return 0
            return len(finished_trials(database))

        until(lambda: (database.exists() and database.stat().st_size > 0) and _quiet(finished) >= 1)
        tokens = list((submission.spec.folder / "results" / "small").glob(".ray-token-*"))
        assert [oct(token.stat().st_mode & 0o777) for token in tokens] == ["0o600"]
        assert len(tokens[0].read_text()) == 64
        subprocess.run(["scancel", "--batch", "--signal=USR1", job.id], check=True)

    def ended(self, submission: Submission) -> None:
        folder = submission.spec.folder
        trials = as_optuna(folder / "small.db").trials
        states = [trial.state.name for trial in trials]
        assert states.count("COMPLETE") == TRIALS
        assert set(states) <= {"COMPLETE", "FAIL"}
        (log,) = (folder / "results" / "small").glob("slurm-*.log")
        output = log.read_text()
        assert output.count("bsearch: time limit reached before the study finished: requeued") == 1
        assert "resuming: " in output
        self.stopped(submission)

    def stopped(self, submission: Submission) -> None:
        folder = submission.spec.folder
        until(lambda: processes_of(folder.parent / "slurm") == {}, 40)
        assert list((folder / "results" / "small").glob(".ray-token-*")) == []


def _quiet(count: Callable[[], int]) -> int:
    try:
        return count()
    except Exception:  # the database is being made
        return 0


def submission(study_file: Callable[..., Path], **submit: Any) -> Submission:
    return Submission.read(study_file(submit={"launcher": "slurm", **submit}), None, {})


HEAD = """#!/bin/bash
#SBATCH --partition=gpu,long --account vision
#SBATCH -C 'a100&ib' # our features
#SBATCH --exclude=node[07-09]
#SBATCH --exclusive
#SBATCH --mem=256G
#SBATCH --array=1-4%1
#SBATCH --requeue

module load cuda/12.4; source ~/venv/bin/activate # kept as it is, for $USER
requeues=5
{{ command }}
"""
EVERYTHING = {
    "nodes": 2,
    "gpus_per_node": 4,
    "cpus_per_node": 32,
    "environment": ["HTTPS_PROXY", "WANDB_API_KEY"],
    "template": "head.sh",
}


@pytest.mark.parametrize(("name", "settings"), [("slurm-everything.sh", EVERYTHING), ("slurm-cpus.sh", {})])
def test_the_script_is_as_it_was_agreed(
    study_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: Any
) -> None:
    # To agree on a new text: BSEARCH_WRITE_GOLDEN=1 pytest tests/test_slurm.py -k agreed, and read the diff.
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    (tmp_path / "head.sh").write_text(HEAD)
    made = submission(study_file, **settings)
    text = (
        SlurmSubmitter(made.settings, programs=Path("/opt/venv/bin"))
        .plan(made)
        .text.replace(str(tmp_path), "/home/me/study")
    )
    if os.environ.get("BSEARCH_WRITE_GOLDEN"):
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text()
    subprocess.run(["bash", "-n", "-c", text], check=True)


def test_every_line_of_a_template_is_kept(study_file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "head.sh").write_text(HEAD)
    made = submission(study_file, template="head.sh", nodes=3)
    script = SlurmSubmitter(made.settings).plan(made).text
    ours = [
        line
        for line in script.splitlines()
        if line.startswith("#SBATCH --nodes") or line not in HEAD.splitlines()
    ]
    kept = [line for line in script.splitlines() if line in HEAD.splitlines()]
    assert [line for line in HEAD.splitlines() if line and "{{" not in line] == list(
        dict.fromkeys(filter(None, kept))
    )
    assert "#SBATCH --nodes=3" in ours


@pytest.mark.parametrize(
    ("line", "number", "message"),
    [
        (
            "#SBATCH --nodes=4",
            3,
            "expected no --nodes, which bsearch adds itself; got one. Remove it, and write submit.nodes",
        ),
        ("#SBATCH --mem=1G -N4", 3, "expected no --nodes"),
        ("#SBATCH -J mine", 3, "expected no --job-name, which bsearch adds itself; got one. Remove it"),
        ("true\n#SBATCH --mem=1G", 4, "expected --mem before the first command: sbatch ignores it here"),
        ("export GPUS={{ gpu }}", 3, "got {{ gpu }}. Did you mean 'gpus'?"),
        ("#SBATCH --gres=gpu:{{ gpus_per_node }}", 3, "expected placeholders among {{ nodes }}, {{ cpus }}"),
    ],
)
def test_a_line_that_a_template_cannot_have_is_refused_by_name(
    study_file: Callable[..., Path], tmp_path: Path, line: str, number: int, message: str
) -> None:
    (tmp_path / "head.sh").write_text(f"#!/bin/bash\n#SBATCH --requeue\n{line}\n{{{{ command }}}}\n")
    made = submission(study_file, template="head.sh")
    with pytest.raises(StudyFileError) as error:
        SlurmSubmitter(made.settings).plan(made)
    assert f"{tmp_path}/head.sh:{number}: " in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "#!/bin/bash\nbsearch run study.yaml\n",
            "head.sh: expected {{ command }} in the template, got none",
        ),
        ("#!/bin/sh\n{{ command }}\n", "head.sh:1: expected #!/bin/bash"),
        ("", "head.sh:1: expected #!/bin/bash"),
        (None, "head.sh: cannot be read: No such file or directory"),
    ],
)
def test_a_template_without_what_it_needs_is_refused(
    study_file: Callable[..., Path], tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "head.sh").write_text(text)
    made = submission(study_file, template="head.sh")
    with pytest.raises(StudyFileError, match=re.escape(message)):
        SlurmSubmitter(made.settings).plan(made)


def test_gpus_that_the_template_asks_for_are_not_asked_for_twice(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "head.sh").write_text("#!/bin/bash\n#SBATCH --gres=gpu:a100:{{ gpus }}\n{{ command }}\n")
    made = submission(study_file, template="head.sh", gpus_per_node=2)
    script = SlurmSubmitter(made.settings).plan(made).text
    assert "#SBATCH --gres=gpu:a100:2\n" in script
    assert "--gpus-per-node" not in script
    assert "--num-gpus=2" in script


def test_paths_are_quoted(study_file: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "it's $(100 %)"
    folder.mkdir()
    made = Submission.read(study_file(submit={"launcher": "slurm"}).rename(folder / "a; b.yaml"), None, {})
    script = SlurmSubmitter(made.settings).plan(made).text
    subprocess.run(["bash", "-n", "-c", script], check=True)
    quoted = str(folder).replace("'", "'\"'\"'")
    assert f"#SBATCH --chdir='{quoted}'\n" in script
    assert "(100 %%)/results/small/slurm-%j.log'\n" in script
    assert "step bsearch run 'a; b.yaml'\n" in script


def test_all_that_a_job_lacks_is_told_at_once(study_file: Callable[..., Path]) -> None:
    path = study_file(
        task="nowhere.py:Mine",
        devices={"per_trial": [1, 2], "kind": "gpu", "cpus": 8},
        submit={"gpus_per_node": 1},
    )
    with pytest.raises(StudyFileError) as error:
        made = Submission.read(path, None, {"launcher": "slurm"})
        SlurmSubmitter(made.settings).plan(made)
    assert [fault.key for fault in error.value.faults] == [
        "task",
        "submit.gpus_per_node",
        "submit.cpus_per_node",
    ]


def test_a_variable_that_is_not_set_is_told(study_file: Callable[..., Path], slurm: Path) -> None:
    made = submission(study_file, environment=["HOME", "NOT_SET_ANYWHERE"])
    with pytest.raises(
        StudyFileError, match=r"submit.environment\[1\]: expected a variable that is set where you submit"
    ):
        SlurmSubmitter(made.settings).submit(made)
    assert list(slurm.iterdir()) == []


def test_a_storage_with_a_password_stays_out_of_the_script(study_file: Callable[..., Path]) -> None:
    url = "postgresql+psycopg://me:hush@db/studies"
    made = Submission.read(study_file(submit={"launcher": "slurm"}), url, {})
    script = SlurmSubmitter(made.settings).plan(made).text
    assert "#SBATCH --export=BSEARCH_STORAGE\n" in script
    assert "hush" not in script


def test_where_slurm_is_not_it_is_told(
    study_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    submitter = SlurmSubmitter(Submit())
    made = submission(study_file)
    for act in (submitter.jobs, lambda: submitter.job("4711"), lambda: submitter.submit(made)):
        with pytest.raises(ClusterError, match=r"no such program on PATH"):
            act()


def test_what_sbatch_refuses_is_told_in_its_words(
    study_file: Callable[..., Path], slurm: Path, tmp_path: Path
) -> None:
    (tmp_path / "head.sh").write_text("#!/bin/bash\n#SBATCH --licenses=matlab\n{{ command }}\n")
    made = submission(study_file, template="head.sh")
    with pytest.raises(
        ClusterError,
        match=r"sbatch --parsable: failed with exit code 1: sbatch: unrecognized option '--licenses'",
    ):
        SlurmSubmitter(made.settings).submit(made)
