"""Seconds and bytes of training steps, in our loop or another trainer's."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import nn

from ...spaces.trial import Parameter, TrialSetup
from ..machine import accelerator
from ..machine.processor import HostLoad
from ..profiling.memory.live_bytes import LiveBytes

# Steps whose live tensors are counted on a CPU: the second includes the optimizer's states.
COUNTED_STEPS = 2


class Timed(Protocol):
    """What a `StepClock` needs to know of a training run: its device, and the objects whose tensors are counted."""

    setup: TrialSetup
    device: torch.device
    model: nn.Module

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def averages(self) -> Sequence[torch.Tensor]: ...


def trains_alone(setup: TrialSetup) -> bool:
    """Whether a training is one process: beside its own loaders and ranks, a wait for a core is not another program's doing."""
    return not setup.training.workers and setup.plan.devices == 1


class StepClock:
    """Seconds of training without evaluation; on a CPU also the live tensor bytes of the first steps, and waits for a core.

    Some steps are not representative: the first of each size (kernel selection, compilation, loader start) and those in
    which bytes are counted. Each is charged the mean time of the other steps. Under a memory limit, which on a CPU is that of
    a virtual device, the first steps of every size are counted; memory repeats after them.
    """

    def __init__(self, run: Timed, counts_memory: bool) -> None:
        self.run, self.device = run, run.device
        self.peak_bytes = self.peak_reserved_bytes = 0
        self._limit_bytes = run.setup.memory_limit_bytes if self.device.type == "cpu" else None
        self._counts = self.device.type == "cpu" and (counts_memory or self._limit_bytes is not None)
        self._steps_of: Counter[int] = Counter()
        self._samples = self._excluded_samples = 0
        self._running_s = self._excluded_s = self._started = self._reported_s = 0.0
        # On a CPU. Nothing has happened yet, which is known, in no time.
        self._load_before = self._read_load()
        self._load = self._load_before and self._load_before - self._load_before
        self._evaluated = False
        self.restart()

    def step(self, size: int) -> AbstractContextManager[None]:
        """Context of one step of `size` samples."""
        self._samples += size
        before = self._steps_of[size] if self._limit_bytes is not None else self._steps_of.total()
        counts = self._counts and before < COUNTED_STEPS
        first = self._steps_of[size] == 0
        self._steps_of[size] += 1
        return self._apart(size, counts=counts) if counts or first else nullcontext()

    @contextmanager
    def _apart(self, size: int, *, counts: bool) -> Iterator[None]:
        """Context of a step whose own time is left out."""
        self._accumulate()
        started = time.perf_counter()
        if counts:
            with LiveBytes(self._limit_bytes).counting(
                self.run.model, self.run.optimizer, self.run.averages
            ) as counter:
                yield
            self.peak_bytes = max(self.peak_bytes, counter.peak_bytes)
        else:
            yield
        self._synchronize()
        self._excluded_samples += size
        self._excluded_s += time.perf_counter() - started
        self._read_peaks()
        self.restart()

    def fork(self) -> StepClock:
        """A copy of the clock, stopped as this one is until it is restarted."""
        self._accumulate()
        other = copy.copy(self)
        other._steps_of = self._steps_of.copy()
        return other

    def restart(self) -> None:
        """Continue after something else than training, which does not count: its time, and on a GPU its memory."""
        self._synchronize()
        if accelerator.is_gpu(self.device):
            accelerator.reset_peaks(self.device)
        self._load_before = self._read_load()
        self._started = time.perf_counter()

    def _accumulate(self) -> None:
        """Add the time since the last restart."""
        self._synchronize()
        self._running_s += time.perf_counter() - self._started
        load = self._read_load()
        if self._load and self._load_before and load:
            self._load += load - self._load_before
        self._read_peaks()

    def _read_load(self) -> HostLoad | None:
        return HostLoad.now(waits=trains_alone(self.run.setup)) if self.device.type == "cpu" else None

    def _read_peaks(self) -> None:
        if not accelerator.is_gpu(self.device):
            return
        allocated, reserved = accelerator.peak_bytes(self.device)
        self.peak_bytes = max(self.peak_bytes, allocated)
        # From the first evaluation on, what it left in the allocator's cache is reserved too.
        if not self._evaluated:
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)

    def facts(self) -> dict[str, Parameter]:
        """What is known of the training steps so far beside their time; called after `elapsed_s`.

        Peaks in bytes, of live tensors, and on a GPU of what its allocator reserved; on a CPU `waited_s`, the seconds of
        `elapsed_s` in which the training thread was ready to run and waited for a core, `throttled_s`, those of them that its
        control groups' limits cost, and `stolen_share`, what the host of its virtual machine gave to others.
        """
        peaks = {"peak_bytes": self.peak_bytes, "peak_reserved_bytes": self.peak_reserved_bytes}
        facts: dict[str, Parameter] = {name: peak for name, peak in peaks.items() if peak}
        if self._load and self._running_s > 0:
            waits = {"waited_s": self._load.waited_s, "throttled_s": self._load.held_back_s}
            facts |= {
                name: self._reported_s * s / self._running_s for name, s in waits.items() if s is not None
            }
            if self._load.stolen_share is not None:
                facts["stolen_share"] = self._load.stolen_share
        return facts

    def elapsed_s(self) -> float:
        """Seconds of training so far; called before an evaluation."""
        self._accumulate()
        self._evaluated = True
        self.restart()
        timed = self._samples - self._excluded_samples
        # Where every step is excluded, their own time is the only measurement.
        now_s = self._running_s * self._samples / timed if timed else self._running_s + self._excluded_s
        # The mean over few steps may fall faster than steps are added; reported time must not decrease.
        self._reported_s = max(self._reported_s, now_s)
        return self._reported_s

    def state(self) -> dict[str, Any]:
        """The counters so far, for a checkpoint."""
        return {
            "samples": self._samples,
            "excluded_samples": self._excluded_samples,
            "running_s": self._running_s,
            "excluded_s": self._excluded_s,
            "reported_s": self._reported_s,
            "load": self._load and asdict(self._load),
            "peak_bytes": self.peak_bytes,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resume from these counters; in a new process each size's first step is excluded again."""
        self._samples, self._excluded_samples = state["samples"], state["excluded_samples"]
        self._running_s, self._excluded_s, self.peak_bytes = (
            state["running_s"],
            state["excluded_s"],
            state["peak_bytes"],
        )
        self._reported_s = state["reported_s"]
        # Earlier versions kept other counters; what is not known of a part is not known of the whole.
        self._load = self._load and HostLoad(**(state.get("load") or {"elapsed_s": 0.0}))

    def _synchronize(self) -> None:
        accelerator.synchronize(self.device)
