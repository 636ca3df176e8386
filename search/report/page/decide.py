"""What the page needs to narrow the front down and to compare two of its points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....spaces.readable import number, seconds
from ....spaces.study import Speed
from ....spaces.trial import ParetoFront, TrialRecord

# Measures of what training takes, and how they are called on the page.
_NAMES: dict[Speed, str] = {"train_s": "training time", "device_s": "device time", "cost": "cost"}
# Half a 90 % interval, in standard deviations.
_HALF_INTERVAL = 1.645


def decision_data(
    front: ParetoFront, records: Mapping[int, TrialRecord], curves: Mapping[int, Sequence[tuple[int, float]]]
) -> dict[str, Any]:
    """Measures of speed that tell points apart, the study's own first, and of each trained point what it takes by each.

    Args:
        records: trials by number, those that stand for repeated settings with their means.
        curves: (samples, metric) by trial.
    """
    trained = [one for one in records.values() if one.outcome == "complete" and one.accuracy is not None]
    measures = _measures(front, trained)
    shown = {trial.number for trial in front.trials} | {one.number for one in trained if one.is_baseline}
    return {
        "metric": front.metric,
        "higher": front.direction == "maximize",
        "measures": [{"key": key, "name": _NAMES[key]} for key in measures],
        "points": {
            one.number: {
                "amounts": {key: one.taken(key) for key in measures},
                "texts": {key: _text(one, key) for key in measures},
                "value": one.accuracy,
                "std": None if one.half_interval is None else one.half_interval / _HALF_INTERVAL,
                "runs": one.facts.runs or 1,
                "curve": [*curves.get(one.number, ())] if one.number in shown else [],
            }
            for one in trained
            if all(one.taken(key) is not None for key in measures)
        },
    }


def _measures(front: ParetoFront, trained: Sequence[TrialRecord]) -> list[Speed]:
    """Measures that every trial has, the front's own first; device time only where trials differ in devices."""
    one_count = len({one.facts.devices or 1 for one in trained}) == 1
    known: list[Speed] = [
        measure
        for measure in _NAMES
        if all(one.taken(measure) is not None for one in trained)
        and (measure != "device_s" or front.speed == measure or not one_count)
    ]
    return sorted(known, key=lambda measure: measure != front.speed)


def _text(record: TrialRecord, measure: Speed) -> str:
    taken = record.taken(measure)
    return number(taken) if measure == "cost" else seconds(taken)


__all__ = ["decision_data"]
