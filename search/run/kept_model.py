"""The best model of a study that ends with one: a folder that at every moment holds the best so far, or nothing.

Nothing there is created, renamed or removed before the driver holds the study's lock (`begin`). A file is ours if the manifest
beside it lists it with its digest; every other one is the user's, and is neither replaced nor deleted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...spaces.boundary.files import file_name
from ...spaces.errors import Fault, OutputError, StudyFileError
from ...spaces.record import TrialRecord
from ...spaces.study.goals import Metric
from ...spaces.study.spec import StudySpec
from ...spaces.trial import Measurement, Outcome, TrialSetup
from .training import RESULT, Training, digest


class KeptModel:
    """Takes the models of trials as they end, and keeps the best.

    Args:
        folder: of the best model, its optimizer, `log.csv` and `training.json`, as `bsearch train` writes them.
        study: the study's name.
        metric: by which models are compared.
        keep: writes a training's log and settings beside its model.
        trials: of the study so far, of which a model that is there already has to be one.

    Raises:
        StudyFileError: the folder holds something else, or cannot be written.
    """

    trial: int | None
    score: float | None

    def __init__(
        self,
        folder: Path,
        study: str,
        metric: Metric,
        keep: Callable[[Training], Training],
        trials: Sequence[TrialRecord] = (),
    ) -> None:
        self.folder, self._study, self.metric, self._keep = folder.resolve(), study, metric, keep
        # Beside it, so that a rename is enough; hidden and of a name that nobody else uses.
        self._candidates = self.folder.with_name(f".{self.folder.name}.bsearch-{file_name(study)}")
        self._before = self._candidates / "before"
        self._read(trials)
        if self.folder.is_mount():
            message = f"expected a folder that can be renamed, got {folder}, where a volume is mounted. Write {folder}/model."
            raise StudyFileError(Fault("budget.keep", message))

    def begin(self, trials: Sequence[TrialRecord]) -> None:
        """Make room for the models of trials, and put in order what a killed driver has left; the study's lock is held.

        Args:
            trials: of the study by now, as is the model: another driver may have ended since.

        Raises:
            StudyFileError: the folder holds something else by now, or cannot be written.
        """
        self._read(trials)
        try:
            known = [str(record.number) for record in trials] + ["before"] * bool(self._ours(self._before))
            if others := [
                path for path in self._candidates.glob("*") if path.name not in known and not _is_empty(path)
            ]:
                raise FileExistsError(f"{others[0]} is of something else. Move it away.")
            self._candidates.mkdir(parents=True, exist_ok=True)
            if _is_empty(self.folder) and not _is_empty(self._before):
                self._before.rename(self.folder)  # it was being replaced
            self._bring_others()
            self.clean(trials)
        except OSError as error:
            message = f"expected a folder that can be written, got {self.folder}: {error.strerror or error}"
            raise StudyFileError(Fault("budget.keep", message)) from None

    def folder_of(self, number: int) -> str:
        """Where a trial's model goes while it trains."""
        return str(self._candidates / str(number))

    def offer(self, setup: TrialSetup, measurements: Sequence[Measurement]) -> bool:
        """Keep a complete trial's model if it is the best so far; else delete it. Whether it is kept.

        Raises:
            OutputError: it is not there, or cannot be written, or the folder is another's by now; the model then stays where
                it was trained.
        """
        assert setup.model_folder is not None
        own, score = Path(setup.model_folder), self.metric.score(measurements[-1].value(setup.metric))
        if self.score is not None and score <= self.score:
            shutil.rmtree(own, ignore_errors=True)
            return False
        try:
            self._keep(Training(setup, own, tuple(measurements), Outcome("complete")))
            ours = self._ours(self.folder)
            names = [*_document(own)["files"], RESULT]
            others = [name for name in names if name not in ours and os.path.lexists(self.folder / name)]
            if others or not (ours or _is_empty(self.folder)):
                got = ", ".join(others) or "files"
                raise OutputError(
                    f"{self.folder}: holds something else by now ({got}); the model is in {own}"
                )
            # The old one goes only once the new one is whole.
            if self.folder.exists() and _is_empty(self.folder):
                self.folder.rmdir()
            elif self.folder.exists():
                self.folder.rename(self._before)
            own.rename(self.folder)
        except OSError as error:
            raise OutputError(
                f"{self.folder}: cannot be written: {error.strerror or error}; the model is in {own}"
            ) from None
        self.trial, self.score = setup.number, score
        with suppress(OSError):  # what cannot be moved stays where it is, until the next run
            self._bring_others()
        return True

    def clean(self, trials: Sequence[TrialRecord]) -> None:
        """Delete what trials have left that did not complete; a model that could not be kept stays."""
        for record in trials:
            if record.outcome != "complete":
                shutil.rmtree(self.folder_of(record.number), ignore_errors=True)
        with suppress(OSError):  # where a model is left
            self._candidates.rmdir()

    def _bring_others(self) -> None:
        """Move what somebody has put beside the last model to this one, and delete that, its manifest last."""
        ours = self._ours(self._before)
        for path in sorted(self._before.rglob("*"), reverse=True) if ours else ():
            name = path.relative_to(self._before).as_posix()
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):  # where something is in it
                    path.rmdir()
            elif name in ours[:-1]:
                path.unlink()
            elif name != RESULT and not os.path.lexists(self.folder / name):
                os.renames(path, self.folder / name)
        if ours:
            (self._before / RESULT).unlink()
            self._before.rmdir()

    def _ours(self, folder: Path) -> list[str]:
        """The files of a folder that are as its manifest lists them, and that last; none where it is no model of this study."""
        document = _document(folder)
        if document.get("study") != self._study:
            return []
        return [
            *(name for name, listed in document.get("files", {}).items() if digest(folder / name) == listed),
            RESULT,
        ]

    def _read(self, trials: Sequence[TrialRecord]) -> None:
        """What an earlier run has kept."""
        self.trial = self.score = None
        held = self._before if _is_empty(self.folder) else self.folder  # it was being replaced
        if _is_empty(held):
            return
        try:
            document = _document(held)
            number, score = int(document["trial"]), self.metric.score(float(document[self.metric.name]))
            if document["study"] != self._study or not _is_of(trials, number, score):
                raise ValueError(document["study"])
            ours = self._ours(held)
            if changed := [name for name in document.get("files", {}) if name not in ours]:
                damaged = (
                    f"expected the model of trial {number} as it was written, got another {changed[0]} in "
                    f"{held}. Move it away."
                )
                raise StudyFileError(Fault("budget.keep", damaged))
        except (OSError, ValueError, KeyError, TypeError):
            raise StudyFileError(
                Fault(
                    "budget.keep",
                    f"expected an empty folder, or the one with this study's model; got {self.folder}. Choose another.",
                )
            ) from None
        self.trial, self.score = number, score


def _is_empty(folder: Path) -> bool:
    """Whether nothing is there, or a folder that holds nothing."""
    return not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))


def _document(folder: Path) -> dict[str, Any]:
    """What a model's folder says of itself; empty where it is none."""
    try:
        found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_of(trials: Sequence[TrialRecord], number: int, score: float) -> bool:
    """Whether a model is that of one of the trials, whose driver may have died before it stored the trial's end."""
    record = next((trial for trial in trials if trial.number == number), None)
    return record is not None and (not record.has_ended or record.score == score)


def kept_model(
    spec: StudySpec, name: str, trials: Sequence[TrialRecord], keep: Callable[[Training], Training]
) -> KeptModel | None:
    """What keeps a study's model; None where it keeps none.

    Raises:
        StudyFileError: the folder holds something else, or cannot be written.
    """
    folder = model_folder(spec, name)
    return None if folder is None else KeptModel(folder, name, spec.objectives.metric, keep, trials)


def model_folder(spec: StudySpec, name: str) -> Path | None:
    """Where a study keeps its model; None where it keeps none."""
    budget = spec.budget
    kept = Path(budget.keep).expanduser() if budget.keep else Path("results") / file_name(name) / "model"
    return spec.folder / kept if budget.keeps_model else None
