"""What a search over powers of two would have found, as far as the trials of a search over all integers show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ....spaces.device import DeviceProfile
from ....spaces.planning import known_seconds
from ....spaces.trial import ParetoFront
from ...analysis.pareto import front_of, study_front
from ...store.stored import StoredStudy


@dataclass(frozen=True, slots=True)
class PowersOfTwo:
    """The two fronts that can be estimated, and a sentence on each.

    Args:
        kept: of the trials whose batch was a power of two.
        moved: of all trials, each at the power of two nearest to its batch: with its time there by the step-time law, and
            its accuracy as it was, which flatters some and wrongs others; None where no law is known.
    """

    kept: ParetoFront
    moved: ParetoFront | None
    words: str


def powers_of_two(study: StoredStudy, profiles: Mapping[Any, DeviceProfile]) -> PowersOfTwo | None:
    """Both fronts of a study that searched the batch; None where there is nothing to compare."""
    spec, front = study.spec, study.front
    if "effective_batch" not in spec.searched() or len(front.trials) < 2:
        return None
    ended = [record for record in study.records if record.outcome == "complete" and "effective_batch" in record.settings]
    kept = [record for record in ended if _is_power(int(record.settings["effective_batch"]))]
    kept_front = study_front(kept, spec.objectives)
    settings = [record for record in ended if not record.is_repeat]
    count = sum(_is_power(int(record.settings["effective_batch"])) for record in settings)
    words = f"{count} of {len(settings)} settings had a power of two as their batch"
    if kept_front.trials:
        words += f"; their front alone holds {_share(kept_front, front):.0%} of the hypervolume."
    else:
        words += "."
    seconds = known_seconds(spec, profiles) if profiles else None
    if seconds is None:
        return PowersOfTwo(kept_front, None, words)
    moved = []
    means = {trial.number: trial for trial in front.trials}
    for record in settings:
        batch = int(record.settings["effective_batch"])
        parameters = {**record.parameters, "effective_batch": _nearest_power(batch)}
        there_s = seconds(parameters)
        if math.isfinite(there_s):
            many = (record.facts.devices or 1) if spec.objectives.speed == "device_s" else 1
            mean = means.get(record.number, record)
            moved.append(replace(mean, train_s=there_s / many))
    moved_front = front_of(moved, front.metric, front.direction, front.speed)
    words += (
        f" If every trial used the power of two nearest to its batch, at its known time there and with its accuracy "
        f"unchanged, the front would hold {_share(moved_front, front):.0%}: an estimate, whereas the first figure is a count."
    )
    return PowersOfTwo(kept_front, moved_front, words)


def _is_power(batch: int) -> bool:
    return batch & (batch - 1) == 0


def _nearest_power(batch: int) -> int:
    """The power of two at the least ratio.

    >>> _nearest_power(90), _nearest_power(91), _nearest_power(500)
    (64, 128, 512)
    """
    return int(2 ** round(math.log2(batch)))


def _share(front: ParetoFront, whole: ParetoFront) -> float:
    """Hypervolume of a front in shares of another's, time on a log scale, over the other's slowest and worst member."""
    corner = _corner(whole)
    return _volume(front, corner) / (_volume(whole, corner) or 1.0)


def _corner(front: ParetoFront) -> tuple[float, float]:
    sign = -1.0 if front.direction == "maximize" else 1.0
    points = [(math.log(front.seconds(trial) or 1.0), sign * (trial.accuracy or 0.0)) for trial in front.trials]
    slowest, worst = (max(values) for values in zip(*points, strict=True))
    fastest, best = (min(values) for values in zip(*points, strict=True))
    # A tenth beyond, so that the ends count as well.
    return slowest + 0.1 * (slowest - fastest), worst + 0.1 * (worst - best)


def _volume(front: ParetoFront, corner: tuple[float, float]) -> float:
    sign = -1.0 if front.direction == "maximize" else 1.0
    volume, level = 0.0, corner[1]
    for trial in front.trials:  # fastest first, so worst first
        time, loss = math.log(front.seconds(trial) or 1.0), sign * (trial.accuracy or 0.0)
        if time < corner[0] and loss < level:
            volume += (corner[0] - time) * (level - loss)
            level = loss
    return volume
