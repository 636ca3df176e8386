"""Kills what a study runs on, at random moments, until it has ended all the same; and says what must hold afterwards.

`python tests/faults/chaos.py --kills 100` is the long form (`make faults`); the tests beside this run a short one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml
from bsearch.search.store.tables import Tables
from bsearch.spaces.record import TrialRecord
from machines import BIN, Machine, Network, network

TASKS = Path(__file__).parent.parent / "tasks_for_tests.py"
EVALUATIONS = 10
# A driver that neither ends nor finishes a trial for so long hangs.
PATIENCE_S = 120.0
# Exit codes of a driver that was killed.
KILLED = (-9, 137)


def study(trials: int, seed: int = 0) -> dict[str, Any]:
    """A study whose trials are all named beforehand, so that no kill may change what any of them comes to."""
    rng = random.Random(seed)
    settings = [
        {
            "effective_batch": batch,
            "reference_rate": round(rng.uniform(0.01, 0.1), 4),
            "devices": 1 + index % 2,
        }
        for index, batch in enumerate(rng.sample(range(8, 65), trials))
    ]
    return {
        "study": "chaos",
        "task": f"{TASKS}:Endures",
        "space": {
            "effective_batch": {"low": 8, "high": 64},
            "reference_rate": {"low": 0.01, "high": 0.1, "at_batch": 64},
            "epochs": 2,
        },
        "training": {"evaluations": EVALUATIONS},
        "devices": {"per_trial": [1, 2], "kind": "cpu"},
        "budget": {"trials": trials, "profile_s": 0},
        "cluster": {"checkpoint_every_s": 0},
        "baseline": settings,
        "stopping": "none",
        "sampler": "random",
    }


def finished(folder: Path) -> dict[int, tuple[float, ...]]:
    """Complete trials and their values, read by plain SQL beside the running driver."""
    values: dict[int, tuple[float, ...]] = {}
    with (
        contextlib.suppress(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(f"file:{folder}/chaos.db?mode=ro", uri=True)) as connection,
    ):
        for number, objectives in connection.execute(
            "SELECT number, objectives FROM bsearch_trial WHERE objectives IS NOT NULL"
        ):
            values[number] = tuple(json.loads(objectives))
    return values


def undisturbed(trials: int, folder: Path) -> dict[tuple[Any, ...], float]:
    """What every setting comes to where nothing is killed: its accuracy, by the setting."""
    folder.mkdir()
    (folder / "study.yaml").write_text(yaml.safe_dump(study(trials)))
    subprocess.run(
        [BIN / "bsearch", "run", "--serial", folder / "study.yaml"],
        check=True,
        capture_output=True,
        env={**os.environ, "ENDURES_S": "0"},
    )
    return {_setting(trial): trial.values[1] for trial in kept(folder) if trial.values is not None}


def kept(folder: Path) -> list[TrialRecord]:
    """The study's trials."""
    return Tables(f"sqlite:///{folder}/chaos.db", create=False).trials("chaos")


def _setting(trial: TrialRecord) -> tuple[Any, ...]:
    return tuple(sorted(trial.parameters.items()))


class Chaos:
    """Two machines, a study over both, and a driver on the first that is started again whenever it died."""

    def __init__(self, made: Network, folder: Path, trials: int) -> None:
        self.folder, self.trials = folder, trials
        self.head, self.member = made.machine(), made.machine()
        (folder / "private").mkdir(parents=True)  # what only the driver's machine sees
        (folder / "study.yaml").write_text(yaml.safe_dump(study(trials)))
        self.driver: subprocess.Popen[bytes] | None = None
        self.seen: dict[int, tuple[float, ...]] = {}
        self.violations: list[str] = []
        self._expected = (0, 1, 130, 143, *KILLED, -2, -15)
        self._killed = False  # the last driver, so that it did not let go of the study

    # What a person would do

    def start_head(self) -> None:
        self.head.ray(self.folder, cpus=2)
        self._wait(lambda: self._listens(), "the head did not start")

    def start_member(self) -> None:
        self.member.ray(self.folder, head=self.head, cpus=2, lacks=self.folder / "private")

    def start_driver(self) -> None:
        self.driver = self._run()

    def _run(self) -> subprocess.Popen[bytes]:
        return self.head.start(
            [BIN / "bsearch", "run", self.folder / "study.yaml"],
            self.folder / "driver.log",
            RAY_ADDRESS=f"{self.head.address}:6379",
            PYTHONFAULTHANDLER="1",
            TMPDIR=str(self.folder / "private"),
        )

    def _listens(self) -> bool:
        listed = subprocess.run(
            ["ip", "netns", "exec", self.head.name, "ss", "-ltnH", "sport = :6379"],
            capture_output=True,
            text=True,
            check=True,
        )
        return bool(listed.stdout.strip())

    # What may happen

    def kill_driver(self) -> None:
        assert self.driver is not None
        self._kill(self._of(self.head, "bsearch", "run"))
        self.driver.wait(timeout=PATIENCE_S)

    def kill_actor(self) -> None:
        self._kill(self._actors()[:1])

    def kill_rank(self) -> None:
        servers = set(self._children_of(self._actors()))
        self._kill(self._children_of(servers)[:1])

    def kill_server(self) -> None:
        """What a worker's trials are forked from, or what tracks their files."""
        self._kill(self._children_of(self._actors())[:1])

    def _children_of(self, parents: Collection[int]) -> list[int]:
        found = [
            pid for machine in (self.head, self.member) for pid in machine.pids() if _parent(pid) in parents
        ]
        random.shuffle(found)
        return found

    def kill_raylet(self) -> None:
        self._kill(self._of(self.member, "raylet/raylet"))
        self._member_again()

    def kill_node(self) -> None:
        self.member.kill()
        self.start_member()

    def pull_cable(self) -> None:
        self.member.cut_off()
        time.sleep(6)
        self.member.plug_in()
        self._member_again()

    def kill_head(self) -> None:
        self.head.kill()
        self.driver, self._killed = None, True
        # Members of a cluster without a head give up after a minute; whoever starts it again starts them again.
        self.member.kill()
        self.start_head()
        self.start_member()

    def kill_gcs(self) -> None:
        self._kill_part_of_head("gcs_server")

    def kill_agent(self) -> None:
        self._kill_part_of_head(random.choice(["ray::DashboardAgent", "ray::RuntimeEnvAgent"]))

    def _kill_part_of_head(self, part: str) -> None:
        """The driver's machine loses a part of Ray, and with it all of its Ray; whoever runs the cluster starts it again."""
        self._kill([pid for pid in self.head.pids() if _command(pid).partition(" ")[0].endswith(part)])
        time.sleep(2)
        own = {self.driver.pid} if self.driver is not None else set()
        self._kill([pid for pid in self.head.pids() if pid not in own and "bsearch run" not in _command(pid)])
        self.member.kill()
        self.start_head()
        self.start_member()

    def terminate_at_once(self) -> None:
        """A driver is asked to go before it has begun."""
        self._interrupt(1, signal.SIGTERM)
        self._ended()
        self.start_driver()
        time.sleep(random.uniform(0.0, 1.5))
        self._interrupt(1, signal.SIGTERM)

    def interrupt(self) -> None:
        self._interrupt(1)

    def interrupt_twice(self) -> None:
        self._interrupt(2)

    def second_driver(self) -> None:
        if not self.seen and not finished(self.folder):
            return  # the first may not hold the study yet
        second = self._run()
        code = second.wait(timeout=PATIENCE_S)
        if self.driver is not None and self.driver.poll() is None and code != 1:
            self.violations.append(f"a second driver was not refused: exit {code}")

    @property
    def faults(self) -> dict[str, Callable[[], None]]:
        return {
            "driver killed": self.kill_driver,
            "trial actor killed": self.kill_actor,
            "rank killed": self.kill_rank,
            "trials' server killed": self.kill_server,
            "raylet killed": self.kill_raylet,
            "node killed": self.kill_node,
            "cable pulled for 6 s": self.pull_cable,
            "head killed": self.kill_head,
            "GCS killed": self.kill_gcs,
            "Ray's agent killed": self.kill_agent,
            "SIGTERM at once": self.terminate_at_once,
            "Ctrl-C": self.interrupt,
            "Ctrl-C twice": self.interrupt_twice,
            "second driver": self.second_driver,
        }

    # How it goes on

    def run(self, faults: list[str], rng: random.Random) -> list[tuple[str, float]]:
        """Run the study to its end while these happen; what happened, and seconds until a trial finished afterwards."""
        happened: list[tuple[str, float]] = []
        self.start_head()
        self.start_member()
        self.start_driver()
        waiting = list(faults)
        while not self._done():
            if self.driver is None:
                self.start_driver()
            if not waiting and self.driver is not None and len(finished(self.folder)) >= self.trials:
                self.driver.wait(timeout=PATIENCE_S)
                continue
            self._next_finish(rng.uniform(0.0, 2.0))
            if waiting and self.driver is not None and self.driver.poll() is None:
                name = waiting.pop(0)
                begun = time.monotonic()
                self.faults[name]()
                self._ended()
                if self.driver is None:
                    self.start_driver()
                self._next_finish(0.0)
                happened.append((name, time.monotonic() - begun))
        return happened

    def broken(self, undisturbed: dict[tuple[Any, ...], float]) -> list[str]:
        """What does not hold at the end; nothing where all does."""
        trials = kept(self.folder)
        complete = [trial for trial in trials if trial.values is not None]
        others = {trial.outcome for trial in trials} - {"complete"}
        found = list(self.violations)
        if others:
            found.append(f"trials left {', '.join(sorted(others))}")
        if len(complete) != self.trials:
            found.append(f"{len(complete)} complete trials of a budget of {self.trials}")
        if len(hosts := {trial.facts.host for trial in complete}) < 2:
            found.append(f"trials ran on {hosts} alone")
        came_to = {_setting(trial): trial.accuracy for trial in complete}
        if len(came_to) != len(complete):
            found.append("a setting was finished twice")
        for setting, accuracy in came_to.items():
            if undisturbed.get(setting) != accuracy:
                found.append(f"{setting} came to {accuracy}, undisturbed to {undisturbed.get(setting)}")
        output = (self.folder / "driver.log").read_text(errors="replace")
        if "Traceback" in output:
            found.append(f"a traceback reached the terminal: {output[output.index('Traceback') :][:3000]}")
        if "*** StackTrace" in output:
            found.append("Ray ended the driver, with its own text on the terminal")
        tables = Tables(f"sqlite:///{self.folder}/chaos.db")
        curves = tables.curves("chaos")
        for trial in complete:
            seen = [samples for samples, _ in curves[trial.number]]
            if len(seen) != len(set(seen)) or not EVALUATIONS - 2 <= len(seen) <= EVALUATIONS:
                found.append(f"trial {trial.number} was measured at {seen}")
        with contextlib.closing(sqlite3.connect(f"{self.folder}/chaos.db")) as connection, connection:
            holder = connection.execute("SELECT holder FROM bsearch_study").fetchone()[0]
        if holder is not None:
            found.append(f"the study is still held by {holder}")
        return found

    def _done(self) -> bool:
        """Whether all trials are finished, and a driver has ended by itself after that."""
        self._ended()
        return len(finished(self.folder)) >= self.trials and self.driver is None and not self._killed

    def _ended(self) -> None:
        """See how a driver ended, if it did: cleanly, by our signal, or because the cluster under it went."""
        if self.driver is not None and (code := self.driver.poll()) is not None:
            if code not in self._expected:
                said = (self.folder / "driver.log").read_text(errors="replace")[-6000:]
                self.violations.append(f"the driver ended with exit code {code}; its last words:\n{said}")
            self.driver, self._killed = None, code in KILLED

    def until_finished(self, trials: int) -> None:
        """Wait until so many are; each next one within the patience."""
        while len(self.seen) < trials:
            assert self.driver is not None
            assert self.driver.poll() is None, (self.folder / "driver.log").read_text()[-3000:]
            self._next_finish(0.0)

    def _next_finish(self, then_s: float) -> None:
        """Wait until one more trial is finished, or the driver has ended; then a moment more."""
        before = len(self.seen)

        def more() -> bool:
            now = finished(self.folder)
            lost = {
                number
                for number, values in self.seen.items()
                if now.get(number, values) != values or number not in now
            }
            if lost:
                self.violations.append(f"finished trials changed or went: {sorted(lost)}")
            self.seen = now
            return (
                len(now) > before
                or len(now) >= self.trials
                or (self.driver is not None and self.driver.poll() is not None)
            )

        self._wait(more, "no trial finished")
        time.sleep(then_s)

    def _wait(self, ready: Callable[[], bool], complaint: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not ready():
            if time.monotonic() > until:
                log = (
                    (self.folder / "driver.log").read_text()[-3000:]
                    if (self.folder / "driver.log").exists()
                    else ""
                )
                raise AssertionError(
                    f"{complaint} within {PATIENCE_S:.0f} s; the driver's last words:\n{log}"
                )
            time.sleep(0.1)

    def _member_again(self) -> None:
        """Start the second machine's Ray again once it has seen that it is out."""
        for process in self.member.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
        self.member.kill()
        self.start_member()

    def _interrupt(self, times: int, number: signal.Signals = signal.SIGINT) -> None:
        assert self.driver is not None
        for _ in range(times):
            for pid in self._of(self.head, "bsearch", "run"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.driver.wait(timeout=60)
        if self.driver.poll() is None:
            self.violations.append(f"{number.name} did not end the driver within a minute")

    def _actors(self) -> list[int]:
        found = [
            pid for machine in (self.head, self.member) for pid in self._of(machine, "ray::AttemptTrainable")
        ]
        random.shuffle(found)
        return found

    @staticmethod
    def _of(machine: Machine, *words: str) -> list[int]:
        return [pid for pid in machine.pids() if all(word in _command(pid) for word in words)]

    @staticmethod
    def _kill(pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further study after so many")
    parser.add_argument("--trials", type=int, default=16, help="of each study")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one fault by its name")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    took: dict[str, list[float]] = defaultdict(list)
    broken: list[str] = []
    studies = 0
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        reference = undisturbed(options.trials, folder / "undisturbed")
        begun = time.monotonic()
        while (
            sum(map(len, took.values())) < options.kills and time.monotonic() - begun < 60 * options.minutes
        ):
            studies += 1
            with network() as made:
                chaos = Chaos(made, folder / f"study-{studies}", options.trials)
                names = [options.only] if options.only else list(chaos.faults)
                left = options.kills - sum(map(len, took.values()))
                for name, seconds in chaos.run(
                    [rng.choice(names) for _ in range(min(left, options.trials - 4))], rng
                ):
                    took[name].append(seconds)
                broken += (found := chaos.broken(reference))
            print(
                f"study {studies}: {sum(map(len, took.values()))} faults so far; broken: {found or 'nothing'}",
                flush=True,
            )
    print(f"\n{'fault':<22} {'times':>5}  {'next trial after, median s':>26}  {'longest':>7}")
    for name, seconds in sorted(took.items()):
        print(f"{name:<22} {len(seconds):>5}  {statistics.median(seconds):>26.1f}  {max(seconds):>7.1f}")
    print(f"{studies} studies of {options.trials} trials; broken: {len(broken)}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
