"""The schema of study files: every key with its meaning and default, as frozen, validated models."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from .domain import (
    AnyDomain,
    Choices,
    Domain,
    Fixed,
    Number,
    Range,
    Scalar,
    Section,
    batches,
    bounds,
    epoch_numbers,
    every,
    fault,
    is_number,
    log_by_default,
    numbers,
    numbers_from_zero,
    positive_numbers,
    real,
    searched_of,
    values_of,
    whole_numbers,
)
from .errors import Fault, StudyFileError, cut
from .laws.memory import bytes_of
from .learning_rate import GROWTH_RULES, RATE_RULES, RULES_FOR_DECAY, RULES_WITH_NOISE_BATCH
from .plan import ActivationCheckpointing, Sharding
from .schedule import BATCH_SCHEDULES, BRANCHING, DECAY, SCHEDULES, halved
from .submit import Submit


def near_miss(word: Any, known: Any, cutoff: float = 0.6) -> str:
    """ " Did you mean 'x'?" if one of the known words is similar, otherwise an empty string.

    Args:
        cutoff: similarity from 0 to 1, as `difflib.SequenceMatcher.ratio` tells it.

    >>> near_miss("sqr", ["linear", "sqrt"])
    " Did you mean 'sqrt'?"
    """
    if len(str(word)) > 100:
        return ""
    matches = difflib.get_close_matches(str(word), [str(name) for name in known], n=1, cutoff=cutoff)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def one_of(value: Any, known: Any) -> Any:
    if value not in known:
        raise fault(f"expected one of {', '.join(known)}; got {value!r}.{near_miss(value, known)}")
    return value


def share(value: Any) -> float:
    """A share >= 0 and < 1, written `0.05` or `5%`.

    >>> share("5%")
    0.05
    """
    number = value
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9.]+\s*%\s*", value):
        number = float(value.strip().rstrip("%")) / 100
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1:
        raise fault(f"expected a share from 0 up to 1, got {value!r}. Write 5% or 0.05.")
    return float(number)


Share = Annotated[float, BeforeValidator(share, json_schema_input_type=float | str)]


# Keys of `training` that may be searched in `space` instead; `betas` by one name each.
BETAS = ("beta1", "beta2")
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Beta2Scaling = Literal["constant", "half_life"]
RECIPE = ("schedule", "batch_schedule", "warmup", "clip_norm", "precision", "beta2_scaling", *BETAS)


def _below_one(domain: Domain) -> Domain:
    return real(every(domain, lambda value: is_number(value) and 0 <= value < 1, "a number >= 0 and < 1"))


def _each_of(known: Collection[str]) -> Callable[[Domain], Domain]:
    """Check that every value of a domain is one of the known words."""

    def check(domain: Domain) -> Domain:
        for value in values_of(domain):
            one_of(value, known)
        return domain

    return check


def _precisions(domain: Domain) -> Domain:
    """Every precision has step times and memory of its own."""
    _each_of(get_args(Precision))(domain)
    return domain.model_copy(update={"changes_cost": True}) if isinstance(domain, Choices) else domain


def _rules(domain: Domain) -> Domain:
    for value in values_of(domain):
        if value == "auto":
            raise fault("expected auto alone, since it searches the exponent of one rule; got it in a list. Write rule: auto.")
        one_of(value, [*RATE_RULES, "auto"])
    return domain


def _schedule(value: Any) -> Any:
    return one_of(value, list(SCHEDULES))


class ReferenceRate(Range):
    """The learning rate at the reference batch; the rule scales it to every other batch."""

    at_batch: StrictInt = Field(256, ge=1, description="The effective batch, in samples, that the reference rate applies to.")


def _reference_rate(value: Any) -> Any:
    """A plain number is a range of one value; `{value, at_batch}` also sets the batch."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"low": value, "high": value}
    if isinstance(value, dict) and "value" in value and not {"low", "high"} & set(value):
        return {**{key: item for key, item in value.items() if key != "value"}, "low": value["value"], "high": value["value"]}
    return value


def _positive_rate(domain: ReferenceRate) -> ReferenceRate:
    positive_numbers(domain)
    return real(log_by_default(domain))  # type: ignore[return-value]  # the copy keeps its class


def _check_condition(name: str, domain: Domain, domains: Mapping[str, Domain]) -> None:
    for other, values in domain.when.items():
        where = f"{name}: when: {other}"
        if other not in domains or other == name:
            raise fault(f"{where}: expected the name of another parameter, got {other!r}.{near_miss(other, domains)}")
        if domains[other].when:
            raise fault(f"{where}: expected a parameter that always applies, got one with a `when` of its own")
        if outside := [value for value in values if not domains[other].contains(value)]:
            raise fault(
                f"{where}: expected values that {other} may take, {domains[other]}; got {', '.join(map(repr, outside))}"
            )
    if domain.when and getattr(domain, "changes_cost", False):
        raise fault(f"{name}: expected `when` or changes_cost, got both")


class Space(Section):
    """The search space. Any other key is a parameter of the task, which reads it as `setup.parameters["name"]`."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, AnyDomain]

    effective_batch: Annotated[AnyDomain, AfterValidator(batches)] = Field(
        description="Samples per optimizer step, over all devices and micro-batches; any integer, on a logarithmic scale."
    )
    reference_rate: Annotated[
        ReferenceRate,
        BeforeValidator(_reference_rate, json_schema_input_type=ReferenceRate | float),
        AfterValidator(_positive_rate),
    ] = Field(description="Learning rate at the batch `at_batch`; the rule scales it to every other batch.")
    rule: Annotated[AnyDomain, AfterValidator(_rules)] = Field(
        Fixed(value="sqrt"),
        description=f"How the learning rate scales with the batch: one or more of {', '.join(RATE_RULES)}; "
        "or auto: power with its exponent searched, from 0 to 1 unless `exponent` says otherwise.",
    )
    exponent: Annotated[AnyDomain, AfterValidator(numbers), AfterValidator(real)] | None = Field(
        None, description="Exponent of the rule `power`: 0 is constant, 0.5 is sqrt, 1 is linear."
    )
    timescale_exponent: Annotated[AnyDomain, AfterValidator(numbers), AfterValidator(real)] | None = Field(
        None,
        description="Exponent m of the rule `adamw_tau`, whose timescale tau scales as samples**m: 0 keeps it constant; -0.527 "
        "was fitted to language-model pre-training.",
    )
    noise_batch: (
        Annotated[AnyDomain, AfterValidator(positive_numbers), AfterValidator(log_by_default), AfterValidator(real)] | None
    ) = Field(
        None,
        description="The gradient noise scale: the batch, in samples, at which gradient noise is as large as the gradient; "
        "required by the rules `saturating` and `surge`.",
    )
    epochs: Annotated[AnyDomain, AfterValidator(epoch_numbers)] = Field(
        Fixed(value=5), description="Epochs, not necessarily an integer; a range extends the fast end of the front."
    )
    accumulation: Annotated[AnyDomain, AfterValidator(whole_numbers)] | None = Field(
        None,
        description="Micro-batches per optimizer step on each device, 1 for none; default: the number that fits and has the "
        "shortest known step time.",
    )
    weight_decay: Annotated[AnyDomain, AfterValidator(numbers_from_zero), AfterValidator(real)] = Field(
        Fixed(value=0.0), description="Weight decay of the optimizer."
    )

    schedule: Annotated[AnyDomain, AfterValidator(_each_of(SCHEDULES))] | None = Field(
        None, description="Searched instead of `training.schedule`."
    )
    batch_schedule: Annotated[AnyDomain, AfterValidator(_each_of(BATCH_SCHEDULES))] | None = Field(
        None, description="Searched instead of `training.batch_schedule`."
    )
    warmup: Annotated[AnyDomain, AfterValidator(_below_one)] | None = Field(
        None, description="Searched instead of `training.warmup`: a share of the trial's samples, written 0.05."
    )
    clip_norm: (
        Annotated[AnyDomain, AfterValidator(positive_numbers), AfterValidator(log_by_default), AfterValidator(real)] | None
    ) = Field(None, description="Searched instead of `training.clip_norm`; on a logarithmic scale by default.")
    precision: Annotated[AnyDomain, AfterValidator(_precisions)] | None = Field(
        None, description="Searched instead of `training.precision`; each value is profiled separately."
    )
    beta2_scaling: Annotated[AnyDomain, AfterValidator(_each_of(get_args(Beta2Scaling)))] | None = Field(
        None, description="Searched instead of `training.beta2_scaling`."
    )
    beta1: Annotated[AnyDomain, AfterValidator(_below_one)] | None = Field(
        None, description="Searched instead of the first of `training.betas`; the task's optimizer must use setup.betas."
    )
    beta2: Annotated[AnyDomain, AfterValidator(_below_one)] | None = Field(
        None, description="Searched instead of the second of `training.betas`; the task's optimizer must use setup.betas."
    )

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, data: Any) -> Any:
        """Expand `rule: auto`, so that it is the same study as when written out."""
        rule = data.get("rule") if isinstance(data, dict) else None
        written = rule.get("value", rule.get("choices")) if isinstance(rule, dict) else rule
        if written not in ("auto", ["auto"]):
            return data
        exponent = data.get("exponent", {"low": 0.0, "high": 1.0})
        if not isinstance(exponent, Mapping | Section | list):
            raise fault(
                f"rule auto: expected a range of exponents to search, got {exponent!r}. For one exponent write rule: power."
            )
        return {**data, "rule": "power", "exponent": exponent}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in type(self).model_fields:
            if name != "precision" and getattr(getattr(self, name), "changes_cost", False):
                raise fault(f"{name}: expected changes_cost on a parameter of the task or on precision alone. Remove it.")
            if getattr(getattr(self, name), "when", {}):
                raise fault(f"{name}: expected `when` on a parameter of the task alone. Remove it.")
        domains = self.domains()
        for name, domain in self.task_parameters().items():
            _check_condition(name, domain, domains)
        rules = set(values_of(self.rule))
        if "power" in rules and self.exponent is None:
            raise fault("rule power: expected space.exponent, got none. Write exponent: 0.5, or {low: 0, high: 1}.")
        for rule in sorted(rules & RULES_WITH_NOISE_BATCH):
            if self.noise_batch is None:
                raise fault(
                    f"rule {rule}: expected space.noise_batch, got none. Write noise_batch: 1000, or {{low: 10, high: 10000}}."
                )
        for rule in sorted(rules & RULES_FOR_DECAY):
            if not any(values_of(self.weight_decay)):
                raise fault(f"rule {rule}: expected a weight decay to scale, got 0. Write weight_decay: 0.1, or a range.")
        return self

    @property
    def reference_batch(self) -> int:
        return self.reference_rate.at_batch

    def domains(self) -> dict[str, Domain]:
        """Every parameter's domain by name, task parameters last."""
        named = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: domain for name, domain in {**named, **(self.__pydantic_extra__ or {})}.items() if domain is not None}

    def task_parameters(self) -> dict[str, Domain]:
        return dict(self.__pydantic_extra__ or {})


class Training(Section):
    """Settings that all trials train with."""

    precision: Precision = Field(
        "fp32",
        description="Precision of the forward pass; tf32 (NVIDIA GPUs from 2020 on) rounds the factors of matrix products and "
        "convolutions, fp32 does not; bf16 and fp16 use torch's autocast, fp16 with loss scaling.",
    )
    schedule: Annotated[StrictStr, AfterValidator(_schedule)] = Field(
        "cosine",
        description=f"Learning-rate schedule after warm-up: {', '.join(SCHEDULES)}. wsd (warm-up, stable, decay) stays at the "
        f"peak until the last {DECAY:.0%}, over which it falls linearly to 0.",
    )
    batch_schedule: Literal["constant", "seesaw"] = Field(
        "constant",
        description="seesaw: the batch doubles, up to three times, each time the schedule has halved the rate, and the "
        "rate is raised again as the rule (linear or sqrt) says for the larger batch: fewer steps for the same samples.",
    )
    warmup: Share = Field(
        0.05,
        description="Share of the trial's samples over which the learning rate rises linearly from 0; with `branches`, a share "
        "of the shortest trial's samples: every trial then warms up for that many.",
    )
    branches: StrictBool = Field(
        False,
        description="Each training also gives the results of shorter ones, of half its epochs, a quarter and so on: with wsd "
        "it branches off and decays there, with constant it is evaluated there. They appear as trials with fewer `epochs`, "
        "and together cost about a fifth of the training's samples at most.",
    )
    clip_norm: Number | None = Field(None, gt=0, description="Maximum norm of the whole step's gradient; null: no clipping.")
    evaluations: StrictInt = Field(
        10,
        ge=1,
        le=10_000,
        description="Evaluations per trial, at equal fractions of its samples; the last one is the trial's result.",
    )
    seed: StrictInt = Field(
        0,
        ge=0,
        lt=2**63,
        description="Seed of every trial's initial weights, shuffling and augmentation, and of the sampler.",
    )
    workers: StrictInt = Field(
        0, ge=0, description="Data-loading processes per device; 0: the training process loads the data."
    )
    pin_memory: StrictBool = Field(True, description="Copy batches to a GPU from page-locked memory.")
    compile: StrictBool = Field(False, description="Compile the model with torch.compile.")
    channels_last: StrictBool = Field(
        False, description="Store images in channels-last format; convolutions in bf16 and fp16 are often faster that way."
    )
    cudnn_benchmark: StrictBool = Field(False, description="Let cuDNN benchmark its kernels for every new micro-batch size.")
    sync_batch_norm: StrictBool = Field(
        False, description="Synchronise BatchNorm statistics over all of a trial's GPUs, instead of computing them on each."
    )
    betas: tuple[Number, Number] = Field(
        (0.9, 0.999), description="Adam's betas at the reference batch; the rule `adam_sde` scales them with the batch."
    )
    beta2_scaling: Beta2Scaling = Field(
        "constant",
        description="half_life: Adam's beta2 is scaled so that its half-life in samples is the same at every batch, with any "
        "rule but `adam_sde`, which scales the betas itself.",
    )
    eps: Number = Field(
        1e-8, gt=0, description="Adam's epsilon at the reference batch; the rule `adam_sde` scales it with the batch."
    )
    samples: StrictInt | None = Field(
        None, ge=1, description="Samples in the training set; only required if the training code is a loop of your own."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise fault(f"betas: expected two numbers >= 0 and < 1, got {list(self.betas)}")
        return self


def _checkpointing(value: Any) -> Any:
    """One or several, from the least to the most."""
    several = list(value) if isinstance(value, list | tuple) else [value]
    order = get_args(ActivationCheckpointing)
    if not several or any(one not in order for one in several):
        raise fault(f"expected none, selective or full, or a list of them, got {cut(repr(value), 60)}.")
    return tuple(one for one in order if one in several)


def _memory_limit(value: Any) -> Any:
    """Bytes as an integer, a share as a float, or `device`; written 10GiB, 90% or device."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value is None or value == "device" or whole or (isinstance(value, float) and 0 < value <= 1):
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            percent = value.strip().removesuffix("%")
            number = float(percent) / 100 if percent != value.strip() else bytes_of(value)
            if 0 < number <= 1 or (isinstance(number, int) and number > 0):
                return number
    raise fault(f"expected bytes such as 10GiB, a share of the device such as 90%, or device; got {value!r}")


class Memory(Section):
    """Memory limits of a device."""

    limit: Annotated[StrictInt | StrictFloat | StrictStr | None, BeforeValidator(_memory_limit)] = Field(
        None,
        description="Memory that one device may use: bytes such as 10GiB, a share of the device such as 90%, or device for all "
        "of it; default: all of a GPU, no limit on a CPU.",
    )
    headroom: Share = Field(0.05, description="Share of the limit that every plan keeps free.")
    activation_checkpointing: Annotated[tuple[ActivationCheckpointing, ...], BeforeValidator(_checkpointing)] = Field(
        ("none", "selective", "full"),
        min_length=1,
        description="Modes that the planner may choose from, for tasks with checkpoint_blocks and for models of transformers. "
        "none: store all activations; selective: recompute all but the outputs of matrix products, convolutions and attention; "
        "full: store only each block's input.",
    )
    largest_micro_batch: StrictInt | None = Field(
        None, ge=1, description="Maximum samples per micro-batch on one device; larger batches accumulate."
    )

    def limit_bytes(self, device_bytes: int, kind: str) -> int | None:
        """The limit in bytes on a device with `device_bytes`, never more than a GPU has; None: no limit."""
        match self.limit:
            case None:
                return device_bytes if kind == "gpu" else None
            case "device":
                return device_bytes
            case float():
                return int(self.limit * device_bytes)
            case int():
                return min(self.limit, device_bytes) if kind == "gpu" else self.limit
        raise AssertionError(self.limit)


def _device_numbers(domain: Domain) -> Domain:
    """Whole numbers, or one over a whole number: a share of a GPU; or auto."""
    if domain == _AUTO_SHARE:
        return domain
    if isinstance(domain, Range):
        raise fault("expected a number or a list of numbers, got a range. Write [1, 2, 4].")
    share = domain.value if isinstance(domain, Fixed) else None
    if isinstance(share, str):
        raise fault(f"expected a number of devices, a share of a GPU such as 0.5, or auto; got {cut(repr(share), 60)}")
    if not isinstance(share, float) or share.is_integer():
        return whole_numbers(domain)
    if 0 < share < 1 and abs(1 / share - round(1 / share)) < _SHARE_ERROR:
        return Fixed(value=1 / round(1 / share))
    raise fault(f"expected a whole number of devices, or a share of a GPU such as 0.5, 0.25 or 0.2, got {share:g}")


_AUTO_SHARE = Fixed(value="auto")
# How far one over a share may be from a whole number: 0.33 is a third.
_SHARE_ERROR = 0.05


_WORDS = re.compile(r"[a-z0-9]+", re.IGNORECASE)


def _price_names(prices: dict[str, float]) -> dict[str, float]:
    for name in prices:
        if not _WORDS.search(name):
            raise fault(f"expected a device's name of letters and digits, such as A100, got {name!r}")
    return prices


# Measures of speed.
Speed = Literal["train_s", "device_s", "cost", "energy_j"]


class Devices(Section):
    """Devices that one trial runs on."""

    per_trial: Annotated[AnyDomain, AfterValidator(_device_numbers)] = Field(
        Fixed(value=1),
        description="Data-parallel devices per trial: a number, or a list of numbers to search; or the share of a GPU that a "
        "trial gets, such as 0.5 for two trials on each; auto: as many trials on each GPU as fit in memory and increase "
        "the total samples per second, measured before the first trial.",
    )
    sharding: Sharding = Field(
        "ddp",
        description="ddp: every device of a trial holds the whole optimizer state; zero1: it is sharded across them (ZeRO "
        "stage 1), which saves memory and costs a broadcast of the updated parameters each step; fsdp2: parameters and "
        "gradients too; parameters are gathered block by block for use. Results change by rounding at most.",
    )
    kind: Literal["auto", "cpu", "gpu"] = Field("auto", description="What trials train on; auto: GPUs if there are any.")
    cpus: Annotated[StrictInt, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="CPU cores for each of a trial's devices; torch uses as many threads. auto: 1 on a CPU; for a GPU, its "
        "share of its machine's cores.",
    )
    accelerator_type: StrictStr | None = Field(
        None, min_length=1, description="Use only devices of this kind, by Ray's name for it, such as A100; default: any."
    )
    time_on: StrictStr | None = Field(
        None,
        min_length=1,
        description="With several kinds of devices, the one whose training times the front shows; default: the most common.",
    )

    prices: Annotated[dict[StrictStr, Annotated[Number, Field(gt=0)]], AfterValidator(_price_names)] = Field(
        {},
        description="Price per device-hour, by words in the device's name, in any one currency: {H100: 2.5, A100 80GB: 1.8}; "
        "`gpu` and `cpu` are the prices of all other kinds. A device on a CPU has `cpus` cores.",
    )

    def price_of(self, name: str, kind: Literal["cpu", "gpu"]) -> float | None:
        """The price for an hour of what a trial has of a device, all of it or a share; None if unknown.

        Of several that fit its name, the one that says most about it.

        >>> devices = Devices(prices={"A100": 1.2, "A100 80GB": 1.8, "gpu": 1})
        >>> [devices.price_of(name, "gpu") for name in ("NVIDIA A100-SXM4-80GB", "A100", "H100")]
        [1.8, 1.2, 1.0]
        """
        words = set(_WORDS.findall(name.lower())) | {kind}
        named = {key: set(_WORDS.findall(key.lower())) for key in self.prices}
        fitting = [key for key, of_key in named.items() if of_key <= words]
        if not fitting:
            return None
        best = max(fitting, key=lambda key: (named[key] != {kind}, len(named[key])))
        return float(self.prices[best]) * self.share

    @property
    def counts(self) -> tuple[int, ...]:
        """The possible numbers of devices per trial, ascending."""
        return (1,) if self.auto_share else tuple(sorted({int(value) or 1 for value in values_of(self.per_trial)}))

    @property
    def auto_share(self) -> bool:
        """Whether the number of trials on a GPU is still to be measured."""
        return self.per_trial == _AUTO_SHARE

    @property
    def share(self) -> float:
        """The share of a GPU that a trial gets; 1 where it has GPUs of its own, or as long as its share is not known.

        >>> Devices.model_validate({"per_trial": 0.5}).share, Devices.model_validate({"per_trial": [1, 2]}).share
        (0.5, 1.0)
        """
        return 1.0 if self.auto_share else min(float(next(iter(values_of(self.per_trial)))), 1.0)

    @property
    def domain(self) -> Domain:
        """The numbers of devices that a trial may have."""
        return self.per_trial if self.share == 1 and not self.auto_share else Fixed(value=1)

    def cores(self, kind: Literal["cpu", "gpu"], cores_per_gpu: int = 1) -> int:
        """Cores for each device, with auto resolved.

        >>> Devices().cores("gpu", 12), Devices().cores("cpu", 12), Devices(cpus=2).cores("gpu", 12)
        (12, 1, 2)
        """
        if self.cpus != "auto":
            return self.cpus
        return max(int(cores_per_gpu * self.share), 1) if kind == "gpu" else 1

    def check_share(self, kind: Literal["cpu", "gpu"]) -> None:
        """A share is one of a GPU.

        Raises:
            StudyFileError: a share of a CPU.
        """
        if self.share < 1 and kind == "cpu":
            message = f"expected a whole number of devices, since trials run on CPUs here, got {self.share:g}. Write 1."
            raise StudyFileError(Fault("devices.per_trial", message))

    def kind_with(self, gpus: float) -> Literal["cpu", "gpu"]:
        """The kind, with auto resolved by the number of GPUs available."""
        return self.kind if self.kind != "auto" else "gpu" if gpus else "cpu"


class Budget(Section):
    """When the study ends: at whichever limit is reached first."""

    trials: StrictInt = Field(
        20,
        ge=1,
        description="Trials to finish: complete, stopped and diverged ones count, failed and interrupted ones do not. A paused "
        "trial counts as the share of its training that it has completed. With `training.branches` a trial counts as its "
        "samples divided by those of the longest training; a branch counts only what it trains itself.",
    )
    hours: Number | None = Field(None, gt=0, description="Time limit in hours, summed over restarts; null: no limit.")
    cost: Number | None = Field(
        None,
        gt=0,
        description="Limit on what devices cost by `devices.prices` while trials hold them, summed over restarts; null: no "
        "limit.",
    )
    until_worth: Annotated[Share, Field(gt=0)] | None = Field(
        None,
        description="Start no more trials once another ten are expected to add less than this share to the front's "
        "hypervolume (log seconds against the metric), such as 1%; null: never. Repeats under `confirm` are still trained.",
    )
    profile_s: Number = Field(
        20,
        ge=0,
        description="Seconds of step timing before the first trial; 0: training times are not known in advance, and each "
        "trial is timed by the clock.",
    )


class Metric(Section):
    """A metric that the training code reports."""

    name: StrictStr = Field(
        "accuracy", min_length=1, description="Name of the metric, as the task or the training loop reports it."
    )
    direction: Literal["minimize", "maximize"] = Field("maximize", description="Whether lower or higher is better.")

    @property
    def sign(self) -> float:
        """The factor that makes higher better: 1, or -1 for a metric to minimize."""
        return 1.0 if self.direction == "maximize" else -1.0


def _metric(value: Any) -> Any:
    """A bare name is a metric to maximize, unless it sounds like one to minimize."""
    if not isinstance(value, str):
        return value
    if any(word in value.lower() for word in ("loss", "error", "perplexity")):
        raise fault(f"expected a direction with {value!r}. Write {{name: {value}, direction: minimize}}.")
    return {"name": value}


class Objectives(Section):
    """The objectives of the front: speed and a metric."""

    speed: Speed = Field(
        "train_s",
        description="Measure of speed: `train_s`, seconds of training; `device_s`, those seconds times the trial's devices, so "
        "that additional devices are not free; `cost`, device-seconds at the price under `devices.prices`; or `energy_j`, the "
        "joules that the trial's devices use in training.",
    )
    also: Speed | None = Field(
        None,
        description="Another of these measures as a third objective: the front then has every trial that no other beats in "
        "both measures and the metric.",
    )
    metric: Annotated[Metric, BeforeValidator(_metric, json_schema_input_type=Metric | str)] = Field(
        Metric(), description="Measure of quality: the name of a metric to maximize, or `{name, direction}`."
    )

    @property
    def speeds(self) -> tuple[Speed, ...]:
        """The measures of what training takes, one or two."""
        return (self.speed,) if self.also is None else (self.speed, self.also)

    def with_also(self, also: Speed | None) -> Objectives:
        """These objectives with another second measure; None: as they are."""
        return self if also is None else self.model_copy(update={"also": also})

    @property
    def directions(self) -> list[Literal["minimize", "maximize"]]:
        """Optuna's direction of each objective, in the order of `names`."""
        also: list[Literal["minimize", "maximize"]] = ["minimize"] if self.also else []
        return ["minimize", self.metric.direction, *also]

    @property
    def names(self) -> list[str]:
        """The objectives as Optuna stores them: speed, the metric, and the second measure of speed."""
        return [self.speed, self.metric.name, *([self.also] if self.also else [])]


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


STOPPINGS = ("front", "halving", "pause", "none")


class StoppingRule(Section):
    """Which trials are stopped or paused early."""

    kind: Annotated[StrictStr, AfterValidator(lambda value: one_of(value, STOPPINGS))] = Field(
        "front",
        description="front: stop trials that are unlikely to reach the front at their training time; halving: asynchronous "
        "successive halving by Pareto rank; pause: trials are paused after about a third of their training, and resumed from "
        "their checkpoints where that is worth more than starting a new one; none: every trial trains its full budget.",
    )
    risk: Share = Field(
        0.05, description="For `front`: of the trials that would have improved the front, the share that may be stopped."
    )


def _stopping(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class Confirm(Section):
    """Repeating the front's members with other seeds, so that a lucky seed is not mistaken for a good setting."""

    repeats: StrictInt = Field(
        0, ge=0, description="Additional runs of each of the front's members, with other seeds; they count as trials."
    )
    share: Share = Field(0.3, description="Final share of budget.trials, reserved for these runs.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.repeats == 0 and self.share != type(self).model_fields["share"].default:
            raise fault("expected repeats along with share, got none. Write {repeats: 2, share: 30%}.")
        if self.repeats and not self.share:
            raise fault("expected a share above 0 along with repeats, got 0. Write share: 30%, or repeats: 0.")
        return self

    def reserved(self, trials: int) -> int:
        """Number of trials in the budget reserved for repeats."""
        return round(self.share * trials) if self.repeats else 0


def _confirm(value: Any) -> Any:
    return {"repeats": value} if isinstance(value, int) and not isinstance(value, bool) else value


Tracker = Literal["mlflow", "wandb", "tensorboard"]


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
    if not re.fullmatch(r"[^:]+:[A-Za-z_]\w*", value):
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
        StoppingRule(), description="Which trials are stopped or paused early: front, halving, pause, none, or `{kind, risk}`."
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
        needs_price = {
            "objectives.speed": self.objectives.speed == "cost",
            "objectives.also": self.objectives.also == "cost",
            "budget.cost": self.budget.cost is not None,
        }
        for where, needed in needs_price.items():
            if needed and not self.devices.prices:
                raise fault(f"{where}: expected devices.prices with it, got none. Write prices: {{A100: 1.8}} under devices.")
        name = self.objectives.metric.name
        if self.devices.prices and name in ("cost", "price", "spent"):
            raise fault(f"objectives.metric: {name!r} is what devices.prices give in the results. Rename the metric.")
        if "energy_j" in self.objectives.speeds and name in ("energy_j", "watts", "measured_energy_j"):
            raise fault(f"objectives.metric: {name!r} is what energy gives in the results. Rename the metric.")
        self._check_speeds()
        if self.budget.until_worth is not None and self.sampler != "front":
            raise fault(
                f"budget.until_worth: expected sampler: front, whose models say what more trials would add; got {self.sampler}"
            )
        if self.warm_start and self.sampler != "front":
            raise fault(f"warm_start: expected sampler: front, which alone learns from earlier studies; got {self.sampler}")
        if self.stopping.kind == "pause":
            if self.sampler != "front":
                raise fault(
                    f"stopping: expected sampler: front with pause, the only one that resumes trials; got {self.sampler}"
                )
            if self.cluster.checkpoints is None:
                raise fault(
                    "stopping: expected cluster.checkpoints with pause, from which trials go on; got null. Name a folder."
                )
            if self.training.evaluations == 1:
                raise fault(
                    "training.evaluations: expected 2 or more with stopping: pause, which needs one before the end; got 1"
                )
        if self.training.branches:
            self._check_branches()
        for name in RECIPE:
            written = "betas" if name in BETAS else name
            default = type(self.training).model_fields[written].default
            if getattr(self.space, name) is not None and getattr(self.training, written) != default:
                raise fault(f"space.{name}: expected it or training.{written}, got both. Remove one.")
        if self.keeps_beta2_half_life and "adam_sde" in values_of(self.space.rule):
            where = self.place_of("beta2_scaling")
            raise fault(f"{where}: expected constant with rule adam_sde, which scales betas itself; got half_life. Remove one.")
        if self.grows_batches:
            where = self.place_of("batch_schedule")
            if not self.budget.profile_s:
                raise fault(
                    f"{where}: expected constant with budget.profile_s: 0, since the time of a training whose batch grows "
                    "cannot be extrapolated; got seesaw. Remove profile_s."
                )
            if "constant" in self.recipe_values("schedule"):
                raise fault(
                    f"{where}: expected constant with schedule: constant, whose rate never falls; got seesaw. Write "
                    "schedule: cosine."
                )
            unknown = [rule for rule in values_of(self.space.rule) if rule not in GROWTH_RULES]
            if unknown:
                raise fault(
                    f"{where}: expected constant with rule {unknown[0]}, which does not say how the rate follows a batch that "
                    "grows; got seesaw. Write rule: sqrt (Adam) or rule: linear (SGD)."
                )
        if self.devices.sharding == "fsdp2":
            if len(self.devices.counts) > 1:
                raise fault(
                    "devices.per_trial: expected one number with fsdp2, since its memory differs with each; got "
                    f"{', '.join(map(str, self.devices.counts))}. Write one of them."
                )
            for name in ("compile", "channels_last"):
                if getattr(self.training, name):
                    raise fault(f"training.{name}: expected false with devices.sharding: fsdp2, got true. Remove it.")
        if self.devices.sharding != "ddp":
            if max(self.devices.counts) == 1:
                raise fault(
                    f"devices.sharding: expected ddp for one device per trial, got {self.devices.sharding}. Write per_trial: 2"
                )
            if "fp16" in self.recipe_values("precision"):
                raise fault(
                    "devices.sharding: expected ddp with fp16, since each device would unscale only a share of gradients; got "
                    f"{self.devices.sharding}. Write precision: bf16."
                )
        if self.confirm.repeats >= self.budget.trials:
            trials = self.budget.trials
            raise fault(f"confirm.repeats: expected fewer than budget.trials, {trials}; got {self.confirm.repeats}")
        return self

    def _check_speeds(self) -> None:
        """Raise where the measures of what training takes do not go together, or with something else of the study."""
        speeds, also, stopping = self.objectives.speeds, self.objectives.also, self.stopping.kind
        if also == self.objectives.speed:
            raise fault(f"objectives.also: expected another measure than objectives.speed, got {also} twice. Remove also.")
        same = {"train_s", "device_s", "cost"}
        if also and {*speeds} <= same and (len(self.devices.counts) == 1 or {*speeds} == same - {"train_s"}):
            raise fault(
                f"objectives.also: expected a measure that is no fixed multiple of {self.objectives.speed}, got {also}, which "
                f"{'always is' if len(self.devices.counts) > 1 else 'is one if all trials have as many devices'}. Remove also."
            )
        if also and stopping not in ("front", "none"):
            raise fault(
                f"stopping: expected front or none with objectives.also, the rules for three objectives; got {stopping}. Write "
                "stopping: front."
            )
        if also and self.training.branches:
            raise fault("training.branches: expected two objectives with it, got three. Remove objectives.also, or branches.")
        if "energy_j" in speeds and self.devices.share < 1:
            raise fault(
                "objectives: expected whole devices with energy_j, since a GPU does not say how much each trial uses; "
                f"got devices.per_trial: {self.devices.share:g}. Write per_trial: 1."
            )

    def _check_branches(self) -> None:
        """Raise where the beginning of a training depends on its length, or trainings do not differ in it."""
        depending = [name for name in self.recipe_values("schedule") if name not in BRANCHING]
        if depending:
            raise fault(
                f"{self.place_of('schedule')}: expected wsd or constant with training.branches, the schedules whose early "
                f"learning rate does not depend on the length of training; got {depending[0]}. Write schedule: wsd."
            )
        epochs = self.space.epochs
        if not isinstance(epochs, Range) or epochs.high < 2 * epochs.low:
            raise fault(
                "space.epochs: expected a range whose high is at least twice its low with training.branches, which are shorter "
                f"trainings of that range; got {epochs}. Write epochs: {{low: 2, high: 16, log: true}}."
            )
        if self.stopping.kind != "none":
            raise fault(
                "stopping: expected none with training.branches, since a long training with a poor result may have good "
                f"branches; got {self.stopping.kind}. Write stopping: none."
            )
        if "adamw_tau" in values_of(self.space.rule):
            raise fault(
                "space.rule: expected another rule than adamw_tau with training.branches, since its weight decay depends on "
                "how long the training is. Write rule: sqrt, or remove training.branches."
            )
        if self.grows_batches:
            raise fault(
                f"{self.place_of('batch_schedule')}: expected constant with training.branches, since growth depends on how "
                "long the training is; got seesaw. Remove it, or training.branches."
            )
        if self.devices.sharding != "ddp":
            raise fault(
                "devices.sharding: expected ddp with training.branches, the only mode that supports them so far; got "
                f"{self.devices.sharding}. Write ddp."
            )

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

    def shorter_epochs(self, epochs: float) -> tuple[float, ...]:
        """The epochs of a training's branches, most first."""
        domain, found = self.space.epochs, []
        if self.training.branches and isinstance(domain, Range):
            step = domain.step or (1 if domain.whole else None)
            while domain.contains(epochs := halved(epochs, domain.low, step)):
                found.append(int(epochs) if domain.whole else epochs)
        return tuple(found)

    def budget_share(self, epochs: float) -> float:
        """What a trial of so many epochs counts towards `budget.trials`: 1, or with branches the share of the longest."""
        return float(epochs) / float(bounds(self.space.epochs)[1]) if self.training.branches else 1.0

    def place_of(self, name: str) -> str:
        """Where a key of the recipe stands: in `space`, if it is searched there, else in `training`."""
        return f"training.{name}" if getattr(self.space, name) is None else f"space.{name}"

    def recipe_values(self, name: str) -> tuple[Any, ...]:
        """Every value that a key of the recipe may have in this study; a continuous domain gives its ends."""
        return tuple(values_of(getattr(self.space, name) or Fixed(value=getattr(self.training, name))))

    @property
    def grows_batches(self) -> bool:
        """Whether the batch may grow in the course of a training."""
        return "seesaw" in self.recipe_values("batch_schedule")

    @property
    def keeps_beta2_half_life(self) -> bool:
        """Whether Adam's beta2 may keep its half-life in samples."""
        return "half_life" in self.recipe_values("beta2_scaling")

    @property
    def folder(self) -> Path:
        """The study file's folder; relative paths in the study and in its task are resolved against it."""
        return self._folder

    def identity(self) -> dict[str, Any]:
        """The part of the study that must not change between runs; the task's hash is added to it."""
        # Defaults are left out, so that a key added by a later version does not change existing studies.
        parts = {name: getattr(self, name).model_dump(mode="json", exclude_defaults=True) for name in self.IDENTITY}
        for key in ("workers", "pin_memory"):
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
