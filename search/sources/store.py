"""Imported runs as studies of a database, which every command reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ...spaces.boundary.storage import sqlite_url
from ...spaces.errors import StudyFileError
from ..store.stored import study_identity
from ..store.tables import Tables
from .imported import Imported


def written(path: Path, where: str, groups: Sequence[Imported]) -> list[str]:
    """Write each group as a study of a new SQLite file; returns the studies' names there. No half of it is left behind.

    Args:
        where: the source, for messages.

    Raises:
        StudyFileError: the file exists, or runs do not have their seconds.
        StorageError: it cannot be written.
    """
    if path.exists():
        raise StudyFileError(f"{path}: exists already; name another file")
    if untimed := [one.name for one in groups if not one.timed]:
        of = f" of {', '.join(untimed[:5])}" if any(untimed) else ""
        raise StudyFileError(
            f"{where}: expected the seconds of every complete run, since a study's front is of seconds against a metric; got "
            f"none for some{of}. Say which name holds them, as in --map NAME=seconds; `bsearch ask` reads runs without."
        )
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.absolute().parent, prefix=".import-") as folder:
        names = _written(sqlite_url(Path(folder) / "runs.db"), groups)
        (Path(folder) / "runs.db").replace(path)
    return names


def _written(url: str, groups: Sequence[Imported]) -> list[str]:
    tables = Tables(url)
    names = []
    try:
        for place, one in enumerate(groups):
            name = one.spec.study if place == 0 else f"{one.spec.study}-{place + 1}"
            spec = one.spec.model_copy(update={"study": name})
            tables.save_study(
                name, name, study_identity(spec, "imported"), spec.model_dump(mode="json", exclude_unset=True)
            )
            tables.lock.acquire(name)
            with tables.buffered(name):
                for record in one.records:
                    tables.save_trial(name, record)
            tables.lock.release(name)
            names.append(name)
    finally:
        tables.close()
    return names
