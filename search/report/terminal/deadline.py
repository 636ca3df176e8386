"""What is said of a study that has to be done by a moment: the plan until then, and the model that it has kept."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from ....spaces.deadline import StoredDeadline
from ....spaces.readable import from_here, number, seconds
from ...run.training import RESULT

if TYPE_CHECKING:
    from ...run.driver import StudyResult

# Moments of shorter plans are told to the second, others to the minute.
_BRIEF_S = 1800.0


def plan_sentence(deadline: StoredDeadline | None) -> str:
    """`plan_line` as a sentence; empty where there is no deadline, or it has passed."""
    if deadline is None or deadline.ends_at <= time.time():
        return ""
    line = plan_line(deadline)
    return f"{line[0].upper()}{line[1:]}."


def plan_line(deadline: StoredDeadline, now: float | None = None) -> str:
    """What happens until the deadline, in one line.

    Args:
        now: seconds since 1970.
    """
    now = time.time() if now is None else now

    def at(moment: float) -> str:
        told = datetime.fromtimestamp(moment).astimezone()
        clock = f"{told:%H:%M:%S}" if deadline.ends_at - deadline.began_at < _BRIEF_S else f"{told:%H:%M}"
        return clock if abs(moment - now) < 43_200 else f"{told:%Y-%m-%d} {clock}"

    plan, ends = deadline.plan, at(deadline.ends_at)
    if deadline.ends_at <= now:
        return f"its deadline, {ends}, has passed"
    if plan is None or plan.train_s is None or plan.done_by is None:
        return f"no final training is planned yet; done by {ends}"
    length = "" if plan.epochs is None else f", {number(plan.epochs)} epochs"
    train = f"the setting of trial {plan.tried} for {seconds(plan.train_s)}{length}"
    sure = "" if plan.sure is None else f", {100 * min(plan.sure, 0.99):.0f}% sure to finish in full by {ends}"
    done = f"done by {at(min(plan.done_by, deadline.ends_at))}"
    if plan.search_until is not None:
        return f"search until about {at(plan.search_until)}, then train {train}; {done}{sure}"
    return f"train {train}; {done}{sure}"


def model_lines(result: StudyResult) -> Iterator[str]:
    """Which model a study has kept, and when it was done."""
    stored, budget = result.study, result.study.spec.budget
    if not budget.keeps_model:
        return
    if result.model is None:
        yield "No model was kept: no trial has completed since one was asked for."
        return
    document = json.loads((result.model / RESULT).read_text(encoding="utf-8"))
    record = stored.records[document["trial"]]
    score = f"{stored.front.metric} {number(document[stored.front.metric])}"
    tests = "".join(f", {name} {number(value)}" for name, value in document["tests"].items())
    role = "a final training" if record.facts.final_training else "a trial of the search"
    shortened = record.facts.shortened_to
    cut = "" if shortened is None else f", shortened to {shortened:.0%} of its planned length to meet the deadline"
    yield (
        f"Model: {from_here(result.model)}: trial {record.number}, {role}{cut}: {score}{tests}, batch "
        f"{record.facts.effective_batch}, {number(record.facts.epochs)} epochs"
    )
    deadline = result.deadline
    if deadline is not None:
        ends, now = datetime.fromtimestamp(deadline.ends_at).astimezone(), time.time()
        early = deadline.ends_at - now
        words = f"{seconds(early)} before" if early >= 0 else f"{seconds(-early)} after"
        yield f"Done {words} {ends:%H:%M:%S} ({deadline.given})."


__all__ = ["model_lines", "plan_line", "plan_sentence"]
