"""The values that describe a trial: its setup, its measurements, its outcome, and its record.

They cross process boundaries as plain dicts (`to_dict`, `from_dict`), so driver and worker only need this
package to understand each other, whatever they run on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from .errors import TaskError
from .learning_rate import OptimizerSettings, average_decay
from .plan import ActivationCheckpointing, BatchPlan, Embedding, Sharding, Steps, accumulation_limits, step_plans
from .readable import joules, number, seconds
from .study.goals import Speed
from .study.training import Training

Parameter = bool | int | float | str

# Samples per forward pass of evaluation if no profile sets it; independent of the trial's batch.
EVALUATION_BATCH = 512
# The same for a Hugging Face Trainer, if the user does not set it.
TRAINER_EVALUATION_BATCH = 64


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
        samples_budget: samples to train on, epochs times the training set.
        training: the study's `training` section: schedule, warm-up, precision, seed, ...
        largest_micro_batch: the most samples per micro-batch on one device; None: no limit.
        couples_samples: the loss compares the samples of a batch, so that no step is split.
        embedding: how a loss over the embeddings of a whole batch is computed, in every step alike.
        metric: name of the metric that trials are compared on.
        sharding: what its devices share out.
        folder: the study file's; relative paths in the task are resolved against it.
        model_folder: where `bsearch train` wants the trained model; None in a study's trials.
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
    pauses_at: float | None = None  # share of training from which on it may be paused: a checkpoint is written there
    counts_energy: bool = False  # read the devices' own counters of energy
    model_folder: str | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    @property
    def effective_batch(self) -> int:
        """Samples per optimizer step."""
        return self.plan.effective_batch

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
        return average_decay(self.training.ema, samples / self.reference_batch, self.training.ema_scaling)

    @property
    def learning_rate(self) -> float:
        """Peak learning rate, after the rule and before the schedule."""
        return self.optimizer.learning_rate

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


def _plain(value: Any) -> Any:
    """Scalars of NumPy and torch as Python numbers, which JSON can hold."""
    return value.item() if hasattr(value, "item") else value


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
                raise TaskError(f"Measurement.{name}: expected a finite number >= 0, got {value!r}")
            object.__setattr__(self, name, value)
        accuracy = _plain(self.accuracy)
        if accuracy is not None and not isinstance(accuracy, int | float):
            raise TaskError(f"Measurement.accuracy: expected a number, got {accuracy!r}")
        object.__setattr__(self, "accuracy", accuracy)

    def score(self, metric: str) -> float:
        """The value of a metric by name; `accuracy` is the field of that name.

        Raises:
            TaskError: the measurement does not have that metric.
        """
        value = self.scores.get(metric, self.accuracy if metric == "accuracy" else None)
        if value is None:
            known = ", ".join(sorted({*self.scores, *(() if self.accuracy is None else ("accuracy",))})) or "nothing"
            raise TaskError(f"objectives.metric: expected a metric that the training code reports ({known}), got {metric!r}")
        return float(value)

    def not_finite(self, metric: str) -> str:
        """The name of what is not finite, the training loss or the metric; empty where both are."""
        if self.train_loss is not None and not math.isfinite(self.train_loss):
            return "train_loss"
        return "" if math.isfinite(self.score(metric)) else metric

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)


OutcomeKind = Literal["complete", "stopped", "paused", "diverged", "out_of_memory", "infeasible", "interrupted", "error"]

# The outcomes after which a trial counts towards `budget.trials`.
COUNTED: frozenset[OutcomeKind] = frozenset({"complete", "stopped", "diverged"})
# The beginning of an interruption's message where the machine died, and not the worker alone.
NODE_DIED = "its node died"
# The message of one that its driver asked for.
LEFT = "stopped at its driver's request"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. `message` is for users; `micro_batch` is the size that ran out of memory."""

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
class TrialFacts:
    """Derived values of a trial; None if unknown. They are stored as user attributes of the Optuna trial.

    Args:
        effective_batch, micro_batch, accumulation, devices, activation_checkpointing, rule, learning_rate, weight_decay,
            betas, eps, epochs, samples_budget, seed: settings of the training, after plan and rule.
        train_s, device_s: seconds of the full training, and those seconds times its devices.
        price: for an hour of what it has of each of its devices, of the kind whose seconds these are.
        watts: power of all its devices while it trains, on average, of that kind too.
        measured_energy_j: joules of the full training by the devices' own counters.
        spent: what the devices that its attempts held cost meanwhile.
        train_s_source: `known` from the step-time law, `measured` by the clock, or `retimed` for another device.
        measured_train_s: full training by the trial's own clock.
        train_s_error: relative error of the predicted training time: measured / predicted - 1.
        waited_s: seconds of that in which it waited for a processor core (on a CPU, where the system counts them).
        others_share: share of its machine that other programs used meanwhile, where that is the driver's own machine.
        contended: it shared its device with them: it waited for much of its time, or the error is large without.
        attempts: attempts at the trial so far.
        host, device_kind: where it ran.
        baseline: its index in the study's `baseline:`.
        repeats: the trial whose setting this one repeats.
        stopped_fraction, stopped_accuracy: where a trial was stopped early.
        rung_fraction, rung_accuracy: its measurement at the rung, where trials may be paused.
        expected_seconds, expected_second, expected_accuracy, expected_std: what the full budget takes by the study's measures,
            and the prediction from its learning curve.
        runs, failed_runs: numbers of runs of its setting, over all seeds.
        mean_low, mean_high: 90 % interval of the setting's mean, if settings were repeated.
        front_probability: probability that this mean lies on the front.
        ties: faster settings that it is not significantly better than.
        noise_scale, noise_scale_low, noise_scale_high: gradient noise scale and its interval, in samples.
        ghost_batch: samples that BatchNorm sees.
        peak_bytes: measured peak of live bytes in a training step on one device.
        peak_reserved_bytes: on a GPU, what its allocator reserved for it.
        resumed_at: samples seen at the checkpoint it resumed from.
        checkpoint: why its checkpoint could not be read, or the last one not be written.
        curve: (fraction, accuracy) of a trial of `Search`.
        extra: other metrics by name, and anything else that the training code reported.
    """

    effective_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    devices: int | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    rule: str | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    epochs: float | None = None
    samples_budget: int | None = None
    seed: int | None = None
    train_s: float | None = None
    device_s: float | None = None
    price: float | None = None
    watts: float | None = None
    measured_energy_j: float | None = None
    spent: float | None = None
    train_s_source: Literal["known", "measured", "retimed"] | None = None
    measured_train_s: float | None = None
    train_s_error: float | None = None
    waited_s: float | None = None
    others_share: float | None = None
    contended: bool | None = None
    samples_per_s: float | None = None
    attempts: int | None = None
    host: str | None = None
    device_kind: str | None = None
    baseline: int | None = None
    repeats: int | None = None
    stopped_fraction: float | None = None
    stopped_accuracy: float | None = None
    rung_fraction: float | None = None
    rung_accuracy: float | None = None
    expected_seconds: float | None = None
    expected_second: float | None = None
    expected_accuracy: float | None = None
    expected_std: float | None = None
    runs: int | None = None
    failed_runs: int | None = None
    mean_low: float | None = None
    mean_high: float | None = None
    front_probability: float | None = None
    ties: tuple[int, ...] | None = None
    noise_scale: float | None = None
    noise_scale_low: float | None = None
    noise_scale_high: float | None = None
    ghost_batch: int | None = None
    peak_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    model_parameters: int | None = None
    optimizer: str | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    steps: int | None = None
    resumed_at: int | None = None
    checkpoint: str | None = None
    message: str | None = None
    curve: tuple[tuple[float, float], ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Self:
        """The facts in a trial's user attributes.

        >>> facts = TrialFacts.of({"learning_rate": 0.1, "betas": [0.9, 0.99], "val_loss": 1.5})
        >>> facts.learning_rate, facts.betas, facts.seed, facts.extra
        (0.1, (0.9, 0.99), None, {'val_loss': 1.5})
        """
        known = {name: _tuples(value) for name, value in attributes.items() if name in _FACTS}
        return cls(**known, extra={name: value for name, value in attributes.items() if name not in _FACTS})

    def to_dict(self) -> dict[str, Any]:
        """The facts that are known, by name, as JSON can hold them."""
        known = {name: value for name in _FACTS if (value := getattr(self, name)) is not None}
        return {name: _lists(value) for name, value in known.items()} | dict(self.extra)

    def __or__(self, other: TrialFacts) -> TrialFacts:
        """These facts, updated with the other's known ones."""
        return TrialFacts.of({**self.to_dict(), **other.to_dict()})


_FACTS = tuple(name for name in TrialFacts.__slots__ if name != "extra")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _lists(value: Any) -> Any:
    return list(map(_lists, value)) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How a trial ended.

    Args:
        facts: beside those that were known before.
        values: in the order of `Objectives.names`; None where training gave none.
        violation: > 0 where no plan is feasible, by how far.
    """

    outcome: OutcomeKind
    facts: TrialFacts = TrialFacts()
    values: tuple[float, ...] | None = None
    violation: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """A trial as it is stored: its parameters, its derived values, and its outcome.

    Args:
        outcome: `running` while an attempt trains it. A trial that is `paused` or `interrupted` and has not ended goes on with
            another attempt.
        train_s, accuracy: None if it did not get that far. `accuracy` is the study's metric, in its own direction.
        values, violation: as in its `TrialResult`.
        ended_at: empty until then, as `started_at`: local time, ISO 8601.
    """

    number: int
    outcome: OutcomeKind | Literal["running"]
    parameters: Mapping[str, Parameter]
    facts: TrialFacts = TrialFacts()
    train_s: float | None = None
    accuracy: float | None = None
    message: str = ""
    started_at: str = ""
    ended_at: str = ""
    values: tuple[float, ...] | None = None
    violation: float = 0.0

    @classmethod
    def of(
        cls,
        number: int,
        outcome: OutcomeKind | Literal["running"],
        parameters: Mapping[str, Parameter],
        facts: TrialFacts,
        values: tuple[float, ...] | None = None,
        violation: float = 0.0,
        started_at: str = "",
        ended_at: str = "",
    ) -> Self:
        """A trial whose time, metric and message follow from its values and facts."""
        train_s, reached = facts.train_s, facts.rung_accuracy if outcome == "paused" else facts.stopped_accuracy
        if train_s is None:
            train_s = values[0] if values else facts.measured_train_s
        return cls(
            number,
            outcome,
            parameters,
            facts,
            train_s,
            values[1] if values else reached,
            facts.message or "",
            started_at,
            ended_at,
            values,
            violation,
        )

    def changed(self, outcome: OutcomeKind | Literal["running"], facts: TrialFacts = TrialFacts()) -> Self:  # immutable
        """The trial in another state before its end, with these facts beside its own."""
        return self.of(self.number, outcome, self.parameters, self.facts | facts, started_at=self.started_at)

    def ended(self, result: TrialResult, at: str) -> Self:
        """The trial with its result."""
        facts = self.facts | result.facts
        return self.of(
            self.number, result.outcome, self.parameters, facts, result.values, result.violation, self.started_at, at
        )

    @property
    def counts(self) -> float:
        """What it counts towards `budget.trials`: 1, the share of its training until it was paused, or 0."""
        if self.outcome == "paused" or not self.has_ended:
            return self.facts.rung_fraction or 0.0
        return float(self.outcome in COUNTED)

    @property
    def has_ended(self) -> bool:
        """Whether it will train no more."""
        return bool(self.ended_at) or self.outcome not in ("running", "paused", "interrupted")

    @property
    def trained_share(self) -> float:
        """The share of its training that it has had, where it was left off early, else 1."""
        share = self.facts.rung_fraction if self.outcome == "paused" else self.facts.stopped_fraction
        return 1.0 if share is None else share

    @property
    def is_baseline(self) -> bool:
        """Whether it trains settings of the study's `baseline:`."""
        return self.facts.baseline is not None

    @property
    def is_repeat(self) -> bool:
        """Whether it repeats another trial's setting with another seed."""
        return self.facts.repeats is not None

    @property
    def setting(self) -> int:
        """The trial whose setting this one trains: itself, or the one that it repeats."""
        return self.number if self.facts.repeats is None else self.facts.repeats

    @property
    def interval(self) -> tuple[float, float] | None:
        """90 % interval of its setting's mean metric; None if no setting was repeated."""
        low, high = self.facts.mean_low, self.facts.mean_high
        return None if low is None or high is None else (low, high)

    @property
    def half_interval(self) -> float | None:
        """Half the width of `interval`: the +/- beside the mean."""
        return None if self.interval is None else (self.interval[1] - self.interval[0]) / 2

    @property
    def settings(self) -> dict[str, Any]:
        """Facts and parameters by name, as trained: values derived by rule or plan replace the suggested ones."""
        facts = self.facts.to_dict()
        derived: dict[str, Any] = {name: facts[name] for name in ("accumulation", "weight_decay") if name in facts}
        return {**facts, **self.parameters, **derived}

    def taken(self, speed: Speed) -> float | None:
        """What its training takes by a measure of speed; None if that is unknown."""
        each = taken_per_second(speed, self.facts.devices or 1, self.facts.price, self.facts.watts)
        return None if self.train_s is None or each is None else self.train_s * each


def taken_per_second(speed: Speed, devices: int, price: float | None, watts: float | None) -> float | None:
    """What a second of training on so many devices is by a measure of speed; None where it depends on something unknown.

    Args:
        price: of a device for an hour.
        watts: power of all of these devices together.

    >>> [taken_per_second(speed, 2, 1.8, 500.0) for speed in ("train_s", "device_s", "cost", "energy_j")]
    [1.0, 2.0, 0.001, 500.0]
    """
    match speed:
        case "train_s":
            return 1.0
        case "device_s":
            return float(devices)
        case "cost":
            return None if price is None else devices * price / 3600
        case "energy_j":
            return watts


def counted(records: Iterable[TrialRecord]) -> float:
    """What trials count towards `budget.trials`, without the rounding of shares."""
    return round(sum(record.counts for record in records), 6)


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """The trials that no other trial beats in both what training takes (such as seconds) and the metric, fastest first.

    Args:
        also: with a second measure of what training takes, those that no other beats in all three. Where several members are
            as good, the fastest counts.
        knee: trial number, by the first measure and the metric.
    """

    trials: tuple[TrialRecord, ...]
    metric: str = "accuracy"
    direction: Literal["minimize", "maximize"] = "maximize"
    speed: Speed = "train_s"
    second_speed: Speed | None = None
    knee: int | None = None

    @property
    def best(self) -> TrialRecord | None:
        """The member with the best metric; None where there is none."""
        sign = 1.0 if self.direction == "maximize" else -1.0
        return max(self.trials, key=lambda trial: sign * (trial.accuracy or 0.0), default=None)

    @property
    def curve(self) -> tuple[TrialRecord, ...]:
        """The members that no other beats in the first measure and the metric, fastest first: each is better than the last."""
        if self.second_speed is None:
            return self.trials
        sign = 1.0 if self.direction == "maximize" else -1.0
        found: list[TrialRecord] = []
        for trial in sorted(self.trials, key=lambda one: (self.taken(one) or 0.0, -sign * (one.accuracy or 0.0))):
            if not found or sign * (trial.accuracy or 0.0) > sign * (found[-1].accuracy or 0.0):
                found.append(trial)
        return tuple(found)

    @property
    def speeds(self) -> tuple[Speed, ...]:
        """The measures of what training takes, one or two."""
        return (self.speed,) if self.second_speed is None else (self.speed, self.second_speed)

    def within(self, most: float) -> ParetoFront:
        """The members that take at most so much by the front's first measure."""
        return replace(self, trials=tuple(one for one in self.trials if (self.taken(one) or 0.0) <= most))

    def reaches(self, trial: TrialRecord, target: float) -> bool:
        """Whether a trial's metric is at least as good as a value."""
        sign = 1.0 if self.direction == "maximize" else -1.0
        return trial.accuracy is not None and sign * trial.accuracy >= sign * target

    def taken(self, trial: TrialRecord) -> float | None:
        """What a trial takes by the front's measure of speed, such as seconds."""
        return trial.taken(self.speed)

    @property
    def noun(self) -> str:
        """What it measures, in a word."""
        return {"cost": "cost", "energy_j": "energy"}.get(self.speed, "time")

    @property
    def fastest(self) -> str:
        """What its first member is."""
        return {"cost": "cheapest", "energy_j": "most economical"}.get(self.speed, "fastest")

    @property
    def faster(self) -> str:
        """What its earlier members are."""
        return {"cost": "cheaper", "energy_j": "more economical"}.get(self.speed, "faster")

    @property
    def less(self) -> str:
        """What a difference in its measure is."""
        return {"cost": "cheaper", "energy_j": "less energy"}.get(self.speed, "less time")

    def amount(self, trial: TrialRecord) -> str:
        """What a trial takes, with its unit."""
        return amount(self.speed, self.taken(trial))

    def takes(self, trial: TrialRecord) -> str:
        """What a trial takes, as it follows a result in a sentence: "in 12.3 s", or "for a cost of 0.05"."""
        return f"{_TAKES.get(self.speed, 'in')} {self.amount(trial)}"


_TAKES: dict[Speed, str] = {"cost": "for a cost of", "energy_j": "with"}


def amount(speed: Speed, taken: float | None) -> str:
    """An amount of a measure of speed, with its unit.

    >>> amount("train_s", 75.2), amount("cost", 0.0512), amount("energy_j", 12_300.0), amount("energy_j", None)
    ('1 min 15 s', '0.0512', '12.3 kJ', '-')
    """
    match speed:
        case "cost":
            return "-" if taken is None else number(taken)
        case "energy_j":
            return joules(taken)
    return seconds(taken)
