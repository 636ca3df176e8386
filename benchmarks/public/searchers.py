"""The searchers that are compared: ours in this process, each peer in a process of its own environment.

A way is a searcher, or `SEARCHER+known`: the searcher with the seconds of every setting known beforehand. Ours takes them as in
a study. A peer searches the seconds of a training in place of its epochs, and gets the epochs nearest to them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import bsearch
from bsearch.search.suggest.ask_tell import Search
from optuna.distributions import FloatDistribution, IntDistribution
from problems import Problem, Share

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache" / "peers"
TORCH = "torch==2.15.0"


@dataclass(frozen=True)
class Program:
    """A peer: what its environment has installed, and the arguments of its process."""

    requirements: tuple[str, ...]
    arguments: tuple[str, ...]


OPTUNA = ("optuna==5.0.0", "scipy==1.17.1", TORCH)
PEERS = {
    "tpe": Program(OPTUNA, ("optuna_peer.py", "tpe")),
    "gp": Program(OPTUNA, ("optuna_peer.py", "gp")),
    "botorch": Program(("botorch==0.18.1", TORCH), ("botorch_peer.py",)),
    "moasha": Program(("syne-tune==0.16.0",), ("syne_tune_peer.py",)),
    "primo": Program(("neural-pipeline-search==0.17.0", TORCH), ("neps_peer.py",)),
}
NAMES = {
    "random": "random",
    "tpe": "TPE (Optuna)",
    "gp": "GPSampler (Optuna)",
    "botorch": "qLogNEHVI (BoTorch)",
    "moasha": "MOASHA (Syne Tune)",
    "primo": "PriMO (NePS)",
    "carbs": "CARBS",
    "ours": "bsearch",
}
# Named in the tables with the reason, so that nobody takes them for forgotten.
NOT_INSTALLABLE = {"carbs": "not in the package index, where `carbs` is another project"}
WAYS = (
    *("random", "tpe", "tpe+known", "gp", "gp+known", "botorch", "botorch+known"),
    *("moasha", "moasha+known", "primo", "primo+known", "carbs", "ours", "ours+known"),
)


class PeerError(Exception):
    """A peer cannot be installed, or its process ended."""


class LimitError(Exception):
    """The wall-clock limit of a search is over."""


@dataclass(frozen=True)
class Job:
    """A training to run, from one fraction of it to another; `continues` is an earlier number that trained up to there."""

    number: int
    parameters: Mapping[str, Any]
    until: float = 1.0
    continues: int | None = None


class Searcher(ABC):
    """Asks for trainings and is told what they gave; seconds are those of a full training."""

    version: str
    reports = False  # whether it is told of every tenth, and may stop a training there

    @abstractmethod
    def ask(self, deadline: float) -> Job:
        """What to train next. Raises `LimitError` once `time.monotonic()` is past the deadline."""

    @abstractmethod
    def report(self, number: int, fraction: float, seconds: float, accuracy: float) -> bool:
        """Whether to stop."""

    @abstractmethod
    def tell(self, number: int, fraction: float, seconds: float, accuracy: float, stopped: bool) -> None:
        """A training has ended at this fraction."""


class Ours(Searcher):
    """bsearch's search by its Python interface; `random` is its random sampler.

    Args:
        by_time: time limits the search rather than a number of trials: it stops trials, and prefers fast ones, as a study with
            `budget.hours`.
    """

    def __init__(self, sampler: str, known: bool, problem: Problem, seed: int, by_time: bool) -> None:
        self.reports = by_time and sampler == "front"
        self.version = f"bsearch {_commit()}" if sampler == "front" else f"optuna {version('optuna')}"
        self._search = Search(
            problem.domains(),
            sampler=sampler,
            stopping="front" if self.reports else "none",
            by_time=self.reports,
            known_seconds=problem.seconds if known else None,
            seed=seed,
        )

    def ask(self, deadline: float) -> Job:
        if time.monotonic() > deadline:
            raise LimitError
        suggestion = self._search.ask()
        return Job(suggestion.number, suggestion.parameters)

    def report(self, number: int, fraction: float, seconds: float, accuracy: float) -> bool:
        return self._search.report(number, fraction, seconds, accuracy)

    def tell(self, number: int, fraction: float, seconds: float, accuracy: float, stopped: bool) -> None:
        self._search.tell(number, seconds, accuracy, "stopped" if stopped else "complete")


def _commit() -> str:
    """The commit of the code that runs, with + if the code differs from it."""
    git = ["git", "-C", str(HERE)]
    run = subprocess.run(
        [*git, "describe", "--always", "--exclude=*", "--abbrev=7"],
        capture_output=True,
        text=True,
        check=False,
    )
    changed = subprocess.run(
        [*git, "diff", "--quiet", "HEAD", "--", "../../search"], capture_output=True, check=False
    )
    return (run.stdout.strip() or bsearch.__version__) + ("+" if run.stdout and changed.returncode else "")


class Process:
    """A peer's process, which answers the lines of `peers/protocol.py`; started when it is first asked, and after a failure."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def answer(self, line: Mapping[str, Any], deadline: float = math.inf) -> dict[str, Any]:
        """What it answers to a line.

        Raises:
            LimitError: it did not until the deadline, a `time.monotonic()`.
            PeerError: it cannot be installed, or ended.
        """
        if time.monotonic() > deadline:
            raise LimitError
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # the answer will be missing
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
        left_s = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        if not select.select([process.stdout], [], [], left_s)[0]:
            self.close()
            raise LimitError
        if not (answer := process.stdout.readline()):
            raise PeerError(self.close() or "its process ended")
        return dict(json.loads(answer))

    def close(self) -> str:
        """End it; the last line that it wrote to stderr."""
        if self._process is None or self._errors is None:
            return ""
        self._process.kill()
        self._process.communicate()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:]
        self._errors.close()
        self._process = self._errors = None
        return "".join(last)

    def _start(self) -> subprocess.Popen[str]:
        python = environment(self._program.requirements)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 # `close` closes it
        script, *arguments = self._program.arguments
        return subprocess.Popen(
            [python, HERE / "peers" / script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
            },
        )


class Peer(Searcher):
    """A search by a peer's process."""

    def __init__(self, process: Process, known: bool, problem: Problem, share: Share, seed: int) -> None:
        fastest, slowest, lowest = share.ends
        self._process, self._problem, self._known = process, problem, known
        self._fastest, self._log_range = fastest, math.log(slowest / fastest)
        self._asked = 0
        space: dict[str, Any] = {**problem.space}
        if known:
            del space["epochs"]
            space["train_s"] = FloatDistribution(fastest, slowest, log=True)
        self._integers = {name for name, one in space.items() if isinstance(one, IntDistribution)}
        domains = {
            name: {"low": one.low, "high": one.high, "log": one.log, "integer": name in self._integers}
            for name, one in space.items()
        }
        hello = process.answer({"space": domains, "seed": seed, "reference": [1.0, 1 - lowest]})
        self.version, self.reports = hello["version"], hello["reports"]

    def ask(self, deadline: float) -> Job:
        number, self._asked = self._asked, self._asked + 1
        answer = self._process.answer({"ask": number}, deadline)
        parameters = {
            name: int(value) if name in self._integers else value
            for name, value in answer["parameters"].items()
        }
        if self._known:
            parameters["epochs"] = epochs_taking(parameters.pop("train_s"), parameters, self._problem)
        return Job(number, parameters, answer.get("until", 1.0), answer.get("continues"))

    def report(self, number: int, fraction: float, seconds: float, accuracy: float) -> bool:
        values = self._values(seconds, accuracy)
        return bool(self._process.answer({"report": number, "fraction": fraction, "values": values})["stop"])

    def tell(self, number: int, fraction: float, seconds: float, accuracy: float, stopped: bool) -> None:
        self._process.answer(
            {"tell": number, "fraction": fraction, "values": self._values(seconds, accuracy)}
        )

    def _values(self, seconds: float, accuracy: float) -> list[float]:
        return [math.log(seconds / self._fastest) / self._log_range, 1 - accuracy]


def epochs_taking(train_s: float, parameters: Mapping[str, Any], problem: Problem) -> int:
    """The epochs whose training takes nearest to these seconds, by ratio, with the other parameters as they are."""
    domain = problem.space["epochs"]
    epochs = range(domain.low, domain.high + 1)  # type: ignore[attr-defined]
    return min(
        epochs, key=lambda count: abs(math.log(problem.seconds({**parameters, "epochs": count}) / train_s))
    )


def environment(requirements: tuple[str, ...]) -> Path:
    """The Python of an environment with these packages, made by uv where it is missing.

    Raises:
        PeerError: they cannot be installed.
    """
    folder = CACHE / hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:12]
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if uv is None:
            raise PeerError("uv is not installed: python -m pip install uv")
        _install([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)])
        _install([uv, "pip", "install", "--quiet", "--python", str(python), *requirements])
        done.touch()
    return python


def _install(command: list[str]) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise PeerError(" ".join(run.stderr.split()) or f"uv ended with {run.returncode}")


def applies(way: str, problem: Problem) -> bool:
    """Whether a way can search a problem: a peer's known seconds need epochs to stand for."""
    name, _, known = way.partition("+")
    return not known or name == "ours" or "epochs" in problem.space


class Searchers(AbstractContextManager["Searchers"]):
    """Starts searches; a peer's process serves one after another."""

    def __init__(self) -> None:
        self._processes = {name: Process(program) for name, program in PEERS.items()}

    def start(self, way: str, problem: Problem, share: Share, seed: int, *, by_time: bool) -> Searcher:
        """A new search. Raises `PeerError` if a peer cannot be started."""
        name, _, known = way.partition("+")
        if name in PEERS:
            return Peer(self._processes[name], bool(known), problem, share, seed)
        return Ours({"ours": "front"}.get(name, name), bool(known), problem, seed, by_time)

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.close()
