"""Stages run in processes of their own: what they find is kept, however they end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from bsearch.cli import main
from bsearch.spaces.errors import StudyFileError
from bsearch.verify.report import Report, StageReport
from bsearch.verify.run import STAGES, Planned, chosen, run_stage
from bsearch.verify.stage import Stage
from click.testing import CliRunner

TESTS = str(Path(__file__).parent.parent)
TOLD: dict[str, Any] = {"device": "cpu", "seconds": 60, "quick": True, "serial": True}


def planned(name: str, **environment: str) -> Planned:
    variables = {"PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]), **environment}
    return Planned(name, f"verify_stages:{name}", "", 60, 60, environment=tuple(variables.items()))


def ran(stage: Planned, told: dict[str, Any] = TOLD, **rest: float) -> StageReport:
    report = StageReport(stage.name)
    run_stage(stage, told, report, **rest)
    return report


def test_a_stage_reports_its_claims_and_facts() -> None:
    report = ran(planned("well"))
    assert report.problem == ""
    assert [claim.verdict for claim in report.claims] == ["pass", "FAIL"]
    assert [fact.value for fact in report.facts] == ["cpu"]
    assert report.outcome == "1 of 2 claims pass"


@pytest.mark.parametrize(
    ("name", "problem"),
    [("raises", "ValueError: a wrong value (verify_stages.py:"), ("dies", "its process ended with code 7: what it said last")],
)
def test_what_a_stage_found_before_it_failed_is_kept(name: str, problem: str) -> None:
    report = ran(planned(name))
    assert report.problem.startswith(problem)
    assert [claim.text for claim in report.claims] == ["share"]


@pytest.mark.slow
def test_a_stage_that_hangs_is_killed_with_everything_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    report = ran(planned("hangs", CHILD_ID=str(child)), {**TOLD, "seconds": 5}, grace_s=10.0)
    assert report.problem == "killed after 15 s"
    assert len(report.claims) == 1
    until = time.monotonic() + 60
    while Path(f"/proc/{child.read_text()}/cmdline").exists() and Path(f"/proc/{child.read_text()}/cmdline").read_bytes():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_stages_are_chosen_by_device_and_by_name() -> None:
    assert {stage.name for stage in STAGES} - {stage.name for stage in chosen([], "cpu", quick=False)} == {
        stage.name for stage in STAGES if stage.only == "gpu"
    }
    assert [stage.name for stage in chosen(["loop", "machine", "loop"], "cpu", quick=True)] == ["loop", "machine"]
    smoke, *others = chosen([], "gpu", quick=False)
    assert (smoke.name, smoke.seconds, smoke.quick_s) == ("smoke", 30, 30)
    assert sum(stage.seconds for stage in others) <= 600
    assert sum(stage.quick_s for stage in others) <= 240
    with pytest.raises(StudyFileError, match=r"got 'memroy'\. Did you mean 'memory'"):
        chosen(["memroy", "loop"], "cpu", quick=True)


def test_time_that_is_left_is_never_negative() -> None:
    assert Stage("cpu", 0.0).left_s == 0.0
    assert Stage("cpu", 0.0).expired
    assert not Stage("cpu", 1e9).expired


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "report.txt"], "--out report.txt: expected a file that ends in .json or .md"),
        (["--stage", "speed"], "--stage: expected one of smoke, machine, memory"),
        (["--device", "gpu"], "torch can use no GPU"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["verify", *arguments])
    assert result.exit_code in (1, 2)
    assert message in result.output


@pytest.mark.slow
def test_this_machine_is_exact(tmp_path: Path) -> None:
    """Real stages through the command line: the table on the terminal, the report in a file."""
    out = tmp_path / "verified.md"
    # Without --quick it has the time that it needs beside other tests.
    arguments = ["verify", "--device", "cpu", "--stage", "machine", "--stage", "exactness", "--out", str(out)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    report = Report.read(out.read_text())
    assert report.holds
    assert len(report.claims) == 5
    assert f"{report.summary}" in result.output
    assert "gradients in uneven micro-batches" in result.output


@pytest.mark.long
def test_every_claim_that_is_no_matter_of_time_holds_here(tmp_path: Path) -> None:
    out = tmp_path / "verified.json"
    stages = [stage.name for stage in STAGES if stage.only is None and stage.name not in ("loop", "step-time")]
    arguments = ["verify", "--device", "cpu", "--quick", "--serial", "--out", str(out)]
    result = CliRunner().invoke(main, [*arguments, *(word for name in stages for word in ("--stage", name))])
    assert result.exit_code == 0, result.output
    assert len(Report.read(out.read_text()).claims) > 10
