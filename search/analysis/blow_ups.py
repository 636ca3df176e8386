"""Which trials blew up: they ended at a finite loss that is no result, as trainings do whose learning rate was too high.

Results near the best lie on a smooth surface of batch, rate and other settings; blow-ups lie anywhere below it. So the metric,
in units of the median's distance below the best, is a regression with two kinds of residuals:

    y = quadratic(ln batch, ln rate) + linear(others) + e,    e ~ (1 − s) Student-t₄(0, σ) + s Uniform(down to the worst)

Coefficients, σ and the share s are found by expectation and maximization, which starts from the better half of the trials.
Coefficients that are held small keep the surface from following blow-ups; a last look lets them be large, so that results on
a surface that merely falls steeply are not taken for blow-ups. A trial blew up if the second kind is the likelier one, and
a result of a lower rate for its batch is better that took no more samples, steps, parameters, devices or time. Without such a
witness, it may have learned little because its rate was low or its training short, which is a result. So what is told apart
is on no front anyway.

Source: Aitkin & Wilson 1980, "Mixture models, outliers, and the EM algorithm", doi 10.1080/00401706.1980.10486163.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...spaces.record import TrialFacts, TrialRecord
from .coordinates import other_coordinates

if TYPE_CHECKING:
    from .gaussian_process import Array  # which imports SciPy; every command that opens a study comes by here

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]

# With fewer results, none is told apart.
FEWEST = 12
# How far down the metric is looked at, in units of the median's distance below the best.
_DEEPEST = 30.0
# The prior: blow-ups and results seen beforehand, σ and as how many trials it counts.
_SEEN, _SIGMA, _COUNTS = (0.5, 6.0), 0.3, 4.0
# Standard deviation of the coefficients in the rounds of the fit, and in the last look.
_COEFFICIENT, _ROUNDS, _LOOSE = 0.5, 25, 16.0
# What makes the density of Student's t with 4 degrees of freedom, (1 + x²/4)^(-5/2), integrate to 1.
_STUDENT = 3 / 8
# How best rates move with the batch, as far as is known without a study.
_SLOPE = 0.5


def told_apart(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """The trials, those that blew up as diverged ones, with `blew_up` and a message; the same again for what it returned."""
    records = tuple(records)
    # A setting that was trained again stands with the mean of its runs.
    again = {
        number for record in records if record.is_repeat for number in (record.number, record.facts.repeats)
    }
    results = [
        place for place, record in enumerate(records) if _is_result(record) and record.number not in again
    ]
    blew = blown_up([records[place] for place in results])
    if not blew.any():
        return records
    better = "below" if records[0].direction == "minimize" else "above"
    values = [records[place].accuracy or 0.0 for place, gone in zip(results, blew, strict=True) if not gone]
    message = f"blew up: half of the other trials ended {better} {float(np.median(values)):.4g}, and a lower rate did better"
    found = list(records)
    for place in np.array(results)[blew]:
        facts = found[place].facts | TrialFacts(message=message, blew_up=True)
        found[place] = replace(found[place], outcome="diverged", facts=facts, message=message)
    return tuple(found)


def blown_up(results: Sequence[TrialRecord]) -> Mask:
    """Which of these complete trials blew up, (trials,).

    Args:
        results: with a metric, an effective batch and a learning rate.
    """
    blew: Mask = np.zeros(len(results), dtype=bool)
    if len(results) < FEWEST:
        return blew
    values = np.array([record.score for record in results], dtype=np.float64)
    settings = [(record.facts.effective_batch or 1, record.facts.learning_rate or 1.0) for record in results]
    batches, rates = np.log(settings).T
    relative = rates - _SLOPE * batches  # of the rates, to what suits the batch
    below = values.max() - values
    unit = float(np.median(below))
    if unit <= 0 or np.ptp(relative) <= 0:
        return blew
    heights = -np.minimum(below / unit, _DEEPEST)
    sizes = np.log(
        [(record.facts.samples_budget or 1, record.facts.model_parameters or 1) for record in results]
    )
    varying = [_scaled(column) for column in sizes.T if np.ptp(column) > 0]
    others = np.column_stack([other_coordinates(results, without={"epochs"}), *varying])
    down = _shares(_terms(batches, relative, others), heights) < 0.5
    taken = [
        (record.facts.devices or 1, math.nan if record.train_s is None else record.train_s)
        for record in results
    ]
    costs = np.column_stack([sizes, sizes[:, 0] - batches, np.array(taken, dtype=np.float64)])
    for place in np.flatnonzero(down):
        better = ~down & (values > values[place]) & (relative < relative[place])
        # A time that is unknown says nothing.
        blew[place] = (better & ~(costs > costs[place]).any(axis=1)).any()
    return blew


def _is_result(record: TrialRecord) -> bool:
    known = record.facts.effective_batch and record.facts.learning_rate
    ended = record.outcome == "complete" or record.facts.blew_up
    return bool(ended and known and record.accuracy is not None and math.isfinite(record.accuracy))


def _terms(batches: Array, rates: Array, others: Array) -> Array:
    """What the metric is a linear function of, each from -1 to 1: (trials, terms)."""
    u, v = (2 * _scaled(axis) - 1 for axis in (batches, rates))
    return np.column_stack([np.ones_like(u), u, v, u * u, v * v, u * v, 2 * others - 1])


def _scaled(values: Array) -> Array:
    """Values as shares of their range."""
    return np.asarray((values - values.min()) / (np.ptp(values) or 1.0))


def _shares(terms: Array, heights: Array) -> Array:
    """The probability of each trial to be a result, (trials,)."""
    count = len(heights)
    share = np.zeros(count)
    share[np.argsort(-heights, kind="stable")[: math.ceil(count / 2)]] = 1.0
    variance, blown = _SIGMA**2, _SEEN[0] / sum(_SEEN)
    for _ in range(_ROUNDS):
        share, variance = _looked_at(terms, heights, share, _COEFFICIENT, variance, blown)
        blown = (_SEEN[0] + float((1 - share).sum())) / (sum(_SEEN) + count)
    # What is doubtful shapes that surface little.
    return np.maximum(share, _looked_at(terms, heights, share**1.5, _LOOSE, _SIGMA**2, blown)[0])


def _looked_at(
    terms: Array, heights: Array, weights: Array, coefficient: float, variance: float, blown: float
) -> tuple[Array, float]:
    """The probability of each trial to be a result, by a surface fitted with these weights; and the variance about it."""
    prior = np.diag([1e-6] + [coefficient**-2] * (terms.shape[1] - 1))
    precision = terms.T @ (terms * weights[:, None]) / variance + prior
    residuals = heights - terms @ np.linalg.solve(precision, terms.T @ (weights * heights) / variance)
    unsure = np.einsum("ij,ij->i", terms, np.linalg.solve(precision, terms.T).T)
    variance = (_COUNTS * _SIGMA**2 + float(weights @ (residuals**2 + unsure))) / (
        _COUNTS + float(weights.sum())
    )
    spread = np.sqrt(variance + unsure)
    as_result = (1 - blown) * _STUDENT * (1 + (residuals / spread) ** 2 / 4) ** -2.5 / spread
    as_blow_up = np.where(residuals < 0, blown / (np.ptp(heights) + 1.0), 0.0)
    return as_result / (as_result + as_blow_up), variance
