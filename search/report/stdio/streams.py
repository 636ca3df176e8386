"""Standard streams on which printing cannot fail: no study ends because of what reads its output."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# What tables, plots and units are drawn with, for streams whose encoding lacks it; all else is escaped.
_PLAIN = dict(zip("─━│┃┌┐└┘├┤┬┴┼┏┓┗┛╸╺·–µ×…", "--||+++++++++++++--:-ux.", strict=True)) | {
    "±": "+/-",
    "√": "sqrt",
}
_ERRORS = "bsearch.plain"


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """What is printed instead of characters that cannot be encoded."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(
        _PLAIN.get(letter) or letter.encode("ascii", "backslashreplace").decode() for letter in lacking
    ), error.end


codecs.register_error(_ERRORS, _replaced)


class ReaderGoneError(Exception):
    """What reads standard output, such as `head`, has had enough."""


class Steady:
    """A text stream on which printing cannot fail: what its encoding lacks is replaced, what it does not take is dropped.

    Attributes:
        encoding: of the text that it takes, which is any.
        lost: why it takes nothing any more; None while it does.
        ends: whether it raises, once, that its reader is gone.
    """

    encoding = "utf-8"

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: TextIO = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115  # as long as the process
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self.lost: Exception | None = None
        self.ends = False

    def write(self, text: str) -> int:
        encoded = text.encode(self._encoding, _ERRORS).decode(self._encoding)
        self._try(lambda: self._stream.write(encoded))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Any) -> None:
        if self.lost is not None:
            return
        try:
            action()
        except BlockingIOError:
            pass  # its reader is slow
        except (OSError, ValueError) as error:  # full, closed, or without a reader
            self.lost = error
            if self.ends and isinstance(error, BrokenPipeError):
                raise ReaderGoneError from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def steady(stream: TextIO | None) -> Any:
    return stream if isinstance(stream, Steady) else Steady(stream)


def make_steady() -> None:
    """Make this process's standard output and error steady; a closed one leads nowhere, rather than to the next open file."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout, sys.stderr = steady(sys.stdout), steady(sys.stderr)


@contextmanager
def ends_with_reader() -> Iterator[None]:
    """Context of what prints until it is stopped: it ends where its reader, such as `head`, has had enough.

    Raises:
        ReaderGoneError: it has.
    """
    if isinstance(sys.stdout, Steady):
        sys.stdout.ends = True
    yield


def not_printed() -> str:
    """Why standard output did not take all of this process's; empty where it did, or its reader had enough."""
    sys.stdout.flush()
    error = getattr(sys.stdout, "lost", None)
    if error is None or isinstance(error, BrokenPipeError):
        return ""
    return f"standard output cannot be written: {getattr(error, 'strerror', None) or error}"
