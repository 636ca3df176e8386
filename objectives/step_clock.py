"""Seconds and bytes of training steps, whoever's loop takes them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from ..spaces.trial import TrialSetup
from .profiling.live_bytes import LiveBytes

# Steps whose living tensors are counted on a CPU: the second sees the optimizer's states beside the passes.
COUNTED_STEPS = 2


class Timed(Protocol):
    """What a `StepClock` needs of a training: what it runs on, and whose tensors are counted."""

    setup: TrialSetup
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer


class StepClock:
    """Seconds of training, evaluation left out; on a CPU the first steps' living tensors are counted as well.

    Some steps say nothing of the others' time: the first of each size (kernels are chosen, a model is compiled, loaders
    start) and those in which bytes are counted. They are priced as the others: the mean step's time. Under a memory limit the
    first steps of every size are counted, since memory repeats after them, and the limit is a virtual device's.
    """

    def __init__(self, run: Timed, counts_memory: bool) -> None:
        self.run, self.device = run, run.device
        self.peak_bytes = 0
        self._limit_bytes = run.setup.memory_limit_bytes if self.device.type == "cpu" else None
        self._counts = self.device.type == "cpu" and (counts_memory or self._limit_bytes is not None)
        self._steps_of: Counter[int] = Counter()
        self._samples = self._odd_samples = 0
        self._running_s = self._odd_s = self._begun = self._told_s = 0.0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.restart()

    @contextmanager
    def step(self, size: int) -> Iterator[None]:
        """Around one step of so many samples."""
        self._samples += size
        before = self._steps_of[size] if self._limit_bytes is not None else self._steps_of.total()
        counts = self._counts and before < COUNTED_STEPS
        first = self._steps_of[size] == 0
        self._steps_of[size] += 1
        if not counts and not first:
            yield
            return
        self._keep()
        begun = time.perf_counter()
        if counts:
            with LiveBytes(self._limit_bytes).counting(self.run.model, self.run.optimizer) as counter:
                yield
            self.peak_bytes = max(self.peak_bytes, counter.peak_bytes)
        else:
            yield
        self._wait()
        self._odd_samples += size
        self._odd_s += time.perf_counter() - begun
        self.restart()

    def restart(self) -> None:
        self._wait()
        self._begun = time.perf_counter()

    def _keep(self) -> None:
        """Add what has run since the last restart."""
        self._wait()
        self._running_s += time.perf_counter() - self._begun

    def elapsed_s(self) -> float:
        self._keep()
        self.restart()
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        timed = self._samples - self._odd_samples
        # Where every step was an odd one, their time is all there is.
        now_s = self._running_s * self._samples / timed if timed else self._running_s + self._odd_s
        # The mean of few steps may fall faster than steps are added; time that was told does not run backwards.
        self._told_s = max(self._told_s, now_s)
        return self._told_s

    def state(self) -> dict[str, Any]:
        """What it has counted so far, for a checkpoint."""
        return {
            "samples": self._samples,
            "odd_samples": self._odd_samples,
            "running_s": self._running_s,
            "odd_s": self._odd_s,
            "told_s": self._told_s,
            "peak_bytes": self.peak_bytes,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there; in a new process each size's first step is an odd one again."""
        self._samples, self._odd_samples = state["samples"], state["odd_samples"]
        self._running_s, self._odd_s, self.peak_bytes = state["running_s"], state["odd_s"], state["peak_bytes"]
        self._told_s = state.get("told_s", 0.0)  # not in checkpoints of before

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
