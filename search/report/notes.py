"""Notes on a study and on each of its trials, as Markdown for the dashboard's pages.

Names, messages and tracebacks come from tasks and databases that others may have written. They are escaped or shown as code, so
that none becomes a link, an image, a heading or a formula.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import assert_never

from ...spaces.errors import cut, plain
from ...spaces.front import ParetoFront
from ...spaces.readable import number, out_of
from ...spaces.record import TrialRecord
from ...spaces.study.spec import StudySpec
from .columns import front_columns, some_members
from .sentences import best_sentence

# The end of a traceback is the most useful part, and every page of the study includes it.
_TRACEBACK_CHARACTERS = 4000
_FRONT_ROWS = 30
# An invisible character that breaks up what would be recognised as an address.
_JOINER = "\u2060"


def escaped(text: str) -> str:
    r"""Text that a line of Markdown shows literally.

    >>> print(escaped("a *b* [c](d) <e> $f$ |"))
    a \*b\* \[c\](d) \<e\> \$f\$ \|
    """
    line = re.sub(r"([\\`*_\[\]<>$|~&#])", r"\\\1", " ".join(plain(text).split()))
    line = re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", line)  # not a list item, at the start of the line
    # Renderers turn bare addresses into links, escaped or not.
    return re.sub(r"(?<=:)(?=//)|(?<=www)(?=\.)|(?=@)|(?<=@)", _JOINER, line, flags=re.IGNORECASE)


def code(text: str) -> str:
    """Text as inline code in Markdown; not for tables, where a | would end a cell.

    >>> print(code("a `tick`"))
    `` a `tick` ``
    """
    line = " ".join(plain(text).split())
    fence = "`" * _fence(line, 1)
    room = " " if "`" in line else ""
    return f"{fence}{room}{line}{room}{fence}" if line else ""


def code_block(text: str) -> str:
    """Text as a code block that none of its lines can end."""
    # Longer lines would widen the whole page.
    wrapped = (
        textwrap.wrap(line, 90, replace_whitespace=False, drop_whitespace=False) or [""]
        for line in plain(text).splitlines()
    )
    fence = "`" * _fence(text, 3)
    return "\n".join([f"{fence}text", *chain.from_iterable(wrapped), fence])


def _fence(text: str, least: int) -> int:
    """Number of backticks that safely enclose a text."""
    return max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def study_note(
    name: str,
    spec: StudySpec,
    front: ParetoFront,
    done: int,
    summary: Sequence[str],
    *,
    study: str,
    page: str,
) -> str:
    """A study's results so far, as text and a table.

    Args:
        done: trials that count towards its budget.
        summary: sentences shown below the front.
        study: the study as commands name it: its file, or a masked URL with options.
        page: path of the study's page; those of its trials are below it.
    """
    return "\n\n".join(_study_parts(name, spec, front, done, summary, study, page)) + "\n"


def _study_parts(
    name: str, spec: StudySpec, front: ParetoFront, done: int, summary: Sequence[str], study: str, page: str
) -> Iterator[str]:
    yield f"## {escaped(name)}: {out_of(done, spec.budget.trials, ' of ')} trials, {len(front.trials)} on the front"
    following = {
        f"bsearch show {study} --pick N": "a trial with its learning curve and traceback",
        f"bsearch report {study}": "everything on one page",
    }
    if best := best_sentence(front):
        yield _front_table(front, page)
        yield "\n".join(f"- {escaped(sentence)}" for sentence in [best, *summary])
        to_export = "the settings of a point of the front, for a trainer"
        following = {f"bsearch export {study} --to hf --pick within:1%": to_export, **following}
    else:
        yield "No trial has finished yet, so there is no front. Reload the page later."
    yield "**Next**"
    yield "\n".join(f"- {code(command)}: {purpose}" for command, purpose in following.items())
    yield "**How to read these pages**"
    yield "\n".join(
        [
            "- *Best Trial* and the plot *Pareto Front* are of single runs; here, a setting that was trained several times is "
            "shown with its mean.",
            "- *Infeasible* (grey) trials diverged: they have a time and an accuracy, but cannot be on the front.",
            "- *Pruned* trials were stopped early, left paused, or had no feasible plan; *Fail* trials raised an error. "
            "*Running* are also those that are paused or interrupted and go on later. Each trial's note says which, and why.",
            "- These pages are a copy: what is changed here changes nothing in the study. A note of your own stays.",
        ]
    )


def _front_table(front: ParetoFront, page: str) -> str:
    """The front in Markdown, each trial's number a link to its page."""
    members = some_members(front, _FRONT_ROWS)
    numbers, *columns = front_columns(front, members)
    links = tuple(f"[{trial}]({page}/trials?numbers={trial})" for trial in numbers.cells)
    rows = [
        [numbers.name, *(escaped(column.name) for column in columns)],
        ["---:", *(":---" if column.words else "---:" for column in columns)],
        *zip(links, *(map(escaped, column.cells) for column in columns), strict=True),
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    left = len(front.trials) - len(members)
    return table + (f"\n\nLeft out: {left} more, between these." if left else "")


def trial_note(record: TrialRecord, front: ParetoFront, *, study: str, traceback: str = "") -> str:
    """A trial's outcome and the reason for it, in a few lines: the dashboard shows its values by itself.

    Args:
        study: as commands name it.
        traceback: of its last attempt, if that raised an error.
    """
    lines = [_outcome(record, front)]
    if record.number in [trial.number for trial in front.trials]:
        lines.append(
            f"Settings for a trainer: {code(f'bsearch export {study} --to hf --pick {record.number}')}"
        )
    note = "  \n".join(lines)
    if traceback:
        shown = (
            traceback
            if len(traceback) <= _TRACEBACK_CHARACTERS
            else "...\n" + traceback[-_TRACEBACK_CHARACTERS:]
        )
        note += f"\n\n{code_block(shown)}"
    return note + "\n"


def _outcome(record: TrialRecord, front: ParetoFront) -> str:
    """The outcome in bold, and its reason."""
    message = code(cut(record.message, 600)) if record.message else "no reason was recorded"
    match record.outcome:
        case "running":
            return "**Running.**"
        case "infeasible":
            return f"**Infeasible**, not trained: {message}"
        case "stopped":
            return f"**Stopped** early: unlikely to reach the front at its training time. {message}"
        case "paused":
            share = f"{record.trained_share:.0%} of its training"
            return f"**Paused** after {share}; it resumes from its checkpoint if that is worth more than a new trial."
        case "diverged":
            return f"**Diverged**: {message}. It cannot be on the front."
        case "out_of_memory":
            return f"**Out of memory**, with no smaller plan left to try: {message}"
        case "interrupted":
            goes_on = "**Interrupted**; the study's next run goes on with it."
            return f"**Interrupted**: {message}" if record.has_ended else goes_on
        case "error":
            return f"**Failed**: {message}"
        case "unreadable":
            return f"**Unreadable** in the database, and left out of everything else: {message}"
        case "complete":
            return _result(record, front)
    assert_never(record.outcome)


def _result(record: TrialRecord, front: ParetoFront) -> str:
    """Of a complete trial, what it came to and whether it is on the front."""
    result = f"{escaped(front.metric)} {number(record.accuracy)} {front.takes(record)}"
    if front.noun == "time":
        result += " of training"
    if front.speed == "device_s":
        result += ", summed over devices"
    member = next((trial for trial in front.trials if trial.number == record.setting), None)
    if member is not None and (member.facts.runs or 1) > 1:
        result += (
            f"; with {member.facts.runs} seeds {number(member.accuracy)} ± {member.half_interval or 0.0:.2g}"
        )
    if record.is_repeat:
        repeats = f"Repeats trial {record.facts.repeats} with seed {escaped(str(record.facts.seed))}"
        return f"**{repeats}**: {result}."
    if member is None:
        return f"**Complete**: {result}."
    return f"**On the front**: {result}."
