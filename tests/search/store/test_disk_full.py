"""The study's disk is full, for real: a small file system of its own is filled while the study runs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from bsearch.search.store.optuna_storage import open_storage
from bsearch.spaces.errors import OutputError
from bsearch.spaces.files import write_file
from conftest import BSEARCH, TASKS
from helpers import SPACE, finished

pytestmark = [pytest.mark.faults]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of eight megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def fill(file: Path) -> None:
    """Take all the room there is."""
    with file.open("wb", buffering=0) as out:
        for size in (65536, 4096, 1):
            try:
                while out.write(b"x" * size):
                    pass
            except OSError:
                continue


def test_a_full_disk_stops_the_study_and_with_room_again_it_goes_on(study_file: Callable[..., Path], small_disk: Path) -> None:
    database = small_disk / "study.db"
    path = study_file(task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 5}, storage=f"sqlite:///{database}")
    command = [BSEARCH, "run", path, "--serial"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        limit = time.monotonic() + 400
        while len(finished(database)) < 2:
            assert driver.poll() is None, driver.communicate()[0]
            assert time.monotonic() < limit
            time.sleep(0.05)
        # The journal has room of its own until it grows: the file takes back what the driver frees.
        while driver.poll() is None:
            fill(small_disk / "filled")
            assert time.monotonic() < limit, "the study never noticed"
            time.sleep(0.1)
    finally:
        driver.kill()
        output, _ = driver.communicate()
    assert driver.returncode == 1, output
    assert f"storage sqlite:///{database}: the database refused: database or disk is full. Free space on its disk" in output
    assert "Traceback" not in output
    (small_disk / "filled").unlink()
    before = finished(database)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    after = finished(database)
    assert before.items() <= after.items()
    trials = optuna.load_study(study_name="small", storage=open_storage(f"sqlite:///{database}")).trials
    states = [trial.state.name for trial in trials]
    assert (states.count("COMPLETE"), set(states) - {"COMPLETE", "FAIL"}) == (5, set())


def test_a_result_that_finds_no_room_leaves_the_old_one_whole(small_disk: Path) -> None:
    kept = write_file(small_disk / "front.csv", "old\n")
    (small_disk / "room").write_bytes(b"x" * 8192)
    fill(small_disk / "filled")
    os.unlink(small_disk / "room")
    with pytest.raises(OutputError, match=r"front.csv: cannot be written: No space left on device"):
        write_file(kept, "new\n" * 10_000)
    assert kept.read_text() == "old\n"
    assert sorted(file.name for file in small_disk.iterdir()) == ["filled", "front.csv"]
