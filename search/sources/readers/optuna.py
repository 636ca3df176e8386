"""Trials of an Optuna study: `URL#STUDY`, or `URL` of a storage that holds one study; a file, such as a journal, is one too."""

from __future__ import annotations

import os
import re
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ....spaces.boundary.storage import sqlite_parts, sqlite_url
from ....spaces.errors import Fault, StorageError, StudyFileError, cut, near_miss
from ...store.database import engine_options, storage_engine, translate_errors
from ...store.url import shown_url
from ..names import meaning_of
from ..runs import Run, Scalar, Status, curve_results, flat

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

# A password may contain #.
_SOURCE = re.compile(r"(\w[\w+.-]*://(?:[^/]*@)?[^#]*|[^#]*)(?:#(.*))?", re.DOTALL)
_STATUS: dict[str, Status] = {
    "COMPLETE": "finished",
    "PRUNED": "finished",
    "FAIL": "failed",
    "RUNNING": "running",
}


def read(source: str) -> Iterator[Run]:
    """The trials of a study; those that wait are left out.

    Raises:
        StudyFileError: the storage cannot be read, has no such study, or several and none is named.
    """
    import optuna

    found = _SOURCE.fullmatch(source)
    assert found is not None
    url, name = found.groups()
    try:
        with warnings.catch_warnings(), translate_errors(url):
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage, close = _opened(url)
            try:
                chosen = _chosen(url, name, optuna.get_all_study_names(storage))
                runs = _runs(
                    optuna.load_study(
                        study_name=chosen, storage=storage, sampler=optuna.samplers.RandomSampler()
                    )
                )
            finally:
                close()
    except (optuna.exceptions.OptunaError, StorageError, RuntimeError, ValueError, LookupError) as error:
        reason = cut(str(error.__cause__ or error).partition("\n")[0], 300)
        raise StudyFileError(Fault("", f"expected Optuna's tables: {reason}", shown_url(url))) from None
    if not runs:
        raise StudyFileError(
            Fault("", f"expected trials, got none that has begun in study {chosen}", shown_url(url))
        )
    yield from runs


def _opened(url: str) -> tuple[BaseStorage, Callable[[], None]]:
    """A storage, and what closes it."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    path = Path(url)
    if "://" not in url and path.is_file():
        with path.open("rb") as file:
            if not file.read(16).startswith(b"SQLite format 3"):
                return optuna.storages.JournalStorage(JournalFileBackend(url)), lambda: None
        url = sqlite_url(path)
    storage = optuna.storages.RDBStorage(**_read_only(url), skip_table_creation=True)

    def close() -> None:
        storage.remove_session()
        storage.engine.dispose()

    return storage, close


def _read_only(url: str) -> dict[str, Any]:
    """Arguments of a storage that creates neither a file nor tables."""
    path = (sqlite_parts(url) or ("",))[0]
    if not path:
        storage_engine(url, create=False).dispose()  # our messages for what is wrong with a URL
        return {
            "url": url.replace("{", "{{").replace("}", "}}"),
            "engine_kwargs": engine_options(url, create=False),
        }
    if not os.path.isfile(path):  # noqa: PTH113  # a name too long is no file
        raise StudyFileError(
            Fault(
                "",
                f"expected an Optuna storage, got no file {Path(path).absolute()}. Check its path.",
                shown_url(url),
            )
        )
    uri = f"file:{quote(os.fsencode(path))}?mode=ro"
    connect = partial(sqlite3.connect, uri, uri=True, timeout=10, check_same_thread=False)
    return {"url": "sqlite://", "engine_kwargs": {"creator": connect}}


def _chosen(url: str, name: str | None, known: list[str]) -> str:
    if name in known or (not name and len(known) == 1):
        return name or known[0]
    names = cut(", ".join(sorted(known)), 300) or "none"
    if not name:
        raise StudyFileError(
            Fault("", f"expected one study, got {names}. Name one: URL#STUDY", shown_url(url))
        )
    message = f"expected a study of this storage ({names}), got {name!r}.{near_miss(name, known)}"
    raise StudyFileError(Fault("", message, shown_url(url)))


def _runs(study: Study) -> list[Run]:
    directions = [direction.name.lower() for direction in study.directions]
    several = len(directions) > 1
    names = study.metric_names or (
        [f"value_{place}" for place in range(len(directions))] if several else ["value"]
    )
    goals = {f"direction of {name}": each for name, each in zip(names, directions, strict=True)}
    return [
        Run(
            f"trial {trial.number} of study {study.study_name}",
            dict(flat(trial.params)),
            _results(trial, names) | goals,
            dict(flat(trial.user_attrs)),
            status,
        )
        for trial in study.get_trials(deepcopy=False)
        if (status := _STATUS.get(trial.state.name))
    ]


def _results(trial: FrozenTrial, names: list[str]) -> dict[str, Scalar]:
    steps = sorted(trial.intermediate_values.items())
    results: dict[str, Scalar] = dict(curve_results("intermediate", (value for _, value in steps)))
    if trial.duration is not None and not any(meaning_of(name) == "seconds" for name in names):
        results["duration_s"] = trial.duration.total_seconds()
    if trial.state.name == "PRUNED":
        results["pruned"] = True
    return {**results, **dict(zip(names, trial.values or (), strict=False))}
