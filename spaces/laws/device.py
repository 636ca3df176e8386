"""The profile of a task on a device, measured before the first trial."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError

from ..errors import ProfilingError, cut
from ..plan import ActivationCheckpointing, BatchPlan, Embedding
from ..study.devices import Memory
from ..trial import Parameter, TrialSetup
from .examination import Examination
from .memory import MemoryLaw
from .step_time import PRECISION, StepTime

# The share of a memory limit that every plan keeps free.
HEADROOM = 0.05
# A measurement confirms the law where it is above it by at most the first of these shares, and below by at most the second:
# extrapolated to sizes that were not measured, a few percent less would be a promise too much.
_MORE, _LESS = 0.02, 0.1


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Properties of a task on a device, on which every plan is based.

    Args:
        device: name of the device, as its vendor gives it.
        training_set, validation_set: sizes in samples.
        validation_digest: of a few validation samples; 0 where that is not known.
        validates_on_training: the validation data are the training data.
        smallest_micro_batch: the fewest samples that the model works with (2 with batch statistics).
        optimizer: class name of the task's optimizer; None for a loop of one's own.
        own_settings: what the optimizer steps with otherwise than the setup says, as text.
        adaptive: the optimizer has betas, as Adam does.
        decoupled_decay: weight decay is decoupled from the gradient, as in AdamW; true if unknown.
        unit, units_per_sample: what samples of several lengths are counted in, such as tokens, and their mean.
        applies_decay, applies_betas: some parameters have the setup's weight decay, its betas; true if unknown.
        batch_statistics: the model has BatchNorm layers, which see the micro-batch and not the whole batch.
        untrained: the metric of the new model, on a few validation samples; None where that is not known.
        unused_parameters: task parameters in the study's space that the task never read.
        device_bytes: memory of the device.
        limit_bytes: how much of it a trial may use; None: no limit.
        largest_micro_batch: the largest micro-batch whose training fits the limit minus headroom.
        evaluation_batch: samples per forward pass of evaluation; more than in training, since no activations are stored.
        timing_s: seconds available for timing; a rough law is measured again when more are available.
        memory: the memory law behind these; None without a limit.
        gradient_bytes: size of a second copy of the gradients, which several devices need for communication.
        step_times: the step-time law for each number of devices that a trial may have; empty if steps were not timed.
        other_costs: (parameter, value, factor): a value that changes the bytes or operations of a step considerably, by this
            factor; the laws do not hold for it.
        note: why memory is not known, where it could have been.
        neighbours: what other programs held of the GPU while it was profiled, as a sentence; empty: nothing, or not known.
        activation_checkpointing: what the laws hold for: the least that fits.
        embedding: the same of a loss over a whole batch's embeddings: "whole" where they are of a single micro-batch.
        largest_batch: the most samples of a step whose loss over embeddings fits; None: no limit.
        alternatives: the profiles with more of it, and with embeddings cached, where memory limits micro-batches; each may
            allow faster plans.
        examination: whether a step equals its splits; None in profiles of earlier versions.
    """

    kind: Literal["cpu", "gpu"]
    device: str
    training_set: int | None
    validation_set: int | None = None
    validation_digest: int = 0
    smallest_micro_batch: int = 1
    optimizer: str | None = None
    own_settings: str = ""
    adaptive: bool = True
    decoupled_decay: bool = True
    applies_decay: bool = True
    applies_betas: bool = True
    unit: str = ""
    units_per_sample: float | None = None
    batch_statistics: bool = False
    model_parameters: int | None = None
    untrained: float | None = None
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
    note: str = ""
    neighbours: str = ""
    validates_on_training: bool = False
    activation_checkpointing: ActivationCheckpointing = "none"
    embedding: Embedding = ""
    largest_batch: int | None = None
    alternatives: tuple[DeviceProfile, ...] = ()
    examination: Examination | None = None

    @property
    def couples_samples(self) -> bool:
        """Whether the loss compares the samples of a batch, so that a batch is never split."""
        return self.examination is not None and self.examination.couples_samples

    @property
    def splits(self) -> bool:
        """Whether a step may have several micro-batches by this profile's laws."""
        return not self.couples_samples and self.embedding != "whole"

    @property
    def recomputes(self) -> tuple[ActivationCheckpointing, Embedding]:
        """What the laws hold for, among the alternatives."""
        return self.activation_checkpointing, self.embedding

    @property
    def recomputed(self) -> str:
        """The same in words: the activation checkpointing, and how embeddings are computed where there are any.

        >>> DeviceProfile("cpu", "CPU", None, embedding="cached").recomputed
        'embeddings cached'
        """
        how = {"": "", "whole": "unsplit", "cached": "embeddings cached"}[self.embedding]
        mode = "" if how and self.activation_checkpointing == "none" else self.activation_checkpointing
        return ", ".join(filter(None, (how, mode)))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The profile that `to_dict` wrote.

        Raises:
            ProfilingError: invalid values.
        """
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise ProfilingError(
                f"device profile: {where}: {first['msg']}, got {cut(repr(first['input']), 60)}"
            ) from None

    @property
    def rough(self) -> bool:
        """Whether some law is less precise than timing aims for."""
        return any(law.interval is None or law.interval > PRECISION for law in self.all_step_times)

    @property
    def each(self) -> tuple[DeviceProfile, ...]:
        """This profile and its alternatives, from the least activation checkpointing to the most."""
        return (self, *self.alternatives)

    @property
    def all_step_times(self) -> tuple[StepTime, ...]:
        """The step-time laws of this profile and its alternatives."""
        return tuple(law for variant in self.each for law in variant.step_times)

    def under(self, plan: BatchPlan) -> DeviceProfile:
        """The one whose laws hold for the plan's activation checkpointing; this one if none does."""
        alike = [
            variant
            for variant in self.each
            if variant.activation_checkpointing == plan.activation_checkpointing
        ]
        if self.embedding:
            alike = [
                variant for variant in alike if (variant.embedding == "cached") == (plan.accumulation > 1)
            ]
        return next(iter(alike), self)

    def updated(self, new: DeviceProfile) -> DeviceProfile:
        """With another in the place of that with the same activation checkpointing."""
        first, *others = (new if variant.recomputes == new.recomputes else variant for variant in self.each)
        return replace(first, alternatives=tuple(others))

    def with_step_times(self, laws: Iterable[StepTime]) -> DeviceProfile:
        """With other step-time laws, of whatever activation checkpointing."""
        laws = tuple(laws)
        first, *others = (
            replace(
                variant,
                step_times=tuple(
                    law for law in laws if (law.activation_checkpointing, law.embedding) == variant.recomputes
                ),
            )
            for variant in self.each
        )
        return replace(first, alternatives=tuple(others))

    def step_time(self, devices: int) -> StepTime | None:
        """The law for this number of devices, if it was measured."""
        return next((law for law in self.step_times if law.devices == devices), None)

    def extra_bytes(self, devices: int) -> int:
        """What each of several devices takes beside what one alone does: a second copy of the gradients."""
        return self.gradient_bytes if devices > 1 else 0

    def usable_bytes(self, devices: int) -> float:
        """What the law's peak, which is that of one device alone, may reach on each of so many."""
        if self.limit_bytes is None:
            return math.inf
        return self.limit_bytes * (1 - HEADROOM) - self.extra_bytes(devices)

    def cap_on(self, devices: int, effective_batch: int | None) -> int | None:
        """The largest micro-batch that fits on each of a trial's devices; None: no limit.

        Args:
            effective_batch: samples of a step, where embeddings are cached and take memory; None: as few as may be.
        """
        law = self.memory
        if (
            law is not None
            and law.held_bytes
            and self.largest_micro_batch is not None
            and effective_batch is not None
        ):
            held = law.held_bytes * effective_batch
            return min(
                law.largest_micro_batch(self.usable_bytes(devices) - held) or 0,
                self.largest_micro_batch,
            )
        if devices == 1 or self.memory is None or self.largest_micro_batch is None:
            return self.largest_micro_batch
        by_law = self.memory.largest_micro_batch(self.usable_bytes(devices)) or 1
        return min(by_law, self.largest_micro_batch)

    def after_out_of_memory(self, micro_batch: int) -> Self:
        """The profile after a micro-batch it allowed ran out of memory: the cap is half of it until a measurement says more."""
        cap = max(micro_batch // 2, 1)
        if self.largest_micro_batch is not None:
            cap = min(cap, self.largest_micro_batch)
        law = None if self.memory is None else self.memory.failed_at(micro_batch)
        return replace(self, memory=law, largest_micro_batch=cap)

    def after_measurement(
        self, micro_batch: int, peak_bytes: float, devices: int, effective_batch: int
    ) -> Self:
        """The profile after a training with this micro-batch took so many bytes, where they tell more than the law.

        A size far below the cap says little about sizes near the limit.
        """
        law = self.memory
        if law is None or self.limit_bytes is None or micro_batch > law.points[-1][0]:
            return self
        peak_bytes -= self.extra_bytes(devices) + law.held_bytes * effective_batch
        near = 2 * micro_batch >= (self.largest_micro_batch or micro_batch)
        if not near or -_LESS <= peak_bytes / law.peak_bytes(micro_batch) - 1 <= _MORE:
            return self
        law = law.measured_at(micro_batch, peak_bytes)
        largest = law.largest_micro_batch(self.usable_bytes(1))
        return replace(self, memory=law, largest_micro_batch=largest or micro_batch)


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What to measure about a task on a device.

    Args:
        setup: any setup of the study with these cost-changing parameters; its plan and budget are ignored.
        memory: the study's memory limits.
        highest: the largest effective batch in the search space.
        traces: trace memory even if the study sets no limit.
        devices: the numbers of devices that a trial may have.
        share: of a GPU's memory that a trial gets, beside others on the same GPU.
        timing_s: time limit of step timing for each number of devices; 0: no timing.
        others: parameters and values that trials may use instead, each with all parameters then; expected to cost the same.
    """

    setup: TrialSetup
    memory: Memory
    highest: int
    traces: bool = False
    devices: tuple[int, ...] = (1,)
    share: float = 1.0
    timing_s: float = 0.0
    others: tuple[tuple[str, Parameter, Mapping[str, Parameter]], ...] = ()

    def largest_share(self, training_set: int | None, devices: int) -> int:
        """The largest micro-batch that a trial on this number of devices could need, memory aside."""
        batch = min(self.highest, training_set or self.highest)
        return min(-(-batch // devices), self.memory.largest_micro_batch or batch)

    @property
    def parameter_shards(self) -> int:
        """The devices that share out a model's parameters; 1: each has all of them."""
        return max(self.devices) if self.setup.sharding == "fsdp2" else 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "setup": self.setup.to_dict(),
            "memory": self.memory.model_dump(mode="json"),
            "highest": self.highest,
            "traces": self.traces,
            "devices": list(self.devices),
            "share": self.share,
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
            share=values["share"],
            timing_s=values["timing_s"],
            others=tuple((name, value, parameters) for name, value, parameters in values["others"]),
        )
