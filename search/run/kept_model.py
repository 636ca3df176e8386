"""The best model of a study that ends with one: a folder that at every moment holds the best so far, or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ...spaces.errors import Fault, StudyFileError
from ...spaces.trial import Measurement, Outcome, TrialSetup
from .training import RESULT, Training


class KeptModel:
    """Takes the models of trials as they end, and keeps the best.

    Args:
        folder: of the best model, its optimizer, `log.csv` and `training.json`, as `bsearch train` writes them.
        study: the study's name.
        sign: of its metric: 1 where it is maximized.
        keep: writes a training's log and settings beside its model.

    Raises:
        StudyFileError: the folder holds something else.
    """

    def __init__(self, folder: Path, study: str, sign: float, keep: Callable[[Training], Training]) -> None:
        self.folder, self._study, self.sign, self._keep = folder, study, sign, keep
        self.trial: int | None = None
        self.score: float | None = None
        self._read()

    @property
    def _candidates(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.trials")

    def folder_of(self, number: int) -> str:
        """Where a trial's model goes while it trains."""
        return str(self._candidates / str(number))

    def offer(self, setup: TrialSetup, measurements: Sequence[Measurement]) -> bool:
        """Keep a complete trial's model if it is the best so far; else delete it. Whether it is kept.

        Raises:
            OutputError: it is not there, or cannot be written.
        """
        assert setup.model_folder is not None
        own, score = Path(setup.model_folder), measurements[-1].score(setup.metric)
        try:
            if self.score is not None and self.sign * score <= self.sign * self.score:
                return False
            self._keep(Training(setup, own, tuple(measurements), Outcome("complete")))
            # The old one goes only once the new one is whole.
            before = self.folder.with_name(f"{self.folder.name}.before")
            shutil.rmtree(before, ignore_errors=True)
            if self.folder.exists():
                self.folder.rename(before)
            own.rename(self.folder)
            shutil.rmtree(before, ignore_errors=True)
            self.trial, self.score = setup.number, score
            return True
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def clean(self) -> None:
        """Delete what trials that did not end have left."""
        shutil.rmtree(self._candidates, ignore_errors=True)

    def _read(self) -> None:
        """What an earlier run has kept."""
        before = self.folder.with_name(f"{self.folder.name}.before")
        if not self.folder.exists() and (before / RESULT).exists():
            before.rename(self.folder)  # it was being replaced
        if not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir())):
            return
        try:
            document = json.loads((self.folder / RESULT).read_text(encoding="utf-8"))
            if document["study"] != self._study:
                raise ValueError(document["study"])
            self.trial, self.score = int(document["trial"]), float(document[document["metric"]])
        except (OSError, ValueError, KeyError, TypeError):
            raise StudyFileError(
                Fault("budget.keep", f"expected an empty folder, or the one of this study's model, got {self.folder}")
            ) from None


def with_model_folder(setup: TrialSetup, kept: KeptModel, ends_by: float | None, *, final: bool) -> TrialSetup:
    """A setup whose training leaves its model where it may be kept."""
    return replace(setup, model_folder=kept.folder_of(setup.number), scores_test=final, ends_by=ends_by)


__all__ = ["KeptModel", "with_model_folder"]
