"""Warm start: trials of earlier studies of the same task, in this study's terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...spaces.domain import applies
from ...spaces.errors import BsearchError, Fault, StudyFileError
from ...spaces.study.file import read_study
from ...spaces.study.spec import StudySpec
from ..analysis.confirm import averaged
from ..store.rows import StudyRow
from ..store.tables import Tables
from ..store.trials import stored_trials
from .trial_history import PriorTrial

# What must be the same for accuracies of an earlier study to compare with this one's.
_SAME = ("task", "training", "objectives")
_MAY_DIFFER = ("evaluations", "seed", "earlier", "packages")


def prior_trials(
    spec: StudySpec,
    identity: Mapping[str, Any],
    known_taken: Callable[[Mapping[str, Any]], tuple[float, ...]] | None,
) -> list[PriorTrial]:
    """The finished trials of the studies under `warm_start:` that lie in this study's space, timed by this study's laws.

    Raises:
        StudyFileError: there is no such study, it trained something else, or this study's times are not known beforehand.
    """
    if not spec.warm_start:
        return []
    if known_taken is None:
        raise StudyFileError(
            Fault(
                "warm_start",
                "expected budget.profile_s above 0, because earlier trials are timed by this study's step times; got 0",
            )
        )
    found: list[PriorTrial] = []
    faults = []
    for index, named in enumerate(dict.fromkeys(spec.warm_start)):
        try:
            url, study = _row(spec, named)
            faults += [
                Fault(f"warm_start.{index}", f"{named}: {difference}") for difference in _differences(study.identity, identity)
            ]
            found += _trials(spec, url, study, known_taken)
        except BsearchError as error:
            faults.append(Fault(f"warm_start.{index}", str(error)))
    if faults:
        raise StudyFileError(faults)
    return found


def _row(spec: StudySpec, named: str) -> tuple[str, StudyRow]:
    """The URL and row of an earlier study: a study file's, or one by its name in this study's own storage."""
    url, name = spec.storage, named
    if named.endswith((".yaml", ".yml")):
        other = read_study(spec.folder / Path(named).expanduser())
        url, name = other.storage, other.study
    assert url is not None
    rows = [study for study in Tables(url, create=False).studies() if name in (study.name, study.base_name)]
    if url == spec.storage and name == spec.study:
        raise StudyFileError("expected a study other than this one, whose own trials are used anyway when it resumes")
    if not rows:
        raise StudyFileError(f"expected an earlier study, but its storage has no study named {name!r}")
    return url, rows[-1]


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for part in _SAME:
        old, new = (
            {key: value for key, value in (side.get(part) or {}).items() if key not in _MAY_DIFFER} for side in (was, now)
        )
        if old != new:
            yield f"expected the same {part} as this study's, got {old}, and here {new}"


def _trials(
    spec: StudySpec, url: str, study: StudyRow, known_taken: Callable[[Mapping[str, Any]], tuple[float, ...]]
) -> Iterator[PriorTrial]:
    old = study.study
    if old.space.reference_batch != spec.space.reference_batch:
        expected = f"expected reference_rate at_batch {spec.space.reference_batch}, as here"
        raise StudyFileError(f"{study.name}: {expected}, got {old.space.reference_batch}")
    searched, fixed = spec.searched(), spec.fixed()
    for record in averaged(stored_trials(url, study.name), spec.objectives):
        values = {**old.fixed(), **record.parameters}
        needed = {name: domain for name, domain in searched.items() if applies(domain.when, values)}
        inside = all(name in values and domain.contains(values[name]) for name, domain in needed.items())
        if not inside or any(values.get(name) != value for name, value in fixed.items()):
            continue
        parameters = {name: values[name] for name in needed}
        taken = known_taken(parameters)
        if record.accuracy is not None and all(map(math.isfinite, taken)):
            yield parameters, taken, record.accuracy
