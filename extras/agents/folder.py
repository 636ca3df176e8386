"""Commands of bsearch in one folder, each in a process of its own: what trainings print, break or take stays there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...search.report.stdio.answer import VERSION, error_answer
from ...spaces.boundary.files import file_name
from ...spaces.boundary.storage import sqlite_parts, storage_of
from ...spaces.errors import BsearchError, OutputError, StudyFileError, cut
from ...spaces.study.file import read_study
from ...spaces.study.spec import StudySpec

# Sections of a study that may be changed for one run.
_SETTABLE = ("space", "training", "memory", "budget", "objectives")
# An answer is given again to whoever asks the same within so many seconds; processes at once; characters of all arguments and
# of a path.
_FRESH_S, _AT_ONCE, _MOST_ARGUMENTS, _MOST_PATH = 1.0, 4, 100_000, 1000
# Seconds that a run is waited for to begin or fail, a running comparison to end, and a stopped driver to leave.
_BEGINS_S, _COMPARES_S, _STOPS_S = 4.0, 45.0, 30.0
_PENDING = "Not settled yet. Ask the same again to wait on; its trials are kept."
_SCHEMA = "The keys of study files: resource bsearch://schemas/study"

Answer = dict[str, Any]


class Folder:
    """The front door for programs: each method is a command's answer, or its error.

    Args:
        root: nothing outside of it is read, run or written, except by the code of a study's task.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._runs: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}
        self._answers: dict[tuple[str, ...], tuple[float, Answer]] = {}
        self._asking: defaultdict[tuple[str, ...], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def path(self, name: str) -> str:
        """A file of the folder, relative to it.

        Raises:
            StudyFileError: another place, or no file.
        """
        path = self.root if len(name) > _MOST_PATH or "\0" in name else (self.root / name).resolve()
        if not path.is_relative_to(self.root):
            raise StudyFileError(
                f"{cut(name, 200)}: expected a path in the folder of this server, got another place"
            )
        if not path.is_file():
            raise StudyFileError(f"{cut(name, 200)}: expected a file, got none")
        return f"./{path.relative_to(self.root)}"  # neither an option nor a reader, whatever it is called

    def study(self, name: str, settings: Sequence[str] = ()) -> StudySpec:
        """A study of the folder that only names places in it.

        Raises:
            StudyFileError: it is wrong, or names another place.
        """
        for setting in settings:
            names_place = setting.startswith("budget.keep") or (
                setting.startswith("training.schedule") and ":" in setting
            )
            if setting.partition(".")[0] not in _SETTABLE or names_place:
                raise StudyFileError(
                    f"{cut(setting, 200)}: expected a key of {', '.join(_SETTABLE)}, such as space.width=32"
                )
        spec = read_study(self.root / self.path(name), storage=storage_of(os.environ))
        code = {
            "task": spec.task.rpartition(":")[0],
            "training.schedule": spec.training.schedule.rpartition(":")[0],
        }
        places = {key: place for key, place in code.items() if place.endswith(".py")}
        places |= {"storage": _file_of(spec), "budget.keep": spec.budget.keep or ""}
        for index, named in enumerate(spec.warm_start):
            earlier = spec.folder / Path(named).expanduser()
            # A reader before a colon reads whatever its library does.
            places[f"warm_start.{index}"] = "/" if ":" in named and not earlier.exists() else named
            if earlier.suffix in (".yaml", ".yml"):
                places[f"warm_start.{index}: storage"] = _file_of(
                    read_study(self.root / self.path(str(earlier)))
                )
        places["cluster.checkpoints"] = (spec.cluster.checkpoints or "").removeprefix("file://")
        for key, place in places.items():
            if not (spec.folder / Path(place).expanduser()).resolve().is_relative_to(self.root):
                raise StudyFileError(
                    f"{name}: {key}: expected a path in the folder of this server, got another place"
                )
        return spec

    async def ask(self, *arguments: str) -> Answer:
        """A command's answer; the same as a moment ago to whoever asks again."""
        async with self._asking[arguments]:
            asked_at, found = self._answers.get(arguments, (0.0, {}))
            if time.monotonic() - asked_at > _FRESH_S:
                found = _read(*await self._printed(*arguments, "--json"))
                self._answers = {arguments: (time.monotonic(), found)} | dict(
                    list(self._answers.items())[:50]
                )
            return found

    async def of_study(self, name: str, command: str, *options: str) -> Answer:
        """A command's answer about a study of the folder."""
        self.study(name)
        return await self.ask(command, self.path(name), *options)

    async def _printed(self, *arguments: str) -> tuple[str, str, int]:
        """What a command prints on stdout and on stderr, and its exit code; it is killed once nobody waits for it."""
        async with self._slots:
            process = await asyncio.create_subprocess_exec(*_command(*arguments), cwd=self.root, **_PIPES)
            try:
                out, err = (part.decode(errors="replace") for part in await process.communicate())
            except asyncio.CancelledError:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return out, err, process.returncode or 0

    async def text(self, *arguments: str) -> Answer:
        """What a command without --json prints, whole."""
        out, err, code = await self._printed(*arguments)
        notes = err.strip()[-400:]
        if code:
            return error_document(OutputError(notes))
        return {"answer": "export", "version": VERSION, "text": out, "notes": notes}

    def start(self, name: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        """A command that goes on without this server, and the file with its lines of JSON."""
        log = self.root / "results" / file_name(name) / f"{arguments[0]}.jsonl"
        running = self._runs.pop(arguments, None)  # the newest is the last
        if running is not None and running.poll() is None:
            self._runs[arguments] = running
            return running, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out, log.with_suffix(".err").open("wb") as err:
            command, nothing = _command(*arguments, "--json"), subprocess.DEVNULL
            # A session of its own: it outlives the server, and what interrupts the one does not interrupt the other.
            started = subprocess.Popen(  # noqa: S603
                command, cwd=self.root, stdin=nothing, stdout=out, stderr=err, start_new_session=True
            )
        self._runs[arguments] = started
        return started, log

    async def run(self, name: str, trials: int | None, settings: Sequence[str], serial: bool) -> Answer:
        """Start a study, or resume it; the answer comes at once."""
        spec, path = self.study(name, settings), self.path(name)
        options = [
            *(("--trials", str(trials)) if trials else ()),
            *(part for one in settings for part in ("--set", one)),
        ]
        async with self._asking["run", path]:  # of two agents the second finds it running
            if (running := (await self.status(name)).get("running")) is not None:
                return _started(spec.study, running, now=False)
            started, log = self.start(spec.study, "run", path, *options, *(["--serial"] if serial else []))
            with_failure = await _ended(started, _BEGINS_S)
        if with_failure and (last := _last(log, started.returncode)).get("answer") == "error":
            return last
        return _started(spec.study, _here(started), now=True)

    async def status(self, name: str) -> Answer:
        """A study as it is now, with how the last run that was started here ended."""
        spec, path = self.study(name), self.path(name)
        found = await self.of_study(name, "show")
        of_study = [(command, run) for command, run in self._runs.items() if command[:2] == ("run", path)]
        if not of_study:
            return found
        (_, run), log = of_study[-1], self.root / "results" / file_name(spec.study) / "run.jsonl"
        if run.poll() is None:
            if found.get("error", {}).get("kind") == "no_study":  # its driver has not come so far
                return _started(spec.study, _here(run), now=False)
            return {**found, "running": found.get("running") or _here(run)}
        last = _last(log, run.returncode)
        ended = {
            key: last[key]
            for key in ("failure", "stopped", "elapsed_s", "expected_gain", "error")
            if key in last
        }
        return {**found, "last_run": {"exit_code": run.returncode, **ended}}

    async def stop(self, name: str) -> Answer:
        """Ask a study's driver on this machine to leave: finished trials are kept, running ones resume with the next run."""
        running = (await self.status(name)).get("running")
        if running is None:
            return await self.status(name)
        if running["host"] != socket.gethostname():
            raise OutputError(
                f"{name}: expected a driver on this machine, got one on {running['host']}. Stop it there."
            )
        process, until = int(running["process"]), time.monotonic() + _STOPS_S
        with suppress(ProcessLookupError):  # it has left
            os.kill(process, signal.SIGINT)
            while time.monotonic() < until and all(
                ours.poll() is None for ours in self._runs.values() if ours.pid == process
            ):
                await asyncio.sleep(0.2)
                os.kill(process, 0)
        self._answers.clear()
        return await self.status(name)

    async def compare(self, sides: Sequence[str], name: str, options: Sequence[str]) -> Answer:
        """A verdict, or that it is not there yet: the same question again waits on."""
        started, log = self.start(name, "compare", *sides, *options)
        if not await _ended(started, _COMPARES_S):
            return {"answer": "pending", "version": VERSION, "text": _PENDING}
        return _last(log, started.returncode)


_PIPES: dict[str, Any] = {
    "stdin": asyncio.subprocess.DEVNULL,
    "stdout": asyncio.subprocess.PIPE,
    "stderr": asyncio.subprocess.PIPE,
    "start_new_session": True,
    "limit": 1 << 26,
}


def _file_of(spec: StudySpec) -> str:
    """The file of a study's database; the root of all where it is none."""
    return (sqlite_parts(spec.storage or "") or ("/",))[0]


def _command(*arguments: str) -> list[str]:
    if sum(map(len, arguments)) > _MOST_ARGUMENTS:
        raise StudyFileError(f"expected arguments of at most {_MOST_ARGUMENTS} characters together")
    return [sys.executable, "-m", "bsearch", *arguments]


def _here(process: subprocess.Popen[bytes]) -> dict[str, str]:
    return {"host": socket.gethostname(), "process": str(process.pid)}


def _started(study: str, running: Mapping[str, str], *, now: bool) -> Answer:
    return {"answer": "started", "version": VERSION, "study": study, "running": running, "started": now}


def _read(out: str, err: str, code: int) -> Answer:
    """The answer of a command: the last line of stdout, or an error in stderr. What a task prints is neither."""
    last = [line for line in out.splitlines()[-1:] if not line.startswith('{"answer": "event"')]
    for line in (
        *last,
        *(line for line in reversed(err.splitlines()) if line.startswith('{"answer": "error"')),
    ):
        with suppress(ValueError):
            return _with_schema(json.loads(line))
    return error_document(OutputError(f"expected an answer, got exit code {code}: {cut(err.strip()[-400:])}"))


def _last(log: Path, code: int) -> Answer:
    return _read(log.read_text(errors="replace"), log.with_suffix(".err").read_text(errors="replace"), code)


def error_document(error: BsearchError) -> Answer:
    """An error as commands answer it; of a study with the place of the schema of study files."""
    return _with_schema(json.loads(error_answer(error)))


def _with_schema(document: Answer) -> Answer:
    is_of_study = document.get("error", {}).get("kind") == "study"
    return {**document, "schema": _SCHEMA} if is_of_study else document


async def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return process.poll() is not None
