"""Training a point of a study's front again, to keep its model: with its own seed, or with several; for longer, if asked."""

from __future__ import annotations

import csv
import io
import json
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...objectives.state.checkpoint_files import delete_checkpoint
from ...objectives.task_code import task_kind
from ...spaces.boundary.files import write_file
from ...spaces.errors import OutputError, StudyFileError, TaskError, cut
from ...spaces.planning import optimizer_settings
from ...spaces.readable import number
from ...spaces.record import TrialRecord
from ...spaces.trial import Measurement, Outcome, TrialSetup
from ..store.stored import StoredStudy, codes
from .runner import Runner

RESULT, LOG = "training.json", "log.csv"
_CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True, repr=False)
class Training:
    """One training of a chosen trial: its setup and, once it is over, what it measured and how it ended.

    Args:
        folder: where its model, log and settings are kept.
    """

    setup: TrialSetup
    folder: Path
    measurements: tuple[Measurement, ...] = ()
    outcome: Outcome | None = None

    def __repr__(self) -> str:
        ended = "not trained yet" if self.outcome is None else self.outcome.kind.replace("_", " ")
        score = "" if self.score is None else f", {self.setup.metric} {number(self.score)}"
        why = f": {cut(self.outcome.message, 200)}" if self.outcome is not None and self.outcome.message else ""
        return f"<Training of trial {self.setup.number}, seed {self.setup.seed}: {ended}{score}{why}, in {self.folder}>"

    @property
    def complete(self) -> bool:
        return self.outcome is not None and self.outcome.kind == "complete"

    @property
    def score(self) -> float | None:
        """The study's metric at its end; None where it did not get there."""
        return self.measurements[-1].score(self.setup.metric) if self.complete else None

    @property
    def tests(self) -> dict[str, float]:
        """Scores on the test set, if the task has one."""
        facts = self.measurements[-1].facts if self.measurements else {}
        return {name: float(value) for name, value in facts.items() if name.startswith("test_") and isinstance(value, float)}

    @property
    def files(self) -> list[str]:
        """What its folder holds, without what a later attempt resumes from."""
        return sorted(path.name for path in self.folder.iterdir() if path.name != _CHECKPOINT) if self.folder.is_dir() else []


def planned_trainings(
    study: StoredStudy, record: TrialRecord, folder: Path, *, epochs: float | None = None, seeds: int = 1
) -> list[Training]:
    """The trainings of a trial's settings, before they run.

    Args:
        folder: of its files; several seeds have one each in it.
        epochs: instead of the trial's.
        seeds: how many: one is the trial's own; several are seeds that no run of the study has used, so that their mean is free
            of selection bias.

    Raises:
        StudyFileError: the study does not hold the trial's setup, or the folder holds another training.
    """
    setup = study.setup_of(record)
    if epochs is not None:
        setup = _stretched(study, record, setup, epochs)
    trainings = []
    for seed in [setup.seed] if seeds == 1 else _new_seeds(study, setup, folder, seeds):
        own = folder if seeds == 1 else folder / f"seed-{seed}"
        changed = replace(
            setup,
            study=study.name,
            number=record.number,
            attempt=0,
            training=setup.training.model_copy(update={"seed": seed}),
            checkpoint=str(own.resolve() / _CHECKPOINT),
            model_folder=str(own.resolve()),
        )
        trainings.append(_known(Training(changed, own)))
    if all(training.complete for training in trainings):
        raise StudyFileError(f"--out: expected a folder without this trained model, got {folder}. Choose another.")
    return trainings


def _stretched(study: StoredStudy, record: TrialRecord, setup: TrialSetup, epochs: float) -> TrialSetup:
    """The same setting trained for another number of epochs; a rule may scale the weight decay with it.

    Raises:
        StudyFileError: less than one step.
    """
    training_set = round(setup.samples_budget / setup.epochs)
    budget = max(round(epochs * training_set), 1)
    if budget < setup.effective_batch:
        least = setup.effective_batch / training_set
        raise StudyFileError(f"epochs: expected at least one step, {least:.3g} epochs, got {epochs:g}")
    values = {**study.spec.fixed(), **record.parameters, "rule": setup.rule, "reference_rate": setup.reference_rate}
    optimizer = optimizer_settings(study.spec, setup.effective_batch, epochs, values)
    return replace(setup, epochs=epochs, samples_budget=budget, optimizer=optimizer)


def _new_seeds(study: StoredStudy, setup: TrialSetup, folder: Path, count: int) -> list[int]:
    """Seeds that no run of the study has used; those of an interrupted command first."""
    begun = sorted(int(path.name[5:]) for path in folder.glob("seed-*") if path.name[5:].isdecimal())
    used = {setup.seed, *begun, *(other.facts.seed or 0 for other in study.records)}
    return [*begun, *range(max(used) + 1, max(used) + 1 + count)][:count]


def _known(training: Training) -> Training:
    """The training with the result that its folder holds, if there is one.

    Raises:
        StudyFileError: the folder holds another training.
    """
    try:
        document = json.loads((training.folder / RESULT).read_text(encoding="utf-8"))
        # Read as a setup, so that a field that came later has its default.
        same = _settings(TrialSetup.from_dict(document["setup"])) == _settings(training.setup)
        scores, tests = {training.setup.metric: document[training.setup.metric]}, document["tests"]
        last = Measurement(training.setup.samples_budget, document["measured_train_s"], scores=scores, facts=tests)
    except FileNotFoundError:
        return training
    except (OSError, ValueError, KeyError, TypeError, TaskError):
        same = False
    if not same:
        raise StudyFileError(
            f"--out: expected an empty folder, or one of this training, got {training.folder}. Choose another."
        )
    return replace(training, measurements=(last,), outcome=Outcome("complete"))


def _settings(setup: TrialSetup) -> dict[str, Any]:
    """What a training is, wherever it runs."""
    elsewhere = ("checkpoint", "model_folder", "device", "cpus", "folder", "sharding")
    return {name: value for name, value in setup.to_dict().items() if name not in elsewhere}


def train(
    study: StoredStudy,
    reference: str,
    task_hash: str,
    trainings: Sequence[Training],
    runner: Runner,
    report: Callable[[Training, Measurement], None],
) -> Iterator[Training]:
    """Run the trainings, as many at once as fit, and yield each as it ends, in their order.

    Each leaves its model, `log.csv` and `training.json` in its folder. One that is interrupted resumes from its checkpoint.

    Args:
        reference: of the task.
        task_hash: the identity of its code.

    Raises:
        OutputError: a folder cannot be written.
    """
    here = [replace(training, setup=replace(training.setup, device=runner.device, cpus=runner.cores)) for training in trainings]

    stopped = threading.Event()

    def run(training: Training) -> Training:
        if training.complete:
            return training
        measurements, outcome = [], Outcome("interrupted", "it ended without an outcome")
        with closing(runner.attempt(reference, training.setup)) as reports:  # type: ignore[type-var]  # a generator
            for reported in reports:
                if stopped.is_set():
                    break
                if isinstance(reported, Measurement):
                    measurements.append(reported)
                    report(training, reported)
                else:
                    outcome = reported
        return _kept(study, reference, task_hash, replace(training, measurements=tuple(measurements), outcome=outcome))

    if runner.slots == 1 or len(here) == 1:
        yield from map(run, here)
        return
    threads = ThreadPoolExecutor(min(runner.slots, len(here)), thread_name_prefix="bsearch-train")
    try:
        yield from threads.map(run, here)
    finally:
        # After Ctrl-C nothing is waited for: the runner ends its attempts.
        stopped.set()
        threads.shutdown(wait=False, cancel_futures=True)


def _kept(study: StoredStudy, reference: str, task_hash: str, training: Training) -> Training:
    """The training, with its log and settings written beside its model.

    Raises:
        OutputError: the folder cannot be written, or a task's model is not there.
    """
    if not training.complete:
        return training
    if task_kind(reference) == "task" and not training.files:
        raise OutputError(
            f"{training.folder}: its model is not there, because it was trained on a machine that does not reach this folder. "
            "Write --out with a folder that all machines share."
        )
    setup, last = training.setup, training.measurements[-1]
    rows = [
        {
            "samples_seen": measurement.samples_seen,
            "elapsed_s": measurement.elapsed_s,
            "train_loss": measurement.train_loss,
            **({} if measurement.accuracy is None else {"accuracy": measurement.accuracy}),
            **measurement.scores,
        }
        for measurement in training.measurements
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    document: dict[str, Any] = {
        "study": study.name,
        "trial": setup.number,
        "task": reference,
        "code": task_hash,
        "code_of_study": list(codes(study.identity)),
        "metric": setup.metric,
        setup.metric: training.score,
        "measured_train_s": last.elapsed_s,
        "tests": training.tests,
        "seed": setup.seed,
        "setup": _settings(setup),
    }
    write_file(training.folder / LOG, text.getvalue())
    write_file(training.folder / RESULT, json.dumps(document, indent=2) + "\n")
    assert setup.checkpoint is not None
    delete_checkpoint(setup.checkpoint)
    return training


def mean_interval(scores: Sequence[float]) -> tuple[float, float] | None:
    """The mean of several runs and half its 90 % interval, by Student's distribution; None for a single run."""
    if len(scores) < 2:
        return None
    from scipy.special import stdtrit

    half = float(stdtrit(len(scores) - 1, 0.95)) * statistics.stdev(scores) / len(scores) ** 0.5
    return statistics.fmean(scores), half
