"""The Pareto front of a study's trials, its knee, and how it compares with a setting.

A trial dominates another if it is at least as good in both objectives and better in one. Trials with
equal values do not dominate each other, so both stay. Infeasible, diverged and stopped trials are never on the front.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from ...spaces.study import Objectives, Speed
from ...spaces.trial import ParetoFront, TrialRecord
from .confirm import averaged

Direction = Literal["minimize", "maximize"]


def front_members(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats, fastest first; time and loss, both lower is better.

    Args:
        points: (trials, 2).

    >>> front_members([(3.0, 0.1), (1.0, 0.5), (2.0, 0.5), (1.0, 0.5)])
    [1, 3, 0]
    """
    order = sorted(range(len(points)), key=lambda index: (points[index], index))
    members: list[int] = []
    best = math.inf
    for index in order:
        # A point equal to the last member stays; any other must be better than all faster ones.
        if points[index][1] < best or (members and points[index] == points[members[-1]]):
            members.append(index)
            best = points[index][1]
    return members


def knee(points: Sequence[tuple[float, float]]) -> int | None:
    """Index of the front's knee: farthest from the straight line between its ends, time on a log scale.

    Args:
        points: (members, 2), fastest first; time > 0 and loss, lower is better.

    Returns:
        None for fewer than three members, which have nothing between their ends.

    >>> knee([(1.0, 0.9), (2.0, 0.2), (100.0, 0.1)])
    1
    """
    if len(points) < 3:
        return None
    times = [math.log(max(time, 1e-12)) for time, _ in points]
    losses = [loss for _, loss in points]
    width, height = times[-1] - times[0], losses[0] - losses[-1]
    if width <= 0 or height <= 0:
        return None
    below = [1 - (time - times[0]) / width - (loss - losses[-1]) / height for time, loss in zip(times, losses, strict=True)]
    return max(range(1, len(points) - 1), key=lambda index: below[index])


def study_front(records: Iterable[TrialRecord], objectives: Objectives) -> ParetoFront:
    """The front of trials in a study's own objectives; a setting that was trained several times counts with its mean."""
    metric = objectives.metric
    return front_of(averaged(records, objectives), metric.name, metric.direction, objectives.speed)


def front_of(
    records: Iterable[TrialRecord],
    metric: str = "accuracy",
    direction: Direction = "maximize",
    speed: Speed = "train_s",
) -> ParetoFront:
    """The front of a study's trials; its knee is named by trial number."""
    sign = -1.0 if direction == "maximize" else 1.0
    finished = [record for record in records if record.outcome == "complete"]
    points = []
    for record in finished:
        seconds = record.taken(speed)
        assert seconds is not None and record.accuracy is not None
        points.append((seconds, sign * record.accuracy))
    members = front_members(points)
    bend = knee([points[index] for index in members])
    return ParetoFront(
        trials=tuple(finished[index] for index in members),
        metric=metric,
        direction=direction,
        speed=speed,
        knee=None if bend is None else finished[members[bend]].number,
    )


def no_worse(front: ParetoFront, setting: TrialRecord) -> TrialRecord | None:
    """The fastest member that is at least as accurate as a setting; None where the setting has no result."""
    if setting.train_s is None or setting.accuracy is None:
        return None
    sign = 1.0 if front.direction == "maximize" else -1.0
    return next(
        (trial for trial in front.trials if trial.accuracy is not None and sign * trial.accuracy >= sign * setting.accuracy),
        None,
    )


def no_slower(front: ParetoFront, setting: TrialRecord) -> TrialRecord | None:
    """The most accurate member that is at least as fast as a setting."""
    limit_s = front.taken(setting)
    if limit_s is None:
        return None
    within = [trial for trial in front.trials if (trial_s := front.taken(trial)) is not None and trial_s <= limit_s]
    return within[-1] if within else None
