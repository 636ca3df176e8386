"""What one device told us about a task before the first trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Facts about a task on a device that every plan rests on.

    Args:
        device: name of the device, as its maker gives it.
        training_set, evaluation_set: samples.
        smallest_micro_batch: samples below which the model does not work (2 with batch statistics).
        optimizer: class name of the optimizer the task makes; None where only a generator is known.
        adaptive: the optimizer takes betas, as Adam does.
        batch_statistics: the model holds BatchNorm layers, which see the micro-batch and not the whole batch.
        unused_parameters: further parameters of the study that the task never read.
    """

    kind: Literal["cpu", "gpu"]
    device: str
    training_set: int | None
    evaluation_set: int | None = None
    smallest_micro_batch: int = 1
    optimizer: str | None = None
    adaptive: bool = True
    batch_statistics: bool = False
    model_parameters: int | None = None
    unused_parameters: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**{**values, "unused_parameters": tuple(values["unused_parameters"])})
