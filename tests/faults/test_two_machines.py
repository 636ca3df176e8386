"""A trial over two machines with two ranks each, in namespaces of the test's own: it is right, and outlives one of them."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from bsearch.search.store.stored import StoredStudy
from bsearch.search.store.tables import Tables
from chaos import BIN, EVALUATIONS, TASKS, _command, study
from machines import Machine, Network, network

pytestmark = [pytest.mark.faults]

TRIALS = 3


def written(folder: Path) -> Path:
    folder.mkdir()
    content = study(TRIALS) | {
        "study": "two",
        "task": f"{TASKS}:EnduresWithoutNorm",
        "devices": {"per_trial": 4, "kind": "cpu"},
        "budget": {"trials": TRIALS, "profile_s": 2},
        "baseline": [],
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    return folder / "study.yaml"


def read(path: Path) -> StoredStudy:
    return StoredStudy.open(f"sqlite:///{path.parent}/two.db", "two", None)


def curve(path: Path) -> dict[int, list[tuple[int, float]]]:
    try:
        return Tables(f"sqlite:///{path.parent}/two.db").curves("two")
    except Exception:  # there is none yet
        return {}


def until(ready: Any, seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < limit
        time.sleep(0.1)


def listening(machine: Machine, *words: str) -> set[str]:
    """The addresses at which a machine's processes of these names listen."""
    found = subprocess.run(
        ["ip", "netns", "exec", machine.name, "ss", "-ltnpH"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {line.split()[3].rpartition(":")[0] for line in found if any(word in line for word in words)}


@pytest.mark.timeout(400)
def test_a_trial_over_two_machines_goes_on_with_one_and_with_both_again(tmp_path: Path) -> None:
    alone = written(tmp_path / "alone")
    content = yaml.safe_load(alone.read_text()) | {"devices": {"per_trial": 1, "kind": "cpu"}}
    alone.write_text(yaml.safe_dump(content))
    subprocess.run(
        [BIN / "bsearch", "run", "--serial", alone],
        check=True,
        capture_output=True,
        env={**os.environ, "ENDURES_S": "0"},
    )
    path = written(tmp_path / "study")
    with network() as made:
        made.variables["ENDURES_S"] = "4"
        head, member = made.machine(), made.machine()
        head.ray(path.parent, cpus=2)
        until(lambda: listening(head, "gcs_server"))
        member.ray(path.parent, head=head, cpus=2)
        log = path.parent / "driver.log"
        until(lambda: joined(made, head) == 4)
        driver = head.start([BIN / "bsearch", "run", path], log, RAY_ADDRESS=f"{head.address}:6379")
        until(lambda: len(curve(path).get(0, [])) >= 3)
        # The ranks hear one another on the interface between the machines, and nowhere else.
        ranks = [pid for pid in head.pids() if "multiprocessing.forkserver" in _command(pid)]
        assert {
            place.removeprefix("[::ffff:").strip("[]")
            for place in listening(head, *(f"pid={pid}," for pid in ranks))
        } == {head.address}
        assert "over 2 machines" in log.read_text()
        began = time.monotonic()
        member.cut_off()
        until(lambda: "continues on 2 of its 4 devices" in log.read_text())
        planned, cut = time.monotonic(), len(curve(path)[0])
        until(lambda: len(curve(path)[0]) > cut)
        print(
            f"cut off: planned anew after {planned - began:.1f} s, next evaluation after {time.monotonic() - began:.1f} s"
        )
        member.plug_in()
        member.kill()
        member.ray(path.parent, head=head, cpus=2)
        driver.wait(timeout=200)
        words = log.read_text()
    assert driver.returncode == 0, words
    assert "Traceback" not in words
    trials, references = read(path).records, read_alone(alone)
    assert [trial.outcome for trial in trials] == ["complete"] * TRIALS
    for trial in trials:
        parameters = {name: value for name, value in trial.parameters.items() if name != "devices"}
        assert trial.accuracy == pytest.approx(references[tuple(sorted(parameters.items()))], abs=0.05)
        assert trial.facts.devices == 4
        assert trial.facts.device_s == pytest.approx(4 * trial.facts.train_s)
    assert trials[0].facts.attempts > 1
    seen = [samples for samples, _ in curve(path)[0]]
    assert seen == sorted(set(seen))
    assert len(seen) == EVALUATIONS
    used = [setup for (setup,) in rows(path)]
    assert '"devices": 2' in "".join(used)
    assert '"devices": 4' in used[-1]  # both machines again


def joined(made: Network, head: Machine) -> int:
    """CPUs of the cluster."""
    code = "import ray; ray.init(address='auto', log_to_driver=False); print('CPUs', int(ray.cluster_resources()['CPU']))"
    shown = subprocess.run(
        ["ip", "netns", "exec", head.name, BIN / "python", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **made.variables, "RAY_ADDRESS": f"{head.address}:6379"},
    ).stdout
    return int(shown.rpartition("CPUs ")[2] or 0)


def read_alone(study: Path) -> dict[tuple[Any, ...], float]:
    return {
        tuple(
            sorted((name, value) for name, value in trial.parameters.items() if name != "devices")
        ): trial.accuracy
        for trial in read(study).records
        if trial.accuracy is not None
    }


def rows(study: Path) -> list[tuple[str]]:
    with closing(sqlite3.connect(study.parent / "two.db")) as connection, connection:
        return connection.execute("SELECT setup FROM bsearch_attempt ORDER BY number, attempt").fetchall()
