"""The copy of a study that Optuna's dashboard and `optuna.load_study` read: in the study's own database."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import optuna
import sqlalchemy.orm  # noqa: F401  # Optuna would import it in the copy's thread: meanwhile, queries of other threads fail
from optuna.storages import RDBStorage

from ....spaces.errors import StorageError
from ....spaces.record import TrialRecord
from ....spaces.study.goals import Objectives
from ...store.database import (
    DatabaseUnavailable,
    configure_engine,
    create_once,
    engine_options,
    storage_engine,
    storage_refused,
    translate_errors,
)
from ...store.url import shown_url
from ..space_transform import SearchSpace
from .copy import Disagrees, OptunaCopy

_Kind = TypeVar("_Kind", bound=RDBStorage)


class _Storage(RDBStorage):
    """Optuna's storage, which reads a study's own attributes once for an update.

    Each note that is written reads those of all trials: optuna-dashboard keeps them there.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.forget()

    def forget(self) -> None:
        self._attributes: dict[int, dict[str, Any]] = {}

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        if study_id not in self._attributes:
            self._attributes[study_id] = super().get_study_system_attrs(study_id)
        return self._attributes[study_id]

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        super().set_study_system_attr(study_id, key, value)
        self.get_study_system_attrs(study_id)[key] = value


class OptunaDatabase:
    """A study's copy in a database, beside bsearch's own tables or in one of its own.

    Args:
        url: of the database.
        name: of the study there.

    Raises:
        StorageError: it cannot be opened, another version of Optuna has created it, or it holds another study of that name.
    """

    def __init__(self, url: str, name: str, objectives: Objectives, space: SearchSpace) -> None:
        self.url, self.name, self._objectives, self._space = url, name, objectives, space
        self.storage = _open(url, _Storage)
        with _optuna_errors(url):
            self._begin()

    def _begin(self) -> None:
        name, objectives = self.name, self._objectives
        study = optuna.create_study(
            study_name=name, storage=self.storage, directions=objectives.directions, load_if_exists=True
        )
        directions = [direction.name.lower() for direction in study.directions]
        if directions != objectives.directions:
            raise StorageError(f"it holds another study named {name}, with directions {directions}")
        if study.metric_names != objectives.names:
            study.set_metric_names(objectives.names)
        self.id = self.storage.get_study_id_from_name(name)
        self._copy = OptunaCopy(self.storage, self.id, self._space.searched, for_people=True)

    def update(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        """Copy what is new or has changed; returns those trials. A copy that does not agree with them is made anew.

        Raises:
            StorageError: the database refuses, or it holds a study of this name that is no copy.
        """
        self.storage.forget()
        with _optuna_errors(self.url):
            try:
                return self._copy.update(records)
            except (Disagrees, LookupError, RuntimeError):
                return self._made_anew(records)

    def _made_anew(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        trials = self.storage.get_all_trials(self.id, deepcopy=False)
        if not any("outcome" in trial.user_attrs and "constraints" in trial.system_attrs for trial in trials):
            raise StorageError(
                f"it holds another study named {self.name}, whose trials are none of bsearch's"
            )
        numbers = {str(trial._trial_id): trial.number for trial in trials if trial.number < len(records)}
        attributes = self.storage.get_study_system_attrs(self.id)
        self.storage.delete_study(self.id)
        self.storage.forget()
        self._begin()
        copied = self._copy.update(records)
        for key, value in attributes.items():  # among them people's notes, each by its trial's id
            trial_id, _, kind = key.removeprefix("dashboard:").partition(":")
            if trial_id in numbers:
                key = f"dashboard:{self._copy.id_of(numbers[trial_id])}:{kind}"
            self.storage.set_study_system_attr(self.id, key, value)
        return copied

    def annotate(
        self,
        notes: Mapping[int | None, str],
        note: Callable[[optuna.Study | optuna.Trial], str],
        save: Callable[[optuna.Study | optuna.Trial, str], None],
    ) -> None:
        """Write notes for the dashboard, in place of those that were written here before; what a person wrote stays.

        Args:
            notes: text by trial; None stands for the study.
            note, save: the dashboard's functions that read and write one.

        Raises:
            StorageError: the database refuses.
        """
        with _optuna_errors(self.url):
            study = optuna.load_study(
                study_name=self.name, storage=self.storage, sampler=optuna.samplers.RandomSampler()
            )
            for number, text in notes.items():
                key, new = f"bsearch:note{'' if number is None else f':{number}'}", _digest(text)
                written = self.storage.get_study_system_attrs(self.id).get(key, [_digest("")])
                if written == [new]:
                    continue
                target = study if number is None else optuna.Trial(study, self._copy.id_of(number))
                if (there := _digest(note(target))) not in written:
                    continue
                # Both, in case that we are killed before it is saved.
                self.storage.set_study_system_attr(self.id, key, [there, new])
                save(target, text)
                self.storage.set_study_system_attr(self.id, key, [new])

    def close(self) -> None:
        self.storage.engine.dispose()


def open_storage(url: str) -> RDBStorage:
    """Optuna's storage on the URL, configured as ours is.

    Raises:
        StudyFileError: as `storage_engine`.
        StorageError: it cannot be opened, or another version of Optuna has created it.
    """
    return _open(url, RDBStorage)


def _open(url: str, kind: type[_Kind]) -> _Kind:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    engine = storage_engine(url)  # our messages for what is wrong with a URL
    engine.connect().close()
    engine.dispose()
    # Optuna reads braces in a URL as template fields.
    escaped, options = url.replace("{", "{{").replace("}", "}}"), engine_options(url, create=False)
    try:
        with _optuna_errors(url):
            storage = create_once(lambda: kind(escaped, options))
    except RuntimeError as error:
        if "table schema" not in str(error):
            raise
        raise StorageError(
            f"storage {shown_url(url)}: another version of Optuna has created it. {error}"
        ) from None
    configure_engine(storage.engine)
    return storage


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _optuna_errors(url: str) -> Iterator[None]:
    """Optuna's storage errors as ours; its warnings about experimental features are for us, not for users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            with translate_errors(url):
                yield
        except DatabaseUnavailable as error:
            raise StorageError(f"storage {shown_url(url)}: the database does not answer: {error}") from error
        except optuna.exceptions.StorageInternalError as error:
            raise storage_refused(url, error.__cause__ or error) from error
        except (optuna.exceptions.OptunaError, KeyError, ValueError) as error:
            raise StorageError(f"{type(error).__name__}: {error}") from error
