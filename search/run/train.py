"""Training a point of a study's front again, to keep its model: with its own seed, or with several; for longer, if asked."""

from __future__ import annotations

import hashlib
import json
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from ...spaces.errors import StudyFileError, TaskError
from ...spaces.planning import optimizer_settings
from ...spaces.record import TrialRecord
from ...spaces.trial import Measurement, Outcome, TrialSetup
from ..store.stored import StoredStudy
from .runner import Runner
from .training import RESULT, Training, kept, settings_of


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
        own = (folder if seeds == 1 else folder / f"seed-{seed}").resolve()
        changed = replace(
            setup,
            study=study.name,
            number=record.number,
            attempt=0,
            training=setup.training.model_copy(update={"seed": seed}),
        )
        # Beside it until it is whole, under a name that only this training has.
        code = hashlib.sha256(json.dumps(settings_of(changed), sort_keys=True).encode()).hexdigest()[:12]
        beside = str(own.with_name(f".{own.name}.bsearch-{code}"))
        trainings.append(
            _known(Training(replace(changed, model_folder=beside, checkpoint=f"{beside}.pt"), own))
        )
    if all(training.complete for training in trainings):
        raise StudyFileError(f"{folder} holds this trained model already. Choose another folder: --keep.")
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
    values = {
        **study.spec.fixed(),
        **record.parameters,
        "rule": setup.rule,
        "reference_rate": setup.reference_rate,
    }
    optimizer = optimizer_settings(study.spec, setup.effective_batch, epochs, values)
    return replace(setup, epochs=epochs, samples_budget=budget, train_s=None, optimizer=optimizer)


def _new_seeds(study: StoredStudy, setup: TrialSetup, folder: Path, count: int) -> list[int]:
    """Seeds that no run of the study has used; those of an interrupted command first."""
    names = (path.name.lstrip(".").partition(".")[0][5:] for path in folder.glob("*seed-*"))
    begun = sorted({int(name) for name in names if name.isdecimal()})
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
        same = settings_of(TrialSetup.from_dict(document["setup"])) == settings_of(training.setup)
        scores, tests = {training.setup.metric: document[training.setup.metric]}, document["tests"]
        last = Measurement(
            training.setup.samples_budget, document["measured_train_s"], scores=scores, facts=tests
        )
    except FileNotFoundError:
        if not training.folder.is_dir() or not (any(training.folder.iterdir()) or training.folder.is_mount()):
            return training
        same = False
    except (OSError, ValueError, KeyError, TypeError, TaskError):
        same = False
    if not same:
        raise StudyFileError(
            f"--keep: expected an empty folder that can be renamed, or one of this training, got {training.folder}. "
            f"Choose another, such as {training.folder}/model."
        )
    return replace(training, measurements=(last,), outcome=Outcome("complete"))


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
    here = [
        replace(training, setup=replace(training.setup, device=runner.device, cpus=runner.cores))
        for training in trainings
    ]

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
        ended = replace(training, measurements=tuple(measurements), outcome=outcome)
        return kept(study.name, study.identity, reference, task_hash, ended)

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


def mean_interval(scores: Sequence[float]) -> tuple[float, float] | None:
    """The mean of several runs and half its 90 % interval, by Student's distribution; None for a single run."""
    if len(scores) < 2:
        return None
    from scipy.special import stdtrit

    half = float(stdtrit(len(scores) - 1, 0.95)) * statistics.stdev(scores) / len(scores) ** 0.5
    return statistics.fmean(scores), half
