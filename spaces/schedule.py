"""Learning-rate schedules as functions of the fraction of the trial's own budget.

They do not depend on the number of steps: trials of 40 and of 4,000 steps follow the same curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable

# Share of the peak rate after a share `done` of the training that follows warm-up, done in [0, 1].
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def rate_factor(schedule: str, warmup: float, fraction: float) -> float:
    """Share of the peak learning rate at a fraction of the samples budget.

    The training loop evaluates it at the middle of each step. For piecewise linear schedules the sum of
    rate x samples is then the same for every batch, and the first step never trains at rate zero.

    Args:
        warmup: share of the budget during which the rate rises linearly from 0, in [0, 1).

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
