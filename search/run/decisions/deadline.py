"""A study that ends with a trained model by a deadline: what the next training is for, and how long it may take.

Each time a device is free there are two things to do with it. A trial of the search teaches where the best settings lie; a
final training uses what is known by now, for as long as the time left allows. A trial is worth it while what it is expected to
add to the final training is more than the final training loses by the time that it takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...analysis.gaussian_process import Array
from ...suggest.outlook import Outlook
from .final import Final, Pace, final_of

# Trials of the search that are looked ahead at.
_AHEAD = (1, 2, 4, 8, 16, 32)
# What so many trials would find out is not all that there is to know: they measure with noise, and shorter trainings.
_LEARNED = 0.1
# What a training will reach is taken to be so many standard deviations below its mean.
_CAREFUL = 0.5


@dataclass(frozen=True)
class Decision:
    """What to do with a free device.

    Args:
        final: the best final training, which begins after the search; None where none fits.
        trials: of the search before it; 0: it begins now.
    """

    final: Final | None
    trials: int


def decide(outlook: Outlook, pace: Pace, sure: float) -> Decision:
    """Search on, or train."""
    floor = outlook.best_so_far
    best, row = _trained(outlook, floor, pace.fits(outlook, sure))
    ahead = 0
    for trials in _AHEAD:
        if trials * pace.trial_s >= pace.left_s:
            break
        fits = pace.fits(outlook, sure, trials * pace.trial_s)
        without, then = _trained(outlook, floor, fits)
        value = without + _LEARNED * (_searched(outlook, floor, fits, trials) - _searched(outlook, floor, fits, 0))
        if value > best:
            best, row, ahead = value, then, trials
    if row is None:
        return Decision(None, ahead)
    return Decision(final_of(outlook, row, pace), ahead)


def best_after(outlook: Outlook, pace: Pace, sure: float, later_s: float) -> Final | None:
    """The best training that there is time for once so many seconds are over, of any setting; None: none fits."""
    fits = pace.fits(outlook, sure, later_s) & ~outlook.done
    if not fits.any():
        return None
    return final_of(outlook, int(np.argmax(np.where(fits, _careful(outlook), -math.inf))), pace)


def _trained(outlook: Outlook, floor: Array, fits: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[float, int | None]:
    """What the best training of a tried setting that fits may be relied on to reach, and its row: no less with more time."""
    careful_floor = float(floor.mean() - _CAREFUL * floor.std())
    fits = fits & (outlook.tried >= 0) & ~outlook.done
    if not fits.any():
        return careful_floor, None
    careful = _careful(outlook)
    row = int(np.argmax(np.where(fits, careful, -math.inf)))
    return max(float(careful[row]), careful_floor), row


def _careful(outlook: Outlook) -> Array:
    """(n,), what each training may be relied on to reach."""
    return np.asarray(outlook.reached.mean(axis=0) - _CAREFUL * outlook.reached.std(axis=0))


def _searched(outlook: Outlook, floor: Array, fits: np.ndarray[Any, np.dtype[np.bool_]], trials: int) -> float:
    """The expected metric of the best training that fits, once so many more settings are known: chosen one by one for most."""
    if not fits.any():
        return float(floor.mean())
    reached = outlook.reached[:, fits]
    best = floor
    for _ in range(trials + 1):
        values = np.maximum(reached, best[:, None])
        row = int(np.argmax(values.mean(axis=0)))
        best = values[:, row]
    return float(best.mean())


__all__ = ["Decision", "best_after", "decide"]
