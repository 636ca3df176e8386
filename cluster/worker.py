"""What Ray runs on a worker: attempts, one after another, and the profile of its device, in processes of their own."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import tune

from ..objectives.attempts import leave, profiled, start_attempt
from ..objectives.machine.environment import enter_folder
from ..objectives.machine.gpus import usable_gpus
from ..objectives.machine.nvidia import nvidia_smi
from ..objectives.parallel.rank_processes import spread_ranks
from ..objectives.state.leaving import LEAVE_SIGNAL
from ..spaces.errors import BsearchError, StudyFileError
from ..spaces.laws.device import ProfileRequest
from ..spaces.trial import Measurement, Outcome, TrialSetup
from .machines import machines_of


class AttemptTrainable(tune.Trainable):
    """Runs one attempt after another; each `step` is one report of the attempt."""

    def setup(self, config: dict[str, Any]) -> None:
        # Ray runs an actor's methods in the main thread, where signals are handled.
        signal.signal(LEAVE_SIGNAL, _leave)
        signal.siginterrupt(LEAVE_SIGNAL, False)  # the user's own reads and writes go on
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        setups = {kind: TrialSetup.from_dict(json.loads(setup)) for kind, setup in config["setups"].items()}
        kind, setup = next(iter(setups.items()))
        self._placed: dict[str, Any] | None = {"placed": ""}
        if len(setups) > 1:
            # The device is known only here; a kind that joined later uses the plan with the smallest micro-batch.
            kind = own_kind(tuple(setups))
            smallest = min(setups.values(), key=lambda candidate: candidate.largest_micro_batch or math.inf)
            setup = setups.get(kind, smallest)
            self._placed = {"placed": kind, "setup": json.dumps(setup.to_dict())}
        self._shares, self._lost = tuple(config["shares"]), False
        # Tune would have the task in a folder of the trial's own.
        self._attempt: Iterator[Measurement | Outcome] | None = _started(
            config["task"], setup, self._shares, config["folder"]
        )

    def step(self) -> dict[str, Any]:
        assert self._attempt is not None
        if self._lost:
            raise RuntimeError("the placement group is incomplete: the next attempt gets another")
        if self._placed is not None:
            placed, self._placed = self._placed, None
            return placed
        report = next(self._attempt)
        # Serialised, because Tune flattens dicts and drops empty ones.
        if isinstance(report, Measurement):
            return {"measurement": json.dumps(report.to_dict())}
        # Where a machine of several was lost, failing at the next step makes Tune replace this worker and its placement group.
        self._lost = report.kind == "interrupted" and len(self._shares) > 1
        return {"outcome": json.dumps(report.to_dict()), "done": not self._lost}

    def cleanup(self) -> None:
        if self._attempt is not None:
            self._attempt.close()  # type: ignore[attr-defined]  # a generator: closing it stops the user's code
            self._attempt = None

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing to save: Tune asks for a checkpoint when it stops a trial, but a study's state is in its storage."""


def kind_of(node: Mapping[str, Any]) -> str:
    """Ray's name for a machine's kind of accelerator; `""` if it has none.

    >>> kind_of({"Resources": {"CPU": 4.0, "accelerator_type:A100": 1.0}})
    'A100'
    """
    kinds = sorted(
        name.partition(":")[2] for name in node["Resources"] if name.startswith("accelerator_type:")
    )
    return kinds[0] if kinds else ""


def gpu_memory() -> str:
    """Memory of this machine's first GPU as cards are named, such as 80GB; empty where `nvidia-smi` does not tell."""
    try:
        return f"{round(int(nvidia_smi('memory.total')[0][0]) / 1024)}GB"
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ""


@cache  # a process stays on its machine
def own_kind(known: tuple[str, ...]) -> str:
    """The kind of the machine that this process runs on, by its name among those that the driver knows.

    Ray calls cards of one model alike whatever their memory, so the driver adds it where that tells two apart.
    """
    here = ray.get_runtime_context().get_node_id()
    kind = next((kind_of(node) for node in ray.nodes() if node["NodeID"] == here), "")
    return kind if kind in known else next((name for name in known if name == f"{kind} {gpu_memory()}"), kind)


def gpus_here() -> dict[str, Any]:
    """All GPUs of this machine, as a dict; Ray may hide them from a task that did not ask for one."""
    if not os.environ.get("CUDA_VISIBLE_DEVICES", "0"):
        del os.environ["CUDA_VISIBLE_DEVICES"]
    return asdict(usable_gpus())


def attempt_here(
    reference: str, setup: dict[str, Any], shares: tuple[int, ...], folder: str
) -> Iterator[dict[str, Any]]:
    """An attempt's reports, as dicts with one key that says what it is."""
    for report in _started(reference, TrialSetup.from_dict(setup), shares, folder):
        yield {"measurement" if isinstance(report, Measurement) else "outcome": report.to_dict()}


def _leave(number: int, frame: FrameType | None) -> None:
    leave()


def ask_to_leave(processes: Sequence[int]) -> list[int]:
    """Ask the attempts of these processes to write a checkpoint and end; returns those that are not workers here."""
    missed = []
    for process in processes:
        try:
            # Elsewhere, or later, the same number is another process, which the signal would end.
            if b"Trainable" not in Path(f"/proc/{process}/cmdline").read_bytes():
                raise ProcessLookupError
            os.kill(process, LEAVE_SIGNAL)
        except OSError:
            missed.append(process)
    return missed


def _started(
    reference: str, setup: TrialSetup, shares: tuple[int, ...], folder: str
) -> Iterator[Measurement | Outcome]:
    """Start an attempt.

    Args:
        shares: its ranks on each machine of this worker's placement group.
        folder: the driver's working directory, where the task's relative paths start on every machine that has it.
    """
    enter_folder(folder)
    spread_ranks(machines_of(shares))
    return start_attempt(reference, setup)


def profile_here(
    reference: str, request: dict[str, Any], shares: tuple[int, ...], folder: str
) -> dict[str, Any]:
    """The profile of this worker's device, or the user's error as text (a task's own exceptions may not unpickle)."""
    try:
        enter_folder(folder)
        spread_ranks(machines_of(shares))
        return profiled(reference, ProfileRequest.from_dict(request)).to_dict()
    except StudyFileError as error:
        return {"faults": [(fault.key, fault.message) for fault in error.faults]}
    except BsearchError as error:
        return {"error": str(error), "traceback": traceback.format_exc()}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
