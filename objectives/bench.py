"""What `bsearch bench` asks a device besides time: memory by size, what an input looks like, how wide the device is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from ..spaces.device import ProfileRequest
from ..spaces.errors import ObjectiveError
from ..spaces.plan import BatchPlan
from .loading import load_objective
from .memory import MemoryProbe
from .task import Task


@dataclass(frozen=True, slots=True)
class BenchFacts:
    """Peak bytes of a training step by micro-batch, and what the rule for suggested sizes speaks of.

    Args:
        image: channels, height and width of an input image; None where inputs are no images.
        multiprocessors: of the GPU; on a CPU the trial's cores stand for them.
    """

    peak_bytes: dict[int, int]
    image: tuple[int, int, int] | None
    multiprocessors: int


def bench_facts(reference: str, request: ProfileRequest, micro_batches: Iterable[int]) -> BenchFacts:
    """Look at a task's memory and input: traced on a CPU, measured on a GPU."""
    task = load_objective(reference)
    if not isinstance(task, Task):
        raise ObjectiveError(f"task {reference}: is a generator: its steps are its own and cannot be timed apart")
    probe = MemoryProbe(task, replace(request.setup, plan=BatchPlan(1)))
    on_gpu = request.setup.device == "gpu"
    peaks = {
        size: (probe.counted("train", size) if on_gpu else probe.train_peak(size)).total for size in sorted({*micro_batches})
    }
    batch = probe.run.train_fetcher.fetch(probe.run.stream.take(0, 2))
    images = [tensor for tensor in tree_iter(batch) if isinstance(tensor, Tensor) and tensor.dim() == 4]
    cores = min(request.setup.cpus, os.cpu_count() or 1)
    wide = torch.cuda.get_device_properties(0).multi_processor_count if on_gpu else cores
    if not images:
        return BenchFacts(peaks, None, wide)
    _, channels, height, width = images[0].shape
    return BenchFacts(peaks, (channels, height, width), wide)
