"""How a worker died, in its last words: real processes that end in each way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bsearch.cluster.last_words import last_words


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("os._exit(3)", "its worker exited with code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its worker was killed by SIGSEGV"),
        ("os.abort()", "its worker was killed by SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "its worker was killed without a trace, as SIGKILL does"),
        (
            "os.waitpid(pid, 0) if (pid := os.fork()) else os._exit(5); os._exit(4)",
            "its worker exited with code 4",
        ),
    ],
)
def test_a_death_is_told(tmp_path: Path, code: str, words: str) -> None:
    program = (
        "import os, signal\nfrom pathlib import Path\nfrom bsearch.cluster.last_words import leave_last_words\n"
        f"leave_last_words(Path({str(tmp_path)!r}))\n{code}"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    process.wait()
    assert last_words(tmp_path, process.pid).startswith(words)


def test_of_another_machine_nothing_is_known(tmp_path: Path) -> None:
    assert last_words(tmp_path / "nowhere", 1) == "its worker died"
