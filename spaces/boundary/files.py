"""Files: untrusted ones are read within limits, and only if they are regular files; results are written whole or not at all,
under names that stay in their folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import BsearchError, Fault, OutputError, StudyFileError, cut
from ..readable import shell_word
from .storage import sqlite_url

# Characters of a file's name besides letters and digits; the rest separates folders or means something to a shell or a system.
_NAME = frozenset("._-+=@,()[] ")
_LONGEST = 120  # characters: systems allow 255 bytes, of which an ending takes some


def file_name(name: str) -> str:
    """One file or folder's name made of any text: it names something in its folder, and differs where texts differ.

    >>> file_name("width"), file_name("../up/x"), file_name("")
    ('width', '%2E.%2Fup%2Fx', '%')
    """
    escaped = "".join(
        character
        if (character.isalnum() or character in _NAME) and not (character == "." and at == 0)
        else "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
        for at, character in enumerate(name)
    )
    if len(escaped.encode()) > _LONGEST:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        escaped = f"{escaped.encode()[: _LONGEST - 20].decode(errors='ignore')}-{digest}"
    return escaped or "%"


def regular(path: Path, what: str, most_bytes: int) -> Path:
    """A file that can be read and has an end: the door that every file of somebody else's goes through.

    Args:
        what: for messages, such as "a study file".

    Raises:
        StudyFileError: no such file, not a regular file (a folder, a pipe, a device), or too large.
    """

    def rejected(message: str) -> StudyFileError:
        return StudyFileError(Fault("", message, str(path)))

    try:
        found = path.stat()
    except OSError as error:
        raise rejected(f"cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL in the path
        raise rejected("cannot be read: invalid file name") from None
    if not stat.S_ISREG(found.st_mode):
        raise rejected(f"expected {what}, got {'a folder' if path.is_dir() else 'a pipe or a device'}")
    if found.st_size > most_bytes:
        raise rejected(f"expected {what} of at most {most_bytes} bytes")
    return path


@contextmanager
def foreign(where: str, what: str) -> Iterator[None]:
    """The boundary of somebody else's parser: whatever it raises is said of the file, as which errors it has is its own affair.

    Raises:
        StudyFileError: it raised anything but an error of ours.
    """
    try:
        yield
    except BsearchError:
        raise
    except Exception as error:
        reason = cut(str(getattr(error, "strerror", None) or error).strip().partition("\n")[0], 200)
        got = f"{type(error).__name__}{': ' * bool(reason)}{reason}"
        message = f"expected {what}: {got}. Mend it, or move it away."
        raise StudyFileError(Fault("", message, where)) from None


def text_of(path: Path, what: str, most_bytes: int) -> str:
    """The text of a file.

    Args:
        what: for messages, such as "a study file".

    Raises:
        StudyFileError: as `regular`, or it is not UTF-8.
    """

    def rejected(message: str) -> StudyFileError:
        return StudyFileError(Fault("", message, str(path)))

    try:
        with regular(path, what, most_bytes).open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise rejected(f"cannot be read: {error.strerror}") from None
    if len(content) > most_bytes:  # it grew
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
        temporary = path.with_name(f".{path.name[:_LONGEST]}.{uuid.uuid4().hex[:8]}")
        try:
            with temporary.open("xb") as file:  # with the permissions that the user's umask leaves
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # some file systems report only here that they are full
            if path.is_file() and not path.is_symlink():
                shutil.copymode(path, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        full = "Free space there, or choose" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Choose"
        raise OutputError(f"{path}: cannot be written: {error.strerror}. {full} another location.") from None
    return path
