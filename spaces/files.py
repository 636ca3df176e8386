"""Reading untrusted files: their size is limited, and anything but a regular file is rejected unread."""

from __future__ import annotations

import stat
from pathlib import Path

from .errors import Fault, StudyFileError


def text_of(path: Path, what: str, most_bytes: int) -> str:
    """The text of a file.

    Args:
        what: for messages, such as "a study file".

    Raises:
        StudyFileError: no such file, not a regular file (a folder, a pipe, a device), too large, or not UTF-8.
    """

    def rejected(message: str) -> StudyFileError:
        return StudyFileError(Fault("", message, str(path)))

    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise rejected(f"expected {what}, got {'a folder' if path.is_dir() else 'a pipe or a device'}")
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise rejected(f"cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL in the path
        raise rejected("cannot be read: invalid file name") from None
    if len(content) > most_bytes:
        raise rejected(f"expected {what} of at most {most_bytes} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if content.startswith(b"SQLite format 3"):
            raise rejected(
                f"expected {what}, got an SQLite database. Commands that take a URL read it as sqlite:///{path}"
            ) from None
        raise rejected(f"expected UTF-8 text, got byte {content[error.start]:#x}") from None
