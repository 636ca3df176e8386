"""What a command prints to: encodings, locales, full disks, closed pipes and terminals that are none. Nothing ends for it."""

from __future__ import annotations

import fcntl
import os
import pty
import sqlite3
import struct
import subprocess
import termios
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tiny import BSEARCH, tiny_study

KIND = "streams and locales"
pytestmark = pytest.mark.long
BUG = ("Traceback", "internal error", "Exception ignored", "Errno")
# What a shell writes after the command.
STREAMS: dict[str, tuple[dict[str, str], str]] = {
    "ascii:strict": ({"PYTHONIOENCODING": "ascii:strict"}, ""),
    "PYTHONIOENCODING=latin-1": ({"PYTHONIOENCODING": "latin-1"}, ""),
    "utf-8:strict": ({"PYTHONIOENCODING": "utf-8:strict"}, ""),
    "cp1252": ({"PYTHONIOENCODING": "cp1252"}, ""),
    "LC_ALL=C": ({"LC_ALL": "C"}, ""),
    "LC_ALL=POSIX, no UTF-8 mode": ({"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, ""),
    "/dev/full": ({}, ">/dev/full"),
    "stdout closed": ({}, ">&-"),
    "stderr closed": ({}, "2>&-"),
    "everything closed": ({}, "<&- >&- 2>&-"),
    "a pipe that closes at once": ({}, "| true"),
    "unbuffered, a pipe that closes early": ({"PYTHONUNBUFFERED": "1"}, "| head -1"),
    "stderr to a pipe that closes": ({}, "2>&1 >&- | true"),
    "TERM=dumb": ({"TERM": "dumb"}, ""),
    "COLUMNS=abc": ({"COLUMNS": "abc"}, ""),
}
# Those with which an error is tried as well, whose stream is another.
ERRORS = {"ascii:strict", "LC_ALL=POSIX, no UTF-8 mode", "everything closed", "stderr to a pipe that closes"}
FULL = [name for name in STREAMS if name.startswith("/dev/full")]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a finished study, in a folder whose name not every stream can print."""
    file = tiny_study(tmp_path_factory.mktemp("streams") / "na\u00efve \u6279", budget={"trials": 3})
    subprocess.run([BSEARCH, "run", "--serial", file], check=True, capture_output=True)
    return file


def shell(
    command: str, variables: dict[str, str], *arguments: Path | str
) -> subprocess.CompletedProcess[bytes]:
    """A line of bash, in which "$@" is a command of bsearch's; its exit code is that of the command."""
    return subprocess.run(
        ["bash", "-c", f'"$0" "$@" {command}; exit "${{PIPESTATUS[0]}}"', BSEARCH, *arguments],
        capture_output=True,
        check=False,
        timeout=120,
        env={**os.environ, **variables},
    )


def is_well(done: subprocess.CompletedProcess[bytes], code: int) -> None:
    printed = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == code, f"ended with {done.returncode}: {printed}"
    assert not [word for word in BUG if word in printed], printed


@pytest.mark.parametrize("name", STREAMS)
def test_streams(attack: Callable[..., object], name: str, study: Path) -> None:
    variables, redirected = STREAMS[name]
    with attack(f"show: {name}"):  # type: ignore[attr-defined]
        done = shell(redirected, variables, "show", study)
        is_well(done, 1 if name in FULL else 0)
        if name in FULL:
            assert b"No space left on device" in done.stderr
        if "ascii" in name or "POSIX" in name:
            done.stdout.decode("ascii")
            assert b"\\u25" not in done.stdout  # frames have characters of their own there
    if name not in ERRORS:
        return
    with attack(f"an error: {name}"):  # type: ignore[attr-defined]
        is_well(
            shell(redirected, variables, "show", study.parent / os.fsdecode(b"caf\xe9 \xe2\x82\xac.yaml")), 2
        )


@pytest.mark.parametrize("name", ["LC_ALL=POSIX, no UTF-8 mode", "/dev/full"])
def test_a_study_runs_to_its_end(attack: Callable[..., object], name: str, tmp_path: Path) -> None:
    variables, redirected = STREAMS[name]
    folder = tmp_path / "na\u00efve \u6279"
    file = tiny_study(folder, budget={"trials": 3})
    with attack(f"run: {name}"):  # type: ignore[attr-defined]
        is_well(shell(redirected, variables, "run", "--serial", file), 1 if name in FULL else 0)
        with closing(sqlite3.connect(folder / "small.db")) as connection:
            assert connection.execute(
                "SELECT COUNT(*) FROM bsearch_trial WHERE outcome = 'complete'"
            ).fetchone() == (3,)


@pytest.mark.parametrize("variables", [{}, {"PYTHONIOENCODING": "ascii"}], ids=["utf-8", "ascii"])
def test_a_terminal_of_forty_columns(
    attack: Callable[..., object], variables: dict[str, str], study: Path
) -> None:
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 40, 0, 0))
    with attack(f"show on 40 columns: {variables}"):  # type: ignore[attr-defined]
        shown = subprocess.Popen(
            [BSEARCH, "show", study],
            stdout=side,
            stderr=side,
            env={**os.environ, "TERM": "xterm", **variables},
        )
        os.close(side)
        printed = b""
        try:
            while piece := os.read(main, 4096):
                printed += piece
        except OSError:  # its end is closed
            pass
        assert shown.wait(60) == 0
        text = printed.decode("ascii" if "PYTHONIOENCODING" in variables else "utf-8")
        assert "Front of small" in text
        assert not [word for word in BUG if word in text], text
    os.close(main)


PRINTS = """
import sys, warnings
import bsearch
study = bsearch.run(sys.argv[1], serial=True)
sys.exit(0 if len(study.trials) == 3 else 1)
"""


def test_python(attack: Callable[..., object], tmp_path: Path) -> None:
    file = tiny_study(tmp_path / "na\u00efve \u6279", budget={"trials": 3})
    command = [Path(BSEARCH).parent / "python", "-c", PRINTS, file]
    with attack("bsearch.run in Python: ascii"):  # type: ignore[attr-defined]
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            timeout=120,
            env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
        )
        assert done.returncode == 0, done.stderr.decode()
