"""What events of a study and its reading commands cost after so many trials: CPU milliseconds.

    .venv/bin/python benchmarks/growth.py [--finished 100 1000 4000 10000] [--repeats 5]

A study with the default sampler and early stopping is filled with made-up trials; then the driver pretends to train a few more,
with two measurements each and a live view. Printed are medians: a suggestion by the CPU time of the process, since another
thread may make it ahead, the other events by that of their thread, and commands in a process that has imported what they need.
`tests/test_growth.py` holds the same in bytecodes.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml
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

COMMANDS = {
    "show": ["show", "{study}"],
    "show --all": ["show", "{study}", "--all"],
    "report": ["report", "{study}", "--out", "{folder}/report.html"],
    "export": ["export", "{study}"],
    "ask": ["ask", "{study}", "--json"],
}
EVENTS = ("suggest", "report a measurement", "end")
Costs = dict[str, list[float]]


@contextmanager
def counted(costs: Costs, what: str, clock: Callable[[], float]) -> Iterator[None]:
    started = clock()
    yield
    costs[what].append(1e3 * (clock() - started))


def filled(path: Path, count: int) -> None:
    """Add finished trials to a study that has one, up to so many."""
    spec, numbers = read_study(path), random.Random(count)
    tables = Tables(spec.storage or "")
    tables.lock.acquire("growth")
    with tables.buffered("growth"):
        trials = Trials(tables, "growth", objectives=spec.objectives)
        first, setup = trials[0].facts.to_dict(), tables.setups("growth")[0]
        for number in range(1, count):
            batch, rate, seconds = (
                numbers.randint(16, 400),
                0.02 * 25 ** numbers.random(),
                numbers.uniform(1, 9),
            )
            facts = TrialFacts.of(
                first | {"train_s": seconds, "effective_batch": batch, "learning_rate": rate}
            )
            trials.begin({"effective_batch": batch, "reference_rate": rate, "rule": "sqrt"}, facts)
            score, attempt = numbers.uniform(0.1, 0.9), replace(setup, number=number)
            tables.start_attempt(attempt)
            for part in (1, 2):
                seen = setup.samples_budget * part // 2
                tables.add_measurement(attempt, Measurement(seen, seconds * part / 2, score * part / 2))
            tables.end_attempt(attempt, Outcome("complete"))
            trials.end(number, TrialResult("complete", facts, (seconds, score)))
        trials.commit()
    tables.lock.release("growth")
    tables.close()


class Pretending(SerialRunner):
    """Takes the time of what the driver does at the events of trials that nobody trains."""

    def __init__(self, devices: Any, repeats: int) -> None:
        super().__init__(devices)
        self.costs: Costs = defaultdict(list)
        self.repeats = repeats

    def run(self, study: StudyRun) -> None:
        for number in range(self.repeats + 2):
            if number == 2:
                self.costs.clear()  # the first read what there is, and import
            with counted(self.costs, "suggest", time.process_time):
                setup = study.next_attempt()
            assert setup is not None and setup != "wait"
            study.begun(setup.number)
            for part in (1, 2):
                with counted(self.costs, "report a measurement", time.thread_time):
                    study.report(
                        setup.number, Measurement(setup.samples_budget * part // 2, 1.0 * part, 0.5, {})
                    )
            with counted(self.costs, "end", time.thread_time):
                study.end(setup.number, Outcome("complete"))
                study.view()


def costs_after(folder: Path, count: int, repeats: int) -> Costs:
    path = folder / f"{count}.yaml"
    space = {
        "effective_batch": {"low": 16, "high": 400},
        "reference_rate": {"low": 0.02, "high": 0.5, "at_batch": 64},
        "rule": ["linear", "sqrt"],
        "epochs": 1,
    }
    study = {
        "study": "growth",
        "task": "bsearch.objectives.digits:Digits",
        "space": space,
        "training": {"evaluations": 2},
    }
    path.write_text(
        yaml.safe_dump({**study, "storage": f"sqlite:///{count}.db", "budget": {"trials": 1, "profile_s": 0}})
    )
    spec = read_study(path)
    code = task_code_hash(spec.task)
    assert not run_study(spec, SerialRunner(spec.devices), code).failure
    filled(path, count)
    spec = spec.changed({"budget": {"trials": count + repeats + 2}})
    runner = Pretending(spec.devices, repeats)
    assert not run_study(spec, runner, code).failure
    for what, arguments in COMMANDS.items():
        for number in range(repeats // 2 + 2):
            with counted(runner.costs, what, time.process_time):
                done = CliRunner().invoke(main, [one.format(study=path, folder=folder) for one in arguments])
            assert done.exit_code == 0, done.output
            if not number:
                runner.costs[what].clear()
    return runner.costs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--finished", type=int, nargs="+", default=[100, 1000, 4000, 10_000])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("finished".rjust(8), *(what.rjust(21) for what in (*EVENTS, *COMMANDS)))
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        for count in options.finished:
            costs = costs_after(Path(name), count, options.repeats)
            cells = (f"{median(costs[what]):.2f}".rjust(21) for what in (*EVENTS, *COMMANDS))
            print(f"{count:8d}", *cells, flush=True)
