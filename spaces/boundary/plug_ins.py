"""Parts that nothing imports, found by their entry points: those of other packages, and our own in `extras`."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ..errors import StudyFileError

# Beside this package in a checkout, whose installed metadata may be older than its code.
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def plug_in(group: str, name: str) -> Any:
    """What an entry point names.

    Raises:
        StudyFileError: there is no such entry point, or it cannot be imported.
    """
    point = _in_checkout(group, name) or next(iter(entry_points(group=group, name=name)), None)
    if point is None:
        raise StudyFileError(
            f"{name}: expected an entry point of {group} with this name, found none. Reinstall bsearch."
        )
    try:
        return point.load()
    except Exception as error:  # whatever somebody's module does when it is imported
        raise StudyFileError(
            f"{name}: {point.value} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _in_checkout(group: str, name: str) -> EntryPoint | None:
    if not _PROJECT.exists():
        return None
    value = (
        tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
        .get(group, {})
        .get(name)
    )
    return EntryPoint(name, value, group) if value else None
