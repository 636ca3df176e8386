"""Access to checkpoint files by path or object store URL. Imports no torch, since the driver deletes checkpoints."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ...spaces.boundary.storage import is_url


def read_checkpoint(url: str) -> bytes | None:
    """A checkpoint's content; None where there is none.

    Raises:
        OSError: a folder, a pipe or a device is in its place, whose reading might never end.
    """
    system, path = file_system_of(url)
    if not system.exists(path):
        return None
    if isinstance(system, LocalFileSystem) and not Path(path).is_file():
        raise OSError("expected a file, got a folder, a pipe or a device")
    return bytes(system.cat_file(path))


def delete_checkpoint(url: str) -> None:
    """Delete a checkpoint if it exists, and its folder if it is empty afterwards."""
    with contextlib.suppress(Exception):
        system, path = file_system_of(url)
        if system.exists(path):
            system.rm_file(path)
        if isinstance(system, LocalFileSystem):
            delete_parts(Path(path))
            Path(path).parent.rmdir()  # fails unless empty


def delete_parts(path: Path) -> None:
    """Delete what writers of this checkpoint left that were killed before they had finished."""
    for part in path.parent.glob(f"{path.name}.*.part"):
        part.unlink(missing_ok=True)


def file_system_of(url: str) -> tuple[Any, str]:
    if not is_url(url):
        return LocalFileSystem(), url  # fsspec would take the colons in a folder's name for protocols
    system, path = fsspec.core.url_to_fs(url)
    return system, path
