"""What bsearch says of a study and of each of its trials, as Markdown for the pages of the dashboard.

Names, messages and tracebacks come from tasks and databases that others may have written. They stand in code or are escaped, so
that none becomes a link, an image, a heading or a formula.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from ...spaces.errors import InfeasiblePlanError, cut, plain
from ...spaces.plan import BatchPlan
from ...spaces.readable import number, seconds
from ...spaces.study import StudySpec
from ...spaces.trial import ParetoFront, TrialRecord
from ..analysis.choice import fastest_within
from ..store.stored import StoredStudy

# Of a traceback the end tells most, and every page of the study carries it.
_TRACEBACK_CHARACTERS = 4000
_FRONT_ROWS = 30
# A character that is seen by nobody and ends what would be taken for an address.
_JOINER = "\u2060"


def escaped(text: str) -> str:
    r"""Text in a line of Markdown that stands there as it is.

    >>> print(escaped("a *b* [c](d) <e> $f$ |"))
    a \*b\* \[c\](d) \<e\> \$f\$ \|
    """
    line = re.sub(r"([\\`*_\[\]<>$|~&#])", r"\\\1", " ".join(plain(text).split()))
    line = re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", line)  # no item of a list, where it begins the line
    # Renderers make links of bare addresses, escaped or not.
    return re.sub(r"(://|www\.|@)", rf"{_JOINER}\1{_JOINER}", line)


def code(text: str) -> str:
    """Text as code in a line of Markdown; not in a table, where a | would end a cell.

    >>> print(code("a `tick`"))
    `` a `tick` ``
    """
    line = " ".join(plain(text).split())
    fence = "`" * _fence(line, 1)
    room = " " if "`" in line else ""
    return f"{fence}{room}{line}{room}{fence}" if line else ""


def code_block(text: str) -> str:
    """Lines of text as they are; no line of them ends the block."""
    # A longer line would make the whole page as wide as itself.
    wrapped = (
        textwrap.wrap(line, 90, replace_whitespace=False, drop_whitespace=False) or [""] for line in plain(text).splitlines()
    )
    fence = "`" * _fence(text, 3)
    return "\n".join([f"{fence}text", *chain.from_iterable(wrapped), fence])


def _fence(text: str, least: int) -> int:
    """Backticks that surely enclose a text."""
    return max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def study_note(kept: StoredStudy, words: Sequence[str] | None, *, study: str, page: str, report: str | None) -> str:
    """What a study has found so far, in words and a table.

    Args:
        words: sentences for under the front; None where they are still being found.
        study: the study as commands take it: its file, or a masked URL with options.
        page: path of the study's page; a trial's is below it.
        report: path of its report; None where none has been written.
    """
    return "\n\n".join(_study_parts(kept, words, study, page, report)) + "\n"


def _study_parts(kept: StoredStudy, words: Sequence[str] | None, study: str, page: str, report: str | None) -> Iterator[str]:
    front = kept.front
    counted = sum(record.counts for record in kept.records)
    yield f"## {escaped(kept.name)}: {counted} of {kept.spec.budget.trials} trials, {len(front.trials)} on the front"
    if report:
        yield f"[The report]({report}) has everything on one page."
    if not front.trials:
        yield "No trial has finished yet, so there is no front. Reload the page later."
    else:
        yield _front_table(front, page)
        found = words if words is not None else ["Still computing; reload in a few seconds."]
        yield "\n".join(f"- {escaped(sentence)}" for sentence in [_within_words(front), *found])
    way = "--knee" if front.knee is not None else "--within 1%"
    commands = [
        *([f"bsearch export {study} --to hf {way}"] if front.trials else []),
        f"bsearch show {study} --trial N",
        *([] if report else [f"bsearch report {study}"]),
    ]
    told = ["the settings of a point, for a trainer"] if front.trials else []
    told += ["a trial with its curve and traceback", "a page with everything, linked here once it is written"]
    yield "**Next**"
    yield "\n".join(f"- {code(command)}: {what}" for command, what in zip(commands, told, strict=False))
    yield "**How to read these pages**"
    yield "\n".join(
        [
            "- *Best Trial* marks the members of the front above. The plot *Pareto Front* draws single trainings; a setting "
            "that was trained several times counts here with its mean.",
            "- *Infeasible* (grey) are trials that diverged: they have a time and an accuracy, but are no point of a front.",
            "- *Pruned* are trials that were stopped early or that no plan allowed, *Fail* those that raised an error or were "
            "interrupted. Each trial's note says which, and why.",
        ]
    )


def _front_table(front: ParetoFront, page: str) -> str:
    several_rules = len({trial.settings.get("rule") for trial in front.trials}) > 1
    repeated = any(trial.interval is not None for trial in front.trials)
    confidences = ["+/-", "runs", "on front"] if repeated else []
    names = ["effective_batch", "learning_rate", *(["rule"] if several_rules else []), "epochs"]
    head = ["trial", escaped(front.speed), escaped(front.metric), *confidences, *(one.replace("_", " ") for one in names), ""]
    rows = [head, [":---" if one in ("rule", "") else "---:" for one in head]]
    members = front.trials[:_FRONT_ROWS]
    for trial in members:
        facts = trial.facts
        # The fastest member that it is not significantly better than.
        ties = [other.number for other in front.trials if other.number in (facts.ties or ())]
        marks = [
            *(["**knee**"] if trial.number == front.knee else []),
            *(["baseline"] if trial.is_baseline else []),
            *([f"= {ties[0]}"] if ties else []),
        ]
        confidence = []
        if repeated:
            confidence = [f"{trial.half_interval or 0.0:.2g}", str(facts.runs), f"{facts.front_probability or 0.0:.0%}"]
        values = [escaped(number(trial.settings.get(one))) for one in names]
        link = f"[{trial.number}]({page}/trials?numbers={trial.number})"
        rows.append([link, number(front.seconds(trial)), number(trial.accuracy), *confidence, *values, ", ".join(marks)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    left = len(front.trials) - len(members)
    return table + (f"\n\n... and {left} more." if left else "")


def _within_words(front: ParetoFront) -> str:
    best, nearly = front.trials[-1], fastest_within(front, 0.01)
    sentence = f"Best {front.metric}: {number(best.accuracy)} in {seconds(front.seconds(best))} (trial {best.number})."
    if nearly.number == best.number:
        return f"{sentence} No faster trial comes within 1 % of it."
    return (
        f"{sentence} Fastest within 1 % of it: trial {nearly.number}, {number(nearly.accuracy)} in "
        f"{seconds(front.seconds(nearly))}."
    )


def trial_note(record: TrialRecord, spec: StudySpec, front: ParetoFront, *, study: str, traceback: str = "") -> str:
    """A trial in a few lines: how it came out, its plan, its rate.

    Args:
        study: as commands take it.
        traceback: of its last attempt, where it raised an error.
    """
    lines = [_outcome(record, spec, front), *_settings(record, spec)]
    if record.facts.contended and record.counts:
        lines.append(f"Took {record.facts.train_s_error:+.0%} against the known time: the device was shared.")
    if record.number in [trial.number for trial in front.trials]:
        lines.append(f"Its settings for a trainer: {code(f'bsearch export {study} --to hf --trial {record.number}')}")
    note = "  \n".join(lines)
    if traceback:
        shown = traceback if len(traceback) <= _TRACEBACK_CHARACTERS else "...\n" + traceback[-_TRACEBACK_CHARACTERS:]
        note += f"\n\n{code_block(shown)}"
    return note + "\n"


def _outcome(record: TrialRecord, spec: StudySpec, front: ParetoFront) -> str:
    """How it came out and why, in bold and then in words."""
    message = code(cut(record.message, 600)) if record.message else "no reason was kept"
    match record.outcome:
        case "waiting":
            return "**Waiting** to be started."
        case "running":
            return "**Running.**"
        case "infeasible":
            return f"**Infeasible**, so it was not trained: {message}"
        case "stopped":
            return f"**Stopped**: it could no longer reach the front at its own time. {message}"
        case "diverged":
            return f"**Diverged**: {message}. It is no point of the front, whatever its time; plots mark it as infeasible."
        case "out_of_memory":
            return f"**Out of memory**, and no smaller plan was left: {message}"
        case "interrupted":
            later = record.facts.continued_by
            return f"**Interrupted**: {message}" + (f". Trial {later} continues it." if later is not None else "")
        case "error":
            return f"**Failed**: {message}"
    result = f"{escaped(front.metric)} {number(record.accuracy)} in {seconds(record.seconds(front.speed))} of training"
    if front.speed == "device_s":
        result += ", all devices added up"
    member = next((trial for trial in front.trials if trial.number == record.setting), None)
    if member is not None and (member.facts.runs or 1) > 1:
        result += f"; with {member.facts.runs} seeds {number(member.accuracy)} ± {member.half_interval or 0.0:.2g}"
    if record.is_repeat:
        again = f"Repeats trial {record.facts.repeats} with seed {escaped(str(record.facts.seed))}"
        return f"**{again}**: {result}."
    if member is None:
        return f"**Complete**: {result}."
    return f"**On the front{', its knee' if record.number == front.knee else ''}**: {result}."


def _settings(record: TrialRecord, spec: StudySpec) -> Iterator[str]:
    """Plan, rate and length of its training, a line each, as far as they are known."""
    values: Mapping[str, Any] = {**spec.fixed(), **record.settings}
    batch = values.get("effective_batch")
    if isinstance(batch, int):
        yield _plan_words(batch, values.get("accumulation"), values.get("devices")) + "."
    rate, rule = values.get("learning_rate"), values.get("rule", "constant")
    if isinstance(rate, float):
        reference = number(values.get("reference_rate"))
        yield (
            f"Learning rate {number(rate)}: rule {escaped(str(rule))} from {reference} at batch {spec.space.reference_batch}"
            + (f", exponent {number(values['exponent'])}" if "exponent" in values else "")
            + "."
        )
    if "epochs" in values and "samples_budget" in values:
        evaluated = f"{number(values['epochs'])} epochs, {values['samples_budget']} samples"
        memory = values.get("peak_bytes")
        yield evaluated + (f"; peak memory {memory / 2**20:.4g} MiB." if isinstance(memory, int | float) and memory else ".")
    own = {name: value for name, value in record.parameters.items() if name not in _TOLD}
    if own:
        yield "Parameters: " + ", ".join(code(f"{name} = {number(value)}") for name, value in own.items()) + "."


_TOLD = {"effective_batch", "reference_rate", "rule", "exponent", "epochs", "accumulation", "devices"}


def _plan_words(batch: int, accumulation: Any, devices: Any) -> str:
    """A step's samples as the passes it is made of.

    >>> _plan_words(500, 3, 1), _plan_words(501, 1, 2), _plan_words(64, 1, 1)
    ('B = 500 samples a step, as 167+167+166', 'B = 501 samples a step, on 2 devices as 251 | 250', 'B = 64 samples a step')
    """
    words = f"B = {batch} samples a step"
    try:
        plan = BatchPlan(batch, accumulation, devices)
    except InfeasiblePlanError:  # nothing was planned
        return words
    if plan.accumulation == plan.devices == 1:
        return words
    shares = [_sizes(plan.micro_batches(device)) for device in range(plan.devices)]
    if plan.devices == 1:
        return f"{words}, as {shares[0]}"
    return f"{words}, on {plan.devices} devices as " + " | ".join(shares[:8]) + (" | ..." if len(shares) > 8 else "")


def _sizes(micro_batches: Sequence[int]) -> str:
    """Passes of a device: few are told one by one, many are counted."""
    if len(micro_batches) <= 4:
        return "+".join(map(str, micro_batches))
    return " + ".join(f"{len(list(alike))} x {size}" for size, alike in groupby(micro_batches))
