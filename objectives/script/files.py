"""Where a script's files go: what it writes below its folder is kept apart, so that trials leave the user's files alone."""

from __future__ import annotations

import csv
import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Records of a training, of which the last row is read after a pass.
_RECORDS = (".csv", ".json", ".jsonl")


class FilesApart:
    """Files that are written below `folder` go below `apart`, and are read from there again."""

    def __init__(self, folder: Path, apart: Path) -> None:
        self._folder, self._apart = folder.resolve(), apart
        self.read: dict[Path, None] = {}
        self._open, self._known = weakref.WeakSet[Any](), dict[Path, tuple[int, int]]()

    def opened(self, file: Any) -> Any:
        """Take note of a file that the script has opened to write."""
        self._open.add(file)
        return file

    def new_rows(self) -> Iterator[str]:
        """The numbers in the last row of each record that has changed, as lines `name: value`."""
        for file in [one for one in self._open if not one.closed]:
            file.flush()
        for path in sorted(self._apart.rglob("*")):
            if path.suffix in _RECORDS and path.is_file():
                seen = path.stat()
                state = seen.st_mtime_ns, seen.st_size
                if self._known.get(path) != state:
                    self._known[path] = state
                    yield from (f"{name}: {value!r}\n" for name, value in _numbers(_last_row(path)))

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
        self.read |= {} if writes or there.exists() else {path: None}
        if writes:
            os.makedirs(there.parent, exist_ok=True)  # noqa: PTH103
        elif removes and not there.exists() and os.path.lexists(path):
            raise PermissionError(f"{path}: a trial does not remove files of the script's folder")
        if there.is_dir() and path.is_dir() and not removes:
            return file  # `beside` has what was written there
        return str(there) if writes or there.exists() else file

    def beside(self, folder: Any) -> str | None:
        """Where files are that were written below a folder of the user's; None where there are none."""
        path = Path(os.path.abspath(os.fsdecode(folder))) if isinstance(folder, str | bytes | os.PathLike) else Path("/")  # noqa: PTH100
        there = self._apart / path.relative_to(self._folder) if path.is_relative_to(self._folder) else self._apart / "none"
        return str(there) if there.is_dir() and path.is_dir() else None


def _last_row(path: Path) -> Any:
    """The last row of a record; None where it has none that can be read."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".csv":
            return [*csv.DictReader(text.splitlines())][-1]
        return json.loads(text.strip().splitlines()[-1] if path.suffix == ".jsonl" else text)
    except (ValueError, IndexError, csv.Error):
        return None


def _numbers(row: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row by name, of lists the last."""
    if isinstance(row, dict):
        for key, value in row.items():
            yield from _numbers(value, f"{name}/{key}".strip("/"))
    elif isinstance(row, list) and row:
        yield from _numbers(row[-1], name)
    elif isinstance(row, int | float | str) and name:
        try:
            yield name, float(row)
        except ValueError:
            return
