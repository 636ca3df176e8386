"""Learning-rate schedules as functions of the fraction of the trial's own budget.

They do not depend on the number of steps: trials of 40 and of 4,000 steps follow the same curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

BATCH_SCHEDULES = ("constant", "seesaw")
# Those whose rate, at first, is that of a shorter training.
BRANCHING = ("constant", "wsd")

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
        share = float(schedule(fraction))
        return share * (fraction / warmup) if fraction < warmup else share
    if fraction < warmup:
        return fraction / warmup
    return SCHEDULES[schedule]((fraction - warmup) / (1.0 - warmup))


# How often the batch doubles while the rate falls, at most: after that the last eighth of the rate falls off.
_DOUBLINGS = 3


@cache
def batch_stages(batch_schedule: str, schedule: str, warmup: float) -> tuple[tuple[float, int], ...]:
    """Where a training's batch grows: fractions of the budget, and the factor over the first batch from there on.

    `seesaw` doubles the batch each time that the schedule has halved the rate (Meterez et al. 2025, arXiv 2510.14717).

    >>> batch_stages("seesaw", "linear", 0.0)
    ((0.5, 2), (0.75, 4), (0.875, 8))
    """
    if batch_schedule == "constant":
        return ()
    factors = [2**doubling for doubling in range(1, _DOUBLINGS + 1)]
    return tuple((warmup + (1 - warmup) * _done_at(SCHEDULES[schedule], 1 / factor), factor) for factor in factors)


def _done_at(schedule: Callable[[float], float], share: float) -> float:
    """Where a falling schedule reaches a share of the peak rate."""
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if schedule(middle) > share else (low, middle)
    return round(high, 9)


def halved(epochs: Any, low: float, step: float | None) -> Any:
    """Half the epochs, or the most that a range has of at most half; below `low` where it has none. Also of arrays.

    Args:
        low, step: of the range; a step of None is a continuous one.

    >>> halved(16, 2, 1), halved(5, 2, 1), halved(5.0, 2.0, None)
    (8.0, 2.0, 2.5)
    """
    return epochs / 2 if step is None else low + step * (((epochs / 2 - low) / step + 1e-9) // 1)


def evaluation_points(samples_budget: int, evaluations: int) -> tuple[int, ...]:
    """Samples seen at which to evaluate: equal fractions of the budget, the last at its end.

    >>> evaluation_points(100, 4), evaluation_points(2, 4)
    ((25, 50, 75, 100), (1, 2))
    """
    points = {max(1, round(samples_budget * part / evaluations)) for part in range(1, evaluations + 1)}
    return tuple(sorted(points))
