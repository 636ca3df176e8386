"""`devices` and `memory`: what one trial runs on, and how much of it a plan may use."""

from __future__ import annotations

import contextlib
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, StrictFloat, StrictInt, StrictStr

from ..domain import AnyDomain, Domain, Fixed, Number, Range, Section, fault, values_of, whole_numbers
from ..errors import Fault, StudyFileError, cut
from ..laws.memory import bytes_of
from ..plan import ActivationCheckpointing, Sharding


def _checkpointing(value: Any) -> Any:
    """One or several, from the least to the most."""
    several = list(value) if isinstance(value, list | tuple) else [value]
    order = get_args(ActivationCheckpointing)
    if not several or any(kind not in order for kind in several):
        raise fault(f"expected none, selective or full, or a list of them, got {cut(repr(value), 60)}.")
    return tuple(kind for kind in order if kind in several)


def _memory_limit(value: Any) -> Any:
    """Bytes as an integer, a share as a float, or `device`; written 10GiB, 90% or device."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value is None or value == "device" or whole or (isinstance(value, float) and 0 < value <= 1):
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            percent = value.strip().removesuffix("%")
            number = float(percent) / 100 if percent != value.strip() else bytes_of(value)
            if 0 < number <= 1 or (isinstance(number, int) and number > 0):
                return number
    raise fault(f"expected bytes such as 10GiB, a share of the device such as 90%, or device; got {value!r}")


class Memory(Section):
    """Memory limits of a device."""

    limit: Annotated[StrictInt | StrictFloat | StrictStr | None, BeforeValidator(_memory_limit)] = Field(
        None,
        description="Memory limit of one device, of which every plan keeps 5% free: bytes such as 10GiB, a share of the device "
        "such as 90%, or device for all of it; default: all of a GPU, no limit on a CPU.",
    )
    activation_checkpointing: Annotated[
        tuple[ActivationCheckpointing, ...], BeforeValidator(_checkpointing)
    ] = Field(
        ("none", "selective", "full"),
        min_length=1,
        description="Modes that the planner may choose from, for tasks with checkpoint_blocks and for models of transformers. "
        "none: store all activations; selective: recompute all but the outputs of matrix products, convolutions and attention; "
        "full: store only each block's input.",
    )
    largest_micro_batch: StrictInt | None = Field(
        None, ge=1, description="Maximum samples per micro-batch on one device; larger batches accumulate."
    )

    def limit_bytes(self, device_bytes: int, kind: str) -> int | None:
        """The limit in bytes on a device with `device_bytes`, never more than a GPU has; None: no limit."""
        match self.limit:
            case None:
                return device_bytes if kind == "gpu" else None
            case "device":
                return device_bytes
            case float():
                return int(self.limit * device_bytes)
            case int():
                return min(self.limit, device_bytes) if kind == "gpu" else self.limit
        raise AssertionError(self.limit)


def _device_numbers(domain: Domain) -> Domain:
    """Whole numbers, or one over a whole number: a share of a GPU."""
    if isinstance(domain, Range):
        raise fault("expected a number or a list of numbers, got a range. Write [1, 2, 4].")
    share = domain.value if isinstance(domain, Fixed) else None
    if isinstance(share, str):
        raise fault(
            f"expected a number of devices, or a share of a GPU such as 0.5; got {cut(repr(share), 60)}"
        )
    if not isinstance(share, float) or share.is_integer():
        return whole_numbers(domain)
    if 0 < share < 1 and abs(1 / share - round(1 / share)) < _SHARE_ERROR:
        return Fixed(value=1 / round(1 / share))
    raise fault(
        f"expected a whole number of devices, or a share of a GPU such as 0.5, 0.25 or 0.2, got {share:g}"
    )


# How far one over a share may be from a whole number: 0.33 is a third.
_SHARE_ERROR = 0.05


_WORDS = re.compile(r"[a-z0-9]+", re.IGNORECASE)


def _price_names(prices: dict[str, float]) -> dict[str, float]:
    for name in prices:
        if not _WORDS.search(name):
            raise fault(f"expected a device's name of letters and digits, such as A100, got {name!r}")
    return prices


class Devices(Section):
    """Devices that one trial runs on."""

    per_trial: Annotated[AnyDomain, AfterValidator(_device_numbers)] = Field(
        Fixed(value=1),
        description="Data-parallel devices per trial: a number, or a list of numbers to search; or the share of a GPU that a "
        "trial gets, such as 0.5 for two trials on each.",
    )
    sharding: Sharding = Field(
        "ddp",
        description="ddp: every device of a trial holds the whole model and optimizer state; fsdp2: parameters, gradients and "
        "optimizer state are sharded across them, and parameters gathered block by block for use. Results change by rounding "
        "at most.",
    )
    kind: Literal["auto", "cpu", "gpu"] = Field(
        "auto", description="What trials train on; auto: GPUs if there are any."
    )
    cpus: Annotated[StrictInt, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="CPU cores for each of a trial's devices; torch uses as many threads. auto: 1 on a CPU; for a GPU, its "
        "share of its machine's cores.",
    )
    accelerator_type: StrictStr | None = Field(
        None,
        min_length=1,
        description="Use only devices of this kind, by Ray's name for it, such as A100; default: any.",
    )
    prices: Annotated[dict[StrictStr, Annotated[Number, Field(gt=0)]], AfterValidator(_price_names)] = Field(
        {},
        description="Price per device-hour, by words in the device's name, in any one currency: {H100: 2.5, A100 80GB: 1.8}; "
        "`gpu` and `cpu` are the prices of all other kinds. A device on a CPU has `cpus` cores.",
    )

    def price_of(self, name: str, kind: Literal["cpu", "gpu"]) -> float | None:
        """The price for an hour of what a trial has of a device, all of it or a share; None if unknown.

        Of several that fit its name, the one that says most about it.

        >>> devices = Devices(prices={"A100": 1.2, "A100 80GB": 1.8, "gpu": 1})
        >>> [devices.price_of(name, "gpu") for name in ("NVIDIA A100-SXM4-80GB", "A100", "H100")]
        [1.8, 1.2, 1.0]
        """
        words = set(_WORDS.findall(name.lower())) | {kind}
        named = {key: set(_WORDS.findall(key.lower())) for key in self.prices}
        fitting = [key for key, of_key in named.items() if of_key <= words]
        if not fitting:
            return None
        best = max(fitting, key=lambda key: (named[key] != {kind}, len(named[key])))
        return float(self.prices[best]) * self.share

    @property
    def counts(self) -> tuple[int, ...]:
        """The possible numbers of devices per trial, ascending."""
        return tuple(sorted({int(value) or 1 for value in values_of(self.per_trial)}))

    @property
    def share(self) -> float:
        """The share of a GPU that a trial gets; 1 where it has GPUs of its own.

        >>> Devices.model_validate({"per_trial": 0.5}).share, Devices.model_validate({"per_trial": [1, 2]}).share
        (0.5, 1.0)
        """
        return min(float(next(iter(values_of(self.per_trial)))), 1.0)

    @property
    def domain(self) -> Domain:
        """The numbers of devices that a trial may have."""
        return self.per_trial if self.share == 1 else Fixed(value=1)

    def cores(self, kind: Literal["cpu", "gpu"], cores_per_gpu: int = 1) -> int:
        """Cores for each device, with auto resolved.

        >>> Devices().cores("gpu", 12), Devices().cores("cpu", 12), Devices(cpus=2).cores("gpu", 12)
        (12, 1, 2)
        """
        if self.cpus != "auto":
            return self.cpus
        return max(int(cores_per_gpu * self.share), 1) if kind == "gpu" else 1

    def check_share(self, kind: Literal["cpu", "gpu"]) -> None:
        """A share is one of a GPU.

        Raises:
            StudyFileError: a share of a CPU.
        """
        if self.share < 1 and kind == "cpu":
            message = f"expected a whole number of devices, since trials run on CPUs here, got {self.share:g}. Write 1."
            raise StudyFileError(Fault("devices.per_trial", message))

    def kind_with(
        self, gpus: int, reason: str = "", of_ray: int | None = None
    ) -> tuple[Literal["cpu", "gpu"], str]:
        """The kind, with auto resolved, and a sentence that says so.

        Args:
            gpus: those that torch can use, on the machine that has most.
            reason: why it can use none.
            of_ray: those that Ray counts there; None: trials run without Ray.

        Raises:
            StudyFileError: a GPU is required and cannot be used, or Ray promises more of them than there are.
        """
        if self.kind == "cpu":
            return "cpu", "Trials run on the CPU, as devices.kind says."
        counts = f"Ray counts {_gpus(of_ray)}, but torch can use none" if of_ray else "torch can use no GPU"
        counts += f": {reason}" if reason else ""
        if of_ray == 0 and gpus:
            counts = f"torch can use {_gpus(gpus)}, but Ray counts none. Start Ray with --num-gpus {gpus}"
        elif of_ray is not None and 0 < gpus < of_ray:
            message = (
                f"expected as many GPUs as Ray promises; it counts {of_ray}, torch can use {gpus}. Start Ray with --num-gpus "
                f"{gpus}, without RAY_OVERRIDE_RESOURCES; or write kind: cpu."
            )
            raise StudyFileError(Fault("devices.kind", message))
        elif gpus:
            fewer = of_ray is not None and of_ray < gpus
            return "gpu", f"Trials run on {_gpus(of_ray or gpus)}{f', of {gpus} that torch can use' * fewer}."
        if self.kind == "gpu":
            message = f"expected a GPU that trials can use; {counts}. `bsearch check` says more; or write kind: cpu or auto."
            raise StudyFileError(Fault("devices.kind", message))
        return "cpu", f"Trials run on the CPU: {counts}."


def _gpus(count: int | None) -> str:
    return f"{count} GPU{'s' * (count != 1)}"
