"""Run the stages, each in a process of its own with a time limit, and collect what they find."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...spaces.errors import Fault, StudyFileError, near_miss
from .claims import Claim, Data, Fact
from .machine import clocks
from .measured import following
from .report import SMOKE, Report, StageReport

# Beyond its own time a stage may finish what it began; then it is ended.
_GRACE_S = 90.0
# Characters that are kept of what a stage printed before it failed.
_PRINTED = 4000


@dataclass(frozen=True, slots=True)
class Planned:
    """A stage by name.

    Args:
        function: `.module:name` in this package.
        seconds, quick_s: its time in full and with `--quick`; 0: left out.
        only: the kind of device that it is for; None: both.
        environment: variables for its process.
        named: it runs only where it is named.
    """

    name: str
    function: str
    about: str
    seconds: float
    quick_s: float
    only: Literal["cpu", "gpu"] | None = None
    environment: tuple[tuple[str, str], ...] = ()
    named: bool = False


# In order of value, in case the time ends.
STAGES = (
    Planned(SMOKE, ".stages.smoke:smoke", "whether bsearch works here", 30, 30),
    Planned("machine", ".machine:facts", "hardware and libraries", 12, 12),
    Planned("memory", ".stages.memory:predictions", "predicted against measured", 110, 28),
    Planned("largest", ".stages.memory:largest", "the largest micro-batch under a limit", 75, 25),
    Planned("out-of-memory", ".stages.memory:out_of_memory", "recovery from errors", 40, 20),
    Planned("loop", ".stages.speed:loop", "our training loop against a minimal one", 45, 20),
    Planned("step-time", ".stages.speed:known_times", "predicted against measured", 63, 35),
    Planned("study", ".stages.training:study", "killed and resumed", 60, 60),
    Planned("exactness", ".stages.training:exact", "uneven micro-batches and devices", 30, 25),
    Planned("compile", ".stages.speed:compiled", "number of compiled graphs", 40, 0, "gpu"),
    Planned(
        "default-allocator",
        ".stages.memory:predictions",
        "the same without expandable segments",
        40,
        0,
        "gpu",
        (
            ("PYTORCH_ALLOC_CONF", "expandable_segments:False"),
            ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False"),
        ),
    ),
    Planned("card-1", ".stages.card:times", "step times of models that fill a card", 420, 90, named=True),
    Planned("card-2", ".stages.card:race", "a study, and as long of TPE by hand", 420, 100, named=True),
    Planned(
        "card-3",
        ".stages.card:features",
        "precisions, checkpointing, the loop's own time",
        240,
        60,
        named=True,
    ),
)


def chosen(names: Sequence[str], device: str, *, quick: bool) -> list[Planned]:
    """The stages to run: those named, or all that suit the device.

    Raises:
        StudyFileError: a stage of that name does not exist.
    """
    known = {stage.name: stage for stage in STAGES}
    if faults := [
        Fault("--stage", f"expected one of {', '.join(known)}; got {name!r}.{near_miss(name, list(known))}")
        for name in names
        if name not in known
    ]:
        raise StudyFileError(faults)
    if names:
        return [known[name] for name in dict.fromkeys(names)]
    return [
        stage
        for stage in STAGES
        if not stage.named and stage.only in (None, device) and (stage.quick_s or not quick)
    ]


def verify(
    report: Report,
    names: Sequence[str] = (),
    *,
    quick: bool = False,
    serial: bool = False,
    on_stage: Callable[[Planned, StageReport | None], None] = lambda planned, stage: None,
) -> None:
    """Run the stages and add them to the report; those after a failed `smoke` only where they are named.

    Args:
        serial: run studies without Ray.
        on_stage: called before each stage, and after it with what it found, however it ended.

    Raises:
        StudyFileError: a stage of that name does not exist.
    """
    for planned in chosen(names, report.kind, quick=quick):
        on_stage(planned, None)
        stage = StageReport(planned.name)
        report.stages.append(stage)
        seconds = planned.quick_s if quick and planned.quick_s else planned.seconds
        try:
            run_stage(
                planned, {"device": report.kind, "seconds": seconds, "quick": quick, "serial": serial}, stage
            )
        finally:
            on_stage(planned, stage)
        if planned.name == SMOKE and not stage.holds and not names:
            break


def run_stage(
    planned: Planned, values: Mapping[str, Any], stage: StageReport, grace_s: float = _GRACE_S
) -> None:
    """Run one stage in its own process; everything that it started ends with it.

    Args:
        values: the fields of its `Stage`.
        stage: what it finds is added to this, also where it is killed or interrupted.
        grace_s: beyond its time, after which it is killed.
    """
    started = time.monotonic()
    on_gpu = values["device"] == "gpu"
    clocks_before = clocks() if on_gpu else ""
    # Stages and their studies run in other folders; this package may lie in a checkout that is not installed.
    places = os.pathsep.join(
        dict.fromkeys(str(Path(place).absolute()) for place in sys.path if Path(place or ".").is_dir())
    )
    environment = {**os.environ, "PYTHONPATH": places, **dict(planned.environment), "PYTHONUNBUFFERED": "1"}
    limit_s = float(values["seconds"]) + grace_s
    with tempfile.TemporaryDirectory(prefix="bsearch-verify-") as folder:
        path, log = Path(folder) / "found.jsonl", Path(folder) / "log"
        command = [
            sys.executable,
            "-m",
            f"{__package__}.stage",
            planned.function,
            json.dumps(values),
            str(path),
        ]
        ended = "interrupted"
        try:
            with (
                log.open("w") as output,
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                ) as process,
            ):
                try:
                    code = process.wait(timeout=limit_s)
                    ended = f"its process ended with code {code}: {_last(log)}"
                except subprocess.TimeoutExpired:
                    ended = f"killed after {limit_s:.0f} s"
                finally:
                    for pid in processes_of_session(process.pid):
                        with suppress(ProcessLookupError, PermissionError):
                            os.kill(pid, signal.SIGKILL)
                    clocks_after = clocks() if on_gpu else ""
        finally:
            found = list(_lines(path))
            if not any("done" in line for line in found):
                stage.problem = next((line["problem"] for line in found if "problem" in line), ended)
            stage.claims = [Claim(**line["Claim"]) for line in found if "Claim" in line]
            stage.facts = [Fact(**line["Fact"]) for line in found if "Fact" in line]
            stage.data = [Data(**line["Data"]) for line in found if "Data" in line]
            for follows in following(stage.data):
                (stage.claims if isinstance(follows, Claim) else stage.facts).append(follows)  # type: ignore[arg-type]
            if clocks_before:
                both = f"{clocks_before} before; {clocks_after} after"
                stage.facts.append(Fact("clocks (MHz), temperature, power, throttling", both))
            stage.seconds = round(time.monotonic() - started, 1)
            if not stage.holds:
                printed = log.read_text(encoding="utf-8", errors="replace")[-_PRINTED:]
                stage.printed = printed.replace(str(Path.home()), "~")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """What a stage wrote; a line that was being written when it ended is left out."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _last(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it printed nothing"


def processes_of_session(session: int) -> list[int]:
    """The living processes of a session, which `start_new_session` began."""
    try:
        listed = [entry.name for entry in Path("/proc").iterdir()]
    except OSError:  # macOS
        command = ["ps", "-A", "-o", "pid="]
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    found = []
    for process in map(int, filter(str.isdecimal, listed)):
        with suppress(OSError):  # it has ended, or is not ours to ask
            if os.getsid(process) == session:
                found.append(process)
    return found
