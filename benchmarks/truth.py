"""How often the intervals of a study's front hold, and how optimistic its accuracies are: members trained again with new seeds.

python benchmarks/truth.py simulate --problems digits cifar lcbench --out truth.json  # studies of tables, whose truth is known
python benchmarks/truth.py run benchmarks/truth/gpt.yaml --studies 10 --out gpt.json  # studies, and their members' re-runs
python benchmarks/truth.py table digits.json cifar10.json gpt.json            # what holds, by today's code

A mean of five re-runs has an error of its own, which the intervals do not count: the second share allows for it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bsearch.objectives.attempts import start_attempt
from bsearch.objectives.task_code import task_code_hash
from bsearch.search.analysis.confirm import next_repeat
from bsearch.search.analysis.pareto import study_front
from bsearch.search.run.driver import run_study
from bsearch.search.run.serial import SerialRunner
from bsearch.search.suggest.ask_tell import Search
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.file import changed_study, read_study
from bsearch.spaces.study.goals import Objectives
from bsearch.spaces.trial import Measurement, TrialSetup
from problems import Problem, Table, problems
from rich.console import Console
from rich.table import Table as Shown

_NORMAL_90 = 1.645


def studies(path: Path, count: int, seeds: int) -> Iterator[dict[str, Any]]:
    """Run the study with `count` seeds; then each front member with `seeds` seeds that its study has not used."""
    for seed in range(count):
        with tempfile.TemporaryDirectory() as folder:
            spec = read_study(path, storage=f"sqlite:///{folder}/truth.db")
            spec = changed_study(spec, {"training": {"seed": 1000 * seed}, "cluster": {"checkpoints": None}})
            started = time.monotonic()
            study = run_study(spec, nullcontext(SerialRunner(spec.devices)), task_code_hash(spec.task)).study
            fresh = []
            for member in study.front.trials:
                setup = study.setup_of(member)
                for number in range(seeds):
                    training = setup.training.model_copy(update={"seed": 1000 * seed + 500 + number})
                    fresh.append((member.number, _score(spec.task, replace(setup, training=training))))
            print(
                f"study {seed}: {len(study.front.trials)} members, {time.monotonic() - started:.0f} s",
                flush=True,
            )
            yield {
                "objectives": spec.objectives.model_dump(mode="json"),
                "records": [_record(one) for one in study.records],
                "fresh": fresh,
            }


def simulated(families: Sequence[str], count: int, trials: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Studies of problems that cost nothing, with `confirm: {repeats}`; the truth of a setting is the mean of all its runs.

    A table has three runs of a setting: first runs are all of one seed, repeats are any of the three. LCBench's runs vary by a
    standard deviation that falls with the seconds, a third of whose variance all first runs of a task share.
    """
    for family in families:
        members = problems(family)
        for number in range(count):
            problem, rng = members[number % len(members)], np.random.default_rng((7, number))
            one_run = _runs_of(problem, number, rng)
            search = Search(problem.domains(), stopping="none", known_seconds=problem.seconds, seed=number)
            for _ in range(trials):
                asked = search.ask()
                search.tell(asked.number, problem.seconds(asked.parameters), one_run(asked.parameters, True))
            records, objectives = search.records(), search.objectives
            while True:
                members_now = [trial.number for trial in study_front(records, objectives).trials]
                if (setting := next_repeat(records, objectives, repeats, {}, members_now)) is None:
                    break
                first = records[setting]
                values = first.train_s, one_run(first.parameters, False)
                records.append(
                    TrialRecord.of(
                        len(records),
                        "complete",
                        first.parameters,
                        TrialFacts(train_s=first.train_s, repeats=setting),
                        values,  # type: ignore[arg-type]
                    )
                )
            truth = [(place, problem.accuracy(records[place].parameters)) for place in members_now]
            yield {
                "kind": family,
                "objectives": objectives.model_dump(mode="json"),
                "records": [_record(one) for one in records],
                "fresh": [pair for pair in truth for _ in range(2)],
            }


def _runs_of(
    problem: Problem, study: int, rng: np.random.Generator
) -> Callable[[Mapping[str, Any], bool], float]:
    """One run of a setting: the first, or a repeat."""
    if isinstance(problem, Table):

        def drawn(parameters: Mapping[str, Any], first: bool) -> float:
            curves = problem.curves[problem._nearest(parameters)]
            return curves[(study if first else int(rng.integers(len(curves)))) % len(curves)][-1]

        return drawn
    slowest, shared = problem.mean_seconds(), rng.standard_normal()

    def noisy(parameters: Mapping[str, Any], first: bool) -> float:
        std = 0.01 * (slowest / problem.seconds(parameters)) ** 0.5
        own = rng.standard_normal()
        return problem.accuracy(parameters) + std * (
            math.sqrt(1 / 3) * shared + math.sqrt(2 / 3) * own if first else own
        )

    return noisy


def _score(task: str, setup: TrialSetup) -> float:
    with closing(start_attempt(task, setup)) as reports:
        last = [one for one in reports if isinstance(one, Measurement)][-1]
    return last.value(setup.metric)


def _record(one: TrialRecord) -> dict[str, Any]:
    values = {name: getattr(one, name) for name in ("number", "outcome", "train_s", "accuracy")}
    return values | {"parameters": dict(one.parameters), "facts": one.facts.to_dict()}


def table(runs: list[dict[str, Any]]) -> None:
    """Coverage of the 90 % intervals by the mean of the re-runs, and the bias of the front's accuracies, in thirds by time."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        objectives = Objectives.model_validate(run["objectives"])
        records = [TrialRecord(**{**one, "facts": TrialFacts.of(one["facts"])}) for one in run["records"]]
        front, sign = study_front(records, objectives), 1 if objectives.metric.direction == "maximize" else -1
        fresh: dict[int, list[float]] = {}
        for number, score in run["fresh"]:
            fresh.setdefault(number, []).append(score)
        for place, member in enumerate(front.trials):
            scores = [score for score in fresh.get(member.number, []) if math.isfinite(score)]
            if len(scores) < 2 or member.interval is None or member.accuracy is None:
                continue
            mean = statistics.fmean(scores)
            # The truth of a table is no mean of a few runs.
            error = 0.0 if "kind" in run else statistics.stdev(scores) / math.sqrt(len(scores))
            low, high = member.interval
            rows.append(
                {
                    "third": min(3 * place // len(front.trials), 2),
                    "inside": low <= mean <= high,
                    "allowed": abs(member.accuracy - mean)
                    <= math.hypot((high - low) / 2, _NORMAL_90 * error),
                    "bias": sign * (member.accuracy - mean),
                    "half": member.half_interval,
                    "spread": statistics.stdev(scores),
                    "runs": member.facts.runs or 1,
                }
            )
    named = [("fast third", [0]), ("middle", [1]), ("slow third", [2]), ("all", [0, 1, 2])]
    shown = Shown(box=None)
    for name in (
        "members",
        "n",
        "inside 90 %",
        "with their error",
        "bias",
        "+/- (median)",
        "spread of a run",
        "runs",
    ):
        shown.add_column(name, justify="right")
    for name, thirds in named:
        some = [row for row in rows if row["third"] in thirds]
        if some:
            shown.add_row(
                name,
                str(len(some)),
                f"{100 * statistics.fmean(row['inside'] for row in some):.0f} %",
                f"{100 * statistics.fmean(row['allowed'] for row in some):.0f} %",
                f"{statistics.fmean(row['bias'] for row in some):+.4f}",
                f"{statistics.median(row['half'] for row in some):.4f}",
                f"{statistics.median(row['spread'] for row in some):.4f}",
                f"{statistics.fmean(row['runs'] for row in some):.1f}",
            )
    Console().print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("study", type=Path)
    run.add_argument("--studies", type=int, default=10)
    run.add_argument("--seeds", type=int, default=5)
    run.add_argument("--out", type=Path, default=Path("truth.json"))
    simulate = commands.add_parser("simulate")
    simulate.add_argument("--problems", nargs="+", default=["digits", "cifar", "lcbench"])
    simulate.add_argument("--studies", type=int, default=12)
    simulate.add_argument("--trials", type=int, default=30)
    simulate.add_argument("--repeats", type=int, default=4)
    simulate.add_argument("--out", type=Path, default=Path("truth.json"))
    shown = commands.add_parser("table")
    shown.add_argument("runs", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        runs = []
        for one in studies(arguments.study, arguments.studies, arguments.seeds):
            runs.append(one)
            arguments.out.write_text(json.dumps(runs))
        table(runs)
    elif arguments.command == "simulate":
        runs = list(simulated(arguments.problems, arguments.studies, arguments.trials, arguments.repeats))
        arguments.out.write_text(json.dumps(runs))
        table(runs)
    else:
        each = {path.stem: json.loads(path.read_text()) for path in arguments.runs}
        for name, runs in each.items():
            print(name)
            table(runs)
        if len(each) > 1:
            print("all")
            table([run for runs in each.values() for run in runs])


if __name__ == "__main__":
    main()
