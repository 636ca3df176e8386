"""The values that describe a trial: its setup, its measurements, its outcome, and its record.

They cross process boundaries as plain dicts (`to_dict`, `from_dict`), so driver and worker only need this
package to understand each other, whatever they run on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, TypeVar

from .boundary.given import LARGEST, number_of, scalar_of, shown
from .errors import TaskError, cut, cut_middle
from .learning_rate import OptimizerSettings, average_decay
from .plan import BatchPlan, Embedding, Sharding, Steps, accumulation_limits, step_plans
from .study.space import ratio_name
from .study.training import Training

Parameter = bool | int | float | str
_T = TypeVar("_T")


# Samples per forward pass of evaluation if no profile sets it; independent of the trial's batch.
EVALUATION_BATCH = 512


# The same for a Hugging Face Trainer, if the user does not set it.
TRAINER_EVALUATION_BATCH = 64


# The samples of a training whose seconds are limited by the clock alone: more than any has.
UNTIMED_SAMPLES = 10**12


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A proposed trial: a value for every parameter of the space, searched or fixed.

    Args:
        notes: attached when it was queued: which setting it repeats, with which seed.
        resumes_from: the share of its training that it has had, above 0 where it was paused and goes on.
    """

    number: int
    parameters: Mapping[str, Parameter]
    notes: Mapping[str, Any] = field(default_factory=dict)
    resumes_from: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """Everything that one attempt at a trial needs; passed to every method of a task.

    `learning_rate`, `betas`, `eps` and `weight_decay` are those of the optimizer: the rule has been applied.

    Args:
        number: of the trial in its study.
        attempt: 0, incremented with each retry of the trial.
        plan: how a step of `effective_batch` samples is split into micro-batches and devices.
        samples_budget: samples to train on, such as epochs times the training set.
        training: the study's `training` section: schedule, warm-up, precision, seed, ...
        largest_micro_batch: the most samples per micro-batch on one device; None: no limit.
        couples_samples: the loss compares the samples of a batch, so that no step is split.
        embedding: how a loss over the embeddings of a whole batch is computed, in every step alike.
        train_s: seconds to train for, where the study says so: `samples_budget` is what is known to fit. A generator, whose
            steps are not timed, yields a measurement when so many have passed (`samples_budget` is then out of reach).
        metric: name of the metric that trials are compared on.
        sharding: what its devices share out.
        folder: the study file's; relative paths in the task are resolved against it.
        model_folder: where the trained model is wanted, as by `bsearch train`; None in the trials of most studies.
        scores_test: where a model is wanted, whether the test set is scored with it.
        ends_by: seconds since 1970 by which the training, its last evaluation and saving have to be over: it trains on fewer
            samples rather than for longer. None: no such moment.
        parameters: the task's parameters by name.
    """

    study: str
    number: int
    attempt: int
    plan: BatchPlan
    optimizer: OptimizerSettings
    samples_budget: int
    training: Training
    epochs: float
    rule: str = "constant"
    reference_rate: float | None = None
    reference_batch: int = 1
    largest_micro_batch: int | None = None
    smallest_micro_batch: int = 1
    couples_samples: bool = False
    embedding: Embedding = ""
    evaluation_batch: int | None = None  # samples per forward pass of evaluation; None: a constant
    memory_limit_bytes: int | None = None  # limit per device; using more counts as out of memory
    metric: str = "accuracy"
    device: Literal["cpu", "gpu"] = "cpu"
    cpus: int = 1
    sharding: Sharding = "ddp"
    folder: str = "."
    checkpoint: str | None = None  # URL of the file that a later attempt resumes from; None: no checkpoints
    checkpoint_every_s: float = 60.0
    # Share of training from which on it may be paused: a checkpoint is written there.
    pauses_at: float | None = None
    model_folder: str | None = None
    scores_test: bool = True
    ends_by: float | None = None
    train_s: float | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    @property
    def effective_batch(self) -> int:
        """Samples per optimizer step."""
        return self.plan.effective_batch

    @property
    def is_timed_by_clock(self) -> bool:
        """Whether it ends after `train_s` by its own clock, since nobody knows how many samples that is."""
        return self.train_s is not None and self.samples_budget == UNTIMED_SAMPLES

    def as_trained(self, samples: int | None, epochs: float | None) -> TrialSetup:
        """The setup with the length that its training turned out to have, where the clock has ended that."""
        if not self.is_timed_by_clock or samples is None or epochs is None:
            return self
        return replace(self, samples_budget=samples, epochs=epochs)

    def share_of(self, measurement: Measurement) -> float:
        """The share of its training that is behind it; a user's own loop may end slightly off its budget."""
        if self.is_timed_by_clock and self.train_s is not None:
            return min(measurement.elapsed_s / self.train_s, 1.0)
        return min(measurement.samples_seen / self.samples_budget, 1.0)

    @property
    def limits(self) -> dict[str, Any]:
        """Limits of every plan of this trial, as keyword arguments of `plan_batch`."""
        return {
            "largest_micro_batch": self.largest_micro_batch,
            "smallest_micro_batch": self.smallest_micro_batch,
            "every_micro_batch": self.training.sync_batch_norm,
            "activation_checkpointing": self.plan.activation_checkpointing,
            **accumulation_limits(self.embedding, couples_samples=self.couples_samples),
        }

    def steps(self) -> tuple[Steps, ...]:
        """All steps of the training.

        Raises:
            InfeasiblePlanError: some have no plan.
        """
        return step_plans(self.plan, self.samples_budget, **self.limits)

    def ema_decay(self, samples: int) -> float:
        """What the average of weights keeps of itself in a step of so many samples; `training.ema` is not None."""
        assert self.training.ema is not None
        return average_decay(self.training.ema, samples / self.reference_batch)

    @property
    def learning_rate(self) -> float:
        """Peak learning rate, after the rule and before the schedule."""
        return self.optimizer.learning_rate

    def rate(self, group: str) -> float:
        """Peak learning rate of a group of the model's parameters: the trial's, times its ratio in `space.rates`.

        Raises:
            TaskError: the study has no such group.
        """
        if (name := ratio_name(group)) not in self.parameters:
            raise TaskError(
                f"space.rates: expected {group!r}, whose rate the task asks for; got none. Write rates: {{{group}: 1}}."
            )
        return self.learning_rate * float(self.parameters[name])

    @property
    def betas(self) -> tuple[float, float]:
        """Adam's betas."""
        return self.optimizer.betas

    @property
    def eps(self) -> float:
        """Adam's epsilon."""
        return self.optimizer.eps

    @property
    def weight_decay(self) -> float:
        """Weight decay."""
        return self.optimizer.weight_decay

    @property
    def cost_parameters(self) -> dict[str, Parameter]:
        """What a profile may depend on: the task's parameters, and the precision, which may be searched."""
        return {**self.parameters, "precision": self.training.precision}

    @property
    def seed(self) -> int:
        """Random seed of this training."""
        return self.training.seed

    def path(self, name: str) -> Path:
        """A path of the study file, relative to its folder."""
        return (Path(self.folder) / Path(name).expanduser()).resolve()

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {
            "plan": asdict(self.plan),
            "optimizer": asdict(self.optimizer),
            "training": self.training.model_dump(mode="json"),
            "parameters": dict(self.parameters),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        optimizer = dict(values["optimizer"])
        optimizer["betas"] = tuple(optimizer["betas"])
        return cls(
            **{
                **values,
                "plan": BatchPlan(**values["plan"]),
                "optimizer": OptimizerSettings(**optimizer),
                "training": Training.model_validate(values["training"]),
                "parameters": MappingProxyType(dict(values["parameters"])),
            }
        )


# More seconds than anything has trained (300 years): what is extrapolated from them stays a number.
_MOST_S = 1e10
# Fewer than any clock tells: samples per second would be infinite.
_LEAST_S = 1e-12


@dataclass(frozen=True, slots=True)
class Measurement:
    """One evaluation during a trial.

    Args:
        samples_seen: samples trained on so far, of the trial's `samples_budget`.
        elapsed_s: seconds of training so far, without evaluation and checkpoints.
        accuracy: share of correct predictions on the validation data; may be None if `scores` has the metric.
        scores: other metrics by name.
        train_loss: mean training loss since the last measurement.
        facts: properties of the run (peak bytes, ghost batch size, ...), numbers or strings.

    Raises:
        TaskError: a value of another kind. Scalars of NumPy and torch are numbers, and become Python's own.
    """

    samples_seen: int
    elapsed_s: float
    accuracy: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    train_loss: float | None = None
    facts: Mapping[str, Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # What is wrong is refused here, where the user's line is known, and not where it is written.
        seen = number_of("Measurement.samples_seen", self.samples_seen)
        if not 0 <= seen < 1 << 63 or seen != int(seen):
            raise TaskError(
                f"Measurement.samples_seen: expected an integer >= 0, got {shown(self.samples_seen)}"
            )
        object.__setattr__(self, "samples_seen", int(seen))
        elapsed_s = number_of("Measurement.elapsed_s", self.elapsed_s)
        if not 0 <= elapsed_s < _MOST_S or 0 < elapsed_s < _LEAST_S:
            raise TaskError(
                f"Measurement.elapsed_s: expected a finite number >= 0, the seconds of training, got {shown(self.elapsed_s)}"
            )
        object.__setattr__(self, "elapsed_s", elapsed_s)
        for name in ("accuracy", "train_loss"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, number_of(f"Measurement.{name}", value))
        object.__setattr__(self, "scores", _named("scores", self.scores, number_of))
        object.__setattr__(self, "facts", _named("facts", self.facts, scalar_of))
        if twice := sorted(self.scores.keys() & self.facts.keys()):
            raise TaskError(
                f"Measurement: expected each name in scores or in facts, got {', '.join(twice)} in both"
            )
        score = self.scores.get("accuracy", self.accuracy)
        if (
            self.accuracy is not None
            and score != self.accuracy
            and not (score != score and self.accuracy != self.accuracy)
        ):
            raise TaskError(
                f"Measurement.accuracy: expected the value in scores, {score}, got {self.accuracy}"
            )

    def value(self, metric: str) -> float:
        """A metric by name, in its own direction; `accuracy` is the field of that name.

        Raises:
            TaskError: the measurement does not have that metric.
        """
        value = self.scores.get(metric, self.accuracy if metric == "accuracy" else None)
        if value is None:
            known = (
                ", ".join(sorted({*self.scores, *(() if self.accuracy is None else ("accuracy",))}))
                or "nothing"
            )
            raise TaskError(
                f"objectives.metric: expected a metric that the training code reports ({known}), got {metric!r}"
            )
        return float(value)

    def not_finite(self, metric: str) -> str:
        """What is not finite, or too large for models: the training loss or the metric, with its value; empty where neither
        is.
        """
        if self.train_loss is not None and not math.isfinite(self.train_loss):
            return "train_loss was not finite"
        score = self.value(metric)
        if not math.isfinite(score):
            return f"{metric} was not finite"
        return f"{metric} was {score:.4g}, beyond {LARGEST:g}," if abs(score) > LARGEST else ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)


def _named(field_name: str, values: Any, plain: Callable[[str, Any], _T]) -> dict[str, _T]:
    """Values by name as Python's own.

    Raises:
        TaskError: no mapping, a name that is no text, or a value of another kind.
    """
    where = f"Measurement.{field_name}"
    if not isinstance(values, Mapping):
        raise TaskError(f"{where}: expected a dict of values by name, got {shown(values)}")
    for name in values:
        if not isinstance(name, str) or not name:
            raise TaskError(f"{where}: expected names that are strings, got {shown(name)}")
    return {str(name): plain(f"{where}: {name}", value) for name, value in values.items()}


OutcomeKind = Literal[
    "complete", "stopped", "paused", "diverged", "out_of_memory", "infeasible", "interrupted", "error"
]


# The outcomes after which a trial counts towards `budget.trials`.
COUNTED: frozenset[OutcomeKind] = frozenset({"complete", "stopped", "diverged"})


# The beginning of an interruption's message where the machine died, and not the worker alone.
NODE_DIED = "its node died"


_LONGEST_TRACEBACK = 32_000  # characters

# The message of one that its driver asked for.
LEFT = "stopped at its driver's request"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended.

    Texts are bounded here, for a task's error may be of any length, and is stored, sent and shown.

    Args:
        message: for users.
        micro_batch: the size that ran out of memory.
    """

    kind: OutcomeKind
    message: str = ""
    traceback: str = ""
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", cut(self.message))
        object.__setattr__(self, "traceback", cut_middle(self.traceback, _LONGEST_TRACEBACK))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)
