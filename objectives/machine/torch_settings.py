"""What torch keeps for a whole process: threads, precision, the heap, seeds."""

from __future__ import annotations

import ctypes
import random
from contextlib import suppress

import numpy as np
import torch

from ...spaces.errors import Fault, StudyFileError
from ...spaces.trial import TrialSetup
from ..data.batches import mixed

# From malloc.h: the number of blocks allocated with mmap, and the free memory at the top of the heap that triggers a trim.
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1


def configure_torch(setup: TrialSetup) -> None:
    """Set what torch keeps for the whole process: threads, kernel selection, the precision of matrix products, the heap.

    Raises:
        StudyFileError: a precision that the device does not have.
    """
    precision = setup.training.precision
    if setup.device == "cpu":
        if precision == "tf32":
            message = "expected fp32, bf16 or fp16 on a CPU, got tf32, which only NVIDIA's GPUs have"
            raise StudyFileError(Fault("training.precision", message))
        _disable_heap_trimming()
    if torch.get_num_threads() != setup.cpus:
        torch.set_num_threads(setup.cpus)
    torch.backends.cudnn.benchmark = False  # trials of one seed would differ by it
    # By default convolutions round their factors and matrix products do not: fp32 would mean two things.
    allow_tf32(precision != "fp32")


def allow_tf32(allowed: bool) -> None:
    """Let matrix products and convolutions of a GPU round their factors to TF32, or not."""
    if hasattr(torch.backends, "fp32_precision"):
        # torch 2.9 and newer have names per operation beside these. These set those too, unless this one, which the user's
        # code may have set, says otherwise: then even reading them raises.
        torch.backends.fp32_precision = "none"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def _disable_heap_trimming() -> None:
    """Make malloc keep freed memory: returning large blocks to the system costs up to half the time of a large micro-batch."""
    with suppress(OSError, AttributeError):  # a C library without mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(int(mixed(seed)) & 0xFFFFFFFF)
    torch.manual_seed(seed)
