"""What the page needs to narrow the front down and to compare two of its points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....spaces.front import ParetoFront, amount
from ....spaces.record import TrialRecord
from ....spaces.study.goals import Speed
from ..columns import MEASURES

# Half a 90 % interval, in standard deviations.
_HALF_INTERVAL = 1.645


def decision_data(
    front: ParetoFront, records: Mapping[int, TrialRecord], curves: Mapping[int, Sequence[tuple[int, float]]]
) -> dict[str, Any]:
    """The measures of speed that distinguish points, the study's own first, and what each trained point takes by each of them.

    Args:
        records: trials by number, those that stand for repeated settings with their means.
        curves: (samples, metric) by trial.
    """
    trained = [
        record for record in records.values() if record.outcome == "complete" and record.accuracy is not None
    ]
    measures = _measures(front, trained)
    shown = {trial.number for trial in front.trials} | {
        record.number for record in trained if record.is_baseline
    }
    return {
        "metric": front.metric,
        "higher": front.direction == "maximize",
        "measures": [{"key": key, "name": MEASURES[key].name} for key in measures],
        "points": {
            record.number: {
                "amounts": {key: record.taken(key) for key in measures},
                "texts": {key: amount(key, record.taken(key)) for key in measures},
                "value": record.accuracy,
                "std": None if record.half_interval is None else record.half_interval / _HALF_INTERVAL,
                "runs": record.facts.runs or 1,
                "curve": [*curves.get(record.number, ())] if record.number in shown else [],
            }
            for record in trained
            if all(record.taken(key) is not None for key in measures)
        },
    }


def _measures(front: ParetoFront, trained: Sequence[TrialRecord]) -> list[Speed]:
    """Measures that every trial has, the front's own first; device time only where trials differ in devices."""
    one_count = len({record.facts.devices or 1 for record in trained}) == 1
    known: list[Speed] = [
        measure
        for measure in MEASURES
        if all(record.taken(measure) is not None for record in trained)
        and (measure != "device_s" or measure == front.speed or not one_count)
    ]
    return sorted(known, key=lambda measure: measure != front.speed)
