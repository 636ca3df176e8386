"""What one device told us about a task before the first trial."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError

from .errors import ProfilingError, cut
from .memory import MemoryLaw
from .step_time import PRECISION, StepTime
from .study import Memory
from .trial import Parameter, TrialSetup


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Facts about a task on a device that every plan rests on.

    Args:
        device: name of the device, as its maker gives it.
        training_set, validation_set: samples.
        smallest_micro_batch: samples below which the model does not work (2 with batch statistics).
        optimizer: class name of the optimizer the task makes; None where only a generator is known.
        adaptive: the optimizer takes betas, as Adam does.
        decoupled_decay: it decays weights apart from the gradient, as AdamW does; true where the optimizer does not say.
        batch_statistics: the model holds BatchNorm layers, which see the micro-batch and not the whole batch.
        unused_parameters: further parameters of the study that the task never read.
        device_bytes: memory of the device.
        limit_bytes: what of it a trial may hold; None where there is no limit.
        largest_micro_batch: the most samples in a training pass that fit the limit less its headroom.
        evaluation_batch: samples of an evaluation pass, which keeps no activations and so takes more.
        timing_s: seconds that timing was given; a rough law is timed anew where there are more.
        memory: the law behind these; None where nothing limits them.
        gradient_bytes: what one more copy of the gradients takes: several devices keep one to talk with.
        step_times: the step-time law for each number of devices that a trial may have; none where steps were not timed.
        other_costs: (parameter, value, factor): what another value of a parameter does to the bytes or the operations of a
            step, where that is much; a law for one value says nothing of the other.
    """

    kind: Literal["cpu", "gpu"]
    device: str
    training_set: int | None
    validation_set: int | None = None
    smallest_micro_batch: int = 1
    optimizer: str | None = None
    adaptive: bool = True
    decoupled_decay: bool = True
    batch_statistics: bool = False
    model_parameters: int | None = None
    unused_parameters: tuple[str, ...] = ()
    device_bytes: int = 0
    limit_bytes: int | None = None
    largest_micro_batch: int | None = None
    evaluation_batch: int | None = None
    memory: MemoryLaw | None = None
    gradient_bytes: int = 0
    step_times: tuple[StepTime, ...] = ()
    other_costs: tuple[tuple[str, Parameter, float], ...] = ()
    timing_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` wrote.

        Raises:
            ProfilingError: something else.
        """
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise ProfilingError(f"device profile: {where}: {first['msg']}, got {cut(repr(first['input']), 60)}") from None

    @property
    def rough(self) -> bool:
        """Whether some law is less certain than timing aims at."""
        return any(law.interval is None or law.interval > PRECISION for law in self.step_times)

    def step_time(self, devices: int = 1) -> StepTime | None:
        """The law for so many devices, where it was measured."""
        return next((law for law in self.step_times if law.devices == devices), None)

    def usable_bytes(self, devices: int, headroom: float) -> float:
        """What a trial on so many devices may hold on each: several keep one more copy of the gradients to talk with."""
        if self.limit_bytes is None:
            return math.inf
        return self.limit_bytes * (1 - headroom) - (self.gradient_bytes if devices > 1 else 0)

    def cap_on(self, devices: int, headroom: float) -> int | None:
        """The most samples that fit a pass of a trial on so many devices; None where nothing limits them."""
        if devices == 1 or self.memory is None or self.largest_micro_batch is None:
            return self.largest_micro_batch
        return min(self.memory.largest_micro_batch(self.usable_bytes(devices, headroom)) or 1, self.largest_micro_batch)

    def after_out_of_memory(self, micro_batch: int, headroom: float, devices: int = 1) -> Self:
        """The profile after a micro-batch it allowed did not fit: the law is raised, and the cap follows it.

        Where nothing fits any more, or there is no law, the cap is half of what failed.
        """
        cap = max(micro_batch // 2, 1)
        law = self.memory
        if law is not None and self.limit_bytes is not None:
            law = law.raised_by(micro_batch, self.usable_bytes(devices, headroom))
            alone = law.largest_micro_batch(self.usable_bytes(1, headroom))
            # What failed on several devices may fit one, which keeps no second copy of the gradients.
            cap = min(alone or cap, micro_batch - 1) if devices == 1 else alone or cap
        return replace(self, memory=law, largest_micro_batch=max(cap, 1))


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What to find out about a task on a device.

    Args:
        setup: any setup of the study with the parameters that change cost; its plan and budget are not used.
        memory: the study's limits.
        highest: the largest effective batch that could ever be asked for.
        traces: look into memory even where the study sets no limit.
        devices: the numbers of devices that a trial may have.
        timing_s: seconds that timing steps may take, for each of them; 0 leaves it out.
        others: (parameter, value) pairs that a trial may have instead, and that are expected to cost the same.
    """

    setup: TrialSetup
    memory: Memory
    highest: int
    traces: bool = False
    devices: tuple[int, ...] = (1,)
    timing_s: float = 0.0
    others: tuple[tuple[str, Parameter], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "setup": self.setup.to_dict(),
            "memory": self.memory.model_dump(mode="json"),
            "highest": self.highest,
            "traces": self.traces,
            "devices": list(self.devices),
            "timing_s": self.timing_s,
            "others": [list(pair) for pair in self.others],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(
            setup=TrialSetup.from_dict(values["setup"]),
            memory=Memory.model_validate(values["memory"]),
            highest=values["highest"],
            traces=values["traces"],
            devices=tuple(values["devices"]),
            timing_s=values["timing_s"],
            others=tuple((name, value) for name, value in values["others"]),
        )
