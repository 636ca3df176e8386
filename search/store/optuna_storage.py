"""Optuna's own storage on our database: opened with our settings, its errors translated into ours."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState

from ...spaces.errors import Fault, StorageError, StudyFileError
from ...spaces.storage import masked
from ...spaces.trial import TrialRecord
from .database import (
    configure_engine,
    create_once,
    engine_options,
    storage_engine,
    storage_refused,
    translate_errors,
)
from .trials import trial_record


@contextmanager
def translate_optuna_errors(url: str) -> Iterator[None]:
    """Optuna's storage errors stop here; its warnings about experimental features are for us, not for users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            with translate_errors(url):
                yield
        except ValueError as error:
            if "dynamic value space" not in str(error):
                raise
            message = f"the storage holds trials with other choices or ranges under this name ({error}). Choose another name."
            raise StudyFileError(Fault("study", message)) from None
        except optuna.exceptions.StorageInternalError as error:
            raise storage_refused(url, error.__cause__ or error) from error


def open_storage(url: str | None) -> BaseStorage:
    """Optuna's storage on the URL, configured as ours is; None stores everything in memory.

    Raises:
        StudyFileError: as `storage_engine`.
        StorageError: it cannot be opened, or another version of Optuna has created it.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if url is None:
        return InMemoryStorage()
    storage_engine(url).dispose()  # our messages for what is wrong with a URL
    # Optuna reads braces in a URL as template fields.
    escaped, options = url.replace("{", "{{").replace("}", "}}"), engine_options(url)
    try:
        with translate_optuna_errors(url):
            storage = create_once(lambda: RDBStorage(escaped, options))
    except RuntimeError as error:
        if "table schema" not in str(error):
            raise
        raise StorageError(f"storage {masked(url)}: another version of Optuna has created it. {error}") from None
    configure_engine(storage.engine)
    return storage


def frozen_record(trial: FrozenTrial) -> TrialRecord:
    """An Optuna trial as our own record."""
    return trial_record(
        trial.number,
        trial.state.name,
        trial.params,
        trial.values if trial.state == TrialState.COMPLETE else None,
        trial.user_attrs,
        trial.datetime_start,
        trial.datetime_complete,
    )
