"""Running out of a device's memory: telling it from other errors, limiting it, and releasing it."""

from __future__ import annotations

import gc
import os
import re

# Read when CUDA's allocator starts. Segments that grow suit micro-batches of changing sizes; others reserve 5 to 20 % more.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

import torch

# Memory runs out in many places, each with words of its own: torch's allocators, CUDA's libraries, NCCL, Triton, the C library.
_SIGNS = re.compile(
    r"out of memory|can't allocate memory|not enough memory|STATUS_ALLOC_FAILED|ALLOCATION_FAILED|cudaErrorMemoryAllocation"
    r"|Cuda failure 2\b"
    # cuDNN tries one plan after the other, and where none finds its workspace it does not say why.
    r"|unable to find an engine to execute|No valid execution plans built",
    re.IGNORECASE,
)


# Whether the allocator grows its segments, in this process and those that it starts.
EXPANDABLE_SEGMENTS = (
    "expandable_segments:true"
    in (os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")).lower()
)


class EvaluationMemoryError(torch.OutOfMemoryError):
    """Out of memory while evaluating: reduce the evaluation batch, not the training micro-batch."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, here or in what an error was raised from.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory")), is_out_of_memory(ValueError("out of memory"))
    (True, False)
    >>> is_out_of_memory(RuntimeError("GET was unable to find an engine to execute this computation"))
    True
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and _SIGNS.search(str(error)):
            return True
        error = error.__cause__
    return False


def host_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit_memory(limit_bytes: int | None, device: torch.device) -> None:
    """Let this process reserve at most so many bytes of a GPU; a CPU's limit is that of a virtual device (`LiveBytes`)."""
    if device.type == "cuda" and limit_bytes is not None:
        index = torch.cuda.current_device() if device.index is None else device.index
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, 1.0), index)


def release_memory(kind: str) -> None:
    """Release unused GPU memory; DistributedDataParallel and its buckets form a reference cycle."""
    if kind == "gpu":
        gc.collect()
        torch.cuda.empty_cache()
