"""How a worker's process died, in its own last words: Ray says only that it did.

A worker writes them into a folder of the driver's, named by its process; on another machine, which does not have that folder,
the cause stays unknown. SIGKILL leaves an empty file.
"""

from __future__ import annotations

import faulthandler
import os
import re
from pathlib import Path
from typing import Any

# What the standard library's `faulthandler` writes of a signal.
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_MOST_BYTES = 100_000

_file: Any = None  # of this process, open until its end


def leave_last_words(folder: Path) -> None:
    """Let this process write how it dies into a folder, if this machine has it."""
    global _file
    if _file is not None or not folder.is_dir():
        return
    _file = (folder / str(os.getpid())).open("w", encoding="utf-8")
    faulthandler.enable(_file)
    here, leave = os.getpid(), os._exit

    def noted(code: int) -> Any:
        if os.getpid() == here:  # and not a process that was forked from it
            os.write(_file.fileno(), f"exit {code}\n".encode())
        leave(code)

    os._exit = noted  # type: ignore[assignment]


def last_words(folder: Path, process: int) -> str:
    """How a process died: `its worker was killed by SIGSEGV`; where nothing is known, that it did."""
    try:
        with (folder / str(process)).open("rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return "its worker died"
    if found := re.search(r"^exit (-?\d+)$", text, re.MULTILINE):
        return f"its worker exited with code {found[1]}"
    for words, name in _SIGNALS.items():
        if f"Fatal Python error: {words}" in text:
            return f"its worker was killed by {name}"
    if found := re.search(r"^Fatal Python error: (.+)$", text, re.MULTILINE):
        return f"its worker died of a fatal error of Python: {found[1]}"
    return (
        "its worker was killed without a trace, as SIGKILL does, which the system sends when memory runs out"
    )
