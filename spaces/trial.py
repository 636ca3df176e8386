"""The values that travel the road: what one trial is told, what it reports, and what is kept of it.

They cross process boundaries as plain dicts (`to_dict`, `from_dict`), so a worker needs nothing but this
package to understand the driver, whatever either runs on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Self

from .errors import ObjectiveError
from .learning_rate import OptimizerSettings
from .plan import BatchPlan
from .study import Training

Parameter = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What the search wants tried: a value for every parameter of the space, searched or fixed.

    `notes` came with it when it was queued: which setting it repeats, with which seed.
    """

    number: int
    parameters: Mapping[str, Parameter]
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """Everything one attempt at a trial needs to know; what every method of a task is given.

    `learning_rate`, `betas`, `eps` and `weight_decay` are what the optimizer is to get: the rule has been applied.

    Args:
        number: of the trial in its study.
        attempt: 0, and one more each time the trial is tried again.
        plan: how a step of `effective_batch` samples is made: passes and devices.
        samples_budget: samples to train on, epochs times the training set.
        training: the study's section `training`: schedule, warm-up, precision, seed, ...
        largest_micro_batch: samples that one pass on one device may have; None where nothing limits them.
        metric: name of the metric that trials are compared by.
        folder: of the study file; a task's own relative paths start here.
        parameters: the study's further parameters by name.
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
    evaluation_batch: int | None = None  # samples of an evaluation pass; None lets the loop choose
    memory_limit_bytes: int | None = None  # what the device may hold; more is out of memory
    metric: str = "accuracy"
    device: Literal["cpu", "gpu"] = "cpu"
    cpus: int = 1
    folder: str = "."  # of the study file; a task's own relative paths start here
    checkpoint: str | None = None  # URL of the file that a later attempt goes on from; None where none is kept
    checkpoint_every_s: float = 60.0
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    @property
    def effective_batch(self) -> int:
        """Samples per optimizer step."""
        return self.plan.effective_batch

    @property
    def limits(self) -> dict[str, Any]:
        """What every plan of this trial keeps to, as `plan_batch` takes it."""
        return {
            "largest_micro_batch": self.largest_micro_batch,
            "smallest_micro_batch": self.smallest_micro_batch,
            "every_pass": self.training.sync_batch_norm,
        }

    @property
    def learning_rate(self) -> float:
        """Peak learning rate, after the rule and before the schedule."""
        return self.optimizer.learning_rate

    @property
    def betas(self) -> tuple[float, float]:
        """Adam's two averages."""
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
    def seed(self) -> int:
        """Of this training."""
        return self.training.seed

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


def _plain(value: Any) -> Any:
    """NumPy's and torch's single numbers as Python's own, which travel as JSON."""
    return value.item() if hasattr(value, "item") else value


@dataclass(frozen=True, slots=True)
class Measurement:
    """One evaluation during a trial.

    Args:
        samples_seen: samples trained on so far, of the trial's `samples_budget`.
        elapsed_s: seconds of training so far, evaluation and checkpoints left out.
        accuracy: share of right answers on the evaluation data; may be None where `scores` names the metric.
        scores: further metrics by name.
        train_loss: mean training loss since the last measurement.
        facts: what the worker found out about the run (peak bytes, ghost batch size, ...), numbers or words.
    """

    samples_seen: int
    elapsed_s: float
    accuracy: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    train_loss: float | None = None
    facts: Mapping[str, Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("samples_seen", "elapsed_s"):
            value = _plain(getattr(self, name))
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ObjectiveError(f"Measurement.{name}: expected a plain finite number >= 0, got {value!r}")
            object.__setattr__(self, name, value)
        accuracy = _plain(self.accuracy)
        if accuracy is not None and not isinstance(accuracy, int | float):
            raise ObjectiveError(f"Measurement.accuracy: expected a number, got {accuracy!r}")
        object.__setattr__(self, "accuracy", accuracy)

    def score(self, metric: str) -> float:
        """The value of a metric by name; `accuracy` is the field of that name.

        Raises:
            ObjectiveError: the measurement does not hold that metric.
        """
        value = self.scores.get(metric, self.accuracy if metric == "accuracy" else None)
        if value is None:
            known = ", ".join(sorted({*self.scores, *(() if self.accuracy is None else ("accuracy",))})) or "nothing"
            raise ObjectiveError(
                f"objectives.accuracy: expected the training code to measure {metric!r}, but it measures {known}"
            )
        return float(value)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)


OutcomeKind = Literal["complete", "stopped", "diverged", "out_of_memory", "infeasible", "interrupted", "error"]

# The outcomes after which a trial counts towards `budget.trials`.
COUNTED: frozenset[OutcomeKind] = frozenset({"complete", "stopped", "diverged"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. `message` is for people; `micro_batch` is the size that did not fit memory."""

    kind: OutcomeKind
    message: str = ""
    traceback: str = ""
    micro_batch: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """What is kept of a trial: its parameters, its derived values, and how it came out.

    `train_s` and `accuracy` are None where the trial did not get that far. `accuracy` holds the study's
    chosen metric in its own direction.
    """

    number: int
    outcome: OutcomeKind | Literal["running", "waiting"]
    parameters: Mapping[str, Parameter]
    facts: Mapping[str, Any]
    train_s: float | None = None
    accuracy: float | None = None
    message: str = ""
    started_at: str = ""
    ended_at: str = ""

    @property
    def counts(self) -> bool:
        return self.outcome in COUNTED

    @property
    def settings(self) -> dict[str, Any]:
        """Facts and parameters by name, as the trial was trained with: what a rule or a plan made of a wish takes its place."""
        made = {name: self.facts[name] for name in ("accumulation", "weight_decay") if name in self.facts}
        return {**self.facts, **self.parameters, **made}

    def seconds(self, speed: Literal["train_s", "device_s"]) -> float | None:
        """Its training time, or that time on each of its devices added up."""
        if self.train_s is None or speed == "train_s":
            return self.train_s
        return self.train_s * int(self.facts.get("devices", 1))


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """The trials that no other trial beats in both seconds and the accuracy metric, fastest first."""

    trials: tuple[TrialRecord, ...]
    metric: str = "accuracy"
    direction: Literal["minimize", "maximize"] = "maximize"
    speed: Literal["train_s", "device_s"] = "train_s"
    knee: int | None = None  # trial number

    def seconds(self, trial: TrialRecord) -> float | None:
        """What the front counts as a trial's time."""
        return trial.seconds(self.speed)
