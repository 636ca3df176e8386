"""Laws of several devices in one trial: ranks equal the one process, and no rank's end is silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.objectives.attempts import start_attempt
from bsearch.objectives.parallel.meeting import RankDiedError
from bsearch.objectives.parallel.rank_main import _picklable
from bsearch.objectives.parallel.rank_processes import RankProcesses
from bsearch.search.run.driver import StudyResult
from bsearch.search.store.tables import Tables
from bsearch.spaces.errors import TaskError
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.file import read_study
from bsearch.spaces.trial import Measurement, Outcome
from conftest import TASKS
from helpers import on, setup
from helpers import run as in_process
from rank_jobs import SPLITS, after_evaluation, buffers_of, evaluated, statistics, trained, who

# Starting ranks takes seconds.
pytestmark = pytest.mark.slow

WIDE = f"{TASKS}:WideNet"


@pytest.mark.parametrize("kind", ["samples", "weights", "ignored", "tokens"])
@pytest.mark.parametrize(("batch", "accumulation"), SPLITS)
def test_two_ranks_equal_one_process(ranks: RankProcesses, kind: str, batch: int, accumulation: int) -> None:
    parameters = {"kind": kind}
    (alone,) = trained(WIDE, on(1, batch, parameters=parameters), 5)
    (shared,) = ranks.run(trained, WIDE, on(2, batch, accumulation, parameters=parameters), 5)
    for one, other in zip(alone, shared, strict=True):
        assert float((one - other).norm()) <= 1e-12 * float(one.norm())


def test_clipping_and_parameters_that_are_never_used_change_nothing(ranks: RankProcesses) -> None:
    changes: dict[str, Any] = {"parameters": {"unused": True}, "training": {"clip_norm": 0.05}}
    (alone,) = trained(WIDE, on(1, 101, **changes), 5)
    (shared,) = ranks.run(trained, WIDE, on(2, 101, 3, **changes), 5)
    for one, other in zip(alone, shared, strict=True):
        assert float((one - other).norm()) <= 1e-12 * max(float(one.norm()), 1e-3)


def test_ranks_agree_on_running_statistics(ranks: RankProcesses) -> None:
    ((before, after),) = ranks.run(statistics, f"{TASKS}:NeedsTwo", on(2, 201, 3), 4)
    assert len(before) == 2
    assert before[0] != before[1]  # each saw its own samples
    assert after == pytest.approx([sum(pair) / 2 for pair in zip(*before, strict=True)], rel=1e-6)


@pytest.mark.parametrize("batch", [1, 64, 77, 301])
def test_evaluation_on_two_ranks_is_exact(ranks: RankProcesses, batch: int) -> None:
    (alone,) = evaluated(WIDE, on(1, 8), batch)
    (shared,) = ranks.run(evaluated, WIDE, on(2, 8), batch)
    assert shared == alone  # to the last bit: the same batches, their sums added exactly


def test_metrics_of_the_whole_set_are_merged_over_ranks(ranks: RankProcesses) -> None:
    (alone,) = evaluated(f"{TASKS}:Ranked", on(1, 8), None)
    (shared,) = ranks.run(evaluated, f"{TASKS}:Ranked", on(2, 8), 13)
    assert shared == pytest.approx(alone, rel=1e-6)


def test_buffers_that_the_forward_pass_moves_are_the_first_ranks_everywhere(ranks: RankProcesses) -> None:
    ((sums, apart),) = ranks.run(buffers_of, f"{TASKS}:Quantised", on(2, 20, 2, samples_budget=400))
    assert sums[0] != 0.0, "they do move"
    assert apart == [0.0, 0.0]


def test_evaluation_deals_its_batches_out(ranks: RankProcesses) -> None:
    (alone,) = evaluated(f"{TASKS}:Points", on(1, 8), None)
    (shared,) = ranks.run(evaluated, f"{TASKS}:Points", on(2, 8), None)
    assert shared["accuracy"] == alone["accuracy"]
    assert shared["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-6)


def test_ranks_evaluate_the_same_model_and_as_many_batches(ranks: RankProcesses) -> None:
    ((statistics, scored),) = ranks.run(after_evaluation, f"{TASKS}:NeedsTwo", on(2, 201, 3), 4)
    assert statistics[0] == statistics[1]
    assert scored == [1, 1]  # though one batch would hold all 101 samples


def ended(reports: Iterator[Measurement | Outcome]) -> tuple[list[Measurement], Outcome]:
    *measurements, outcome = reports
    assert isinstance(outcome, Outcome)
    return measurements, outcome  # type: ignore[return-value]


def attempt(
    name: str, devices: int = 2, batch: int = 50, budget: int = 400, **changes: Any
) -> Iterator[Measurement | Outcome]:
    made = setup(batch, budget=budget, **({"plan": BatchPlan(batch, 1, devices)} | changes))
    return start_attempt(f"{TASKS}:{name}", made)


def test_a_killed_rank_is_an_interruption_and_the_next_trial_gets_new_ones() -> None:
    begun = time.monotonic()
    _, outcome = ended(attempt("KillsARank", number=1))
    assert (outcome.kind, outcome.message) == (
        "interrupted",
        "rank 1 of 2 was killed by SIGKILL, which the system sends where memory runs out",
    )
    _, again = ended(attempt("KillsARank", number=1, attempt=1))
    assert again.kind == "complete"
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(("how", "kind"), [("memory", "out_of_memory"), ("code", "error")])
def test_what_fails_on_one_rank_ends_the_attempt_on_all(how: str, kind: str) -> None:
    _, outcome = ended(attempt("OneRankFails", parameters={"how": how}))
    assert outcome.kind == kind
    if how == "memory":
        assert outcome.micro_batch == 25
    else:
        assert "ValueError: rank 1 alone does not like this" in outcome.message
        assert "Traceback" in outcome.traceback


def test_a_diverged_trial_diverges_on_all_ranks() -> None:
    _, outcome = ended(attempt("Explodes", budget=4000, **{"optimizer": setup(rate=1e6).optimizer}))
    assert outcome.kind == "diverged"


def test_errors_of_a_job_come_through_in_words(ranks: RankProcesses) -> None:
    own = RankProcesses(2, "cpu", 1)
    with pytest.raises(TaskError, match="no such file"):
        list(own.run(trained, "/nowhere/tasks.py:X", on(2, 8), 1))
    assert not own.alive


def test_a_rank_killed_between_trials_is_told() -> None:
    own = RankProcesses(2, "cpu", 1)
    reports = own.run(who, 5)
    victim = next(reports)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RankDiedError, match="rank 0 of 2 was killed by SIGKILL"):
        list(reports)


def test_ranks_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from rank_jobs import who\n"
        "from bsearch.objectives.parallel.rank_processes import RankProcesses\n"
        "if __name__ == '__main__':\n"
        "    ranks = RankProcesses(2, 'cpu', 1)\n"
        "    print(next(ranks.run(who, 9)), *(p.pid for p in ranks._processes), flush=True)\n"
        "    input()\n"
    )
    script = tmp_path / "starts_ranks.py"
    script.write_text(code)
    tests = str(Path(__file__).parent.parent)
    driver = subprocess.Popen(
        [sys.executable, str(script), tests], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pids = list(map(int, driver.stdout.readline().split()))
    driver.kill()
    driver.communicate()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def run(study_file: Callable[..., Path], **changes: Any) -> tuple[StudyResult, Tables]:
    space = {
        "effective_batch": {"low": 3, "high": 101},
        "reference_rate": {"low": 0.05, "high": 0.5},
        "epochs": 2,
    }
    path = study_file(**({"space": space, "devices": {"per_trial": 2, "kind": "cpu"}} | changes))
    spec = read_study(path)
    assert spec.storage is not None
    return in_process(path), Tables(spec.storage)


def test_a_study_of_two_device_trials_loses_nothing_to_a_killed_rank(study_file: Callable[..., Path]) -> None:
    result, tables = run(study_file, task=f"{TASKS}:KillsARank", budget={"trials": 4})
    assert [record.outcome for record in result.study.records] == ["complete"] * 4
    assert [record.facts.attempts for record in result.study.records] == [1, 2, 1, 1]
    assert [row.outcome for row in tables.attempts("small", 1)] == ["interrupted", "complete"]
    assert all(
        record.facts.devices == 2 and record.facts.samples_budget == 800 for record in result.study.records
    )


def test_the_number_of_devices_is_searched_and_many_are_not_free(study_file: Callable[..., Path]) -> None:
    result, _ = run(
        study_file,
        task=f"{TASKS}:Points",
        devices={"per_trial": [1, 2], "kind": "cpu"},
        objectives={"speed": "device_s"},
        baseline=[{"effective_batch": 50, "reference_rate": 0.1, "devices": d} for d in (1, 2)],
        budget={"trials": 4, "profile_s": 0.5},
    )
    one, two = result.study.records[:2]
    assert (one.facts.devices, two.facts.devices) == (1, 2)
    assert one.parameters["devices"] == 1
    for record in result.study.records:
        assert record.facts.device_s == pytest.approx(record.facts.train_s * record.facts.devices)
        assert record.facts.train_s_source == "known"
    assert result.study.front.speed == "device_s"


def test_memory_that_ends_in_a_rank_is_no_fault_of_the_task() -> None:
    for text in (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "Cuda failure 2 'out of memory'",
    ):
        assert isinstance(_picklable(RuntimeError(text)), torch.OutOfMemoryError)
    assert isinstance(_picklable(RuntimeError("another")), TaskError)
