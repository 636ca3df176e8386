"""Domains: the values that a parameter may take, as written in the study file.

In YAML a domain is a plain value (fixed), a list or `{choices: [...]}`, or `{low, high}` with an optional
`log`. Integer `low` and `high` mean integers only, unless the parameter is real-valued by nature.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from .errors import near_miss

_CHANGES_COST = (
    "The parameter changes the time or the memory of a step, so each of its values is profiled separately."
)
_WHEN = (
    "Values of other parameters with which this one applies, such as `{optimizer: sgd}` or `{optimizer: [sgd, nesterov]}`; in "
    "other trials it has no value."
)
_MOST_LISTED = 20  # values of a long list that a message shows
# How far the best value of a range may lie from the expected one, if its author does not say.
_USUAL_FACTOR, _USUAL_SHARE = 10.0, 0.25


def fault(message: str) -> PydanticCustomError:
    """A validation error with a message of our own; `study.file` adds file, line, key and value."""
    return PydanticCustomError("bsearch", "{message}", {"message": message})


def check_all(section: BaseModel, faults: Iterable[tuple[tuple[str, ...], str]]) -> None:
    """Raise a section's faults all at once, each the path of a key in it and what was expected there.

    Raises:
        ValidationError: there are any.
    """
    details = [InitErrorDetails(type=fault(message), loc=path, input=None) for path, message in faults]
    if details:
        raise ValidationError.from_exception_data(type(section).__name__, details)


# No rate, size or time lies beyond these, and their squares and quotients are numbers too.
_SMALLEST, _LARGEST = 1e-100, 1e100
# More than any grid has.
_MOST_STEPS = 1e12


def _plain(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise fault("expected a number, a string, true or false")
    if isinstance(value, float) and not math.isfinite(value):
        raise fault(f"expected a finite number, since databases and JSON hold no other; got {value}")
    return value


Scalar = Annotated[StrictBool | StrictInt | StrictFloat | StrictStr, BeforeValidator(_plain)]


class Section(BaseModel):
    """Part of a study file: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise fault(f"expected a non-empty string, got {value!r}")
    return value


# Text with a path in it: the names of files need not be UTF-8, as pydantic's strings must.
PathText = Annotated[str, PlainValidator(_path, json_schema_input_type=Annotated[str, Field(min_length=1)])]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise fault("expected a finite number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise fault("expected a number")
    if isinstance(value, float) and value and not _SMALLEST <= abs(value) <= _LARGEST:
        raise fault(f"expected 0, or a magnitude from {_SMALLEST:g} to {_LARGEST:g}")
    return value


Number = Annotated[StrictInt | StrictFloat, BeforeValidator(_finite)]


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


When = dict[
    StrictStr,
    Annotated[tuple[Scalar, ...], BeforeValidator(_listed, json_schema_input_type=Scalar | list[Scalar])],
]


def _prior(value: Any) -> Any:
    """A plain number is the best value."""
    ends = value if isinstance(value, list | tuple) else [value] * 2
    if value is not None and not (len(ends) == 2 and all(map(is_number, ends))):
        raise fault(f"expected a number, or two such as [1e-4, 1e-3]; got {value!r}")
    return value


class Range(Section):
    """Every number from `low` to `high`, inclusive."""

    low: Number = Field(description="The smallest value that may be tried.")
    high: Number = Field(
        description="The largest value that may be tried; if `low` and `high` are integers, only integers are."
    )
    log: StrictBool | None = Field(
        None,
        description="Search on a logarithmic scale; default: true for the batch and for rates, otherwise false.",
    )
    step: Annotated[Number, Field(gt=0)] | None = Field(
        None,
        description="Distance between the values that may be tried, from `low` on; not on a logarithmic scale.",
    )
    prior: Annotated[Number | tuple[Number, Number] | None, BeforeValidator(_prior)] = Field(
        None,
        description="Where the best value is expected: an interval such as `[1e-4, 1e-3]` that contains it nine times in ten, "
        f"or one value, for a factor of {_USUAL_FACTOR:g} around it on a logarithmic scale, else a quarter of the range. The "
        "search begins there and relies on it less with every trial. For sampler front.",
    )
    changes_cost: StrictBool = Field(False, description=_CHANGES_COST)
    when: When = Field({}, description=_WHEN)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low > self.high:
            raise fault(f"expected low <= high, got low {self.low} and high {self.high}")
        if self.log and self.low <= 0:
            raise fault(f"expected low above 0 on a logarithmic scale, got low {self.low}")
        self._check_prior()
        if self.step is None:
            return self
        if self.log:
            raise fault(f"expected a step or a logarithmic scale, got step {self.step} with log: true")
        steps = (self.high - self.low) / self.step
        if steps > _MOST_STEPS:
            raise fault(
                f"expected at most {_MOST_STEPS:g} steps from low to high, got {steps:.4g} of {self.step}"
            )
        if abs(steps - round(steps)) > 1e-9 * max(steps, 1.0):
            raise fault(f"expected a whole number of steps from low to high, got {steps:.4g} of {self.step}")
        return self

    def _check_prior(self) -> None:
        if self.prior is None:
            return
        if self.low == self.high:
            raise fault(
                f"expected a range to search with a prior, got one value, {self.low}. Remove the prior."
            )
        low, high = self.prior if isinstance(self.prior, tuple) else (self.prior, self.prior)
        if not self.low <= low <= high <= self.high or (isinstance(self.prior, tuple) and low == high):
            got = list(self.prior) if isinstance(self.prior, tuple) else self.prior
            raise fault(
                f"expected a prior from {self.low} to {self.high}, of two values the lower first; got {got}"
            )

    @property
    def expected(self) -> tuple[float, float] | None:
        """The prior's best value, and the upper end of where it lies nine times in ten; None without a prior.

        >>> Range(low=1, high=8, log=True, prior=(1, 4)).expected, Range(low=1, high=8, prior=3).expected
        ((2.0, 4), (3, 4.75))
        """
        if self.prior is None:
            return None
        if isinstance(self.prior, tuple):
            low, high = self.prior
            return math.sqrt(low * high) if self.log else (low + high) / 2, high
        distance = _USUAL_SHARE * (self.high - self.low)
        return self.prior, self.prior * _USUAL_FACTOR if self.log else self.prior + distance

    @property
    def whole(self) -> bool:
        return all(isinstance(value, int) for value in (self.low, self.high, self.step) if value is not None)

    def contains(self, value: Any) -> bool:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not self.low <= value <= self.high
        ):
            return False
        step = self.step or (1 if self.whole else None)
        return step is None or abs((steps := (value - self.low) / step) - round(steps)) < 1e-9 * max(
            steps, 1.0
        )

    def __str__(self) -> str:
        step = f" in steps of {self.step}" if self.step else ""
        return f"{self.low} to {self.high}{step}" + (" (log)" if self.log else "")


class _WithoutPrior(Section):
    """A domain in which no value is expected to be best."""

    @model_validator(mode="before")
    @classmethod
    def _no_prior(cls, data: Any) -> Any:
        if isinstance(data, dict) and "prior" in data:
            raise fault(
                "expected a prior on a range alone, since choices have no distances and one value is not searched; got one "
                "here. Remove it: `baseline:` tries settings first."
            )
        return data


class Choices(_WithoutPrior):
    """One of the listed values."""

    choices: Annotated[tuple[Scalar, ...], Field(min_length=1)] = Field(
        description="The values that may be tried; a plain list is shorthand for this."
    )
    changes_cost: StrictBool = Field(False, description=_CHANGES_COST)
    when: When = Field({}, description=_WHEN)

    def contains(self, value: Any) -> bool:
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    def __str__(self) -> str:
        return (
            "one of "
            + ", ".join(map(str, self.choices[:_MOST_LISTED]))
            + ", ..." * (len(self.choices) > _MOST_LISTED)
        )


class Fixed(_WithoutPrior):
    """One value, the same in every trial."""

    value: Scalar = Field(description="The value that every trial uses; a plain value is shorthand for this.")
    when: When = Field({}, description=_WHEN)

    def contains(self, value: Any) -> bool:
        return bool(value == self.value)

    def __str__(self) -> str:
        return str(self.value)


Domain = Range | Choices | Fixed
DOMAIN_KINDS: dict[str, type[Section]] = {"range": Range, "choices": Choices, "fixed": Fixed}


def _kind(value: Any) -> str | None:
    if isinstance(value, Section):
        return next(name for name, kind in DOMAIN_KINDS.items() if isinstance(value, kind))
    if isinstance(value, dict):
        return "choices" if "choices" in value else "fixed" if "value" in value else "range"
    return "choices" if isinstance(value, list | tuple) else "fixed"


def _without_shorthand(value: Any) -> Any:
    """Expand a list to `{choices: ...}` and a plain value to `{value: ...}`."""
    if isinstance(value, list | tuple):
        return {"choices": value}
    return value if isinstance(value, dict | Section) else {"value": value}


AnyDomain = Annotated[
    Annotated[Range, Tag("range")] | Annotated[Choices, Tag("choices")] | Annotated[Fixed, Tag("fixed")],
    Discriminator(_kind),
    BeforeValidator(
        _without_shorthand, json_schema_input_type=Range | Choices | Fixed | Scalar | list[Scalar]
    ),
]


def values_of(domain: Domain) -> Iterator[Any]:
    """The values that the domain names: both ends of a range, every choice, the fixed value."""
    match domain:
        case Range():
            yield from (domain.low, domain.high)
        case Choices():
            yield from domain.choices
        case Fixed():
            yield domain.value


def count_of(domain: Domain) -> int | None:
    """How many values the domain contains; None for a range that is not of integers.

    >>> count_of(Range(low=2, high=8, step=3)), count_of(Range(low=0.0, high=1.0))
    (3, None)
    """
    if not isinstance(domain, Range):
        return len(set(values_of(domain)))
    return len(_integers(domain)) if domain.whole else None


def every_value_of(domain: Domain) -> list[Any]:
    """All values that a domain contains of which `count_of` knows how many.

    >>> every_value_of(Range(low=2, high=8, step=3))
    [2, 5, 8]
    """
    return list(_integers(domain) if isinstance(domain, Range) else dict.fromkeys(values_of(domain)))


def _integers(domain: Range) -> range:
    return range(int(domain.low), int(domain.high) + 1, int(domain.step or 1))


def applies(when: Mapping[str, Sequence[Any]], values: Mapping[str, Any]) -> bool:
    """Whether a parameter with this condition has a value beside these.

    >>> applies({"optimizer": ("sgd",)}, {"optimizer": "adamw"}), applies({}, {})
    (False, True)
    """
    return all(values.get(name) in allowed for name, allowed in when.items())


def applying(domains: Mapping[str, Domain], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without those of parameters that do not apply beside the others."""
    return {
        name: value
        for name, value in values.items()
        if name not in domains or applies(domains[name].when, values)
    }


def searched_of(domains: Mapping[str, Domain]) -> dict[str, Domain]:
    """The domains with more than one value."""
    return {name: domain for name, domain in domains.items() if len(set(values_of(domain))) > 1}


def bounds(domain: Domain) -> tuple[float, float]:
    """Smallest and largest value of a numeric domain."""
    numbers = list(values_of(domain))
    return min(numbers), max(numbers)


def every(domain: Domain, test: Any, expected: str) -> Domain:
    wrong = [value for value in values_of(domain) if not test(value)]
    if wrong:
        raise fault(f"expected {expected}, got {', '.join(map(repr, wrong[:_MOST_LISTED]))}")
    return domain


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def whole_numbers(domain: Domain) -> Domain:
    if isinstance(domain, Range) and domain.step is not None and not _is_whole(domain.step):
        raise fault(f"expected a step of whole numbers, got {domain.step}")
    return every(domain, lambda value: _is_whole(value) and value >= 1, "an integer >= 1")


def batches(domain: Domain) -> Domain:
    """Integers >= 1, on a logarithmic scale by default."""
    return log_by_default(whole_numbers(domain))


def positive_numbers(domain: Domain) -> Domain:
    return every(domain, lambda value: is_number(value) and value > 0, "a number above 0")


def epoch_numbers(domain: Domain) -> Domain:
    return every(
        domain,
        lambda value: is_number(value) and 0 < value <= 1_000_000,
        "a number above 0, at most a million",
    )


def numbers_from_zero(domain: Domain) -> Domain:
    return every(domain, lambda value: is_number(value) and value >= 0, "a number >= 0")


def numbers(domain: Domain) -> Domain:
    return every(domain, is_number, "a number")


def log_by_default(domain: Domain) -> Domain:
    if isinstance(domain, Range) and domain.log is None and domain.step is None:
        return domain.model_copy(update={"log": domain.low > 0})
    return domain


def real(domain: Domain) -> Domain:
    """Make a range real-valued: `{low: 0, high: 1}` includes every number between, not just 0 and 1."""
    if isinstance(domain, Range):
        return domain.model_copy(update={"low": float(domain.low), "high": float(domain.high)})
    return domain


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
    if isinstance(value, str) and re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*%\s*", value):
        number = float(value.strip().rstrip("%")) / 100
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1:
        raise fault(f"expected a share from 0 up to 1, got {value!r}. Write 5% or 0.05.")
    return float(number)


Share = Annotated[float, BeforeValidator(share, json_schema_input_type=float | str)]
