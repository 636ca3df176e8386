"""Fit the step-time law to timed steps by non-negative least squares, with its interval and misfit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import numpy as np
from scipy.optimize import nnls

from ...spaces.laws.step_time import LOW_QUANTILE, StepTime, TimedPlan
from ...spaces.plan import BatchPlan

# Bootstrap resamples of the rounds for the interval; more do not change its first digit.
_RESAMPLES = 200

# Minimum number of rounds to resample.
FEWEST_ROUNDS = 4


# Times may fall as the micro-batch grows where a fit that rises is off by this share, and one that may fall by half of that.
_FALLS = 0.03


def fit_step_time(timed: Sequence[TimedPlan]) -> StepTime:
    """Fit by relative least squares, with non-negative seconds; they fall only where no rising fit comes near the timings.

    >>> law = StepTime(((8, 0.1), (100, 0.5), (400, 3.5)), update_s=0.05)
    >>> plans = [BatchPlan(8), BatchPlan(100), BatchPlan(400), BatchPlan(16, accumulation=2), BatchPlan(200, accumulation=2)]
    >>> fit = fit_step_time([TimedPlan(plan, (law.step_s(plan),)) for plan in plans])
    >>> [(size, round(seconds, 6)) for size, seconds in fit.points], round(fit.update_s, 6)
    ([(8, 0.1), (100, 0.5), (400, 3.5)], 0.05)
    """
    sizes = _sizes(timed)
    terms, seconds = _matrix(timed, sizes), np.array([entry.step_s for entry in timed])
    rising = _solved(terms, seconds)
    update_s, pair_s, first_s, *slopes = (float(value) for value in rising)
    values = [first_s]
    for (low, high), slope in zip(pairwise(sizes), slopes, strict=True):
        values.append(values[-1] + slope * (high - low))
    off = _worst(terms @ rising, seconds)
    if off > _FALLS:
        free_terms = terms @ _from_values(sizes)
        free = _solved(free_terms, seconds)
        if _worst(free_terms @ free, seconds) < off / 2:
            update_s, pair_s, *values = (float(value) for value in free)
    points = tuple(zip(sizes, values, strict=True))
    plan = timed[0].plan
    return StepTime(
        points,
        update_s,
        devices=plan.devices,
        timed=tuple(timed),
        activation_checkpointing=plan.activation_checkpointing,
        pair_s=pair_s,
    )


def _worst(predicted: np.ndarray, seconds: np.ndarray) -> float:
    return float(np.abs(predicted / seconds - 1).max())


def _from_values(sizes: Sequence[int]) -> np.ndarray:
    """Turns (seconds of a step, of a pair, at each knot) into (those of a step, of a pair, at the first knot, slopes)."""
    matrix = np.zeros((len(sizes) + 2, len(sizes) + 2))
    matrix[0, 0] = matrix[1, 1] = matrix[2, 2] = 1.0
    for row, (low, high) in enumerate(pairwise(sizes), start=3):
        matrix[row, row - 1], matrix[row, row] = -1 / (high - low), 1 / (high - low)
    return matrix


def _sizes(timed: Iterable[TimedPlan]) -> list[int]:
    """The micro-batches timed without accumulation, or in the fewest of them, which are the law's knots."""
    timed = list(timed)
    return sorted(
        {entry.plan.largest_micro_batch for entry in timed if entry.plan.accumulation == _fewest(timed)}
    )


def _fewest(timed: Iterable[TimedPlan]) -> int:
    """The fewest micro-batches of a step: one, or two where embeddings are cached."""
    return min(entry.plan.accumulation for entry in timed)


def _matrix(timed: Sequence[TimedPlan], sizes: Sequence[int]) -> np.ndarray:
    """The design matrix of a rising law, (plans, 3 + gaps between knots)."""
    cached = _fewest(timed) > 1
    return np.array([_terms(entry.plan, sizes, cached=cached) for entry in timed])


def _terms(plan: BatchPlan, sizes: Sequence[int], *, cached: bool) -> list[float]:
    """A plan's row of the design matrix: one step, the pairs of its samples where its embeddings are cached, its micro-batches,
    and their samples between successive knots.
    """
    micro_batches = [size for size in plan.micro_batches() if size]
    between = [
        sum(min(max(size - low, 0), high - low) for size in micro_batches) for low, high in pairwise(sizes)
    ]
    return [1.0, plan.effective_batch**2 if cached else 0.0, len(micro_batches), *between]


def _solved(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Seconds per unit of each term, >= 0. Columns are rescaled first: samples run into thousands, steps are ones."""
    weighted = terms / seconds[:, None]
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(weighted / scale, np.ones(len(seconds)))
    return np.asarray(solution / scale)


def with_uncertainty(law: StepTime) -> StepTime:
    """The law with its interval (bootstrap over rounds) and its misfit (leave-one-out over timed plans)."""
    return replace(law, interval=_interval(law.timed), misfit=_misfit(law.timed))


def _interval(timed: Sequence[TimedPlan]) -> float | None:
    """Bootstrap over whole rounds, because the plans of a round are timed under the same load."""
    seconds = np.array([entry.rounds for entry in timed])  # (plans, rounds)
    if seconds.shape[1] < FEWEST_ROUNDS:
        return None
    terms = _matrix(timed, _sizes(timed))
    rng = np.random.default_rng(0)
    predictions = []
    for _ in range(_RESAMPLES):
        drawn = rng.integers(seconds.shape[1], size=seconds.shape[1])
        predictions.append(terms @ _solved(terms, np.quantile(seconds[:, drawn], LOW_QUANTILE, axis=1)))
    low, middle, high = np.percentile(np.array(predictions), [2.5, 50, 97.5], axis=0)
    return float(((high - low) / 2 / middle).max())


def _misfit(timed: Sequence[TimedPlan]) -> tuple[float, float] | None:
    errors = list(leave_one_out(timed).values())
    return (median(errors), max(errors)) if errors else None


def leave_one_out(timed: Sequence[TimedPlan]) -> dict[BatchPlan, float]:
    """Relative error of the law on each plan when fitted without it.

    Plans at the ends of the range stay in, as predicting them would extrapolate.
    """
    sizes, fewest = _sizes(timed), _fewest(timed)
    errors = {}
    for left_out in timed:
        if left_out.plan.accumulation == fewest and left_out.plan.largest_micro_batch in (
            sizes[0],
            sizes[-1],
        ):
            continue
        law = fit_step_time([entry for entry in timed if entry is not left_out])
        errors[left_out.plan] = abs(law.seconds_of(left_out.plan) / left_out.step_s - 1)
    return errors
