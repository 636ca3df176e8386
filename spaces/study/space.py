"""`space`: the parameters that a study searches or fixes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, model_validator

from ..domain import (
    AnyDomain,
    Choices,
    Domain,
    Fixed,
    Range,
    Section,
    batches,
    check_all,
    count_of,
    epoch_numbers,
    every,
    fault,
    is_number,
    log_by_default,
    numbers,
    numbers_from_zero,
    one_of,
    positive_numbers,
    real,
    values_of,
    whole_numbers,
)
from ..errors import near_miss
from ..learning_rate import RATE_RULES, RULES_FOR_DECAY, RULES_WITH_NOISE_BATCH
from ..schedule import SCHEDULES
from .training import Precision

# What may say how long a training is: one of them in each study.
LENGTHS = ("epochs", "samples", "tokens", "steps", "train_s")
# Of a study that names none.
_USUAL_EPOCHS = 5

# Limit on combinations of cost-changing values; each is profiled before the first trial.
MOST_PROFILES = 16


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
            raise fault(
                "expected auto alone, since it searches the exponent of one rule; got it in a list. Write rule: auto."
            )
        one_of(value, [*RATE_RULES, "auto"])
    return domain


# Real numbers above 0, on a logarithmic scale by default.
_POSITIVE = AfterValidator(positive_numbers), AfterValidator(log_by_default), AfterValidator(real)


class ReferenceRate(Range):
    """The learning rate at the reference batch; the rule scales it to every other batch."""

    at_batch: StrictInt = Field(
        256, ge=1, description="The effective batch, in samples, that the reference rate applies to."
    )


def _reference_rate(value: Any) -> Any:
    """A plain number is a range of one value; `{value, at_batch}` also sets the batch."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"low": value, "high": value}
    if isinstance(value, dict) and "value" in value and not {"low", "high"} & set(value):
        return {
            **{key: item for key, item in value.items() if key != "value"},
            "low": value["value"],
            "high": value["value"],
        }
    return value


def _positive_rate(domain: ReferenceRate) -> ReferenceRate:
    positive_numbers(domain)
    return real(log_by_default(domain))  # type: ignore[return-value]  # the copy keeps its class


def _condition_faults(name: str, domain: Domain, domains: Mapping[str, Domain]) -> Iterator[str]:
    for other, values in domain.when.items():
        if other not in domains or other == name:
            yield f"when: {other}: expected the name of another parameter, got {other!r}.{near_miss(other, domains)}"
        elif domains[other].when:
            yield f"when: {other}: expected a parameter that always applies, got one with a `when` of its own"
        elif outside := [value for value in values if not domains[other].contains(value)]:
            yield (
                f"when: {other}: expected values that {other} may take, {domains[other]}; got {', '.join(map(repr, outside))}"
            )
    if domain.when and getattr(domain, "changes_cost", False):
        yield "expected `when` or changes_cost, got both"


def _cost_faults(costly: Mapping[str, Domain]) -> Iterator[tuple[str, str]]:
    counts = {name: count_of(domain) for name, domain in costly.items()}
    for name, count in counts.items():
        if count is None:
            yield (
                name,
                "expected choices or a range of integers, since changes_cost is true; got a range of floats",
            )
    known = {name: count for name, count in counts.items() if count is not None}
    if (combinations := math.prod(known.values())) > MOST_PROFILES:
        each = ", ".join(f"{count} of {name}" for name, count in known.items())
        yield (
            max(known, key=known.__getitem__),
            f"expected at most {MOST_PROFILES} combinations of values with changes_cost, since each is timed before the first "
            f"trial; got {combinations} ({each}). Leave out values.",
        )


def ratio_name(group: str) -> str:
    """The parameter that is the ratio of a group's learning rate to the trial's."""
    return f"rates.{group}"


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
    noise_batch: Annotated[AnyDomain, *_POSITIVE] | None = Field(
        None,
        description="The batch, in samples, at which gradient noise is as large as the gradient; required by the rules "
        "`saturating` and `surge`.",
    )
    epochs: Annotated[AnyDomain, AfterValidator(epoch_numbers)] | None = Field(
        Fixed(value=_USUAL_EPOCHS),
        description="Epochs, not necessarily an integer; a range extends the fast end of the front.",
    )
    samples: Annotated[AnyDomain, AfterValidator(batches)] | None = Field(
        None, description="Instead of epochs: samples to train on."
    )
    tokens: Annotated[AnyDomain, AfterValidator(batches)] | None = Field(
        None,
        description="Instead of epochs: units to train on, such as tokens, of data that say how many each sample has.",
    )
    steps: Annotated[AnyDomain, AfterValidator(batches)] | None = Field(
        None, description="Instead of epochs: optimizer steps, whatever the batch."
    )
    train_s: Annotated[AnyDomain, *_POSITIVE] | None = Field(
        None,
        description="Instead of epochs: seconds of training by known step times, so that what else runs on the machine changes "
        "no training. A generator, whose steps are not timed, ends at its first measurement after so many by the clock.",
    )
    accumulation: Annotated[AnyDomain, AfterValidator(whole_numbers)] | None = Field(
        None,
        description="Micro-batches per optimizer step on each device, 1 for none; default: the number that fits and has the "
        "shortest known step time.",
    )
    weight_decay: Annotated[AnyDomain, AfterValidator(numbers_from_zero), AfterValidator(real)] = Field(
        Fixed(value=0.0), description="Weight decay of the optimizer."
    )

    rates: dict[Annotated[StrictStr, Field(pattern=r"^[A-Za-z_]\w*$")], Annotated[AnyDomain, *_POSITIVE]] = (
        Field(
            {},
            description="Learning rates of groups of the model's parameters, such as `{embedding: {low: 0.3, high: 30}}`, as "
            'ratios to the trial\'s, so that one rule scales all. The task sets `lr=setup.rate("embedding")`; trials have them '
            "as `rates.embedding`.",
        )
    )
    schedule: Annotated[AnyDomain, AfterValidator(_each_of(SCHEDULES))] | None = Field(
        None, description="Searched instead of `training.schedule`."
    )
    warmup: Annotated[AnyDomain, AfterValidator(_below_one)] | None = Field(
        None,
        description="Searched instead of `training.warmup`: a share of the trial's samples, written 0.05.",
    )
    clip_norm: Annotated[AnyDomain, *_POSITIVE] | None = Field(
        None, description="Searched instead of `training.clip_norm`; on a logarithmic scale by default."
    )
    precision: Annotated[AnyDomain, AfterValidator(_precisions)] | None = Field(
        None, description="Searched instead of `training.precision`; each value is profiled separately."
    )
    beta1: Annotated[AnyDomain, AfterValidator(_below_one)] | None = Field(
        None,
        description="Searched instead of the first of `training.betas`; the task's optimizer must use setup.betas.",
    )
    beta2: Annotated[AnyDomain, AfterValidator(_below_one)] | None = Field(
        None,
        description="Searched instead of the second of `training.betas`; the task's optimizer must use setup.betas.",
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

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, data: Any) -> Any:
        """Leave out the usual epochs where something else says how long a training is."""
        if not isinstance(data, dict):
            return data
        given = {name: data[name] for name in LENGTHS if data.get(name) is not None}
        if len(given) > 1:
            raise fault(
                f"expected one of {', '.join(LENGTHS)}, got {' and '.join(given)}. Remove all but one."
            )
        return {
            **{name: value for name, value in data.items() if name not in LENGTHS},
            **({"epochs": None} if given else {}),
            **given,
        }

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_all(self, (((name,), message) for name, message in self._faults()))
        return self

    def _faults(self) -> Iterator[tuple[str, str]]:
        """Each fault's key and message, where parameters do not go together."""
        for name in type(self).model_fields:
            if name != "precision" and getattr(getattr(self, name), "changes_cost", False):
                yield (
                    name,
                    "expected changes_cost on a parameter of the task or on precision alone, got it here. Remove it.",
                )
            if getattr(getattr(self, name), "when", {}):
                yield name, "expected `when` on a parameter of the task alone, got it here. Remove it."
        domains = self.domains()
        for name, domain in self.task_parameters().items():
            yield from ((name, message) for message in _condition_faults(name, domain, domains))
        may_cost = {*self.task_parameters(), "precision"}
        costly = {name: domain for name, domain in domains.items() if getattr(domain, "changes_cost", False)}
        yield from _cost_faults({name: domain for name, domain in costly.items() if name in may_cost})
        rules = set(values_of(self.rule))
        if "power" in rules and self.exponent is None:
            yield (
                "rule",
                "power: expected space.exponent, got none. Write exponent: 0.5, or {low: 0, high: 1}.",
            )
        for rule in sorted(rules & RULES_WITH_NOISE_BATCH):
            if self.noise_batch is None:
                yield (
                    "rule",
                    f"{rule}: expected space.noise_batch, got none. Write noise_batch: 1000, or {{low: 10, high: 10000}}.",
                )
        for rule in sorted(rules & RULES_FOR_DECAY):
            if not any(values_of(self.weight_decay)):
                yield (
                    "rule",
                    f"{rule}: expected a weight decay to scale, got 0. Write weight_decay: 0.1, or a range.",
                )
            if self.epochs is None:
                yield (
                    "rule",
                    f"{rule}: expected epochs, of which the longest training is the reference; got {self.length}. Write "
                    "epochs, or rule: sqrt.",
                )

    @property
    def reference_batch(self) -> int:
        return self.reference_rate.at_batch

    @property
    def length(self) -> str:
        """The parameter that says how long a training is."""
        return next(name for name in LENGTHS if getattr(self, name) is not None)

    def domains(self) -> dict[str, Domain]:
        """Every parameter's domain by name, task parameters last."""
        named = {name: getattr(self, name) for name in type(self).model_fields if name != "rates"}
        return {
            name: domain for name, domain in {**named, **self.task_parameters()}.items() if domain is not None
        }

    def task_parameters(self) -> dict[str, Domain]:
        """What a task reads in `setup.parameters`, ratios of rates among them."""
        return {
            **{ratio_name(group): domain for group, domain in self.rates.items()},
            **(self.__pydantic_extra__ or {}),
        }
