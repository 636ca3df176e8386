"""A study file made of imported runs: their space, the rule that they support, their best setting, and what to expect."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ...spaces.domain import Choices, Range
from ...spaces.errors import StudyFileError
from ...spaces.learning_rate import RULE_EXPONENTS
from ...spaces.record import TrialRecord
from ...spaces.study.spec import StudySpec
from ..analysis.blow_ups import told_apart
from ..analysis.pareto import study_front
from .best_rate import best_rates

# Of the runs, by the metric: what they have in common is expected of the best.
_BEST = 0.2
# With fewer complete runs, nothing is expected.
_FEWEST = 15
# A prior reaches at least this factor, or this share of its range.
_LEAST_FACTOR, _LEAST_SHARE = 3.0, 0.2


def study_of_runs(spec: StudySpec, records: Sequence[TrialRecord], task: str, source: str) -> dict[str, Any]:
    """The keys of a study file, in its order.

    Args:
        spec, records: of imported runs.
        task: of the new study.
        source: the runs', for `warm_start`.
    """
    complete = [record for record in told_apart(records) if record.outcome == "complete"]
    rules, batch, prior = _rules(records, complete)
    exponent = RULE_EXPONENTS[rules[0]]
    best = sorted(complete, key=lambda record: -(record.score or 0.0))
    near = best[: math.ceil(_BEST * len(best))] if len(best) >= _FEWEST else []

    def reference(record: TrialRecord) -> float:
        rate, own = record.facts.learning_rate or 1.0, record.facts.effective_batch or 1
        return float(rate * (batch / own) ** exponent)

    rates = [reference(record) for record in complete]
    space: dict[str, Any] = {}
    for name, domain in spec.domains().items():
        if name == "reference_rate":
            space[name] = {
                "low": _outward(min(rates), -1),
                "high": _outward(max(rates), 1),
                "at_batch": batch,
            }
            if prior is not None and min(rates) < (middle := prior[0]) < max(rates):
                ends = middle / prior[1], middle * prior[1]
                space[name]["prior"] = _prior(middle, ends, space[name]["low"], space[name]["high"])
        elif name == "rule":
            space[name] = rules if len(rules) > 1 else rules[0]
        elif name != "devices" and (name in spec.searched() or name in spec.space.model_fields_set):
            space[name] = _domain(name, domain, near)
    # Of several as good, the fastest, as `ask` shows it.
    first = study_front(complete, spec.objectives).best or best[0]
    baseline: dict[str, Any] = {"effective_batch": first.facts.effective_batch}
    baseline |= {"reference_rate": _rounded(reference(first)), "rule": rules[0]}
    baseline |= {name: value for name, value in first.parameters.items() if name not in baseline}
    return {
        "study": f"{spec.study}-next",
        "task": task,
        "space": space,
        "objectives": {"metric": spec.objectives.metric.model_dump(exclude_none=True)},
        "budget": {"trials": 20},
        "baseline": [baseline],
        "warm_start": [source],
    }


def run_document(record: TrialRecord, spec: StudySpec) -> dict[str, Any]:
    """A run in bsearch's own words, as a line of a table that `warm_start` reads without a doubt about names."""
    facts, parameters = record.facts, dict(record.parameters)
    for name in ("effective_batch", "reference_rate"):
        parameters.pop(name, None)
    settings = {
        "effective_batch": facts.effective_batch,
        "learning_rate": facts.learning_rate,
        "seed": facts.seed,
        **parameters,
    }
    results = {spec.objectives.metric.name: record.accuracy, "train_s": facts.measured_train_s}
    status = {"complete": "finished", "diverged": "diverged"}.get(record.outcome, "failed")
    known = (
        {name: value for name, value in values.items() if value is not None} for values in (settings, results)
    )
    return {"run": record.number, "status": status, **dict(zip(("config", "summary"), known, strict=True))}


def _rules(
    records: Sequence[TrialRecord], complete: Sequence[TrialRecord]
) -> tuple[list[str], int, tuple[float, float] | None]:
    """The rules that the runs support, the nearest first, the middle batch, and the best rate there with its uncertainty."""
    if not complete:
        raise StudyFileError("expected runs that ended with a result, to make a study of them, got none")
    batch = round(
        math.exp(statistics.fmean(math.log(record.facts.effective_batch or 1) for record in complete))
    )
    try:
        found = best_rates("runs", records, [batch])
    except StudyFileError:
        return ["sqrt", "linear"], batch, None
    nearest = sorted(RULE_EXPONENTS, key=lambda rule: abs(RULE_EXPONENTS[rule] - found.exponent.value))
    rules = [rule for rule in nearest if found.holds[rule]] if found.trusted else nearest[:2]
    rules = rules or nearest[:1]
    at = next(rate for rate in found.rates if rate.effective_batch == batch)
    if at.edge:
        return rules, batch, None
    rate = at.learning_rate
    return rules, batch, (rate.value, max(rate.high / rate.value, _LEAST_FACTOR))


def _domain(name: str, domain: Any, near: Sequence[TrialRecord]) -> Any:
    """As it was searched, with what is expected; a single value as it is."""
    written: Mapping[str, Any] = domain.model_dump(mode="json", exclude_defaults=True)
    if isinstance(domain, Choices) and all(type(value) is int for value in domain.choices):
        # A size: each has step times of its own.
        return {
            "choices": list(domain.choices),
            "changes_cost": True,
        }
    if not isinstance(domain, Range):
        return written.get("value", written.get("choices", written))
    found: dict[str, Any] = dict(written)
    values = [value for record in near if isinstance(value := record.parameters.get(name), int | float)]
    if values and name not in ("effective_batch", "epochs"):
        middle = statistics.median(values)
        ends = statistics.quantiles(values, n=10) if len(values) > 1 else values
        if domain.log:
            within = max(*(end / middle for end in ends), *(middle / end for end in ends), _LEAST_FACTOR)
        else:
            within = max(*(abs(end - middle) for end in ends), _LEAST_SHARE * (domain.high - domain.low))
        around = (middle / within, middle * within) if domain.log else (middle - within, middle + within)
        found["prior"] = _prior(middle, around, domain.low, domain.high)
    return found


def _prior(middle: float, ends: tuple[float, float], low: float, high: float) -> float | list[float]:
    """Two ends around the middle, where both lie in a range, else the middle alone."""
    written = [_rounded(end) for end in ends]
    return written if low <= written[0] < written[1] <= high else min(max(_rounded(middle), low), high)


def _outward(value: float, sign: int) -> float:
    """Three digits, rounded so that the value stays inside."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    whole = math.floor(value / unit) if sign < 0 else math.ceil(value / unit)
    return float(f"{whole * unit:.3g}")


def _rounded(value: float) -> float:
    return float(f"{value:.3g}") if isinstance(value, float) else value
