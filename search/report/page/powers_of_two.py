"""What a search over powers of two would have found, estimated from the trials of a search over all integers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ....spaces.front import ParetoFront
from ....spaces.laws.device import DeviceProfile
from ....spaces.planning import known_taken
from ....spaces.record import taken_per_second
from ...analysis.pareto import front_of, study_front
from ...store.stored import StoredStudy


@dataclass(frozen=True, slots=True)
class PowersOfTwo:
    """The two fronts that can be estimated, and a sentence on each.

    Args:
        kept: front of the trials whose batch is a power of two.
        moved: front of all trials at the power of two nearest to their batch: the training time is predicted by the step-time
            law, the accuracy is left unchanged, which may be too high or too low; None without a step-time law.
    """

    kept: ParetoFront
    moved: ParetoFront | None
    sentence: str


def powers_of_two(study: StoredStudy, profiles: Mapping[Any, DeviceProfile]) -> PowersOfTwo | None:
    """Both fronts of a study with two objectives that searched the batch; None if there is nothing to compare."""
    spec, front = study.spec, study.front
    if "effective_batch" not in spec.searched() or len(front.trials) < 2 or front.second_speed is not None:
        return None
    ended = [record for record in study.records if record.outcome == "complete" and "effective_batch" in record.settings]
    powers = [record for record in ended if _is_power(int(record.settings["effective_batch"]))]
    powers_front = study_front(powers, spec.objectives)
    settings = [record for record in ended if not record.is_repeat]
    count = sum(_is_power(int(record.settings["effective_batch"])) for record in settings)
    sentence = f"{count} of {len(settings)} settings have a power of two as their batch"
    if powers_front.trials:
        sentence += f"; their front alone holds {_share(powers_front, front):.0%} of the hypervolume."
    else:
        sentence += "."
    price = next((trial.facts.price for trial in front.trials), None)
    predicted = known_taken(spec, profiles, price) if profiles else None
    if predicted is None:
        return PowersOfTwo(powers_front, None, sentence)
    moved_trials = []
    means = {trial.number: trial for trial in front.trials}
    for record in settings:
        batch = int(record.settings["effective_batch"])
        parameters = {**record.parameters, "effective_batch": _nearest_power(batch)}
        (moved,) = predicted(parameters)
        if math.isfinite(moved):
            each = taken_per_second(front.speed, record.facts.devices or 1, record.facts.price, record.facts.watts) or 1.0
            mean = means.get(record.number, record)
            moved_trials.append(replace(mean, train_s=moved / each))
    moved_front = front_of(moved_trials, front.metric, front.direction, front.speed)
    sentence += (
        f" If every trial used the power of two nearest to its batch, with its predicted time there and its accuracy "
        f"unchanged, the front would hold {_share(moved_front, front):.0%}: an estimate, whereas the first figure is a count."
    )
    return PowersOfTwo(powers_front, moved_front, sentence)


def _is_power(batch: int) -> bool:
    return batch & (batch - 1) == 0


def _nearest_power(batch: int) -> int:
    """The nearest power of two on a log scale.

    >>> _nearest_power(90), _nearest_power(91), _nearest_power(500)
    (64, 128, 512)
    """
    return int(2 ** round(math.log2(batch)))


def _share(front: ParetoFront, whole: ParetoFront) -> float:
    """Hypervolume of a front relative to another's, with time on a log scale and a reference point set by the other front."""
    points = _points(whole)
    times, losses = zip(*points, strict=True)
    # 10 % beyond the slowest and worst, so that the end points contribute too.
    slowest, worst = (max(values) + 0.1 * (max(values) - min(values)) for values in (times, losses))
    return _volume(_points(front), slowest, worst) / (_volume(points, slowest, worst) or 1.0)


def _points(front: ParetoFront) -> list[tuple[float, float]]:
    """Log time and loss of each member, fastest first, so worst first."""
    return [(math.log(front.taken(trial) or 1.0), -(trial.score or 0.0)) for trial in front.trials]


def _volume(points: list[tuple[float, float]], slowest: float, worst: float) -> float:
    volume, level = 0.0, worst
    for time, loss in points:
        if time < slowest and loss < level:
            volume += (slowest - time) * (level - loss)
            level = loss
    return volume
