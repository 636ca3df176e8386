"""`objectives`, `budget` and `stopping`: what is searched for, and how long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StrictInt, StrictStr, model_validator

from ..deadline import checked_deadline, duration_of
from ..domain import Number, Section, fault
from ..names import Direction, direction_of
from ..readable import UNLIMITED

# Of a study that has so long, at most this share is for timing steps, and at least so many seconds.
_TIMING, _LEAST_TIMING_S = 0.05, 2.0


def turned(value: float, direction: Direction) -> float:
    """A metric's value as a score, of which more is better; and a score as the metric's value.

    Only this function turns a sign: whatever compares trials compares scores.
    """
    return value if direction == "maximize" else -value


# Measures of speed.
Speed = Literal["train_s", "device_s", "cost"]


def _deadline(value: str) -> str:
    try:
        return checked_deadline(value)
    except ValueError as error:
        raise fault(str(error)) from None


class Budget(Section):
    """When the study ends: at whichever limit is reached first."""

    trials: StrictInt = Field(
        20,
        ge=1,
        description="Trials to finish: complete, stopped and diverged ones count, failed and interrupted ones do not. With "
        "`hours`, `cost` or `by`, no limit unless given.",
    )
    hours: Number | None = Field(
        None, gt=0, description="Time limit in hours, summed over restarts; null: no limit."
    )
    cost: Number | None = Field(
        None,
        gt=0,
        description="Limit on what devices cost by `devices.prices` while trials hold them, summed over restarts; null: no "
        "limit.",
    )
    profile_s: Number = Field(
        20,
        ge=0,
        description="Seconds of step timing before the first trial; 0: training times are not known in advance, and each "
        "trial is timed by the clock. Default: 20, or less where `by` is a short duration, a twentieth of it.",
    )
    by: Annotated[StrictStr, AfterValidator(_deadline)] | None = Field(
        None,
        description="When the study has to be done, with its best model kept: a time of day, a date, or a duration since the "
        "first run with it, such as `18:00`, `2026-11-28 09:00` or `2h`; null: it ends with the search.",
    )
    keep: StrictStr | None = Field(
        None,
        min_length=1,
        description="Folder for the best model, relative to the study file, with `by`, `cost` or `until`; default: "
        "`results/STUDY/model` with `by` and `until`.",
    )
    until: Number | None = Field(
        None, description="Value of the metric at which the study stops and keeps its model; null: none."
    )

    @model_validator(mode="after")
    def _unlimited(self) -> Self:
        if {self.by, self.hours, self.cost} != {None} and "trials" not in self.model_fields_set:
            object.__setattr__(self, "trials", UNLIMITED)
        if (
            self.by is not None
            and "profile_s" not in self.model_fields_set
            and (length := duration_of(self.by)) is not None
        ):
            short_s = max(_TIMING * length.total_seconds(), _LEAST_TIMING_S)
            object.__setattr__(self, "profile_s", min(self.profile_s, short_s))
        return self

    @property
    def keeps_model(self) -> bool:
        """Whether the study ends with a trained model."""
        return self.by is not None or self.keep is not None or self.until is not None


class Metric(Section):
    """A metric that the training code reports."""

    name: StrictStr = Field(
        "accuracy",
        min_length=1,
        description="Name of the metric, as the task or the training loop reports it.",
    )
    direction: Direction = Field(
        "maximize",
        description="Whether lower or higher is better; default: what its name says, and asked for where it says none.",
    )
    floor: Number | None = Field(
        None,
        description="Values worse than it (above it, where the metric is minimized) are worth nothing: the front, the search "
        "and early stopping look only at what reaches it, once a trial does. It may be changed between runs.",
    )

    @model_validator(mode="before")
    @classmethod
    def _directed(cls, value: Any) -> Any:
        """The direction that a name says; where it says none, a study file has to."""
        if isinstance(value, Mapping) and "direction" not in value:
            said = direction_of(str(value.get("name", "accuracy")))
            return {**value, **({"direction": said} if said else {})}
        return value

    @property
    def least_score(self) -> float:
        """The score of `floor`."""
        return -math.inf if self.floor is None else self.score(self.floor)

    def score(self, value: float) -> float:
        """A value of it so that higher is better; and such a score as its value."""
        return turned(value, self.direction)


def _metric(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class Objectives(Section):
    """The objectives of the front: speed and a metric."""

    speed: Speed = Field(
        "train_s",
        description="Measure of speed: `train_s`, seconds of training; `device_s`, those seconds times the trial's devices, so "
        "that additional devices are not free; or `cost`, device-seconds at the price under `devices.prices`.",
    )
    metric: Annotated[Metric, BeforeValidator(_metric, json_schema_input_type=Metric | str)] = Field(
        Metric(), description="Measure of quality: the name of a metric, or `{name, direction, floor}`."
    )

    @property
    def directions(self) -> list[Literal["minimize", "maximize"]]:
        """Optuna's direction of each objective, in the order of `names`."""
        return ["minimize", self.metric.direction]

    @property
    def names(self) -> list[str]:
        """The objectives as Optuna stores them: speed and the metric."""
        return [self.speed, self.metric.name]


# What stops trials early.
Stopping = Literal["front", "none"]
