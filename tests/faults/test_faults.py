"""Every fault once, on real processes and machines: no finished trial is lost or repeated, none is left RUNNING."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from chaos import BIN, Chaos, _command, _parent, finished, kept, study, undisturbed
from machines import network

pytestmark = [pytest.mark.faults]


@pytest.mark.timeout(600)
def test_whatever_dies_the_study_ends_as_if_nothing_had(tmp_path: Path) -> None:
    trials = 24  # each fault waits for one to finish, and a few finish meanwhile
    seed = random.randrange(1000)
    rng = random.Random(seed)
    reference = undisturbed(trials, tmp_path / "undisturbed")
    with network() as made:
        made.variables["ENDURES_S"] = "2"
        chaos = Chaos(made, tmp_path / "study", trials)
        names = list(chaos.faults)
        rng.shuffle(names)
        happened = chaos.run(names, rng)
        assert chaos.broken(reference) == [], f"seed {seed}, faults {happened}"
    assert len(happened) >= len(names) // 2, "the study ended before the faults did"
    print("\n".join(f"{name:<22} next trial after {seconds:5.1f} s" for name, seconds in happened))


def started_by(driver: int, program: str = "") -> list[int]:
    """The processes that a driver has started, and those that they have, by the end of their program's name."""
    parents = {
        int(path.name): _parent(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()
    }
    found = []
    for pid in parents:
        above = parents[pid]
        while above in parents and above != driver:
            above = parents[above]
        if above == driver and _command(pid).partition(" ")[0].endswith(program):
            found.append(pid)
    return found


@pytest.mark.timeout(300)
def test_a_ray_of_our_own_that_loses_a_part_is_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    content = study(8) | {"budget": {"trials": 8, "profile_s": 4}}
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    with (folder / "driver.log").open("w") as log:
        driver = subprocess.Popen(
            [BIN / "bsearch", "run", folder / "study.yaml"],
            env={**os.environ, "ENDURES_S": "2"},
            stdout=log,
            stderr=log,
        )

    def words() -> str:
        return (folder / "driver.log").read_text()

    def kill(part: str) -> None:
        (pid,) = started_by(driver.pid, part)
        os.kill(pid, signal.SIGKILL)

    def until(said: str) -> None:
        limit = time.monotonic() + 100
        while said not in words():
            assert driver.poll() is None, words()
            assert time.monotonic() < limit, words()
            time.sleep(0.1)

    until("trying the training code")
    time.sleep(2)
    kill("raylet/raylet")
    until("Ray is back")
    until("[2/8]")
    kill("gcs_server")
    assert driver.wait(timeout=150) == 0, words()
    assert words().count("restarting Ray; what was interrupted will resume") == 2
    assert "Traceback" not in words()
    assert "(raylet)" not in words()
    assert len(finished(folder)) == 8
    assert {trial.outcome for trial in kept(folder)} == {"complete"}
    assert not started_by(driver.pid)


def hosts(folder: Path) -> list[str]:
    """The address each complete trial ran at, in the order they ended."""
    trials = [trial for trial in kept(folder) if trial.values is not None]
    trials.sort(key=lambda trial: trial.datetime_complete or trial.datetime_start)
    return [str(trial.facts.host).rpartition("(")[2].rstrip(")") for trial in trials]


def test_a_machine_that_is_cut_off_is_done_without_and_one_that_joins_is_used(tmp_path: Path) -> None:
    reference = undisturbed(20, tmp_path / "undisturbed")
    with network() as made:
        made.variables["ENDURES_S"] = "1.5"
        chaos = Chaos(made, tmp_path / "study", 20)
        chaos.start_head()
        chaos.start_member()
        chaos.start_driver()
        chaos.until_finished(8)
        chaos.member.cut_off()
        chaos.until_finished(12)
        third = made.machine()
        third.ray(chaos.folder, head=chaos.head, cpus=2)
        chaos.until_finished(20)
        assert chaos.driver is not None
        assert chaos.driver.wait(timeout=60) == 0
        assert chaos.broken(reference) == []
    ran = hosts(chaos.folder)
    assert {chaos.head.address, chaos.member.address} <= set(ran[:8])
    assert chaos.member.address not in ran[12:]
    assert third.address in ran[12:]


def serial(folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [BIN / "bsearch", "run", "--serial", folder / "study.yaml"],
        env={**os.environ, "ENDURES_S": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def begun(folder: Path, trials: int) -> Path:
    folder.mkdir()
    (folder / "study.yaml").write_text(yaml.safe_dump(study(trials)))
    return folder


def until_finished(folder: Path, trials: int, driver: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 120
    while len(finished(folder)) < trials:
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_of_two_drivers_started_at_once_one_runs_the_study_and_the_other_says_who(tmp_path: Path) -> None:
    folder = begun(tmp_path / "study", 4)
    drivers = [serial(folder), serial(folder)]
    outputs = [driver.communicate(timeout=200)[0] for driver in drivers]
    assert sorted(driver.returncode for driver in drivers) == [0, 1], outputs
    refused = outputs[0] if drivers[0].returncode else outputs[1]
    winner = drivers[1] if drivers[0].returncode else drivers[0]
    assert f"process {winner.pid} on " in refused or "another driver has just taken it" in refused
    assert "Traceback" not in refused
    assert len(finished(folder)) == 4


@pytest.mark.skipif(
    shutil.which("cc") is None, reason="a C compiler makes the clock that jumps; there is none"
)
@pytest.mark.parametrize("days", [2, -2])
def test_a_clock_that_jumps_neither_loses_trials_nor_the_lock(tmp_path: Path, days: int) -> None:
    library, clock = tmp_path / "clock.so", tmp_path / "jump"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).parent / "clock.c"], check=True
    )
    clock.write_text("0")
    folder = begun(tmp_path / "study", 6)
    driver = serial(folder, LD_PRELOAD=str(library), CLOCK_JUMP=str(clock))
    until_finished(folder, 2, driver)
    clock.write_text(str(days * 86_400))
    until_finished(folder, 3, driver)
    # The holder lives, whatever its clock says: another driver is refused.
    second = serial(folder)
    words = second.communicate(timeout=100)[0]
    assert second.returncode == 1, words
    assert f"process {driver.pid} on " in words
    words = driver.communicate(timeout=200)[0]
    assert driver.returncode == 0, words
    values = list(finished(folder).values())
    assert len(values) == 6
    assert all(0.3 < seconds < 30 for seconds, _ in values)  # training is timed by a clock that does not jump


def test_ctrl_c_while_the_program_is_still_being_read_shows_no_traceback(tmp_path: Path) -> None:
    folder = begun(tmp_path / "study", 2)
    rng = random.Random(0)
    for _ in range(8):
        driver = serial(folder)
        time.sleep(rng.uniform(0.15, 1.5))
        driver.send_signal(signal.SIGINT)
        output = driver.communicate(timeout=60)[0]
        assert driver.returncode in (130, -signal.SIGINT), output
        assert "Traceback" not in output
