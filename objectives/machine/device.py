"""The device of this process: its name, the memory that trials may take of it, and who else is there."""

from __future__ import annotations

import os
import subprocess

from ...spaces.errors import ProfilingError
from ...spaces.readable import readable_bytes
from .host import host_bytes
from .nvidia import gpu_processes

# At most what a process's context takes of a GPU, with the libraries' kernels; what more is missing is other programs'.
_CONTEXT_BYTES = 512 << 20


def device_name(kind: str) -> str:
    """The device's model name."""
    if kind == "gpu":
        from . import accelerator  # torch, for which a driver on a CPU has no use

        return accelerator.device_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "CPU"


def bytes_here(kind: str, share: float) -> int:
    """Bytes that each of 1 / share processes may take of the device.

    Raises:
        ProfilingError: its backend does not tell.
    """
    if kind == "cpu":
        return host_bytes()
    from . import accelerator

    free, total = accelerator.memory_info()
    if not total:
        raise ProfilingError(
            f"torch does not tell how much memory {accelerator.device_name()} has, which plans are made for"
        )
    reserved = accelerator.reserved_bytes()
    own = _processes().get(os.getpid())
    context = _CONTEXT_BYTES if own is None else max(own - reserved, 0)
    return usable_bytes(total, free + reserved, share, context)


def usable_bytes(total: int, usable: int, share: float, context: int = _CONTEXT_BYTES) -> int:
    """Bytes that each of 1 / share processes may allocate on a GPU, given what one alone could: each has a context of its own,
    and what other programs take is missing once.

    Args:
        context: bytes of one, outside the allocator.

    >>> usable_bytes(1000, 900, 1.0), usable_bytes(1000, 900, 0.5)
    (900, 400)
    >>> [usable_bytes(8192 << 20, 6246 << 20, share) >> 20 for share in (1, 0.5, 0.25, 0.125)]  # beside a desktop
    [6246, 2867, 1177, 332]
    """
    context = min(total - usable, context)
    return max(int(share * (usable + context)) - context, 0)


def neighbours_here() -> str:
    """What other programs hold of this process's GPU, as a sentence; empty where they hold nothing, or that is not known."""
    processes = _processes()
    if processes.pop(os.getpid(), None) is None or not processes:
        return ""
    many = "another program holds" if len(processes) == 1 else f"{len(processes)} other programs hold"
    return (
        f"{many} {readable_bytes(sum(processes.values()))} of the GPU: the study's memory limit is what they leave now, and "
        "its step times hold beside them"
    )


def _processes() -> dict[int, int]:
    """The bytes that each process holds of this process's GPU, this one's among them; none where the driver does not say.

    In a container, the driver may list the host's process numbers, in which this process has another one.
    """
    from . import accelerator

    try:
        return dict(gpu_processes(uuid)) if (uuid := accelerator.device_uuid()) else {}
    except (OSError, subprocess.SubprocessError):
        return {}
