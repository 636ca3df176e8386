"""Values as people read them: durations, table cells, bytes, paths."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path

# The trials of a study that something else limits.
UNLIMITED = 10_000


def seconds(value: float | None) -> str:
    """A duration in readable units.

    >>> seconds(0.000123), seconds(0.0123), seconds(0.123), seconds(75.2), seconds(7260)
    ('123 µs', '12.3 ms', '0.123 s', '1 min 15 s', '2 h 1 min')
    """
    if value is None or not math.isfinite(value):
        return "-"
    if value < 0.1:
        return f"{value * 1e6:.3g} µs" if value < 1e-3 else f"{value * 1e3:.3g} ms"
    if value < 60:
        return f"{value:.3g} s"
    if value < 3600:
        return f"{int(value // 60)} min {int(value % 60)} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"


def number(value: object) -> str:
    """A table cell: floats with four significant digits, other values unchanged."""
    if isinstance(value, bool) or not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.4g}"


def out_of(counted: int, trials: int, word: str = "/") -> str:
    """Trials so far, of those of the budget where it limits them; final trainings may come on top.

    >>> out_of(3, 20), out_of(3, 20, " of "), out_of(3, UNLIMITED), out_of(7, 6)
    ('3/20', '3 of 20', '3', '7')
    """
    return str(counted) + ("" if trials == UNLIMITED or counted > trials else f"{word}{trials}")


def readable_bytes(value: float) -> str:
    """Bytes in the binary unit that leaves one to four digits before the decimal point.

    >>> readable_bytes(1536), readable_bytes(10737418240), readable_bytes(12)
    ('1.50 KiB', '10.0 GiB', '12 B')
    """
    unit, *larger = ("B", "KiB", "MiB", "GiB", "TiB")
    while abs(value) >= 1024 and larger:
        value /= 1024
        unit, *larger = larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:#.3g} {unit}"


def plural(count: int, noun: str) -> str:
    """A number of things.

    >>> plural(1, "run"), plural(0, "run")
    ('1 run', '0 runs')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def shell_word(text: str | Path) -> str:
    r"""An argument of a command as it is typed in a shell: quoted where necessary, and never taken for an option.

    >>> print(shell_word("my study.yaml"), shell_word("-x.yaml"), shell_word("two\nlines"))
    'my study.yaml' ./-x.yaml $'two\012lines'
    """
    word = f"./{text}" if str(text).startswith("-") else str(text)
    if word.isprintable():
        return shlex.quote(word)
    typed = (
        chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\{byte:03o}"
        for byte in os.fsencode(word)
    )
    return f"$'{''.join(typed)}'"


def from_here(path: Path) -> str:
    """A path relative to the working directory, if it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):  # the working directory may have been removed
        return str(path)
