"""A task's memory before the first trial: traced on fake tensors, or counted on real ones.

A trace runs two optimizer steps of two micro-batches each on fake tensors: the second step includes the optimizer's state,
the second micro-batch the gradients of the first. Its cost does not depend on the size, so each candidate is traced itself,
without extrapolation. Where a model cannot be traced, because it reads tensor values, the same steps run on real tensors.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from ....spaces.errors import ProfilingError
from ....spaces.laws.memory import PARTS, MemoryLaw, largest_fitting
from ....spaces.plan import Embedding
from ....spaces.readable import readable_bytes
from ....spaces.trial import TrialSetup
from ...data.batches import SampleKeys, in_order, to_device
from ...loading import error_line
from ...machine import accelerator
from ...machine.device_memory import EXPANDABLE_SEGMENTS, is_out_of_memory, release_memory, segments_grow
from ...machine.host import host_bytes
from ...parallel.fsdp2 import imagined_ranks
from ...task import Task
from ...training import TrainingRun
from ..first_step import on_cpu
from .allocator import AllocatorFullError, CachingAllocator
from .as_cuda import as_cuda, move_to_fake_cuda
from .live_bytes import LiveBytes

# Two micro-batches have the same peak as more; one has a peak up to 12 % lower.
_MICRO_BATCHES = 2
_STEPS = 2
# Real steps that find out what steps take may use 1 / this of a machine's memory.
_SPARED = 4
# Larger evaluation batches were never faster in our measurements.
_LARGEST_EVALUATION = 4096


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak bytes of a step or an evaluation.

    Args:
        total: what counts against the limit: on a GPU the bytes that its allocator reserves, on a CPU those of live tensors.
        live: bytes of live tensors.
        parts: the breakdown of `total`, empty where it was read from the GPU's allocator.
    """

    total: int
    live: int
    parts: dict[str, int]


class Probe:
    """Peaks of a training's steps at any micro-batch: traced, or counted on real tensors where they cannot be traced."""

    setup: TrialSetup
    ranks = 1

    def __init__(self) -> None:
        self.note = ""  # why it cannot be traced
        self._peaks: dict[tuple[str, int], Peak] = {}

    @property
    def source(self) -> str:
        return "counted" if self.note else "traced"

    def train_peak(self, micro_batch: int) -> Peak:
        """Peak of a training step with micro-batches of this size; traced unless the model cannot be traced."""
        return self.peak("train", micro_batch)

    def peak(self, kind: str, size: int) -> Peak:
        if (kind, size) not in self._peaks:
            if not self.note:
                try:
                    self._peaks[kind, size] = self.traced(kind, size)
                except Exception as error:
                    self.note = error_line(error)
            if self.note:
                self._peaks[kind, size] = self.counted(kind, size)
        return self._peaks[kind, size]

    def traced(self, kind: str, size: int) -> Peak:
        """The peak on fake tensors."""
        raise NotImplementedError

    def counted(self, kind: str, size: int, limit_bytes: int | None = None) -> Peak:
        """The same on real tensors: on a GPU what its allocator reserves, on a CPU the bytes of live tensors.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End what it holds."""


class MemoryProbe(Probe):
    """Peaks of one task with one set of parameters, at any micro-batch.

    Args:
        setup: its device determines the prediction: for a GPU, steps are traced as CUDA runs them, and the peak is of the bytes
            that its allocator reserves.
        cap_bytes: what a GPU's allocator may reserve, which makes it release cached memory before a request fails.
        like_gpu: trace for a GPU that is not here: then nothing can be counted.
        ranks: devices that share out the parameters; the peaks are then those of one of them, traced.
        embedding: how a loss over the batch's embeddings is computed.
    """

    def __init__(
        self,
        task: Task,
        setup: TrialSetup,
        cap_bytes: float = math.inf,
        *,
        like_gpu: bool = False,
        ranks: int = 1,
        embedding: Embedding = "",
    ) -> None:
        super().__init__()
        self.task, self.like_gpu = task, like_gpu
        self.ranks = ranks
        # As many as trials have.
        self.micro_batches = 1 if embedding == "whole" or task.couples_samples else _MICRO_BATCHES
        on_gpu = like_gpu or (ranks > 1 and setup.device == "gpu")
        if ranks > 1:  # what is sharded may be too large for one device
            setup = on_cpu(setup)
        self.run = TrainingRun(task, setup)
        if on_gpu:
            setup = replace(setup, device="gpu")
            self.run.resident_bytes = self.run.resident_within(cap_bytes)
        self.setup = self.run.setup = setup
        self.run.model.cpu()  # copies are probed; on the device it would add to their memory
        self._expandable = EXPANDABLE_SEGMENTS if like_gpu or self.setup.device == "cpu" else segments_grow()
        self.cap_bytes = cap_bytes
        self._factories: dict[str, Callable[[int, Callable[[Tensor], Tensor]], Any]] = {}

    def _batch_like(self, kind: str) -> Callable[[int, Callable[[Tensor], Tensor]], Any]:
        """Makes batches like real ones; validation data may be of another kind than training data."""
        if kind not in self._factories:
            self._factories[kind] = batch_factory(self.run, kind)
        return self._factories[kind]

    def batch_peak(self, effective_batch: int) -> Peak:
        """Peak of a step of `effective_batch` samples in the smallest micro-batches, their embeddings cached. Of most samples
        the embeddings alone take memory: they are not run.
        """
        return self.peak("batch", effective_batch)

    def held_bytes(self) -> float:
        """Bytes that a step with cached embeddings holds for each of its samples: the embeddings' gradients, and the batch
        where the data live on the device.
        """
        run, keys = self.run, self.run.longest(2)
        batch = to_device(run.train_fetcher.fetch(keys), next(run.model.parameters()).device)
        with torch.no_grad(), run.autocast():
            found = run.task.embed(run.model, batch, run.setup)
        rows = [row for row in tree_iter(found) if isinstance(row, Tensor) and row.is_floating_point()]
        held = sum(row.nbytes for row in rows) / len(keys)
        if run.resident_bytes:
            two, three = (self._batch_like("train")(count, torch.empty_like) for count in (2, 3))
            held += sum(tensor.nbytes for tensor in tree_iter(three)) - sum(
                tensor.nbytes for tensor in tree_iter(two)
            )
        return held

    def evaluation_peak(self, batch: int) -> Peak:
        """Peak of evaluating a batch of this size, including the optimizer's state."""
        return self.peak("evaluation", batch)

    def traced(self, kind: str, size: int) -> Peak:
        like = {
            each: self._batch_like(each)
            for each in dict.fromkeys(("train", "train" if kind == "batch" else kind))
        }
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with warnings.catch_warnings(), FakeCopyMode(fake):
            warnings.simplefilter("ignore")
            model = copy.deepcopy(self.run.model)
        on_gpu = self.setup.device == "gpu"
        with warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore")
            stack.enter_context(as_cuda() if on_gpu else nullcontext())
            mesh = None
            if self.ranks > 1:
                mesh = stack.enter_context(
                    imagined_ranks(torch.device("cuda" if on_gpu else "cpu"), self.ranks)
                )
            stack.enter_context(fake)
            if not on_gpu:
                run = self.run.on(model, torch.device("cpu"), mesh)
                return self._peak_of(run, kind, size, lambda each, count: like[each](count, fake.from_tensor))
            move_to_fake_cuda(model)
            run = self.run.on(model, torch.device("cuda"), mesh)
            for group in run.optimizer.param_groups:
                if group.get("foreach", ...) is None and not group.get("fused"):
                    group["foreach"] = True  # the default on a GPU; it needs more memory at once
            return self._reserved_peak(run, kind, size, lambda each, count: like[each](count, _empty_on_cuda))

    def counted(self, kind: str, size: int, limit_bytes: int | None = None) -> Peak:
        """As of any `Probe`.

        Raises:
            torch.OutOfMemoryError: it does not fit.
            ProfilingError: the GPU is not here.
        """
        if self.like_gpu or self.ranks > 1:
            where = (
                "a GPU that is not here"
                if self.like_gpu
                else f"one of {self.ranks} devices that its parameters are sharded over"
            )
            raise ProfilingError(
                f"expected a model that can be traced, to predict its memory on {where}; got {self.note}"
            )
        device = accelerator.device_of(self.setup.device)
        run = self.run.on(copy.deepcopy(self.run.model).to(device), device)
        if accelerator.is_gpu(device):
            if self.setup.training.compile:
                run.model.compile()  # copying a model drops its compiled call
            return self._peak_on_gpu(run, kind, size)
        return self._peak_of(run, kind, size, lambda each, count: _real_batch(run, count, each), limit_bytes)

    def _peak_of(
        self,
        run: TrainingRun,
        kind: str,
        size: int,
        batch: Callable[[str, int], Any],
        limit_bytes: int | None = None,
    ) -> Peak:
        counter, _ = self._counted_step(run, kind, size, batch, limit_bytes)
        return Peak(counter.peak_bytes, counter.peak_bytes, dict(counter.peak_parts))

    def _reserved_peak(
        self, run: TrainingRun, kind: str, size: int, batch: Callable[[str, int], Any]
    ) -> Peak:
        """What CUDA's allocator would reserve for a traced step under a cap; without one where it does not fit."""
        counter, before = self._counted_step(run, kind, size, batch, None)
        for cap in (self.cap_bytes, math.inf):
            allocator = CachingAllocator(cap, expandable=self._expandable)
            try:
                allocator.allocate("resident data", run.resident_bytes)
                allocator.replay(counter.events[:before])
                if before:
                    allocator.release_cached()
                    allocator.reset_peak()
                allocator.replay(counter.events[before:])
            except AllocatorFullError:
                continue
            break
        live = counter.peak_bytes + run.resident_bytes
        unused = max(allocator.peak_reserved_bytes - live, 0)
        parts = {**counter.peak_parts, "resident data": run.resident_bytes, "reserved but unused": unused}
        return Peak(allocator.peak_reserved_bytes, live, parts)

    def _counted_step(
        self,
        run: TrainingRun,
        kind: str,
        size: int,
        batch: Callable[[str, int], Any],
        limit_bytes: int | None,
    ) -> tuple[LiveBytes, int]:
        """Count the steps, or the evaluation; returns the counter, and how many events precede what is counted."""
        counter, before = LiveBytes(limit_bytes), 0
        with counter.counting(run.model, run.optimizer, run.averages):
            if kind == "evaluation":
                _create_optimizer_state(run, batch)
                before = len(counter.events)
                counter.peak_bytes, counter.peak_parts = 0, type(counter.peak_parts)()
                run.model.eval()
                with torch.no_grad(), run.average.in_place():
                    run.scores(run.on_device(counter.fetched(lambda: batch("evaluation", size))))
            else:
                run.modes.train(run.model)
                for _ in range(_STEPS):
                    self._step(run, kind, size, lambda count: batch("train", count), counter)
                    counter.register_states(run.optimizer)
                    counter.register(run.averages, "weight average")
        return counter, before

    def _peak_on_gpu(self, run: TrainingRun, kind: str, size: int) -> Peak:
        """Peak bytes reserved by CUDA's allocator, including fragmentation."""
        accelerator.release_cached()
        accelerator.reset_peaks()
        run.modes.train(run.model)
        trained = size if kind != "evaluation" else max(run.setup.smallest_micro_batch, 1)
        for _ in range(_STEPS):
            self._step(run, kind, trained, lambda count: _real_batch(run, count, "train"))
        if kind == "evaluation":
            accelerator.release_cached()
            accelerator.reset_peaks()
            keys = in_order(size, size, run.setup.seed)[0]
            run.evaluate([replace(keys, index=keys.index % len(run.data.validation))])  # type: ignore[arg-type]
        allocated, reserved = accelerator.peak_bytes()
        return Peak(reserved, allocated, {})

    def _step(
        self,
        run: TrainingRun,
        kind: str,
        size: int,
        batch: Callable[[int], Any],
        counter: LiveBytes | None = None,
    ) -> None:
        """One step with micro-batches of this size, or of this many samples in total where their embeddings are cached."""
        if kind != "batch":
            run.step([(size, lambda: batch(size))] * self.micro_batches, size * self.micro_batches)
            return
        assert run.cache is not None
        smallest = max(run.setup.smallest_micro_batch, 1)
        run.cache.absent = absent = max(size - 2 * smallest, 0)
        waiting = None
        if absent and run.resident_bytes:
            waiting = batch(absent) if counter is None else counter.fetched(lambda: batch(absent))
        run.step([(smallest, lambda: batch(smallest))] * 2, size)
        del waiting


def cached_law(
    probe: MemoryProbe, law: MemoryLaw, limit_bytes: float, lowest: int, highest: int
) -> tuple[MemoryLaw, int]:
    """A law of micro-batches whose embeddings are cached, with what a step's samples hold apart; and the largest step.

    Args:
        law: of steps of two such micro-batches.
        lowest, highest: samples of a step.
    """
    held = probe.held_bytes()
    peak = approached(probe, lambda size: probe.batch_peak(size).total, limit_bytes)
    largest = largest_fitting(peak, limit_bytes, lowest, highest)
    points = tuple((size, max(round(peak - 2 * size * held), 0)) for size, peak in law.points)
    return replace(law, points=points, held_bytes=held), largest or lowest


def approached(probe: Probe, peak: Callable[[int], float], limit_bytes: float) -> Callable[[int], float]:
    """The peak of a size, infinite where memory runs out. Where the probe counts real tensors, it reaches a size from below.

    A trace takes no memory, a real step may take more than the machine has. Each size is at most twice the one before, and so
    that a peak which grows by the third power, as of a loss over triples of samples, stays below twice the limit.
    """
    most = min(limit_bytes, host_bytes() / _SPARED) if probe.setup.device == "cpu" else limit_bytes
    known: dict[int, float] = {}

    def measured(size: int) -> float:
        if size not in known:
            try:
                known[size] = peak(size)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                release_memory(probe.setup.device)
                known[size] = math.inf
        return known[size]

    def climbed(size: int) -> float:
        while known and probe.source == "counted" and (last := max(known)) < size:
            if known[last] > most:
                return known[last] if known[last] > limit_bytes else math.inf
            growth = min(2.0, (2 * most / max(known[last], 1)) ** (1 / 3))
            measured(min(size, max(int(growth * last), last + 1)))
        return measured(size)

    return climbed


def memory_law(probe: Probe, limit_bytes: float, lowest: int, highest: int) -> MemoryLaw | None:
    """The memory law from a few traces, enough to find the largest micro-batch under the limit exactly.

    None where real tensors had to be counted and not even the lowest size ran.
    """
    points: dict[int, Peak] = {}

    def reached(size: int) -> float:
        points[size] = probe.train_peak(size)
        return points[size].total

    peak = approached(probe, reached, limit_bytes)
    if limit_bytes == float("inf"):
        for size in sorted({lowest, round((lowest * highest) ** 0.5), highest}):
            peak(size)
    else:
        largest_fitting(peak, limit_bytes, lowest, highest)
    if not points:
        return None
    largest = max((size for size in points if points[size].total <= limit_bytes), default=min(points))
    parts = points[largest].parts
    return MemoryLaw(
        points=tuple((size, points[size].total) for size in sorted(points)),
        source=probe.source,
        breakdown={part: parts.get(part, 0) for part in PARTS},
        note=probe.note,
    )


def evaluation_batch(
    probe: MemoryProbe, limit_bytes: float, law: MemoryLaw, micro_batch: int
) -> tuple[int, dict[int, int]]:
    """The largest evaluation batch that fits, at least as large as a training micro-batch.

    Returns:
        The batch, and the peaks by batch that were probed.
    """
    highest = max(micro_batch, min(len(probe.run.data.validation), _LARGEST_EVALUATION))  # type: ignore[arg-type]
    peaks: dict[int, int] = {}

    def reached(size: int) -> float:
        peaks[size] = probe.evaluation_peak(size).total
        return peaks[size] * law.scale + law.fixed_bytes

    peak = approached(probe, reached, limit_bytes)
    return max(
        largest_fitting(peak, limit_bytes, min(micro_batch, highest), highest) or micro_batch, micro_batch
    ), peaks


def does_not_fit(peak: Peak | None, limit_bytes: float, micro_batch: int) -> str:
    """The message for a model whose smallest micro-batch does not fit, with its breakdown of bytes where they are known."""
    if peak is None:
        return (
            f"expected room for a micro-batch of {micro_batch} sample{'s' * (micro_batch > 1)}, which ran out of memory; the "
            f"limit less headroom is {readable_bytes(limit_bytes)}. Raise the limit, or use a smaller model."
        )
    parts = ", ".join(
        f"{part} {readable_bytes(peak.parts.get(part, 0))}" for part in PARTS if peak.parts.get(part)
    )
    return (
        f"expected room for a micro-batch of {micro_batch} sample{'s' * (micro_batch > 1)}, which peaks at "
        f"{readable_bytes(peak.total)} ({parts}); the limit less headroom is {readable_bytes(limit_bytes)}. "
        "Raise the limit, or use a smaller model, an optimizer with less state or a lower precision."
    )


def _create_optimizer_state(run: TrainingRun, batch: Callable[[str, int], Any]) -> None:
    """Take the smallest step, so that the optimizer's state exists as it does when a trial evaluates."""
    run.modes.train(run.model)
    smallest = max(run.setup.smallest_micro_batch, 1)
    run.step([(smallest, batch("train", smallest))], smallest)


def _empty_on_cuda(like: Tensor) -> Tensor:
    return torch.empty_like(like, device="cuda")


def _real_batch(run: TrainingRun, count: int, kind: str) -> Any:
    """A batch of `count` real samples from the stream, which repeats a small training set as needed."""
    fetcher = run.train_fetcher if kind == "train" else run.validation_fetcher
    keys = run.longest(count)
    if kind != "train":
        keys = SampleKeys(keys.index % len(run.data.validation), keys.epoch, keys.seed)  # type: ignore[arg-type]
    return to_device(fetcher.fetch(keys), run.device)


def batch_factory(run: Any, kind: str) -> Callable[[int, Callable[[Tensor], Tensor]], Any]:
    """A function that creates a batch of any size, inferred from batches of two and three samples of a run or a `Loop`.

    Dimensions that grow from two to three are the batch dimension. Other dimensions that vary between batches (padded
    lengths) take the longest known, or the longest of a few.
    """
    fetcher = run.train_fetcher if kind == "train" else run.validation_fetcher
    size = len(fetcher.dataset)
    samples = min(size, 8)

    def shapes_of(keys: SampleKeys) -> Any:
        """A batch without its values, which would stay on a GPU where the data are."""
        keys = keys if kind == "train" else replace(keys, index=keys.index % size)
        return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), fetcher.fetch(keys))

    two, three = (shapes_of(run.longest(count)) for count in (2, 3))
    pairs = [shapes_of(run.stream.take(2 * part, 2)) for part in range(max(samples // 2, 1))]
    shapes = zip(tree_iter(two), tree_iter(three), strict=True)
    if not any(isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape for a, b in shapes):
        raise TypeError(
            f"expected a batch of tensors, in tuples, lists or dicts, to trace; got {type(two).__name__}"
        )

    def like(count: int, convert: Callable[[Tensor], Tensor]) -> Any:
        def sized(first: Any, second: Any, *others: Any) -> Any:
            if not isinstance(first, Tensor):
                return first
            shape = [
                count if (a, b) == (2, 3) else max([a, b, *(other.shape[axis] for other in others)])
                for axis, (a, b) in enumerate(zip(first.shape, second.shape, strict=True))
            ]
            return convert(torch.empty(0, dtype=first.dtype)).new_empty(shape)

        return tree_map(sized, two, three, *pairs)

    return like
