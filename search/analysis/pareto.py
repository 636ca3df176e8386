"""The Pareto front of a study's trials.

A trial dominates another if it is at least as good in all objectives and better in one. Trials with
equal values do not dominate each other, so both stay. Infeasible, diverged and stopped trials are never on the front.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ...spaces.front import ParetoFront
from ...spaces.names import Direction
from ...spaces.record import TrialRecord
from ...spaces.study.goals import Metric, Objectives, Speed
from .confirm import averaged


def front_members(points: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the points that no other beats, fastest first; what training takes and loss, both lower is better.

    Args:
        points: (trials, 2).

    >>> front_members([(3.0, 0.1), (1.0, 0.5), (2.0, 0.5), (1.0, 0.5)])
    [1, 3, 0]
    """
    lowest, members = math.inf, list[int]()
    for index in sorted(range(len(points)), key=lambda index: (*points[index], index)):
        # Whatever beats a point comes before it; its equals come right before it.
        if points[index][1] < lowest or (members and tuple(points[members[-1]]) == tuple(points[index])):
            members.append(index)
            lowest = points[index][1]
    return members


def study_front(records: Iterable[TrialRecord], objectives: Objectives) -> ParetoFront:
    """The front of trials in a study's own objectives; a setting that was trained several times counts with its mean.

    What does not reach the study's `floor` is left out, unless nothing does. So is what is much worse than an
    untrained model, whose metric is known by a few samples only: by more than its own size, and than the best is better.
    """
    metric, settings = objectives.metric, averaged(records, objectives)
    scored = [(setting, setting.score) for setting in settings if setting.score is not None]
    best = max((score for setting, score in scored if setting.outcome == "complete"), default=0.0)
    reaching = [
        setting
        for setting, score in scored
        if score >= max(metric.least_score, _least(setting, metric, best))
    ]
    return front_of(reaching or settings, metric.name, metric.direction, objectives.speed)


def _least(setting: TrialRecord, metric: Metric, best: float) -> float:
    untrained = setting.facts.extra.get("untrained")
    if not isinstance(untrained, int | float):
        return -math.inf
    score = metric.score(untrained)
    return score - max(best - score, abs(score))


def front_of(
    records: Iterable[TrialRecord],
    metric: str = "accuracy",
    direction: Direction = "maximize",
    speed: Speed = "train_s",
) -> ParetoFront:
    """The front of a study's trials, whose metric has this name and direction."""
    finished = [record for record in records if record.outcome == "complete"]
    assert all(record.direction == direction for record in finished)
    points = []
    for record in finished:
        taken = record.taken(speed)
        assert taken is not None and record.score is not None
        points.append((taken, -record.score))
    members = tuple(finished[index] for index in front_members(points))
    return ParetoFront(members, metric, direction, speed)
