"""Tables of runs: what is read from them, and that every fault is named with its line and column."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from bsearch.cli import main
from bsearch.search.laws.runs_table import RunsToTarget, read_runs
from bsearch.spaces.errors import StudyFileError
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

HEADER = "effective_batch,to_target\n"
GOOD = HEADER + "32,10\n64,11\n128,15\n"
REACH = "Leave out runs that did not reach the target"


def test_single_runs_of_a_batch_are_one_point_and_blank_lines_are_none(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text("\n Effort, batch , samples,round\n\n1,32,10,a\n2,32.0,12,a\n,64,7 8 9,b\n,,,\n")
    found = [(point.effective_batch, point.samples, point.group) for point in read_runs(table)[""]]
    assert sorted(found) == [(32, (10.0, 12.0), "a"), (64, (7.0, 8.0, 9.0), "b")]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ["1: expected a column effective_batch", "1: expected a column to_target", "got an empty file"]),
        (HEADER, ["expected rows below the header, got none"]),
        (
            "batch,accuracy\n8,.9\n",
            ["1: expected a column to_target", "not the metric itself; got batch"],
        ),
        ("batch;samples\n8;100\n", ["got batch;samples. Separate columns by commas."]),
        ("effective_batch,to_target,to_target\n8,1,2\n", ["1: expected one column to_target, got to_target, to_target"]),
        ("batch,batch_size,samples\n8,4,1\n", ["1: expected one column effective_batch, got batch, batch_size. Rename"]),
        (HEADER + "8,10,11\n", ["2: expected 2 cells, got 3. Separate several runs by spaces"]),
        (HEADER + "8,\n\n16,12 nan\n32\n", [f"{line}: to_target: expected numbers > 0" for line in (2, 4, 5)] + [REACH]),
        (HEADER + "8,inf\n16,0\n32,-1\n64,1e400\n", [f"{line}: to_target: expected numbers > 0" for line in range(2, 6)]),
        (HEADER + '8,"1,000"\n16,5k\n', ["got '1,000'. Write a number as 12000", "got '5k'"]),
        (
            HEADER + "2.5,x\n0,1\n,1\n",
            ["2: effective_batch: expected an integer >= 1", "2: to_target", "3: eff"],
        ),
        (HEADER + '8,"10\n16,11\n', ["3: expected a CSV table: unexpected end of data"]),
        (HEADER + "8,100\n9,100\n8,120\n", ["runs at 3 or more batches, got only 8, 9. Measure more batches."]),
        ("workload,batch,samples\na,8,1\n,8,1\n", ["got only a: 8; no workload: 8"]),
    ],
)
def test_a_table_is_refused_with_all_its_faults(tmp_path: Path, text: str, told: list[str]) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(text)
    done = CliRunner().invoke(main, ["fit-batch", str(table)])
    assert done.exit_code == 2
    assert all(part in done.stderr for part in told), done.stderr
    assert all(line.startswith(str(table)) for line in done.stderr.splitlines())


def test_the_name_to_write_decides_between_columns(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text("batch,effective_batch,to_target\n4,8,1\n")
    assert read_runs(table)[""][0].effective_batch == 8


@given(st.text(st.characters(codec="utf-8"), max_size=12), st.text("0123456789.eE+-_ninfa ", max_size=12))
def test_any_cell_is_a_number_above_0_or_a_fault(tmp_path_factory: pytest.TempPathFactory, batch: str, runs: str) -> None:
    table = tmp_path_factory.getbasetemp() / "any.csv"
    table.write_bytes(f"{HEADER}{batch},{runs}\n".encode())
    try:
        points = read_runs(table)[""]
    except StudyFileError as error:
        assert str(table) in str(error)
    else:
        assert all(point.effective_batch >= 1 for point in points)
        assert all(0 < run < math.inf for point in points for run in point.samples)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["runs.csv", "--target", "0.9"], "expected a study with --target, got a table"),
        (["runs.csv", "--name", "x"], "expected a study with --name, got a table"),
        (["study.yaml", "--workload", "x"], "expected a table with --workload, got a study"),
        (["runs.csv", "--workload", "x"], "--workload: expected no value, since the table names no workloads; got 'x'"),
    ],
)
def test_an_option_of_the_other_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs.csv").write_text(GOOD)
    done = CliRunner().invoke(main, ["fit-batch", *arguments])
    assert done.exit_code == 2
    assert told in done.stderr


def test_what_the_law_cannot_follow_is_said(tmp_path: Path) -> None:
    table = tmp_path / "RUNS.CSV"
    table.write_text(GOOD)
    assert "Far from the law" not in CliRunner().invoke(main, ["fit-batch", str(table)]).stdout
    table.write_text(HEADER + "32,4000\n64,1100\n128,1000\n256,1000\n512,900\n")
    assert "Far from the law are the medians at batch 32 (" in CliRunner().invoke(main, ["fit-batch", str(table)]).stdout


@given(st.lists(st.floats(1, 1e6), min_size=2, max_size=8), st.integers(0, 7))
def test_runs_that_never_reached_the_target_are_slower_than_all_others(samples: list[float], never: int) -> None:
    if never < len(samples):
        found = RunsToTarget(8, tuple(samples), never=never).median
        assert found == pytest.approx(float(np.median([*samples, *[1e9] * never])))
