"""What readers of folders have in common: walking through them, and JSON objects in files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ....spaces.boundary.files import foreign, regular
from ....spaces.errors import Fault, StudyFileError, cut
from ..runs import Run

# No file of one run's settings or results is larger; tables and logs may be.
MOST_BYTES, MOST_LOG_BYTES = 1 << 27, 1 << 32


def runs_below(
    source: str, run_of: Callable[[Path, list[str], list[str]], Run | None], expected: str
) -> Iterator[Run]:
    """The run of a folder and those of all folders below it.

    Args:
        run_of: the run of a folder with these folders and files, if it holds one; it may remove folders not to be entered.
        expected: what the source should have been, for the message.

    Raises:
        StudyFileError: a folder cannot be read (which `os.walk` alone would skip), or none holds a run.
    """
    empty = True
    for folder, folders, files in os.walk(Path(source).expanduser(), onerror=_refuse):
        folders.sort()
        with foreign(folder, "a run's files"):
            run = run_of(Path(folder), folders, files)
        if run is not None:
            empty = False
            yield run
    if empty:
        raise StudyFileError(Fault("", f"expected {expected}", source))


def _refuse(error: OSError) -> None:
    raise StudyFileError(
        Fault("", f"expected a folder that can be read: {error.strerror}", str(error.filename))
    )


def json_object(path: Path, text: str | bytes | None = None, line: int = 1) -> dict[str, Any]:
    """A JSON object in a file.

    Args:
        text: a part of the file; default: all of it.
        line: at which the text begins.

    Raises:
        StudyFileError: it cannot be read, or is no object.
    """
    try:
        found = json.loads(regular(path, "JSON", MOST_BYTES).read_bytes() if text is None else text)
    except (OSError, ValueError, RecursionError) as error:
        reason = cut(str(getattr(error, "msg", error)), 200)
        at = line + getattr(error, "lineno", 1) - 1
        message = f"expected JSON, got a damaged file: {reason}. Restore it, or move it away."
        raise StudyFileError(Fault("", message, str(path), at)) from None
    if not isinstance(found, dict):
        message = f"expected a JSON object, got {type(found).__name__}. Move the file away."
        raise StudyFileError(Fault("", message, str(path), line))
    return found
