"""A study that ends when a model is good enough: which training is the cheapest way to its target, and when it is reached."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...suggest.outlook import Outlook
from .final import Pace

# Trainings that are looked ahead at; a target that none of them reaches is not expected to be reached.
_AHEAD = 64


@dataclass(frozen=True)
class Reach:
    """How a target is reached, as it looks now.

    Args:
        first: the row of the outlook to begin with; None where no training is expected to reach the target.
        first_chance: the probability that this training reaches it.
        chance: the probability that one of the next `_AHEAD` trainings does, in the time that is left.
        expected_s, earliest_s: seconds from now until it is reached, with half a chance and with one in ten; infinite where the
            chance is less.
    """

    first: int | None = None
    first_chance: float = 0.0
    chance: float = 0.0
    expected_s: float = math.inf
    earliest_s: float = math.inf


def reach(outlook: Outlook, target: float, pace: Pace, sure: float, trusted: float = 1.0) -> Reach:
    """How to reach a target in the least time: trainings in the order of their chances for each second.

    A training's chance is the share of the posterior's draws in which it reaches the target and none before it did. This order,
    the greedy one of a min-sum set cover, takes at most four times as long in the mean as the best one (Feige, Lovasz & Tetali
    2004, https://doi.org/10.1007/s00453-004-1110-5). Neither what a training that falls short would teach is counted, nor what
    running trials may reach.

    Args:
        target: higher is better.
        sure: the probability with which a training is to be done before the deadline, where there is one.
        trusted: of the trainings that the models expect to reach the target, the share that does.
    """
    takes_s, wait_s = np.asarray(pace.wall.expected_s(outlook.seconds)), pace.wait_s(outlook)
    fits = ~outlook.done if math.isinf(pace.left_s) else ~outlook.done & pace.fits(outlook, sure)
    reaches = (outlook.measured >= target) & fits & (np.random.default_rng(0).random(outlook.measured.shape) < trusted)
    short, now_s, first = np.ones(len(reaches), dtype=bool), 0.0, None
    times = np.full(len(reaches), math.inf)
    for _ in range(_AHEAD):
        worth = reaches[short].sum(axis=0) / (takes_s + wait_s)
        row = int(np.argmax(worth))
        if not worth[row]:
            break
        first = row if first is None else first
        # Trainings side by side share the devices.
        now_s += float(takes_s[row]) * min(outlook.devices[row] / len(pace.free_in_s), 1.0)
        times[short & reaches[:, row]] = max(now_s, float(takes_s[row] + wait_s[row]))
        short &= ~reaches[:, row]
    if first is None:
        return Reach()
    earliest_s, expected_s = np.quantile(times, (0.1, 0.5), method="higher").tolist()
    return Reach(
        first,
        float(reaches[:, first].mean()),
        float((np.isfinite(times) & (times <= pace.left_s)).mean()),
        expected_s,
        earliest_s,
    )


__all__ = ["Reach", "reach"]
