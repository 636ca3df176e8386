"""What an event of a study costs does not grow with its trials, and what reads them all grows no faster than they do.

Counted in bytecodes, which no other program changes. NumPy's own loops are not among them.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bsearch.cli import main
from bsearch.objectives.task_code import task_code_hash
from bsearch.search.run.driver import run_study
from bsearch.search.run.serial import SerialRunner
from bsearch.search.run.study_run import StudyRun
from bsearch.search.store.tables import Tables
from bsearch.search.store.trials import Trials
from bsearch.spaces.record import TrialFacts, TrialResult
from bsearch.spaces.study.file import read_study
from bsearch.spaces.trial import Measurement, Outcome
from click.testing import CliRunner
from conftest import TASKS
from helpers import run


@contextmanager
def bytecodes(counted: Counter[str], what: str) -> Iterator[None]:
    """Count the bytecodes of this thread, and of threads that it starts."""

    def trace(frame: Any, event: str, argument: object) -> Callable[..., Any]:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        counted[what] += event == "opcode"
        return trace

    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]


def filled(path: Path, count: int) -> str:
    """Add so many finished trials to a study that was run before; returns its database."""
    spec, dice = read_study(path), random.Random(count)
    assert spec.storage is not None
    tables = Tables(spec.storage)
    tables.lock.acquire("small")
    with tables.buffered("small"):
        trials = Trials(tables, "small", objectives=spec.objectives)
        start, setup = trials[0].facts.to_dict(), tables.setups("small")[0]
        for number in range(1, count):
            batch, rate, seconds = dice.randint(16, 400), 0.02 * 25 ** dice.random(), dice.uniform(1, 9)
            trials.begin(
                {"effective_batch": batch, "reference_rate": rate, "rule": "sqrt"},
                TrialFacts.of(start | {"train_s": seconds}),
            )
            score, attempt = dice.uniform(0.1, 0.9), replace(setup, number=number)
            tables.start_attempt(attempt)
            for part in (1, 2):  # early stopping compares with the curves of all that have finished
                seen = setup.samples_budget * part // 2
                tables.add_measurement(attempt, Measurement(seen, seconds * part / 2, score * part / 2))
            tables.end_attempt(attempt, Outcome("complete"))
            values = (seconds, score)
            trials.end(number, TrialResult("complete", TrialFacts.of(start | {"train_s": seconds}), values))
        trials.commit()
    tables.lock.release("small")
    tables.close()
    return spec.storage


class Counting(SerialRunner):
    """Pretends to train one trial, and counts what the driver does at each of its events."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.counted: Counter[str] = Counter()

    def run(self, study: StudyRun) -> None:
        for _ in range(2):  # the first reads what there is
            self._train(study)

    def _train(self, study: StudyRun) -> None:
        self.counted.clear()
        with bytecodes(self.counted, "suggest"):
            setup = study.next_attempt()
        assert setup not in (None, "wait")
        study.begun(setup.number)
        for part in (1, 2):
            with bytecodes(self.counted, "report"):
                study.report(setup.number, Measurement(setup.samples_budget * part // 2, 1.0 * part, 0.5, {}))
        with bytecodes(self.counted, "end"):
            study.end(setup.number, Outcome("complete"))
            study.view()


def study_of(study_file: Callable[..., Path], count: int, **changes: Any) -> Path:
    """A study with so many finished trials."""
    path = study_file(
        task=f"{TASKS}:Points", storage=f"sqlite:///growth-{count}.db", budget={"trials": 1}, **changes
    )
    assert not run(path).failure
    filled(path, count)
    return path


@pytest.mark.slow
@pytest.mark.long
def test_what_an_event_costs_does_not_grow(study_file: Callable[..., Path]) -> None:
    counts = {}
    for count in (320, 960):
        spec = read_study(study_of(study_file, count)).changed({"budget": {"trials": count + 2}})
        runner = Counting(spec.devices)
        assert not run_study(spec, runner, task_code_hash(spec.task)).failure
        counts[count] = runner.counted
    assert counts[320].keys() == {"suggest", "report", "end"}
    assert {what: counts[960][what] < 1.15 * each for what, each in counts[320].items()} == dict.fromkeys(
        counts[320], True
    )


READS = {
    "show": ["show", "{study}"],
    "show --all": ["show", "{study}", "--all"],
    "export": ["export", "{study}"],
    "report": ["report", "{study}", "--out", "{folder}/report.html"],
    "ask": ["ask", "{study}", "--json"],
}


@pytest.mark.slow
@pytest.mark.long
def test_what_reads_all_trials_grows_no_faster_than_they_do(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    counts = {}
    for count in (10, 60, 240):  # the first imports
        path, counts[count] = study_of(study_file, count), Counter[str]()
        for what, arguments in READS.items():
            with bytecodes(counts[count], what):
                done = CliRunner().invoke(
                    main, [one.format(study=path, folder=tmp_path) for one in arguments]
                )
            assert done.exit_code == 0, done.output
    assert {what: counts[240][what] < 4.4 * each for what, each in counts[60].items()} == dict.fromkeys(
        READS, True
    )
