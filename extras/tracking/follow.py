"""Sends a study's trials to trackers: once, or while it runs, from a separate process that trials never wait for.

That process only reads the database. What a tracker that was down has missed is sent later: by the same process, by the next
run, or by `bsearch export --to`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...search.analysis.pareto import study_front
from ...search.run.study_run import StudyRun
from ...search.store.stored import StoredStudy
from ...search.store.trials import Trials
from ...spaces.boundary.files import file_name
from ...spaces.boundary.plug_ins import plug_in
from ...spaces.boundary.secrets import masked
from ...spaces.errors import cut, plain
from ...spaces.study.spec import Tracker as TrackerName
from .trackers import TrackedTrial, Tracker

# Seconds between two looks at the database, and after a tracker failed, at first and at most.
_EVERY_S, _RETRY_S, _LONGEST_RETRY_S = 2.0, 5.0, 60.0
# A tracker is taken to be down once it has refused this many more trials than it accepted.
_REFUSED = 1
# How long a driver whose study is over waits for trackers.
_LAST_S = 20.0


@dataclass(frozen=True, slots=True)
class Tracked:
    """What a tracker has of a study.

    Args:
        trials: that it has.
        left: that it lacks.
        error: the last one of the tracker, if trials are left.
    """

    to: TrackerName
    where: str
    trials: int
    left: int
    error: str = ""

    @property
    def sentence(self) -> str:
        if not self.left:
            return f"{self.to}: {self.trials} trials in {self.where}"
        because = f" ({self.error})" if self.error else ""
        return (
            f"{self.to}: {self.left} of {self.trials + self.left} trials not sent{because}. `bsearch export --to {self.to}` "
            "sends them."
        )


class _Telling:
    """A tracker, what it has, and when to retry after it failed."""

    def __init__(self, to: TrackerName, study: str, identity: str, folder: Path) -> None:
        self.to: TrackerName = to
        self.tracker: Tracker = plug_in("bsearch.trackers", to)(study, identity, folder)
        self.known: dict[int, tuple[int, bool, bool]] = {}  # by number: samples, ended, on the front
        self.error, self._wait_s, self._again = "", _RETRY_S, 0.0

    def tell(self, trials: Iterable[TrackedTrial], *, now: bool) -> None:
        if not now and time.monotonic() < self._again:
            return
        self.error, told, failed = "", 0, 0
        try:
            for trial in trials:
                state = (trial.curve[-1].samples_seen if trial.curve else 0, trial.ended, trial.on_front)
                if self.known.get(trial.record.number) == state:
                    continue
                try:
                    self.tracker.tell(trial)
                except Exception as error:
                    # A refused trial does not hold up the others; a tracker that is down is left alone.
                    self.error, failed = _in_one_line(error), failed + 1
                    if failed > told + _REFUSED:
                        break
                    continue
                self.known[trial.record.number] = state
                told += 1
        except Exception as error:  # it was asked what it has
            self.error = _in_one_line(error)
        if self.error:
            self._again, self._wait_s = (
                time.monotonic() + self._wait_s,
                min(2 * self._wait_s, _LONGEST_RETRY_S),
            )
        else:
            self._wait_s = _RETRY_S

    def tracked(self, ended: int) -> Tracked:
        told = sum(done for _, done, _ in self.known.values())
        return Tracked(self.to, self.tracker.where, told, ended - told, self.error)


def tell(
    study: StoredStudy,
    to: Iterable[TrackerName],
    folder: Path,
    over: Callable[[float], bool] = lambda seconds: True,
) -> list[Tracked]:
    """Send a study's trials to trackers until the study is over, and all that is missing at the end.

    Args:
        folder: of the study's results.
        over: waits for these seconds, and says whether the study is over.

    Raises:
        StudyFileError: a tracker is not installed.
    """
    tables = study.tables()
    row = tables.study(study.name)
    assert row is not None
    # A study that was begun anew under the same name is another study.
    identity = hashlib.sha256(f"{study.name} {row.created_at}".encode()).hexdigest()[:12]
    telling = [_Telling(tracker, study.name, identity, folder) for tracker in to]
    try:
        stored = Trials(tables, study.name)
        while True:
            last = over(_EVERY_S)
            stored.refresh()
            records = list(stored)
            ended = [record for record in records if record.has_ended]
            on_front = {record.number for record in study_front(ended, study.spec.objectives).trials}

            def trials(
                teller: _Telling, records: Any = records, on_front: Any = on_front
            ) -> Iterator[TrackedTrial]:
                for record in records:
                    on = record.number in on_front
                    if teller.known.get(record.number, (0, False, False))[1:] == (True, on):
                        continue
                    if record.has_ended and teller.tracker.knows(record.number, on):
                        teller.known[record.number] = (record.facts.samples_budget or 0, True, on)
                        continue
                    curve = tuple(tables.curve(study.name, record.number))
                    yield TrackedTrial(record, study.spec.objectives.metric.name, curve, on)

            for teller in telling:
                teller.tell(trials(teller), now=last)
            if last:
                return [teller.tracked(len(ended)) for teller in telling]
    finally:
        tables.close()


def _in_one_line(error: Exception) -> str:
    """An error's first line, without the passwords that URLs in it may hold."""
    line = (str(error).splitlines() or [""])[0]
    return cut(plain(masked(f"{type(error).__name__}: {line}")), 200)


@contextmanager
def tracking(
    to: tuple[TrackerName, ...], url: str, folder: Path, say: Callable[[str], None]
) -> Iterator[Callable[[StudyRun], None]]:
    """Context of a run whose trials a separate process sends to trackers; yields what starts it, once the run is known.

    Args:
        url: of the database.
        folder: of the study's results.
        say: takes a sentence on each tracker at the end.
    """
    processes: list[subprocess.Popen[str]] = []

    def start(run: StudyRun) -> None:
        if not to:
            return
        # What it needs goes through the pipe: a database's URL may hold a password, and arguments are public.
        # As of `run --new`.
        own = folder if run.name == run.spec.study else folder.parent / file_name(run.name)
        job = {"url": url, "name": run.name, "to": list(to), "folder": str(own)}
        process = subprocess.Popen(  # noqa: S603  # ourselves
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the driver, which lets it finish
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        processes.append(process)

    try:
        yield start
    finally:
        for process in processes:
            for line in _ended(process):
                say(line if isinstance(line, str) else line.sentence)


def _ended(process: subprocess.Popen[str]) -> list[Tracked] | list[str]:
    """What the process reports; it is killed if it takes too long."""
    try:
        # Closes its stdin, which says that the study is over.
        output, _ = process.communicate(timeout=_LAST_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return [
            f"tracking: some trials were not sent within {_LAST_S:.0f} s; `bsearch export --to` sends the rest"
        ]
    with contextlib.suppress(ValueError, KeyError, TypeError):
        document = json.loads(output.splitlines()[-1]) if output.strip() else {}
        if "tracked" in document:
            return [Tracked(**status) for status in document["tracked"]]
        if "error" in document:
            return [str(document["error"])]
    return [
        "tracking: the tracking process exited without a report; `bsearch export --to` sends what is missing"
    ]


def main() -> None:
    """The process beside a driver: its job is the first line of stdin; the end of stdin says that the study is over."""
    job = json.loads(sys.stdin.readline())
    with contextlib.suppress(OSError):
        os.nice(5)
    # Trackers print to stdout.
    report, sys.stdout = sys.stdout, sys.stderr

    def over(seconds: float) -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return bool(ready)

    try:
        tracked = tell(StoredStudy.open(job["url"], job["name"]), job["to"], Path(job["folder"]), over)
        document: dict[str, Any] = {"tracked": [asdict(status) for status in tracked]}
    except Exception as error:
        document = {"error": f"tracking: {_in_one_line(error)}"}
    report.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
