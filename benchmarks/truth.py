"""How often the intervals of a study's front hold, and how optimistic its accuracies are: members trained again with new seeds.

python benchmarks/truth.py run STUDY.yaml --studies 10 --seeds 5 --out truth.json     # studies, and their members' re-runs
python benchmarks/truth.py table truth.json                                           # what holds, by today's code
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from bsearch.objectives.task_code import task_code_hash
from bsearch.objectives.trial import start_attempt
from bsearch.search.analysis.pareto import study_front
from bsearch.search.run.driver import run_study
from bsearch.search.run.serial import SerialRunner
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.file import changed_study, read_study
from bsearch.spaces.study.goals import Objectives
from bsearch.spaces.trial import Measurement, TrialSetup
from rich.console import Console
from rich.table import Table


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
            print(f"study {seed}: {len(study.front.trials)} members, {time.monotonic() - started:.0f} s", flush=True)
            yield {
                "objectives": spec.objectives.model_dump(mode="json"),
                "records": [_record(one) for one in study.records],
                "fresh": fresh,
            }


def _score(task: str, setup: TrialSetup) -> float:
    with closing(start_attempt(task, setup)) as reports:
        last = [one for one in reports if isinstance(one, Measurement)][-1]
    return last.score(setup.metric)


def _record(one: TrialRecord) -> dict[str, Any]:
    values = {name: getattr(one, name) for name in ("number", "outcome", "train_s", "accuracy")}
    return values | {"parameters": dict(one.parameters), "facts": one.facts.to_dict()}


def table(runs: list[dict[str, Any]]) -> None:
    """Coverage of the 90 % intervals by the mean of the re-runs, and the bias of the front's accuracies, in thirds by time."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        objectives = Objectives.model_validate(run["objectives"])
        records = [TrialRecord(**{**one, "facts": TrialFacts.of(one["facts"])}) for one in run["records"]]
        front, sign = study_front(records, objectives), objectives.metric.sign
        fresh: dict[int, list[float]] = {}
        for number, score in run["fresh"]:
            fresh.setdefault(number, []).append(score)
        for place, member in enumerate(front.trials):
            scores = [score for score in fresh.get(member.number, []) if math.isfinite(score)]
            if len(scores) < 2 or member.interval is None or member.accuracy is None:
                continue
            mean = statistics.fmean(scores)
            low, high = member.interval
            rows.append(
                {
                    "third": min(3 * place // len(front.trials), 2),
                    "inside": low <= mean <= high,
                    "bias": sign * (member.accuracy - mean),
                    "half": member.half_interval,
                    "spread": statistics.stdev(scores),
                    "runs": member.facts.runs or 1,
                }
            )
    named = [("fast third", [0]), ("middle", [1]), ("slow third", [2]), ("all", [0, 1, 2])]
    shown = Table(box=None)
    for name in ("members", "n", "inside 90 %", "bias", "+/- (median)", "spread of a run", "runs"):
        shown.add_column(name, justify="right")
    for name, thirds in named:
        some = [row for row in rows if row["third"] in thirds]
        if some:
            shown.add_row(
                name,
                str(len(some)),
                f"{100 * statistics.fmean(row['inside'] for row in some):.0f} %",
                f"{statistics.fmean(row['bias'] for row in some):+.4f}",
                f"{statistics.median(row['half'] for row in some):.4f}",
                f"{statistics.median(row['spread'] for row in some):.4f}",
                f"{statistics.fmean(row['runs'] for row in some):.1f}",
            )
    Console().print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("study", type=Path)
    run.add_argument("--studies", type=int, default=10)
    run.add_argument("--seeds", type=int, default=5)
    run.add_argument("--out", type=Path, default=Path("truth.json"))
    shown = commands.add_parser("table")
    shown.add_argument("runs", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        runs = []
        for one in studies(arguments.study, arguments.studies, arguments.seeds):
            runs.append(one)
            arguments.out.write_text(json.dumps(runs))
        table(runs)
    else:
        table(json.loads(arguments.runs.read_text()))


if __name__ == "__main__":
    main()
