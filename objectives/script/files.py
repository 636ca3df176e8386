"""Where a script's files go: what it writes below its folder is kept apart, so that trials leave the user's files alone."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Records of a training, whose new rows are read after a pass.
_RECORDS = (".csv", ".json", ".jsonl")


class FilesApart:
    """Files that are written below `folder` go below `apart`, and are read from there again."""

    def __init__(self, folder: Path, apart: Path) -> None:
        self._folder, self._apart = folder.resolve(), apart
        self.read: dict[Path, None] = {}
        self._open, self._known = weakref.WeakSet[Any](), dict[Path, tuple[int, int]]()
        self._rows, self._lengths = dict[Path, int](), dict[tuple[Path, str], int]()

    def opened(self, file: Any, name: Any, *, writes: bool) -> Any:
        """Take note of a file that the script has opened, by which name."""
        if writes:
            self._open.add(file)
        elif isinstance(name, str | os.PathLike):
            self.read[Path(os.path.abspath(name))] = None  # noqa: PTH100
        return file

    def new_rows(self) -> list[str]:
        """The numbers in rows that records have had added since the last call, as lines `name: value`.

        Of JSON that is written anew, all numbers, but of lists the last where the list is longer now.
        """
        for file in [one for one in self._open if not one.closed]:
            file.flush()
        lines: list[str] = []
        for path in sorted(self._apart.rglob("*")):
            if path.suffix in _RECORDS and path.is_file():
                seen = path.stat()
                state = seen.st_mtime_ns, seen.st_size
                if self._known.get(path) != state:
                    self._known[path] = state
                    lines += [f"{name}: {value!r}\n" for name, value in self._new_numbers(path)]
        return lines

    def _new_numbers(self, path: Path) -> Iterator[tuple[str, float]]:
        try:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".json":
                yield from self._numbers(path, json.loads(text))
                return
            rows = (
                [*csv.DictReader(text.splitlines())]
                if path.suffix == ".csv"
                else [*map(json.loads, text.splitlines())]
            )
        except (ValueError, csv.Error, RecursionError):
            return
        before, self._rows[path] = self._rows.get(path, 0), len(rows)
        for row in rows[before if before <= len(rows) else 0 :]:
            texts = [value for value in row.values() if isinstance(value, str) and _number_of(value) is None]
            prefix = "/".join([*texts, ""]) if len(texts) < len(row) else ""
            yield from ((f"{prefix}{name}", value) for name, value in self._numbers(path, row))

    def _numbers(self, path: Path, row: Any, name: str = "") -> Iterator[tuple[str, float]]:
        """The numbers of a row by name."""
        if isinstance(row, dict):
            for key, value in row.items():
                yield from self._numbers(path, value, f"{name}/{key}".strip("/"))
        elif isinstance(row, list) and row:
            before, self._lengths[path, name] = self._lengths.get((path, name), 0), len(row)
            if len(row) != before:
                yield from self._numbers(path, row[-1], name)
        elif (number := _number_of(row)) is not None and name:
            yield name, number

    def place_of(self, file: Any, *, writes: bool, removes: bool = False, keeps: bool = False) -> Any:
        """Where a file is; what is no path, or lies elsewhere, as it is.

        Args:
            removes: it goes from there.
            keeps: what is written is added to what the user's file has.

        Raises:
            PermissionError: it would be removed, and is the user's.
        """
        if (both := self._both(file)) is None:
            return file
        path, there = both
        if writes:
            os.makedirs(there.parent, exist_ok=True)  # noqa: PTH103
            if keeps and path.is_file() and not there.exists():
                shutil.copyfile(path, there)
        elif removes and not there.exists():
            self.check(path)
        if there.is_dir() and path.is_dir() and not removes:
            return file  # `beside` has what was written there
        return str(there) if writes or there.exists() else file

    def beside(self, folder: Any) -> str | None:
        """Where files are that were written below a folder of the user's; None where there are none."""
        path, there = self._both(folder) or (Path(), Path())
        return str(there) if path != there and there.is_dir() and path.is_dir() else None

    def check(self, file: Any) -> None:
        """Check that a file that is changed where it lies, or handed to another program, is none of the user's.

        Raises:
            PermissionError: it is below the folder, and was there before.
        """
        path, _ = self._both(file) or (self._folder, None)
        ours = "__pycache__" in path.parts or path == self._folder or path.is_relative_to(sys.prefix)
        if not ours and os.path.lexists(path):
            raise PermissionError(
                f"{path}: a trial neither changes nor removes files of the script's folder, nor hands them to other programs"
            )

    def _both(self, file: Any) -> tuple[Path, Path] | None:
        """A file below the folder, however it is spelled, and where it lies apart; None for another."""
        if not isinstance(file, str | bytes | os.PathLike):
            return None
        spelled = os.path.abspath(os.fsdecode(file))  # noqa: PTH100
        # What a link in the folder leads to elsewhere is below it too.
        for path in map(Path, (os.path.realpath(spelled), spelled)):
            if path.is_relative_to(self._folder) and not path.is_relative_to(self._apart):
                return path, self._apart / path.relative_to(self._folder)
        return None


def _number_of(value: Any) -> float | None:
    """A number, or a text that is one."""
    if not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
