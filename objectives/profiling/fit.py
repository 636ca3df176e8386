"""Fitting the step-time law to whole steps that were timed: non-negative least squares, with its interval and misfit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import numpy as np
from scipy.optimize import nnls

from ...spaces.plan import BatchPlan
from ...spaces.step_time import StepTime, TimedPlan

# Bootstrap resamples of the rounds for an interval; more do not change its first digit.
_RESAMPLES = 200

# Fewer rounds are too few to resample.
_FEWEST_ROUNDS = 4


def fit_step_time(timed: Sequence[TimedPlan]) -> StepTime:
    """Relative least squares, with no negative seconds and no micro-batch faster than a smaller one.

    >>> law = StepTime(((8, 0.1), (100, 0.5), (400, 3.5)), update_s=0.05)
    >>> plans = [BatchPlan(8), BatchPlan(100), BatchPlan(400), BatchPlan(16, accumulation=2), BatchPlan(200, accumulation=2)]
    >>> fit = fit_step_time([TimedPlan(plan, (law.step_s(plan),)) for plan in plans])
    >>> [(size, round(pass_s, 6)) for size, pass_s in fit.points], round(fit.update_s, 6)
    ([(8, 0.1), (100, 0.5), (400, 3.5)], 0.05)
    """
    sizes = _sizes(timed)
    terms = np.array([_terms(one.plan, sizes) for one in timed])
    update_s, first_s, *slopes = (float(value) for value in _solved(terms, np.array([one.step_s for one in timed])))
    points = [(sizes[0], first_s)]
    for size, slope in zip(sizes[1:], slopes, strict=True):
        points.append((size, points[-1][1] + slope * (size - points[-1][0])))
    return StepTime(tuple(points), update_s, devices=timed[0].plan.devices, timed=tuple(timed))


def _sizes(timed: Iterable[TimedPlan]) -> list[int]:
    """The micro-batches timed without accumulation: the law's knots."""
    timed = list(timed)
    return sorted({one.plan.largest_micro_batch for one in timed if one.plan.accumulation == 1})


def _terms(plan: BatchPlan, sizes: Sequence[int]) -> list[float]:
    """A plan's row of the design matrix: one step, its micro-batches, and their samples between each two knots."""
    micro_batches = [size for size in plan.micro_batches() if size]
    between = [sum(min(max(size - low, 0), high - low) for size in micro_batches) for low, high in pairwise(sizes)]
    return [1.0, len(micro_batches), *between]


def _solved(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Seconds of each term, >= 0; columns are scaled alike, since samples count in thousands and steps in ones."""
    weighed = terms / seconds[:, None]
    scale = np.abs(weighed).max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(weighed / scale, np.ones(len(seconds)))
    return np.asarray(solution / scale)


def with_trust(law: StepTime, seed: int = 0) -> StepTime:
    """The law with its interval (rounds resampled) and its misfit (each timed plan predicted from the others)."""
    return replace(law, interval=_interval(law.timed, seed), misfit=_misfit(law.timed))


def _interval(timed: Sequence[TimedPlan], seed: int) -> float | None:
    """Bootstrap over whole rounds: plans of one round were timed under the same load."""
    seconds = np.array([one.rounds for one in timed])  # (plans, rounds)
    if seconds.shape[1] < _FEWEST_ROUNDS:
        return None
    sizes = _sizes(timed)
    terms = np.array([_terms(one.plan, sizes) for one in timed])
    rng = np.random.default_rng(seed)
    predictions = []
    for _ in range(_RESAMPLES):
        drawn = rng.integers(seconds.shape[1], size=seconds.shape[1])
        predictions.append(terms @ _solved(terms, np.median(seconds[:, drawn], axis=1)))
    low, middle, high = np.percentile(np.array(predictions), [2.5, 50, 97.5], axis=0)
    return float(((high - low) / 2 / middle).max())


def _misfit(timed: Sequence[TimedPlan]) -> tuple[float, float] | None:
    """Leave-one-out error; plans at the ends of the range are not left out, since predicting them would extrapolate."""
    sizes = _sizes(timed)
    errors = []
    for left_out in timed:
        if left_out.plan.accumulation == 1 and left_out.plan.largest_micro_batch in (sizes[0], sizes[-1]):
            continue
        law = fit_step_time([one for one in timed if one is not left_out])
        errors.append(abs(law._seconds(left_out.plan) / left_out.step_s - 1))
    return (median(errors), max(errors)) if errors else None
