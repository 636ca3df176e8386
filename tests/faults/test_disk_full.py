"""The study's disk is full, for real: a small file system of its own is filled while the study runs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import chaos
import pytest
import yaml
from bsearch.spaces.boundary.files import write_file
from bsearch.spaces.errors import OutputError
from conftest import BSEARCH, TASKS
from helpers import SPACE, as_optuna, finished

pytestmark = [pytest.mark.faults]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of eight megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True, text=True, check=False
    )
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


def test_a_full_disk_stops_the_study_and_with_room_again_it_goes_on(
    study_file: Callable[..., Path], small_disk: Path
) -> None:
    database = small_disk / "study.db"
    path = study_file(
        task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 5}, storage=f"sqlite:///{database}"
    )
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
    assert (
        f"storage sqlite:///{database}: the database refused: database or disk is full. Free space on its disk"
        in output
    )
    assert "Traceback" not in output
    (small_disk / "filled").unlink()
    before = finished(database)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    after = finished(database)
    assert before.items() <= after.items()
    assert [trial.state.name for trial in as_optuna(database).trials] == ["COMPLETE"] * 5


def test_a_result_that_finds_no_room_leaves_the_old_one_whole(small_disk: Path) -> None:
    kept = write_file(small_disk / "front.csv", "old\n")
    (small_disk / "room").write_bytes(b"x" * 8192)
    fill(small_disk / "filled")
    os.unlink(small_disk / "room")
    with pytest.raises(OutputError, match=r"front.csv: cannot be written: No space left on device"):
        write_file(kept, "new\n" * 10_000)
    assert kept.read_text() == "old\n"
    assert sorted(file.name for file in small_disk.iterdir()) == ["filled", "front.csv"]


def serial(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [BSEARCH, "run", "--serial", folder / "study.yaml"],
        env={**os.environ, "ENDURES_S": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(300)
def test_without_room_for_checkpoints_trials_go_on_and_with_room_again_nothing_is_lost(
    tmp_path: Path, small_disk: Path
) -> None:
    """The database has room, the checkpoints have none; the driver is killed before and after there is some."""
    trials = 4
    reference = chaos.undisturbed(trials, tmp_path / "undisturbed")
    folder = tmp_path / "study"
    folder.mkdir()
    content = chaos.study(trials)
    content["cluster"] |= {"checkpoints": str(small_disk)}
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    fill(small_disk / "filled")

    def until(what: Callable[[], bool], driver: subprocess.Popen[str]) -> None:
        limit = time.monotonic() + 100
        while not what():
            assert driver.poll() is None, driver.communicate()[0]
            assert time.monotonic() < limit
            time.sleep(0.02)

    def kill(driver: subprocess.Popen[str]) -> str:
        driver.kill()
        output, _ = driver.communicate()
        assert "Traceback" not in output
        return output

    driver = serial(folder)
    until(lambda: len(chaos.finished(folder)) >= 1, driver)
    time.sleep(1.0)
    output = kill(driver)
    assert output.count("the checkpoint could not be written: No space left on device (") == 1, output
    assert [file.name for file in small_disk.rglob("*") if file.is_file()] == ["filled"]
    done = len(chaos.finished(folder))
    (small_disk / "filled").unlink()
    driver = serial(folder)
    until(lambda: any(small_disk.rglob("*.pt")), driver)
    fill(small_disk / "filled")  # the last one stays whole
    time.sleep(0.5)
    kill(driver)
    (small_disk / "filled").unlink()
    driver = serial(folder)
    output, _ = driver.communicate(timeout=100)
    assert driver.returncode == 0, output
    assert "could not be" not in output
    made = chaos.kept(folder)
    complete = [trial for trial in made if trial.values is not None]
    assert {chaos._setting(trial): trial.values[1] for trial in complete} == reference
    assert any(trial.facts.resumed_at is not None for trial in complete)
    assert sum(trial.facts.checkpoint is not None for trial in complete) <= done + 1
    assert not [file for file in small_disk.rglob("*") if file.is_file()]
