"""The Pareto front of a study's trials.

A trial dominates another if it is at least as good in all objectives and better in one. Trials with
equal values do not dominate each other, so both stay. Infeasible, diverged and stopped trials are never on the front.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ...spaces.front import ParetoFront
from ...spaces.record import TrialRecord
from ...spaces.study.goals import Direction, Objectives, Speed
from .confirm import averaged


def front_members(points: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the points that no other beats, fastest first; what training takes and loss, all lower is better.

    Args:
        points: (trials, 2 or more).

    >>> front_members([(3.0, 0.1), (1.0, 0.5), (2.0, 0.5), (1.0, 0.5)])
    [1, 3, 0]
    >>> front_members([(1.0, 5.0, 0.5), (2.0, 2.0, 0.5), (3.0, 2.0, 0.5), (3.0, 1.0, 0.6)])
    [0, 1, 3]
    """
    order = sorted(range(len(points)), key=lambda index: (*points[index], index))
    if any(len(point) > 2 for point in points):
        found: list[int] = []
        for index in order:  # nothing beats a point that comes before it
            if not any(beats(points[other], points[index]) for other in found):
                found.append(index)
        return found
    members: list[int] = []
    best = math.inf
    for index in order:
        # A point equal to the last member stays; any other must be better than all faster ones.
        if points[index][1] < best or (members and points[index] == points[members[-1]]):
            members.append(index)
            best = points[index][1]
    return members


def beats(point: Sequence[float], other: Sequence[float]) -> bool:
    """Whether a point is at least as low as another everywhere, and lower somewhere."""
    return all(a <= b for a, b in zip(point, other, strict=True)) and tuple(point) != tuple(other)


def study_front(records: Iterable[TrialRecord], objectives: Objectives) -> ParetoFront:
    """The front of trials in a study's own objectives; a setting that was trained several times counts with its mean.

    What does not reach the study's `at_least` or `at_most` is left out, unless nothing does.
    """
    metric, settings = objectives.metric, averaged(records, objectives)
    reaching = [one for one in settings if one.score is not None and one.score >= metric.least_score]
    return front_of(reaching or settings, metric.name, metric.direction, objectives.speed, objectives.second_speed)


def front_of(
    records: Iterable[TrialRecord],
    metric: str = "accuracy",
    direction: Direction = "maximize",
    speed: Speed = "train_s",
    second_speed: Speed | None = None,
) -> ParetoFront:
    """The front of a study's trials, whose metric has this name and direction."""
    finished = [record for record in records if record.outcome == "complete"]
    assert all(record.direction == direction for record in finished)
    points = []
    for record in finished:
        taken = record.taken(speed), *(() if second_speed is None else (record.taken(second_speed),))
        assert record.score is not None
        points.append((*(value for value in taken if value is not None), -record.score))
        assert len(points[-1]) == len(taken) + 1
    members = front_members(points)
    return ParetoFront(
        trials=tuple(finished[index] for index in members),
        metric=metric,
        direction=direction,
        speed=speed,
        second_speed=second_speed,
    )
