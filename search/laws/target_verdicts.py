"""What runs to a target say: which was the fastest, and how the data to the target grow with the batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from scipy.special import chdtri

from ...spaces.record import TrialRecord
from ..store.stored import StoredStudy
from .runs_table import RunsToTarget
from .samples_to_target import LEAST_BATCHES, BatchLaw, fit_batch_law
from .verdicts import Verdict, best_rate_verdict

# The fastest settings, and batches that most runs did not reach the target with, that are named.
_MOST_NAMED = 6
# Batches to try next: their number, how far beyond those tried, and among how many.
_NEXT, _BEYOND, _CANDIDATES = 3, 2.0, 25
# Two medians are told apart where they differ by this many standard errors: 90 %.
_APART = 1.645
# The standard error of a median of normal values, over that of their mean.
_OF_MEDIAN = 1.2533
_LEVELS = ("round", "group", "group_")


@dataclass(frozen=True, slots=True)
class _Setting:
    """Runs of one setting.

    Args:
        level: of those that share one, such as a benchmark's version.
        data, seconds: of the runs that reached the target, as far as they are known.
        never: runs that did not.
    """

    text: str
    batch: int
    level: str
    data: tuple[float, ...]
    seconds: tuple[float, ...]
    never: int

    @property
    def reached(self) -> bool:
        """Whether most runs did, so that there is a median."""
        return self.never < len(self.data)

    @property
    def runs(self) -> int:
        return len(self.data) + self.never

    def median(self, values: Sequence[float]) -> float:
        return float(np.median((*values, *[math.inf] * self.never)))


def target_verdicts(study: StoredStudy, unit: str, batches: Sequence[int] = ()) -> list[Verdict]:
    """Everything that imported runs to a target can say.

    Args:
        unit: of the study's metric: `samples`, `epochs`, `steps`, `data` in a unit of their own; or `seconds`, which do not
            say how much data that took.
        batches: at which the data to the target are asked for, and nothing else.
    """
    settings = _settings(study, unit)
    reached = [setting for setting in settings if setting.reached]
    points = _points(reached)
    std, free = _seed_std(points)
    counted = [] if unit == "seconds" else points
    law = (
        fit_batch_law(counted) if len({point.effective_batch for point in counted}) >= LEAST_BATCHES else None
    )
    shown = "samples" if unit == "steps" else unit
    if batches:
        return [_data_at(counted, law, shown, batches)]
    return [
        _reached(settings),
        _front(reached),
        _best_batch(reached, std, free),
        _critical_batch(counted, law, shown),
        _best_rate(study, unit),
        _noise(points, std, free),
        _next(counted, law, std),
    ]


def _settings(study: StoredStudy, unit: str) -> list[_Setting]:
    groups: dict[object, list[TrialRecord]] = {}
    for record in study.records:
        if record.outcome in ("complete", "diverged"):
            groups.setdefault(
                tuple(sorted((name, str(value)) for name, value in record.parameters.items())), []
            ).append(record)
    return [_setting(records, study.spec.searched(), unit) for records in groups.values()]


def _setting(records: Sequence[TrialRecord], searched: Mapping[str, Any], unit: str) -> _Setting:
    first, reached = records[0], [record for record in records if record.outcome == "complete"]
    batch, parameters = first.facts.effective_batch or 1, first.parameters
    names = {"reference_rate": "learning_rate"}
    varied = [name for name in parameters if name in searched and name != "effective_batch"]
    times = batch if unit == "steps" else 1
    level = next((str(parameters[name]) for name in _LEVELS if name in searched and name in parameters), "")
    return _Setting(
        ", ".join([f"batch {batch}", *(f"{names.get(name, name)} {parameters[name]}" for name in varied)]),
        batch,
        level,
        tuple(times * (record.accuracy or 0.0) for record in reached),
        tuple(
            record.facts.measured_train_s for record in reached if record.facts.measured_train_s is not None
        ),
        len(records) - len(reached),
    )


def _points(reached: Sequence[_Setting]) -> list[RunsToTarget]:
    """What the law is fitted to: of each batch and level the setting that needed the fewest data."""
    best: dict[tuple[int, str], _Setting] = {}
    for setting in reached:
        before = best.setdefault((setting.batch, setting.level), setting)
        if setting.median(setting.data) < before.median(before.data):
            best[setting.batch, setting.level] = setting
    return [RunsToTarget(batch, own.data, level, own.never) for (batch, level), own in best.items()]


def _reached(settings: Sequence[_Setting]) -> Verdict:
    never, runs = sum(setting.never for setting in settings), sum(setting.runs for setting in settings)
    if not never:
        return Verdict(
            "reached", "every run reached the target, or runs that did not are not in the table", runs
        )
    without = sorted(
        {setting.batch for setting in settings} - {setting.batch for setting in settings if setting.reached}
    )
    text = (
        f"{never} of {runs} never reached the target; they count as slower than all others of their setting"
    )
    if without:
        named = ", ".join(map(str, without[:_MOST_NAMED])) + ", ..." * (len(without) > _MOST_NAMED)
        text += f"; batch {named} is left out of the law, since no setting of it reached the target in most of its runs"
    return Verdict("reached", text, runs, data={"never": never})


_NO_SECONDS = (
    "the seconds to the target are not known of every run. Name a column time_to_target, or give time_per_epoch beside "
    "epochs_to_target"
)


def _seconds(reached: Sequence[_Setting]) -> list[float]:
    """The median of each setting that reached the target; empty where the seconds of some run are not known."""
    known = all(len(setting.seconds) == len(setting.data) for setting in reached)
    return [setting.median(setting.seconds) for setting in reached] if known else []


def _front(reached: Sequence[_Setting]) -> Verdict:
    """The fastest setting, or those that are as fast."""
    if not (seconds := _seconds(reached)):
        return Verdict(
            "front",
            _NO_SECONDS if reached else "no setting reached the target in most of its runs",
            silent=True,
        )
    least = min(seconds)
    fastest = [setting.text for setting, taken in zip(reached, seconds, strict=True) if taken == least]
    shown = "; ".join(fastest[:_MOST_NAMED]) + f"; {len(fastest) - _MOST_NAMED} more" * (
        len(fastest) > _MOST_NAMED
    )
    was, whose = (
        ("was", "median of its runs") if len(fastest) == 1 else ("were", "median of the runs of each")
    )
    document = [{"setting": setting, "seconds": least} for setting in fastest]
    text = f"{shown} {was} the fastest: {least:.4g} s ({whose})"
    return Verdict("front", text, sum(setting.runs for setting in reached), data={"settings": document})


def _best_batch(reached: Sequence[_Setting], std: float, free: int) -> Verdict:
    """The batch that reached the target in the fewest seconds, and those that seeds do not tell from it."""
    about = "best batch"
    if not (seconds := _seconds(reached)):
        return Verdict(about, "it takes seconds to the target", silent=True)
    if len({setting.batch for setting in reached}) < 2:
        return Verdict(about, f"only batch {reached[0].batch} reached the target", silent=True)
    first = int(np.argmin(seconds))
    batch, least = reached[first].batch, seconds[first]
    errors = [_OF_MEDIAN * std / math.sqrt(setting.runs) for setting in reached]
    alike = {
        setting.batch
        for setting, taken, error in zip(reached, seconds, errors, strict=True)
        if setting.batch != batch and math.log(taken / least) < _APART * math.hypot(error, errors[first])
    }
    text = f"{batch}, {least:.4g} s"
    if not free:
        text += "; no setting was trained more than once, so what seeds change is unknown"
    elif alike:
        text += f"; seeds may account for the difference to {', '.join(map(str, sorted(alike)))}"
    document = {"effective_batch": batch, "value": least, "alike": sorted(alike) if free else None}
    return Verdict(about, text, sum(setting.runs for setting in reached), data={"seconds": document})


def _few(points: Sequence[RunsToTarget]) -> str:
    if not points:
        return "samples, epochs or steps to the target are needed; seconds depend on the machine as well"
    batches = sorted({point.effective_batch for point in points})
    named = ", ".join(map(str, batches))
    return (
        f"runs that reach the target at {LEAST_BATCHES} batches are needed, there "
        f"{'is' if len(batches) < 2 else 'are'} {named}"
    )


def _runs(points: Sequence[RunsToTarget]) -> int:
    return sum(len(point.samples) + point.never for point in points)


def _critical_batch(points: Sequence[RunsToTarget], law: BatchLaw | None, unit: str) -> Verdict:
    about = "critical batch"
    if law is None:
        return Verdict(about, _few(points), silent=True)
    critical, (low, high) = law.critical_batch(), law.batches
    text = (
        f"{critical.value:.0f} [{critical.low:.0f}, {critical.high:.0f}], the batch that needs "
        f"twice the {unit} of small ones"
    )
    if critical.low > high:
        text += f"; it lies beyond those tried, {low} to {high}, and how far rests on the law's prior"
    elif critical.high < low:
        text += f"; it lies below those tried, {low} to {high}, so what small ones need is extrapolated"
    elif critical.low < low or critical.high > high:
        text += f"; the interval reaches beyond those tried, {low} to {high}, where it rests mostly on the law's prior"
    return Verdict(
        about, text, _runs(points), data={"estimate": [critical.low, critical.value, critical.high]}
    )


def _data_at(
    points: Sequence[RunsToTarget], law: BatchLaw | None, unit: str, batches: Sequence[int]
) -> Verdict:
    about = f"{unit} to target"
    if law is None:
        return Verdict("data to target", _few(points), silent=True)
    levels, texts, document = sorted({point.group for point in points}), [], []
    for batch, level in product(batches, levels):
        data, of_level = law.samples_at(batch, level), f" ({level})" if len(levels) > 1 else ""
        texts.append(f"{data.value:.4g} [{data.low:.4g}, {data.high:.4g}] at batch {batch}{of_level}")
        document.append(
            {
                "effective_batch": batch,
                "level": level,
                "low": data.low,
                "value": data.value,
                "high": data.high,
            }
        )
    text, (low, high) = "; ".join(texts), law.batches
    if not all(map(law.covers, batches)):
        text += f". Beyond the batches tried, {low} to {high}, intervals rest mostly on the law's prior"
    return Verdict(about, text, _runs(points), data={"unit": unit, "predicted": document})


def _best_rate(study: StoredStudy, unit: str) -> Verdict:
    """The rate with which the fewest data are needed, as of a study whose metric is their logarithm."""
    if "reference_rate" not in study.spec.searched():
        return Verdict("best rate", "runs of several learning rates are needed", silent=True)
    if unit == "seconds":
        return Verdict("best rate", _few([]), silent=True)
    records = tuple(_of_log(record, unit) for record in study.records)
    complete = [record for record in records if record.outcome == "complete"]
    return best_rate_verdict(replace(study, records=records), complete)


def _of_log(record: TrialRecord, unit: str) -> TrialRecord:
    if record.outcome != "complete" or not record.accuracy:
        return record
    times = record.facts.effective_batch or 1 if unit == "steps" else 1
    return replace(record, accuracy=math.log(times * record.accuracy))


def _several(points: Sequence[RunsToTarget]) -> list[RunsToTarget]:
    """Those with several runs, all of which reached the target. Runs that share their data, as of other hardware, are not."""
    return [point for point in points if len(point.samples) > 1 and not point.never]


def _seed_std(points: Sequence[RunsToTarget]) -> tuple[float, int]:
    """Standard deviation of a run's logarithm between seeds, and its degrees of freedom."""
    several = [np.log(point.samples) for point in _several(points)]
    free = sum(len(values) - 1 for values in several)
    return (
        math.sqrt(sum(float(values.var()) * len(values) for values in several) / free) if free else 0.0
    ), free


def _noise(points: Sequence[RunsToTarget], std: float, free: int) -> Verdict:
    if not free:
        text = (
            "no setting reached the target in more than one run, and in all, so what seeds change is unknown"
        )
        return Verdict("noise", text, silent=True)
    low, high = (std * math.sqrt(free / chdtri(free, above)) for above in (0.05, 0.95))
    several = _several(points)
    text = f"standard deviation {std:.1%} [{low:.1%}, {high:.1%}] between runs of one setting, from {len(several)} of them"
    return Verdict("noise", text, _runs(several), data={"std": [low, std, high], "settings": len(several)})


def _next(points: Sequence[RunsToTarget], law: BatchLaw | None, std: float) -> Verdict:
    """Batches at which the law is most uncertain, each with those chosen before it as if they had been measured."""
    if law is None:
        return Verdict("next runs", _few(points), silent=True)
    low, high = law.batches
    candidates = np.unique(np.geomspace(max(1, low / _BEYOND), high * _BEYOND, _CANDIDATES).round())
    level = Counter(point.group for point in points).most_common(1)[0][0]
    covariance = np.cov(np.array([law.log_samples(batch, level) for batch in candidates]))
    noise = std**2 + float(np.mean(law.spread**2))
    chosen: list[int] = []
    for _ in range(min(_NEXT, len(candidates))):
        free = [place for place, batch in enumerate(candidates) if batch not in chosen]
        place = max(free, key=lambda place: covariance[place, place])
        chosen.append(round(float(candidates[place])))
        column = covariance[:, place]
        covariance = covariance - np.outer(column, column) / (covariance[place, place] + noise)
    document = {"settings": [{"effective_batch": batch} for batch in sorted(chosen)]}
    return Verdict("next runs", ", ".join(map(str, sorted(chosen))), _runs(points), data=document)
