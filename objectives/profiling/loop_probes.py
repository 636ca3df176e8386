"""What is traced and examined of a user's loop that is made of `Loop`, as it runs: its models cannot be copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack

from ...spaces.laws.examination import Examination, Finding
from ...spaces.plan import BatchPlan
from ...spaces.trial import TrialSetup
from ..data.batches import Fetcher
from ..examination.causes import parts_cause
from ..examination.examine import examined_loop, found_in_memory
from ..examination.fixed_noise import seed_draws
from ..examination.plans import plan_finding
from ..examination.step import differing, restored
from ..loading import line_of
from ..loop import Loop
from ..machine import accelerator
from ..machine.device_memory import release_memory
from ..model.weight_average import WeightAverage
from ..script.examined import script_cause, trained_in_parts
from ..task import TrainFunction
from .held import Held
from .memory.live_bytes import LiveBytes
from .memory.tracing import Peak, Probe, batch_factory

# Steps of two micro-batches: the second step has the optimizers' states, the second micro-batch the gradients of the first.
_STEPS, _MICRO_BATCHES = 2, 2


class LoopMemory(Probe):
    """Peaks of a loop's steps."""

    def __init__(self, function: TrainFunction, setup: TrialSetup) -> None:
        super().__init__()
        self.function, self.setup = function, setup
        self._held = Held(function, setup)
        self._like = batch_factory(self._held.engine, "train")
        if setup.device == "gpu":
            self.note = "measured: a loop of your own is not traced on a GPU"

    def _restart(self) -> None:
        self._held.close()
        release_memory(self.setup.device)
        self._held = Held(self.function, self.setup)

    def traced(self, kind: str, size: int) -> Peak:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        loop, counter = self._held.engine, LiveBytes()
        try:
            with _fake_models(loop, fake):
                self._run(size, lambda: self._like(size, fake.from_tensor), counter, [fake])
        except Exception:
            self._restart()
            raise
        return Peak(counter.peak_bytes, counter.peak_bytes, dict(counter.peak_parts))

    def _run(
        self, size: int, batch: Callable[[], Any], counter: LiveBytes | None, contexts: Sequence[Any] = ()
    ) -> None:
        """Steps of micro-batches of this size, counted."""
        loop = self._held.engine
        parts = _MICRO_BATCHES if loop.splits else 1
        for _ in range(_STEPS):
            counting = (
                [] if counter is None else [counter.counting(loop.model, loop.optimizer, loop.average.values)]
            )
            self._held.step([(size, batch)] * parts, parts * size, [*contexts, *counting])
            if counter is not None:
                for optimizer in loop.optimizers.values():
                    counter.register_states(optimizer)

    def counted(self, kind: str, size: int, limit_bytes: int | None = None) -> Peak:
        loop = self._held.engine
        keys = loop.longest(size)
        on_gpu = self.setup.device == "gpu"
        counter = None if on_gpu else LiveBytes(limit_bytes)
        if on_gpu:
            accelerator.release_cached()
            accelerator.reset_peaks()
        try:
            self._run(size, lambda: loop.train_fetcher.fetch(keys), counter)
        except Exception:
            self._restart()
            raise
        if counter is None:
            allocated, reserved = accelerator.peak_bytes()
            return Peak(reserved, allocated, {})
        return Peak(counter.peak_bytes, counter.peak_bytes, dict(counter.peak_parts))

    def close(self) -> None:
        self._held.close()


@contextmanager
def _fake_models(loop: Loop, fake: FakeTensorMode) -> Iterator[None]:
    """Meanwhile the loop's models and optimizers have fake tensors, and the optimizers no state."""
    known, average = dict[int, Any](), loop.average
    owners: list[tuple[dict[str, Any], str, Tensor]] = [
        (tensors, name, tensor)
        for module in loop.model.modules()
        for tensors in (cast(dict[str, Any], module._parameters), cast(dict[str, Any], module._buffers))
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    groups = [
        (group, group["params"]) for optimizer in loop.optimizers.values() for group in optimizer.param_groups
    ]
    states = [(optimizer, optimizer.state) for optimizer in loop.optimizers.values()]
    for _, _, tensor in owners:
        if id(tensor) not in known:
            made = fake.from_tensor(tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            with fake:
                known[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    try:
        for tensors, name, tensor in owners:
            tensors[name] = known[id(tensor)]
        for group, parameters in groups:
            group["params"] = [known[id(parameter)] for parameter in parameters]
        for optimizer, _ in states:
            optimizer.state = defaultdict(dict)
        loop.average = WeightAverage(loop.parameters)
        yield
    finally:
        loop.average = average
        for tensors, name, tensor in owners:
            tensors[name] = tensor
        for group, parameters in groups:
            group["params"] = parameters
        for optimizer, state in states:
            optimizer.state = state


class ExaminedLoop:
    """What is examined of a loop: the gradients that its optimizers step with."""

    def __init__(self, function: TrainFunction, setup: TrialSetup) -> None:
        self.function, self.setup = function, setup
        self._begin()

    @property
    def couples_samples(self) -> bool:
        return not self.loop.splits

    def _begin(self) -> None:
        self.held = Held(self.function, self.setup)
        self.loop: Loop = self.held.engine
        self.loop.listeners = (self._listen,)
        self._sums: dict[int, Tensor] = {}

    @property
    def model(self) -> nn.Module:
        return self.loop.model

    @property
    def schedules(self) -> bool:
        return self.loop.schedules

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.loop.optimizers.values())

    @property
    def data(self) -> Fetcher:
        return self.loop.train_fetcher

    @property
    def weights(self) -> np.ndarray | None:
        return self.loop.data.weights  # type: ignore[return-value]  # checked_data makes them an array

    def _listen(self, name: str, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                before = self._sums.get(id(parameter))
                self._sums[id(parameter)] = (
                    parameter.grad.clone() if before is None else before + parameter.grad
                )

    def first_batch(self, samples: int) -> tuple[int, Any]:
        """A micro-batch of the first samples."""
        loop = self.loop
        samples = min(samples, loop.data.training_set)
        return samples, loop.train_fetcher.fetch(loop.stream.take(0, samples))

    def stepped_with(self, micro_batches: Sequence[tuple[int, Any]], *, clear: bool = True) -> list[Tensor]:
        """The gradients that the parameters are stepped with, from the same weights and random numbers each time.

        Args:
            clear: begin without gradients; otherwise with those that the body left.
        """
        with restored(self.model):
            seed_draws(0)
            self._take(micro_batches, clear=clear)
        return [
            self._sums.get(id(one), torch.zeros_like(one)).detach().cpu() for one in self.model.parameters()
        ]

    def accumulate(self, micro_batches: Sequence[tuple[int, Any]]) -> Tensor:
        """Run the body for these micro-batches and leave each parameter the gradient that it was stepped with."""
        self._take(micro_batches)
        for parameter in self.model.parameters():
            parameter.grad = self._sums.get(id(parameter))
        return torch.zeros(())

    def _take(self, micro_batches: Sequence[tuple[int, Any]], *, clear: bool = True) -> None:
        self._sums.clear()
        loop = self.loop
        for optimizer in loop.optimizers.values():
            optimizer.state.clear()  # may be of another precision
        loop.average = WeightAverage(loop.parameters)
        for parameter in loop.model.parameters() if clear else ():
            parameter.grad = None
        # Fixed draws are a mode of this thread.
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        try:
            self.held.step(micro_batches, sum(size for size, _ in micro_batches), modes)
        except Exception:
            self._begin()  # the function has ended with its error
            raise


def examined_session(function: TrainFunction, setup: TrialSetup) -> Examination:
    """The examination of a loop's step, unsplit and split.

    Raises:
        TaskError: the body leaves something out.
    """
    parts, where = ExaminedLoop(function, setup), f"{line_of(function, setup.folder)}{function.__name__}"
    try:
        is_script = not parts.schedules
        examination = examined_loop(
            where, parts, setup, script_cause if is_script else parts_cause, takes_steps=True
        )
        if examination.refusals or examination.note or parts.couples_samples:
            return examination
        stale = found_in_memory("a step taken again", where, setup.device, partial(_stale, parts, where))
        of_plan = found_in_memory("another plan", where, setup.device, partial(_of_the_plan, parts, where))
        counted = (
            found_in_memory("parts", where, setup.device, partial(trained_in_parts, parts))
            if is_script
            else ()
        )
        return replace(examination, findings=(*examination.findings, *stale, *of_plan, *counted))
    finally:
        parts.held.close()


# Relative difference of gradients that is none of rounding.
_ANOTHER = 1e-3


def _stale(parts: ExaminedLoop, where: str) -> Iterator[Finding]:
    """Whether a step's gradient holds what the body left of the one before."""
    batch = parts.first_batch(parts.setup.smallest_micro_batch)
    fresh, again = (parts.stepped_with([batch], clear=clear) for clear in (True, False))
    if (off := differing(again, fresh)) > _ANOTHER:
        message = (
            f"expected gradients that are cleared once a step, got one that differs by {off:.2g} (relative) where the same "
            "step is taken again: it holds the gradient of the step before, or another pass leaves one there. Call zero_grad() "
            "of each optimizer just before the first backward pass that is meant for it."
        )
        yield Finding("stale", where, message, off)


def _of_the_plan(parts: ExaminedLoop, where: str) -> Iterator[Finding]:
    """Whether the code computes something of its own from `setup.plan` before its loop."""
    smallest = parts.setup.smallest_micro_batch
    plan = BatchPlan(3 * smallest, 2)
    batches = [parts.first_batch(size) for size in (2 * smallest, smallest)]
    split = parts.stepped_with(batches)  # before there is another loop, which would be the newest
    other = ExaminedLoop(parts.function, replace(parts.setup, plan=plan, largest_micro_batch=2 * smallest))
    try:
        other.model.load_state_dict(parts.model.state_dict())
        of_plan = other.stepped_with(batches)
    finally:
        other.held.close()
    if (off := differing(of_plan, split)) > _ANOTHER:
        yield plan_finding(where, off, "2 micro-batches rather than 1")
