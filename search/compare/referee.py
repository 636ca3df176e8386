"""Two studies, each searched with the same budget, until it is clear which is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...spaces.domain import Choices, Domain, Range, bounds, searched_of, values_of
from ...spaces.errors import Fault, StudyFileError
from ...spaces.readable import UNLIMITED
from ...spaces.record import TrialRecord
from ...spaces.study.spec import StudySpec
from ..run.profiles import stored_profiles
from ..store.stored import StoredStudy
from ..store.url import shown_url
from ..suggest.space_transform import SpaceTransform, distribution
from .difference import LEAST, Difference, Runs, difference

Verdict = Literal["better", "worse", "cannot tell"]

# Shares of the budget after which the difference is looked at. It is called where it is so many standard deviations, divided
# by the root of the share: O'Brien & Fleming 1979, https://doi.org/10.2307/2530245. The looks together call one comparison of
# equals in twenty, with a little room for a model whose uncertainty is itself estimated (docs/log.md).
_LOOKS = 0.5, 0.75, 1.0
_BOUNDARY = 2.3
# By how much wider it is for one run: of six a side, 8.5 % of equals were called without.
_FEW = 1.7
# What else ends a study: both sides have the same budget here.
_NO_LIMITS: dict[str, Any] = dict.fromkeys(("hours", "by", "until", "keep", "cost"))
# Further runs of each member of a side's front, at the end of a budget of trials: they tell noise.
_REPEATS = 2
# Settings that both sides trained with the same result, from which on that is no chance.
_ALIKE = 3
# A difference of so many standard errors is seen four times in five.
_SEEN = 2.8


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is known of two studies: the first is what there is, the second has the change.

    Args:
        runs: finished ones of each side.
        measure: of what trainings take: `train_s`, or `samples` where they ran on different devices.
        found: None where a side has too few runs.
        margin: a loss of less counts as none.
        share: of the budget that is used.
        same_data: whether both read the same validation samples; None where that is not known.
    """

    studies: tuple[StoredStudy, StoredStudy]
    runs: tuple[int, int]
    measure: Literal["train_s", "samples"]
    found: Difference | None
    margin: float
    share: float
    same_data: bool | None

    @property
    def names(self) -> tuple[str, str]:
        """Of the studies, with their folders where they are called alike."""
        first, second = (study.name for study in self.studies)
        if first != second:
            return first, second
        places = [
            study.spec.task.rpartition(":")[0].rpartition("/")[0] or shown_url(study.url)
            for study in self.studies
        ]
        return f"{first} ({places[0]})", f"{second} ({places[1]})"

    @property
    def verdict(self) -> Verdict:
        """Of the second side's best, whatever it takes: better or worse by no more than the margin, or worse."""
        return "cannot tell" if self.found is None else verdict(self.found, self.margin, self.share, -1)

    @property
    def same_results(self) -> bool:
        """Whether both sides have the same score, to the last digit, of every setting and seed that both trained."""
        first, second = (
            {repr((sorted(one.parameters.items()), one.facts.seed)): one.score for one in _finished(study)}
            for study in self.studies
        )
        both = first.keys() & second.keys()
        return len(both) >= _ALIKE and all(first[one] == second[one] for one in both)

    @property
    def more_runs(self) -> float:
        """About how many more runs of each side would tell, if the difference is what it seems."""
        if self.found is None:
            return float(max(LEAST - min(self.runs), 0))
        mean, std = self.found.drawn[-1].mean() + self.margin, self.found.drawn[-1].std()
        times = (_BOUNDARY * std / mean) ** 2 if mean else math.inf
        return max(1.0, (times - 1) * min(self.runs))

    def runs_for(self, difference: float) -> float:
        """Runs of each side at one setting to see such a difference there four times in five."""
        assert self.found is not None
        return 2 * (_SEEN * self.found.noise / difference) ** 2 if difference else math.inf


def targets(runs: int) -> list[int]:
    """Trials of each side at each look.

    >>> targets(20), targets(8)
    ([10, 15, 20], [6, 8])
    """
    return sorted({max(LEAST, math.ceil(share * runs)) for share in _LOOKS})


def verdict(found: Difference, margin: float, share: float, place: int) -> Verdict:
    """What is sure of the second side's best.

    Args:
        share: of the budget that is used.
        place: of the training time within which.
    """
    drawn, boundary = found.drawn[place] + margin, _BOUNDARY * (1 + _FEW / found.runs)
    off = float(drawn.mean()) / max(float(drawn.std()), 1e-12) * math.sqrt(share)
    return "better" if off > boundary else "worse" if off < -boundary else "cannot tell"


def refereed(
    specs: tuple[StudySpec, StudySpec],
    run: Callable[[StudySpec], StoredStudy],
    trials: int | None,
    hours: float | None,
    margin: float,
) -> Iterator[Comparison]:
    """Search both sides in turn, and compare them after each part of the budget; ends when it is sure.

    Args:
        run: runs a study, or resumes it, until its budget is met.
        trials, hours: of both sides together; neither: the studies' own `budget.trials`.

    Raises:
        StudyFileError: the studies cannot be compared.
    """
    check_comparable(*specs)
    if specs[0].devices != specs[1].devices:
        raise StudyFileError(Fault("devices", "expected the same in both studies"))
    if trials is None and hours is None:
        if any(spec.budget.trials == UNLIMITED for spec in specs):
            raise StudyFileError(
                Fault("budget", "expected --trials or --within, since a study has no number of trials")
            )
        trials = sum(spec.budget.trials for spec in specs)
    if trials is not None and trials < 2 * LEAST:
        raise StudyFileError(f"expected at least {2 * LEAST} trials, {LEAST} of each side; got {trials}")
    budgets: list[dict[str, Any]]
    if hours is None:
        assert trials is not None
        budgets = [{"trials": target} for target in targets(trials // 2)]
    else:
        budgets = [{"trials": UNLIMITED, "hours": share * hours / 2} for share in _LOOKS]
    for budget, share in zip(budgets, _LOOKS[-len(budgets) :], strict=True):
        repeats = _REPEATS if hours is None and budget is budgets[-1] else 0
        sides = (spec.changed({"budget": _NO_LIMITS | budget}) for spec in specs)
        first, second = (
            run(spec.with_top(confirm=max(spec.confirm, repeats) if repeats else 0)) for spec in sides
        )
        comparison = compared(first, second, margin, share)
        yield comparison
        if comparison.verdict != "cannot tell":
            return


def check_comparable(first: StudySpec, second: StudySpec) -> None:
    """
    Raises:
        StudyFileError: two studies cannot be compared: with every reason.
    """
    ours, theirs = first.objectives, second.objectives
    faults = []
    if (ours.metric.name, ours.metric.direction) != (theirs.metric.name, theirs.metric.direction):
        got = f"{ours.metric.name} ({ours.metric.direction}) and {theirs.metric.name} ({theirs.metric.direction})"
        faults.append(Fault("objectives.metric", f"expected one metric, got {got}"))
    if first.storage is not None and (first.storage, first.study) == (second.storage, second.study):
        faults.append(
            Fault("study", f"expected two studies, got {first.study} twice. Give the second another name.")
        )
    rates = [spec.space.domains().get("reference_rate") for spec in (first, second)]
    batches = {getattr(rate, "at_batch", None) for rate in rates if rate is not None}
    if len(batches) > 1:
        faults.append(
            Fault(
                "space.reference_rate.at_batch",
                "expected the same in both studies, since it is what rates mean",
            )
        )
    if faults:
        raise StudyFileError(faults)


def compared(first: StoredStudy, second: StoredStudy, margin: float, share: float = 1.0) -> Comparison:
    """Two studies by the runs that they have.

    Raises:
        StudyFileError: they cannot be compared.
    """
    studies = first, second
    check_comparable(first.spec, second.spec)
    sizes, digests = zip(*map(_validation_of, studies), strict=True)
    if all(sizes) and sizes[0] != sizes[1]:
        raise StudyFileError(
            f"expected the same validation data on both sides, got {sizes[0]} and {sizes[1]} samples"
        )
    same_data = digests[0] == digests[1] if all(digests) else None
    records = [_finished(study) for study in studies]
    kinds = [{one.facts.device_kind for one in some} for some in records]
    measure: Literal["train_s", "samples"] = "train_s" if kinds[0] == kinds[1] else "samples"
    sides = [_runs(some, measure) for some in records]
    counts = len(sides[0].scores), len(sides[1].scores)
    found = None
    if min(counts) >= LEAST:
        found = difference(_spaces(first.spec, second.spec), (sides[0], sides[1]))
    return Comparison(studies, counts, measure, found, margin, share, same_data)


def _finished(study: StoredStudy) -> list[TrialRecord]:
    return [one for one in study.records if one.outcome == "complete" and one.score is not None]


def _validation_of(study: StoredStudy) -> tuple[int | None, int]:
    """The size of a study's validation data, and a digest of some of its samples, as far as they are known."""
    if not study.url:
        return None, 0  # runs of elsewhere
    with closing(study.tables()) as tables:
        profile = next(iter(stored_profiles(study, tables).values()), None)
    return (None, 0) if profile is None else (profile.validation_set, profile.validation_digest)


def _runs(records: list[TrialRecord], measure: Literal["train_s", "samples"]) -> Runs:
    taken = [one.train_s if measure == "train_s" else one.facts.samples_budget for one in records]
    known = [(one, value) for one, value in zip(records, taken, strict=True) if value]
    if not any(taken):
        known = [(one, 1.0) for one in records]  # runs of elsewhere, whose times nobody wrote down
    return Runs(
        [one.settings for one, _ in known],
        np.array([value for _, value in known], dtype=float),
        np.array([one.score for one, _ in known], dtype=float),
        [one.facts.seed for one, _ in known],
    )


def _spaces(first: StudySpec, second: StudySpec) -> list[tuple[SpaceTransform, SpaceTransform]]:
    """How settings are points: in ranges that hold both sides', and by their places in each side's own, where these differ.

    Another optimizer's rates may lie elsewhere altogether, and mean the same.
    """
    both = [spec.space.domains() for spec in (first, second)]
    names = {name: None for domains in both for name in searched_of(domains)}
    wide = {name: _wide([domains[name] for domains in both if name in domains]) for name in names}
    own = [{name: _own(domains.get(name), of_both) for name, of_both in wide.items()} for domains in both]
    common = SpaceTransform({name: distribution(domain) for name, domain in wide.items()})
    ways = [(common, common)]
    if own[0] != own[1]:
        first_own, second_own = (
            SpaceTransform({name: distribution(domain) for name, domain in one.items()}) for one in own
        )
        ways.append((first_own, second_own))
    return ways


def _own(domain: Domain | None, of_both: Domain) -> Domain:
    """A side's own range of a number that both search; else that of both."""
    return (
        domain
        if isinstance(domain, Range) and isinstance(of_both, Range) and domain.low < domain.high
        else of_both
    )


def _wide(domains: list[Domain]) -> Domain:
    """A domain that holds those of both sides."""
    for domain in domains:
        if isinstance(domain, Range):
            ends = [end for one in domains for end in bounds(one)]
            return domain.model_copy(update={"low": min(ends), "high": max(ends), "step": None})
    return Choices(choices=tuple(dict.fromkeys(value for domain in domains for value in values_of(domain))))


def moved(comparison: Comparison) -> Mapping[str, tuple[Any, Any]]:
    """By parameter that both sides have, the best setting of each, where they differ."""
    assert comparison.found is not None
    first, second = comparison.found.best
    both = [study.spec.space.domains() for study in comparison.studies]
    shared = [name for name in first if name in second and all(name in domains for domains in both)]
    return {name: (first[name], second[name]) for name in shared if first[name] != second[name]}
