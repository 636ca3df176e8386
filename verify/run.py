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
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ..spaces.errors import Fault, StudyFileError, near_miss
from .claims import Claim, Fact, Report, StageReport

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
    """

    name: str
    function: str
    about: str
    seconds: float
    quick_s: float
    only: Literal["cpu", "gpu"] | None = None
    environment: tuple[tuple[str, str], ...] = ()


# In order of value, in case the time ends.
STAGES = (
    Planned("machine", ".machine:facts", "hardware and libraries", 12, 12),
    Planned("memory", ".memory:predictions", "predicted against measured", 110, 28),
    Planned("largest", ".memory:largest", "the largest micro-batch under a limit", 75, 25),
    Planned("out-of-memory", ".memory:out_of_memory", "recovery from errors", 40, 20),
    Planned("loop", ".speed:loop", "our training loop against a minimal one", 45, 20),
    Planned("step-time", ".speed:known_times", "predicted against measured", 63, 35),
    Planned("energy", ".energy:known_power", "predicted power against measured", 25, 0),
    Planned("edges", ".speed:edges", "sizes beside powers of two", 40, 0, "gpu"),
    Planned("study", ".training:study", "killed and resumed", 60, 60),
    Planned("exactness", ".training:exact", "uneven micro-batches and devices", 30, 25),
    Planned("graph", ".memory:graph", "the trace's walk of the autograd graph", 20, 15),
    Planned("compile", ".speed:compiled", "number of compiled graphs", 40, 0, "gpu"),
    Planned(
        "default-allocator",
        ".memory:predictions",
        "the same without expandable segments",
        40,
        0,
        "gpu",
        (("PYTORCH_ALLOC_CONF", "expandable_segments:False"), ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")),
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
    return [stage for stage in STAGES if stage.only in (None, device) and (stage.quick_s or not quick)]


def verify(
    device: Literal["cpu", "gpu"],
    names: Sequence[str] = (),
    *,
    quick: bool = False,
    serial: bool = False,
    on_stage: Callable[[Planned, Report | None], None] = lambda stage, report: None,
) -> Report:
    """Run the stages and report.

    Args:
        serial: run studies without Ray.
        on_stage: called before each stage, and after it with the report so far.

    Raises:
        StudyFileError: a stage of that name does not exist.
    """
    from ..objectives.profiling.probe import device_name
    from .machine import versions

    report = Report(device_name(device), datetime.now().astimezone().strftime("%Y-%m-%d"), versions())
    for planned in chosen(names, device, quick=quick):
        on_stage(planned, None)
        seconds = planned.quick_s if quick and planned.quick_s else planned.seconds
        stage = run_stage(planned, {"device": device, "seconds": seconds, "quick": quick, "serial": serial})
        report.stages.append(stage)
        on_stage(planned, report)
    return report


def run_stage(planned: Planned, told: Mapping[str, Any], grace_s: float = _GRACE_S) -> StageReport:
    """Run one stage in a process of its own; whatever it started ends with it.

    Args:
        told: the fields of its `Stage`.
        grace_s: beyond its time, after which it is killed; what it had found by then is kept.
    """
    started = time.monotonic()
    # Stages and their studies run in other folders; this package may lie in a checkout that is not installed.
    places = os.pathsep.join(dict.fromkeys(str(Path(place).absolute()) for place in sys.path if Path(place or ".").is_dir()))
    environment = {**os.environ, "PYTHONPATH": places, **dict(planned.environment), "PYTHONUNBUFFERED": "1"}
    limit_s = float(told["seconds"]) + grace_s
    with tempfile.TemporaryDirectory(prefix="bsearch-verify-") as folder:
        path, log = Path(folder) / "found.jsonl", Path(folder) / "log"
        command = [sys.executable, "-m", f"{__package__}.stage", planned.function, json.dumps(told), str(path)]
        with (
            log.open("w") as output,
            subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            ) as process,
        ):
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=limit_s)
            finally:
                _end_session(process.pid)
        over = process.returncode == -signal.SIGKILL and time.monotonic() - started >= limit_s
        found = list(_lines(path))
        problem = printed = ""
        if not any("done" in one for one in found):
            said = next((one["problem"] for one in found if "problem" in one), "")
            died = f"its process ended with code {process.returncode}: {_last(log)}"
            problem = said or (f"killed after {limit_s:.0f} s" if over else died)
            printed = log.read_text(encoding="utf-8", errors="replace")[-_PRINTED:]
    return StageReport(
        planned.name,
        round(time.monotonic() - started, 1),
        problem,
        [Claim(**one["Claim"]) for one in found if "Claim" in one],
        [Fact(**one["Fact"]) for one in found if "Fact" in one],
        printed,
    )


def _end_session(session: int) -> None:
    """Kill every process of a stage: itself, the studies it started, and their workers."""
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, ProcessLookupError, PermissionError):
            if os.getsid(int(entry.name)) == session:
                os.kill(int(entry.name), signal.SIGKILL)


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
