"""What this machine is, before anything runs and as the stage `machine`."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from ... import __version__
from ...objectives.machine.device import device_name
from ...objectives.machine.host import cores_here, host_bytes
from ...objectives.machine.nvidia import gpu_processes, nvidia_smi
from ...spaces.readable import readable_bytes
from .claims import Fact
from .report import Report
from .stage import Found, Stage

_MIB = 1 << 20
# Environment variables that change what is measured, and names that may hold a secret.
_VARIABLES = re.compile(r"PYTORCH_(CUDA_)?ALLOC_CONF|OMP_NUM_THREADS|(CUDA|NCCL)_\w+")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)
# A load beyond this share of the cores disturbs timing.
_BUSY = 0.25


def report_here(kind: Literal["cpu", "gpu"], gpu: str = "") -> Report:
    """A report of nothing yet; this process gets no CUDA context.

    Args:
        gpu: the card's name.
    """
    date = datetime.now().astimezone().strftime("%Y-%m-%d")
    load, cores = load_average(), cores_here()
    variables = {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}
    environment = ", ".join(
        f"{name}={value}" for name, value in variables.items() if not _SECRET.search(name)
    )
    machine = [
        Fact("environment", environment or "nothing set"),
        Fact("load before", "unknown" if load is None else f"{load:.1f}"),
    ]
    busy = [f"a load of {load:.1f} on {cores} cores"] if load is not None and load > _BUSY * cores else []
    if kind == "gpu":
        machine.append(Fact("compute mode, persistence", _smi("compute_mode,persistence_mode") or "unknown"))
        neighbours: list[int] = []
        with suppress(OSError, subprocess.SubprocessError):
            neighbours = [used for _, used in gpu_processes()]
        many = f"{len(neighbours)} other process{'es' * (len(neighbours) != 1)}"
        machine.append(Fact("neighbours on the GPUs", f"{many}, {readable_bytes(sum(neighbours))}"))
        if neighbours:
            busy.append(f"{many} on the GPUs with {readable_bytes(sum(neighbours))}")
    sentence = f"Other programs may disturb timing: {' and '.join(busy)}." if busy else ""
    return Report(kind, gpu or device_name(kind), date, versions(), machine=machine, busy=sentence)


def load_average() -> float | None:
    """Processes that ran or waited for a core, averaged over the last minute; None where they are not counted."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def versions() -> str:
    """What determines results, in one line."""
    found = {
        "bsearch": f"{__version__}{_commit()}",
        "driver": _smi("driver_version"),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version() if torch.version.cuda else None,  # type: ignore[no-untyped-call]
        "NCCL": _nccl(),
        "Ray": _version("ray"),
        "Python": platform.python_version(),
    }
    return ", ".join([*(f"{name} {value}" for name, value in found.items() if value), platform.platform()])


def _nccl() -> str:
    if not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit of a checkout, in brackets; empty for an installed package."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return f" ({subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()})"
    return ""


def clocks() -> str:
    """Clocks, temperature and power now, and why the clocks are held down; empty where they are not known."""
    values = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
    return _smi(f"{values},clocks_throttle_reasons.active") or _smi(values)


def facts(stage: Stage) -> Iterator[Found]:
    """Name, memory and clocks; on a GPU also what CUDA and its libraries take before the first tensor."""
    yield Fact("device", device_name(stage.device))
    yield Fact("cores", str(cores_here()))
    if stage.device == "cpu":
        yield Fact("memory", readable_bytes(host_bytes()))
        return
    properties = torch.cuda.get_device_properties(0)
    yield Fact(
        "memory",
        f"{properties.total_memory / _MIB:.0f} MiB, {properties.multi_processor_count} multiprocessors",
    )
    yield Fact("GPUs", str(torch.cuda.device_count()))
    if limits := _smi("clocks.max.sm,clocks.max.mem,power.limit"):
        yield Fact("clocks at most (MHz), power limit (W)", limits)
    torch.zeros((), device="cuda")
    yield Fact("CUDA's context, and other processes", f"{_outside() / _MIB:.0f} MiB")
    before, allocated = _outside(), torch.cuda.memory_allocated()
    square = torch.randn(512, 512, device="cuda")
    (square @ square).sum().item()
    del square
    workspace = torch.cuda.memory_allocated() - allocated
    yield Fact(
        "cuBLAS",
        f"{(_outside() - before) / _MIB:.0f} MiB outside the allocator, {workspace / _MIB:.0f} inside",
    )
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
