"""The best learning rate at each batch, and the scaling rules that a study's trials support.

The model (docs/decisions/0009-the-ridge-of-rates.md) has Gaussian processes g and h and an exponent p:

    accuracy = g(log batch, other parameters) + h(log rate − p · log batch) + noise

The maximum of h is the ridge of best rates, and p its slope. The model uses the rate that the optimizer got, not the reference
rate, so it is the same whatever rule proposed the trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.linalg import cho_solve
from scipy.optimize import minimize

from ...spaces.errors import Fault, StudyFileError
from ...spaces.record import TrialRecord
from ..analysis.blow_ups import told_apart
from ..analysis.cliff import Cliff
from ..analysis.coordinates import other_coordinates
from ..analysis.gaussian_process import Array, matern52, matern52_derivative, single_threaded_blas
from ..analysis.rates import BestRates, Estimate, RateAt, StoredRates
from ..store.stored import StoredStudy

# The fewest complete trials that can distinguish the rules, and the fewest of them that must have learned.
FEWEST, _FEWEST_LEARNED = 20, 12
# The most trials in a fit: of more, an even selection.
_MOST = 150
# Exponents considered; an interval that reaches an end means only "at least" or "at most".
_LEAST_EXPONENT, _MOST_EXPONENT = -1.0, 2.0
# Where the posterior of p is evaluated, in standard deviations from its mode: dense in the bulk, far enough for skewed ones.
_OFFSETS = np.array(
    [-9.0, -6.0, -4.0, -2.8, -2.0, -1.4, -0.9, -0.4, 0.0, 0.4, 0.9, 1.4, 2.0, 2.8, 4.0, 6.0, 9.0]
)
_DRAWS, _GRID, _GROUPS = 400, 80, 8
_JITTER = 1e-8
# The largest chance to fail at a rate that is called the best.
_RISK = 0.1


def rates_of(study: StoredStudy, asked: Sequence[int] = ()) -> BestRates:
    """The best rate at each batch, at a few of the front's and at those asked for: as stored where that is current.

    Args:
        asked: effective batches; with any, the rates are fitted now, which takes seconds.

    Raises:
        StudyFileError: the study searches no batch or no rate, a batch asked for lies beyond those tried, or as `best_rates`.
    """
    stored = None if asked else study.current_rates()
    if stored is not None and stored.rates is not None:
        return stored.rates
    spec, front = study.spec, study.front
    searched, faults = spec.searched(), []
    if "effective_batch" not in searched:
        got = spec.fixed()["effective_batch"]
        faults.append(
            Fault("space.effective_batch", f"expected several batches to compare rates at, got {got} alone")
        )
    if not {"reference_rate", "rule", "exponent"} & set(searched):
        got = spec.space.reference_rate.low
        faults.append(Fault("space.reference_rate", f"expected several rates to compare, got {got:g} alone"))
    if faults:
        raise StudyFileError(faults)
    found = best_rates(
        study.name, study.records, [*reported_batches(spec.space.reference_batch, front.trials), *asked]
    )
    low, high = found.rates[0].effective_batch, found.rates[-1].effective_batch
    if beyond := [batch for batch in asked if not low <= batch <= high]:
        raise StudyFileError(
            f"batch: expected one between those tried, {low} to {high}, got {beyond[0]}: the fit does not extrapolate"
        )
    return found


def with_rates(study: StoredStudy) -> StoredStudy:
    """The study with its best rates fitted, ready to be stored."""
    try:
        rates = StoredRates(study.ended, rates_of(study))
    except StudyFileError:
        rates = StoredRates(study.ended, None)
    return replace(study, rates=rates)


def best_rates(
    name: str,
    records: Iterable[TrialRecord],
    batches: Iterable[int] = (),
) -> BestRates:
    """Fit the best rate to a study's trials.

    Args:
        name: the study's, for messages.
        batches: where to report the best rate, beside the smallest and the largest batch tried; others are left out.

    Raises:
        StudyFileError: too few trials, or batches or rates that do not differ enough.
    """
    records = told_apart(records)
    ended = [
        record
        for record in records
        if record.outcome in ("complete", "diverged") and record.facts.learning_rate
    ]
    complete = [record for record in ended if record.outcome == "complete" and record.accuracy is not None]
    if len(complete) < FEWEST:
        raise StudyFileError(
            f"study {name}: expected at least {FEWEST} complete trials to distinguish the rules, got {len(complete)}. "
            "Raise budget.trials, and run it again."
        )
    values = np.array([record.score for record in complete], dtype=np.float64)
    mask = _learned(values)
    learned, values = [record for record, good in zip(complete, mask, strict=True) if good], values[mask]
    left_out = len(ended) - len(learned)
    if len(learned) < _FEWEST_LEARNED:
        raise StudyFileError(
            f"study {name}: expected at least {_FEWEST_LEARNED} trials that learned, got {len(learned)} of {len(complete)}. "
            "Lower space.reference_rate, or train longer."
        )
    tried = np.array([_batch_and_rate(record) for record in ended])
    failed = np.array([record.outcome == "diverged" for record in ended])
    cliff = Cliff.fitted(tried, failed.astype(float)) if failed.any() else None
    low, high = (float(np.exp(bound)) for bound in (tried[:, 0].min(), tried[:, 0].max()))
    places = sorted({round(low), round(high), *(batch for batch in batches if low <= batch <= high)})
    if len(learned) > _MOST:
        chosen = np.unique(np.linspace(0, len(learned) - 1, _MOST).round().astype(int))
        learned, values = [learned[index] for index in chosen], values[chosen]
    points = np.array([_batch_and_rate(record) for record in learned])
    _check_spread(name, points)
    with single_threaded_blas():
        whole = _drawn(points, learned, values)
        halves = _halves(points, learned, values)
    bend = None
    if halves is not None and Estimate.of(halves[2].exponents).high < Estimate.of(halves[1].exponents).low:
        bend = (halves[0], Estimate.of(halves[1].exponents), Estimate.of(halves[2].exponents))
    sides = (whole, whole) if bend is None or halves is None else halves[1:]
    lines = [sides[bend is not None and batch > bend[0]] for batch in places]
    return BestRates(
        exponent=Estimate.of(whole.exponents),
        rates=tuple(_rate_at(batch, line, tried, cliff) for batch, line in zip(places, lines, strict=True)),
        trials=len(learned),
        left_out=left_out,
        bend=bend,
    )


def _learned(values: Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """A mask of the trials that learned: failures lie on a cliff, which shows where rates fail and not which are best.

    Excluded are those far below the median, since a loss is unbounded, then the lowest tenth of the remaining range.
    """
    middle, best = float(np.median(values)), float(values.max())
    near = values >= middle - 3 * (best - middle)
    worst = float(values[near].min())
    return np.asarray(near & ((values > worst + 0.1 * (best - worst)) | (best == worst)))


def _batch_and_rate(record: TrialRecord) -> tuple[float, float]:
    """Logarithms of the effective batch and the learning rate that the trial used."""
    assert record.facts.effective_batch is not None and record.facts.learning_rate is not None
    return math.log(record.facts.effective_batch), math.log(record.facts.learning_rate)


def _check_spread(name: str, points: Array) -> None:
    batches, rates = points.T
    if np.ptp(batches) < math.log(1.5):
        raise StudyFileError(
            f"study {name}: space.effective_batch: expected batches that differ by half at least, got "
            f"{np.exp(batches.min()):.0f} to {np.exp(batches.max()):.0f}. Search a wider range to distinguish the rules."
        )
    centred = batches - batches.mean()
    residuals = rates - rates.mean() - centred * (centred @ rates) / (centred @ centred)
    if residuals.std() < 0.1:
        raise StudyFileError(
            f"study {name}: space.reference_rate: expected rates that differ at the same batch, got none. "
            "Search a range of rates to distinguish the rules."
        )


class _Ridge:
    """The model of one set of trials.

    Its free parameters θ are the exponent, log length scale and log amplitude of h, log amplitude and log length scales of g,
    and the log noise variance, each with a normal prior.

    Args:
        batches, rates: logarithms, (n,).
        others: (n, k), of unit range.
        values: higher is better, (n,).
    """

    def __init__(self, batches: Array, rates: Array, others: Array, values: Array) -> None:
        self.middle, width = float(batches.min() + batches.max()) / 2, float(np.ptp(batches))
        self.batches, self.rates = batches - self.middle, rates
        self.points = np.column_stack([batches / width, others])
        self.targets = (values - values.mean()) / (values.std() or 1.0)
        length = math.sqrt(2.0) + 0.5 * math.log(self.points.shape[1])  # as in gaussian_process.py
        lengths = self.points.shape[1]
        # Published exponents lie from 0 to 1; the prior is wide enough for all of them where the trials are uninformative.
        # h is a hill a few e-folds of rate wide, with a smaller amplitude than g.
        self.prior = np.array([0.5, math.log(1.5), -1.0, 0.0, *[length] * lengths, -4.0])
        self.prior_std = np.array([0.6, 0.7, 1.0, 1.0, *[math.sqrt(3.0)] * lengths, 1.5])
        self.bounds = [
            (_LEAST_EXPONENT, _MOST_EXPONENT),
            (-1.5, 3.0),
            (-5.0, 2.0),
            (-3.0, 3.0),
            *[(-3.0, 6.0)] * lengths,
            (-12.0, 1.0),
        ]

    def _fitted(
        self, start: Array, subset: Any, steps: int, exponent: float | None = None
    ) -> tuple[float, Array]:
        """Negative log posterior and maximum a posteriori θ, by L-BFGS from `start`.

        Args:
            subset: indices or mask of the trials used.
            exponent: fixes p, for the profile likelihood.
        """
        batches = np.subtract.outer(self.batches[subset], self.batches[subset])
        rates = np.subtract.outer(self.rates[subset], self.rates[subset])
        points, targets = self.points[subset], self.targets[subset]
        squares = (points[:, None, :] - points[None, :, :]) ** 2

        def loss(free: Array) -> tuple[float, Array]:
            away = rates - free[0] * batches
            shrunk = np.exp(-2 * free[4:-1])
            hill_distance, ground_distance = np.abs(away) * math.exp(-free[1]), np.sqrt(squares @ shrunk)
            hill, hill_slope = matern52(hill_distance, free[2]), matern52_derivative(hill_distance, free[2])
            ground = matern52(ground_distance, free[3])
            ground_slope = matern52_derivative(ground_distance, free[3])
            covariance = hill + ground
            noise = math.exp(free[-1])
            covariance[np.diag_indices_from(covariance)] += noise + _JITTER
            try:
                factor = np.linalg.cholesky(covariance)
            except np.linalg.LinAlgError:
                return 1e10, np.zeros_like(free)
            weights = cho_solve((factor, True), targets, check_finite=False)
            gradient = cho_solve((factor, True), np.eye(len(targets)), check_finite=False) - np.outer(
                weights, weights
            )
            hill_slope *= gradient * math.exp(-2 * free[1])
            apart = (free - self.prior) / self.prior_std
            value = (
                0.5 * float(targets @ weights)
                + float(np.log(np.diag(factor)).sum())
                + 0.5 * float(apart @ apart)
            )
            slope = apart / self.prior_std
            slope[0] += 0.5 * (hill_slope * away * batches).sum()
            slope[1] += 0.5 * (hill_slope * away * away).sum()
            slope[2] += (gradient * hill).sum()
            slope[3] += (gradient * ground).sum()
            slope[4:-1] += 0.5 * np.tensordot(gradient * ground_slope, squares) * shrunk
            slope[-1] += 0.5 * noise * np.trace(gradient)
            return value, slope

        bounds, first = list(self.bounds), start.copy()
        if exponent is not None:
            bounds[0], first[0] = (exponent, exponent), exponent
        found = minimize(loss, first, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": steps})
        return float(found.fun), np.asarray(found.x)

    def draws(self) -> tuple[Array, Array]:
        """Posterior draws of the exponent and of the log best rate at the middle batch: (draws,) each.

        Their variance is the sum of the posterior's and the jackknife's over groups of trials: on synthetic tasks the 90 %
        interval of the posterior alone covered the truth in 62 to 84 % of studies, that of both in most (docs/log.md).
        """
        every = np.arange(len(self.targets))
        started = min(
            (self._fitted(self.prior, every, 20, exponent) for exponent in (0.0, 0.5, 1.0)),
            key=lambda fit: fit[0],
        )
        least, best = self._fitted(started[1], every, 60)
        offset = 0.05 if best[0] < 0.5 else -0.05
        rise = self._fitted(best, every, 6, best[0] + offset)[0] - least
        std = float(np.clip(abs(offset) / math.sqrt(max(2 * rise, 1e-9)), 0.005, 0.5))
        grid = np.unique(np.clip(best[0] + std * _OFFSETS, _LEAST_EXPONENT, _MOST_EXPONENT))
        grid = np.unique([*grid, _LEAST_EXPONENT, _MOST_EXPONENT])
        losses, frees = np.empty(len(grid)), [best] * len(grid)
        nearest = int(np.argmin(np.abs(grid - best[0])))
        for order in (range(nearest, len(grid)), range(nearest - 1, -1, -1)):
            last = best
            for place in order:
                losses[place], last = self._fitted(last, every, 6, float(grid[place]))
                frees[place] = last
        fine = np.linspace(_LEAST_EXPONENT, _MOST_EXPONENT, 6001)
        cumulative = np.cumsum(np.exp(losses.min() - np.interp(fine, grid, losses)))
        # Evenly spaced quantiles instead of random draws: the same trials always give the same answer.
        exponents = np.interp((np.arange(_DRAWS) + 0.5) / _DRAWS, cumulative / cumulative[-1], fine)
        groups = np.random.default_rng(0).permutation(len(every)) % _GROUPS
        without = np.array([self._fitted(best, every[groups != group], 15)[1] for group in range(_GROUPS)])
        rng = np.random.default_rng(1)
        tops = np.empty(_DRAWS)
        nearest_free = np.abs(np.subtract.outer(exponents, grid)).argmin(axis=1)
        for place in np.unique(nearest_free):
            these = nearest_free == place
            tops[these] = self._tops(frees[place], int(these.sum()), rng)
        jackknife = math.sqrt(
            (_GROUPS - 1) / _GROUPS * float(((without[:, 0] - without[:, 0].mean()) ** 2).sum())
        )
        wider = math.hypot(1.0, jackknife / float(exponents.std()))
        middle, top = float(np.median(exponents)), float(np.median(tops))
        return np.clip(middle + wider * (exponents - middle), *self.bounds[0]), top + wider * (tops - top)

    def _tops(self, free: Array, count: int, rng: np.random.Generator) -> Array:
        """Posterior draws of the maximum of h: log rates at the middle batch, (count,)."""
        away = self.rates - free[0] * self.batches
        grid = np.linspace(away.min(), away.max(), _GRID)
        length = math.exp(-free[1])
        squares = (self.points[:, None, :] - self.points[None, :, :]) ** 2 * np.exp(-2 * free[4:-1])
        covariance = matern52(np.abs(np.subtract.outer(away, away)) * length, free[2])
        covariance += matern52(np.sqrt(squares.sum(-1)), free[3])
        covariance[np.diag_indices_from(covariance)] += math.exp(free[-1]) + _JITTER
        cross = matern52(np.abs(np.subtract.outer(grid, away)) * length, free[2])
        solved = np.linalg.solve(covariance, cross.T)
        own = matern52(np.abs(np.subtract.outer(grid, grid)) * length, free[2]) - cross @ solved
        values, vectors = np.linalg.eigh((own + own.T) / 2)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        heights = (solved.T @ self.targets)[:, None] + root @ rng.standard_normal((_GRID, count))
        return np.asarray(grid[heights.argmax(axis=0)])


@dataclass(frozen=True, slots=True)
class _Lines:
    """Draws of the ridge as straight lines: exponents, and log rates at the log batch `middle`."""

    middle: float
    exponents: Array
    tops: Array


def _drawn(points: Array, records: Sequence[TrialRecord], values: Array) -> _Lines:
    ridge = _Ridge(points[:, 0], points[:, 1], other_coordinates(records), values)
    return _Lines(ridge.middle, *ridge.draws())


def _halves(
    points: Array, records: Sequence[TrialRecord], values: Array
) -> tuple[int, _Lines, _Lines] | None:
    """The median batch, and fits of the ridge on either side of it; None where one side has too few trials."""
    middle = float(np.median(points[:, 0]))
    lines = []
    for half in (points[:, 0] <= middle, points[:, 0] > middle):
        if half.sum() < FEWEST or np.ptp(points[half, 0]) < math.log(2):
            return None
        lines.append(
            _drawn(
                points[half],
                [record for record, inside in zip(records, half, strict=True) if inside],
                values[half],
            )
        )
    return round(math.exp(middle)), lines[0], lines[1]


def _rate_at(batch: int, lines: _Lines, tried: Array, cliff: Cliff | None) -> RateAt:
    place = math.log(batch)
    rates = lines.tops + lines.exponents * (place - lines.middle)
    # The rates tried near this batch, failed ones included: a ridge beyond them was never sampled.
    near = np.argsort(np.abs(tried[:, 0] - place), kind="stable")[: max(8, len(tried) // 4)]
    low, high = tried[near, 1].min(), tried[near, 1].max()
    margin = 0.02 * (high - low)
    outside = float(((rates <= low + margin) | (rates >= high - margin)).mean())
    fitted = Estimate.of(rates)
    # A rate beside the cliff would be contradicted by the trials beyond it.
    value = fitted.value if cliff is None else min(fitted.value, cliff.log_rate(place, _RISK))
    rate = Estimate(math.exp(value), math.exp(min(value, fitted.low)), math.exp(fitted.high))
    return RateAt(batch, rate, edge=outside > 0.25)


def reported_batches(reference_batch: int, front: Sequence[TrialRecord], most: int = 5) -> list[int]:
    """Batches whose best rate is reported: the reference, and a few of the front's."""
    batches = sorted({int(record.settings["effective_batch"]) for record in front})
    places = np.linspace(0, len(batches) - 1, min(most, len(batches))).round().astype(int).tolist()
    return sorted({reference_batch, *(batches[place] for place in places)})
