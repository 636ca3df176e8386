"""Imported runs as studies of a database, which every command reads."""

from __future__ import annotations

from collections.abc import Sequence

from ..store.stored import study_identity
from ..store.tables import Tables
from .imported import Imported


def stored(url: str, groups: Sequence[Imported]) -> list[str]:
    """Write each group as a study; returns the studies' names there.

    Raises:
        StorageError: the database cannot be written.
    """
    tables = Tables(url)
    names = []
    try:
        for place, one in enumerate(groups):
            name = one.spec.study if place == 0 else f"{one.spec.study}-{place + 1}"
            spec = one.spec.model_copy(update={"study": name})
            tables.save_study(name, name, study_identity(spec, "imported"), spec.model_dump(mode="json", exclude_unset=True))
            tables.lock.acquire(name)
            with tables.buffered(name):
                for record in one.records:
                    tables.save_trial(name, record)
            tables.lock.release(name)
            names.append(name)
    finally:
        tables.close()
    return names
