"""What is shown of a study that has to be done by a moment: when that is, and the model that it has kept."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from ....spaces.deadline import Deadline
from ....spaces.readable import from_here, number, seconds

if TYPE_CHECKING:
    from ...run.driver import StudyResult

# Moments of shorter deadlines are shown to the second, others to the minute.
_BRIEF_S = 1800.0


def deadline_sentence(deadline: Deadline | None) -> str:
    """`deadline_line` as a sentence; empty where there is no deadline, or its time has passed."""
    if deadline is None or deadline.ends_at <= time.time():
        return ""
    line = deadline_line(deadline)
    return f"{line[0].upper()}{line[1:]}."


def deadline_line(deadline: Deadline, now: float | None = None) -> str:
    """What happens until the deadline, in one line.

    Args:
        now: seconds since 1970.
    """
    now = time.time() if now is None else now
    ends = _clock(deadline.ends_at, now, deadline.ends_at - deadline.began_at)
    if deadline.ends_at > now:
        return f"ends by {ends} at the latest and keeps the best model of all trials"
    return f"its deadline, {ends}, has passed"


def _clock(moment: float, now: float, length_s: float) -> str:
    """A moment, to the second where the whole time is short, with its date where it is not today's."""
    local = datetime.fromtimestamp(moment).astimezone()
    clock = f"{local:%H:%M:%S}" if length_s < _BRIEF_S else f"{local:%H:%M}"
    return clock if abs(moment - now) < 43_200 else f"{local:%Y-%m-%d} {clock}"


def model_lines(result: StudyResult) -> Iterator[str]:
    """Which model a study has kept, and when it was done."""
    stored, budget = result.study, result.study.spec.budget
    if not budget.keeps_model:
        return
    if result.model is None:
        if not result.failure:  # which says so itself
            yield "No model was kept: no trial has completed since one was asked for."
        return
    from ...run.training import RESULT

    document = json.loads((result.model / RESULT).read_text(encoding="utf-8"))
    record = stored.records[document["trial"]]
    score = f"{stored.front.metric} {number(document[stored.front.metric])}"
    tests = "".join(f", {name} {number(value)}" for name, value in document["tests"].items())
    shortened = record.facts.shortened_to
    cut = (
        ""
        if shortened is None
        else f", shortened to {shortened:.0%} of its planned length to meet the deadline"
    )
    yield (
        f"Model: {from_here(result.model)}: trial {record.number}{cut}: {score}{tests}, batch "
        f"{record.facts.effective_batch}, {number(record.facts.epochs)} epochs"
    )
    deadline = result.deadline
    if deadline is not None:
        ends, now = datetime.fromtimestamp(deadline.ends_at).astimezone(), time.time()
        early = deadline.ends_at - now
        words = f"{seconds(early)} before" if early >= 0 else f"{seconds(-early)} after"
        yield f"Done {words} {ends:%H:%M:%S} ({deadline.given})."
