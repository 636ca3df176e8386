"""What a trial goes on from when its worker, its node or its driver dies: one file, replaced as training gets on.

The file lies where every worker can reach it, and holds what was measured so far beside the training's own state, so that
an attempt that goes on tells the whole curve again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem

from ..spaces.trial import Measurement, TrialSetup
from .checkpoint_files import file_system_of

# Another layout of the file is no checkpoint of ours.
_FORMAT = 1

# What an attempt may have that another attempt at the same experiment has not.
_OF_THE_ATTEMPT = {
    "study",
    "number",
    "attempt",
    "plan",
    "largest_micro_batch",
    "evaluation_batch",
    "memory_limit_bytes",
    "checkpoint",
    "checkpoint_every_s",
    "cpus",
    "device",
    "folder",
}


class Checkpoint:
    """One trial's checkpoint; made anew at the beginning of every attempt.

    `measurements` holds what earlier attempts measured up to where this one goes on; empty where it begins.

    >>> checkpoint = Checkpoint(None, 60.0, "")
    >>> checkpoint.load() is None, checkpoint.due()  # a study that keeps none
    (True, False)
    """

    def __init__(self, url: str | None, every_s: float, experiment: str) -> None:
        self.url, self.every_s, self.experiment = url, every_s, experiment
        self.measurements: list[Measurement] = []
        self.trouble = ""  # why the last one could not be read or written
        self._last = time.monotonic()

    @classmethod
    def of(cls, setup: TrialSetup) -> Checkpoint:
        """The checkpoint that belongs to a trial's setup."""
        return cls(setup.checkpoint, setup.checkpoint_every_s, experiment_of(setup))

    def load(self) -> Any:
        """The state that was saved last; None where the trial begins.

        A file of another experiment, or one that cannot be read, is none: the trial begins again, and `trouble` says why.
        """
        if self.url is None:
            return None
        try:
            system, path = file_system_of(self.url)
            if not system.exists(path):
                return None
            # Only plain values and tensors are read: a checkpoint is data, not code.
            content = io.BytesIO(system.cat_file(path))
            kept = torch.load(content, map_location="cpu", weights_only=True)
            if kept["format"] != _FORMAT or kept["experiment"] != self.experiment:
                return None
            measurements = [Measurement.from_dict(values) for values in json.loads(kept["measurements"])]
        except Exception as error:
            self.trouble = f"the checkpoint could not be read: {type(error).__name__}: {error}"
            return None
        self.measurements = measurements
        return kept["state"]

    def add(self, measurement: Measurement) -> None:
        """Have the next save hold a measurement; call it before the measurement is told."""
        self.measurements.append(measurement)

    def due(self, waited_s: float | None = None) -> bool:
        """Whether it is time to save again: by this clock, or by seconds that all ranks agreed on."""
        return self.url is not None and (self.waited_s() if waited_s is None else waited_s) >= self.every_s

    def waited_s(self) -> float:
        """Seconds since the last save, or since the attempt began."""
        return time.monotonic() - self._last

    def save(self, state: Any) -> None:
        """Replace the file: whole or not at all. Only where it is `due`.

        A disk that is full or away costs the checkpoint and not the trial: `trouble` says why.

        Args:
            state: tensors, numbers, texts, and lists and dicts of them.
        """
        self._last = time.monotonic()
        if self.url is None:
            return
        measurements = json.dumps([asdict(one) for one in self.measurements])
        kept = {"format": _FORMAT, "experiment": self.experiment, "measurements": measurements, "state": state}
        buffer = io.BytesIO()
        try:
            torch.save(kept, buffer)
            system, path = file_system_of(self.url)
            system.makedirs(system._parent(path), exist_ok=True)
            if isinstance(system, LocalFileSystem):
                _replace(Path(path), buffer.getbuffer())
            else:
                system.pipe_file(path, buffer.getvalue())  # object stores show an object when it is whole
            self.trouble = ""
        except Exception as error:
            self.trouble = f"the checkpoint could not be written: {type(error).__name__}: {error}"


def experiment_of(setup: TrialSetup) -> str:
    """What must be alike for one attempt to go on where another stopped, as a digest: all that training hangs on."""
    values = {name: value for name, value in setup.to_dict().items() if name not in _OF_THE_ATTEMPT}
    # Batch, budget and devices are the experiment's; how many passes a step takes is not.
    values |= {"effective_batch": setup.effective_batch, "devices": setup.plan.devices}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def random_state(device: torch.device) -> dict[str, Any]:
    """Where every generator of this process stands, in values that a checkpoint may hold."""
    kind, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": [version, list(words), gauss],
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """What `random_state` told, put back."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))


def _replace(path: Path, content: Any) -> None:
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
