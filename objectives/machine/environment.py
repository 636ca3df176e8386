"""Environment variables and the working directory for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the block and for processes started in it; restored afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def working_folder() -> str:
    """The working directory, where a task's relative paths start; empty where it has been removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""


def enter_folder(folder: str) -> None:
    """Make a folder the working directory, if it is still there."""
    with contextlib.suppress(OSError):
        os.chdir(folder)


def enter_folder_or_above(folder: str) -> None:
    """Make a folder the working directory; where it has been removed, the nearest one above it."""
    for place in (Path(folder), *Path(folder).parents):
        if place.is_dir():
            os.chdir(place)
            return


@contextlib.contextmanager
def same_folder() -> Iterator[None]:
    """Context that restores the working directory, which the user's code may change."""
    before = working_folder()
    try:
        yield
    finally:
        enter_folder_or_above(before)
