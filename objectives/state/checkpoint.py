"""The files that a training leaves: its checkpoint, and its model where `bsearch train` wants it.

A trial resumes from its checkpoint when its worker, node or driver dies: one file, replaced as training proceeds, stored where
every worker can reach it. Besides the training state it contains all measurements so far, so that a resumed attempt reports the
whole curve.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import random
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.utils._pytree import tree_map_only

from ...spaces.boundary.files import write_file
from ...spaces.trial import Measurement, Parameter, TrialSetup
from ..machine import accelerator
from .checkpoint_files import delete_parts, file_system_of, read_checkpoint
from .leaving import asked_to_leave

if TYPE_CHECKING:
    from ..parallel.data_parallel import Ranks

# Files of another format are ignored.
_FORMAT = 5
# What a file begins with, before the digest of the rest.
_MAGIC = b"bsearch checkpoint\n"

# Between evaluations, this many times as long is trained as the last save took.
_SAVING = 10

# Steps after which several devices agree whether to save, which synchronises them.
_RANKS_AGREE = 16
# What may be wanted of a training between two steps.
_SAVE, LEAVE = 1.0, 2.0

# Fields of the setup in which attempts at the same experiment may differ.
_ATTEMPT_FIELDS = {
    "study",
    "number",
    "attempt",
    "plan",
    "embedding",
    "largest_micro_batch",
    "evaluation_batch",
    "memory_limit_bytes",
    "checkpoint",
    "checkpoint_every_s",
    "pauses_at",
    "cpus",
    "device",
    "sharding",
    "folder",
    "model_folder",
    "scores_test",
    "ends_by",
}


class Checkpoint:
    """One trial's checkpoint; each attempt creates its own object.

    `measurements` holds those of earlier attempts up to the point where this one resumes; empty if it starts from scratch.

    >>> checkpoint = Checkpoint(None, 60.0, "")
    >>> checkpoint.load() is None, checkpoint.due()  # a study without checkpoints
    (True, False)
    """

    def __init__(
        self, url: str | None, every_s: float, experiment: str, pauses_after: float = math.inf
    ) -> None:
        self.url, self.every_s, self.experiment = url, every_s, experiment
        self._pauses_after = pauses_after  # samples seen from which on the trial may be paused
        self.measurements: list[Measurement] = []
        self._read_error = self._write_error = ""  # why it could not be read, and why the last write failed
        self._last, self._save_s = time.monotonic(), 0.0

    @classmethod
    def of(cls, setup: TrialSetup) -> Checkpoint:
        """The checkpoint that belongs to a trial's setup."""
        pauses_after = math.inf if setup.pauses_at is None else setup.pauses_at * setup.samples_budget
        return cls(setup.checkpoint, setup.checkpoint_every_s, experiment_of(setup), pauses_after)

    def load(self) -> Any:
        """The state that was saved last; None if the trial starts from scratch.

        A file of another experiment or one that cannot be read is ignored; `facts` says why it could not be read.
        """
        if self.url is None:
            return None
        try:
            stored = read_checkpoint(self.url)
            if stored is None:
                return None
            # Load only plain values and tensors: a checkpoint must not run code.
            content = io.BytesIO(_checked(stored))
            saved = torch.load(content, map_location="cpu", weights_only=True)
            if saved["format"] != _FORMAT or saved["experiment"] != self.experiment:
                return None
            measurements = [Measurement.from_dict(values) for values in json.loads(saved["measurements"])]
        except Exception as error:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is damaged"
            self._read_error = f"the checkpoint could not be read, so training began again: {reason}"
            return None
        self.measurements = measurements
        return saved["state"]

    def facts(self) -> dict[str, Parameter]:
        """For the next measurement: why it could not be read, or why the last write failed."""
        errors = [error for error in (self._read_error, self._write_error) if error]
        return {"checkpoint": "; ".join(errors)} if errors else {}

    def add(self, measurement: Measurement) -> None:
        """Include a measurement in the next save; call this before the measurement is reported."""
        self.measurements.append(measurement)

    def due(self, waited_s: float | None = None) -> bool:
        """Whether it is time to save again, by the local clock or by seconds that all ranks agreed on."""
        if self.url is None:
            return False
        return (
            asked_to_leave() or self.waited_s() >= self.every_s
            if waited_s is None
            else waited_s >= self.every_s
        )

    def waited_s(self) -> float:
        """Seconds since the last save, or since the attempt started; infinite where the trial may be paused now."""
        late = [
            measurement for measurement in self.measurements if measurement.samples_seen >= self._pauses_after
        ]
        at_rung = len(late) == 1 and late == self.measurements[-1:]
        return math.inf if at_rung else time.monotonic() - self._last

    @property
    def between_evaluations(self) -> bool:
        """Whether to save between evaluations as well, once `every_s` has passed."""
        return self.url is not None and self.every_s > 0

    def is_late(self) -> bool:
        """Whether it is time to save between evaluations: after `every_s`, and ten times what the last save took."""
        return time.monotonic() - self._last >= max(self.every_s, _SAVING * self._save_s)

    def wanted(self, steps: int, ranks: Ranks) -> float:
        """Whether to save after this many steps, before the next evaluation, and whether to `LEAVE` then; 0 for neither.

        Several devices have to agree, on what rank 0 says.
        """
        if ranks.count > 1 and steps % _RANKS_AGREE:
            return 0
        own = LEAVE if asked_to_leave() else _SAVE * (self.between_evaluations and self.is_late())
        return ranks.max_over_ranks(0.0 if ranks.rank else own)

    def save(self, state: Any) -> None:
        """Replace the file atomically.

        If the disk is full or unavailable, the trial continues without the checkpoint, and `facts` says why.

        Args:
            state: tensors, numbers, strings, and lists and dicts of them.
        """
        if self.url is None:
            return
        started = time.monotonic()
        measurements = json.dumps([asdict(measurement) for measurement in self.measurements])
        content = {
            "format": _FORMAT,
            "experiment": self.experiment,
            "measurements": measurements,
            "state": state,
        }
        buffer = io.BytesIO()
        try:
            torch.save(content, buffer)
            system, path = file_system_of(self.url)
            system.makedirs(system._parent(path), exist_ok=True)
            head = _MAGIC + hashlib.sha256(buffer.getbuffer()).digest()
            if isinstance(system, LocalFileSystem):
                _replace(Path(path), head, buffer.getbuffer())
            else:
                system.pipe_file(path, head + buffer.getvalue())  # object stores replace objects atomically
            self._write_error = ""
        except Exception as error:
            self._write_error = f"the checkpoint could not be written: {_reason(error)}"
        self._last = time.monotonic()
        self._save_s = self._last - started


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state dict with its tensors on the CPU, which torch loads anywhere.

    Raises:
        OutputError: it cannot be written.
    """
    buffer = io.BytesIO()
    torch.save(tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), state), buffer)
    write_file(path, buffer.getvalue())


def experiment_of(setup: TrialSetup) -> str:
    """A digest of everything that must match for an attempt to resume from another's checkpoint."""
    values = {name: value for name, value in setup.to_dict().items() if name not in _ATTEMPT_FIELDS}
    # Batch and budget belong to the experiment; accumulation and devices do not.
    values |= {"effective_batch": setup.effective_batch}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of all random generators of this process, as values that a checkpoint can hold."""
    kind, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": accelerator.random_state(device) if accelerator.is_gpu(device) else None,
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": [version, list(words), gauss],
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the state from `random_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and accelerator.is_gpu(device):
        accelerator.set_random_state(state["cuda"], device)
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))


def _reason(error: Exception) -> str:
    # Without the path, which is different each time.
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"


def _checked(content: bytes) -> memoryview:
    """What was saved, without its digest.

    Raises:
        ValueError: it is not as it was written, which torch does not notice.
    """
    view, start = memoryview(content), len(_MAGIC) + hashlib.sha256().digest_size
    if not content.startswith(_MAGIC) or hashlib.sha256(view[start:]).digest() != view[len(_MAGIC) : start]:
        raise ValueError("damaged")
    return view[start:]


def _replace(path: Path, *parts: Any) -> None:
    delete_parts(path)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
