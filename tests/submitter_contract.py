"""What every launcher of batch jobs has to do: subclass SubmitterContract and supply its fixtures.

A plug-in's own tests import the same class.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from bsearch.cluster.submit.submitter import OVER, Job, Submission, Submitter, followed
from bsearch.spaces.errors import ClusterError, StudyFileError
from bsearch.spaces.study.file import parse_study
from helpers import SPACE

TASK = """
import time
from pathlib import Path
import bsearch
from bsearch.objectives.digits import Digits

with Path({imported!r}).open("a") as file:
    file.write(bsearch.__file__ + "\\n")

class Slow(Digits):
    def loss(self, model, batch, setup):
        time.sleep(len(batch[1]) / setup.samples_budget)  # a second a trial
        return super().loss(model, batch, setup)
"""
HOSTILE = ["a; touch /tmp/x", "a\ntouch /tmp/x", "$(id)", "`id`", "a'b", "-rf", "../a", "a b", "", "a&b"]
TRIALS = 4


def until(true: Callable[[], Any], limit_s: float = 400) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.4)


class SubmitterContract:
    # Keys of the study file that take a name, as what comes before the hostile one, which must be held to its form.
    NAMES: tuple[tuple[str, str], ...] = (("launcher", ""), ("environment.[]", ""))

    @pytest.fixture
    def submitter(self) -> Submitter:
        raise NotImplementedError

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        """The submit section under which jobs run here."""
        raise NotImplementedError

    def carry_on(self, submission: Submission, job: Job) -> None:
        """What happens to a running job before it ends, where that needs a hand."""

    def ended(self, submission: Submission) -> None:
        """What has to hold when a job has run to its end."""

    def stopped(self, submission: Submission) -> None:
        """What has to hold when a job was stopped."""

    @pytest.fixture
    def submission(
        self, settings: dict[str, Any], study_file: Callable[..., Path], tmp_path: Path
    ) -> Submission:
        (tmp_path / "study").mkdir()
        (tmp_path / "study" / "tasks.py").write_text(TASK.format(imported=str(tmp_path / "imported")))
        path = study_file(
            task="tasks.py:Slow",
            space=SPACE,
            budget={"trials": TRIALS},
            # Each further one starts a process, which is what takes the time here.
            cluster={"trials_at_once": 1},
            submit=settings,
            **self.storage(tmp_path),
        )
        # A name that a shell would take to pieces.
        return Submission.read(path.rename(tmp_path / "study" / "it's; my study.yaml"), None, {})

    def storage(self, folder: Path) -> dict[str, str]:
        return {}

    def test_a_dry_run_tells_the_study_and_submits_nothing(
        self, submitter: Submitter, submission: Submission
    ) -> None:
        before = submitter.jobs()
        plan = submitter.plan(submission)
        assert "small" in plan.text
        assert submitter.plan(submission) == plan
        assert submitter.jobs() == before

    @pytest.mark.parametrize("id", ["99999999", *HOSTILE])
    def test_an_unknown_job_is_told_and_nothing_is_done(self, submitter: Submitter, id: str) -> None:
        for act in (submitter.job, submitter.logs, submitter.stop):
            with pytest.raises(ClusterError, match=r"no job 99999999|expected the id of a job"):
                act(id)

    def test_hostile_names_are_refused_where_they_are_written(self, settings: dict[str, Any]) -> None:
        study = {"study": "small", "task": "a:b", "space": {"effective_batch": 8, "reference_rate": 0.1}}
        for name, before in self.NAMES:
            for value in HOSTILE:
                section: Any = before + value
                for part in reversed(name.split(".")):
                    section = [section] if part == "[]" else {part: section}
                with pytest.raises(StudyFileError) as error:
                    parse_study(yaml.safe_dump({**study, "submit": section}))
                assert f"submit.{name.removesuffix('.[]')}" in str(error.value).replace("[0]", ""), (
                    name,
                    value,
                )

    def test_a_study_runs_to_its_end(self, submitter: Submitter, submission: Submission) -> None:
        job = submitter.submit(submission)
        assert (job.study, job.launcher) == ("small", submission.settings.launcher.partition("@")[0])
        assert job.state in ("pending", "running")
        assert job.submitted is not None
        assert job.id in [one.id for one in submitter.jobs()]
        self.carry_on(submission, job)
        output = "".join(followed(submitter, job.id, every_s=1))
        ended = submitter.job(job.id)
        assert ended.state == "succeeded", output
        assert f"[{TRIALS}/{TRIALS}] trial" in output
        assert submitter.logs(job.id) == output
        assert ended in submitter.jobs()
        submitter.stop(job.id)
        assert submitter.job(job.id).state == "succeeded"  # a job that is over stays as it is
        self.ended(submission)

    def test_a_stopped_job_stops(self, submitter: Submitter, submission: Submission) -> None:
        job = submitter.submit(submission)
        until(lambda: submitter.job(job.id).state == "running")
        submitter.stop(job.id)
        until(lambda: submitter.job(job.id).state in OVER)
        assert submitter.job(job.id).state == "stopped"
        self.stopped(submission)


__all__ = ["HOSTILE", "TRIALS", "SubmitterContract", "until"]
