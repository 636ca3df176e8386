"""What a set of runs says: each verdict with its interval and the runs that it stands on, or why the runs cannot say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.special import chdtri

from ...spaces.domain import Fixed, Range
from ...spaces.errors import StudyFileError
from ...spaces.record import TrialRecord
from ..analysis.rates import BestRates, Estimate, RateAt
from ..store.stored import StoredStudy
from ..store.trials import Trials
from ..suggest.priors.batch_rate_prior import BATCH
from ..suggest.samplers import suggester_of
from ..suggest.space_transform import SearchSpace, distribution
from .best_rate import FEWEST, best_rates
from .samples_by_batch import EPOCHS, LEAST_TRIALS, samples_by_batch

# The level at which trainings of several lengths are compared: reached by this share of them.
_REACHED = 0.3
# The most runs in a fit of lengths.
_MOST = 300
# Runs to try next.
NEXT = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer, or silence.

    Args:
        about: `front`, `best rate`, `critical batch`, `noise`, `blow-ups`, `parameters` or `next runs`; of runs to a target
            also `reached`, `best batch` or `data to target`.
        text: the answer, or why there is none.
        runs: that it stands on.
        silent: the runs cannot say.
        data: the same for programs.
    """

    about: str
    text: str
    runs: int = 0
    silent: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)


def verdicts(study: StoredStudy, *, timed: bool = True, batches: Sequence[int] = ()) -> list[Verdict]:
    """Everything that a study's trials, or imported runs, can say.

    Args:
        timed: whether their times are known; where not, they compare by samples.
        batches: at which the best rate is asked for, and nothing else.
    """
    complete = [
        record for record in study.records if record.outcome == "complete" and record.accuracy is not None
    ]
    rates, silence = _rates(study, complete, batches)
    if batches:
        return [_best_rate(rates, silence, batches)]
    return [
        _front(study, complete, timed),
        _best_rate(rates, silence, batches),
        _critical_batch(study, complete),
        _noise(study, complete),
        _blow_ups(study),
        _next(study, complete, rates, timed),
    ]


def _front(study: StoredStudy, complete: Sequence[TrialRecord], timed: bool) -> Verdict:
    if not timed:
        return Verdict("front", "not all runs have their seconds, so which were fast is unknown", silent=True)
    members = [record.number for record in study.front.trials]
    settings = len({record.setting for record in complete})
    on = len({record.setting for record in study.front.trials})
    rest = f"the other {settings - on} were each" if settings - on > 1 else "the other was"
    text = f"{on} of {settings} {'are' if on > 1 else 'is'} on the front"
    if on < settings:
        text += f"; {rest} beaten by one that was as fast and at least as good"
    return Verdict("front", text, len(complete), data={"members": members})


def best_rate_verdict(study: StoredStudy, complete: Sequence[TrialRecord]) -> Verdict:
    """The best rate at a few batches, by the study's metric."""
    return _best_rate(*_rates(study, complete, ()), ())


def _rates(
    study: StoredStudy, complete: Sequence[TrialRecord], batches: Sequence[int]
) -> tuple[BestRates | None, str]:
    """The fit of best rates, or why there is none."""
    if len(complete) < FEWEST:
        return None, f"{FEWEST} complete runs are needed, got {len(complete)}"
    tried = [record.facts.effective_batch or 1 for record in complete]
    if math.log(max(tried) / min(tried)) < math.log(1.5):
        return None, f"the batches differ too little, {min(tried)} to {max(tried)}"
    middle = round(math.exp(float(np.mean(np.log(tried)))))
    try:
        return best_rates("runs", study.records, [middle, *batches]), ""
    except StudyFileError as error:
        reason = error.faults[0].message.partition(": ")[2] or error.faults[0].message
        return None, reason.removeprefix("space.effective_batch: ").removeprefix("space.reference_rate: ")


def _best_rate(rates: BestRates | None, silence: str, batches: Sequence[int]) -> Verdict:
    if rates is None:
        return Verdict("best rate", silence, silent=True)
    if batches:
        return _rates_at(rates, batches)
    holding = [rule for rule, holds in rates.holds.items() if holds]
    failing = [rule for rule, holds in rates.holds.items() if not holds]
    if not rates.trusted:
        verdict = (
            "for most batches the best rate lies at the edge of the rates tried, so no rule can be excluded"
        )
    elif rates.bend is not None:
        verdict = (
            f"the slope changes near batch {rates.bend[0]}, so no rule that is a power of the batch holds"
        )
    elif not failing:
        verdict = "too uncertain to exclude a rule"
    else:
        verdict = f"{' and '.join(holding) or 'no rule'} hold{'s' * (len(holding) < 2)}, {' and '.join(failing)} not"
    at = "; ".join(map(_rate, rates.rates))
    text = f"{at}. It grows as the batch to the power of {_shown(rates.exponent)}: {verdict}"
    return Verdict("best rate", text, rates.trials, data=rates.to_dict())


def _rates_at(rates: BestRates, batches: Sequence[int]) -> Verdict:
    """Those at the batches asked for."""
    found = {rate.effective_batch: rate for rate in rates.rates}
    low, high = rates.rates[0].effective_batch, rates.rates[-1].effective_batch
    beyond = f"unknown at batch {{}}: the fit does not extrapolate beyond the batches tried, {low} to {high}"
    text = "; ".join(_rate(found[batch]) if batch in found else beyond.format(batch) for batch in batches)
    return Verdict(
        "best rate", text, rates.trials, silent=not found.keys() & set(batches), data=rates.to_dict()
    )


def _rate(rate: RateAt) -> str:
    at = rate.learning_rate
    edge = ", at the edge of the rates tried" * rate.edge
    return f"{at.value:.3g} [{at.low:.2g}, {at.high:.2g}] at batch {rate.effective_batch}{edge}"


def _critical_batch(study: StoredStudy, complete: Sequence[TrialRecord]) -> Verdict:
    """The batch that takes twice the data of the best one to the same level."""
    about = "critical batch"
    space = {name: distribution(domain) for name, domain in study.spec.searched().items()}
    if BATCH not in space or EPOCHS not in space:
        return Verdict(about, "it takes runs of several batches and of several lengths (epochs)", silent=True)
    if len(complete) < max(LEAST_TRIALS, FEWEST):
        return Verdict(about, f"{FEWEST} complete runs are needed, got {len(complete)}", silent=True)
    fixed = study.spec.fixed()
    trials = [({**fixed, **record.parameters}, record.score or 0.0) for record in _some(complete)]
    score = float(np.quantile([value for _, value in trials], 1 - _REACHED))
    found = samples_by_batch(trials, space, 1, score, scaled=False)
    critical, target = found.critical_batch(), study.spec.objectives.metric.score(score)
    level = f"{study.front.metric} {target:.4g}"
    if critical is None:
        return Verdict(
            about, f"too few runs reach {level} to compare lengths at it", len(complete), silent=True
        )
    if math.isinf(critical.low):
        text = (
            f"beyond {found.batches[-1]}, the largest tried: no batch needs twice the data to reach {level}"
        )
    else:
        at = f"at least {critical.low:.0f}" if math.isinf(critical.high) else f"{critical.value:.0f}"
        interval = "" if math.isinf(critical.high) else f" [{critical.low:.0f}, {critical.high:.0f}]"
        text = f"{at}{interval}, the batch that needs twice the data of the best one to reach {level}"
    estimate = [critical.low, critical.value, critical.high]
    return Verdict(about, text, len(complete), data={"estimate": estimate, "level": level, "target": target})


def _noise(study: StoredStudy, complete: Sequence[TrialRecord]) -> Verdict:
    groups: dict[object, list[float]] = {}
    for record in complete:
        setting = (
            *sorted((name, str(value)) for name, value in record.parameters.items()),
            record.facts.samples_budget,
        )
        groups.setdefault(setting, []).append(record.accuracy or 0.0)
    several = [group for group in groups.values() if len(group) > 1]
    free = sum(len(group) - 1 for group in several)
    if not free:
        return Verdict(
            "noise", "no setting was trained more than once, so what seeds change is unknown", silent=True
        )
    squares = sum(float(np.var(group)) * len(group) for group in several)
    low, high = (math.sqrt(squares / chdtri(free, above)) for above in (0.05, 0.95))
    std = math.sqrt(squares / free)
    text = f"standard deviation {std:.2g} [{low:.2g}, {high:.2g}] between runs of one setting, from {len(several)} of them"
    return Verdict(
        "noise", text, sum(map(len, several)), data={"std": [low, std, high], "settings": len(several)}
    )


def _blow_ups(study: StoredStudy) -> Verdict:
    blown = [record.number for record in study.records if record.facts.blew_up]
    diverged = sum(record.outcome == "diverged" for record in study.records) - len(blown)
    failed = sum(record.outcome == "error" for record in study.records)
    text = f"{len(blown) + diverged} diverged, {len(blown)} of them at a finite {study.front.metric}; {failed} failed"
    return Verdict(
        "blow-ups", text, len(study.records), data={"blew_up": blown, "diverged": diverged, "failed": failed}
    )


def _next(
    study: StoredStudy, complete: Sequence[TrialRecord], rates: BestRates | None, timed: bool
) -> Verdict:
    """The settings that would add most to the front; where times are unknown, samples are taken for them."""
    if len(complete) < NEXT or not study.spec.searched():
        return Verdict("next runs", f"{NEXT} complete runs are needed, got {len(complete)}", silent=True)
    space, records = _around_the_ridge(study, rates)
    suggester = suggester_of("front", space, study.spec.objectives, seed=0)
    trials = Trials(known=records)
    settings = []
    for _ in range(NEXT):
        (proposal,) = suggester.suggest(trials)
        assert not isinstance(proposal, int)
        parameters = space.whole(trials.begin(proposal).parameters)
        rate = float(parameters["reference_rate"]) * float(parameters["effective_batch"]) ** _exponent(rates)
        named = {"effective_batch": parameters["effective_batch"], "learning_rate": rate}
        named |= {
            name: value
            for name, value in parameters.items()
            if name in study.spec.searched() and name not in _RATES
        }
        settings.append({name: _rounded(value) for name, value in named.items()})
    text = "; ".join(", ".join(f"{name} {value}" for name, value in one.items()) for one in settings)
    return Verdict(
        "next runs", text, len(complete), data={"settings": settings, "by": "seconds" if timed else "samples"}
    )


_RATES = frozenset({"effective_batch", "reference_rate", "rule", "exponent"})


def _exponent(rates: BestRates | None) -> float:
    """How the best rate grows with the batch: as fitted, or as its square root."""
    return 0.5 if rates is None or not rates.trusted else rates.exponent.value


def _around_the_ridge(study: StoredStudy, rates: BestRates | None) -> tuple[SearchSpace, list[TrialRecord]]:
    """The space and the trials with rates at a batch of 1, so that what is proposed lies among the rates tried at its batch."""
    records: list[TrialRecord] = []
    for record in study.records:
        if record.facts.learning_rate and record.facts.effective_batch:
            rate = record.facts.learning_rate / record.facts.effective_batch ** _exponent(rates)
            records.append(
                replace(record, number=len(records), parameters={**record.parameters, "reference_rate": rate})
            )
    tried = [float(record.parameters["reference_rate"]) for record in records]
    domains = study.spec.domains()
    domains["reference_rate"] = Range(low=min(tried), high=max(tried), log=True)
    # Any but `constant`: the best reference rate hardly moves with the batch.
    domains["rule"] = Fixed(value="sqrt")
    domains.pop("exponent", None)
    return SearchSpace.of(domains), records


def _some(records: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
    """At most so many of them as a fit takes, evenly selected."""
    return records[:: max(1, math.ceil(len(records) / _MOST))]


def _rounded(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"
