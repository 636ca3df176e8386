"""A study as its database holds it, found by its file or by the database's URL: what commands read that train nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...objectives.loading import objective_hash
from ...spaces.errors import ObjectiveError, StudyFileError
from ...spaces.storage import masked
from ...spaces.study import StudySpec
from ...spaces.study_file import read_study
from ...spaces.trial import ParetoFront, TrialRecord
from ..analysis.pareto import study_front
from .optuna_storage import stored_trials
from .records import KeptStudy, Records


def study_identity(spec: StudySpec, task_hash: str) -> dict[str, Any]:
    """What must stay as it was for old and new trials to be one experiment."""
    return {**spec.identity(), "task": {"name": spec.task.rpartition(":")[2], "code": task_hash}}


@dataclass(frozen=True, slots=True)
class StoredStudy:
    """A study with all that its database knows of it at one moment.

    Args:
        url: of the database; may hold a password, so it is shown as `masked(url)`.
        name: the study's full name there.
        spec: what the study file said when it was last run.
        identity: what may not change while the study goes on, as hashes and values by name.
        driver_s: seconds that drivers have worked on it.
        records: every trial, by number.
        front: of those records.
    """

    url: str
    name: str
    spec: StudySpec
    identity: Mapping[str, Any]
    driver_s: float
    records: tuple[TrialRecord, ...]
    front: ParetoFront

    @classmethod
    def open(cls, study: str, name: str | None = None, storage: str | None = None) -> StoredStudy:
        """Read a study by its file or by a database URL.

        Args:
            name: which one, where the storage holds several.
            storage: database instead of the study file's own.

        Raises:
            StudyFileError: there is none, or several and no name says which.
        """
        url, kept = _found(study, name, storage)
        spec = StudySpec.model_validate(kept.spec)
        records = tuple(stored_trials(url, kept.name))
        front = study_front(records, spec.objectives)
        return cls(url, kept.name, spec, kept.identity, kept.driver_s, records, front)

    def read_again(self) -> StoredStudy:
        """The same study as its database holds it now."""
        return StoredStudy.open(self.url, self.name)

    def kept(self) -> Records:
        """bsearch's own tables: attempts, curves, prices."""
        return Records(self.url, create=False)


def _found(study: str, name: str | None, storage: str | None) -> tuple[str, KeptStudy]:
    spec = None
    if "://" in study:
        url, base = study, name
    else:
        spec = read_study(Path(study), storage=storage)
        assert spec.storage is not None
        url, base = spec.storage, name or spec.study
    kept = Records(url, create=False).studies()
    if base is not None:
        kept = [one for one in kept if base in (one.name, one.base_name)]
        if spec is not None:
            # The study that `run` would go on with, where the file's task can still be read.
            with suppress(ObjectiveError):
                identity = study_identity(spec, objective_hash(spec.task))
                kept = [one for one in kept if one.identity == identity] or kept
    if not kept:
        raise StudyFileError(
            f"storage {masked(url)}: holds no study{f' {base}' if base else ''} yet. `bsearch run` begins one."
        )
    if base is None and len({one.base_name for one in kept}) > 1:
        names = ", ".join(one.name for one in kept)
        raise StudyFileError(f"storage {masked(url)}: holds several studies, so say which with --name: {names}")
    return url, next((one for one in kept if one.name == name), kept[-1])
