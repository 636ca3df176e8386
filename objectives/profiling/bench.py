"""What `bsearch profile --batches` measures besides time: input shape, the device's parallelism, memory by micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from ...spaces.errors import TaskError
from ...spaces.laws.device import ProfileRequest
from ...spaces.plan import BatchPlan
from ..loading import load_task
from ..machine.host import cores_here
from ..task import Task
from .memory.tracing import MemoryProbe


@dataclass(frozen=True, slots=True)
class BenchFacts:
    """Inputs of the rule that suggests batch sizes.

    Args:
        image: channels, height and width of an input image; None where inputs are not images.
        multiprocessors: of the GPU; on a CPU, the trial's cores.
    """

    image: tuple[int, int, int] | None
    multiprocessors: int


def bench_probe(reference: str, request: ProfileRequest) -> MemoryProbe:
    """A probe of a task's memory and input.

    Raises:
        TaskError: a generator, or code that breaks its contract.
    """
    task = load_task(reference)
    if not isinstance(task, Task):
        raise TaskError(f"task {reference}: expected a Task, got a generator, whose steps cannot be timed separately")
    return MemoryProbe(task, replace(request.setup, plan=BatchPlan(1)))


def bench_facts(probe: MemoryProbe) -> BenchFacts:
    """The shape of an input image, and the device's parallelism."""
    setup = probe.setup
    batch = probe.run.train_fetcher.fetch(probe.run.stream.take(0, 2))
    images = [tensor for tensor in tree_iter(batch) if isinstance(tensor, Tensor) and tensor.dim() == 4]
    if setup.device == "gpu":
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    else:
        multiprocessors = min(setup.cpus, cores_here())
    if not images:
        return BenchFacts(None, multiprocessors)
    _, channels, height, width = images[0].shape
    return BenchFacts((channels, height, width), multiprocessors)


def peak_bytes(probe: MemoryProbe, micro_batches: Iterable[int]) -> dict[int, int]:
    """Peak bytes of a training step by micro-batch: traced on a CPU, measured on a GPU."""
    measured = probe.setup.device == "gpu"
    return {
        size: (probe.counted("train", size) if measured else probe.train_peak(size)).total for size in sorted({*micro_batches})
    }
