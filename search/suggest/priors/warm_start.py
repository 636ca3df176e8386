"""Warm start: trials of earlier studies of the same task, or runs of any source, in this study's terms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....spaces.domain import Domain, applies, values_of
from ....spaces.errors import BsearchError, Fault, StudyFileError
from ....spaces.learning_rate import OptimizerSettings, RuleConstants, scaled_settings
from ....spaces.record import TrialRecord
from ....spaces.study.file import read_study
from ....spaces.study.spec import StudySpec
from ...analysis.blow_ups import told_apart
from ...analysis.confirm import averaged
from ...sources.columns import columns_of
from ...sources.imported import imported, metric_name
from ...sources.read import is_source, runs_of
from ...store.rows import StudyRow
from ...store.tables import Tables
from ..samplers import suggester_of
from ..space_transform import SearchSpace
from ..suggester import Suggester
from ..trial_history import PriorTrial

# What training takes by parameters.
Law = Callable[[Mapping[str, Any]], float]

# What must be the same for scores of an earlier study to compare with this one's.
_SAME = ("task", "training", "objectives")
_MAY_DIFFER = ("evaluations", "seed", "earlier", "packages")
# Trainings of so many seconds are alike where one has at most so many times the samples of the other.
_ALIKE = 1.25


def prior_trials(
    spec: StudySpec, identity: Mapping[str, Any], known_taken: Law | None, by_samples: Law | None = None
) -> list[PriorTrial]:
    """The finished trials of the studies under `warm_start:` that lie in this study's space, timed by this study's laws.

    Args:
        by_samples: the same as `known_taken` of parameters with `samples`, where seconds are the length of trainings.

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
            if (source := _source(spec, named)) is not None:
                found += _runs(spec, source, known_taken)
                continue
            url, study = _row(spec, named)
            faults += [
                Fault(f"warm_start.{index}", f"{named}: {difference}")
                for difference in _differences(study.identity, identity)
            ]
            found += _trials(spec, url, study, known_taken, by_samples)
        except BsearchError as error:
            faults.append(Fault(f"warm_start.{index}", str(error)))
    if faults:
        raise StudyFileError(faults)
    return found


def study_suggester(
    spec: StudySpec,
    space: SearchSpace,
    known_taken: Law | None,
    prior: Sequence[PriorTrial],
    *,
    trials: int,
) -> Suggester:
    """A study's sampler, which learns from prior trials.

    Args:
        trials: that the study has already.

    Raises:
        StudyFileError: its sampler cannot be imported, or is none.
    """
    return suggester_of(
        spec.sampler,
        space,
        spec.objectives,
        trials=trials,
        seed=spec.training.seed,
        known_seconds=known_taken,
        prior_trials=prior,
        doubted=names_sources(spec),
        by_time=spec.is_limited_by_time,
        pauses=spec.pauses,
    )


def names_sources(spec: StudySpec) -> bool:
    """Whether runs of somebody's own are among the earlier trials: nobody knows that they trained the same."""
    return any(_source(spec, named) is not None for named in spec.warm_start)


def _source(spec: StudySpec, named: str) -> str | None:
    """A source of runs that a warm start names; None of a study."""
    if named.endswith((".yaml", ".yml")):
        return None
    path = spec.folder / Path(named).expanduser()
    source = named if ":" in named and not path.exists() else str(path)
    return source if is_source(source) else None


def _runs(spec: StudySpec, source: str, known_taken: Law) -> Iterator[PriorTrial]:
    """A source's complete runs that lie in this study's space; their rates as references for its rule.

    Raises:
        StudyFileError: they have no such metric, or none lies in the space.
    """
    runs = runs_of(source)
    metric = spec.objectives.metric
    names = {name for run in runs for values in (run.results, run.values) for name in values}
    mapped = {name: "metric" for name in sorted(names) if metric.name in (name, metric_name(name))}
    if not mapped:
        raise StudyFileError(
            f"{source}: expected runs with {metric.name}, this study's metric; got {', '.join(sorted(names)[:12])}"
        )
    columns = columns_of(source, runs, mapped=dict([next(iter(mapped.items()))]), direction=metric.direction)
    group, *others = imported(source, runs, columns)
    if others:
        several = "; ".join(one.name for one in (group, *others[:7]))
        raise StudyFileError(
            f"{source}: expected runs of one experiment, got {several}. Keep those of this study's."
        )
    searched, fixed = spec.searched(), spec.fixed()
    outside: Counter[str] = Counter()
    inside = 0
    for record in told_apart(group.records):
        if record.outcome != "complete" or record.score is None:
            continue
        values: dict[str, Any] = {**fixed, **record.parameters}
        values["reference_rate"] = _reference_rate(spec, values, record)
        needed = {
            name: domain
            for name, domain in searched.items()
            if applies(domain.when, values) and name not in _RULES
        }
        parameters = {name: _fitting(domain, values.get(name)) for name, domain in needed.items()}
        wrong = [name for name, domain in needed.items() if not domain.contains(parameters[name])]
        # What a run does not tell, such as a weight decay that was never varied, may have been this study's.
        told = {
            name: values[name]
            for name in (*record.parameters, "reference_rate")
            if name in fixed and name not in _RULES
        }
        wrong = wrong or [name for name, value in told.items() if not _is(value, fixed[name])]
        if wrong := wrong or ["epochs"] * ("epochs" in values and spec.space.epochs is None):
            outside[wrong[0]] += 1
            continue
        parameters |= {name: values[name] for name in _RULES & searched.keys() if name in values}
        taken = known_taken(parameters)
        if math.isfinite(taken):
            inside += 1
            yield parameters, taken, record.score
    if not inside:
        why = ", ".join(f"{count} by {name}" for name, count in outside.most_common(5)) or "none is complete"
        raise StudyFileError(f"{source}: expected runs in this study's space, got none ({why})")


_RULES = frozenset({"rule", "exponent"})


def _is(value: Any, other: Any) -> bool:
    numbers = all(isinstance(one, int | float) for one in (value, other))
    return math.isclose(value, other, rel_tol=1e-3) if numbers else bool(value == other)


def _fitting(domain: Domain, value: Any) -> Any:
    """A value as the domain writes it: 5.0 epochs are 5 where whole numbers are searched."""
    return (
        int(value)
        if isinstance(value, float) and value.is_integer() and not domain.contains(value)
        else value
    )


def _reference_rate(spec: StudySpec, values: dict[str, Any], record: TrialRecord) -> float:
    """The rate at the reference batch from which the rule gives the run's own; of several rules, the first."""
    for name in _RULES & spec.searched().keys():
        values[name] = next(iter(values_of(spec.domains()[name])))
    batch, rate = record.facts.effective_batch or 1, record.facts.learning_rate or 1.0
    factor = scaled_settings(
        str(values["rule"]),
        OptimizerSettings(1.0),
        reference_batch=spec.space.reference_batch,
        effective_batch=batch,
        constants=RuleConstants.at(
            spec.space.reference_batch, values.get("exponent"), values.get("noise_batch"), 1.0
        ),
    ).learning_rate
    return rate / factor


def _row(spec: StudySpec, named: str) -> tuple[str, StudyRow]:
    """The URL and row of an earlier study: a study file's, or one by its name in this study's own storage."""
    url, name = spec.storage, named
    if named.endswith((".yaml", ".yml")):
        other = read_study(spec.folder / Path(named).expanduser())
        url, name = other.storage, other.study
    assert url is not None
    rows = [study for study in Tables(url, create=False).studies() if name in (study.name, study.base_name)]
    if url == spec.storage and name == spec.study:
        raise StudyFileError(
            "expected a study other than this one, whose own trials are used anyway when it resumes"
        )
    if not rows:
        raise StudyFileError(f"expected an earlier study, but its storage has no study named {name!r}")
    return url, rows[-1]


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for part in _SAME:
        old, new = (
            {key: value for key, value in (side.get(part) or {}).items() if key not in _MAY_DIFFER}
            for side in (was, now)
        )
        if old != new:
            yield f"expected the same {part} as this study's, got {old}, and here {new}"


def _trials(
    spec: StudySpec, url: str, study: StudyRow, known_taken: Law, by_samples: Law | None
) -> Iterator[PriorTrial]:
    old = study.study
    if old.space.reference_batch != spec.space.reference_batch:
        expected = f"expected reference_rate at_batch {spec.space.reference_batch}, as here"
        raise StudyFileError(f"{study.name}: {expected}, got {old.space.reference_batch}")
    searched, fixed = spec.searched(), spec.fixed()
    for record in averaged(Tables(url, create=False).trials(study.name), spec.objectives):
        values = {**old.fixed(), **record.parameters}
        needed = {name: domain for name, domain in searched.items() if applies(domain.when, values)}
        inside = all(name in values and domain.contains(values[name]) for name, domain in needed.items())
        if not inside or any(values.get(name) != value for name, value in fixed.items()):
            continue
        parameters = {name: values[name] for name in needed}
        taken = known_taken(parameters)
        if by_samples is not None:  # seconds of another device are another training
            samples, batch = record.facts.samples_budget or 0, record.facts.effective_batch or 1
            least, most = (
                by_samples({**parameters, "samples": count}) for count in (samples, samples + batch)
            )
            if not (least <= taken * _ALIKE and most >= taken / _ALIKE):
                continue
        if record.score is not None and math.isfinite(taken):
            yield parameters, taken, record.score
