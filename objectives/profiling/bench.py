"""What `bsearch bench` asks a device besides time: what an input looks like, how wide the device is, memory by size."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from ...spaces.device import ProfileRequest
from ...spaces.errors import TaskError
from ...spaces.plan import BatchPlan
from ..loading import load_task
from ..task import Task
from .memory import MemoryProbe


@dataclass(frozen=True, slots=True)
class BenchFacts:
    """What the rule for suggested sizes speaks of.

    Args:
        image: channels, height and width of an input image; None where inputs are no images.
        multiprocessors: of the GPU; on a CPU the trial's cores stand for them.
    """

    image: tuple[int, int, int] | None
    multiprocessors: int


def bench_probe(reference: str, request: ProfileRequest) -> MemoryProbe:
    """A look into a task's memory and input.

    Raises:
        TaskError: a bare generator, or code that breaks its contract.
    """
    task = load_task(reference)
    if not isinstance(task, Task):
        raise TaskError(f"task {reference}: is a generator: its steps are its own and cannot be timed apart")
    return MemoryProbe(task, replace(request.setup, plan=BatchPlan(1)))


def bench_facts(probe: MemoryProbe) -> BenchFacts:
    """What an input looks like, and how wide the device is."""
    setup = probe.setup
    batch = probe.run.train_fetcher.fetch(probe.run.stream.take(0, 2))
    images = [tensor for tensor in tree_iter(batch) if isinstance(tensor, Tensor) and tensor.dim() == 4]
    if setup.device == "gpu":
        wide = torch.cuda.get_device_properties(0).multi_processor_count
    else:
        wide = min(setup.cpus, os.cpu_count() or 1)
    if not images:
        return BenchFacts(None, wide)
    _, channels, height, width = images[0].shape
    return BenchFacts((channels, height, width), wide)


def peak_bytes(probe: MemoryProbe, micro_batches: Iterable[int]) -> dict[int, int]:
    """Peak bytes of a training step by micro-batch: traced on a CPU, measured on a GPU."""
    measured = probe.setup.device == "gpu"
    return {
        size: (probe.counted("train", size) if measured else probe.train_peak(size)).total for size in sorted({*micro_batches})
    }
