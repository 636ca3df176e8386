"""Files: untrusted ones are read within limits, and only if they are regular files; results are written whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from .errors import Fault, OutputError, StudyFileError
from .readable import shell_word
from .storage import sqlite_url


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
                f"expected {what}, got an SQLite database. Commands that take a URL read it as {shell_word(sqlite_url(path))}"
            ) from None
        raise rejected(f"expected UTF-8 text, got byte {content[error.start]:#x}") from None


def write_file(path: Path, content: str | bytes) -> Path:
    """Write a file atomically; in text, what UTF-8 cannot express, such as a file name that is none, is escaped.

    Raises:
        OutputError: the folder cannot be written.
    """
    content = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # /dev/null or a pipe: written to, not replaced
            path.write_bytes(content)
            return path
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as temporary:
            try:
                temporary.write(content)
                temporary.flush()
                os.fsync(temporary.fileno())  # some file systems report only here that they are full
                os.fchmod(temporary.fileno(), 0o644)
                os.replace(temporary.name, path)
            except BaseException:
                os.unlink(temporary.name)
                raise
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}. Choose another location.") from None
    return path
