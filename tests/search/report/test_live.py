"""What is seen while a study runs, on real pseudo-terminals, in pipes, and from another terminal beside a real driver."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import sqlite3
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pyte
import pytest
from bsearch.search.report.terminal.live import Picture
from bsearch.search.run.view import RunningTrial, StudyView
from bsearch.spaces.front import ParetoFront
from bsearch.spaces.record import TrialFacts, TrialRecord
from conftest import BSEARCH, TASKS
from helpers import SPACE
from rich.console import Console

PLAIN = {
    key: value
    for key, value in os.environ.items()
    if key not in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")
}
COLOUR = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")


class Terminal:
    """A pseudo-terminal with a command on it, and what its screen shows."""

    def __init__(
        self, command: list[object], columns: int, rows: int, environment: Mapping[str, str]
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self._ours, theirs = pty.openpty()
        self._size(columns, rows)
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=PLAIN | {"TERM": "xterm-256color"} | environment,
            start_new_session=True,
        )
        os.close(theirs)

    def _size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        self._size(columns, rows)
        self.screen.resize(rows, columns)
        self.process.send_signal(signal.SIGWINCH)

    def read(self, seconds: float) -> bool:
        """Show what comes within this time; False where the command has ended and said all."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if not select.select([self._ours], [], [], left_s)[0]:
                return True
            try:
                came = os.read(self._ours, 65536)
            except OSError:
                return False
            if not came:
                return False
            self.written += came
            self._stream.feed(came)
        return True

    def until(self, seen: str, most_s: float = 120) -> None:
        begun = time.monotonic()
        while not re.search(seen, self.text()):
            assert time.monotonic() - begun < most_s, self.text()
            assert self.read(0.2), f"ended without {seen!r}:\n{self.text()}"

    def end(self, most_s: float = 120) -> int:
        begun = time.monotonic()
        while self.read(1.0):
            assert time.monotonic() - begun < most_s, self.text()
        return self.process.wait(10)

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


@contextmanager
def terminal(*command: object, columns: int = 100, rows: int = 30, **environment: str) -> Iterator[Terminal]:
    made = Terminal(list(command), columns, rows, environment)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def slow(study_file: Callable[..., Path]) -> Path:
    """A study whose trials take seconds, so that there is something to see."""
    return study_file(task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 3})


@pytest.mark.slow
def test_a_run_shows_trials_and_the_time_left_and_ends_with_the_front(slow: Path) -> None:
    with terminal(BSEARCH, "run", slow, "--serial", columns=120, rows=40) as seen:
        seen.until(r"small +\S+ +1/3 trials, .* so far, about .* left")
        assert seen.screen.cursor.hidden
        seen.until(r"trial \d +\S+ +B \d+ +rate \S+ +accuracy \S+ +\S.* left +\S+ cpu")
        assert seen.end() == 0
        assert "Next:" in seen.text()
        assert not seen.screen.cursor.hidden
        # The picture was wiped out, and a trial that ended well had no line of its own.
        assert " so far" not in seen.text()
        assert COLOUR.search(seen.written)


@pytest.mark.slow
def test_ctrl_c_gives_the_terminal_back_as_it_was(slow: Path) -> None:
    with terminal(BSEARCH, "run", slow, "--serial") as seen:
        seen.until("1/3 trials")
        seen.process.send_signal(signal.SIGINT)
        assert seen.end() == 130
        assert "To resume:" in seen.text()
        assert not seen.screen.cursor.hidden
        assert b"\x1b[?1049h" not in seen.written  # nor was another screen in between


@pytest.mark.slow
@pytest.mark.long
def test_a_terminal_may_shrink_and_grow(study_file: Callable[..., Path]) -> None:
    path = study_file(task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 10})
    with terminal(BSEARCH, "run", path, "--serial", columns=120, rows=40) as seen:
        seen.until("1/10 trials")
        for columns, rows in [(60, 16), (40, 12), (10, 2)]:
            seen.resize(columns, rows)
            seen.read(0.7)
            mark = len(seen.written)
            seen.read(0.7)
            # What was drawn since keeps to the new size.
            drawn = seen.written[mark:].decode(errors="replace")
            pieces = [
                re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", piece)
                for piece in re.split(r"[\r\n]|\x1b\[[0-9]*[AK]", drawn)
            ]
            assert max(map(len, pieces)) <= columns
            assert seen.process.poll() is None
        seen.resize(120, 40)
        assert seen.end() == 0
        assert not seen.screen.cursor.hidden


@pytest.mark.long
@pytest.mark.slow
def test_no_color_draws_without_colour(slow: Path) -> None:
    with terminal(BSEARCH, "run", slow, "--serial", NO_COLOR="1") as seen:
        seen.until("1/3 trials")
        assert seen.end() == 0
        assert not COLOUR.search(seen.written)


@pytest.mark.slow
@pytest.mark.parametrize("dumb", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_pipe_and_a_dumb_terminal_get_a_line_per_trial(slow: Path, dumb: bool) -> None:
    if dumb:
        with terminal(BSEARCH, "run", slow, "--serial", TERM="dumb", columns=200) as seen:
            assert seen.end() == 0
            written = seen.written.decode()
    else:
        written = subprocess.run(
            [BSEARCH, "run", slow, "--serial"], capture_output=True, text=True, check=True
        ).stdout
    assert "\x1b" not in written
    assert re.findall(r"\[(\d)/3\] trial \d complete: accuracy", written) == ["1", "2", "3"]


@pytest.mark.long
@pytest.mark.slow
def test_a_trial_that_fails_leaves_a_line_above_the_picture(study_file: Callable[..., Path]) -> None:
    tasks = study_file().with_name("tasks.py")
    tasks.write_text(
        "import time\n"
        "from bsearch.spaces.trial import Measurement\n"
        "def train(setup):\n"
        "    for part in (0.25, 0.5, 0.75, 1.0):\n"
        "        time.sleep(0.5)\n"
        "        if setup.number == 1: raise RuntimeError('no such thing')\n"
        "        yield Measurement(int(setup.samples_budget * part), 2 * part, 0.5)\n"
    )
    with terminal(
        BSEARCH,
        "run",
        study_file(task=f"{tasks}:train", space=SPACE, budget={"trials": 3}, training={"samples": 1000}),
        "--serial",
    ) as seen:
        seen.until(r"trial 1 error: .*no such thing[^$]*1 complete, 1 error")
        assert seen.end() == 0


@pytest.mark.slow
@pytest.mark.long
def test_another_terminal_follows_a_driver_until_the_study_is_done(study_file: Callable[..., Path]) -> None:
    path = study_file(task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 10})
    with driven(path) as driver:
        piped = subprocess.Popen([BSEARCH, "show", path, "--watch"], stdout=subprocess.PIPE, text=True)
        with piped, terminal(BSEARCH, "show", path, "--watch", columns=120, rows=50) as seen:
            seen.until(rf"run by process {driver.pid} on \S+ since .*, seen \d+ s ago")
            seen.until(r"trial \d+ +\S+ +B \d+ +rate \S+")
            assert seen.end() == 0
            assert "small is done: 10 of 10 trials are done." in seen.text()
            assert not seen.screen.cursor.hidden
            output = piped.communicate(timeout=400)[0]
        assert driver.wait(60) == 0
    assert piped.returncode == 0
    assert "\x1b" not in output
    assert re.search(r"\[10/10\] trial \d+ (complete|stopped): accuracy", output)
    assert output.rstrip().endswith("small is done: 10 of 10 trials are done.")


@pytest.mark.slow
def test_a_watcher_goes_when_it_is_told_to_or_when_the_driver_is_gone(
    study_file: Callable[..., Path],
) -> None:
    path = study_file(task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 400})
    with driven(path) as driver:
        with terminal(BSEARCH, "show", path, "--watch") as seen:
            seen.until("run by process")
            seen.process.send_signal(signal.SIGINT)
            assert seen.end() == 130
            assert "stopped watching; the study keeps running" in seen.text()
            assert not seen.screen.cursor.hidden
        assert driver.poll() is None
        with terminal(BSEARCH, "show", path, "--watch", columns=200, rows=50) as seen:
            seen.until("run by process")
            driver.kill()
            driver.wait()
            assert seen.end() == 1
            gone = rf"The driver of small is gone: process {driver.pid} on .*`bsearch run` resumes it"
            assert re.search(gone, seen.text(), re.DOTALL)
    again = subprocess.run([BSEARCH, "show", path, "--watch"], capture_output=True, text=True, check=False)
    assert (again.returncode, "is gone" in again.stdout) == (1, True)


@contextmanager
def driven(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real driver of a study, from when it has begun."""
    with subprocess.Popen([BSEARCH, "run", path, "--serial"], stdout=subprocess.DEVNULL) as driver:
        try:
            while not held(path.with_name("small.db")):
                assert driver.poll() is None
                time.sleep(0.1)
            yield driver
        finally:
            if driver.poll() is None:
                driver.kill()


def held(database: Path) -> bool:
    with (
        suppress(sqlite3.OperationalError),
        closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection,
    ):
        return (
            connection.execute("SELECT 1 FROM bsearch_study WHERE holder IS NOT NULL").fetchone() is not None
        )
    return False


def many_trials(count: int) -> StudyView:
    facts = TrialFacts(effective_batch=123456, learning_rate=1.234e-05, rule="linear", epochs=3)
    records = tuple(
        TrialRecord(number, "complete", {}, facts, 10.0 * 1.1**number, 0.5 + number / 1000)
        for number in range(count)
    )
    running = tuple(
        RunningTrial(
            count + index, "a-host-with-a-long-name.example.org (10.0.0.1) gpu", 4096, 0.1, 0.5, 0.7, 12.0, 1
        )
        for index in range(50)
    )
    name = "a study of a very long name \x1b[31m"
    front = ParetoFront(records)
    return StudyView(
        name,
        400,
        count,
        {"complete": count, "out_of_memory": 3},
        running,
        front,
        records,
        100.0,
        4000.0,
        "you",
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 12, 16, 24, 40, 100])
@pytest.mark.parametrize("columns", [5, 10, 20, 39, 40, 60, 80, 100, 120, 300])
def test_a_picture_fits_every_terminal(columns: int, rows: int) -> None:
    view = many_trials(300)
    console = Console(width=columns, height=rows, force_terminal=True, color_system=None, highlight=False)
    with console.capture() as came:
        console.print(Picture(lambda: view), end="")
    lines = came.get().split("\n")
    assert len(lines) <= max(rows - 1, 1)
    assert all(len(line) <= columns for line in lines)
    assert "\x1b" not in came.get()


def test_the_least_needed_is_left_out_first() -> None:
    view = many_trials(30)

    def drawn(columns: int, rows: int) -> str:
        console = Console(width=columns, height=rows, force_terminal=True, color_system=None, highlight=False)
        with console.capture() as came:
            console.print(Picture(lambda: view), end="")
        return came.get()

    assert "30/400 trials, 1 min 40 s so far, about 1 h 6 min left" in drawn(120, 40)
    assert "(o front, * baseline)" in drawn(120, 40)
    assert "30 complete, 3 out of memory" in drawn(80, 24)
    assert "(o front, * baseline)" not in drawn(40, 12)
    assert "30/400" in drawn(80, 3)


@pytest.mark.long
def test_a_watcher_waits_for_a_study_that_is_about_to_begin_and_for_a_raised_budget(
    study_file: Callable[..., Path],
) -> None:
    for trials in (2, 4):
        path = study_file(task=f"{TASKS}:Points", space=SPACE, budget={"trials": trials})
        with subprocess.Popen(
            [BSEARCH, "show", path, "--watch"], stdout=subprocess.PIPE, text=True
        ) as watcher:
            time.sleep(4)  # it has looked by then, and found nothing, or a study that is done
            subprocess.run([BSEARCH, "run", path, "--serial"], check=True, stdout=subprocess.DEVNULL)
            output = watcher.communicate(timeout=400)[0]
        assert watcher.returncode == 0
        assert output.rstrip().endswith(f"small is done: {trials} of {trials} trials are done.")
