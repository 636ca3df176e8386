"""One training whose model is kept: its setup, how it ended, and the files that it leaves in its folder."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...objectives.state.checkpoint_files import delete_checkpoint
from ...objectives.task_code import task_kind
from ...spaces.boundary.files import write_file
from ...spaces.errors import OutputError, cut
from ...spaces.readable import number
from ...spaces.trial import Measurement, Outcome, TrialSetup
from ..store.stored import codes

RESULT, LOG = "training.json", "log.csv"


@dataclass(frozen=True, slots=True, repr=False)
class Training:
    """One training of a chosen trial: its setup and, once it is over, what it measured and how it ended.

    Args:
        folder: where its model, log and settings are kept; until they are whole, they are in the setup's `model_folder`.
    """

    setup: TrialSetup
    folder: Path
    measurements: tuple[Measurement, ...] = ()
    outcome: Outcome | None = None

    def __repr__(self) -> str:
        ended = "not trained yet" if self.outcome is None else self.outcome.kind.replace("_", " ")
        score = "" if self.score is None else f", {self.setup.metric} {number(self.score)}"
        why = (
            f": {cut(self.outcome.message, 200)}" if self.outcome is not None and self.outcome.message else ""
        )
        return f"<Training of trial {self.setup.number}, seed {self.setup.seed}: {ended}{score}{why}, in {self.folder}>"

    @property
    def complete(self) -> bool:
        return self.outcome is not None and self.outcome.kind == "complete"

    @property
    def score(self) -> float | None:
        """The study's metric at its end; None where it did not get there."""
        return self.measurements[-1].value(self.setup.metric) if self.complete else None

    @property
    def tests(self) -> dict[str, float]:
        """Scores on the test set, if the task has one."""
        facts = self.measurements[-1].facts if self.measurements else {}
        return {
            name: float(value)
            for name, value in facts.items()
            if name.startswith("test_") and isinstance(value, float)
        }

    @property
    def files(self) -> list[str]:
        """What its folder holds."""
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []


def kept(
    study: str, identity: Mapping[str, Any], reference: str, task_hash: str, training: Training
) -> Training:
    """The training, with its log and settings written beside its model, and all of it moved to its folder.

    Args:
        study: its name.
        identity: of the study, which knows its code.
        task_hash: the identity of the code that trained it.

    Raises:
        OutputError: the folder cannot be written, or a task's model is not there.
    """
    if not training.complete:
        return training
    setup, last = training.setup, training.measurements[-1]
    own = Path(setup.model_folder or training.folder)
    if task_kind(reference) == "task" and not any(own.glob("*")):
        raise OutputError(
            f"{training.folder}: its model is not there, because it was trained on a machine that does not reach this folder. "
            "Write --keep with a folder that all machines share."
        )
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
    writer = csv.DictWriter(
        text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    document: dict[str, Any] = {
        "study": study,
        "trial": setup.number,
        "task": reference,
        "code": task_hash,
        "code_of_study": list(codes(identity)),
        "metric": setup.metric,
        setup.metric: training.score,
        "measured_train_s": last.elapsed_s,
        "tests": training.tests,
        "seed": setup.seed,
        "setup": settings_of(setup),
    }
    write_file(own / LOG, text.getvalue())
    files = [path for path in sorted(own.rglob("*")) if path.is_file() and path != own / RESULT]
    document["files"] = {path.relative_to(own).as_posix(): digest(path) for path in files}
    write_file(own / RESULT, json.dumps(document, indent=2) + "\n")
    if own != training.folder:
        try:
            own.rename(training.folder)  # which is empty, or not there
        except OSError as error:
            raise OutputError(
                f"{training.folder}: cannot be written: {error.strerror or error}; the model is in {own}"
            ) from None
    if setup.checkpoint is not None:
        delete_checkpoint(setup.checkpoint)
    return training


def digest(path: Path) -> str:
    """The SHA-256 of a file; empty where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def settings_of(setup: TrialSetup) -> dict[str, Any]:
    """What a training is, wherever it runs."""
    elsewhere = (
        "checkpoint",
        "model_folder",
        "scores_test",
        "ends_by",
        "device",
        "cpus",
        "folder",
        "sharding",
    )
    return {name: value for name, value in setup.to_dict().items() if name not in elsewhere}
