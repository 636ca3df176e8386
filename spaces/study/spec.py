"""A whole study: its parts, and what follows from several of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, StrictInt, StrictStr, ValidationError, model_validator

from ..domain import Domain, Fixed, Number, Scalar, Section, check_all, fault, one_of, searched_of, values_of
from ..errors import Fault, StudyFileError, near_miss
from .consistency import disagreements
from .devices import Devices, Memory
from .goals import Budget, Confirm, Objectives, StoppingRule
from .space import Space
from .submit import Submit
from .training import Training

# How a task is named: module:name or path/file.py:name.
TASK = r"[^:]+:[A-Za-z_]\w*"


class Cluster(Section):
    """Where trials run."""

    address: StrictStr = Field(
        "local",
        min_length=1,
        description="The Ray cluster that trials run on; local: start one here; auto: join a running one, otherwise local; or "
        "host:port of its head node.",
    )
    trials_at_once: StrictInt | None = Field(
        None, ge=1, description="Maximum number of concurrent trials; default: as many as fit."
    )
    checkpoints: StrictStr | None = Field(
        "results",
        min_length=1,
        description="Where trials store the checkpoints that they resume from after a failure: a folder, or a URL such as "
        "s3://bucket/runs, that all workers can reach; null: no checkpoints.",
    )
    checkpoint_every_s: Number = Field(
        60,
        ge=0,
        description="Seconds after which a trial writes the next checkpoint, at an evaluation or between two; 0 writes one at "
        "every evaluation and none in between. Your own training loop writes them wherever it checks `checkpoint.due()`.",
    )


Tracker = Literal["mlflow", "wandb", "tensorboard"]


def _stopping(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def _confirm(value: Any) -> Any:
    return {"repeats": value} if isinstance(value, int) and not isinstance(value, bool) else value


def _several(value: Any) -> Any:
    """One, or a list of different ones."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    for one in values:
        one_of(one, get_args(Tracker))
    return tuple(dict.fromkeys(values))


SAMPLERS = ("front", "tpe", "gp", "nsga2", "qmc", "random")


def _sampler(value: str) -> str:
    if re.fullmatch(r"[\w.]+:[A-Za-z_]\w*", value):
        return value
    if value not in SAMPLERS:
        raise fault(f"expected one of {', '.join(SAMPLERS)}, or module:attr; got {value!r}.{near_miss(value, SAMPLERS)}")
    return value


def _study_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise fault(f"expected a name of letters, digits, '.', '_' and '-', got {value!r}")
    return value


def _task(value: str) -> str:
    if not re.fullmatch(TASK, value):
        raise fault(f"expected module:name or path/file.py:name, got {value!r}")
    return value


class StudySpec(Section):
    """One study, as defined in its file; paths are absolute once it has been read."""

    study: Annotated[StrictStr, AfterValidator(_study_name)] = Field(
        description="Name of the study in its storage, and of its results folder."
    )
    task: Annotated[StrictStr, AfterValidator(_task)] = Field(
        description="The training code, a Task or a generator: `path/file.py:name`, relative to the study file, or "
        "`module:name`."
    )
    space: Space
    training: Training = Training()
    memory: Memory = Memory()
    devices: Devices = Devices()
    budget: Budget = Budget()
    objectives: Objectives = Objectives()
    baseline: tuple[dict[str, Scalar], ...] = Field(
        (), description="Your current settings, trained first; the front is compared with them."
    )
    warm_start: tuple[StrictStr, ...] = Field(
        (), description="Earlier studies of the same task that the sampler learns from: study files, or names in its storage."
    )
    storage: Annotated[StrictStr, Field(min_length=1)] | None = Field(
        None, description="SQLAlchemy URL of the database with all results; default: a SQLite file next to the study file."
    )
    target: Number | None = Field(
        None,
        description="A value of the metric to reach: the end of a run, and `show` and the report after it, name the fastest "
        "setting that reaches it.",
    )
    sampler: Annotated[StrictStr, AfterValidator(_sampler)] = Field(
        "front",
        description=f"The sampler that proposes trials: {', '.join(SAMPLERS)}, or module:attr of an Optuna sampler; "
        "front is bsearch's own, the others are Optuna's.",
    )
    stopping: Annotated[StoppingRule, BeforeValidator(_stopping, json_schema_input_type=StoppingRule | str)] = Field(
        StoppingRule(), description="Which trials are stopped or paused early: front, pause, none, or `{kind, risk}`."
    )
    confirm: Annotated[Confirm, BeforeValidator(_confirm, json_schema_input_type=Confirm | int)] = Field(
        Confirm(),
        description="Repeat each of the front's members this many times, each with a new seed: a number, or "
        "`{repeats, share}`. The front then shows means with intervals.",
    )
    tracking: Annotated[tuple[Tracker, ...], BeforeValidator(_several, json_schema_input_type=Tracker | list[Tracker])] = Field(
        (),
        description="Experiment trackers that log every trial as a run: mlflow, wandb or tensorboard, or a list of them.",
    )
    cluster: Cluster = Cluster()
    submit: Submit = Submit()

    _folder: Path = PrivateAttr(Path())

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_all(self, ((tuple(key.split(".")), message) for key, message in disagreements(self)))
        return self

    # Sections that must not change, so that old and new trials are comparable.
    IDENTITY: ClassVar = ("space", "training", "memory", "objectives")

    @property
    def can_pause(self) -> bool:
        """Whether trials may be paused and resumed."""
        return self.sampler == "front" and self.cluster.checkpoints is not None and self.training.evaluations > 1

    @property
    def is_limited_by_time(self) -> bool:
        """Whether time limits the study rather than a number of trials: fast trials are then worth more to the sampler."""
        limited = self.budget.hours is not None or self.budget.cost is not None
        return limited or self.stopping.kind == "pause"

    def place_of(self, name: str) -> str:
        """Where a key of the recipe stands: in `space`, if it is searched there, else in `training`."""
        return f"training.{name}" if getattr(self.space, name) is None else f"space.{name}"

    def recipe_values(self, name: str) -> tuple[Any, ...]:
        """Every value that a key of the recipe may have in this study; a continuous domain gives its ends."""
        return tuple(values_of(getattr(self.space, name) or Fixed(value=getattr(self.training, name))))

    @property
    def keeps_beta2_half_life(self) -> bool:
        """Whether Adam's beta2 may keep its half-life in samples."""
        return "half_life" in self.recipe_values("beta2_scaling")

    @property
    def averages_weights(self) -> bool:
        """Whether trials average their weights; all do, or none does."""
        return self.space.ema is not None or self.training.ema is not None

    @property
    def folder(self) -> Path:
        """The study file's folder; relative paths in the study and in its task are resolved against it."""
        return self._folder

    def identity(self) -> dict[str, Any]:
        """The part of the study that must not change between runs; the task's hash is added to it."""
        # Defaults are left out, so that a key added by a later version does not change existing studies.
        parts = {name: getattr(self, name).model_dump(mode="json", exclude_defaults=True) for name in self.IDENTITY}
        for key in ("workers", "pin_memory", "accept_inexact"):  # which change no result
            parts["training"].pop(key, None)
        if self.devices.counts != (1,):
            parts["devices"] = {"per_trial": list(self.devices.counts)}
        return parts

    def with_trials_per_device(self, trials: int) -> Self:
        """The study with `devices.per_trial: auto` resolved to so many trials on each device."""
        share = Fixed(value=1 / trials if trials > 1 else 1)
        return self.model_copy(update={"devices": self.devices.model_copy(update={"per_trial": share})})

    def with_cores(self, cores: int) -> Self:
        """The study with `devices.cpus: auto` resolved."""
        return self.model_copy(update={"devices": self.devices.model_copy(update={"cpus": cores})})

    def changed(self, sections: Mapping[str, Mapping[str, Any]]) -> Self:
        """The study with some keys of some sections changed, validated again.

        Raises:
            StudyFileError: an invalid value.
        """
        update = {}
        for name, values in sections.items():
            section: Section = getattr(self, name)
            try:
                update[name] = type(section).model_validate({**section.model_dump(exclude_unset=True), **values})
            except ValidationError as error:
                faults = [Fault(".".join(map(str, (name, *one["loc"]))), one["msg"]) for one in error.errors()]
                raise StudyFileError(faults) from None
        changed = self.model_copy(update=update)
        changed._folder = self._folder
        return changed

    def domains(self) -> dict[str, Domain]:
        """Every parameter's domain by name, including the number of devices."""
        return {**self.space.domains(), "devices": self.devices.domain}

    def searched(self) -> dict[str, Domain]:
        """The domains with more than one value."""
        return searched_of(self.domains())

    def fixed(self) -> dict[str, Any]:
        """The values of the parameters that are not searched."""
        searched = self.searched()
        return {name: next(values_of(domain)) for name, domain in self.domains().items() if name not in searched}
