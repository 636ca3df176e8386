"""A whole study: its parts, and what follows from several of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from ..domain import (
    Domain,
    Fixed,
    PathText,
    Scalar,
    Section,
    check_all,
    fault,
    one_of,
    searched_of,
    values_of,
)
from ..errors import Fault, StudyFileError, near_miss
from ..readable import UNLIMITED
from ..record import OURS_OF_SCORES
from .cluster import Cluster
from .devices import Devices, Memory
from .goals import Budget, Metric, Objectives, Stopping
from .space import Space
from .submit import Submit
from .training import BETAS, CODE, RECIPE, Training

Tracker = Literal["mlflow", "wandb", "tensorboard"]
Framework = Literal[
    "hf", "lightning", "deepspeed", "accelerate", "pytorch", "trl", "axolotl", "llamafactory", "yaml"
]


def _several(value: Any) -> Any:
    """One, or a list of different ones."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    for tracker in values:
        one_of(tracker, get_args(Tracker))
    return tuple(dict.fromkeys(values))


SAMPLERS = ("front", "tpe", "gp", "nsga2", "qmc", "random")


def _sampler(value: str) -> str:
    if re.fullmatch(r"[\w.]+:[A-Za-z_]\w*", value):
        return value
    if value not in SAMPLERS:
        raise fault(
            f"expected one of {', '.join(SAMPLERS)}, or module:attr; got {value!r}.{near_miss(value, SAMPLERS)}"
        )
    return value


def _study_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise fault(f"expected a name of letters, digits, '.', '_' and '-', got {value!r}")
    return value


def _task(value: str) -> str:
    if not re.fullmatch(CODE, value):
        raise fault(f"expected module:name or path/file.py:name, got {value!r}")
    return value


class StudySpec(Section):
    """One study, as defined in its file; paths are absolute once it has been read."""

    study: Annotated[StrictStr, AfterValidator(_study_name)] = Field(
        description="Name of the study in its storage, and of its results folder."
    )
    task: Annotated[PathText, AfterValidator(_task)] = Field(
        description="The training code, a Task or a generator: `path/file.py:name`, relative to the study file, or "
        "`module:name`, of a module beside it or an installed one."
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
        (),
        description="Earlier studies of the same task that the sampler learns from: study files, or names in its storage; or "
        "runs as `bsearch ask` reads them, such as runs.csv, which are believed as far as they agree with the trials.",
    )
    storage: Annotated[StrictStr, Field(min_length=1)] | None = Field(
        None,
        description="SQLAlchemy URL of the database with all results; default: a SQLite file next to the study file.",
    )
    sampler: Annotated[StrictStr, AfterValidator(_sampler)] = Field(
        "front",
        description=f"The sampler that proposes trials: {', '.join(SAMPLERS)}, or module:attr of an Optuna sampler; "
        "front is bsearch's own, the others are Optuna's.",
    )
    stopping: Stopping = Field(
        "front",
        description="front: stop trials that are unlikely to reach the front at their training time; where `budget.hours` or "
        "`cost` alone limits a study whose `epochs` are one number, trials are paused after about a third of their training "
        "instead, and resumed from their checkpoints where that is worth more than starting a new one. none: every trial "
        "trains its full budget.",
    )
    confirm: StrictInt = Field(
        0,
        ge=0,
        description="Repeat each of the front's members this many times, each with a new seed, in the last 30 % of "
        "`budget.trials`. The front then shows means with intervals.",
    )
    tracking: Annotated[
        tuple[Tracker, ...], BeforeValidator(_several, json_schema_input_type=Tracker | list[Tracker])
    ] = Field(
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
    def pauses(self) -> bool:
        """Whether trials are paused after a third of their training, and resumed where that is worth more than a new one.

        That finds more early on where time alone limits a search over trainings of one length (docs/decisions/0035).
        """
        limited = self.budget.trials == UNLIMITED and not self.budget.keeps_model
        of_one_length = self.space.length not in self.searched()
        can_resume = self.cluster.checkpoints is not None and self.training.evaluations > 1
        return (
            limited and of_one_length and can_resume and self.sampler == "front" and self.stopping == "front"
        )

    @property
    def trains_equally_long(self) -> bool:
        """Whether all trainings take the same seconds, so that the study is about its metric alone."""
        return isinstance(self.space.train_s, Fixed) and self.objectives.speed == "train_s"

    @property
    def is_limited_by_time(self) -> bool:
        """Whether time limits the study rather than a number of trials: fast trials are then worth more to the sampler."""
        budget = self.budget
        return budget.hours is not None or budget.cost is not None or budget.keeps_model

    def recipe_values(self, name: str) -> tuple[Any, ...]:
        """Every value that a key of the recipe may have in this study; a continuous domain gives its ends."""
        return tuple(values_of(getattr(self.space, name) or Fixed(value=getattr(self.training, name))))

    @property
    def keeps_beta2_half_life(self) -> bool:
        """Whether Adam's beta2 may keep its half-life in samples."""
        return self.training.beta2_scaling == "half_life"

    @property
    def folder(self) -> Path:
        """The study file's folder; relative paths in the study and in its task are resolved against it."""
        return self._folder

    def identity(self) -> dict[str, Any]:
        """The part of the study that must not change between runs; the task's hash is added to it."""
        # Defaults are left out, so that a key added by a later version does not change existing studies.
        parts = {
            name: getattr(self, name).model_dump(mode="json", exclude_defaults=True) for name in self.IDENTITY
        }
        metric = self.objectives.metric
        comparable = self.objectives.model_copy(
            update={"metric": Metric(name=metric.name, direction=metric.direction)}
        )
        # A floor changes no trial.
        parts["objectives"] = comparable.model_dump(mode="json", exclude_defaults=True)
        for key in ("workers", "accept_inexact"):  # which change no result
            parts["training"].pop(key, None)
        space = parts["space"]
        # Where trials are tried, not what they are.
        for domain in (
            *space.values(),
            *space.get("rates", {}).values(),
        ):
            if domain is not None:
                domain.pop("prior", None)
        if self.devices.counts != (1,):
            parts["devices"] = {"per_trial": list(self.devices.counts)}
        return parts

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
                update[name] = type(section).model_validate(
                    {**section.model_dump(exclude_unset=True), **values}
                )
            except ValidationError as error:
                faults = [
                    Fault(".".join(map(str, (name, *detail["loc"]))), detail["msg"])
                    for detail in error.errors()
                ]
                raise StudyFileError(faults) from None
        changed = self.model_copy(update=update)
        changed._folder = self._folder
        return changed

    def with_top(self, **values: Any) -> Self:
        """The study with other values of keys that are in no section, which are not validated."""
        changed = self.model_copy(update=values)
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
        return {
            name: next(values_of(domain)) for name, domain in self.domains().items() if name not in searched
        }


# What must agree between the parts of a study: each fault names the key to change, and what it disagrees with.

# A key, dotted, and what was expected there.
Disagreement = tuple[str, str]


def disagreements(study: StudySpec) -> Iterator[Disagreement]:
    """All of a study's; none if its parts go together."""
    parts = (_prices, _objectives, _samplers, _recipe, _sharding, _repeats, _deadlines)
    return chain.from_iterable(part(study) for part in parts)


def _prices(study: StudySpec) -> Iterator[Disagreement]:
    needed = {
        "objectives.speed": study.objectives.speed == "cost",
        "budget.cost": study.budget.cost is not None,
    }
    for key, cost in needed.items():
        if cost and not study.devices.prices:
            yield key, "expected devices.prices with it, got none. Write prices: {A100: 1.8} under devices."


def _objectives(study: StudySpec) -> Iterator[Disagreement]:
    """The objectives with the rest."""
    metric = study.objectives.metric.name
    if metric in OURS_OF_SCORES or metric in study.space.domains():
        yield (
            "objectives.metric",
            f"expected a name that no parameter and none of bsearch's own results has, got {metric}. Rename the metric.",
        )


def _samplers(study: StudySpec) -> Iterator[Disagreement]:
    """What only our own sampler can do."""
    if study.sampler == "front":
        return
    if study.warm_start:
        yield (
            "warm_start",
            f"expected sampler: front, which alone learns from earlier studies; got {study.sampler}",
        )
    for name, domain in study.space.domains().items():
        if getattr(domain, "prior", None) is not None:
            yield (
                f"space.{name}",
                f"expected sampler: front with a prior, which alone uses it; got {study.sampler}. Remove one.",
            )


def _recipe(study: StudySpec) -> Iterator[Disagreement]:
    """Keys of `training` that are also searched in `space`."""
    for name in RECIPE:
        written = "betas" if name in BETAS else name
        default = type(study.training).model_fields[written].default
        if getattr(study.space, name) is not None and getattr(study.training, written) != default:
            yield f"space.{name}", f"expected it or training.{written}, got both. Remove one."
    if study.keeps_beta2_half_life and "adam_sde" in values_of(study.space.rule):
        yield (
            "training.beta2_scaling",
            "expected constant with rule adam_sde, which scales betas itself; got half_life. Remove one.",
        )


def _sharding(study: StudySpec) -> Iterator[Disagreement]:
    counts = study.devices.counts
    if study.devices.sharding == "ddp":
        return
    if len(counts) > 1:
        yield (
            "devices.per_trial",
            f"expected one number with fsdp2, since its memory differs with each; got {', '.join(map(str, counts))}. Write "
            "one of them.",
        )
    if study.training.ema is not None:
        yield (
            "training.ema",
            "expected no average of weights with devices.sharding: fsdp2, whose devices hold a share of them each; got one. "
            "Remove it, or write sharding: ddp.",
        )
    if study.training.compile:
        yield "training.compile", "expected false with devices.sharding: fsdp2, got true. Remove it."
    if max(counts) == 1:
        yield "devices.sharding", "expected ddp for one device per trial, got fsdp2. Write per_trial: 2"
    if "fp16" in study.recipe_values("precision"):
        yield (
            "devices.sharding",
            "expected ddp with fp16, since each device would unscale only a share of gradients; got fsdp2. Write precision: "
            "bf16.",
        )


def _repeats(study: StudySpec) -> Iterator[Disagreement]:
    if study.confirm and not study.confirm < study.budget.trials != UNLIMITED:
        yield (
            "confirm",
            f"expected fewer than budget.trials, which has to be given with it; got {study.confirm}",
        )


def _deadlines(study: StudySpec) -> Iterator[Disagreement]:
    """What goes with a model that is kept, and with a moment to keep it by."""
    budget = study.budget
    if budget.keep is not None and budget.by is None and budget.cost is None and budget.until is None:
        yield (
            "budget.keep",
            "expected budget.by, cost or until with it, which say when to stop; got none. Write by: 2h.",
        )
    if budget.until is not None and budget.hours is not None and budget.by is None:
        yield "budget.hours", f"expected budget.by with until, got hours. Write by: {budget.hours:g}h."
    if budget.by is None:
        return
    if study.objectives.speed != "train_s":
        yield (
            "objectives.speed",
            f"expected train_s with budget.by, which is about time; got {study.objectives.speed}",
        )
    if budget.hours is not None:
        yield (
            "budget.hours",
            f"expected it or budget.by, got both. Remove hours: the study is done by {budget.by}.",
        )
    if study.sampler != "front":
        yield (
            "budget.by",
            f"expected sampler: front, which proposes only trainings that fit; got {study.sampler}",
        )
    if study.confirm:
        yield "confirm", "expected 0 with budget.by, whose time is for the search; got repeats."
