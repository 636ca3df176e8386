"""Looking into a task's memory before the first trial: traced without running anything, or counted on real tensors.

A trace runs two optimizer steps of two passes each on fake tensors (the second step sees the optimizer's states, the second
pass the gradients of the first) and costs the same at any size; so the candidate itself is traced, and nothing is
extrapolated. Where a model cannot be traced (it looks at values), the same steps run on real tensors.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_map

from ...spaces.memory import PARTS, MemoryLaw, largest_fitting
from ...spaces.readable import readable_bytes
from ...spaces.trial import TrialSetup
from ..batches import SampleKeys, in_order, to_device
from ..task import Task
from ..training import TrainingRun
from .live_bytes import LiveBytes

# A step of two passes peaks as a step of more does; of one, up to 12 % lower.
_PASSES = 2
_STEPS = 2
# Evaluation batches above this were never faster where we looked, only larger.
_LARGEST_EVALUATION = 4096


@dataclass(frozen=True, slots=True)
class Peak:
    """Most bytes that lived at once, and what they were."""

    total: int
    parts: dict[str, int]


class MemoryProbe:
    """Peaks of one task with one set of parameters, at any micro-batch.

    Args:
        setup: its device says what is predicted: a GPU's optimizers work on lists of tensors at once.
    """

    def __init__(self, task: Task, setup: TrialSetup) -> None:
        self.task, self.setup = task, setup
        self.run = TrainingRun(task, setup)
        self.run.model.cpu()  # copies of it are looked at; on a device it would be in their way
        self._like = _two_and_three(self.run)
        self.note = ""
        self._counts: dict[tuple[str, int], Peak] = {}

    @property
    def source(self) -> str:
        return "counted" if self.note else "traced"

    def train_peak(self, micro_batch: int) -> Peak:
        """Peak of a training step with passes of this size; by trace, unless the model cannot be traced."""
        return self._look("train", micro_batch)

    def evaluation_peak(self, batch: int) -> Peak:
        """Peak of an evaluation pass of this size, the optimizer's states beside it."""
        return self._look("evaluation", batch)

    def _look(self, kind: str, size: int) -> Peak:
        if (kind, size) not in self._counts:
            if not self.note:
                try:
                    self._counts[kind, size] = self._traced(kind, size)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    reason = str(error).strip().splitlines()
                    self.note = f"{type(error).__name__}: {reason[0] if reason else ''}"[:200]
            if self.note:
                self._counts[kind, size] = self.counted(kind, size)
        return self._counts[kind, size]

    def _traced(self, kind: str, size: int) -> Peak:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with warnings.catch_warnings(), FakeCopyMode(fake):
            warnings.simplefilter("ignore")
            model = copy.deepcopy(self.run.model)
        with warnings.catch_warnings(), fake:
            warnings.simplefilter("ignore")
            run = self.run.on(model, torch.device("cpu"))
            if self.setup.device == "gpu":
                for group in run.optimizer.param_groups:
                    if group.get("foreach", ...) is None and not group.get("fused"):
                        group["foreach"] = True  # a GPU's default, and it holds more at once
            return _peak_of(run, kind, size, lambda count: self._like(count, fake.from_tensor))

    def counted(self, kind: str, size: int, limit_bytes: int | None = None) -> Peak:
        """The same on real tensors: on a GPU its allocator's own peak, on a CPU the living bytes.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        device = torch.device("cuda" if self.setup.device == "gpu" else "cpu")
        run = self.run.on(copy.deepcopy(self.run.model).to(device), device)
        if device.type == "cuda":
            return _peak_on_gpu(run, kind, size)
        return _peak_of(run, kind, size, lambda count: _real_batch(run, count, kind), limit_bytes)


def memory_law(probe: MemoryProbe, limit_bytes: float, lowest: int, highest: int) -> MemoryLaw:
    """The law of a task from a handful of looks: enough to know the largest micro-batch under the limit exactly."""
    points: dict[int, Peak] = {}

    def peak(size: int) -> float:
        points[size] = probe.train_peak(size)
        return points[size].total

    if limit_bytes == float("inf"):
        for size in sorted({lowest, round((lowest * highest) ** 0.5), highest}):
            peak(size)
    else:
        largest_fitting(peak, limit_bytes, lowest, highest)
    largest = max((size for size in points if points[size].total <= limit_bytes), default=lowest)
    parts = points[largest].parts
    return MemoryLaw(
        points=tuple((size, points[size].total) for size in sorted(points)),
        source=probe.source,
        breakdown={part: parts.get(part, 0) for part in PARTS},
        note=probe.note,
    )


def calibrated(law: MemoryLaw, probe: MemoryProbe, sizes: list[int]) -> tuple[MemoryLaw, dict[int, int]]:
    """The law after real steps at a few sizes, smallest first: it covers then what no trace sees.

    Returns:
        The law, and the measured bytes by size.
    """
    measured = {size: probe.counted("train", size).total for size in sorted(sizes)}
    for size, peak in measured.items():
        law = law.measured_at(size, peak)
    return law, measured


def evaluation_batch(probe: MemoryProbe, limit_bytes: float, law: MemoryLaw, micro_batch: int) -> tuple[int, dict[int, int]]:
    """Samples of an evaluation pass: the most that fit, never fewer than a training pass takes.

    Returns:
        The batch, and peaks by the batches looked at.
    """
    highest = max(micro_batch, min(len(probe.run.data.evaluation), _LARGEST_EVALUATION))  # type: ignore[arg-type]
    looks: dict[int, int] = {}

    def peak(size: int) -> float:
        looks[size] = probe.evaluation_peak(size).total
        return looks[size] * law.scale + law.fixed_bytes

    return max(largest_fitting(peak, limit_bytes, min(micro_batch, highest), highest) or micro_batch, micro_batch), looks


def does_not_fit(probe: MemoryProbe, peak: Peak, limit_bytes: float, micro_batch: int) -> str:
    """Where the bytes go, for a model of which not even the smallest pass fits."""
    parts = ", ".join(f"{part} {readable_bytes(peak.parts.get(part, 0))}" for part in PARTS if peak.parts.get(part))
    return (
        f"expected room for a pass of {micro_batch} sample{'s' * (micro_batch > 1)}, which peaks at "
        f"{readable_bytes(peak.total)} ({parts}); the limit less headroom is {readable_bytes(limit_bytes)}. "
        "Raise it, or take a smaller model, a lighter optimizer or a lower precision."
    )


def _peak_of(run: TrainingRun, kind: str, size: int, batch: Callable[[int], Any], limit_bytes: int | None = None) -> Peak:
    counter = LiveBytes(limit_bytes)
    with counter.counting(run.model, run.optimizer):
        if kind == "evaluation":
            _optimizer_states(run, batch)
            counter.peak_bytes, counter.peak_parts = 0, type(counter.peak_parts)()
            run.model.eval()
            with torch.no_grad(), run.autocast():
                run.task.score(run.model, _seen(counter, batch(size)), run.setup)
        else:
            run.model.train()
            for _ in range(_STEPS):
                run.step([(size, lambda: _seen(counter, batch(size)))] * _PASSES, size * _PASSES)
                counter.register_states(run.optimizer)
    return Peak(counter.peak_bytes, dict(counter.peak_parts))


def _optimizer_states(run: TrainingRun, batch: Callable[[int], Any]) -> None:
    """A smallest step, so that the optimizer's states exist as they do when a trial evaluates."""
    run.model.train()
    smallest = max(run.setup.smallest_micro_batch, 1)
    run.step([(smallest, batch(smallest))], smallest)


def _seen(counter: LiveBytes, batch: Any) -> Any:
    counter.register(torch.utils._pytree.tree_iter(batch), "batch")
    return batch


def _peak_on_gpu(run: TrainingRun, kind: str, size: int) -> Peak:
    """The most that CUDA's allocator reserved: fragments and all."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run.model.train()
    for _ in range(_STEPS):
        run.step([(size, _real_batch(run, size, "train"))] * _PASSES, size * _PASSES)
    if kind == "evaluation":
        torch.cuda.reset_peak_memory_stats()
        run.evaluate(in_order(size, size, run.setup.seed))
    return Peak(torch.cuda.max_memory_reserved(), {})


def _real_batch(run: TrainingRun, count: int, kind: str) -> Any:
    """So many real samples: of the stream, which repeats a small training set as often as needed."""
    fetcher = run.train_fetcher if kind == "train" else run.evaluation_fetcher
    keys = run.stream.take(0, count)
    if kind != "train":
        keys = SampleKeys(keys.index % len(run.data.evaluation), keys.epoch, keys.seed)  # type: ignore[arg-type]
    return to_device(fetcher.fetch(keys), run.device)


def _two_and_three(run: TrainingRun) -> Callable[[int, Callable[[Tensor], Tensor]], Any]:
    """What a batch of any size looks like, learned from batches of two and three samples.

    Dimensions that went from two to three follow the batch; other dimensions that differ between batches (padded
    lengths) are taken at the longest of a few.
    """
    few = min(len(run.data.train), 8)  # type: ignore[arg-type]
    two, three = (run.train_fetcher.fetch(run.stream.take(0, count)) for count in (2, 3))
    longest = [run.train_fetcher.fetch(run.stream.take(2 * part, 2)) for part in range(max(few // 2, 1))]

    def like(count: int, convert: Callable[[Tensor], Tensor]) -> Any:
        def sized(first: Any, second: Any, *others: Any) -> Any:
            if not isinstance(first, Tensor):
                return first
            shape = [
                count if (a, b) == (2, 3) else max([a, b, *(other.shape[axis] for other in others)])
                for axis, (a, b) in enumerate(zip(first.shape, second.shape, strict=True))
            ]
            return convert(torch.empty(0, dtype=first.dtype)).new_empty(shape)

        return tree_map(sized, two, three, *longest)

    return like


__all__ = ["MemoryProbe", "Peak", "calibrated", "does_not_fit", "evaluation_batch", "memory_law"]
