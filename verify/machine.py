"""The first stage: what this machine is."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator

import torch

from ..objectives.machine.host import cores_here, host_bytes
from ..objectives.machine.nvidia import nvidia_smi
from ..objectives.profiling.probe import device_name
from ..spaces.readable import readable_bytes
from .claims import Fact
from .stage import Found, Stage

_MIB = 1 << 20


def versions() -> str:
    """What determines results, in one line."""
    found = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    return ", ".join([f"driver {driver}", *found] if (driver := _smi("driver_version")) else found)


def facts(stage: Stage) -> Iterator[Found]:
    """Name, memory and clocks; on a GPU also what CUDA and its libraries take before the first tensor."""
    yield Fact("device", device_name(stage.device))
    yield Fact("cores", f"{cores_here()}, load {os.getloadavg()[0]:.1f}")
    if stage.device == "cpu":
        yield Fact("memory", readable_bytes(host_bytes()))
        return
    properties = torch.cuda.get_device_properties(0)
    yield Fact("memory", f"{properties.total_memory / _MIB:.0f} MiB, {properties.multi_processor_count} multiprocessors")
    yield Fact("GPUs", str(torch.cuda.device_count()))
    if clocks := _smi("clocks.sm,clocks.max.sm,clocks.mem,power.limit"):
        yield Fact("clocks now and at most, memory clock (MHz), power limit (W)", clocks)
    torch.zeros((), device="cuda")
    yield Fact("CUDA's context, and other processes", f"{_outside() / _MIB:.0f} MiB")
    before, allocated = _outside(), torch.cuda.memory_allocated()
    square = torch.randn(512, 512, device="cuda")
    (square @ square).sum().item()
    del square
    workspace = torch.cuda.memory_allocated() - allocated
    yield Fact("cuBLAS", f"{(_outside() - before) / _MIB:.0f} MiB outside the allocator, {workspace / _MIB:.0f} inside")
    before = _outside()
    layer = torch.nn.Conv2d(16, 16, 3, device="cuda")
    layer(torch.randn(4, 16, 64, 64, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    yield Fact("cuDNN", f"{(_outside() - before) / _MIB:.0f} MiB outside the allocator")


def _outside() -> int:
    """Bytes of the GPU that are taken, but not by this process's allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _smi(query: str) -> str:
    """The first GPU's values, as text; empty where they are not known."""
    try:
        return ", ".join((nvidia_smi(query) or [[]])[0])
    except (OSError, subprocess.SubprocessError):
        return ""
