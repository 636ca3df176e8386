"""The accelerator that trials run on with `kind: gpu`, of any vendor; what depends on its backend is here.

CUDA's, which is also ROCm's, by `torch.cuda`; any other by `torch.accelerator` and its own module, where they have
it: what a backend does not report is left out, such as peaks of memory.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn


@cache
def backend() -> str:
    """Torch's name for it, such as cuda."""
    if torch.cuda.is_available():
        return "cuda"
    found = torch.accelerator.current_accelerator()
    return "cuda" if found is None else found.type


def is_gpu(device: torch.device) -> bool:
    """Whether a device is an accelerator, rather than the CPU."""
    return device.type not in ("cpu", "meta")


def device_of(kind: Literal["cpu", "gpu"]) -> torch.device:
    """The device of this process: the CPU, or its current accelerator."""
    if kind == "cpu":
        return torch.device("cpu")
    current = torch.cuda.current_device if backend() == "cuda" else torch.accelerator.current_device_index
    return torch.device(backend(), current())


def device_count() -> int:
    """Number of accelerators that this process may use."""
    return torch.cuda.device_count() if backend() == "cuda" else torch.accelerator.device_count()


def set_device(index: int) -> None:
    """Make one of them this process's, or this thread's, current one."""
    if backend() == "cuda":
        torch.cuda.set_device(index)
    else:
        torch.accelerator.set_device_index(index)


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """A model on a device, with the same parameters, so that optimizers that were made of them before still hold them.

    By default torch makes new ones on the backends of vendors outside its tree.
    """
    future = torch.__future__
    before = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(before or device.type not in ("cpu", "cuda"))
    try:
        return model.to(device)
    finally:
        future.set_swap_module_params_on_conversion(before)


def synchronize(device: torch.device | None = None) -> None:
    """Wait until a device, by default the current accelerator, has done all its work; a CPU always has."""
    if device is not None and not is_gpu(device):
        return
    _module().synchronize(*([] if device is None else [device]))


def pins(device: torch.device) -> bool:
    """Whether copies to a device are faster from pinned memory, which not every backend has."""
    return device.type in ("cuda", "xpu")


def widest_float(device: torch.device) -> torch.dtype:
    """What sums and ratios of counts are computed in: double precision where a device has it, which Apple's and some of Intel's
    do not.
    """
    return _widest_float(device.type)


@cache
def _widest_float(device_type: str) -> torch.dtype:
    if device_type in ("cpu", "meta", "cuda"):
        return torch.float64
    try:
        (torch.ones((), dtype=torch.float64, device=device_type) + 1).item()
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def release_cached() -> None:
    """Give memory that the allocator keeps for later back to the device."""
    if backend() == "cuda":
        torch.cuda.empty_cache()
        return
    with suppress(AttributeError, RuntimeError):
        torch.accelerator.empty_cache()


def memory_info(device: torch.device | None = None) -> tuple[int, int]:
    """Free and all bytes of an accelerator, by default the current one, as its driver counts them; (0, 0) where it does not."""
    if backend() == "cuda":
        return torch.cuda.mem_get_info(device)
    with suppress(AttributeError, RuntimeError):
        return torch.accelerator.get_memory_info(device)
    return 0, 0


def reserved_bytes() -> int:
    """What this process's allocator has reserved of the current accelerator."""
    return torch.cuda.memory_reserved() if backend() == "cuda" else 0


def reset_peaks(device: torch.device | None = None) -> None:
    """Begin to count peaks of memory anew."""
    if backend() == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(AttributeError, RuntimeError):
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device | None = None) -> tuple[int, int]:
    """Peak bytes since then, of live tensors and of what the allocator reserved; 0 where they are not counted."""
    if backend() == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    with suppress(AttributeError, RuntimeError):
        return torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(device)
    return 0, 0


def total_bytes(device: torch.device) -> int:
    """All memory of an accelerator."""
    if backend() == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_info(device)[1]


def limit_share(share: float, device: torch.device) -> None:
    """Let this process reserve at most this share of an accelerator's memory, where its backend can keep it to that."""
    limit = getattr(_module(), "set_per_process_memory_fraction", None)
    if limit is not None:
        limit(share, device)


def random_state(device: torch.device | None = None) -> Tensor:
    """The state of an accelerator's random generator."""
    state: Tensor = _module().get_rng_state(device or device_of("gpu"))
    return state


def set_random_state(state: Tensor, device: torch.device | None = None) -> None:
    _module().set_rng_state(state, device or device_of("gpu"))


def device_name(device: torch.device | None = None) -> str:
    """The product name of an accelerator, by default the current one."""
    named = getattr(_module(), "get_device_name", None)
    return str(named(device)) if named is not None else backend()


def capability(device: torch.device) -> tuple[int, int]:
    """CUDA's compute capability, or what ROCm gives for it; (0, 0) of other accelerators, which have none."""
    return torch.cuda.get_device_capability(device) if backend() == "cuda" else (0, 0)


def device_uuid(index: int | None = None) -> str:
    """The name by which NVIDIA's programs know a GPU, by default the current one; empty of any other accelerator."""
    if backend() != "cuda":
        return ""
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    return uuid if not uuid or uuid.startswith("GPU-") else f"GPU-{uuid}"


def _module() -> Any:
    return torch.get_device_module(backend())
