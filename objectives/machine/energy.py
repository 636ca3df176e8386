"""What devices' own counters say of the energy they have used."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from ...spaces.errors import ProfilingError
from . import accelerator

# Where Linux shows the counters of Intel's and AMD's processors (RAPL), one folder each; those within belong to parts of one.
POWERCAP = Path("/sys/class/powercap")


class EnergyCounter:
    """Joules that a device has used since some moment in the past.

    A GPU's counter is its own. A CPU's is that of all the machine's processors, whoever uses them.

    Raises:
        ProfilingError: there is no counter, or it may not be read; the message says why, and what to do.
    """

    def __init__(self, kind: Literal["cpu", "gpu"]) -> None:
        try:
            self._read = _gpu_counter(torch.cuda.current_device()) if kind == "gpu" else _ProcessorCounter().joules
            self._read()
        except ImportError:
            message = "pynvml, which reads a GPU's energy counter, is not installed. Run pip install 'bsearch[energy]'."
        except PermissionError as error:
            message = f"{error.filename} may be read by root only. Run chmod a+r on it, or train on a GPU."
        except Exception as error:  # NVML has dozens, for everything that a GPU, its driver or a share of it lacks
            lines = str(error).strip().splitlines()
            message = f"this {kind.upper()} has no readable energy counter: {lines[0] if lines else type(error).__name__}"
        else:
            return
        raise ProfilingError(message)

    def joules(self) -> float:
        return self._read()


def counter_of(kind: Literal["cpu", "gpu"]) -> EnergyCounter | None:
    """The device's counter; None where it has none that can be read."""
    try:
        return EnergyCounter(kind)
    except ProfilingError:
        return None


def _handle(index: int) -> Any:
    """NVML's handle of one of the GPUs that torch sees: NVML numbers them by their place in the machine."""
    import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()
    return nvml.nvmlDeviceGetHandleByUUID(accelerator.device_uuid(index))


@cache
def _gpu_counter(index: int) -> Callable[[], float]:
    """The counter of one of the GPUs that torch sees, from Volta on.

    Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html, nvmlDeviceGetTotalEnergyConsumption
    """
    import pynvml

    nvml: Any = pynvml
    handle = _handle(index)
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3


class _ProcessorCounter:
    """The sum of all processors' counters, which begin again at 0 after an hour or less.

    Source: https://docs.kernel.org/power/powercap/powercap.html
    """

    def __init__(self) -> None:
        self._zones = sorted(POWERCAP.glob("intel-rapl:[0-9]*"))
        self._zones = [zone for zone in self._zones if zone.name.count(":") == 1]
        if not self._zones:
            raise OSError(f"none in {POWERCAP}")
        self._ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in self._zones]
        self._before = self._counts()
        self._total = 0

    def _counts(self) -> list[int]:
        return [int((zone / "energy_uj").read_text()) for zone in self._zones]

    def joules(self) -> float:
        now = self._counts()
        each = zip(now, self._before, self._ranges, strict=True)
        self._total += sum((count - before) % most for count, before, most in each)
        self._before = now
        return self._total / 1e6
