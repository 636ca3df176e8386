"""Runs as a study's trials: what their columns mean, in bsearch's terms.

The rate is the one that the optimizer got, so the rule is `constant`: an imported study's reference rate is its learning rate.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from ...spaces.errors import Fault, StudyFileError, cut
from ...spaces.names import Direction, words_of
from ...spaces.readable import shell_word
from ...spaces.record import TrialFacts, TrialRecord
from ...spaces.study.space import Space
from ...spaces.study.spec import StudySpec
from ...spaces.trial import OutcomeKind
from .columns import Columns
from .runs import Run, Scalar
from .values import amount, is_true, moment, number, seconds, unit_of

# The task that an imported study names: none of bsearch's, so it cannot be run.
IMPORTED = "imported:runs"
_ENDED = (
    "finished",
    "complete",
    "completed",
    "done",
    "success",
    "succeeded",
    "ok",
    "true",
    "terminated",
    "inactive",
)
_FAILED = (
    *(
        "failed",
        "crashed",
        "killed",
        "error",
        "fail",
        "aborted",
        "cancelled",
        "canceled",
        "oom",
        "out_of_memory",
        "timeout",
    ),
)
_RUNNING = (
    *(
        "running",
        "active",
        "pending",
        "scheduled",
        "queued",
        "waiting",
        "pruned",
        "stopped",
        "paused",
        "infeasible",
    ),
    *("interrupted", "false"),
)
# A run that came less far than this share of what the farthest of them did, in terms of its plan, was stopped early.
_STOPPED = 0.9
# Names of study files whose values have rules there: own ones only where they keep them.
_RULES: dict[str, Callable[[float], bool]] = dict.fromkeys(("beta1", "beta2"), lambda value: 0 <= value < 1)
_RULES |= {"weight_decay": lambda value: value >= 0}
# Parameters of a table that bsearch has a word of its own for, by their last words.
_OWN = {"weight_decay": "weight_decay", "wd": "weight_decay", "beta1": "beta1", "beta2": "beta2"}
_MOST_FAULTS = 100
# Whole numbers that take no more values than this are choices.
_FEW = 8
_LONGEST_S = 3e8
# Rates, batches and parameters beyond these are none.
_SMALLEST, _LARGEST = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class Imported:
    """A group of runs as a study.

    Args:
        name: of the group: the values of the columns that tell it from others; empty where there is one group.
        records: in the source's order; runs of one setting with other seeds are trials of their own.
        left_out: why runs are no trials, and how many.
        parameters: bsearch's names of the columns that are parameters.
        untimed: places of complete runs without their seconds; with any, all of them compare by samples.
        to_target: as of `Columns`.
    """

    name: str
    spec: StudySpec
    records: tuple[TrialRecord, ...]
    left_out: Mapping[str, int]
    parameters: Mapping[str, str]
    untimed: tuple[str, ...] = ()
    to_target: str = ""

    @property
    def timed(self) -> bool:
        return not self.untimed


def imported(where: str, runs: Sequence[Run], columns: Columns, study: str = "runs") -> list[Imported]:
    """The groups of a source, the largest first.

    Raises:
        StudyFileError: values that cannot be what their columns are, each by its place.
    """
    groups: dict[str, list[Run]] = {}
    named, repeated = columns.named("group"), Counter[str]()
    for run in _once(where, runs, columns, repeated):
        groups.setdefault(", ".join(str(_value(run, name)) for name in named), []).append(run)
    faults: list[Fault] = []
    without_result = Counter[str]()  # why runs of groups without any are left out
    found = [
        _group(group, columns, study, name, repeated, without_result, faults)
        for name, group in groups.items()
    ]
    if faults:
        hint = f"Mend them, or leave such a run out by its place: --map {shell_word(f'{faults[0].file}=nothing')}"
        raise StudyFileError([*faults[:_MOST_FAULTS], Fault("", hint)])
    complete = [one for one in found if one is not None]
    empty = [name for name, one in zip(groups, found, strict=True) if one is None]
    lost = {
        f"of groups without any result, such as {name}": sum(len(groups[one]) for one in empty)
        for name in empty[:1]
    }
    if not complete:
        reasons = repeated + without_result
        why = (
            ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or f"{len(runs)} that did not"
        )
        hint = (
            f" Write --map {status}=nothing where that is no reason."
            if (status := columns.one("status"))
            else ""
        )
        raise StudyFileError(Fault("", f"expected runs that ended, got {why}.{hint}", where))
    first, *others = sorted(complete, key=lambda one: -len(one.records))
    return [replace(first, left_out={**first.left_out, **lost}), *others]


def _once(where: str, runs: Sequence[Run], columns: Columns, repeated: Counter[str]) -> Iterator[Run]:
    """Each run once: rows that are equal are one.

    Raises:
        StudyFileError: rows of one run differ, as where a table has one for each epoch.
    """
    seen: dict[object, Run] = {}
    identity = columns.one("run")
    for run in runs:
        if flag := next((name for name in columns.named("left_out") if is_true(_value(run, name))), None):
            repeated[f"marked as {cut(flag, 40)}"] += 1
            continue
        everything = (*run.settings.items(), *run.values.items(), *run.results.items())
        named = _value(run, identity)
        key = everything if named is None else named
        before = seen.setdefault(key, run)
        if before is run:
            yield run
        elif (*before.settings.items(), *before.values.items(), *before.results.items()) == everything:
            repeated["again, with the same values"] += 1
        else:
            hint = f"Keep the last row of each, or write --map {identity}=nothing where it names no run."
            message = f"expected one row of each run, got {cut(str(named), 60)!r} at {before.place} and {run.place}. {hint}"
            raise StudyFileError(Fault(str(identity), message, where))


def _value(run: Run, name: str | None) -> Scalar | None:
    return None if name is None else run.settings.get(name, run.values.get(name, run.results.get(name)))


@dataclass(slots=True)
class _Row:
    """A run in bsearch's terms."""

    run: Run
    name: str
    batch: int
    rate: float
    devices: int
    metric: float | None
    seconds: float | None
    epochs: float | None
    samples: float | None
    seed: int | None
    failed: bool
    size: float | None
    parameters: dict[str, Scalar]


def _group(
    runs: list[Run],
    columns: Columns,
    study: str,
    name: str,
    repeated: Counter[str],
    without_result: Counter[str],
    faults: list[Fault],
) -> Imported | None:
    left_out = Counter(repeated)
    parameters = _parameter_names(columns, runs)
    rows = [
        row
        for run, share in _whole(runs, columns, left_out)
        if (row := _row(run, share, columns, parameters, left_out, faults))
    ]
    finished = [row for row in rows if row.metric is not None and math.isfinite(row.metric)]
    if faults or not rows or not finished:
        without_result.update(left_out - repeated)
        return None
    untimed = tuple(row.run.place for row in finished if row.seconds is None)
    spec = _spec(study, rows, columns, parameters)
    assert columns.direction is not None  # columns_of has asked
    records = tuple(_records(rows, not untimed, columns.direction))
    return Imported(name, spec, records, dict(left_out), parameters, untimed, columns.to_target)


def _whole(runs: Sequence[Run], columns: Columns, left_out: Counter[str]) -> Iterator[tuple[Run, float]]:
    """Runs that came as far as they were planned to, as the farthest did, in epochs or steps, and those that say that they
    have ended, such as by a rule of their own; with the share of the plan that each trained.
    """
    patience = [one.name for one in columns.columns if {"patience", "stopping"} & set(words_of(one.name))]
    # Of a schedule.
    patience = [name for name in patience if not {"lr", "scheduler", "plateau"} & set(words_of(name))]
    shares: list[list[float]] = [[] for _ in runs]
    for column in columns.columns:
        if column.meaning != "reached":
            continue
        plan = column.why.removeprefix("of ")
        # 0 where nothing stopped it; the first is number 0.
        stopped = words_of(column.name)[-2:] == [
            "stopped",
            "epoch",
        ]
        each = [_share(_value(run, column.name), _value(run, plan), stopped) for run in runs]
        farthest = max((share for share in each if share is not None), default=0.0)
        for place, share in enumerate(each):
            if share is not None and farthest > 0:
                shares[place].append(share / farthest)
    for run, found in zip(runs, shares, strict=True):
        share = max(found, default=1.0)
        patient = any(
            is_true(value) or (number(value) or 0.0) > 0 for name in patience for value in [_value(run, name)]
        )
        if share < _STOPPED and not patient and _state(run, columns) != "ended":
            left_out["stopped before its end"] += 1
        else:
            yield run, share if share < _STOPPED else 1.0


def _share(reached: Scalar | None, planned: Scalar | None, stopped: bool) -> float | None:
    far, whole = number(reached), number(planned)
    if far is None or whole is None or not whole > 0 or not math.isfinite(far):
        return None
    if stopped:
        far = far + 1 if far > 0 else whole
    return 1.0 if far + 1 >= whole else far / whole  # some count from 0


def _row(
    run: Run,
    share: float,
    columns: Columns,
    parameters: Mapping[str, str],
    left_out: Counter[str],
    faults: list[Fault],
) -> _Row | None:
    state = _state(run, columns)
    if state == "running" or run.results.get("pruned") is True:
        left_out["not ended"] += 1
        return None
    if state not in ("", "ended", "failed", "diverged"):
        left_out[f"of a status that is not known, {cut(state, 40)!r}"] += 1
        return None
    name = columns.one("metric")
    written = _value(run, name)
    metric, failed = math.nan if state == "diverged" else number(written), state == "failed"
    metric = math.nan if metric is not None and abs(metric) > _LARGEST else metric  # as good as infinite
    if metric is None and isinstance(written, str) and not failed:
        faults.append(Fault(str(name), f"expected a number, got {cut(written, 60)!r}", run.place))
        return None
    batch, name_of_rate = _batch(run, columns, faults), columns.one("learning_rate")
    rate = 1.0 if name_of_rate is None else _positive(run, name_of_rate, faults)
    if batch is None or rate is None:
        left_out["without batch or rate"] += 1
        return None
    if metric is None and not failed:
        left_out[f"without {cut(name or 'metric', 40)}"] += 1
        return None
    held = {mine: _value(run, theirs) for theirs, mine in parameters.items()}
    if (size := columns.one("size")) is not None:
        held[parameters[size]] = _count(_value(run, size))  # 124M is a number here
    each = {mine: _plain(value) for mine, value in held.items() if value is not None}
    # Nor NaN.
    values = {mine: value for mine, value in each.items() if isinstance(value, str) or abs(value) <= _LARGEST}
    if len(values) < len(parameters):
        left_out["without all parameters"] += 1
        return None
    # A count of 0 or -1 stands for no plan.
    epochs, steps, samples, devices = (
        _count(_value(run, columns.one(one))) for one in ("epochs", "steps", "samples", "devices")
    )
    if epochs is not None:
        epochs = round(share * epochs, 6)
        epochs = int(epochs) if epochs.is_integer() else epochs
    in_tokens = "tokens" in words_of(columns.one("samples") or "")  # which a batch hardly counts
    samples = share * steps * batch if steps is not None and (in_tokens or not samples) else samples
    named = _value(run, columns.one("run"))
    return _Row(
        run,
        "" if named is None else f"{cut(str(named), 60)}, ",
        batch,
        rate,
        int(devices or 1),
        metric,
        _seconds(run, columns),
        epochs,
        samples,
        None
        if (seed := number(_value(run, columns.one("seed")))) is None or not math.isfinite(seed)
        else int(seed),
        failed,
        _count(_value(run, size)),
        values,
    )


def _state(run: Run, columns: Columns) -> str:
    """`ended`, `failed`, `running`, nothing where the source does not say, or a status that is not known."""
    name = columns.one("status")
    value: Scalar | None = run.status or _value(run, name)
    if value is None or value == "":
        return ""
    if name is not None and not run.status and "exit" in name.lower():
        return "ended" if number(value) == 0 else "failed"
    text = re.sub(r"\W+", " ", str(value).lower().rpartition(".")[2]).strip() or str(value)
    word = text.partition(" ")[0]
    if text in _RUNNING or word in _RUNNING:
        return "running"
    if text in _ENDED:
        return "ended"
    return "failed" if word in _FAILED else text


def _count(value: Scalar | None) -> float | None:
    plain = amount(value)
    return None if plain is None or not 0 < plain <= _LARGEST else plain


def _plain(value: Scalar) -> Scalar:
    """A number of text as a number, and a whole one as an integer: 8.0 layers are 8."""
    plain = number(value)
    if plain is None or not math.isfinite(plain):
        return value
    return int(plain) if plain.is_integer() and abs(plain) < 2**53 else plain


def _batch(run: Run, columns: Columns, faults: list[Fault]) -> int | None:
    """The batch of a whole step: as written, or of one device times passes and devices."""
    name = columns.one("effective_batch")
    factors = [name]
    if name is None and columns.one("micro_batch") is not None:
        factors = [columns.one(one) for one in ("micro_batch", "accumulation", "devices")]
    elif name is None:
        factors = [columns.one("batch")]
    batch = 1.0
    for factor in factors:
        if factor == columns.one("devices") and number(_value(run, factor)) == 0:
            continue  # no GPU: one process
        value = _positive(run, factor, faults)
        if value is None and factor is not None:
            return None
        batch *= value or 1.0
    if batch != round(batch) or batch > 2**53:
        faults.append(Fault(str(factors[0]), f"expected a whole number of samples, got {batch:g}", run.place))
        return None
    return round(batch)


def _positive(run: Run, name: str | None, faults: list[Fault]) -> float | None:
    """A number above 0; None where it is missing."""
    value = _value(run, name)
    if name is None or value is None:
        return None
    plain = number(value)
    if isinstance(value, str) and plain is None and value.strip():
        hint = " Separate columns by semicolons, or write 0.001." if "," in value else ""
        faults.append(Fault(name, f"expected a number, got {cut(value, 60)!r}.{hint}", run.place))
        return None
    if plain is None or math.isnan(plain):
        return None
    if not _SMALLEST <= plain <= _LARGEST:
        expected = "above 0" if plain < _SMALLEST else f"of at most {_LARGEST:g}"
        faults.append(Fault(name, f"expected a number {expected}, got {plain:g}", run.place))
        return None
    return plain


def _seconds(run: Run, columns: Columns) -> float | None:
    name = columns.one("seconds")
    if name is not None:
        value = _value(run, name)
        chosen = any(column.name == name and column.why for column in columns.columns)
        if words_of(name) == ["time"] and isinstance(value, str) and ":" in value and not chosen:
            return None  # perhaps a time of day
        found = seconds(value, unit_of(name))
        # As much as this is a date.
        return found if found is not None and 0 < found < _LONGEST_S else None
    began, ended = (moment(_value(run, columns.one(one))) for one in ("started", "ended"))
    return None if began is None or ended is None or not ended > began else ended - began


def _parameter_names(columns: Columns, runs: Sequence[Run]) -> dict[str, str]:
    """bsearch's name of each parameter, by the source's."""
    found: dict[str, str] = {}
    for name in (*columns.named("parameter"), *columns.named("size")):
        words = words_of(name)
        own = _OWN.get("_".join(words[-2:])) or _OWN.get(words[-1])
        values = [number(_value(run, name)) for run in runs]
        keeps = own is not None and all(value is not None and _RULES[own](value) for value in values)
        mine = own if own and keeps else "_".join(words)
        while mine in found.values() or (mine in Space.model_fields and not keeps):
            mine, keeps = f"{mine}_", False
        found[name] = mine
    return found


def _spec(study: str, rows: Sequence[_Row], columns: Columns, parameters: Mapping[str, str]) -> StudySpec:
    space: dict[str, Any] = {
        "effective_batch": _range([row.batch for row in rows]),
        "reference_rate": {**_range([row.rate for row in rows]), "at_batch": 256},
        "rule": "constant",
    }
    lengths = [row.epochs for row in rows if row.epochs is not None]
    if len(lengths) == len(rows):
        space["epochs"] = _range(lengths)
    for mine in parameters.values():
        space[mine] = _domain([row.parameters[mine] for row in rows])
    metric = columns.one("metric") or "metric"
    objectives = {"metric": {"name": metric_name(metric), "direction": columns.direction}}
    budget = {"trials": max(len(rows), 1)}
    written = {
        "study": study,
        "task": IMPORTED,
        "space": space,
        "objectives": objectives,
        "budget": budget,
        "stopping": "none",
    }
    try:
        return StudySpec.model_validate(written)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        hint = "Write --map NAME=nothing if that column is no setting."
        raise StudyFileError(
            Fault(key, f"{first['msg']}, got {cut(str(first['input']), 60)}. {hint}")
        ) from None


def metric_name(name: str) -> str:
    """A metric's name as study files have it.

    >>> metric_name("eval/loss"), metric_name("val_loss (lowest)")
    ('eval_loss', 'val_loss_lowest')
    """
    return "_".join(words_of(name))


def _domain(values: Sequence[Scalar]) -> Any:
    distinct = list(dict.fromkeys(values))
    if len(distinct) == 1:
        return distinct[0]
    whole = all(type(value) is int for value in distinct)
    if whole and len(distinct) <= _FEW and 3 * len(distinct) <= len(values):
        return {"choices": sorted(distinct)}  # such as widths of 32, 64 and 128
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return _range(values)  # type: ignore[arg-type]
    return {"choices": distinct}


def _range(values: Sequence[float]) -> dict[str, Any]:
    low, high = min(values), max(values)
    return {"low": low, "high": high} | ({"log": True} if low > 0 and high > 10 * low else {})


def _records(rows: Sequence[_Row], timed: bool, direction: Direction) -> Iterator[TrialRecord]:
    """Trials. Runs of one setting stay runs of their own: what is shown of each is what its file says."""
    now = datetime.now().isoformat(timespec="milliseconds")
    for place, row in enumerate(rows):
        parameters: dict[str, Any] = {
            "effective_batch": row.batch,
            "reference_rate": row.rate,
            **row.parameters,
        }
        if row.epochs is not None:
            parameters["epochs"] = row.epochs
        complete = row.metric is not None and math.isfinite(row.metric) and not row.failed
        taken = row.seconds if timed else (row.samples or row.epochs or 1.0)
        facts = TrialFacts(
            effective_batch=row.batch,
            learning_rate=row.rate,
            rule="constant",
            devices=row.devices,
            epochs=row.epochs,
            samples_budget=None if row.samples is None else round(row.samples),
            seed=row.seed,
            model_parameters=None if row.size is None else round(row.size),
            train_s=taken,
            train_s_source="measured",
            measured_train_s=row.seconds,
            message=f"imported from {row.name}{row.run.place}",
        )
        outcome: OutcomeKind = "complete" if complete else "error" if row.failed else "diverged"
        values = None if not complete or taken is None or row.metric is None else (taken, row.metric)
        yield TrialRecord.of(place, outcome, parameters, facts, values, 0.0, now, now, direction)
