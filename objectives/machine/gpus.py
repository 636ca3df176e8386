"""Which GPUs torch can really use here, and why it cannot: one answer for every command, the profile and Ray's start.

torch is asked in a process of its own, where each GPU has to hold a tensor and compute: this process gets no CUDA context, and
a driver that hangs or crashes ends that process alone. Others count differently: Ray by NVML and by what lies in /dev, and
Apple's GPUs too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

# How long a process may take to import torch and to use each GPU, on a machine that is busy.
_ANSWERS_WITHIN_S = 120.0
# How torch's allocator is set up where the user does not say, by `device_memory`: segments that grow suit micro-batches of
# changing sizes; others reserve 5 to 20 % more.
GROWING = "expandable_segments:True"
# What the drivers of NVIDIA's cards (also in WSL2 and on Jetson) and of AMD's leave behind. Intel's leave the same for graphics
# that do not compute, so for them a torch that is built for Intel's GPUs speaks.
_SIGNS = (
    "/dev/nvidiactl",
    "/dev/nvidia0",
    "/proc/driver/nvidia/version",
    "/dev/dxg",
    "/dev/nvmap",
    "/dev/kfd",
)
# The program of the process that is asked: this module, for whose import the folder above the package is also searched.
_ASK = (
    "import runpy, sys; sys.path.append(sys.argv.pop(2)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
# Variables that hide GPUs from torch.
_HIDES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as torch describes it.

    Args:
        fault: what it failed at, and how; empty: nothing.
    """

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int
    fault: str = ""

    @property
    def is_cuda(self) -> bool:
        """Whether it is NVIDIA's, or AMD's, which torch calls the same; others have no compute capability."""
        return any(self.capability)


@dataclass(frozen=True, slots=True)
class UsableGpus:
    """What torch answers.

    Args:
        gpus: all that torch finds.
        reason: why none can be used; empty where all can, and where nothing speaks for one.
        advice: what to do about it; empty where nothing can be done.
    """

    gpus: tuple[Gpu, ...] = ()
    reason: str = ""
    advice: str = ""

    @property
    def count(self) -> int:
        """GPUs that trials may run on: all, or none where one of them fails, since trials go to them by number."""
        return 0 if self.reason else len(self.gpus)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> UsableGpus:
        gpus = [Gpu(**{**value, "capability": tuple(value["capability"])}) for value in values["gpus"]]
        return cls(tuple(gpus), values["reason"], values["advice"])

    @classmethod
    def promised(cls, count: int) -> UsableGpus:
        """So many, of which nothing else is known."""
        return cls((Gpu("", (0, 0), 0, 0),) * count)


def allocator_is_ours() -> bool:
    """Whether the user leaves it to us how torch's allocator is set up."""
    return (
        "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
        and os.environ.get("PYTORCH_ALLOC_CONF", GROWING) == GROWING
    )


@cache
def usable_gpus(*, tries: bool = False) -> UsableGpus:
    """The GPUs of this process, asked once.

    Args:
        tries: also multiply matrices, under autocast too.
    """
    if sys.platform == "darwin":
        return UsableGpus(reason="Apple's GPUs are not supported yet")
    if not _may_have_one():
        return UsableGpus()
    found = _answer(tries)
    if found.reason and allocator_is_ours():
        # Some drivers, as of WSL2, fail at the first tensor where segments grow (pytorch/pytorch 192330).
        fixed = _answer(tries, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
        if not fixed.reason:
            # Of all processes that this one starts.
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
            return fixed
    return found


def _answer(tries: bool, variables: Mapping[str, str] | None = None) -> UsableGpus:
    # -P: no file of the current folder is taken for a module of torch's. Where this package is not installed, it is found last.
    command = [
        sys.executable,
        "-P",
        "-c",
        _ASK,
        __name__,
        str(Path(__file__).parents[3]),
        *(["tries"] if tries else []),
    ]
    given = {**os.environ, **(variables or {})}
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=_ANSWERS_WITHIN_S, check=False, env=given
        )
    except subprocess.TimeoutExpired:
        return UsableGpus(reason=f"torch did not answer within {_ANSWERS_WITHIN_S:.0f} s")
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return UsableGpus(reason=f"asking torch failed: {said}")
    return UsableGpus.from_dict(answer)


def _may_have_one() -> bool:
    """Whether anything speaks for a GPU here; asking torch takes seconds."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.device_count():
        return True
    # A vendor's, which `import torch` loads; Intel's.
    if entry_points(group="torch.backends") or "+xpu" in version("torch"):
        return True
    return any(Path(sign).exists() for sign in _SIGNS) or any(
        map(shutil.which, ("nvidia-smi", "rocm-smi", "amd-smi"))
    )


def asked_here(*, tries: bool) -> UsableGpus:
    """The answer for this process, which gets a context on every GPU, with the allocator set up as a trial's."""
    from . import device_memory  # noqa: F401  # before torch

    import torch  # isort: skip

    from . import accelerator

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            gpus = tuple(_described(torch, index, tries) for index in range(accelerator.device_count()))
        except Exception as error:
            return UsableGpus(reason=_first_line(error))
    faults = [f"GPU {index} ({gpu.name}): {gpu.fault}" for index, gpu in enumerate(gpus) if gpu.fault]
    if not gpus:
        return _none(torch, [str(warning.message) for warning in caught])
    leave_out = ""
    if faults and len(faults) < len(gpus):
        leave_out = f"; to leave it out: CUDA_VISIBLE_DEVICES={','.join(str(i) for i, gpu in enumerate(gpus) if not gpu.fault)}"
    return UsableGpus(gpus, "; ".join(faults) + leave_out)


def _described(torch: Any, index: int, tries: bool) -> Gpu:
    from . import accelerator

    fault = ""
    device = torch.device(accelerator.backend(), index)
    for what, use in _uses(torch, device, tries):
        try:
            use()
        except Exception as error:
            fault = f"{what} failed: {_first_line(error)}"
            break
    try:
        free, total = accelerator.memory_info(device)
    except Exception as error:
        free, total, fault = 0, accelerator.total_bytes(device), fault or _first_line(error)
    return Gpu(accelerator.device_name(device), accelerator.capability(device), free, total, fault)


def _uses(torch: Any, device: Any, tries: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What a GPU has to be good for."""
    yield "a tensor", lambda: (torch.ones(1, device=device) + 1).item()
    if not tries:
        return
    matrix = torch.ones(64, 64, device=device)
    yield "a product of matrices", lambda: (matrix @ matrix).sum().item()

    def product(dtype: Any) -> None:
        with torch.autocast(device.type, dtype):
            (matrix @ matrix).sum().item()

    for dtype in (torch.bfloat16, torch.float16):
        yield f"a product in {dtype}", partial(product, dtype)


def _none(torch: Any, said: list[str]) -> UsableGpus:
    """Why torch finds no GPU, where something speaks for one."""
    build = f"torch {torch.__version__}"
    other = "https://pytorch.org/get-started has a build of torch for each driver."
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return UsableGpus(reason=f"{build} is built for CPUs only", advice=other)
    for name in _HIDES:
        if os.environ.get(name, "0").strip() in ("", "-1"):
            return UsableGpus(
                reason=f"{name}={os.environ[name]!r} hides it", advice=f"Unset {name}, or list GPUs in it."
            )
    library = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    reason = said[-1].strip().splitlines()[0] if said else f"{build} for {library} finds none"
    return UsableGpus(reason=reason, advice=f"Update the driver, or install another torch: {other}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    print(json.dumps(asdict(asked_here(tries="tries" in sys.argv[1:]))))
