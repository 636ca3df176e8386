"""The Pareto front of a study's trials.

A trial dominates another if it is at least as good in all objectives and better in one. Trials with
equal values do not dominate each other, so both stay. Infeasible, diverged and stopped trials are never on the front.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from ...spaces.front import ParetoFront
from ...spaces.record import TrialRecord
from ...spaces.study.goals import Direction, Objectives, Speed
from .confirm import averaged


class Staircase:
    """Of points (y, z) added so far, the lowest z at a y of at most so much; a step is kept only where it goes down."""

    def __init__(self) -> None:
        self._ys: list[float] = []
        self._zs: list[float] = []

    def lowest(self, y: float) -> float:
        """Infinite where no point has a y of at most this."""
        place = bisect_right(self._ys, y)
        return self._zs[place - 1] if place else math.inf

    def add(self, y: float, z: float) -> None:
        if self.lowest(y) <= z:
            return
        begin = end = bisect_left(self._ys, y)
        while end < len(self._zs) and self._zs[end] >= z:
            end += 1
        self._ys[begin:end], self._zs[begin:end] = [y], [z]


def front_members(points: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the points that no other beats, fastest first; what training takes and loss, all lower is better.

    Args:
        points: (trials, 2 or 3).

    >>> front_members([(3.0, 0.1), (1.0, 0.5), (2.0, 0.5), (1.0, 0.5)])
    [1, 3, 0]
    >>> front_members([(1.0, 5.0, 0.5), (2.0, 2.0, 0.5), (3.0, 2.0, 0.5), (3.0, 1.0, 0.6)])
    [0, 1, 3]
    """
    stairs, members = Staircase(), list[int]()
    for index in sorted(range(len(points)), key=lambda index: (*points[index], index)):
        point = points[index]
        second, loss = point[1] if len(point) > 2 else 0.0, point[-1]
        # Whatever beats a point comes before it; its equals come right before it.
        if stairs.lowest(second) > loss or (members and tuple(points[members[-1]]) == tuple(point)):
            members.append(index)
            stairs.add(second, loss)
    return members


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
