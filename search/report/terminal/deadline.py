"""What is said of a study that has to be done by a moment: the plan until then, and the model that it has kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from ....spaces.deadline import Plan, StoredDeadline
from ....spaces.readable import from_here, number, seconds
from ...run.training import RESULT

if TYPE_CHECKING:
    from ...run.driver import StudyResult

# Moments of shorter plans are told to the second, others to the minute.
_BRIEF_S = 1800.0


def plan_sentence(deadline: StoredDeadline | None) -> str:
    """`plan_line` as a sentence; empty where there is none, or its time has passed."""
    if deadline is None or deadline.plan is None:
        return ""
    if deadline.over_at is not None and deadline.over_at <= time.time():
        return ""
    line = plan_line(deadline)
    return f"{line[0].upper()}{line[1:]}."


def plan_line(deadline: StoredDeadline, now: float | None = None) -> str:
    """What happens until the deadline or the target, in one line.

    Args:
        now: seconds since 1970.
    """
    now, plan = time.time() if now is None else now, deadline.plan or Plan()
    if deadline.over_at is None:
        return _to_target(deadline.given, plan, now)
    at = _clock(now, deadline.over_at - (deadline.began_at or now))
    ends = at(deadline.over_at)
    if deadline.over_at <= now:
        return f"its deadline, {ends}, has passed" if deadline.over_at == deadline.ends_at else ""
    if plan.chance is not None:
        return f"{_to_target(plan.target, plan, now)}; done by {ends} in any case"
    if plan.train_s is None or plan.done_by is None:
        return f"no final training is planned yet; done by {ends}"
    train = _training(plan)
    sure = "" if plan.sure is None else f", {100 * min(plan.sure, 0.99):.0f}% sure to finish in full by {ends}"
    done = f"done by {at(min(plan.done_by, deadline.over_at))}{sure}"
    search = "" if plan.search_until is None else f"search until about {at(plan.search_until)}, then "
    return "; ".join(filter(None, (f"{search}train {train}", done, _expected(plan))))


def _to_target(target: str, plan: Plan, now: float) -> str:
    """How a target is to be reached, and when."""
    if plan.chance is None:
        return f"when the target, {target}, will be reached is not known yet"
    if plan.train_s is None:
        return f"the target, {target}, is not expected to be reached in this space"
    following = f"best chance: {_training(plan)}, {100 * min(max(plan.chance, 0.01), 0.99):.0f}%"
    if plan.not_before is None:
        return f"the target, {target}, is not expected to be reached in this space; {following}"
    if (plan.reached_by or plan.not_before) <= now:
        return f"the target, {target}, may be reached any time now; {following}"
    at = _clock(now, (plan.reached_by or plan.not_before) - now)
    earliest, middle = at(plan.not_before), None if plan.reached_by is None else at(plan.reached_by)
    if middle is None:
        return f"the target, {target}, will probably not be reached; if it is, not before {earliest} (90% sure); {following}"
    bound = "" if earliest == middle else f", not before {earliest} (90% sure)"
    return f"the target, {target}, is expected by about {middle}{bound}; {following}"


def _training(plan: Plan) -> str:
    assert plan.train_s is not None
    which = "a new setting" if plan.tried is None else f"the setting of trial {plan.tried}"
    length = "" if plan.epochs is None else f", {number(plan.epochs)} epochs"
    return f"{which} for {seconds(plan.train_s)}{length}" + (f" on {plan.devices} devices" if plan.devices > 1 else "")


def _expected(plan: Plan) -> str:
    """What a training is expected to reach, with its interval."""
    if plan.low is None or plan.high is None:
        return ""
    return f"{plan.metric} expected from {number(plan.low)} to {number(plan.high)} (90%)"


def _clock(now: float, length_s: float) -> Callable[[float], str]:
    """How moments are told, in a plan of this length."""

    def at(moment: float) -> str:
        told = datetime.fromtimestamp(moment).astimezone()
        clock = f"{told:%H:%M:%S}" if length_s < _BRIEF_S else f"{told:%H:%M}"
        return clock if abs(moment - now) < 43_200 else f"{told:%Y-%m-%d} {clock}"

    return at


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
    if deadline is not None and deadline.ends_at is not None:
        ends, now = datetime.fromtimestamp(deadline.ends_at).astimezone(), time.time()
        early = deadline.ends_at - now
        words = f"{seconds(early)} before" if early >= 0 else f"{seconds(-early)} after"
        yield f"Done {words} {ends:%H:%M:%S} ({deadline.given})."


__all__ = ["model_lines", "plan_line", "plan_sentence"]
