"""A front that is honest about noise: its members trained again with other seeds, and what that says of each.

A setting's runs count as one trial with their mean. What one training's accuracy is uncertain by is pooled over all settings
that have several runs; from it come every member's interval, its chance to be on the front, and which members are ties.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from scipy.stats import t as student

from ...spaces.study import Objectives
from ...spaces.trial import TrialRecord

# Of an interval; and the chance of being really better below which two members are ties.
CONFIDENCE = 0.9
# Settings with less than this chance to be on the front are not trained again.
_LEAST_CHANCE = 0.1
_DRAWS = 2000
_RAN, _FAILED = ("complete", "stopped"), ("diverged", "error")


def setting_of(record: TrialRecord) -> int:
    """The trial whose setting this one trained: its own number, or the one that it repeats."""
    return int(record.facts.get("repeats", record.number))


def averaged(records: Iterable[TrialRecord], objectives: Objectives) -> list[TrialRecord]:
    """Complete trials, those of one setting as one with their mean; where any setting has several runs, each with its doubt.

    Facts that come with it: `runs`, `failed_runs` (diverged or ended in an error), the interval `mean_low` to `mean_high`,
    `front_chance`, and `ties`: numbers of faster settings than which it is not surely better. A setting that failed at least as
    often as it trained to its end is left out.
    """
    runs: dict[int, list[TrialRecord]] = {}
    failed: Counter[int] = Counter()
    for record in records:
        if record.outcome == "complete" and record.accuracy is not None:
            runs.setdefault(setting_of(record), []).append(record)
        elif record.outcome in _FAILED and "repeats" in record.facts:
            failed[setting_of(record)] += 1
    runs = {setting: group for setting, group in runs.items() if failed[setting] < len(group)}
    deviations, freedom = run_deviations([[run.accuracy or 0.0 for run in group] for group in runs.values()])
    means = [_mean(group, failed[setting]) for setting, group in runs.items()]
    if not freedom:
        return means
    sign = objectives.accuracy.sign
    seconds = np.array([record.seconds(objectives.speed) for record in means], dtype=float)
    accuracy = np.array([sign * (record.accuracy or 0.0) for record in means])
    errors = deviations / np.sqrt([len(group) for group in runs.values()])
    chances = front_chances(seconds, accuracy, errors, freedom)
    reach = float(student.ppf(0.5 + CONFIDENCE / 2, freedom))
    told = []
    for place, (record, group) in enumerate(zip(means, runs.values(), strict=True)):
        apart = np.sqrt(errors**2 + errors[place] ** 2)
        surely = student.cdf((accuracy[place] - accuracy) / np.maximum(apart, 1e-300), freedom) > CONFIDENCE
        ties = [
            means[other].number
            for other in range(len(means))
            if seconds[other] < seconds[place] and accuracy[other] < accuracy[place] and not surely[other]
        ]
        assert record.accuracy is not None
        facts = {
            "runs": len(group),
            "mean_low": record.accuracy - reach * errors[place],
            "mean_high": record.accuracy + reach * errors[place],
            "front_chance": float(chances[place]),
            "ties": ties,
        }
        told.append(replace(record, facts={**record.facts, **facts}))
    return told


def _mean(runs: Sequence[TrialRecord], failed: int) -> TrialRecord:
    """A setting's runs as its first, with their mean accuracy and time."""
    first = min(runs, key=lambda run: run.number)
    if len(runs) == 1 and not failed and first.number == setting_of(first):
        return first
    facts = {**first.facts, **({"failed_runs": failed} if failed else {})}
    if len(runs) > 1:
        facts["runs"] = len(runs)
    return replace(
        first,
        number=setting_of(first),
        accuracy=statistics.fmean(run.accuracy for run in runs if run.accuracy is not None),
        train_s=statistics.median(run.train_s for run in runs if run.train_s is not None),
        facts=facts,
    )


def run_deviations(groups: Sequence[Sequence[float]]) -> tuple[Any, int]:
    """Standard deviation of one run about its setting's mean, (n,), and the degrees of freedom they rest on.

    Settings differ: one that hardly learns repeats to the digit. So each one's own variance counts beside two runs' worth of
    the median one.

    >>> run_deviations([[1.0, 3.0], [5.0], [2.0, 2.2, 2.4]])[0].round(3).tolist()
    [1.16, 1.01, 0.728]
    """
    own = np.array([statistics.variance(group) if len(group) > 1 else 0.0 for group in groups])
    free = np.array([len(group) - 1 for group in groups])
    if not free.sum():
        return np.zeros(len(groups)), 0
    middle = float(np.median(own[free > 0]))
    return np.sqrt((2 * middle + free * own) / (2 + free)), int(free.sum())


def front_chances(seconds: Any, accuracy: Any, errors: Any, freedom: float) -> Any:
    """Each setting's chance that none of those at least as fast is as accurate, by dice.

    Args:
        seconds, accuracy, errors: (n,); errors are standard errors of the accuracies, with so many degrees of freedom.
    """
    chance = np.random.default_rng(0)
    # What is unknown is shared: a deviation drawn once for all, then an error for each.
    scale = np.sqrt(freedom / chance.chisquare(freedom, (_DRAWS, 1)))
    drawn = accuracy + errors * scale * chance.standard_normal((_DRAWS, len(accuracy)))
    order = np.argsort(seconds, kind="stable")
    best = np.maximum.accumulate(drawn[:, order], axis=1)
    alone = np.ones_like(best, dtype=bool)
    alone[:, 1:] = best[:, 1:] > best[:, :-1]
    # Of several with the same time only the best is on the front.
    same = np.append(seconds[order][1:] == seconds[order][:-1], False)
    if same.any():
        times = seconds[order]
        last = np.searchsorted(times, times, side="right") - 1
        alone &= drawn[:, order] >= best[:, last]
    chances = np.empty(len(accuracy))
    chances[order] = alone.mean(axis=0)
    return chances


def next_repeat(
    records: Sequence[TrialRecord], objectives: Objectives, repeats: int, running: Mapping[int, int], front: Sequence[int]
) -> int | None:
    """The setting to train again: of those repeated least, the one whose place is most in doubt.

    Args:
        repeats: further runs that each member is to have; those that failed count.
        running: repeats on their way, by setting.
        front: numbers of the settings on the front of means.

    Returns:
        Its number; None where every member has its runs.
    """
    ended = Counter(
        setting_of(record) for record in records if "repeats" in record.facts and record.outcome in (*_FAILED, *_RAN)
    )
    open_settings = []
    for record in averaged(records, objectives):
        had = ended[record.number] + running.get(record.number, 0)
        chance = record.facts.get("front_chance")
        if had >= repeats or not (record.number in front or (chance is not None and chance >= _LEAST_CHANCE)):
            continue
        doubt = 0.25 if chance is None else chance * (1 - chance)
        open_settings.append((had, -doubt, record.number))
    return min(open_settings)[2] if open_settings else None


def next_seed(used: Iterable[int], seed: int) -> int:
    """A seed that no run of a setting has had; the study's own is the first run's.

    >>> next_seed([8, 10], 7)
    9
    """
    taken = {seed, *used}
    return next(one for one in count(seed) if one not in taken)
