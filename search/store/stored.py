"""A stored study, opened by its file or by its database's URL; commands that only read start from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...objectives.task_code import schedule_code_hash, task_code_hash
from ...spaces.boundary.storage import is_url, storage_of
from ...spaces.deadline import Deadline
from ...spaces.domain import Domain, Range, bounds
from ...spaces.errors import BsearchError, NoStudyError, StorageError, StudyFileError, TaskError
from ...spaces.front import ParetoFront
from ...spaces.record import TrialRecord
from ...spaces.schedule import is_own
from ...spaces.study.file import read_study
from ...spaces.study.space import Space
from ...spaces.study.spec import StudySpec
from ...spaces.trial import TrialSetup
from ..analysis.blow_ups import told_apart
from ..analysis.pareto import study_front
from ..analysis.rates import StoredRates
from . import schema
from .rows import StudyRow, Unreadable, refused, row_name
from .tables import Tables
from .url import shown_url


def study_identity(spec: StudySpec, task_hash: str) -> dict[str, Any]:
    """What must stay the same for old and new trials to be one experiment."""
    identity = {**spec.identity(), "task": {"name": spec.task.rpartition(":")[2], "code": task_hash}}
    schedule = spec.training.schedule
    return identity | ({"schedule": schedule_code_hash(schedule, spec.folder)} if is_own(schedule) else {})


def codes(identity: Mapping[str, Any]) -> tuple[str, ...]:
    """The identities of the training code that a study's trials ran, newest first: of several, all are one experiment."""
    task = identity["task"]
    return task["code"], *task.get("earlier", ())


def with_codes(identity: Mapping[str, Any], others: Sequence[str] = ()) -> dict[str, Any]:
    """The identity with these as the other code that its trials ran."""
    task = {name: identity["task"][name] for name in ("name", "code")}
    earlier = [code for code in others if code != task["code"]]
    return {**identity, "task": {**task, "earlier": earlier} if earlier else task}


def without_code(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {**identity, "task": {"name": identity["task"]["name"]}}


def is_same_experiment(stored: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    """Whether a stored study's trials compare with those of a study file: the same settings, and code that they have run."""
    return identity["task"]["code"] in codes(stored) and without_code(stored) == without_code(identity)


def has_grown(stored: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    """Whether a study file only has wider ranges than a stored study, of batches downwards: its trials are trials of both."""
    if not is_same_experiment({**stored, "space": identity["space"]}, identity):
        return False
    try:
        old, new = (Space.model_validate(each["space"]).domains() for each in (stored, identity))
    except ValueError:  # a damaged row
        return False
    if bounds(new["effective_batch"])[1] > bounds(old["effective_batch"])[1]:
        return False  # the laws that time its trials end there
    return old.keys() == new.keys() and all(
        now == old[name] or _holds(now, old[name]) for name, now in new.items()
    )


def _holds(wide: Domain, narrow: Domain) -> bool:
    """Whether a range that was searched lies in a wider one that is otherwise the same."""
    if not isinstance(wide, Range) or not isinstance(narrow, Range) or wide.step or wide.changes_cost:
        return False
    within = wide.low <= narrow.low < narrow.high <= wide.high and wide.whole == narrow.whole
    return within and wide.model_copy(update={"low": narrow.low, "high": narrow.high}) == narrow


def _is(
    row: StudyRow, identity: Mapping[str, Any], like: Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
) -> bool:
    with suppress(StorageError):
        return like(row.identity, identity)
    return False


@dataclass(frozen=True, slots=True)
class StoredStudy:
    """A study with everything its database holds, at one moment.

    Args:
        url: of the database; may hold a password, so it is shown as `shown_url(url)`.
        name: the study's full name there.
        spec: the study file as of the last run.
        identity: what must not change between runs, as hashes and values by name.
        driver_s: driver time in seconds, summed over runs.
        records: every trial, by number; one that blew up as diverged, though its row says that it is complete.
        front: of those records.
        rates: the best learning rates fitted at the end of the last run; None where there was none.
        deadline: when it has to be done, and the plan until then; None where it has none.
    """

    url: str
    name: str
    spec: StudySpec
    identity: Mapping[str, Any]
    driver_s: float
    records: tuple[TrialRecord, ...]
    front: ParetoFront
    rates: StoredRates | None = None
    deadline: Deadline | None = None

    @classmethod
    def open(cls, study: str, name: str | None = None, storage: str | None = None) -> StoredStudy:
        """Read a study by its file or by a database URL.

        Args:
            name: which one, where the storage holds several.
            storage: database instead of the study file's own, or of that in the environment.

        Raises:
            StudyFileError: there is none, or several and no name says which.
            StorageError: the storage cannot be opened.
        """
        url, row = _found(study, name, storage)
        spec = row.study
        with closing(Tables(url, create=False)) as tables:
            records = told_apart(tables.trials(row.name))
        front = study_front(records, spec.objectives)
        return cls(
            url, row.name, spec, row.identity, row.driver_s, records, front, row.best_rates, row.deadline
        )

    def reread(self) -> StoredStudy:
        """The same study as its database holds it now."""
        return StoredStudy.open(self.url, self.name)

    def tables(self) -> Tables:
        """bsearch's own tables: attempts, curves, profiles, step times."""
        return Tables(self.url, create=False)

    def setup_of(self, record: TrialRecord) -> TrialSetup:
        """The setup that a trial was trained with, at its last attempt.

        Raises:
            StudyFileError: the study does not hold it.
            StorageError: it cannot be read.
        """
        attempts = self.tables().attempts(self.name, record.number)
        where = f"study {self.name}: trial {record.number}"
        if not attempts:
            raise StudyFileError(
                f"{where}: expected the setup it was trained with, but it was trained outside `bsearch run`. "
                "`bsearch export --to json` has its settings."
            )
        try:
            return attempts[-1].trial_setup()
        except (Unreadable, BsearchError) as error:
            raise refused(row_name(schema.attempts, attempts[-1].model_dump()), error) from None

    @property
    def ended(self) -> int:
        """How many trials have ended."""
        return sum(record.has_ended for record in self.records)

    def current_rates(self) -> StoredRates | None:
        """The fit of best rates that the last run stored; None where there is none, or trials have ended since."""
        return self.rates if self.rates is not None and self.rates.ended == self.ended else None


def _found(study: str, name: str | None, storage: str | None) -> tuple[str, StudyRow]:
    spec = None
    if is_url(study):
        url, base = study, name
    else:
        spec = read_study(Path(study), storage=storage or storage_of(os.environ))
        assert spec.storage is not None
        url, base = spec.storage, name or spec.study
    tables = Tables(url, create=False)
    rows = tables.studies()
    tables.close()
    if base is not None:
        rows = [row for row in rows if base in (row.name, row.base_name)]
        if spec is not None:
            # The study that `run` would resume, where the file's task can still be read.
            with suppress(TaskError):
                identity = study_identity(spec, task_code_hash(spec.task))
                alike = (
                    [row for row in rows if _is(row, identity, like)]
                    for like in (is_same_experiment, has_grown)
                )
                rows = next(filter(None, alike), rows)
    if not rows:
        raise NoStudyError(
            f"storage {shown_url(url)}: holds no study{f' {base}' if base else ''} yet. `bsearch run` creates one."
        )
    if base is None and len({row.base_name for row in rows}) > 1:
        names = ", ".join(row.name for row in rows)
        raise StudyFileError(
            f"storage {shown_url(url)}: holds several studies, so give a name, as URL#NAME: {names}"
        )
    return url, next((row for row in rows if row.name == name), rows[-1])
