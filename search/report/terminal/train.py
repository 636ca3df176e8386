"""What `bsearch train` prints: what it is about to train, its progress, and the trained model's scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ....spaces.readable import from_here, number, seconds
from ....spaces.record import TrialRecord
from ....spaces.trial import Measurement
from ...run.train import mean_interval
from ...run.training import Training
from ...store.stored import StoredStudy, codes
from .forecast import START_S


def opening_lines(
    study: StoredStudy, record: TrialRecord, reason: str, trainings: Sequence[Training], task_hash: str
) -> Iterator[str]:
    """What is about to be trained, and what differs from the trial."""
    setup = trainings[0].setup.as_trained(record.facts.samples_budget, record.facts.epochs)
    seeds = ", ".join(str(training.setup.seed) for training in trainings)
    longer = setup.samples_budget / (record.facts.samples_budget or setup.samples_budget)
    each = " each" * (len(trainings) > 1)
    known = (
        ""
        if record.train_s is None
        else f"; trains for about {seconds(record.train_s * longer)}{each}, after about {START_S} s"
    )
    yield (
        f"{study.name}, trial {record.number} ({reason}): effective batch {setup.effective_batch}, learning rate "
        f"{number(setup.learning_rate)}, {number(float(setup.epochs))} epochs, seed{'s' * (len(trainings) > 1)} {seeds}{known}"
    )
    if task_hash not in codes(study.identity):
        yield "note: the task's code has changed since the study; its results may differ"


def progress_line(training: Training, measurement: Measurement) -> str:
    """One evaluation of one training."""
    setup = training.setup
    share = f"{setup.share_of(measurement):.0%}".replace("%", " %")
    score = number(measurement.value(setup.metric))
    return f"seed {setup.seed}  {share:>5}  {setup.metric} {score}  {seconds(measurement.elapsed_s)}"


def result_lines(record: TrialRecord, trainings: Sequence[Training]) -> Iterator[str]:
    """How the trainings ended: scores beside those of the study, and files."""
    for training in trainings:
        setup, outcome = training.setup, training.outcome
        if not training.complete:
            why = "" if outcome is None else f"{outcome.kind.replace('_', ' ')}: {outcome.message}"
            yield f"seed {setup.seed}: {why}"
            continue
        tests = "".join(f", {name} {number(value)}" for name, value in training.tests.items())
        yield f"seed {setup.seed}: {setup.metric} {number(training.score)}{tests}"
    done = [training for training in trainings if training.complete]
    if done:
        metric, longer = done[0].setup.metric, done[0].setup.samples_budget != record.facts.samples_budget
        spread = "" if record.half_interval is None else f" +/- {record.half_interval:.2g}"
        runs = f", the mean of {record.facts.runs} runs" if (record.facts.runs or 1) > 1 else ""
        where = f" in {number(float(record.facts.epochs or 0))} epochs" if longer else ""
        yield f"in the study{where}: {metric} {number(record.accuracy)}{spread}{runs}"
    if interval := mean_interval([training.score for training in done if training.score is not None]):
        yield f"mean of {len(done)} seeds: {number(interval[0])} +/- {interval[1]:.2g} (90 % interval)"
    for training in done:
        yield f"wrote {from_here(training.folder.resolve())}: {', '.join(training.files)}"


def train_document(study: StoredStudy, record: TrialRecord, trainings: Sequence[Training]) -> dict[str, Any]:
    """The JSON document of `bsearch train --json`."""
    return {
        "study": study.name,
        "trial": record.number,
        "metric": study.front.metric,
        "in_study": record.accuracy,
        "trainings": [
            {
                "seed": training.setup.seed,
                "outcome": None if training.outcome is None else training.outcome.kind,
                "message": None if training.outcome is None else training.outcome.message or None,
                training.setup.metric: training.score,
                **training.tests,
                "folder": str(training.folder),
                "files": training.files,
            }
            for training in trainings
        ],
    }
