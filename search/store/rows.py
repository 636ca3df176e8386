"""Rows of our tables as values.

Results outlive the version that wrote them, and others may have changed the database, so each row is read as data from outside.
One that this version cannot read is left out with its name and the reason (`left_out`), and everything else is used; where
nothing can be done without it, reading it raises a `StorageError` of the same words.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, cached_property
from typing import Annotated, Any, Self, TypeVar, get_args

import sqlalchemy as sa
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)

from ...spaces.deadline import Deadline
from ...spaces.errors import BsearchError, LeftOutWarning, StorageError, cut
from ...spaces.laws.device import DeviceProfile
from ...spaces.laws.step_time import StepTime
from ...spaces.names import Direction
from ...spaces.record import TrialFacts, TrialRecord
from ...spaces.study.goals import Objectives
from ...spaces.study.spec import StudySpec
from ...spaces.trial import Measurement, OutcomeKind, Parameter, TrialSetup
from ..analysis.rates import StoredRates
from . import schema

T = TypeVar("T")
Row = Mapping[Any, Any]  # SQLAlchemy's, whose keys may be columns too

# Far above any result, and far below where squares overflow.
_LARGEST = 1e100
# A number this far beyond the trial before it is no trial's place.
_LARGEST_GAP = 10_000
_OUTCOMES = (*get_args(OutcomeKind), "running")
# Names of ours that may be negative.
_SIGNED = frozenset(
    {"train_s_error", "stopped_accuracy", "expected_accuracy", "mean_low", "mean_high", "seed"}
)
_WHOLE = ("effective_batch", "accumulation", "devices")
# The smallest that can be computed with, where that is not 0.
_LEAST = dict.fromkeys((*_WHOLE, "largest_micro_batch", "evaluation_batch", "smallest_micro_batch"), 1.0)
_LEAST |= {"reference_batch": 1.0, "cpus": 1.0, "reference_rate": 1e-100, "epochs": 1e-100}
# Parameters that every study names alike.
_PARAMETERS = (*_WHOLE, "reference_rate", "epochs", "weight_decay")
_SETUP = (*TrialSetup.__slots__, "learning_rate", "betas", "eps", "weight_decay")
# Keys of a study that are gone, by section, with the values that this version works by.
_AS_HERE: dict[str, dict[str, Any]] = {
    "training": {"pin_memory": True, "channels_last": False},
}
# Keys of a study that results are read by; of the others a value that cannot be read is left out.
_READ_BY = frozenset({"study", "task", "space", "training", "devices", "objectives"})


class Unreadable(Exception):
    """What was expected of a row, and what it holds; it passes through pydantic as it is."""


# Saying it


def row_name(table: sa.Table, *rows: Row) -> str:
    """Rows of a table in words.

    >>> row_name(schema.trials, *({"study": "digits", "number": number} for number in (1, 3, 4)))
    'trials 1, 3, 4 of study digits (bsearch_trial)'
    """
    if "number" in rows[0]:
        numbers = list(dict.fromkeys(str(row["number"]) for row in rows))
        name = f"trial{'s' * (len(numbers) > 1)} {cut(', '.join(numbers), 200)} of study {rows[0]['study']}"
    else:
        name = ", ".join(
            f"study {row['name']}" if "name" in row else f"profile {str(row['key'])[:12]}" for row in rows
        )
    return f"{cut(name, 400)} ({table.name})"


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
        except (Unreadable, BsearchError) as error:
            faulty.setdefault(str(error), []).append(row)
    for why, those in faulty.items():
        left_out(row_name(table, *those), why)
    return found


# Parts of rows


def _number(name: str, value: Any, *, least: float = 0, whole: bool = False) -> Any:
    """A number that arithmetic can be done with."""
    most, kinds = (2**53, int) if whole else (_LARGEST, int | float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        what = "an integer" if whole else "a finite number"
        from_on = "" if least == -_LARGEST else f" >= {least:g}"
        raise Unreadable(f"{name}: expected {what}{from_on}, got {cut(repr(value), 60)}")
    return value


def _check_numbers(column: str, values: Mapping[str, Any], ours: Collection[str]) -> None:
    """Check the numbers in parameters, facts or a setup, of which those with names of ours mean the same everywhere."""
    for name, value in values.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            is_number = isinstance(each, int | float) and not isinstance(each, bool)
            if is_number or (name in ours and name in _PARAMETERS and each is not None):
                least = _LEAST.get(name, 0.0) if name in ours and name not in _SIGNED else -_LARGEST
                _number(f"{column}.{name}", each, least=least, whole=name in _WHOLE)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _validated(column: str, kind: Any, value: Any) -> Any:
    """A value of this kind; a model says only what a document must have, which stays as it is."""
    try:
        read = _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise Unreadable(_words(error, column)) from None
    return value if isinstance(read, BaseModel) else read


def _words(error: ValidationError, *where: str) -> str:
    """The first fault of a value, and where."""
    fault = error.errors()[0]
    place = ".".join(map(str, (*where, *fault["loc"])))
    return f"{place}: {fault['msg'].lower().replace('input should be', 'expected')}, got {cut(repr(fault['input']), 60)}"


def _works_as_here(document: Mapping[Any, Any]) -> dict[Any, Any]:
    """A study or a setup without the keys that are gone, where they say what is done here."""
    kept = dict(document)
    for name, gone in _AS_HERE.items():
        if isinstance(section := kept.get(name), dict):
            kept[name] = {
                key: value for key, value in section.items() if key not in gone or value != gone[key]
            }
    # A share that plans kept free, which changes no result.
    if isinstance(memory := kept.get("memory"), dict):
        kept["memory"] = {key: value for key, value in memory.items() if key != "headroom"}
    if isinstance(space := kept.get("space"), dict):
        kept["space"] = {name: _with_prior(domain) for name, domain in space.items()}
    return kept


def _with_prior(domain: Any) -> Any:
    """A domain whose prior is one value, where it was that and a width."""
    prior = domain.get("prior") if isinstance(domain, dict) else None
    return {**domain, "prior": prior.get("best")} if isinstance(prior, dict) else domain


def _document(column: str, text: Any) -> Any:
    # Not pydantic's `Json`, which refuses file names that are not UTF-8.
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise Unreadable(f"{column}: expected JSON, got {cut(repr(text), 60)}") from None


def _parsed(text: Any, info: ValidationInfo) -> Any:
    return None if text is None else _document(str(info.field_name), text)


def _instant(text: str, info: ValidationInfo) -> str:
    try:
        instant = datetime.fromisoformat(text)
        instant.timestamp(), instant.astimezone()
    except (ValueError, OverflowError, OSError):
        expected = "a time such as 2026-01-31T12:00:00+00:00"
        raise Unreadable(f"{info.field_name}: expected {expected}, got {cut(repr(text), 60)}") from None
    return text


def _local_time(utc: str | None, info: ValidationInfo) -> str:
    if not utc:
        return ""
    return (
        datetime.fromisoformat(_instant(utc, info))
        .astimezone()
        .replace(tzinfo=None)
        .isoformat(timespec="milliseconds")
    )


Whole = Annotated[int, Field(ge=0, le=2**53)]
Finite = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
Utc = Annotated[str, AfterValidator(_instant)]
# In this machine's zone, as tables show it; empty where there is none.
LocalTime = Annotated[str | None, AfterValidator(_local_time)]


class _Row(BaseModel):
    """A row as everything that reads it needs it; columns that a newer version has added are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def of(cls, row: Row, **context: Any) -> Self:
        """The row of a query.

        Raises:
            Unreadable: it is not as it must be.
        """
        try:
            return cls.model_validate(dict(row), context=context)
        except ValidationError as error:
            raise Unreadable(_words(error)) from None


# Trials


def _known_outcome(outcome: Any) -> Any:
    if outcome not in _OUTCOMES:
        raise Unreadable(f"outcome: expected one of {', '.join(_OUTCOMES)}; got {cut(repr(outcome), 60)}")
    return outcome


def _checked_parameters(parameters: dict[str, Parameter | None]) -> dict[str, Parameter | None]:
    _check_numbers("parameters", parameters, _PARAMETERS)
    return parameters


def _facts(text: Any, info: ValidationInfo) -> TrialFacts:
    document: dict[str, Any] = _validated("facts", dict[Any, Any], _document("facts", text))
    # A paused trial's measurement had a name of its own.
    document = {name.replace("rung_", "stopped_"): value for name, value in document.items()}
    facts: TrialFacts = _validated("facts", TrialFacts, {**document, "extra": {}})
    if facts.repeats is not None and not 0 <= facts.repeats < info.data["number"]:
        raise Unreadable(f"facts.repeats: expected an earlier trial, got {facts.repeats}")
    _check_numbers("facts", facts.to_dict(), TrialFacts.__slots__)
    return replace(facts, extra=TrialFacts.of(document).extra)


def _values(values: list[float] | None, info: ValidationInfo) -> tuple[float, ...] | None:
    """A trial's values: seconds or another measure of speed first, the metric second."""
    outcome, facts, study = info.data.get("outcome"), info.data.get("facts", TrialFacts()), info.context or {}
    if values is None:
        if outcome == "complete":
            raise Unreadable("objectives: expected the values of a complete trial, got none")
        return None
    if len(values) != 2:
        raise Unreadable(f"objectives: expected 2 numbers, got {cut(repr(values), 60)}")
    for place, value in enumerate(values):
        _number("objectives", value, least=-_LARGEST if place == 1 else 0)
    if outcome == "complete" and study["speed"] == "cost" and facts.price is None:
        raise Unreadable("facts: expected what cost follows from, got none")
    return tuple(map(float, values))  # an integer may be too large for NumPy


class _TrialRow(_Row):
    """A trial; its values are checked against the measure of speed of its study, which the context has."""

    number: Whole
    outcome: Annotated[Any, AfterValidator(_known_outcome)]
    parameters: Annotated[
        dict[str, Parameter | None], BeforeValidator(_parsed), AfterValidator(_checked_parameters)
    ]
    facts: Annotated[TrialFacts, PlainValidator(_facts)]
    objectives: Annotated[list[Any] | None, BeforeValidator(_parsed), AfterValidator(_values)]
    violation: Finite
    started_at: LocalTime
    ended_at: LocalTime

    def record(self, direction: Direction) -> TrialRecord:
        """The trial, whose study's metric has this direction."""
        facts, values, times = self.facts, self.objectives, (self.started_at or "", self.ended_at or "")
        known = self.number, self.outcome, self.parameters, facts, values, self.violation
        return TrialRecord.of(*known, *times, direction)  # type: ignore[arg-type]


def _unreadable(number: int, why: str) -> TrialRecord:
    return TrialRecord.of(number, "unreadable", {}, TrialFacts(message=why))


def objectives_of(spec: str | None) -> Objectives | None:
    """A stored study's objectives by the text of its spec; None where they cannot be read."""
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
    direction: Direction = "maximize" if objectives is None else objectives.metric.direction
    numbered = readable(schema.trials, rows, lambda row: (_number("number", row["number"], whole=True), row))
    for number, row in numbered:
        try:
            found[number] = _TrialRow.of(row, speed=objectives and objectives.speed).record(direction)
        except Unreadable as error:
            found[number] = _unreadable(number, str(error))
    places, count = sorted(found), 0
    if isinstance(attempted, int) and attempted > max(places, default=-1):
        places.append(attempted)  # it has begun, so there was a row
    for place in places:
        if place - count > _LARGEST_GAP:
            left_out(
                f"trials of study {study} from number {place} on",
                f"expected the numbers to go on from {count}",
            )
            break
        for lost in range(count, place + 1):
            found.setdefault(lost, _unreadable(lost, "its row is missing"))
        count = place + 1
    records = [found[number] for number in range(count)]
    unreadable = [record for record in records if record.outcome == "unreadable"]
    for why in dict.fromkeys(record.message for record in unreadable):
        those = ({"study": study, "number": record.number} for record in unreadable if record.message == why)
        left_out(row_name(schema.trials, *those), why)
    return records


# Attempts and measurements


class AttemptRow(_Row):
    """An attempt; `setup` is as it is stored, so that an attempt of another version can be shown."""

    study: str
    number: Whole
    attempt: Whole
    setup: Annotated[dict[Any, Any], BeforeValidator(_parsed)]
    started_at: Utc
    ended_at: Utc | None
    outcome: str | None
    message: str | None
    traceback: str | None

    def trial_setup(self) -> TrialSetup:
        """The setup that it trained with.

        Raises:
            Unreadable: it cannot be read by this version, or would not be the same here.
        """
        if unknown := self.setup.keys() - set(TrialSetup.__slots__):
            raise Unreadable(
                f"setup: expected keys of this version, got {cut(', '.join(sorted(unknown)), 200)}"
            )
        setup: TrialSetup = _validated("setup", TrialSetup, _works_as_here(self.setup))
        _check_numbers("setup", {name: getattr(setup, name) for name in _SETUP}, _SETUP)
        _number("setup.samples_budget", setup.samples_budget, least=setup.effective_batch)
        # Where its model went and by when it had to be over is that attempt's, and nothing that trains the same again.
        return replace(setup, model_folder=None, scores_test=True, ends_by=None)


def with_setup(row: Row) -> tuple[AttemptRow, TrialSetup]:
    """An attempt's row and its setup."""
    attempt = AttemptRow.of(row)
    return attempt, attempt.trial_setup()


class MeasurementRow(_Row):
    """A measurement; a value that was not finite is None."""

    number: Whole
    attempt: Whole
    samples_seen: Whole
    elapsed_s: Annotated[float, Field(ge=0, le=_LARGEST)]
    accuracy: Finite | None
    train_loss: Finite | None
    scores: Annotated[dict[Any, Finite | None], BeforeValidator(_parsed)]

    def measurement(self) -> Measurement:
        """What the training code reported."""
        scores = {name: math.nan if value is None else value for name, value in self.scores.items()}
        return Measurement(
            self.samples_seen, self.elapsed_s, math.nan if self.accuracy is None else self.accuracy, scores
        )


# Profiles


class _Cost(BaseModel):
    parameters: dict[Any, Any]
    training: dict[Any, Any]


class _Request(BaseModel):
    setup: _Cost


class _About(BaseModel):
    task: Annotated[list[Any], Field(min_length=2, max_length=2)]
    request: _Request


def profile_of(row: Row) -> tuple[Mapping[str, Any], DeviceProfile]:
    """A stored profile, after everything it depends on."""
    about = _validated("about", _About, _document("about", row["about"]))
    return about, DeviceProfile.from_dict(_document("profile", row["profile"]))


# Studies


class _TaskCode(BaseModel):
    name: Any
    code: Any
    earlier: list[Any] = []


class _Identity(BaseModel):
    task: _TaskCode


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

    def _value(self, column: str, kind: Any) -> Any:
        try:
            return _validated(column, kind, _document(column, self.row[column]))
        except (Unreadable, BsearchError) as error:
            raise refused(self._what, error) from None

    def _optional(self, column: str, kind: Any) -> Any:
        """The value in a column; None where there is none, or it cannot be read and so is left out."""
        if not self.row[column]:
            return None
        try:
            return _validated(column, kind, _document(column, self.row[column]))
        except Unreadable as error:
            left_out(self._what, error)
            return None

    @cached_property
    def driver_s(self) -> float:
        """Driver time in seconds, summed over restarts."""
        try:
            return float(_number("driver_s", self.row["driver_s"]))
        except Unreadable as error:
            left_out(self._what, error)
            return 0.0

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """What must not change between runs."""
        return _works_as_here(self._value("identity", _Identity))

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """The study as it was last run, as it is stored."""
        return self._value("spec", dict[str, Any])  # type: ignore[no-any-return]

    @cached_property
    def study(self) -> StudySpec:
        """The study as it was last run, without keys that this version does not know and values that no result depends on."""
        # How a study was sent to a cluster is its file's to say.
        stored = {name: value for name, value in _works_as_here(self.spec).items() if name != "submit"}
        # Where what is no key of ours is a parameter of the task.
        if isinstance(space := stored.get("space"), dict):
            stored["space"] = {name: domain for name, domain in space.items() if domain is not None}
        said: list[str] = []
        while True:
            try:
                spec = StudySpec.model_validate(stored)
            except ValidationError as error:
                stored, words = _without_first(stored, error, self._what)
                said.append(words)
            else:
                for words in dict.fromkeys(filter(None, said)):
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
        return self._optional("best_rates", StoredRates)  # type: ignore[no-any-return]

    @cached_property
    def deadline(self) -> Deadline | None:
        """When the study has to be done, and the plan until then; None where there is no such moment."""
        return self._optional("deadline", Deadline)  # type: ignore[no-any-return]

    @cached_property
    def step_times(self) -> dict[str, list[StepTime]] | None:
        """The step-time laws that time its trials, by parameters that change cost; None where none are stored."""
        return self._value("step_times", dict[str, list[StepTime]]) if self.row["step_times"] else None


def _without_first(stored: dict[str, Any], error: ValidationError, what: str) -> tuple[dict[str, Any], str]:
    """A stored study without the first key that this version cannot read, and words for it; none where its value is null.

    Raises:
        StorageError: results are read by that key.
    """
    fault, words = error.errors()[0], _words(error, "spec")
    path = fault["loc"]
    if fault["type"] == "extra_forbidden" and (without := _without(stored, path)) != stored:
        named = f"{'.'.join(map(str, ('spec', *path)))}: unknown to this version, so it is not shown"
        return without, "" if fault["input"] is None else named
    if not path or path[0] in _READ_BY or path[0] not in stored:
        raise refused(what, words)
    return _without(stored, path[:1]), f"{words}; {path[0]} is shown as its default"


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
        return [
            _without(value, path[1:]) if place == path[0] else value for place, value in enumerate(document)
        ]
    return document
