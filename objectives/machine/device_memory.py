"""Out-of-memory errors: told from others, and memory limited and released; and devices that fail."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from .gpus import GROWING, allocator_is_ours

# Read when CUDA's allocator starts.
if allocator_is_ours():
    os.environ["PYTORCH_ALLOC_CONF"] = GROWING

import torch

from . import accelerator

# Memory runs out in many places, each with words of its own: torch's allocators, CUDA's libraries, NCCL, Triton, the C library.
_SIGNS = re.compile(
    r"out of memory|can't allocate memory|not enough memory|STATUS_?ALLOC_?FAILED|ALLOCATION_FAILED|cudaErrorMemoryAllocation"
    r"|Cuda failure 2\b",
    re.IGNORECASE,
)
# What stands for other faults too: cuDNN tries one plan after the other, and does not say why none finds its workspace; nor do
# libraries that cannot create their handle.
_AMBIGUOUS = re.compile(
    r"unable to find an engine to execute|No valid execution plans built|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUDNN_STATUS_INTERNAL_ERROR|CUDNN_STATUS_NOT_INITIALIZED",
    re.IGNORECASE,
)
# Memory is short where less than this share of what a process may take is free.
_SHORT = 0.05


# Whether the allocator was asked to grow its segments, in this process and those that it starts.
EXPANDABLE_SEGMENTS = (
    "expandable_segments:true"
    in (os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")).lower()
)


@cache
def segments_grow() -> bool:
    """Whether the allocator of this process's GPU really grows its segments: it was asked to, and says so of those it has.

    A setting is ignored where it comes after the allocator has started, or where the driver lacks what it takes.
    """
    if not EXPANDABLE_SEGMENTS or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return EXPANDABLE_SEGMENTS
    tensor = torch.ones(1, device="cuda")
    grow = any(expandable for _, _, expandable, _ in allocator_segments())
    del tensor
    return grow


class EvaluationMemoryError(torch.OutOfMemoryError):
    """Out of memory while evaluating: reduce the evaluation batch, not the training micro-batch."""


@contextmanager
def evaluating() -> Iterator[None]:
    """Context of an evaluation, in which running out of memory is an `EvaluationMemoryError`."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise EvaluationMemoryError(str(error)) from error
        raise


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, here or in what an error was raised from.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory")), is_out_of_memory(ValueError("out of memory"))
    (True, False)
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and _SIGNS.search(str(error)):
            return True
        if isinstance(error, RuntimeError) and _AMBIGUOUS.search(str(error)) and memory_is_short():
            return True
        error = error.__cause__
    return False


def memory_is_short() -> bool:
    """Whether little is free of this process's GPU, or of what `limit_memory` leaves it."""
    try:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return False
        free, total = accelerator.memory_info()
        reserved = accelerator.reserved_bytes()
    except RuntimeError:
        return False
    most = total if _limit_bytes is None else min(_limit_bytes, total)
    return min(free, most - reserved) < _SHORT * most


# What this process may reserve of a GPU; None: all of it.
_limit_bytes: int | None = None


def limit_memory(limit_bytes: int | None, device: torch.device) -> None:
    """Limit the bytes that this process may reserve of a GPU, None: all; a CPU's limit is that of a virtual device
    (`LiveBytes`).
    """
    global _limit_bytes
    if accelerator.is_gpu(device):
        _limit_bytes = limit_bytes
        total = accelerator.total_bytes(device)  # 0 where it is not known
        share = 1.0 if limit_bytes is None or not total else min(limit_bytes / total, 1.0)
        accelerator.limit_share(share, device)


def allocator_segments() -> list[tuple[str, int, bool, list[int]]]:
    """The segments of the current GPU's allocator: small or large, bytes, whether it grows, and its blocks' bytes in order,
    negative where free.
    """
    here = torch.cuda.current_device()
    return [
        (
            segment["segment_type"],
            segment["total_size"],
            bool(segment.get("is_expandable")),
            [
                -block["size"] if block["state"] == "inactive" else block["size"]
                for block in segment["blocks"]
            ],
        )
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if segment["device"] == here
    ]


def release_memory(kind: str) -> None:
    """Release unused GPU memory; DistributedDataParallel and its buckets form a reference cycle."""
    if kind == "gpu":
        gc.collect()
        with suppress(RuntimeError):  # of a device that has failed nothing is released
            accelerator.release_cached()


def process_fault(kind: str) -> str:
    """What keeps this process from training at all; empty where nothing does.

    After some errors, such as a failed assertion in a kernel, a GPU refuses all work of the process until it ends.
    """
    try:
        if kind == "gpu":
            (torch.ones(1, device=accelerator.device_of("gpu")) + 1).item()
    except Exception as error:  # of a torch without CUDA, an AssertionError
        if not is_out_of_memory(error):
            return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return ""
