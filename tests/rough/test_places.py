"""Where a command stands and how it ends: closed terminals, long temporary folders, folders that go, what it says to type."""

from __future__ import annotations

import os
import shlex
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import bsearch
import pytest
from helpers import bsearch as entered
from tiny import BSEARCH, TASK, tiny_study

KIND = "places and signals"
pytestmark = pytest.mark.long
BUG = ("Traceback", "internal error", "Errno")
READS = TASK.replace(
    "inputs = torch.randn",
    'from pathlib import Path\n        assert Path("data/words.txt").read_text()\n        inputs = torch.randn',
)
SLOW = TASK.replace(
    "    def model",
    """    def loss(self, model, batch, setup):
        import time
        time.sleep(0.05 * (setup.samples_budget > 24))
        return super().loss(model, batch, setup)

    def model""",
)
REMOVES = TASK.replace(
    "        return torch",
    "        import os, shutil\n        shutil.rmtree(os.environ['STANDS'], ignore_errors=True)\n        return torch",
)
MOVES = TASK.replace("        return torch", '        import os\n        os.chdir("/")\n        return torch')


def printed(*arguments: Any) -> str:
    """What a command prints; it must end well, and without a word of a bug."""
    done = entered(*arguments)
    assert done.exit_code == 0, f"{arguments[0]} ended with {done.exit_code}: {done.output!r}"
    assert not [word for word in BUG if word in done.output], done.output
    return done.output


def count(database: Path, trials: str) -> int:
    with closing(sqlite3.connect(database)) as connection:
        return int(connection.execute(f"SELECT COUNT(*) FROM bsearch_trial WHERE {trials}").fetchone()[0])  # noqa: S608


def begun(database: Path) -> bool:
    try:
        return count(database, "1") > 0
    except sqlite3.OperationalError:  # it has no tables yet
        return False


def own_mark() -> str:
    """How a driver's process is marked: its namespace, and when it started."""
    return f"{os.stat('/proc/self/ns/pid').st_ino}.1"


def test_a_closed_terminal(attack: Callable[..., Any], tmp_path: Path) -> None:
    space = {"effective_batch": 8, "reference_rate": {"low": 0.1, "high": 0.5}, "epochs": 60}
    file, database = tiny_study(tmp_path, SLOW, space=space), tmp_path / "small.db"
    with attack("SIGHUP ends a study in order"):
        run = subprocess.Popen(
            [BSEARCH, "run", "--serial", file], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        until = time.monotonic() + 90
        while time.monotonic() < until and not (database.exists() and begun(database)):
            time.sleep(0.1)
        time.sleep(0.5)
        run.send_signal(signal.SIGHUP)
        said, _ = run.communicate(timeout=60)
        assert run.returncode == 143, f"{run.returncode}: {said}"
        assert "stopping" in said
        with closing(sqlite3.connect(database)) as connection:
            assert connection.execute("SELECT holder FROM bsearch_study").fetchone() == (None,)


def test_a_driver_that_is_gone(attack: Callable[..., Any], tmp_path: Path) -> None:
    file = tiny_study(tmp_path)
    printed("run", "--serial", file)
    with closing(sqlite3.connect(tmp_path / "small.db")) as connection:
        connection.execute("UPDATE bsearch_trial SET outcome = 'running', ended_at = NULL WHERE number = 1")
        connection.commit()
    with attack("show says that nobody runs a study with begun trials"):
        assert "No driver is running small" in printed("show", file)
    with closing(sqlite3.connect(tmp_path / "small.db")) as connection:
        dead = subprocess.run(
            ["bash", "-c", "echo $$"], capture_output=True, text=True, check=True
        ).stdout.strip()
        holder = f"{os.uname().nodename}:{dead}:2026-01-01 00:00:00 UTC {own_mark()}-abcdef12"
        connection.execute("UPDATE bsearch_study SET holder = ?, heartbeat_at = 1", (holder,))
        connection.commit()
    with attack("show says so of a driver that was killed"):
        assert "No driver is running small" in printed("show", file)


@pytest.mark.parametrize(
    "name", ["two words", "$HOME", "a;b", "it's", "-dash", "[x]*", "new\nline", "caf\udce9"]
)
def test_what_is_suggested_can_be_typed(
    attack: Callable[..., Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_study(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    file = f"./{name}/study.yaml" if name.startswith("-") else f"{name}/study.yaml"
    said = entered("run", "--serial", file).output
    with attack(f"{name!r}: the commands under Next"):
        lines = [line for line in said.splitlines() if line.startswith("  bsearch ")]
        assert len(lines) == 5, said
        for line in lines:
            typed = line.split("   ")[0].strip().split("  ")[0]
            argument = subprocess.run(
                ["bash", "-c", f'bsearch() {{ printf "%s" "$2"; }}; {typed}'], capture_output=True, check=True
            ).stdout
            assert Path(os.fsdecode(argument)) == Path(file), f"{typed}: {argument!r}"


def test_files_that_look_like_options(
    attack: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_study(tmp_path).rename(tmp_path / "-x.yaml")
    monkeypatch.chdir(tmp_path)
    with attack("-x.yaml"):
        said = entered("run", "--serial", "--", "-x.yaml").output
        typed = (
            next(line for line in said.splitlines() if line.startswith("  bsearch show"))
            .strip()
            .split("  ")[0]
        )
        assert entered(*shlex.split(typed)[1:]).exit_code == 0


@pytest.mark.parametrize("task", ["REMOVES", "MOVES"])
def test_a_task_that_leaves_its_folder(
    attack: Callable[..., Any], task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_study(tmp_path / "study", globals()[task])
    stands = tmp_path / "stands"
    stands.mkdir()
    monkeypatch.setenv("STANDS", str(stands))
    monkeypatch.chdir(stands)
    with attack(f"{task}: run"):
        done = entered("run", "--serial", os.path.relpath(file, stands))
        assert "internal error" not in done.output, done.output
        # Torch needs a working directory to import a part of itself.
        if task == "REMOVES" and done.exit_code == 2:
            assert "a test step failed: FileNotFoundError" in done.output
            return
        assert done.exit_code == 0, done.output
        assert count(file.parent / "small.db", "outcome = 'complete'") == 2
        assert (file.parent / "results" / "small" / "front.json").is_file()


def test_a_folder_that_is_gone(
    attack: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_study(tmp_path / "study")
    printed("run", "--serial", file)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for command in ("show", "export", "report", "run"):
        with attack(f"{command} from a folder that is gone"):
            printed(command, *["--serial"] * (command == "run"), file)


def test_progress_in_a_file(attack: Callable[..., Any], tmp_path: Path) -> None:
    file = tiny_study(tmp_path)
    with attack("lines of progress are not wrapped"), redirect_stdout(StringIO()) as said:
        bsearch.run(file, serial=True)
    with attack("a line is whole"):
        assert next(line for line in said.getvalue().splitlines() if line.startswith("examined:")).endswith(
            ")"
        )


def test_ray(attack: Callable[..., Any], tmp_path: Path) -> None:
    """A long TMPDIR, as Slurm has it, and data whose path is relative, in one run on Ray."""
    folder = Path(tempfile.mkdtemp(prefix="rough-", dir=tmp_path))
    file = tiny_study(folder / "study", READS)
    stands, temporary = folder / "stands", folder / ("slurm_job_4711_" * 6)
    temporary.mkdir()
    (stands / "data").mkdir(parents=True)
    (stands / "data" / "words.txt").write_text("words")
    for command in (["check"], ["run"], ["train", "--serial", "--pick", "best"]):
        with attack(f"relative data, a long TMPDIR: {' '.join(command)}"):
            done = subprocess.run(
                [BSEARCH, *command, file],
                cwd=stands,
                env={**os.environ, "TMPDIR": str(temporary)},
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
            assert done.returncode == 0, done.stdout + done.stderr
    with attack("all trials of these runs are complete"):
        assert count(file.parent / "small.db", "outcome = 'complete'") == 2
