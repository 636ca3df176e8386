"""Rows of our tables as values.

Results outlive the version that wrote them, and others may have changed the database, so each row is read as data from outside.
One that this version cannot read is left out with its name and the reason (`left_out`), and everything else is used; where
nothing can be done without it, reading it raises a `StorageError` of the same words.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, cached_property
from typing import Any, TypeVar, get_args

import sqlalchemy as sa
from pydantic import TypeAdapter, ValidationError

from ...spaces.deadline import StoredDeadline
from ...spaces.errors import BsearchError, LeftOutWarning, StorageError, cut
from ...spaces.laws.device import DeviceProfile
from ...spaces.laws.step_time import StepTime
from ...spaces.record import TrialFacts, TrialRecord
from ...spaces.study.goals import Objectives
from ...spaces.study.spec import StudySpec
from ...spaces.trial import OutcomeKind, Parameter, TrialSetup
from ..analysis.rates import StoredRates
from . import schema

T = TypeVar("T")
Row = Mapping[Any, Any]  # SQLAlchemy's, whose keys may be columns too

# Far above any result, and far below where squares overflow.
_LARGEST = 1e100
# A number this far beyond the trial before it is no trial's place.
_LARGEST_GAP = 10_000
_OUTCOMES = (*get_args(OutcomeKind), "running")
# Facts that may be negative, and those that may be infinite or unknown: an interval of the noise scale has no upper end where
# the noise is not significant.
_SIGNED = frozenset(
    {"train_s_error", "stopped_accuracy", "rung_accuracy", "expected_accuracy", "mean_low", "mean_high", "seed", "curve"}
)
_UNBOUNDED = frozenset({"noise_scale", "noise_scale_low", "noise_scale_high", "curve"})
# Parameters that every study names alike.
_WHOLE = ("effective_batch", "accumulation", "devices")
_NUMBERS = (*_WHOLE, "reference_rate", "epochs", "weight_decay")
# Keys of a study that results are read by; of the others a value that cannot be read is left out.
_READ_BY = frozenset({"study", "task", "space", "training", "devices", "objectives"})


class _Unreadable(ValueError):
    """What was expected of a row, and what it holds."""


# Saying it


_WHAT = {
    "bsearch_attempt": ("an attempt at trial", "attempts at trials"),
    "bsearch_measurement": ("a measurement of trial", "measurements of trials"),
    "bsearch_trial": ("trial", "trials"),
}


def row_name(table: sa.Table, *rows: Row) -> str:
    """Rows of a table in words.

    >>> row_name(schema.trials, {"study": "digits", "number": 7})
    'trial 7 of study digits (bsearch_trial)'
    >>> row_name(schema.trials, *({"study": "digits", "number": number} for number in (1, 3, 4, 5)))
    'trials 1, 3 to 5 of study digits (bsearch_trial)'
    """
    if table.name not in _WHAT:
        name = ", ".join(f"study {row['name']}" if "name" in row else f"profile {str(row['key'])[:12]}" for row in rows)
    else:
        found = {row["number"] for row in rows}
        places = [str(number) for number in found if not isinstance(number, int)]
        for first, last in runs_of(sorted(number for number in found if isinstance(number, int))):
            places.append(str(first) if first == last else f"{first} to {last}")
        name = f"{_WHAT[table.name][len(found) > 1]} {', '.join(places)} of study {rows[0]['study']}"
    return f"{cut(name, 200)} ({table.name})"


def runs_of(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers in an ascending sequence.

    >>> list(runs_of([0, 1, 2, 5, 7, 8]))
    [(0, 2), (5, 5), (7, 8)]
    """
    first = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[first], numbers[place - 1]
            first = place


def left_out(what: str, why: object) -> None:
    """Say that a row, or a part of it, is left out. The command line prints each such sentence once."""
    warnings.warn(f"left out: {what}: {why}", LeftOutWarning, stacklevel=2)


def refused(what: str, why: object) -> StorageError:
    """The error of a row that nothing can be done without."""
    return StorageError(
        f"{what}: {why}. Another version of bsearch has written it, or it was changed: use that version, restore the database "
        "from a copy, or begin another study (--new)."
    )


def readable(table: sa.Table, rows: Iterable[Row], read: Callable[[Row], T]) -> list[T]:
    """What can be read of rows; the others are left out, those of the same reason with one sentence."""
    found, faulty = list[T](), dict[str, list[Row]]()
    for row in rows:
        try:
            found.append(read(row))
        except (_Unreadable, BsearchError) as error:
            faulty.setdefault(str(error), []).append(row)
    for why, those in faulty.items():
        left_out(row_name(table, *those), why)
    return found


# Parts of rows


def _document(row: Row, column: str, kind: type[T]) -> T:
    """The JSON document in a column, an object or a list."""
    text = row[column]
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise _Unreadable(f"{column}: expected JSON, got {cut(repr(text), 60)}") from None
    if not isinstance(value, kind):
        raise _Unreadable(f"{column}: expected a JSON {'object' if kind is dict else 'list'}, got {cut(repr(text), 60)}")
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _validated(column: str, kind: Any, value: Any) -> Any:
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, (column, *first["loc"])))
        raise _Unreadable(f"{where}: {first['msg'].lower()}, got {cut(repr(first['input']), 60)}") from None


def _number(name: str, value: Any, *, least: float = -_LARGEST, whole: bool = False) -> Any:
    """A number that arithmetic can be done with."""
    most, kinds = (2**53, int) if whole else (_LARGEST, int | float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        what = "an integer" if whole else "a finite number"
        from_on = "" if least == -_LARGEST else f" >= {least:g}"
        raise _Unreadable(f"{name}: expected {what}{from_on}, got {cut(repr(value), 60)}")
    return value


def _text(row: Row, column: str) -> str:
    """A text, empty where there is none."""
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise _Unreadable(f"{column}: expected a text, got {cut(repr(value), 60)}")
    return value or ""


def _local_time(row: Row, column: str) -> str:
    """A stored time in this machine's zone, as tables show it; empty where there is none."""
    utc = _text(row, column)
    return _instant(column, utc).astimezone().replace(tzinfo=None).isoformat(timespec="milliseconds") if utc else ""


def _instant(column: str, text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
        instant.timestamp(), instant.astimezone()
    except (ValueError, OverflowError, OSError):
        raise _Unreadable(f"{column}: expected a time such as 2026-01-31T12:00:00+00:00, got {cut(repr(text), 60)}") from None
    return instant


# Trials


def objectives_of(spec: str | None) -> Objectives | None:
    """A stored study's objectives, by the text of its spec; None where that cannot be read."""
    try:
        return Objectives.model_validate(json.loads(spec or "")["objectives"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def trials_of(
    study: str,
    rows: Iterable[Row],
    objectives: Objectives | None,
    known: Mapping[int, TrialRecord],
    attempted: Any = None,
) -> list[TrialRecord]:
    """A study's trials by number, from 0 without gaps: one whose row is missing or cannot be read is `unreadable`.

    Args:
        rows: those that are not known.
        objectives: of the study; None where they are not known.
        known: trials as they were read before.
        attempted: the largest number among the study's attempts.
    """
    found = dict(known)
    numbered = readable(schema.trials, rows, lambda row: (_number("number", row["number"], least=0, whole=True), row))
    found |= {number: _trial(row, objectives) for number, row in numbered}
    places, count = sorted(found), 0
    if isinstance(attempted, int) and attempted > max(places, default=-1):
        places.append(attempted)  # it has begun, so there was a row
    for place in places:
        if place - count > _LARGEST_GAP:
            left_out(f"trials of study {study} from number {place} on", f"expected the numbers to go on from {count}")
            break
        for lost in range(count, place + 1):
            found.setdefault(lost, TrialRecord.of(lost, "unreadable", {}, TrialFacts(message="its row is missing")))
        count = place + 1
    records = [found[number] for number in range(count)]
    unreadable = [record for record in records if record.outcome == "unreadable"]
    for why in dict.fromkeys(record.message for record in unreadable):
        those = ({"study": study, "number": record.number} for record in unreadable if record.message == why)
        left_out(row_name(schema.trials, *those), why)
    return records


def _trial(row: Row, objectives: Objectives | None) -> TrialRecord:
    """The trial of a row; what cannot be read makes it `unreadable`, with the reason as its message and the rest as it is."""
    faults: list[str] = []

    def read(part: Callable[..., Any], *arguments: Any, otherwise: Any = None) -> Any:
        try:
            return part(row, *arguments)
        except _Unreadable as error:
            faults.append(str(error))
            return otherwise

    parameters, facts = read(_parameters, otherwise={}), read(_facts, otherwise=TrialFacts())
    outcome, violation = read(_outcome), read(lambda row: _number("violation", row["violation"]))
    values = read(_values, outcome, None if objectives is None else objectives.speeds, facts)
    started_at, ended_at = read(_local_time, "started_at", otherwise=""), read(_local_time, "ended_at")
    if faults:
        facts = replace(facts, message="; ".join(faults))
        return TrialRecord(row["number"], "unreadable", parameters, facts, message=facts.message or "", started_at=started_at)
    direction = "maximize" if objectives is None else objectives.metric.direction
    return TrialRecord.of(row["number"], outcome, parameters, facts, values, violation, started_at, ended_at, direction)


def _outcome(row: Row) -> Any:
    outcome = row["outcome"]
    if outcome not in _OUTCOMES:
        raise _Unreadable(f"outcome: expected one of {', '.join(_OUTCOMES)}; got {cut(repr(outcome), 60)}")
    return outcome


def _parameters(row: Row) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = _validated("parameters", dict[str, Parameter | None], _document(row, "parameters", dict))
    for name, value in parameters.items():
        if name in _NUMBERS and value is not None:
            _number(f"parameters.{name}", value, least=1 if name in _WHOLE else 0, whole=name in _WHOLE)
            if value == 0 and name != "weight_decay":
                raise _Unreadable(f"parameters.{name}: expected a number above 0, got {value}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            _number(f"parameters.{name}", value)
    return parameters


def _facts(row: Row) -> TrialFacts:
    document = _document(row, "facts", dict)
    facts: TrialFacts = _validated("facts", TrialFacts, {**document, "extra": {}})
    if facts.repeats is not None and not 0 <= facts.repeats < row["number"]:
        raise _Unreadable(f"facts.repeats: expected an earlier trial, got {facts.repeats}")
    for name, value in facts.to_dict().items():
        for number in value if isinstance(value, list) else [value]:
            if name not in _UNBOUNDED and isinstance(number, int | float) and not isinstance(number, bool):
                _number(f"facts.{name}", number, least=-_LARGEST if name in _SIGNED else 0)
    return TrialFacts.of(document)


def _values(row: Row, outcome: str, measures: Sequence[str] | None, facts: TrialFacts) -> tuple[float, ...] | None:
    """A trial's values: seconds or another measure first, the metric second."""
    if row["objectives"] is None:
        if outcome == "complete":
            raise _Unreadable("objectives: expected the values of a complete trial, got none")
        return None
    values = tuple(_document(row, "objectives", list))
    counts = (2, 3) if measures is None else (1 + len(measures),)
    if len(values) not in counts:
        raise _Unreadable(f"objectives: expected {' or '.join(map(str, counts))} numbers, got {cut(repr(list(values)), 60)}")
    for place, value in enumerate(values):
        _number("objectives", value, least=-_LARGEST if place == 1 else 0)
    for measure, fact in (("cost", facts.price), ("energy_j", facts.watts)):
        if outcome == "complete" and measure in (measures or ()) and fact is None:
            raise _Unreadable(f"facts: expected what {measure} follows from, got none")
    return values


# Attempts and measurements


def attempt_of(row: Row) -> Mapping[str, Any]:
    """An attempt's row, with `setup` as a dict."""
    for column in ("outcome", "message", "traceback", "started_at", "ended_at"):
        if (text := _text(row, column)) and column.endswith("_at"):
            _instant(column, text)
    _number("number", row["number"], least=0, whole=True)
    _number("attempt", row["attempt"], least=0, whole=True)
    return {**row, "setup": _document(row, "setup", dict)}


def setup_of(attempt: Row) -> TrialSetup:
    """The setup of an attempt.

    Raises:
        StorageError: it cannot be read by this version, or would not be the same here.
    """
    try:
        return _setup(attempt)
    except (_Unreadable, BsearchError) as error:
        raise refused(row_name(schema.attempts, attempt), error) from None


def with_setup(row: Row) -> Mapping[str, Any]:
    """An attempt's row, with `setup` as a TrialSetup."""
    return with_parsed_setup(attempt_of(row))


def with_parsed_setup(attempt: Row) -> Mapping[str, Any]:
    """An attempt, with the TrialSetup that its `setup` describes."""
    return {**attempt, "setup": _setup(attempt)}


def _setup(attempt: Row) -> TrialSetup:
    if unknown := attempt["setup"].keys() - set(TrialSetup.__slots__):
        raise _Unreadable(f"setup: expected keys of this version, got {cut(', '.join(sorted(unknown)), 200)}")
    setup: TrialSetup = _validated("setup", TrialSetup, attempt["setup"])
    _check_numbers(setup)
    # Where its model went and by when it had to be over is that attempt's, and nothing that trains the same again.
    return replace(setup, model_folder=None, scores_test=True, ends_by=None)


def _check_numbers(setup: TrialSetup) -> None:
    """Validate what programs, figures and clocks are made of."""
    least: dict[str, tuple[float | None, float]] = {
        **{f"betas.{place}": (beta, 0) for place, beta in enumerate(setup.betas)},
        **{name: (getattr(setup, name), 0) for name in ("learning_rate", "eps", "weight_decay", "epochs")},
        **{name: (getattr(setup, name), 0) for name in ("reference_rate", "pauses_at", "checkpoint_every_s")},
        **{name: (getattr(setup, name), 1) for name in ("largest_micro_batch", "evaluation_batch", "smallest_micro_batch")},
        **{name: (getattr(setup, name), 1) for name in ("reference_batch", "cpus")},
        "samples_budget": (setup.samples_budget, setup.effective_batch),
    }
    for name, (value, lowest) in least.items():
        if value is not None:
            _number(f"setup.{name}", value, least=lowest)


def measurement_of(row: Row) -> Mapping[str, Any]:
    """A measurement's row, with `scores` as a dict; a value that was not finite is None."""
    for column in ("number", "attempt", "samples_seen"):
        _number(column, row[column], least=0, whole=True)
    _number("elapsed_s", row["elapsed_s"], least=0)
    scores = _document(row, "scores", dict)
    numbers = {"accuracy": row["accuracy"], "train_loss": row["train_loss"]} | {
        f"scores.{name}": scores[name] for name in scores
    }
    for name, value in numbers.items():
        if value is not None:
            _number(name, value)
    return {**row, "scores": scores}


# Profiles


def profile_of(row: Row) -> tuple[Mapping[str, Any], DeviceProfile]:
    """A stored profile, after everything it depends on."""
    about = _document(row, "about", dict)
    for path in (("task",), ("request", "setup", "parameters"), ("request", "setup", "training")):
        inner: Any = about
        for key in path:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if not isinstance(inner, list if path == ("task",) else dict):
            raise _Unreadable(f"about.{'.'.join(path)}: expected what it depends on, got {cut(repr(inner), 60)}")
    if len(about["task"]) != 2:
        raise _Unreadable(f"about.task: expected a name and a code, got {about['task']}")
    return about, DeviceProfile.from_dict(_document(row, "profile", dict))


# Studies


@dataclass(frozen=True)
class StudyRow:
    """One row of the table of studies. A document in it is read when it is asked for.

    Raises:
        StorageError: that cannot be read.
    """

    row: Row

    @property
    def name(self) -> str:
        return str(self.row["name"])

    @property
    def base_name(self) -> str:
        """As in the study file; `--new` adds -2, -3, ..."""
        return str(self.row["base_name"])

    @property
    def created_at(self) -> str:
        return str(self.row["created_at"])

    @property
    def _what(self) -> str:
        return row_name(schema.studies, self.row)

    @cached_property
    def driver_s(self) -> float:
        """Driver time in seconds, summed over restarts."""
        try:
            return float(_number("driver_s", self.row["driver_s"], least=0))
        except _Unreadable as error:
            left_out(self._what, error)
            return 0.0

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """What must not change between runs."""
        try:
            identity = _document(self.row, "identity", dict)
            task = identity.get("task")
            if not isinstance(task, dict) or not {"name", "code"} <= task.keys():
                raise _Unreadable(f"identity.task: expected a name and a code, got {cut(repr(task), 60)}")
            if not isinstance(task.get("earlier", []), list):
                raise _Unreadable(f"identity.task.earlier: expected a list, got {cut(repr(task['earlier']), 60)}")
        except _Unreadable as error:
            raise refused(self._what, error) from None
        return identity

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """The study as it was last run, as it is stored."""
        try:
            return _document(self.row, "spec", dict)
        except _Unreadable as error:
            raise refused(self._what, error) from None

    @cached_property
    def study(self) -> StudySpec:
        """The study as it was last run, without keys that this version does not know and values that no result depends on."""
        stored, said = dict(self.spec), []
        while True:
            try:
                spec = StudySpec.model_validate(stored)
            except ValidationError as error:
                stored, words = _without_first(stored, error, self._what)
                said.append(words)
            else:
                for words in dict.fromkeys(said):
                    left_out(self._what, words)
                return spec

    def say_what_goes(self) -> None:
        """Say what of the stored study is lost when another takes its place, as where it goes on with its file."""
        try:
            _ = self.study
        except StorageError as error:
            left_out(f"{self._what}, which is written anew from its file", error)

    @cached_property
    def best_rates(self) -> StoredRates | None:
        """The best rates as fitted when it last ran; None where there are none."""
        if not self.row["best_rates"]:
            return None
        try:
            return _validated("best_rates", StoredRates, _document(self.row, "best_rates", dict))  # type: ignore[no-any-return]
        except _Unreadable as error:
            left_out(self._what, error)
            return None

    @property
    def deadline(self) -> StoredDeadline | None:
        """When the study has to be done, and the plan until then; None where there is no such moment."""
        if not self.row["deadline"]:
            return None
        try:
            return _validated("deadline", StoredDeadline, _document(self.row, "deadline", dict))  # type: ignore[no-any-return]
        except _Unreadable as error:
            left_out(self._what, error)
            return None

    @property
    def step_times(self) -> dict[str, list[StepTime]] | None:
        """The step-time laws that time its trials, by parameters that change cost; None where none are stored."""
        if not self.row["step_times"]:
            return None
        try:
            laws = _document(self.row, "step_times", dict)
            return {key: [_law(law) for law in _listed(key, each)] for key, each in laws.items()}
        except (_Unreadable, BsearchError) as error:
            raise refused(self._what, error) from None


def _without_first(stored: dict[str, Any], error: ValidationError, what: str) -> tuple[dict[str, Any], str]:
    """A stored study without the first key that this version cannot read, and words for it.

    Raises:
        StorageError: results are read by that key.
    """
    fault = error.errors(include_url=False)[0]
    path = fault["loc"]
    where = f"spec.{'.'.join(map(str, path))}"
    if fault["type"] == "extra_forbidden" and (without := _without(stored, path)) != stored:
        return without, f"{where}: unknown to this version, so it is not shown"
    if not path or path[0] in _READ_BY or path[0] not in stored:
        raise refused(what, f"{where}: {fault['msg'].lower()}, got {cut(repr(fault['input']), 60)}")
    words = f"{where}: {fault['msg'].lower()}, got {cut(repr(fault['input']), 60)}; {path[0]} is shown as its default"
    return {name: value for name, value in stored.items() if name != path[0]}, words


def _without(document: Any, path: Sequence[Any]) -> Any:
    """A JSON document without the value at a path, in which names of pydantic's own may stand for types."""
    if isinstance(document, dict):
        key, *rest = path
        if key not in document:
            return _without(document, rest) if rest else document
        if not rest:
            return {name: value for name, value in document.items() if name != key}
        return {**document, key: _without(document[key], rest)}
    if isinstance(document, list) and len(path) > 1 and isinstance(path[0], int):
        return [_without(value, path[1:]) if place == path[0] else value for place, value in enumerate(document)]
    return document


def _listed(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _Unreadable(f"step_times.{cut(key, 60)}: expected a list, got {cut(repr(value), 60)}")
    return value


def _law(value: Any) -> StepTime:
    law: StepTime = _validated("step_times", StepTime, value)
    return law
