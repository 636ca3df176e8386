"""Runs to a target, of any source, by what its names mean."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...spaces.names import TO_GOAL, UNIT_WORDS, words_of
from ..sources.columns import Column, Columns, UnclearColumnsError, columns_of
from ..sources.names import is_metric, meaning_of
from ..sources.runs import Run, Scalar
from ..sources.values import number, seconds, unit_of


@dataclass(frozen=True, slots=True)
class RunsToTarget:
    """What runs of one setting needed to reach the target.

    Args:
        effective_batch: of all of them.
        samples: of each run, > 0: samples, epochs, or any other count of data.
        group: of settings that share a level, such as one version of a benchmark.
        never: runs that did not reach it, fewer than those that did: more than any other, as far as the median is concerned.
    """

    effective_batch: int
    samples: tuple[float, ...]
    group: str = ""
    never: int = 0

    @property
    def median(self) -> float:
        return float(np.median((*self.samples, *[math.inf] * self.never)))


_UNIT = f"(_({UNIT_WORDS}))?"
# What names of any source mean where its runs are to a target, by all of their words: Zeus's and MLPerf's are among them.
_TARGET_NAMES = {
    "samples_to_target": f"(samples|examples|images|sequences){TO_GOAL}",
    "to_target": "to_target",
    "epochs_to_target": f"epochs?{TO_GOAL}|target_epochs?",
    "steps_to_target": f"(steps|iterations|iters|updates){TO_GOAL}|target_(steps?|iterations?)",
    "seconds_to_target": f"((time|seconds|minutes|hours){TO_GOAL}|tta|time_to_train){_UNIT}",
    "seconds_per_epoch": "(time|seconds)_per_epoch|epoch_(time|seconds|duration)(_s)?",
    "target": "(quality_)?target|target_(metric|accuracy|acc|loss|value|level|quality)",
}
# What a run to a target is compared by: the first that a source has.
_COUNTED = ("samples_to_target", "to_target", "epochs_to_target", "steps_to_target", "seconds_to_target")
# What changes the time of a run, and not its data.
_GROUPS = ("group", "round")
_HARDWARE = "power_(limit|cap)(_w)?|gpu|gpu_(name|type|power_limit)|accelerator|hardware"
_NEVER = frozenset({"never", "not reached", "not_reached", "unreached", "dnf"})
_SECONDS, _RUN = "seconds to target", "run of its row"


def to_target(
    where: str, runs: Sequence[Run], mapped: Mapping[str, str], *, same: bool = False
) -> tuple[list[Run], Columns] | None:
    """Runs to a target and what their names mean, with the count as metric; None where no name holds such a count.

    A cell of several numbers is as many runs. Seconds follow from those of an epoch where they are not there.

    Raises:
        UnclearColumnsError, StudyFileError: as `columns_of`.
    """
    names = _target_names(where, runs, mapped)
    meaning = next((one for one in _COUNTED if one in names), None)
    if meaning is None or any(other == "metric" and name != names[meaning] for name, other in mapped.items()):
        return None
    count = names[meaning]
    found = [_with_seconds(part, names) for run in runs for part in _parts(run, count)]
    held = {name for run in found for name in run.held}
    meanings = {name: one for name, one in mapped.items() if one not in _TARGET_NAMES}
    meanings |= {name: "nothing" for name in names.values() if name not in meanings}
    meanings |= {count: "metric"} | (
        {_SECONDS: "seconds"} if _SECONDS in held else _no_seconds(held, meanings)
    )
    meanings |= {name: "group" for one, name in names.items() if one == "target" and _varies(name, found)}
    # Versions of a benchmark have levels of their own under one law.
    free = {name: "_".join(words_of(name)) for name in held if name not in meanings}
    others = [name for name, words in free.items() if words in _GROUPS or re.fullmatch(_HARDWARE, words)]
    meanings |= {name: "parameter" for name in others if _varies(name, found)}
    meanings |= {_RUN: "seed"} if _RUN in held else _seeds(found, meanings)
    columns = columns_of(where, found, mapped=meanings, direction="minimize", same=same, needs_rate=False)
    each = tuple(_explained(column, names, meaning, mapped) for column in columns.columns)
    return found, replace(
        columns, columns=each, to_target="data" if meaning == "to_target" else meaning.partition("_")[0]
    )


def _target_names(where: str, runs: Sequence[Run], mapped: Mapping[str, str]) -> dict[str, str]:
    """The name with each meaning of `_TARGET_NAMES`.

    Raises:
        UnclearColumnsError: two names could have it, and their values differ.
    """
    found: dict[str, list[str]] = {one: [] for one in _TARGET_NAMES}
    values: dict[str, list[Scalar]] = {}
    for run in runs:
        for name, value in run.held.items():
            values.setdefault(name, []).append(value)
    for name, own in values.items():
        words = "_".join(words_of(name))
        for meaning, pattern in _TARGET_NAMES.items():
            if mapped.get(name) == meaning:
                found[meaning].insert(0, name)
            elif (
                name not in mapped
                and re.fullmatch(pattern, words)
                and not any(isinstance(value, bool) for value in own)
            ):
                found[meaning].append(name)
    for meaning, several in found.items():
        unlike = [name for name in several[1:] if values[name] != values[several[0]]]
        if unlike and mapped.get(several[0]) != meaning:
            hint = f"Write --map {several[0]}={meaning}, or the other."
            names = [several[0], *unlike]
            raise UnclearColumnsError(
                where, meaning, names, hint, [Column(name, f"{meaning}?") for name in names]
            )
    return {meaning: several[0] for meaning, several in found.items() if several}


def _varies(name: str, runs: Sequence[Run]) -> bool:
    return len({str(run.held.get(name)) for run in runs}) > 1


def _parts(run: Run, name: str) -> Iterator[Run]:
    """The run, or each of those whose numbers its cell holds; one that never reached the target has NaN."""
    value = run.held.get(name)
    words = value.strip().lower() if isinstance(value, str) else ""
    numbers = [number(part) for part in words.split()]
    if words in _NEVER:
        yield _with(run, {name: math.nan})
    elif len(numbers) > 1 and None not in numbers:
        for place, each in enumerate(numbers, 1):
            yield replace(_with(run, {name: each or 0.0, _RUN: place}), place=f"{run.place}, run {place}")
    else:
        yield run


def _with(run: Run, values: Mapping[str, Scalar]) -> Run:
    """A run with other values; those it did not have are of no role."""
    results = {name: values.get(name, value) for name, value in run.results.items()}
    settings = {name: values.get(name, value) for name, value in run.settings.items()}
    rest = {name: value for name, value in values.items() if name not in results and name not in settings}
    return replace(run, results=results, settings=settings, values={**run.values, **rest})


def _with_seconds(run: Run, names: Mapping[str, str]) -> Run:
    """A run with its seconds to the target, as far as they are known."""
    held, name = run.held, names.get("seconds_to_target", "")
    taken = seconds(held.get(name), unit_of(name))
    epochs = number(held.get(names.get("epochs_to_target", "")))
    of_epoch = seconds(held.get(names.get("seconds_per_epoch", "")))
    if taken is None and epochs is not None and of_epoch is not None:
        taken = epochs * of_epoch
    return run if taken is None or not math.isfinite(taken) else _with(run, {_SECONDS: taken})


def _no_seconds(held: set[str], mapped: Mapping[str, str]) -> dict[str, str]:
    """Those of whole runs are not known to be those to the target."""
    return {
        name: "nothing"
        for name in held
        if meaning_of(name) in ("seconds", "started", "ended") and name not in mapped
    }


def _seeds(runs: Sequence[Run], mapped: Mapping[str, str]) -> dict[str, str]:
    """Numbers of runs that occur again and again count the seeds of a setting, as Zeus's do."""
    for name in (name for name in runs[0].held if meaning_of(name) == "run" and name not in mapped):
        values = [run.held.get(name) for run in runs]
        if all(type(value) is int for value in values) and len(set(values)) < len(values):
            return {name: "seed"}
    return {}


def _explained(column: Column, names: Mapping[str, str], meaning: str, mapped: Mapping[str, Any]) -> Column:
    """A column as the user is told of it."""
    if column.meaning == "metric":
        return replace(column, why=meaning.replace("_", " "))
    if column.name == _SECONDS:
        of_epoch = f"{names.get('epochs_to_target')} x {names.get('seconds_per_epoch')}"
        return replace(column, why=names.get("seconds_to_target") or of_epoch)
    used = next((one for one, name in names.items() if name == column.name), "")
    if column.meaning == "nothing" and used:
        return replace(
            column, why="the target, the same in every run" if used == "target" else used.replace("_", " ")
        )
    if column.name in mapped:
        return column
    if column.meaning != "nothing":
        return replace(column, why="")
    if is_metric(column.name):
        return replace(
            column, why=f"runs are compared by {names[meaning]}; --metric {column.name} compares by it"
        )
    return replace(column, why="of whole runs, not to the target") if column.why == "as you chose" else column
