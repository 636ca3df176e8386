"""What the names in a source mean: found by themselves, shown before anything is believed, and corrected by `--map`.

Where two names could mean the same and differ, none is taken: the user says which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...spaces.boundary.secrets import is_secret
from ...spaces.errors import Fault, StudyFileError, cut, near_miss
from ...spaces.names import NAMES, REACHED, direction_of, words_of
from ...spaces.readable import plural, shell_word
from .contradictions import contradictions
from .factors import factor_faults
from .names import (
    Meaning,
    Role,
    is_flag,
    is_group,
    is_metric,
    is_of_training,
    is_of_validation,
    is_other_result,
    is_place,
    is_rate_of_one,
    is_setting,
    is_share,
    meaning_of,
    role_of,
)
from .runs import Run, Scalar
from .values import amount, is_truth, number, unit_of

# More different texts than this are names of runs rather than choices; more parameters than this are no search space.
_MOST_CHOICES, _MOST_PARAMETERS, _MOST_NAMES = 12, 60, 5000
# Of these the first name will do.
_LENIENT = frozenset({"run", "status", "started", "ended", "epochs", "steps", "samples", "size"})
FACTORS = ("effective_batch", "micro_batch", "batch", "accumulation", "devices")
_GAP = 8.0  # between errors that are shares and those in percent
_UNKNOWN = "not a known setting"
_WRITTEN = ("metric", "parameter", "group", "left_out", "nothing")


@dataclass(frozen=True, slots=True)
class Column:
    """A name of a source, and what it is taken for.

    Args:
        meaning: a key of `NAMES`, `metric`, `parameter`, `group`, `left_out` of runs in which it is true, `metric?` where it
            is unclear, or `nothing`.
        why: in words; of `nothing`, why it is left out.
    """

    name: str
    meaning: Meaning
    why: str = ""


@dataclass(frozen=True, slots=True)
class Columns:
    """What every name of a source means.

    Args:
        direction: of the metric; None as long as that is unclear.
        to_target: what the metric counts until a target was reached (`samples`, `epochs`, ...); empty: it is measured at the
            end of a training.
    """

    columns: tuple[Column, ...]
    direction: Literal["minimize", "maximize"] | None
    to_target: str = ""

    def named(self, meaning: Meaning) -> tuple[str, ...]:
        """The names that have a meaning, in the source's order."""
        return tuple(column.name for column in self.columns if column.meaning == meaning)

    def one(self, meaning: Meaning) -> str | None:
        return next(iter(self.named(meaning)), None)


class UnclearColumnsError(StudyFileError):
    """Names that could mean the same, or a direction that is unknown: the user has to say which.

    Args:
        meaning: of them; `direction` of the metric.
        names: that could have it; the directions.
        columns: what is clear already.
    """

    def __init__(
        self, where: str, meaning: Meaning, names: Sequence[str], message: str, columns: Sequence[Column]
    ) -> None:
        self.meaning, self.names, self.columns = meaning, tuple(names), Columns(tuple(columns), None)
        super().__init__(Fault("", message, where))


def columns_of(
    where: str,
    runs: Sequence[Run],
    *,
    mapped: Mapping[str, Meaning] | None = None,
    direction: Literal["minimize", "maximize"] | None = None,
    same: bool = False,
    needs_rate: bool = True,
) -> Columns:
    """What the names of runs mean.

    Args:
        where: the source, for messages.
        mapped: names and their meanings, as the user says.
        direction: of the metric, where its name does not tell.
        same: names that tell groups of runs apart are parameters.
        needs_rate: runs without their learning rates say nothing.

    Raises:
        UnclearColumnsError: two names could mean the same, or the metric's direction is unknown.
        StudyFileError: no batch, rate or metric is found, or the user names what is not there.
    """
    mapped = dict(mapped or {})
    found = _Found(where, runs, mapped, same)
    found.check_mapped()
    taken = [found.column(name) for name in found.roles]
    taken = _one_each(where, found, taken)
    metric = _metric(where, found, taken)
    parameters = [one.name for one in taken if one.meaning == "parameter" and one.name not in found.mapped]
    many = set(parameters[_MOST_PARAMETERS:])
    taken = [
        Column(one.name, "nothing", f"more than {_MOST_PARAMETERS} parameters") if one.name in many else one
        for one in taken
    ]
    taken = _unlike(found, runs, taken)
    why = "; ".join(filter(None, ("as you chose" * (metric in mapped), _mixed_units(where, found, metric))))
    taken = [Column(one.name, "metric", why) if one.name == metric else one for one in taken]
    columns = Columns(tuple(taken), direction or _direction(where, found, metric, taken))
    _needed(where, columns, found, runs, needs_rate)
    return columns


def _unlike(found: _Found, runs: Sequence[Run], columns: Sequence[Column]) -> list[Column]:
    """Names that are none of those known, and differ between runs that would be repeats of one setting: they make these unlike.

    What has as many values as there are runs is a result; and a length that some runs lack is none.
    """
    told = (*FACTORS, "learning_rate", "parameter", "group", "size", "epochs", "steps", "samples")
    used = [one.name for one in columns if one.meaning in told]
    repeats: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        held = run.held
        repeats.setdefault(tuple(str(held.get(name)) for name in used), []).append(run)
    several = [group for group in repeats.values() if len(group) > 1]
    taken = []
    for one in columns:
        values = found.values[one.name]
        if one.meaning == "epochs" and len(values) < found.runs and one.name not in found.mapped:
            one = Column(
                one.name, "nothing", f"missing in {found.runs - len(values)} of {plural(found.runs, 'run')}"
            )
        elif several and one.why == _UNKNOWN and 2 * len(set(map(str, values))) <= len(values):
            differs = sum(len({str(run.values.get(one.name)) for run in group}) > 1 for group in several)
            if 2 * differs > len(several):
                kind = "group" if any(isinstance(value, str) for value in values) else "parameter"
                one = Column(one.name, kind, "differs between runs that are alike otherwise")
        taken.append(one)
    return taken


class _Found:
    """The names in runs: where they stand, and their values."""

    def __init__(self, where: str, runs: Sequence[Run], mapped: Mapping[str, Meaning], same: bool) -> None:
        self.where, self.mapped, self.same = where, mapped, same
        self.roles: dict[str, Role] = {}
        self.values: dict[str, list[Scalar]] = {}
        for run in runs:
            for role, values in (("setting", run.settings), ("", run.values), ("result", run.results)):
                for name, value in values.items():
                    self.roles.setdefault(name, role or role_of(name))  # type: ignore[arg-type]
                    self.values.setdefault(name, []).append(value)
        self.runs = len(runs)
        if len(self.roles) > _MOST_NAMES:
            hint = "Keep the columns that matter."
            raise StudyFileError(
                Fault("", f"expected at most {_MOST_NAMES:,} names, got {len(self.roles):,}. {hint}", where)
            )

    def check_mapped(self) -> None:
        known = (*NAMES, *_WRITTEN)
        faults = [
            Fault(
                "--map",
                f"expected a name of the source, got {name!r}.{near_miss(name, self.roles)}",
                self.where,
            )
            for name in self.mapped
            if name not in self.roles
        ]
        faults += [
            Fault("--map", f"expected one of {', '.join(known)}; got {meaning!r}.{near_miss(meaning, known)}")
            for meaning in self.mapped.values()
            if meaning not in known
        ]
        counts = Counter(
            meaning for meaning in self.mapped.values() if meaning in NAMES or meaning == "metric"
        )
        faults += [
            Fault(
                "--map",
                f"expected one name for {meaning}, got {', '.join(n for n, m in self.mapped.items() if m == meaning)}",
            )
            for meaning, several in counts.items()
            if several > 1
        ]
        if faults:
            raise StudyFileError(faults)

    def varies(self, name: str) -> bool:
        values = self.values[name]
        return any(value != values[0] and value == value for value in values)

    def column(self, name: str) -> Column:
        """What one name means, by itself."""
        if name in self.mapped:
            return Column(name, self.mapped[name], "as you chose")
        role, values = self.roles[name], self.values[name]
        if is_secret(name) or name.endswith("_token"):
            return Column(name, "nothing", "may be a secret")
        words = words_of(name)
        if words == ["rule"] or words[:2] == ["reference", "rate"]:
            return Column(name, "nothing", "the learning rate is the optimizer's own")
        if (meaning := meaning_of(name)) and self._can_be(name.lower(), meaning, role, values):
            return Column(name, meaning)
        if role != "setting" and is_flag(name) and all(is_truth(value) for value in values):
            return Column(name, "left_out", "runs in which it is true")
        if role == "result" or (role == "" and (is_metric(name) or is_other_result(name))):
            return Column(name, "nothing", "a result")
        if not self.varies(name):
            return Column(name, "nothing", f"the same in every run, {cut(str(values[0]), 40)}")
        if is_group(name, any(isinstance(value, str) for value in values)) and len(
            set(map(str, values))
        ) < len(values):
            return Column(name, "parameter" if self.same else "group")
        return self._other(name, role)

    def _can_be(self, name: str, meaning: Meaning, role: Role, values: Sequence[Scalar]) -> bool:
        if meaning == "status":
            return role != "setting"
        if any(isinstance(value, bool) for value in values):
            return False
        if name == "batch" and [number(value) for value in values] in (
            [*range(len(values))],
            [*range(1, len(values) + 1)],
        ):
            return False  # the numbers of batches
        if meaning == "size":
            return len(values) == self.runs and all(amount(value) is not None for value in values)
        if role == "setting":
            return meaning not in ("seconds", "started", "ended")
        return role != "result" or meaning not in (
            "learning_rate",
            "seed",
            "batch",
            "devices",
            "accumulation",
        )

    def _other(self, name: str, role: Role) -> Column:
        """A name that is none of those known: a parameter, or nothing."""
        values = self.values[name]
        if len(values) < self.runs:
            return Column(
                name, "nothing", f"missing in {self.runs - len(values)} of {plural(self.runs, 'run')}"
            )
        if any(isinstance(value, str) for value in values):
            several = len(set(map(str, values)))
            if several == len(values) or is_place(name):
                return Column(name, "nothing", "a name or a place")
            if several > _MOST_CHOICES:
                return Column(name, "nothing", f"text, {several} different ones")
        if role == "setting" or is_setting(name):
            return Column(name, "parameter")
        return Column(name, "nothing", _UNKNOWN)


def _one_each(where: str, found: _Found, columns: Sequence[Column]) -> list[Column]:
    """One name a meaning: what the user says, then settings, then the name listed first; where values differ, none."""
    taken = list(columns)
    if micro := next((column.name for column in taken if column.meaning == "micro_batch"), None):
        # Such as Trainer's train_batch_size, that of one device too.
        taken = [
            Column(one.name, "nothing", f"instead of it, {micro}") if one.meaning == "batch" else one
            for one in taken
        ]
    taken = _with_reached(taken, found)
    rates = [one.name for one in taken if is_rate_of_one(one.name) and found.varies(one.name)]
    if len(rates) > 1 and not {"learning_rate", *rates} & {*found.mapped.values(), *found.mapped}:
        message = f"expected one learning_rate, got {_listed(rates)}. Write --map {rates[0]}=learning_rate, or another."
        raise UnclearColumnsError(where, "learning_rate", rates, message, taken)
    for meaning in NAMES:
        places = [place for place, column in enumerate(taken) if column.meaning == meaning]
        said = [place for place in places if taken[place].name in found.mapped]
        if len(places) < 2:
            continue
        chosen = said[:1] or [min(places, key=lambda place: _rank(meaning, taken[place].name, found))]
        others = [place for place in places if place not in chosen]
        first = taken[chosen[0]].name
        unlike = [
            taken[place].name for place in others if found.values[taken[place].name] != found.values[first]
        ]
        if unlike and not said and meaning not in _LENIENT:
            message = f"expected one {meaning}, got {_listed([first, *unlike])}. Write --map {first}={meaning}, or the other."
            raise UnclearColumnsError(where, meaning, [first, *unlike], message, taken)
        for place in others:
            alike = "as" if taken[place].name not in unlike else "instead of it,"
            taken[place] = Column(taken[place].name, "nothing", f"{alike} {first}")
    return taken


def _with_reached(columns: Sequence[Column], found: _Found) -> list[Column]:
    """Names of how far a training came, beside one of what was planned."""
    taken = list(columns)
    for meaning in ("epochs", "steps"):
        planned = [
            one.name for one in taken if one.meaning == meaning and words_of(one.name)[-1] not in REACHED
        ]
        planned = [
            name
            for name in planned
            if found.roles[name] != "result" and "_".join(words_of(name)) not in REACHED
        ]
        if planned:
            for place, one in enumerate(taken):
                if one.meaning == meaning and one.name not in (*planned, *found.mapped):
                    taken[place] = Column(one.name, "reached", f"of {planned[0]}")
    return taken


def _rank(meaning: Meaning, name: str, found: _Found) -> tuple[bool, int, int]:
    """Which name is meant first: a setting before a result, then the one listed earlier."""
    text = "_".join(words_of(name))
    order = [place for place, known in enumerate(NAMES[meaning]) if text.endswith(known)]
    return found.roles[name] != "setting", min(order, default=99), len(text)


def _metric(where: str, found: _Found, columns: Sequence[Column]) -> str:
    """The name of the metric: the only one of validation data, or the only one that is not of the training data."""
    if said := [name for name, meaning in found.mapped.items() if meaning == "metric"]:
        return said[0]
    free = [
        column.name
        for column in columns
        if column.meaning == "nothing" and found.roles[column.name] != "setting"
    ]
    numeric = [
        name
        for name in free
        if is_metric(name) and any(number(value) is not None for value in found.values[name])
    ]
    named = [name for name in numeric if found.varies(name)] or numeric
    candidates = [name for name in named if is_of_validation(name)] or [
        name for name in named if not is_of_training(name)
    ]
    distinct = [
        name for place, name in enumerate(candidates) if not _repeated(found, candidates[:place], name)
    ]
    if len(distinct) > 1:
        forms = [form for name in distinct for form in (name, *_extremes(found, name))]
        each = [f"--metric {shell_word(form)}" for form in forms]
        message = f"expected one metric, got {_listed(distinct)}. Write {', '.join(each[:-1])} or {each[-1]}."
        asked = [Column(one.name, "metric?") if one.name in distinct else one for one in columns]
        raise UnclearColumnsError(where, "metric", forms, message, asked)
    if not distinct:
        got = ", ".join(cut(name, 40) for name in list(found.roles)[:12]) or "nothing"
        text = next((name for name in free if is_metric(name)), None)
        hint = "Write --metric NAME, the result by which runs are compared."
        if reached := next(
            (name for name in found.roles if {"target", "to_target"} & {words_of(name)[0], name}), None
        ):
            hint = f"Runs to a target, such as {cut(reached, 40)}, are read by bsearch ask alone. {hint}"
        elif text is not None:
            hint = f"{cut(text, 40)} holds no numbers, such as {cut(repr(found.values[text][0]), 40)}. {hint}"
        raise StudyFileError(
            Fault("", f"expected a metric, such as val_loss or accuracy; got {got}. {hint}", where)
        )
    return distinct[0]


def _mixed_units(where: str, found: _Found, metric: str) -> str:
    """What is to be said of accuracies or errors of which some are shares and others percents, as far as they overlap.

    Raises:
        StudyFileError: there are some, and the user did not choose the metric.
    """
    values = [
        value for each in found.values[metric] if (value := number(each)) is not None and 0 < value <= 100
    ]
    shares, percents = [value for value in values if value <= 1], [value for value in values if value > 1]
    if not shares or not percents:
        return ""
    # A low error in percent may be below 1, and one of some model close to it: only a gap tells.
    by_gap = words_of(metric)[-1] in ("error", "err", "err1") and max(shares) * _GAP < min(percents)
    if not (by_gap or (is_share(metric) and 100 * max(shares) >= min(percents))):
        return ""
    both = f"{max(shares):g} and {max(percents):g}"
    if metric not in found.mapped:
        hint = f"Write all in one unit, or --metric {shell_word(metric)} where they are."
        message = f"expected shares or percents, got both, such as {both}. {hint}"
        raise StudyFileError(Fault(metric, message, where))
    return f"{both} are taken for one unit"


def _extremes(found: _Found, metric: str) -> list[str]:
    """The names under which a curve's best value stands; both extremes where its direction is unknown."""
    known = direction_of(metric)
    ends = {"lowest": known != "maximize", "highest": known != "minimize"}
    return [name for end, better in ends.items() if better and (name := f"{metric} ({end})") in found.roles]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(cut(name, 60) for name in names[:8]) + (", ..." if len(names) > 8 else "")


def _repeated(found: _Found, before: Iterable[str], name: str) -> bool:
    return any(found.values[other] == found.values[name] for other in before)


def _direction(
    where: str, found: _Found, metric: str, columns: Sequence[Column]
) -> Literal["minimize", "maximize"]:
    for name in (f"direction of {metric}", "direction"):
        told = {value for value in found.values.get(name, []) if value in ("minimize", "maximize")}
        if len(told) == 1:
            return told.pop()  # type: ignore[return-value]
    if (known := direction_of(metric)) is not None:
        return known
    message = f"expected to know whether a lower {cut(metric, 60)} is better. Write --metric NAME:minimize or NAME:maximize."
    raise UnclearColumnsError(where, "direction", ("minimize", "maximize"), message, columns)


def _needed(where: str, columns: Columns, found: _Found, runs: Sequence[Run], needs_rate: bool) -> None:
    faults = []
    if not any(columns.named(meaning) for meaning in ("effective_batch", "micro_batch", "batch")):
        faults.append(
            Fault("", "expected a column of batch sizes, got none. Write --map NAME=effective_batch.", where)
        )
    if needs_rate and not columns.named("learning_rate"):
        faults.append(
            Fault("", "expected a column of learning rates, got none. Write --map NAME=learning_rate.", where)
        )
    time = columns.one("seconds")
    clocks = [
        str(value).count(":")
        for value in found.values.get(time or "", [])
        if isinstance(value, str) and ":" in value
    ]
    if time and clocks and max(clocks) == 1 and unit_of(time) == 1.0:
        shown = next(str(value) for value in found.values[time] if ":" in str(value))
        hint = f"Call it '{time} (min)' or '{time} (h)', or write 0:01:20."
        faults.append(
            Fault(
                time, f"expected to know whether {cut(shown, 20)} begins with minutes or hours. {hint}", where
            )
        )
    names = {meaning: columns.one(meaning) for meaning in NAMES}
    faults += factor_faults(where, runs, names, found.mapped)
    faults += contradictions(
        where, runs, names, columns.named("group"), columns.named("reached"), found.mapped
    )
    if faults:
        raise StudyFileError(faults)
