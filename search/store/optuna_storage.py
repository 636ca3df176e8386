"""TODO."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState

from ...spaces.errors import Fault, LauncherError, StudyFileError
from ...spaces.storage import masked
from ...spaces.trial import TrialRecord
from .database import Patience, database_door, engine_options, made_once, patient, refused, set_up, storage_engine


@contextmanager
def _door(url: str) -> Iterator[None]:
    """Optuna's storage errors stop here; its notices of experimental features are for us, not for users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            with database_door(url):
                yield
        except ValueError as error:
            if "dynamic value space" not in str(error):
                raise
            message = f"the storage holds trials with other choices or ranges under this name ({error}). Choose another name."
            raise StudyFileError(Fault("study", message)) from None
        except optuna.exceptions.StorageInternalError as error:
            raise refused(url, error.__cause__ or error) from error


def open_storage(url: str | None) -> BaseStorage:
    """Optuna's storage on the URL, set up as ours is; None keeps everything in this process.

    Raises:
        StudyFileError: as `storage_engine`.
        LauncherError: it cannot be opened, or another version of Optuna has made it.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if url is None:
        return InMemoryStorage()
    storage_engine(url).dispose()  # our messages for what is wrong with a URL
    # Optuna takes braces in a URL for a template's.
    escaped, options = url.replace("{", "{{").replace("}", "}}"), engine_options(url)
    try:
        with _door(url):
            storage = made_once(lambda: RDBStorage(escaped, options))
    except RuntimeError as error:
        if "table schema" not in str(error):
            raise
        raise LauncherError(f"storage {masked(url)}: another version of Optuna has made it. {error}") from None
    set_up(storage.engine)
    return storage


def stored_trials(url: str, name: str) -> list[TrialRecord]:
    """Every trial of a study in the storage, as records.

    Raises:
        LauncherError: the storage cannot be opened or holds no such study.
    """
    with StoredTrials(url, name, Patience(url)) as trials:
        return trials.read()


class StoredTrials:
    """A study's trials as the storage holds them, to be read again and again: one that ended is read once.

    Raises:
        LauncherError: the storage cannot be opened or holds no such study.
    """

    def __init__(self, url: str, name: str, patience: Patience) -> None:
        self._url, self._name, self.patience = url, name, patience
        self._storage = open_storage(url)
        self._study: optuna.Study | None = None

    def __enter__(self) -> StoredTrials:
        return self

    def __exit__(self, *error: object) -> None:
        if isinstance(self._storage, RDBStorage):
            self._storage.engine.dispose()

    @patient
    def read(self) -> list[TrialRecord]:
        with _door(self._url):
            try:
                self._study = self._study or optuna.load_study(study_name=self._name, storage=self._storage)
            except KeyError:
                raise LauncherError(f"storage {masked(self._url)}: holds no study {self._name!r}") from None
            return [trial_record(trial) for trial in self._study.get_trials(deepcopy=False)]


def trial_record(trial: FrozenTrial) -> TrialRecord:
    """An Optuna trial as our own record."""
    attributes = dict(trial.user_attrs)
    outcome = attributes.pop("outcome", "error")
    if not trial.state.is_finished():
        outcome = "waiting" if trial.state == TrialState.WAITING else "running"
    complete = trial.state == TrialState.COMPLETE
    # Before train_s was kept beside the objective, it was the objective.
    train_s = attributes.get("train_s", trial.values[0] if complete else attributes.get("measured_train_s"))
    return TrialRecord(
        number=trial.number,
        outcome=outcome,
        parameters=dict(trial.params),
        facts=attributes,
        train_s=train_s,
        accuracy=trial.values[1] if complete else attributes.get("stopped_accuracy"),
        message=attributes.get("message", ""),
        started_at=trial.datetime_start.isoformat(timespec="milliseconds") if trial.datetime_start else "",
        ended_at=trial.datetime_complete.isoformat(timespec="milliseconds") if trial.datetime_complete else "",
    )
