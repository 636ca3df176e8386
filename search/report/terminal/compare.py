"""What `bsearch compare` prints: which side is better within which training times, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from typing import Any

import numpy as np

from ....spaces.readable import number, plural, seconds
from ....spaces.study.goals import turned
from ...compare.difference import LEAST
from ...compare.referee import Comparison, moved, verdict
from ...run.profiles import stored_profiles
from ..sentences import edge_sentences, outcome_counts


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """The verdict, and what speaks for it."""
    first, second = comparison.names
    metric = comparison.studies[0].spec.objectives.metric
    lower = ", of which lower is better" if metric.direction == "minimize" else ""
    sides = ", ".join(
        f"{name} ({plural(runs, 'run')})"
        for name, runs in zip(comparison.names, comparison.runs, strict=True)
    )
    yield f"{second} against {first}, each at its own best settings, by {metric.name}{lower}: {sides}"
    found = comparison.found
    if found is None:
        yield f"Cannot tell: expected at least {LEAST} finished runs of each side."
        yield from _other_trials(comparison)
        return
    for begin, end, said in spans(comparison):
        where = f"within {end}" if begin == end else f"within {begin} to {end}"
        yield f"  {where:<28} {said}"
    yield _verdict_sentence(comparison)
    if comparison.verdict == "cannot tell":
        more = comparison.more_runs
        yield (
            "Both sides have identical results at every setting that both trained: as far as these tell, it is the same code."
            if comparison.same_results
            else f"About {more:.0f} more runs of each side would tell, if the difference is what it seems."
            if more <= 10 * min(comparison.runs)
            else f"If there is a difference, it is too {'near the margin' if comparison.margin else 'small'} to be told by ten "
            "times as many runs."
        )
    yield from _moved_sentence(comparison)
    gap = abs(float(found.drawn[-1].mean()))
    if gap:
        needed = max(2.0, comparison.runs_for(gap))
        yield (
            f"A run varies by {found.noise:.2g} (one standard deviation): at one setting, a difference of {gap:.2g} takes "
            f"{needed:.0f} runs of each side."
        )
    yield from _other_trials(comparison)
    for name, study in zip(comparison.names, comparison.studies, strict=True):
        yield from (f"{name}: {sentence}" for sentence in edge_sentences(study.front, study.spec.searched()))
    if comparison.measure == "samples":
        yield "The sides ran on different devices, so their trainings are compared by samples instead of seconds."
    if (known := seconds_known_to(comparison)) is not None:
        off = " and ".join(
            f"±{share:.0%} for {name}" for name, share in zip(comparison.names, known, strict=True)
        )
        yield f"Both train for a time predicted to {off}. To narrow that, time their steps on an idle machine."
    yield {
        True: "Both were scored on the same validation samples.",
        False: "Their validation samples differ: compare them only if the change is in how the same data are read.",
        None: "Whether both were scored on the same data cannot be checked here.",
    }[comparison.same_data]


def spans(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    """Neighbouring training times with one verdict: the first, the last, and the difference there in words."""
    found = comparison.found
    assert found is not None
    each = [verdict(found, comparison.margin, comparison.share, place) for place in range(len(found.seconds))]
    for _, group in groupby(range(len(each)), key=each.__getitem__):
        places = [*group]
        place = places[-1]
        mean, low, high = interval(comparison, place)
        sure = float(found.better(-comparison.margin)[place])
        no_worse = "not worse" if comparison.margin else "better"
        words = {"better": f"{no_worse} ({sure:.1%} sure)", "worse": f"worse ({1 - sure:.1%} sure)"}.get(
            each[place], "cannot tell"
        )
        begin, end = (_taken(comparison, float(found.seconds[at])) for at in (places[0], place))
        yield begin, end, f"{mean:+.2g} [{low:+.2g}, {high:+.2g}]  {words}"


def _other_trials(comparison: Comparison) -> Iterator[str]:
    for name, study in zip(comparison.names, comparison.studies, strict=True):
        if others := outcome_counts(one for one in study.records if one.outcome != "complete"):
            yield f"Other trials of {name}, which are not compared: {others}"


def interval(comparison: Comparison, place: int) -> tuple[float, float, float]:
    """The mean difference of the metric within a training time, the second side's less the first's, and its 95 % interval."""
    assert comparison.found is not None
    drawn = comparison.found.drawn[place]
    mean, *ends = (
        _in_metric(comparison, float(one)) for one in (drawn.mean(), *np.quantile(drawn, [0.025, 0.975]))
    )
    return mean, min(ends), max(ends)


def seconds_known_to(comparison: Comparison) -> list[float] | None:
    """How surely each side's step times are known, where they decide how much is trained; None where they do not."""
    shares = []
    for study in comparison.studies:
        if study.spec.space.train_s is None:
            return None
        with closing(study.tables()) as tables:
            laws = [
                law for profile in stored_profiles(study, tables).values() for law in profile.all_step_times
            ]
        shares.append(max((1.0 if law.interval is None else law.interval for law in laws), default=1.0))
    return shares


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """The same for programs."""
    metric, found = comparison.studies[0].spec.objectives.metric, comparison.found
    document: dict[str, Any] = {
        "verdict": comparison.verdict,
        "metric": metric.name,
        "direction": metric.direction,
        "margin": comparison.margin,
        "same_data": comparison.same_data,
        "same_results": comparison.same_results,
        "seconds_known_to": seconds_known_to(comparison),
        "sides": [
            {
                "study": study.name,
                "runs": runs,
                "other_trials": sum(one.outcome != "complete" for one in study.records),
            }
            for study, runs in zip(comparison.studies, comparison.runs, strict=True)
        ],
    }
    if found is None:
        return document
    intervals = [interval(comparison, place) for place in range(len(found.seconds))]
    return document | {
        "within": [
            {
                comparison.measure: float(cut),
                "difference": mean,
                "low": low,
                "high": high,
                "better": float(sure),
            }
            for cut, (mean, low, high), sure in zip(
                found.seconds, intervals, found.better(-comparison.margin), strict=True
            )
        ],
        "best": [dict(one) for one in found.best],
        "at_first_best": found.unmoved
        and {"difference": _in_metric(comparison, found.unmoved[0]), "std": found.unmoved[1]},
        "run_std": found.noise,
        "more_runs": comparison.more_runs if np.isfinite(comparison.more_runs) else None,
    }


def _in_metric(comparison: Comparison, difference: float) -> float:
    """A difference of scores, of which higher are better, as one of the metric."""
    return turned(difference, comparison.studies[0].spec.objectives.metric.direction)


def _taken(comparison: Comparison, value: float) -> str:
    return seconds(value) if comparison.measure == "train_s" else f"{value:,.0f} samples"


def _verdict_sentence(comparison: Comparison) -> str:
    mean, low, high = interval(comparison, -1)
    within = f" by more than {number(comparison.margin)}" if comparison.margin else ""
    match comparison.verdict:
        case "better":
            words = "is not worse" + within if comparison.margin else "is better"
        case "worse":
            words = "is worse" + within
        case _:
            words = f"may be better or worse{within}"
    return f"{comparison.names[1]} {words}: by {mean:+.2g} [{low:+.2g}, {high:+.2g}], with no limit on training time."


def _moved_sentence(comparison: Comparison) -> Iterator[str]:
    assert comparison.found is not None
    changes = [f"{name} {number(one)} to {number(other)}" for name, (one, other) in moved(comparison).items()]
    unmoved = comparison.found.unmoved
    both = [study.spec.space.domains().keys() for study in comparison.studies]
    if unmoved is not None and changes and both[0] == both[1]:
        mean, std = _in_metric(comparison, unmoved[0]), 1.96 * unmoved[1]
        where = f"At {comparison.names[0]}'s own best setting the difference is {mean:+.2g} +/- {std:.2g}"
        yield f"{where}; the best moved: {', '.join(changes)}."
    elif changes:
        yield f"The best moved: {', '.join(changes)}."
