"""Where a script's files go: what it writes below its folder is kept apart, so that trials leave the user's files alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class FilesApart:
    """Files that are written below `folder` go below `apart`, and are read from there again."""

    def __init__(self, folder: Path, apart: Path) -> None:
        self._folder, self._apart = folder.resolve(), apart

    def place_of(self, file: Any, *, writes: bool, removes: bool = False) -> Any:
        """Where a file is; what is no path, or lies elsewhere, as it is.

        Raises:
            PermissionError: it would be removed, and is none that was written here.
        """
        if not isinstance(file, str | bytes | os.PathLike):
            return file
        path = Path(os.path.abspath(os.fsdecode(file)))  # noqa: PTH100  # links are followed where they lead
        if not path.is_relative_to(self._folder):
            return file
        there = self._apart / path.relative_to(self._folder)
        if writes:
            os.makedirs(there.parent, exist_ok=True)  # noqa: PTH103
        elif removes and not there.exists() and os.path.lexists(path):
            raise PermissionError(f"{path}: a trial does not remove files of the script's folder")
        return str(there) if writes or there.exists() else file
