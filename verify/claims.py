"""Claims and facts: what a stage finds out, and their table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, Self

Verdict = Literal["pass", "FAIL", "unclear"]


@dataclass(frozen=True, slots=True)
class Fact:
    """Something measured that has no bound."""

    name: str
    value: str


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
        """Whether the claim holds; unclear where the value is beyond the bound by less than it is uncertain, or more uncertain
        than the bound is large.

        >>> [Claim("", 0.02, measured, 0.01).verdict for measured in (0.019, 0.025, 0.04)], Claim("", 0.02, 0.01, 0.1).verdict
        (['pass', 'unclear', 'FAIL'], 'unclear')
        """
        if self.measured <= self.bound:
            return "pass" if self.uncertainty <= max(self.bound, 0.0) else "unclear"
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


@dataclass(slots=True)
class StageReport:
    """What one stage found, and how it ended.

    Args:
        problem: why it ended before its end; empty if it did not.
        printed: the last that it printed, where there is a problem.
    """

    stage: str
    seconds: float = 0.0
    problem: str = ""
    claims: list[Claim] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    printed: str = ""

    @property
    def outcome(self) -> str:
        """How it went, in words."""
        if self.problem:
            return self.problem
        if not self.claims:
            return ", ".join(fact.value for fact in self.facts[:3]) or "nothing to verify here"
        passed, count = sum(claim.verdict == "pass" for claim in self.claims), len(self.claims)
        return f"{passed} of {count} claim{'s' * (count != 1)} {'pass' if count != 1 else 'passes'}"


@dataclass(slots=True)
class Report:
    """Everything that was verified, and where."""

    device: str
    date: str
    versions: str
    stages: list[StageReport] = field(default_factory=list)

    @property
    def claims(self) -> list[Claim]:
        return [claim for stage in self.stages for claim in stage.claims]

    def count(self, verdict: Verdict) -> int:
        return sum(claim.verdict == verdict for claim in self.claims)

    @property
    def holds(self) -> bool:
        """Whether no claim failed and every stage came to its end."""
        return not self.count("FAIL") and not any(stage.problem for stage in self.stages)

    @property
    def summary(self) -> str:
        """One sentence of the outcome.

        >>> Report("CPU", "", "", [StageReport("memory", claims=[Claim("live bytes", 0.02, 0.01)])]).summary
        '1 of 1 claim holds.'
        """
        claims = self.claims
        text = f"{self.count('pass')} of {len(claims)} claim{'s hold' if len(claims) != 1 else ' holds'}"
        if failed := self.count("FAIL"):
            text += f", {failed} fail{'s' * (failed == 1)}"
        if unclear := self.count("unclear"):
            text += f", {unclear} {'is' if unclear == 1 else 'are'} too noisy here to tell"
        if ended := [stage.stage for stage in self.stages if stage.problem]:
            text += f"; not finished: {', '.join(ended)}"
        return text + "."

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it, with the verdict of each claim."""
        return {
            "device": self.device,
            "date": self.date,
            "versions": self.versions,
            "holds": self.holds,
            "stages": [
                asdict(stage) | {"claims": [asdict(claim) | {"verdict": claim.verdict} for claim in stage.claims]}
                for stage in self.stages
            ],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        stages = [
            StageReport(
                stage["stage"],
                stage["seconds"],
                stage["problem"],
                [Claim(**{name: value for name, value in claim.items() if name != "verdict"}) for claim in stage["claims"]],
                [Fact(**fact) for fact in stage["facts"]],
                stage["printed"],
            )
            for stage in values["stages"]
        ]
        return cls(values["device"], values["date"], values["versions"], stages)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """(stage, claim, bound, measured, verdict) of every claim."""
        return [
            (
                stage.stage,
                claim.text + (f" ({claim.cases} cases)" if claim.cases > 1 else ""),
                f"≤ {claim.shown(claim.bound)}",
                claim.measured_text + (f" ({claim.note})" if claim.note else ""),
                claim.verdict,
            )
            for stage in self.stages
            for claim in stage.claims
        ]

    def markdown(self) -> str:
        """The report as a section of a page."""
        lines = [f"## {self.device}", "", f"{self.date} · {self.versions} · {self.summary}", ""]
        lines += ["| stage | claim | bound | measured | |", "|---|---|---|---|---|"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in self.rows()]
        facts = [(stage.stage, fact) for stage in self.stages for fact in stage.facts]
        if facts:
            lines += ["", "| stage | also measured | |", "|---|---|---|"]
            lines += [f"| {stage} | {fact.name} | {fact.value} |" for stage, fact in facts]
        problems = [f"- {stage.stage}: {stage.problem}" for stage in self.stages if stage.problem]
        return "\n".join([*lines, *(["", *problems] if problems else [])]) + "\n"


def worst(text: str, bound: float, cases: Iterable[tuple[str, float]], *, unit: str = "%", note: str = "") -> Iterable[Claim]:
    """The claim about the largest of the values by case; none where there is no case."""
    found = list(cases)
    if found:
        # What is not a number counts as the worst.
        name, value = max(found, key=lambda case: math.inf if math.isnan(case[1]) else case[1])
        yield Claim(text, bound, value, unit=unit, cases=len(found), note=note or (name if value else ""))


def of_repeats(text: str, bound: float, values: Sequence[float], **rest: Any) -> Claim:
    """The claim about the median of repeated measurements, with the uncertainty of that median.

    >>> of_repeats("ratio", 0.02, [0.01, 0.03, 0.02]).measured
    0.02
    """
    middle = median(values)
    spread = median(abs(value - middle) for value in values) * 1.4826
    # Standard error of a median of normal values, times two.
    return Claim(text, bound, middle, 2 * 1.2533 * spread / math.sqrt(len(values)), **rest)


__all__ = ["Claim", "Fact", "Report", "StageReport", "Verdict", "of_repeats", "worst"]
