"""What is stored of a trial: its facts, its result, and its record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from .boundary.given import shown
from .learning_rate import BESIDE_RATE
from .names import Direction
from .plan import ActivationCheckpointing
from .readable import number
from .study.goals import Speed, turned
from .study.space import LENGTHS, Space
from .study.training import RECIPE
from .trial import COUNTED, OutcomeKind, Parameter


@dataclass(frozen=True, slots=True)
class TrialFacts:
    """Derived values of a trial; None if unknown. They are stored as a JSON document of its row.

    Args:
        effective_batch, micro_batch, accumulation, devices, activation_checkpointing, rule, learning_rate, weight_decay,
            betas, eps, epochs, samples_budget, seed: settings of the training, after plan and rule.
        train_s, device_s: seconds of the full training, and those seconds times its devices.
        price: for an hour of what it has of each of its devices, of the kind whose seconds these are.
        spent: what the devices that its attempts held cost meanwhile.
        train_s_source: `known` from the step-time law, `measured` by the clock, or `retimed` for another device.
        measured_train_s: full training by the trial's own clock.
        train_s_error: relative error of the predicted training time: measured / predicted - 1.
        waited_s: seconds of that in which it waited for a processor core (on a CPU, where the system counts them).
        throttled_s: seconds of that wait that the processor limit of its own control groups cost, such as a container's.
        others_share: share of its machine that other programs used meanwhile, where that is the driver's own machine.
        stolen_share: share of the core time of its machine's programs that the host gave to other virtual machines.
        attempts: attempts at the trial so far.
        host, device_kind: where it ran.
        baseline: its index in the study's `baseline:`.
        shortened_to: the share of the planned training to which it was shortened, to end in time.
        planned_length: the searched epochs, or other length, that it was to have, where it was shortened.
        repeats: the trial whose setting this one repeats.
        stopped_fraction, stopped_accuracy: its measurement where it was stopped early, or where it may be paused.
        expected_seconds, expected_accuracy, expected_std: what the full budget takes by the study's measure of speed, and the
            prediction from its learning curve.
        runs, failed_runs: numbers of runs of its setting, over all seeds.
        mean_low, mean_high: 90 % interval of the setting's mean, if settings were repeated.
        front_probability: probability that this mean lies on the front.
        ties: faster settings that it is not significantly better than.
        ghost_batch: samples that BatchNorm sees.
        peak_bytes: measured peak of live bytes in a training step on one device.
        peak_reserved_bytes: on a GPU, what its allocator reserved for it.
        resumed_at: samples seen at the checkpoint it resumed from.
        checkpoint: why its checkpoint could not be read, or the last one not be written.
        blew_up: it ended at a finite loss that is no result; told from the other trials whenever they are read, and not stored.
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
    spent: float | None = None
    train_s_source: Literal["known", "measured", "retimed"] | None = None
    measured_train_s: float | None = None
    train_s_error: float | None = None
    waited_s: float | None = None
    throttled_s: float | None = None
    others_share: float | None = None
    stolen_share: float | None = None
    samples_per_s: float | None = None
    attempts: int | None = None
    host: str | None = None
    device_kind: str | None = None
    baseline: int | None = None
    shortened_to: float | None = None
    planned_length: float | None = None
    repeats: int | None = None
    stopped_fraction: float | None = None
    stopped_accuracy: float | None = None
    expected_seconds: float | None = None
    expected_accuracy: float | None = None
    expected_std: float | None = None
    runs: int | None = None
    failed_runs: int | None = None
    mean_low: float | None = None
    mean_high: float | None = None
    front_probability: float | None = None
    ties: tuple[int, ...] | None = None
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
    blew_up: bool | None = None
    curve: tuple[tuple[float, float], ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Self:
        """The facts in a JSON document.

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

    @property
    def groups(self) -> tuple[Mapping[str, Any], ...]:
        """What the optimizer's groups stepped with, the one first that speaks for all; empty where nothing reported it."""
        with suppress(LookupError, ValueError, TypeError):
            first, *others = json.loads(self.extra["optimizer_groups"])
            return tuple(other if "optimizer" in other else {**first, **other} for other in (first, *others))
        return ()

    def __or__(self, other: TrialFacts) -> TrialFacts:
        """These facts, updated with the other's known ones."""
        return TrialFacts.of({**self.to_dict(), **other.to_dict()})


_FACTS = tuple(name for name in TrialFacts.__slots__ if name != "extra")


# Facts that tasks may search under the same name: what is searched replaces what is reported.
SEARCHED_FACTS = frozenset(
    (
        "accumulation",
        "effective_batch",
        "epochs",
        "momentum",
        "nesterov",
        "optimizer",
        "rule",
        "steps",
        "train_s",
        "weight_decay",
    )
)
# Names that results have beside facts and parameters.
RESULTS = frozenset(
    {"accuracy", "all", "attempt", "cost", "ended_at", "on_front", "outcome", "started_at"}
    | {"trial", "val_loss"}
)
# Facts that training code reports, ours or a user's own loop, and their types; all others are the driver's.
_REPORTED: Mapping[str, type] = {"checkpoint": str, "optimizer": str, "nesterov": bool} | dict.fromkeys(
    (
        *("ghost_batch", "model_parameters", "momentum", "peak_bytes", "peak_reserved_bytes"),
        *("resumed_at", "shortened_to", "steps", "stolen_share", "throttled_s", "waited_s"),
    ),
    float,
)
# Names of what stands beside scores and facts in tables, files and trackers: a score of one would take its place.
_OURS = frozenset(
    {*_FACTS, *RESULTS, *Space.model_fields}.difference(RECIPE, ("samples", "tokens", "rates"))
    | {"extra", "samples_seen", "elapsed_s", "train_loss", "undefined", "study", "task"}
    | {"code", "code_of_study", "metric", "tests", "setup", "kind"}
)
OURS_OF_SCORES = _OURS - {"accuracy", "val_loss"}
_OURS_OF_FACTS = _OURS - _REPORTED.keys() - {"undefined"}


def name_fault(field_name: Literal["scores", "facts"], names: Iterable[str]) -> str:
    """What is wrong with the names of scores or facts that training code gives; empty where nothing is.

    >>> name_fault("scores", ["recall", "train_s"])
    "scores: expected names other than bsearch's own, got train_s. Rename what you report."
    """
    ours = OURS_OF_SCORES if field_name == "scores" else _OURS_OF_FACTS
    if not (taken := sorted(ours.intersection(names))):
        return ""
    return f"{field_name}: expected names other than bsearch's own, got {', '.join(taken)}. Rename what you report."


def reported_name(name: str) -> str:
    """A user's name that stands beside one of ours, or of a parameter.

    >>> reported_name("train_loss")
    'reported_train_loss'
    """
    return f"reported_{name}"


def type_fault(facts: Mapping[str, Any]) -> str:
    """What is wrong with the values of facts that have a type of their own; empty where nothing is.

    >>> type_fault({"peak_bytes": "many"}), type_fault({"peak_bytes": 3, "branch": "many"})
    ("facts: peak_bytes: expected a number, got 'many'", '')
    """
    for name, value in facts.items():
        kind = _REPORTED.get(name)
        if kind is not None and type(value) is not kind and not (kind is float and type(value) is int):
            expected = {str: "text", bool: "true or false", float: "a number"}[kind]
            return f"facts: {name}: expected {expected}, got {shown(value)}"
    return ""


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


@dataclass(frozen=True, slots=True, repr=False)
class TrialRecord:
    """A trial as it is stored: its parameters, its derived values, and its outcome.

    Args:
        outcome: `running` while an attempt trains it. A trial that is `paused` or `interrupted` and has not ended goes on with
            another attempt. `unreadable` where its row cannot be read by this version: it keeps its number, and says nothing.
        train_s, accuracy: None if it did not get that far. `accuracy` is the study's metric, in its own `direction`.
        values, violation: as in its `TrialResult`.
        ended_at: empty until then, as `started_at`: local time, ISO 8601.
    """

    number: int
    outcome: OutcomeKind | Literal["running", "unreadable"]
    parameters: Mapping[str, Parameter]
    facts: TrialFacts = TrialFacts()
    train_s: float | None = None
    accuracy: float | None = None
    message: str = ""
    started_at: str = ""
    ended_at: str = ""
    values: tuple[float, ...] | None = None
    violation: float = 0.0
    direction: Direction = "maximize"

    @classmethod
    def of(
        cls,
        number: int,
        outcome: OutcomeKind | Literal["running", "unreadable"],
        parameters: Mapping[str, Parameter],
        facts: TrialFacts,
        values: tuple[float, ...] | None = None,
        violation: float = 0.0,
        started_at: str = "",
        ended_at: str = "",
        direction: Direction = "maximize",
    ) -> Self:
        """A trial whose time, metric and message follow from its values and facts."""
        train_s, reached = facts.train_s, facts.stopped_accuracy if outcome in ("stopped", "paused") else None
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
            direction,
        )

    def __repr__(self) -> str:
        known = {
            "accuracy": self.accuracy,
            "train_s": self.train_s,
            "learning_rate": self.facts.learning_rate,
        }
        values = (
            f"{name}={number(value)}"
            for name, value in {**known, **self.parameters}.items()
            if value is not None
        )
        return f"<trial {self.number} {self.outcome}: {', '.join(values)}>"

    def changed(
        self, outcome: OutcomeKind | Literal["running", "unreadable"], facts: TrialFacts = TrialFacts()
    ) -> Self:
        """The trial in another state before its end, with these facts beside its own."""
        facts = self.facts | facts
        return self.of(
            self.number, outcome, self.parameters, facts, started_at=self.started_at, direction=self.direction
        )

    def ended(self, result: TrialResult, at: str) -> Self:
        """The trial with its result."""
        facts, parameters = self.facts | result.facts, self.parameters
        name, share = next((name for name in LENGTHS if name in parameters), ""), facts.shortened_to
        if share is not None and name:  # whoever reads it reads what was trained
            facts |= TrialFacts(planned_length=parameters[name])  # type: ignore[arg-type]
            length = float(parameters[name]) * share
            parameters = {
                **parameters,
                name: length if name in ("epochs", "train_s") else max(round(length), 1),
            }
        ended = result.values, result.violation, self.started_at, at
        return self.of(self.number, result.outcome, parameters, facts, *ended, self.direction)

    def score_of(self, value: float) -> float:
        """A value of the study's metric so that higher is better; and such a score as its value."""
        return turned(value, self.direction)

    @property
    def score(self) -> float | None:
        """Its metric so that higher is better; None where it has none."""
        return None if self.accuracy is None else self.score_of(self.accuracy)

    @property
    def counts(self) -> bool:
        """Whether it counts towards `budget.trials`."""
        return self.has_ended and self.outcome in COUNTED

    @property
    def has_ended(self) -> bool:
        """Whether it will train no more."""
        return bool(self.ended_at) or self.outcome not in ("running", "paused", "interrupted")

    @property
    def is_paused(self) -> bool:
        """Whether it waits at the rung, to be resumed where that is worth more than a new trial."""
        return self.outcome == "paused" and not self.has_ended

    @property
    def trained_share(self) -> float:
        """The share of its training that it has had, where it was left off early, else 1."""
        share = self.facts.stopped_fraction if self.outcome in ("stopped", "paused") else None
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
        derived: dict[str, Any] = {
            name: facts[name] for name in ("accumulation", "weight_decay", "train_s") if name in facts
        }
        main = next(iter(self.facts.groups), {})
        changed = {name for name in (*BESIDE_RATE, "momentum") if isinstance(main.get(name), str)}
        return {
            name: value
            for name, value in {**facts, **self.parameters, **derived}.items()
            if name not in changed
        }

    def taken(self, speed: Speed) -> float | None:
        """What its training takes by a measure of speed; None if that is unknown."""
        each = taken_per_second(speed, self.facts.devices or 1, self.facts.price)
        return None if self.train_s is None or each is None else self.train_s * each


def taken_per_second(speed: Speed, devices: int, price: float | None) -> float | None:
    """What a second of training on so many devices is by a measure of speed; None where it depends on something unknown.

    Args:
        price: of a device for an hour.

    >>> [taken_per_second(speed, 2, 1.8) for speed in ("train_s", "device_s", "cost")]
    [1.0, 2.0, 0.001]
    """
    match speed:
        case "train_s":
            return 1.0
        case "device_s":
            return float(devices)
        case "cost":
            return None if price is None else devices * price / 3600


def counted(records: Iterable[TrialRecord]) -> int:
    """How many trials count towards `budget.trials`."""
    return sum(record.counts for record in records)
