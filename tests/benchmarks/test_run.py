"""Stages run in processes of their own: what they find is kept, however they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bsearch.benchmarks.verify.__main__ import PROGRAM, program
from bsearch.benchmarks.verify.claims import Fact
from bsearch.benchmarks.verify.machine import report_here
from bsearch.benchmarks.verify.report import Report, StageReport
from bsearch.benchmarks.verify.run import STAGES, Planned, chosen, run_stage, verify
from bsearch.benchmarks.verify.stage import Stage
from bsearch.spaces.boundary import files
from bsearch.spaces.errors import StudyFileError
from click.testing import CliRunner
from fake_gpu.test_gpus import UNLIKE_LINUX

TESTS = str(Path(__file__).parent)
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
    [
        ("raises", "ValueError: a wrong value (verify_stages.py:"),
        ("dies", "its process ended with code 7: what it said last"),
    ],
)
def test_what_a_stage_found_before_it_failed_is_kept(name: str, problem: str) -> None:
    report = ran(planned(name))
    assert report.problem.startswith(problem)
    assert [claim.text for claim in report.claims] == ["share"]


def test_what_a_stage_measured_before_it_died_is_kept_with_what_follows() -> None:
    report = ran(planned("measures"))
    assert report.problem == "its process ended with code 7: it printed nothing"
    assert [data.case for data in report.data] == ["a net"]
    assert [claim.measured for claim in report.claims] == [pytest.approx(0.25)]


def test_a_run_that_is_interrupted_keeps_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes once the stage has found something."""
    honest = subprocess.Popen.wait

    def wait(process: Any, timeout: float | None = None) -> int:
        if timeout is None:
            return honest(process)
        path = Path(process.args[-1])
        until = time.monotonic() + 60
        while not (path.exists() and "Claim" in path.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        raise KeyboardInterrupt

    stage = planned("waits")
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    monkeypatch.setattr("bsearch.benchmarks.verify.run.STAGES", (stage,))
    report, told = Report("cpu", "", "", ""), []
    with pytest.raises(KeyboardInterrupt):
        verify(report, on_stage=lambda planned, stage: told.append(stage))
    assert told == [None, *report.stages]
    assert report.stages[0].problem == "interrupted"
    assert [claim.text for claim in report.claims] == ["share"]


def test_after_a_failed_smoke_only_named_stages_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = (replace(planned("raises"), name="smoke"), planned("well"))
    monkeypatch.setattr("bsearch.benchmarks.verify.run.STAGES", stages)
    for names, ran_names in ([], ["smoke"]), (["smoke", "well"], ["smoke", "well"]):
        report = Report("cpu", "", "", "")
        verify(report, names)
        assert [stage.stage for stage in report.stages] == ran_names
        assert report.verdict.startswith("This machine does not work with bsearch: ValueError: a wrong value")


def test_the_report_is_written_after_every_stage_and_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bsearch.benchmarks.verify.run.STAGES", (planned("well"), planned("dies")))
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("CUDA_API_KEY", "hidden")
    monkeypatch.setattr("bsearch.benchmarks.verify.machine.load_average", lambda: 99.0)
    written: list[list[str]] = []
    honest = files.write_file

    def write_file(path: Path, content: str) -> Path:
        written.append([stage.stage for stage in Report.read(content).stages])
        return honest(path, content)

    monkeypatch.setattr("bsearch.benchmarks.verify.__main__.write_file", write_file)
    result = CliRunner().invoke(program, [PROGRAM, "--device", "cpu"])
    assert result.exit_code == 1
    assert written == [[], ["well"], ["well", "dies"]]
    (path,) = tmp_path.glob("bsearch-verify-*.md")
    assert f"Written to {path.name}: attach it to an issue" in result.output
    assert result.output.startswith("Other programs may disturb timing: a load of 99.0 on ")
    text = path.read_text()
    assert "NCCL_DEBUG=WARN" in text
    assert "hidden" not in text
    assert "`````text\nwhat it said last\n`````" in text


NVIDIA_SMI = """#!/bin/sh
case "$1" in
*compute-apps*) echo "GPU-1, 1234, 2048";;
*throttle*) exit 1;;
*clocks*) echo "1980, 2619, 41, 120.5";;
*compute_mode*) echo "Default, Enabled";;
*) exit 1;;
esac
"""


def test_what_the_driver_says_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("bsearch.benchmarks.verify.machine.load_average", lambda: None)
    report = report_here("gpu", "a card")
    facts = {fact.name: fact.value for fact in report.machine}
    assert facts["compute mode, persistence"] == "Default, Enabled"
    assert facts["neighbours on the GPUs"] == "1 other process, 2.00 GiB"
    assert report.busy == "Other programs may disturb timing: 1 other process on the GPUs with 2.00 GiB."
    stage = ran(planned("well"), {**TOLD, "device": "gpu"})
    before_and_after = "1980, 2619, 41, 120.5 before; 1980, 2619, 41, 120.5 after"
    assert stage.facts[-1] == Fact("clocks (MHz), temperature, power, throttling", before_and_after)


@pytest.mark.slow
@pytest.mark.long
def test_stages_run_without_what_linux_alone_has(tmp_path: Path) -> None:
    """In every process: the command's, each stage's, and those that a stage starts."""
    site = tmp_path / "sitecustomize.py"
    site.write_text(UNLIKE_LINUX.partition("from bsearch")[0])
    places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    stages = ["--stage", "smoke", "--stage", "machine"]
    done = subprocess.run(
        [sys.executable, "-m", "bsearch.benchmarks.verify", "--device", "cpu", "--out", "found.md", *stages],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "This machine works with bsearch." in done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_a_stage_that_hangs_is_killed_with_everything_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    report = ran(planned("hangs", CHILD_ID=str(child)), {**TOLD, "seconds": 5}, grace_s=10.0)
    assert report.problem == "killed after 15 s"
    assert len(report.claims) == 1
    until = time.monotonic() + 60
    while (
        Path(f"/proc/{child.read_text()}/cmdline").exists()
        and Path(f"/proc/{child.read_text()}/cmdline").read_bytes()
    ):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_stages_are_chosen_by_device_and_by_name() -> None:
    assert {stage.name for stage in STAGES} - {stage.name for stage in chosen([], "cpu", quick=False)} == {
        stage.name for stage in STAGES if stage.only == "gpu" or stage.named
    }
    assert all(stage.seconds <= 540 for stage in STAGES if stage.named)
    assert [stage.name for stage in chosen(["loop", "machine", "loop"], "cpu", quick=True)] == [
        "loop",
        "machine",
    ]
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
    result = CliRunner().invoke(program, [PROGRAM, *arguments])
    assert result.exit_code in (1, 2)
    assert message in result.output


@pytest.mark.long
@pytest.mark.slow
def test_this_machine_is_exact(tmp_path: Path) -> None:
    """Real stages through the command line: the table on the terminal, the report in a file."""
    out = tmp_path / "verified.md"
    # Without --quick it has the time that it needs beside other tests.
    arguments = [PROGRAM, "--device", "cpu", "--stage", "machine", "--stage", "exactness", "--out", str(out)]
    result = CliRunner().invoke(program, arguments)
    assert result.exit_code == 0, result.output
    report = Report.read(out.read_text())
    assert report.holds
    assert len(report.claims) == 5
    assert f"{report.summary}" in result.output
    assert "gradients in uneven micro-batches" in result.output


@pytest.mark.long
def test_every_claim_that_is_no_matter_of_time_holds_here(tmp_path: Path) -> None:
    out = tmp_path / "verified.json"
    stages = [
        stage.name for stage in STAGES if stage.only is None and stage.name not in ("loop", "step-time")
    ]
    arguments = [PROGRAM, "--device", "cpu", "--quick", "--serial", "--out", str(out)]
    result = CliRunner().invoke(
        program, [*arguments, *(word for name in stages for word in ("--stage", name))]
    )
    assert result.exit_code == 0, result.output
    assert len(Report.read(out.read_text()).claims) > 10
