"""Access to checkpoint files by path or object store URL. Imports no torch, since the driver deletes checkpoints."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ...spaces.storage import is_url


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
