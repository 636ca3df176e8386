"""Reading files that others may have written: their size is bounded, and what is no plain file is refused unread."""

from __future__ import annotations

import stat
from pathlib import Path

from .errors import Fault, StudyFileError


def text_of(path: Path, what: str, most_bytes: int) -> str:
    """The text of a file.

    Args:
        what: for messages, such as "a study file".

    Raises:
        StudyFileError: no such file, no plain file (a folder, a pipe, a device), too large, or not UTF-8.
    """

    def refused(words: str) -> StudyFileError:
        return StudyFileError(Fault("", words, str(path)))

    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise refused(f"expected {what}, got {'a folder' if path.is_dir() else 'a pipe or a device'}")
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise refused(f"cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL in the path
        raise refused("cannot be read: no file has such a name") from None
    if len(content) > most_bytes:
        raise refused(f"expected {what} of at most {most_bytes} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if content.startswith(b"SQLite format 3"):
            raise refused(
                f"expected {what}, got an SQLite database. Commands that take a URL read it as sqlite:///{path}"
            ) from None
        raise refused(f"expected UTF-8 text, got byte {content[error.start]:#x}") from None
