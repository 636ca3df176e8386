"""Confidence of the front, from settings that were trained again with other seeds.

A setting's runs count as one trial with their mean. The standard deviation of a single run is learned from all settings with
several runs (`run_noise`); from it follow each setting's interval, its probability of being on the front, and ties.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from ...spaces.record import TrialRecord
from ...spaces.study.goals import Objectives
from .run_noise import run_noise

# Of intervals; also the probability of being better below which two members are ties.
CONFIDENCE = 0.9
# Of `budget.trials`, at its end.
FOR_REPEATS = 0.3
# Settings less likely than this to be on the front are not repeated.
_LEAST_PROBABILITY = 0.1
_DRAWS = 2000
_RAN, _FAILED = ("complete", "stopped"), ("diverged", "error")


def averaged(records: Iterable[TrialRecord], objectives: Objectives) -> list[TrialRecord]:
    """Complete trials, with all runs of a setting merged into one with their mean; first runs are corrected for bias.

    Where any setting has several runs, each gets the facts `runs`, `failed_runs` (diverged or failed), `mean_low`, `mean_high`,
    `front_probability` and `ties`. A setting that failed at least as often as it finished is left out.
    """
    runs: dict[int, list[TrialRecord]] = {}
    failed: Counter[int] = Counter()
    for record in records:
        if record.outcome == "complete" and record.accuracy is not None:
            runs.setdefault(record.setting, []).append(record)
        elif record.outcome in _FAILED and record.is_repeat:
            failed[record.setting] += 1
    runs = {setting: group for setting, group in runs.items() if failed[setting] < len(group)}
    if not failed and all(len(group) == 1 for group in runs.values()):
        # Nothing was repeated: NumPy need not be imported.
        return [_mean(group, 0) for group in runs.values()]
    means = [_mean(group, failed[setting]) for setting, group in runs.items()]
    scores = [
        [run.score or 0.0 for run in sorted(group, key=lambda run: run.number)] for group in runs.values()
    ]
    noise = run_noise(scores, [record.train_s or 0.0 for record in means])
    if noise is None:
        return means
    import numpy as np
    from scipy.special import stdtr, stdtrit

    taken = np.array([record.taken(objectives.speed) for record in means], dtype=float)
    freedom, (accuracy, errors) = noise.freedom, noise.means(scores)
    probabilities = front_probabilities(taken, accuracy, errors, freedom)

    half_widths = stdtrit(freedom, 0.5 + CONFIDENCE / 2) * errors
    averages = []
    for place, (record, group) in enumerate(zip(means, runs.values(), strict=True)):
        variance = np.maximum(errors**2 + errors[place] ** 2, 1e-300)
        # Of a difference of two means, by Welch and Satterthwaite.
        shared = variance**2 / np.maximum(errors**4 / freedom + errors[place] ** 4 / freedom[place], 1e-300)
        better = stdtr(shared, (accuracy[place] - accuracy) / np.sqrt(variance)) > CONFIDENCE
        tied = (taken < taken[place]) & (accuracy < accuracy[place]) & ~better
        mean = record.score_of(float(accuracy[place]))
        facts = replace(
            record.facts,
            runs=len(group),
            mean_low=mean - float(half_widths[place]),
            mean_high=mean + float(half_widths[place]),
            front_probability=float(probabilities[place]),
            ties=tuple(means[other].number for other in np.flatnonzero(tied)),
        )
        averages.append(replace(record, accuracy=mean, facts=facts))
    return averages


def _mean(runs: Sequence[TrialRecord], failed: int) -> TrialRecord:
    """A setting's runs merged into its first, with their mean accuracy and median time."""
    first = min(runs, key=lambda run: run.number)
    if len(runs) == 1 and not failed and first.number == first.setting:
        return first
    facts = replace(first.facts, failed_runs=failed or None, runs=len(runs) if len(runs) > 1 else None)
    return replace(
        first,
        number=first.setting,
        accuracy=statistics.fmean(run.accuracy for run in runs if run.accuracy is not None),
        train_s=statistics.median(run.train_s for run in runs if run.train_s is not None),
        facts=facts,
    )


def front_probabilities(taken: Any, accuracy: Any, errors: Any, freedom: Any) -> Any:
    """Probability that no setting that takes at most as much is as accurate, for each setting (n,), by Monte Carlo.

    Args:
        taken, accuracy, errors, freedom: (n,); errors are the standard errors of the accuracies, freedom their degrees of it.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    drawn = accuracy + errors * rng.standard_t(freedom, (_DRAWS, len(accuracy)))
    order = np.argsort(taken, kind="stable")
    best = np.maximum.accumulate(drawn[:, order], axis=1)
    alone = np.ones_like(best, dtype=bool)
    alone[:, 1:] = best[:, 1:] > best[:, :-1]
    # Of several with the same time only the best is on the front.
    times = taken[order]
    if (times[1:] == times[:-1]).any():
        last = np.searchsorted(times, times, side="right") - 1
        alone &= drawn[:, order] >= best[:, last]
    probabilities = np.empty(len(accuracy))
    probabilities[order] = alone.mean(axis=0)
    return probabilities


def next_repeat(
    records: Sequence[TrialRecord],
    objectives: Objectives,
    repeats: int,
    running: Mapping[int, int],
    front: Sequence[int],
) -> int | None:
    """The setting to repeat next: of those repeated least, the one whose place on the front is least certain.

    Args:
        repeats: further runs wanted of each member; failed ones count.
        running: repeats under way, by setting.
        front: numbers of the settings on the front of means.

    Returns:
        Its number; None where every member has its runs.
    """
    ended = Counter(
        record.setting for record in records if record.is_repeat and record.outcome in (*_FAILED, *_RAN)
    )
    open_settings = []
    for record in averaged(records, objectives):
        had = ended[record.number] + running.get(record.number, 0)
        probability = record.facts.front_probability
        if had >= repeats or not (
            record.number in front or (probability is not None and probability >= _LEAST_PROBABILITY)
        ):
            continue
        variance = 0.25 if probability is None else probability * (1 - probability)
        open_settings.append((had, -variance, record.number))
    return min(open_settings)[2] if open_settings else None


def next_seed(used: Iterable[int], seed: int) -> int:
    """The first seed that none of the given runs has used; the study's own is the first runs'.

    >>> next_seed([8, 10], 7)
    9
    """
    taken = {seed, *used}
    return next(candidate for candidate in count(seed) if candidate not in taken)
