"""What `bsearch ask` prints: how the names were read, a page of verdicts, and a study's samples to a value by batch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ....spaces.errors import cut, plain
from ....spaces.readable import plural
from ...analysis.rates import Estimate
from ...laws.samples_by_batch import SamplesByBatch
from ...laws.verdicts import Verdict
from ...store.stored import StoredStudy
from ..columns import Column, front_columns, some_members
from .fitted import Fitted
from .tables import worth_of_front

if TYPE_CHECKING:
    from ...sources.columns import Columns
    from ...sources.imported import Imported

# More columns than this that are left out are counted instead.
_MOST_LEFT_OUT = 15
# The most members of a front that are shown.
_MOST_MEMBERS = 12
_LONGEST = 40
# Cells of what runs do not say: the plan of a step, and the rule behind a rate.
_UNKNOWN = ("", "? x ?", "constant")
# What a meaning is called, where that is no name of its own.
_MEANS = {"batch": "effective_batch", "nothing": "left out"}

_BETTER = {"minimize": "lower is better", "maximize": "higher is better", None: "lower or higher is better?"}


def columns_table(columns: Columns) -> Fitted:
    """A source's names and what they mean; those that are the same in every run only counted, and many that are left out."""
    rows: list[tuple[str, str, str]] = []
    taken = [one for one in columns.columns if one.meaning != "nothing"]
    left_out = [one for one in columns.columns if one.meaning == "nothing"]
    for one in taken:
        more = _BETTER[columns.direction] if one.meaning == "metric" else _factors(columns, one.meaning)
        why = "; ".join(filter(None, (more, one.why)))
        rows.append((one.name, _MEANS.get(one.meaning, one.meaning), why))
    # An end of a curve stands for its extremes too.
    varied = [
        one
        for one in left_out
        if not one.why.startswith("the same in every run") and not one.name.endswith("est)")
    ]
    for one in varied[:_MOST_LEFT_OUT]:
        rows.append((one.name, "left out", one.why))
    if rest := len(left_out) - len(varied[:_MOST_LEFT_OUT]):
        rows.append((f"{rest} more", "left out", "mostly the same in every run"))
    return Fitted.of_rows(
        ("name", "read as", ""), rows, ("name", "read as"), words=("name", "read as"), flows=("",)
    )


def _factors(columns: Columns, meaning: str) -> str:
    """What a batch of one device is multiplied by."""
    if meaning != "micro_batch" or columns.named("effective_batch"):
        return ""
    names = [name for factor in ("accumulation", "devices") if (name := columns.one(factor)) is not None]
    return f"times {' and '.join(names)}: effective_batch" if names else "taken as effective_batch"


def group_parts(
    source: str,
    study: StoredStudy,
    imported: Imported | None,
    answers: Sequence[Verdict],
    *,
    several: bool,
    short: bool,
) -> Iterator[str | Text | Fitted]:
    """The page of one group of runs.

    Args:
        several: there are more groups, so its name is shown.
        short: only the answer.
    """
    if short:
        for answer in answers:
            yield Text(f"{answer.about}: {answer.text}{_stands_on(answer)}")
        return
    outcomes = Counter(record.outcome for record in study.records)
    words = {"error": "failed"} | (
        {"diverged": "never reached the target"} if imported and imported.to_target else {}
    )
    counts = ", ".join(f"{count} {words.get(outcome, outcome)}" for outcome, count in outcomes.items())
    name = f": {imported.name}" if imported is not None and several else ""
    yield Text(f"\n{source}{name}: {plural(len(study.records), 'run')} ({counts})", style="bold")
    if imported is not None and imported.left_out:
        yield Text(
            "left out: " + ", ".join(f"{count} {why}" for why, count in imported.left_out.items()),
            style="dim",
        )
    if imported is not None and 0 < len(imported.untimed) < len(study.records):
        first = imported.untimed[0]
        several = len(imported.untimed) > 1
        text = f"{len(imported.untimed)} of them {'do not have their' if several else 'does not have its'} seconds, "
        yield Text(f"{text}{'such as ' * several}{first}", style="dim")
    front = next((answer for answer in answers if answer.about == "front"), None)
    if front is not None and not front.silent and not (imported and imported.to_target):
        yield _front_table(study)
    for answer in answers:
        if answer.about == "next runs" and not answer.silent:
            yield Text(f"next runs that would add most{_stands_on(answer)}:")
            for setting in answer.data["settings"]:
                yield Text("  " + ", ".join(f"{name}={_cell(value)}" for name, value in setting.items()))
        elif answer.silent:
            yield Text(f"{answer.about}: unknown: {answer.text}", style="dim")
        else:
            yield Text(f"{answer.about}: {answer.text}{_stands_on(answer)}")


def _front_table(study: StoredStudy) -> Fitted:
    """The front of runs, fastest first, by their names and without columns that say nothing of any run."""
    members = some_members(study.front, _MOST_MEMBERS)
    names = [
        (member.facts.message or "").removeprefix("imported from ").rpartition("/")[2] for member in members
    ]
    runs = tuple(
        plain(cut(name or str(member.number), _LONGEST)) for name, member in zip(names, members, strict=True)
    )
    _, *columns = front_columns(study.front, members)
    known = [column for column in columns if any(cell not in _UNKNOWN for cell in column.cells)]
    return Fitted([Column("run", runs, words=True), *known], worth_of_front(study.front))


def _cell(value: Any) -> str:
    """A value; a text in quotes where it could be taken for several.

    >>> print(_cell(0.12345), _cell("adam"), _cell("[64, 64]"))
    0.1235 adam '[64, 64]'
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    return repr(value) if isinstance(value, str) and re.search(r"[,=\s]", value) else str(value)


def _stands_on(answer: Verdict) -> str:
    return f" ({plural(answer.runs, 'run')})" if answer.runs else ""


def verdict_document(
    study: StoredStudy, imported: Imported | None, answers: Sequence[Verdict]
) -> dict[str, Any]:
    """The JSON document of one group."""
    return {
        "group": "" if imported is None else imported.name,
        "runs": len(study.records),
        "outcomes": Counter(record.outcome for record in study.records),
        "left_out": {} if imported is None else imported.left_out,
        "verdicts": {
            answer.about: {
                "text": answer.text,
                "runs": answer.runs,
                "silent": answer.silent,
                "data": dict(answer.data),
            }
            for answer in answers
        },
    }


def samples_document(found: SamplesByBatch) -> dict[str, Any]:
    """A study's samples to a target as JSON holds them; null where more are needed than were tried."""

    def ends(estimate: Estimate | None) -> dict[str, float | None] | None:
        if estimate is None:
            return None
        return {name: value if math.isfinite(value) else None for name, value in asdict(estimate).items()}

    return {
        "target": found.target,
        "trials": found.trials,
        "samples_tried": [found.least, found.most],
        "critical_batch": ends(found.critical_batch()),
        "predicted": [
            {
                "effective_batch": batch,
                "reached": found.reached(place),
                **(ends(found.samples_at(place)) or {}),
            }
            for place, batch in enumerate(found.batches)
        ],
    }


def samples_parts(study: str, metric: str, found: SamplesByBatch) -> Iterator[str | Text | Fitted]:
    """A study's samples to a target for people."""

    def text(samples: float) -> str:
        if math.isinf(samples):
            return f"> {found.most:.4g}"
        return f"{samples:.4g}" if samples > found.least else f"<= {found.least:.4g}"

    title = (
        f"Samples to {metric} {found.target:.12g} in {study}: {found.trials} settings, "
        f"{found.least:.4g} to {found.most:.4g}"
    )
    yield Text(f"{title} samples", style="bold")
    names, rows = ("effective\nbatch", "samples", "90 % interval", "steps", "reached"), []
    for place, batch in enumerate(found.batches):
        samples = found.samples_at(place)
        steps = f"{samples.value / batch:.4g}" if found.least < samples.value < math.inf else ""
        interval = (
            f"{text(samples.low)} to {text(samples.high)}"
            if samples.low < samples.high
            else text(samples.low)
        )
        rows.append((str(batch), text(samples.value), interval, steps, f"{found.reached(place):.0%}"))
    yield Fitted.of_rows(names, rows, ("effective\nbatch", "samples", "90 % interval", "reached"))
    critical = found.critical_batch()
    if critical is None:
        yield "Whether any batch reaches the target within the samples tried is too uncertain to name a critical batch."
    else:
        value, low, high = (
            f"{end:.4g}" if math.isfinite(end) else f"> {found.batches[-1]}"
            for end in (critical.value, critical.low, critical.high)
        )
        yield f"Critical batch, which needs twice the fewest samples: {value} ({low} to {high})."
        if found.starts_late:
            yield (
                f"Some batches reach the target with the fewest samples tried, {found.least:.4g}, and may need less: then the "
                "critical batch is smaller. Lower the range of epochs to find out."
            )
    yield (
        "Each batch with the best of everything else that was searched. Only the ends of trainings count; reached: the "
        "probability that the most samples tried are enough."
    )
