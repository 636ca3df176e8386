"""Learning-rate schedules as functions of the fraction of the trial's own budget.

They do not depend on the number of steps: trials of 40 and of 4,000 steps follow the same curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .boundary.given import number_of

# The share of the training after warm-up over which `wsd` (warm-up, stable, decay) falls to 0: with a fifth it ends about as
# well as cosine (Hägele et al. 2024, arXiv 2405.18392), and a little lower in our tables (docs/log.md).
DECAY = 0.2

# Share of the peak rate after a share `done` of the training that follows warm-up, done in [0, 1].
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "wsd": lambda done: min(1.0, (1.0 - done) / DECAY),
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


# A schedule by name, or a user's own function of the fraction of the budget, which the worker has loaded.
Schedule = str | Callable[[float], float]


def is_own(schedule: str) -> bool:
    """Whether a schedule is a user's own function, named by `module:function` or `path/file.py:function`."""
    return schedule not in SCHEDULES


def rate_factor(schedule: Schedule, warmup: float, fraction: float) -> float:
    """Share of the peak learning rate at a fraction of the samples budget.

    The training loop evaluates it at the middle of each step. For piecewise linear schedules the sum of
    rate x samples is then the same for every batch, and the first step never trains at rate zero.

    Args:
        schedule: of the name, a function of what follows warm-up; a function of one's own is of the whole budget.
        warmup: share of the budget during which the rate rises linearly from 0, in [0, 1).

    >>> [round(rate_factor("cosine", 0.1, fraction), 9) for fraction in (0.05, 0.1, 0.55, 1.0)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if callable(schedule):
        share = number_of("training.schedule", schedule(fraction))
        return share * (fraction / warmup) if fraction < warmup else share
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


def next_point(points: Sequence[int], seen: int) -> int:
    """The first of the points after so many samples; the last where there is none."""
    return next((point for point in points if point > seen), points[-1])
