"""Stages that behave badly, for the tests of what runs them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bsearch.benchmarks.verify.claims import Claim, Data, Fact
from bsearch.benchmarks.verify.stage import Found, Stage


def well(stage: Stage) -> Iterator[Found]:
    yield Fact("device", stage.device)
    yield Claim("share", 0.5, 0.25)
    yield Claim("count", 0, 3, unit="")


def raises(stage: Stage) -> Iterator[Found]:
    yield Claim("share", 0.5, 0.25)
    raise ValueError("a wrong value\nand more about it")


def dies(stage: Stage) -> Iterator[Found]:
    yield Claim("share", 0.5, 0.25)
    print("what it said last", flush=True)
    os._exit(7)


def measures(stage: Stage) -> Iterator[Found]:
    yield Data("overhead", "a net", {"bursts": [[[1.25, 1.0]]]})
    os._exit(7)


def waits(stage: Stage) -> Iterator[Found]:
    yield Claim("share", 0.5, 0.25)
    time.sleep(600)


def hangs(stage: Stage) -> Iterator[Found]:
    """It starts a process of its own, writes its id beside the tests, and does not end."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["CHILD_ID"]).write_text(str(child.pid))
    yield Claim("share", 0.5, 0.25)
    time.sleep(600)
