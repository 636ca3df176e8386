"""Claims, facts and raw data: what a stage finds out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

Verdict = Literal["pass", "FAIL", "unclear"]


@dataclass(frozen=True, slots=True)
class Fact:
    """Something measured that has no bound."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Data:
    """Raw measurements of one case.

    Args:
        kind: which claims follow from it: a key of `measured.RULES`; of others none do.
        values: as JSON can hold them.
    """

    kind: str
    case: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Claim:
    """A quantity that is claimed to be at most `bound`.

    Args:
        text: what is measured.
        measured: its value here.
        uncertainty: half width of its 95 % interval, from repeats; 0 for what can be counted.
        unit: "%" for shares, or a noun.
        cases: how many cases were measured; `measured` is the worst of them, or what the text says.
        note: the worst case, or why the value is what it is.
    """

    text: str
    bound: float
    measured: float
    uncertainty: float = 0.0
    unit: str = "%"
    cases: int = 1
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """Whether the claim holds; unclear where the value is more uncertain than the bound is large, or beyond the bound by
        less than it is uncertain.

        >>> [Claim("", 0.02, measured, 0.01).verdict for measured in (0.019, 0.025, 0.04)]
        ['pass', 'unclear', 'FAIL']
        >>> [Claim("", 0.05, measured, 0.88).verdict for measured in (0.01, 0.95)]
        ['unclear', 'unclear']
        """
        if not self.uncertainty <= max(self.bound, 0.0):
            return "unclear"
        if self.measured <= self.bound:
            return "pass"
        # A value that is not a number is not at most anything.
        return "unclear" if self.measured - self.uncertainty <= self.bound else "FAIL"

    def shown(self, value: float) -> str:
        """A value in the claim's unit.

        >>> Claim("", 0.02, 0.0).shown(0.0123), Claim("", 4, 3, unit="runs").shown(3), Claim("", 0, 0, unit="").shown(3e-07)
        ('1.2 %', '3 runs', '3e-07')
        """
        if self.unit == "%":
            return f"{100 * value:.2g} %" if abs(value) < 1 else f"{100 * value:.0f} %"
        return f"{value:.3g} {self.unit}".strip()

    @property
    def measured_text(self) -> str:
        interval = f" ± {self.shown(self.uncertainty)}" if self.uncertainty else ""
        return self.shown(self.measured) + interval


def worst(text: str, bound: float, cases: Iterable[tuple[str, float]], *, unit: str = "%") -> Iterable[Claim]:
    """The claim about the largest of the values by case; none where there is no case."""
    found = list(cases)
    if found:
        # What is not a number counts as the worst.
        name, value = max(found, key=lambda case: math.inf if math.isnan(case[1]) else case[1])
        yield Claim(text, bound, value, unit=unit, cases=len(found), note=name if value else "")


def of_repeats(text: str, bound: float, values: Sequence[float], **rest: Any) -> Claim:
    """The claim about the median of repeated measurements, with the uncertainty of that median.

    >>> of_repeats("ratio", 0.02, [0.01, 0.03, 0.02]).measured
    0.02
    """
    middle = median(values)
    spread = median(abs(value - middle) for value in values) * 1.4826
    # Standard error of a median of normal values, times two.
    return Claim(text, bound, middle, 2 * 1.2533 * spread / math.sqrt(len(values)), **rest)
