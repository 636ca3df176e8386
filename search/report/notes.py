"""Notes on a study and on each of its trials, as Markdown for the dashboard's pages.

Names, messages and tracebacks come from tasks and databases that others may have written. They are escaped or shown as code, so
that none becomes a link, an image, a heading or a formula.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, assert_never

from ...spaces.errors import InfeasiblePlanError, cut, plain
from ...spaces.front import ParetoFront
from ...spaces.plan import BatchPlan
from ...spaces.readable import number, out_of
from ...spaces.record import TrialFacts, TrialRecord
from ...spaces.study.spec import StudySpec
from ..analysis.choice import fastest_within

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
        textwrap.wrap(line, 90, replace_whitespace=False, drop_whitespace=False) or [""] for line in plain(text).splitlines()
    )
    fence = "`" * _fence(text, 3)
    return "\n".join([f"{fence}text", *chain.from_iterable(wrapped), fence])


def _fence(text: str, least: int) -> int:
    """Number of backticks that safely enclose a text."""
    return max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def study_note(
    name: str, spec: StudySpec, front: ParetoFront, done: float, summary: Sequence[str], *, study: str, page: str
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
    name: str, spec: StudySpec, front: ParetoFront, done: float, summary: Sequence[str], study: str, page: str
) -> Iterator[str]:
    yield f"## {escaped(name)}: {out_of(done, spec.budget.trials, ' of ')} trials, {len(front.trials)} on the front"
    if not front.trials:
        yield "No trial has finished yet, so there is no front. Reload the page later."
    else:
        yield _front_table(front, page)
        yield "\n".join(f"- {escaped(sentence)}" for sentence in [_best_words(front), *summary])
    choice = "--pick knee" if front.knee is not None else "--pick within:1%"
    commands = [
        *([f"bsearch export {study} --to hf {choice}"] if front.trials else []),
        f"bsearch show {study} --pick N",
        f"bsearch report {study}",
    ]
    purposes = ["the settings of a point of the front, for a trainer"] if front.trials else []
    purposes += ["a trial with its learning curve and traceback", "everything on one page"]
    yield "**Next**"
    yield "\n".join(f"- {code(command)}: {purpose}" for command, purpose in zip(commands, purposes, strict=True))
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
    several_rules = len({trial.settings.get("rule") for trial in front.trials}) > 1
    repeated = any(trial.interval is not None for trial in front.trials)
    confidences = ["+/-", "runs", "on front"] if repeated else []
    names = ["effective_batch", "learning_rate", *(["rule"] if several_rules else []), "epochs"]
    head = [
        "trial",
        *map(escaped, front.speeds),
        escaped(front.metric),
        *confidences,
        *(name.replace("_", " ") for name in names),
        "",
    ]
    rows = [head, [":---" if heading in ("rule", "") else "---:" for heading in head]]
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
        values = [escaped(number(trial.settings.get(name))) for name in names]
        link = f"[{trial.number}]({page}/trials?numbers={trial.number})"
        taken = [number(trial.taken(speed)) for speed in front.speeds]
        rows.append([link, *taken, number(trial.accuracy), *confidence, *values, ", ".join(marks)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    left = len(front.trials) - len(members)
    return table + (f"\n\n... and {left} more." if left else "")


def _best_words(front: ParetoFront) -> str:
    best, nearly = front.best, fastest_within(front, 0.01)
    assert best is not None
    sentence = f"Best {front.metric}: {number(best.accuracy)} {front.takes(best)} (trial {best.number})."
    if nearly.number == best.number:
        return f"{sentence} No {front.faster} trial comes within 1 % of it."
    return (
        f"{sentence} {front.fastest.capitalize()} within 1 % of it: trial {nearly.number}, {number(nearly.accuracy)} "
        f"{front.takes(nearly)}."
    )


def trial_note(record: TrialRecord, spec: StudySpec, front: ParetoFront, *, study: str, traceback: str = "") -> str:
    """A trial in a few lines: its outcome, plan and learning rate.

    Args:
        study: as commands name it.
        traceback: of its last attempt, if that raised an error.
    """
    lines = [_outcome(record, spec, front), *_settings(record, spec)]
    if record.facts.contended and record.counts:
        lines.append(_contention_words(record.facts))
    if record.number in [trial.number for trial in front.trials]:
        lines.append(f"Settings for a trainer: {code(f'bsearch export {study} --to hf --pick {record.number}')}")
    note = "  \n".join(lines)
    if traceback:
        shown = traceback if len(traceback) <= _TRACEBACK_CHARACTERS else "...\n" + traceback[-_TRACEBACK_CHARACTERS:]
        note += f"\n\n{code_block(shown)}"
    return note + "\n"


def _contention_words(facts: TrialFacts) -> str:
    """Why a trial's clock differs from its predicted time.

    >>> _contention_words(TrialFacts(train_s_error=0.5, waited_s=4.0, throttled_s=3.0, others_share=0.2, stolen_share=0.1))
    "Measured training time differs by +50% from the predicted time; it waited for a core for 4 s of it, 3 s of that for its \
container's processor limit; other programs used 20% of the machine meanwhile; its host gave 10% of its processor time to \
other virtual machines."
    >>> _contention_words(TrialFacts(train_s_error=0.5))
    'Measured training time differs by +50% from the predicted time: the device was probably shared.'
    """
    words = f"Measured training time differs by {facts.train_s_error:+.0%} from the predicted time"
    if facts.waited_s:
        words += f"; it waited for a core for {facts.waited_s:.3g} s of it"
    if facts.throttled_s:
        words += f", {facts.throttled_s:.3g} s of that for its container's processor limit"
    if facts.others_share:
        words += f"; other programs used {facts.others_share:.0%} of the machine meanwhile"
    if facts.stolen_share and facts.stolen_share >= 0.01:
        words += f"; its host gave {facts.stolen_share:.0%} of its processor time to other virtual machines"
    elif not facts.others_share and not facts.throttled_s:
        words += ": the device was probably shared"
    return f"{words}."


def _outcome(record: TrialRecord, spec: StudySpec, front: ParetoFront) -> str:
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
            if record.has_ended:
                return f"**Paused** after {share}, and never resumed."
            return f"**Paused** after {share}; it resumes from its checkpoint if that is worth more than a new trial."
        case "diverged":
            return f"**Diverged**: {message}. It cannot be on the front; plots mark it as infeasible."
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
        result += f"; with {member.facts.runs} seeds {number(member.accuracy)} ± {member.half_interval or 0.0:.2g}"
    if record.is_repeat:
        repeats = f"Repeats trial {record.facts.repeats} with seed {escaped(str(record.facts.seed))}"
        return f"**{repeats}**: {result}."
    if member is None:
        return f"**Complete**: {result}."
    return f"**On the front{', at its knee' if record.number == front.knee else ''}**: {result}."


def _settings(record: TrialRecord, spec: StudySpec) -> Iterator[str]:
    """Plan, learning rate, epochs and memory, one line each, as far as they are known."""
    values: Mapping[str, Any] = {**spec.fixed(), **record.settings}
    batch = values.get("effective_batch")
    if isinstance(batch, int):
        mode = values.get("activation_checkpointing")
        with_mode = f", with {escaped(str(mode))} activation checkpointing" if mode else ""
        yield _plan_words(batch, values.get("accumulation"), values.get("devices")) + with_mode + "."
    rate, rule = values.get("learning_rate"), values.get("rule", "constant")
    if isinstance(rate, float):
        reference = number(values.get("reference_rate"))
        yield (
            f"Learning rate {number(rate)}: rule {escaped(str(rule))} from {reference} at batch {spec.space.reference_batch}"
            + (f", exponent {number(values['exponent'])}" if "exponent" in values else "")
            + "."
        )
    if "epochs" in values and "samples_budget" in values:
        trained = f"{number(values['epochs'])} epochs, {values['samples_budget']} samples"
        memory = values.get("peak_bytes")
        yield trained + (f"; peak memory {memory / 2**20:.4g} MiB." if isinstance(memory, int | float) and memory else ".")
    further = {name: value for name, value in record.parameters.items() if name not in _SHOWN}
    if further:
        yield "Parameters: " + ", ".join(code(f"{name} = {number(value)}") for name, value in further.items()) + "."


_SHOWN = {"effective_batch", "reference_rate", "rule", "exponent", "epochs", "accumulation", "devices"}


def _plan_words(batch: int, accumulation: Any, devices: Any) -> str:
    """A step's samples, split into devices and micro-batches.

    >>> _plan_words(500, 3, 1), _plan_words(501, 1, 2), _plan_words(64, 1, 1)
    ('Effective batch 500 = 167+167+166', 'Effective batch 501 on 2 devices = 251 | 250', 'Effective batch 64')
    """
    text = f"Effective batch {batch}"
    try:
        plan = BatchPlan(batch, accumulation, devices)
    except InfeasiblePlanError:  # nothing was planned
        return text
    if plan.accumulation == plan.devices == 1:
        return text
    shares = [_sizes(plan.micro_batches(device)) for device in range(plan.devices)]
    if plan.devices == 1:
        return f"{text} = {shares[0]}"
    return f"{text} on {plan.devices} devices = " + " | ".join(shares[:8]) + (" | ..." if len(shares) > 8 else "")


def _sizes(micro_batches: Sequence[int]) -> str:
    """Micro-batches of a device: listed if few, counted if many."""
    if len(micro_batches) <= 4:
        return "+".join(map(str, micro_batches))
    return " + ".join(f"{len(list(equal))} x {size}" for size, equal in groupby(micro_batches))
