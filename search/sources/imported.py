"""Runs as a study's trials: what their columns mean, in bsearch's terms.

The rate is the one that the optimizer got, so the rule is `constant`: an imported study's reference rate is its learning rate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ...spaces.errors import Fault, StudyFileError, cut
from ...spaces.record import TrialFacts, TrialRecord
from ...spaces.study.spec import StudySpec
from ...spaces.trial import OutcomeKind
from .columns import Columns, words_of
from .runs import Run, Scalar
from .values import moment, number, seconds, unit_of

# The task that an imported study names: none of bsearch's, so it cannot be run.
IMPORTED = "imported:runs"
_FAILED = ("failed", "crashed", "killed", "error", "fail", "aborted", "cancelled", "canceled", "oom")
_RUNNING = ("running", "pending", "scheduled", "queued", "waiting", "pruned", "stopped", "paused", "infeasible", "interrupted")
# Parameters of a table that bsearch has a word of its own for, by their last words.
_OWN = {"weight_decay": "weight_decay", "wd": "weight_decay", "beta1": "beta1", "beta2": "beta2"}
_MOST_FAULTS = 100


@dataclass(frozen=True, slots=True)
class Imported:
    """A group of runs as a study.

    Args:
        name: of the group: the values of the columns that tell it from others; empty where there is one group.
        records: in the source's order; runs of one setting with other seeds are repeats.
        left_out: why runs are no trials, and how many.
        parameters: bsearch's names of the columns that are parameters.
        timed: whether every complete run has its seconds; else those are samples, which only compare.
    """

    name: str
    spec: StudySpec
    records: tuple[TrialRecord, ...]
    left_out: Mapping[str, int]
    parameters: Mapping[str, str]
    timed: bool


def imported(where: str, runs: Sequence[Run], columns: Columns, study: str = "runs") -> list[Imported]:
    """The groups of a source, the largest first.

    Raises:
        StudyFileError: values that cannot be what their columns are, each by its place.
    """
    groups: dict[str, list[Run]] = {}
    named = columns.named("group")
    for run in runs:
        groups.setdefault(", ".join(str(_value(run, name)) for name in named), []).append(run)
    faults: list[Fault] = []
    found = [_group(where, group, columns, study, name, faults) for name, group in groups.items()]
    if faults:
        raise StudyFileError(faults[:_MOST_FAULTS])
    complete = [one for one in found if one is not None]
    if not complete:
        raise StudyFileError(Fault("", f"expected runs that ended, got {len(runs)} that did not", where))
    return sorted(complete, key=lambda one: -len(one.records))


def _value(run: Run, name: str | None) -> Scalar | None:
    if name is None:
        return None
    for values in (run.settings, run.values, run.results):
        if name in values:
            return values[name]
    return None


@dataclass(slots=True)
class _Row:
    """A run in bsearch's terms."""

    run: Run
    batch: int
    rate: float
    devices: int
    metric: float | None
    seconds: float | None
    epochs: float | None
    samples: float | None
    seed: int | None
    failed: bool
    parameters: dict[str, Scalar]


def _group(where: str, runs: list[Run], columns: Columns, study: str, name: str, faults: list[Fault]) -> Imported | None:
    left_out: Counter[str] = Counter()
    parameters = _parameter_names(columns)
    rows = [row for run in runs if (row := _row(run, columns, parameters, left_out, faults)) is not None]
    finished = [row for row in rows if row.metric is not None and math.isfinite(row.metric)]
    if faults or not rows or not finished:
        return None
    timed = all(row.seconds is not None for row in finished)
    spec = _spec(study, rows, columns, parameters)
    return Imported(name, spec, tuple(_records(rows, timed)), dict(left_out), parameters, timed)


def _row(run: Run, columns: Columns, parameters: Mapping[str, str], left_out: Counter[str], faults: list[Fault]) -> _Row | None:
    state = (run.status or str(_value(run, columns.one("status")) or "")).lower()
    if state in _RUNNING or run.results.get("pruned") is True:
        left_out["not ended"] += 1
        return None
    name = columns.one("metric")
    metric = number(_value(run, name))
    failed = state in _FAILED
    batch, rate = _batch(run, columns, faults), _positive(run, columns.one("learning_rate"), faults)
    if batch is None or rate is None:
        left_out["without batch or rate"] += 1
        return None
    if metric is None and not failed:
        left_out[f"without {cut(name or 'metric', 40)}"] += 1
        return None
    values = {mine: _plain(value) for theirs, mine in parameters.items() if (value := _value(run, theirs)) is not None}
    if len(values) < len(parameters):
        left_out["without all parameters"] += 1
        return None
    epochs, steps = (_positive(run, columns.one(one), faults) for one in ("epochs", "steps"))
    samples = _positive(run, columns.one("samples"), faults) or (None if steps is None else steps * batch)
    if epochs is not None and epochs.is_integer():
        epochs = int(epochs)
    return _Row(
        run,
        batch,
        rate,
        int(number(_value(run, columns.one("devices"))) or 1),
        metric,
        _seconds(run, columns),
        epochs,
        samples,
        None if (seed := number(_value(run, columns.one("seed")))) is None or not math.isfinite(seed) else int(seed),
        failed,
        values,
    )


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
    for place, factor in enumerate(factors):
        value = _positive(run, factor, faults)
        if value is None and place == 0:
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
    if plain <= 0 or math.isinf(plain):
        faults.append(Fault(name, f"expected a number above 0, got {plain:g}", run.place))
        return None
    return plain


def _seconds(run: Run, columns: Columns) -> float | None:
    name = columns.one("seconds")
    if name is not None:
        found = seconds(_value(run, name), unit_of(name))
        return found if found is not None and 0 < found < math.inf else None
    began, ended = (moment(_value(run, columns.one(one))) for one in ("started", "ended"))
    return None if began is None or ended is None or not ended > began else ended - began


def _parameter_names(columns: Columns) -> dict[str, str]:
    """bsearch's name of each parameter, by the source's."""
    found: dict[str, str] = {}
    for name in columns.named("parameter"):
        words = words_of(name)
        own = _OWN.get("_".join(words[-2:])) or _OWN.get(words[-1])
        mine = own if own and own not in found.values() else "_".join(words)
        while mine in found.values() or mine in _TAKEN:
            mine += "_"
        found[name] = mine
    return found


_TAKEN = frozenset(
    {"effective_batch", "reference_rate", "rule", "exponent", "epochs", "accumulation", "devices", "noise_batch"}
)


def _spec(study: str, rows: Sequence[_Row], columns: Columns, parameters: Mapping[str, str]) -> StudySpec:
    space: dict[str, Any] = {
        "effective_batch": _domain([row.batch for row in rows]),
        "reference_rate": {**_range([row.rate for row in rows]), "at_batch": 256},
        "rule": "constant",
    }
    lengths = [row.epochs for row in rows if row.epochs is not None]
    if len(lengths) == len(rows):
        space["epochs"] = _domain(lengths)
    for mine in parameters.values():
        space[mine] = _domain([row.parameters[mine] for row in rows])
    metric = columns.one("metric") or "metric"
    return StudySpec.model_validate(
        {
            "study": study,
            "task": IMPORTED,
            "space": space,
            "objectives": {"metric": {"name": metric_name(metric), "direction": columns.direction}},
            "budget": {"trials": max(len(rows), 1)},
            "stopping": "none",
        }
    )


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
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return _range(values)  # type: ignore[arg-type]
    return {"choices": distinct}


def _range(values: Sequence[float]) -> dict[str, Any]:
    low, high = min(values), max(values)
    return {"low": low, "high": high} | ({"log": True} if low > 0 and high > 10 * low else {})


def _records(rows: Sequence[_Row], timed: bool) -> Iterator[TrialRecord]:
    """Trials; a run of a setting that an earlier one has repeats it, where both completed."""
    first: dict[tuple[object, ...], int] = {}
    now = datetime.now().isoformat(timespec="milliseconds")
    for place, row in enumerate(rows):
        parameters: dict[str, Any] = {"effective_batch": row.batch, "reference_rate": row.rate, **row.parameters}
        if row.epochs is not None:
            parameters["epochs"] = row.epochs
        key = (*sorted((name, str(value)) for name, value in parameters.items()), row.samples)
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
            repeats=first.get(key) if complete else None,
            train_s=taken,
            train_s_source="measured",
            measured_train_s=row.seconds,
            message=f"imported from {row.run.place}",
        )
        outcome: OutcomeKind = "complete" if complete else "error" if row.failed else "diverged"
        values = None if not complete or taken is None or row.metric is None else (taken, row.metric)
        yield TrialRecord.of(place, outcome, parameters, facts, values, started_at=now, ended_at=now)
        if complete:
            first.setdefault(key, place)


__all__ = ["IMPORTED", "Imported", "imported", "metric_name"]
