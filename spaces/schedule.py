"""How the learning rate moves during one training, in fractions of the trial's own budget.

Steps never appear here: a trial of 40 steps and one of 4,000 walk the same curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable

# What is left of the peak rate after `done` of the time past warm-up, done in [0, 1].
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def rate_factor(schedule: str, warmup: float, fraction: float) -> float:
    """Share of the peak learning rate at a fraction of the samples budget.

    The training loop asks at each step's middle. For straight pieces the sum of rate x samples is then
    the same whatever the batch, and the first step never trains at rate zero.

    Args:
        warmup: share of the budget spent rising in a straight line from 0, in [0, 1).

    >>> [round(rate_factor("cosine", 0.1, fraction), 9) for fraction in (0.05, 0.1, 0.55, 1.0)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if fraction < warmup:
        return fraction / warmup
    return SCHEDULES[schedule]((fraction - warmup) / (1.0 - warmup))


def evaluation_points(samples_budget: int, evaluations: int) -> tuple[int, ...]:
    """Samples seen at which to evaluate: equal fractions of the budget, the last at its end.

    >>> evaluation_points(100, 4), evaluation_points(2, 4)
    ((25, 50, 75, 100), (1, 2))
    """
    points = {max(1, round(samples_budget * part / evaluations)) for part in range(1, evaluations + 1)}
    return tuple(sorted(points))
