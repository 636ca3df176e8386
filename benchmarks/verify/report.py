"""What was verified and where: a table for people, and data that can be checked in and replayed."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import TypeAdapter

from .claims import Claim, Data, Fact, Verdict

# The stage whose outcome is the verdict.
SMOKE = "smoke"


@dataclass(slots=True)
class StageReport:
    """What one stage found, and how it ended.

    Args:
        problem: why it ended before its end; empty if it did not.
        printed: the last that it printed, where it does not hold.
    """

    stage: str
    seconds: float = 0.0
    problem: str = ""
    claims: list[Claim] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    data: list[Data] = field(default_factory=list)
    printed: str = ""

    @property
    def holds(self) -> bool:
        """Whether it came to its end and no claim failed."""
        return not self.problem and not any(claim.verdict == "FAIL" for claim in self.claims)

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
    """Everything that was verified, and where.

    Args:
        machine: what determines results and is not in `versions`.
        busy: a sentence, where other programs may disturb timing.
    """

    kind: Literal["cpu", "gpu"]
    device: str
    date: str
    versions: str
    stages: list[StageReport] = field(default_factory=list)
    machine: list[Fact] = field(default_factory=list)
    busy: str = ""

    @property
    def claims(self) -> list[Claim]:
        return [claim for stage in self.stages for claim in stage.claims]

    def count(self, verdict: Verdict) -> int:
        return sum(claim.verdict == verdict for claim in self.claims)

    @property
    def holds(self) -> bool:
        """Whether no claim failed and every stage came to its end."""
        return all(stage.holds for stage in self.stages)

    @property
    def verdict(self) -> str:
        """Whether bsearch works here, in a sentence; empty where the stage that finds out did not run.

        >>> Report("gpu", "", "", "", [StageReport("smoke", problem="killed after 60 s")]).verdict
        'This card does not work with bsearch: killed after 60 s.'
        """
        what = "card" if self.kind == "gpu" else "machine"
        for stage in self.stages:
            if stage.stage == SMOKE:
                if stage.holds:
                    return f"This {what} works with bsearch."
                why = stage.problem or next(claim.note for claim in stage.claims if claim.verdict == "FAIL")
                return f"This {what} does not work with bsearch: {why.rstrip('.')}."
        return ""

    @property
    def summary(self) -> str:
        """One sentence of the outcome.

        >>> Report("cpu", "CPU", "", "", [StageReport("memory", claims=[Claim("live bytes", 0.02, 0.01)])]).summary
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
            **asdict(self),
            "holds": self.holds,
            "stages": [
                asdict(stage)
                | {"claims": [asdict(claim) | {"verdict": claim.verdict} for claim in stage.claims]}
                for stage in self.stages
            ],
        }

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
        said = " ".join(sentence for sentence in (self.verdict, self.summary, self.busy) if sentence)
        lines = [f"## {self.device}", "", f"{self.date} · {self.versions} · {said}", ""]
        lines += ["| stage | claim | bound | measured | |", "|---|---|---|---|---|"]
        lines += [_row(row) for row in self.rows()]
        facts = [("", fact) for fact in self.machine] + [
            (stage.stage, fact) for stage in self.stages for fact in stage.facts
        ]
        if facts:
            lines += ["", "| stage | also measured | |", "|---|---|---|"]
            lines += [_row((stage, fact.name, fact.value)) for stage, fact in facts]
        problems = [f"- {stage.stage}: {stage.problem}" for stage in self.stages if stage.problem]
        return "\n".join([*lines, *(["", *problems] if problems else [])]) + "\n"

    def document(self) -> str:
        """The file that is sent: the page's section, what failed stages printed, and all of it as data."""
        parts = [self.markdown()]
        for stage in self.stages:
            if stage.printed:
                parts.append(
                    f"What `{stage.stage}` printed last:\n\n`````text\n{stage.printed.strip()}\n`````\n"
                )
        data = json.dumps(self.to_dict(), ensure_ascii=False)
        parts.append(f"<details><summary>Data</summary>\n\n```json\n{data}\n```\n\n</details>\n")
        return "\n".join(parts)

    @classmethod
    def read(cls, text: str) -> Self:
        """The report in what `document` wrote, or in the JSON of `to_dict`."""
        if not text.startswith("{"):
            text = text.rpartition("```json\n")[2].partition("\n```")[0]
        return TypeAdapter(cls).validate_json(text)

    def file(self) -> Path:
        """A new file's name for it, in the current folder.

        >>> Report("gpu", "NVIDIA H100 80GB HBM3", "2026-11-26", "").file().name
        'bsearch-verify-NVIDIA-H100-80GB-HBM3-2026-11-26.md'
        """
        card = re.sub(r"\W+", "-", re.sub(r"\((R|TM)\)", "", self.device)).strip("-")
        name, number = f"bsearch-verify-{card}-{self.date}", 1
        path = Path(f"{name}.md")
        while path.exists():
            number += 1
            path = Path(f"{name}-{number}.md")
        return path


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in cells)} |"
