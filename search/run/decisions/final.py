"""A final training: one that is to be the study's model; and the pace of the trials, by which it is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...analysis.gaussian_process import Array
from ...suggest.outlook import Outlook
from .wall_time import WallTime


@dataclass(frozen=True)
class Pace:
    """How long trainings take, and how much time there is.

    Args:
        wall: seconds by the clock of what is known.
        left_s: until the deadline; infinite: there is none.
        trial_s: by the clock, between the ends of two trials of the search.
        free_in_s: seconds until each device is free, ascending; others are.
    """

    wall: WallTime
    left_s: float
    trial_s: float
    free_in_s: tuple[float, ...] = (0.0,)

    def wait_s(self, outlook: Outlook) -> Array:
        """(n,), seconds until as many devices are free as each of an outlook's trainings has."""
        return np.asarray(np.take(self.free_in_s, np.minimum(outlook.devices, len(self.free_in_s)) - 1))

    def fits(self, outlook: Outlook, sure: float, later_s: float = 0.0) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """(n,), which trainings are done in time with probability `sure`, if devices are asked for in so many seconds."""
        within_s = self.left_s - later_s - self.wait_s(outlook)
        return np.asarray(self.wall.probability(outlook.seconds, within_s) >= sure)


@dataclass(frozen=True)
class Final:
    """A training that is to be the study's model, or better than what is kept.

    Args:
        parameters: searched ones.
        tried: the trial whose setting it is.
        known_s: seconds of training.
        devices: that it trains on.
        wait_s: until its devices are free.
        gain: what it is expected to add to the best model there is, in units of the accuracy's spread.
        is_last: it is to be the study's model; otherwise it may be, and the search goes on.
        chance: the share of draws in which it reaches the study's target; None: none is aimed at.
        low, high: the 90 % interval of what it will measure, higher is better.
    """

    parameters: dict[str, Any]
    tried: int
    known_s: float
    devices: int
    wait_s: float
    gain: float
    is_last: bool
    chance: float | None
    low: float
    high: float

    def interval(self, sign: float, scores: Sequence[float]) -> tuple[float, float]:
        """Where the metric will lie nine times in ten, in its own direction.

        Args:
            sign: 1 where a higher metric is better, -1 where a lower one is.
            scores: the metrics of earlier trials. Where all are shares, none will be better than 1, or 0 where lower is better.
        """
        low, high = sorted((sign * self.low, sign * self.high))
        if scores and all(0 <= score <= 1 for score in scores):
            return (low, min(high, 1.0)) if sign > 0 else (max(low, 0.0), high)
        return low, high


def final_of(outlook: Outlook, row: int, pace: Pace, *, is_last: bool = True, chance: float | None = None) -> Final:
    """A row of an outlook as a final training."""
    floor = outlook.best_so_far
    gain = np.maximum(outlook.reached[:, row], floor).mean() - floor.mean()
    low, high = np.quantile(outlook.measured[:, row], (0.05, 0.95)).tolist()
    seconds, wait_s = float(outlook.seconds[row]), float(pace.wait_s(outlook)[row])
    parameters, tried = outlook.parameters(row), int(outlook.tried[row])
    devices = int(outlook.devices[row])
    return Final(parameters, tried, seconds, devices, wait_s, float(gain / outlook.unit), is_last, chance, low, high)


__all__ = ["Final", "Pace", "final_of"]
