"""Which learning rate is best at which batch, and which rules that supports: read from the trials of a study.

The model (docs/decisions/0009-the-ridge-of-rates.md): accuracy = g(log batch, other parameters) + h(log rate - exponent *
log batch) + noise, with Gaussian processes for g and h. h's top is the ridge, and `exponent` its slope. It looks at the rate
that the optimizer got, not at the reference rate, so it is the same whatever rule the trials were proposed by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy.linalg import cho_solve
from scipy.optimize import minimize

from ...spaces.errors import Fault, StudyFileError
from ...spaces.learning_rate import RULE_EXPONENTS, RULES_FOR_ADAM
from ...spaces.study import StudySpec
from ...spaces.trial import ParetoFront, TrialRecord
from .gaussian_process import Array

# Complete trials from which rules are told apart at all, and of them those that learned.
FEWEST, _FEWEST_KEPT = 20, 12
# Trials beyond which a fit takes seconds; of more, so many are looked at.
_MOST = 150
# Exponents that are looked at; an interval that reaches an end says no more than "at least" or "at most".
_LEAST_EXPONENT, _MOST_EXPONENT = -1.0, 2.0
# Where the posterior is looked at, in deviations from its top: dense where most of it lies, far enough for skewed ones.
_PLACES = np.array([-9.0, -6.0, -4.0, -2.8, -2.0, -1.4, -0.9, -0.4, 0.0, 0.4, 0.9, 1.4, 2.0, 2.8, 4.0, 6.0, 9.0])
_SHARE = 0.9  # of the intervals
_DRAWS, _GRID, _GROUPS = 400, 80, 8
_SQRT5 = math.sqrt(5.0)
_JITTER = 1e-8
# What acts through the rate alone, or not on what is learned.
_NOT_OTHERS = frozenset({"effective_batch", "reference_rate", "rule", "exponent", "noise_batch", "devices"})


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 90 % interval."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class RateAt:
    """The fitted best rate at a batch; `edge`: it lies where no rate was tried, so it is not to be trusted."""

    effective_batch: int
    learning_rate: Estimate
    edge: bool


@dataclass(frozen=True, slots=True)
class BestRates:
    """What trials tell about the best rate.

    Args:
        exponent: of the batch, in the best rate.
        rates: at a few batches, ascending.
        trials: that the fit rests on.
        left_out: complete trials that did not learn, and diverged ones: the fit is of rates that work.
        bend: a batch, with the exponents below and above it, where the latter is surely smaller; None where it is not. The
            rates then follow each side's own slope.
    """

    exponent: Estimate
    rates: tuple[RateAt, ...]
    trials: int
    left_out: int
    bend: tuple[int, Estimate, Estimate] | None

    @property
    def trusted(self) -> bool:
        """Whether the ridge lies inside the rates that were tried, at most of the batches."""
        return sum(rate.edge for rate in self.rates) * 2 < len(self.rates)

    @property
    def holds(self) -> dict[str, bool]:
        """For each rule that is a power of the batch, whether the data allow it: never where the slope changes."""
        return {rule: self.bend is None and self.exponent.holds(exponent) for rule, exponent in RULE_EXPONENTS.items()}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"trusted": self.trusted, "holds": self.holds}


def study_rates(
    name: str, spec: StudySpec, front: ParetoFront, records: Sequence[TrialRecord], asked: Sequence[int] = ()
) -> BestRates:
    """Fit the best rate to a study's trials; tell it at the reference batch, at a few of the front's and at those asked for.

    Raises:
        StudyFileError: the study searches no batch or no rate, a batch asked for lies beyond those tried, or as `best_rates`.
    """
    searched, faults = spec.searched(), []
    if "effective_batch" not in searched:
        got = spec.fixed()["effective_batch"]
        faults.append(Fault("space.effective_batch", f"expected several batches to compare rates at, got {got} alone"))
    if not {"reference_rate", "rule", "exponent"} & set(searched):
        got = spec.space.reference_rate.low
        faults.append(Fault("space.reference_rate", f"expected several rates to compare, got {got:g} alone"))
    if faults:
        raise StudyFileError(faults)
    found = best_rates(name, records, [*told_batches(spec.space.reference_batch, front.trials), *asked], front.direction)
    low, high = found.rates[0].effective_batch, found.rates[-1].effective_batch
    if beyond := [batch for batch in asked if not low <= batch <= high]:
        raise StudyFileError(
            f"--batch: expected one between those tried, {low} to {high}, got {beyond[0]}: beyond them the best rate may bend"
        )
    return found


def best_rates(
    name: str,
    records: Iterable[TrialRecord],
    batches: Iterable[int] = (),
    direction: Literal["minimize", "maximize"] = "maximize",
) -> BestRates:
    """Fit the best rate to a study's trials.

    Args:
        name: the study's, for messages.
        batches: where to tell the best rate, beside the smallest and the largest batch tried; others are left out.

    Raises:
        StudyFileError: too few trials, or batches or rates that do not differ enough.
    """
    ended = [record for record in records if record.outcome in ("complete", "diverged") and "learning_rate" in record.facts]
    complete = [record for record in ended if record.outcome == "complete" and record.accuracy is not None]
    if len(complete) < FEWEST:
        raise StudyFileError(
            f"study {name}: expected at least {FEWEST} complete trials to tell rules apart, got {len(complete)}. "
            "Raise budget.trials, and run it again."
        )
    sign = 1.0 if direction == "maximize" else -1.0
    values = sign * np.array([record.accuracy for record in complete], dtype=np.float64)
    kept = _learned(values)
    learned, values = [record for record, good in zip(complete, kept, strict=True) if good], values[kept]
    left_out = len(ended) - len(learned)
    if len(learned) < _FEWEST_KEPT:
        raise StudyFileError(
            f"study {name}: expected at least {_FEWEST_KEPT} trials that learned, got {len(learned)} of {len(complete)}. "
            "Lower space.reference_rate, or train longer."
        )
    tried = np.array([_batch_and_rate(record) for record in ended])
    low, high = (float(np.exp(bound)) for bound in (tried[:, 0].min(), tried[:, 0].max()))
    places = sorted({round(low), round(high), *(batch for batch in batches if low <= batch <= high)})
    if len(learned) > _MOST:
        chosen = np.unique(np.linspace(0, len(learned) - 1, _MOST).round().astype(int))
        learned, values = [learned[index] for index in chosen], values[chosen]
    points = np.array([_batch_and_rate(record) for record in learned])
    _check_spread(name, points)
    whole = _drawn(points, learned, values)
    halves = _halves(points, learned, values)
    bend = None
    if halves is not None and _estimate(halves[2].exponents).high < _estimate(halves[1].exponents).low:
        bend = (halves[0], _estimate(halves[1].exponents), _estimate(halves[2].exponents))
    sides = (whole, whole) if bend is None or halves is None else halves[1:]
    lines = [sides[bend is not None and batch > bend[0]] for batch in places]
    return BestRates(
        exponent=_estimate(whole.exponents),
        rates=tuple(_rate_at(batch, line, tried) for batch, line in zip(places, lines, strict=True)),
        trials=len(learned),
        left_out=left_out,
        bend=bend,
    )


def _learned(values: Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which trials learned at all: failures lie on a cliff, which says where rates fail and not which are best.

    Far worse than the median first, for a loss knows no bound; then the lowest tenth of what is left.
    """
    middle, best = float(np.median(values)), float(values.max())
    kept = values >= middle - 3 * (best - middle)
    worst = float(values[kept].min())
    return np.asarray(kept & ((values > worst + 0.1 * (best - worst)) | (best == worst)))


def _batch_and_rate(record: TrialRecord) -> tuple[float, float]:
    """Their logarithms, of what was trained with."""
    return math.log(record.facts["effective_batch"]), math.log(record.facts["learning_rate"])


def _check_spread(name: str, points: Array) -> None:
    batches, rates = points.T
    if np.ptp(batches) < math.log(1.5):
        raise StudyFileError(
            f"study {name}: space.effective_batch: expected batches that differ by half at least, got "
            f"{np.exp(batches.min()):.0f} to {np.exp(batches.max()):.0f}. Search a wider range to tell rules apart."
        )
    centred = batches - batches.mean()
    away = rates - rates.mean() - centred * (centred @ rates) / (centred @ centred)
    if away.std() < 0.1:
        raise StudyFileError(
            f"study {name}: space.reference_rate: expected rates that differ at the same batch, got none. "
            "Search a range of rates to tell rules apart."
        )


def _others(records: Sequence[TrialRecord]) -> Array:
    """Every other searched parameter, numbers about 1 wide and words as corners: (trials, columns)."""
    columns: list[Any] = []
    names = {name for record in records for name in record.parameters} - _NOT_OTHERS
    if RULES_FOR_ADAM & {str(record.facts.get("rule")) for record in records}:
        names.add("rule")  # these change more than the rate
    for name in sorted(names):
        values = [record.parameters.get(name, record.facts.get(name)) for record in records]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            numbers = np.array(values, dtype=np.float64)
            if numbers.min() > 0 and numbers.max() > 10 * numbers.min():
                numbers = np.log(numbers)
            if np.ptp(numbers) > 0:
                columns.append((numbers - numbers.min()) / np.ptp(numbers))
        elif len(words := sorted(set(map(str, values)))) > 1:
            columns += [np.array([float(str(value) == word) for value in values]) for word in words]
    return np.column_stack(columns) if columns else np.zeros((len(records), 0))


class _Ridge:
    """The model of one set of trials.

    Free are the exponent, log length and amplitude of h, log amplitude and lengths of g, and log variance of the noise.

    Args:
        batches, rates: logarithms, (n,).
        others: (n, k), about 1 wide.
        values: higher is better, (n,).
    """

    def __init__(self, batches: Array, rates: Array, others: Array, values: Array) -> None:
        self.middle, wide = float(batches.min() + batches.max()) / 2, float(np.ptp(batches))
        self.batches, self.rates = batches - self.middle, rates
        self.points = np.column_stack([batches / wide, others])
        self.targets = (values - values.mean()) / (values.std() or 1.0)
        length = math.sqrt(2.0) + 0.5 * math.log(self.points.shape[1])  # as in gaussian_process.py
        lengths = self.points.shape[1]
        # Published exponents lie from 0 to 1; the prior is wide enough to allow all of them where the trials say nothing.
        # h is a hill some e-folds of rate wide, and lower than what g explains.
        self.prior = np.array([0.5, math.log(1.5), -1.0, 0.0, *[length] * lengths, -4.0])
        self.deviations = np.array([0.6, 0.7, 1.0, 1.0, *[math.sqrt(3.0)] * lengths, 1.5])
        self.bounds = [
            (_LEAST_EXPONENT, _MOST_EXPONENT),
            (-1.5, 3.0),
            (-5.0, 2.0),
            (-3.0, 3.0),
            *[(-3.0, 6.0)] * lengths,
            (-12.0, 1.0),
        ]

    def _fitted(self, start: Array, kept: Any, steps: int, exponent: float | None = None) -> tuple[float, Array]:
        """The most probable free values from `start` on, for some of the trials; the exponent may be given."""
        batches = np.subtract.outer(self.batches[kept], self.batches[kept])
        rates = np.subtract.outer(self.rates[kept], self.rates[kept])
        points, targets = self.points[kept], self.targets[kept]
        squares = (points[:, None, :] - points[None, :, :]) ** 2

        def loss(free: Array) -> tuple[float, Array]:
            away = rates - free[0] * batches
            shrunk = np.exp(-2 * free[4:-1])
            hill, hill_slope = _matern(np.abs(away) * math.exp(-free[1]), free[2])
            ground, ground_slope = _matern(np.sqrt(squares @ shrunk), free[3])
            covariance = hill + ground
            noise = math.exp(free[-1])
            covariance[np.diag_indices_from(covariance)] += noise + _JITTER
            try:
                factor = np.linalg.cholesky(covariance)
            except np.linalg.LinAlgError:
                return 1e10, np.zeros_like(free)
            weights = cho_solve((factor, True), targets, check_finite=False)
            pull = cho_solve((factor, True), np.eye(len(targets)), check_finite=False) - np.outer(weights, weights)
            hill_slope *= pull * math.exp(-2 * free[1])
            apart = (free - self.prior) / self.deviations
            value = 0.5 * float(targets @ weights) + float(np.log(np.diag(factor)).sum()) + 0.5 * float(apart @ apart)
            slope = apart / self.deviations
            slope[0] += 0.5 * (hill_slope * away * batches).sum()
            slope[1] += 0.5 * (hill_slope * away * away).sum()
            slope[2] += (pull * hill).sum()
            slope[3] += (pull * ground).sum()
            slope[4:-1] += 0.5 * np.tensordot(pull * ground_slope, squares) * shrunk
            slope[-1] += 0.5 * noise * np.trace(pull)
            return value, slope

        bounds, first = list(self.bounds), start.copy()
        if exponent is not None:
            bounds[0], first[0] = (exponent, exponent), exponent
        found = minimize(loss, first, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": steps})
        return float(found.fun), np.asarray(found.x)

    def draws(self) -> tuple[Array, Array]:
        """Exponents, and log best rates at the middle batch: (draws,) each.

        Their spread is the posterior's and the jackknife's (over groups of trials) together: on made-up tasks the posterior
        alone covered the truth in 62 to 84 % of studies where it meant 90 %, both together in most of them (docs/log.md).
        """
        every = np.arange(len(self.targets))
        begun = min((self._fitted(self.prior, every, 20, exponent) for exponent in (0.0, 0.5, 1.0)), key=lambda one: one[0])
        least, best = self._fitted(begun[1], every, 60)
        beside = 0.05 if best[0] < 0.5 else -0.05
        risen = self._fitted(best, every, 6, best[0] + beside)[0] - least
        deviation = float(np.clip(abs(beside) / math.sqrt(max(2 * risen, 1e-9)), 0.005, 0.5))
        looked = np.unique(np.clip(best[0] + deviation * _PLACES, _LEAST_EXPONENT, _MOST_EXPONENT))
        looked = np.unique([*looked, _LEAST_EXPONENT, _MOST_EXPONENT])
        losses, frees = np.empty(len(looked)), [best] * len(looked)
        nearest = int(np.argmin(np.abs(looked - best[0])))
        for order in (range(nearest, len(looked)), range(nearest - 1, -1, -1)):
            last = best
            for place in order:
                losses[place], last = self._fitted(last, every, 6, float(looked[place]))
                frees[place] = last
        fine = np.linspace(_LEAST_EXPONENT, _MOST_EXPONENT, 6001)
        likely = np.cumsum(np.exp(losses.min() - np.interp(fine, looked, losses)))
        # Evenly spread quantiles instead of chance: the same trials always say the same.
        exponents = np.interp((np.arange(_DRAWS) + 0.5) / _DRAWS, likely / likely[-1], fine)
        groups = np.random.default_rng(0).permutation(len(every)) % _GROUPS
        without = np.array([self._fitted(best, every[groups != group], 15)[1] for group in range(_GROUPS)])
        chance = np.random.default_rng(1)
        tops = np.empty(_DRAWS)
        nearest_free = np.abs(np.subtract.outer(exponents, looked)).argmin(axis=1)
        for place in np.unique(nearest_free):
            these = nearest_free == place
            tops[these] = self._tops(frees[place], int(these.sum()), chance)
        jackknife = math.sqrt((_GROUPS - 1) / _GROUPS * float(((without[:, 0] - without[:, 0].mean()) ** 2).sum()))
        wider = math.hypot(1.0, jackknife / float(exponents.std()))
        middle, top = float(np.median(exponents)), float(np.median(tops))
        return np.clip(middle + wider * (exponents - middle), *self.bounds[0]), top + wider * (tops - top)

    def _tops(self, free: Array, count: int, chance: np.random.Generator) -> Array:
        """Where draws of h are highest: log rates at the middle batch."""
        away = self.rates - free[0] * self.batches
        grid = np.linspace(away.min(), away.max(), _GRID)
        length = math.exp(-free[1])
        squares = (self.points[:, None, :] - self.points[None, :, :]) ** 2 * np.exp(-2 * free[4:-1])
        covariance = _matern(np.abs(np.subtract.outer(away, away)) * length, free[2])[0]
        covariance += _matern(np.sqrt(squares.sum(-1)), free[3])[0]
        covariance[np.diag_indices_from(covariance)] += math.exp(free[-1]) + _JITTER
        cross = _matern(np.abs(np.subtract.outer(grid, away)) * length, free[2])[0]
        solved = np.linalg.solve(covariance, cross.T)
        own = _matern(np.abs(np.subtract.outer(grid, grid)) * length, free[2])[0] - cross @ solved
        values, vectors = np.linalg.eigh((own + own.T) / 2)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        heights = (solved.T @ self.targets)[:, None] + root @ chance.standard_normal((_GRID, count))
        return np.asarray(grid[heights.argmax(axis=0)])


def _matern(distance: Array, log_amplitude: float) -> tuple[Array, Array]:
    """Covariance, and minus its slope along the distance over that distance."""
    scaled = _SQRT5 * distance
    shrunk = math.exp(2 * log_amplitude) * np.exp(-scaled)
    return (1.0 + scaled + scaled**2 / 3.0) * shrunk, 5.0 / 3.0 * (1.0 + scaled) * shrunk


def _estimate(draws: Array) -> Estimate:
    low, value, high = np.quantile(draws, [(1 - _SHARE) / 2, 0.5, (1 + _SHARE) / 2])
    return Estimate(float(value), float(low), float(high))


@dataclass(frozen=True, slots=True)
class _Lines:
    """Draws of the ridge as straight lines: exponents, and log rates at the log batch `middle`."""

    middle: float
    exponents: Array
    tops: Array


def _drawn(points: Array, records: Sequence[TrialRecord], values: Array) -> _Lines:
    ridge = _Ridge(points[:, 0], points[:, 1], _others(records), values)
    return _Lines(ridge.middle, *ridge.draws())


def _halves(points: Array, records: Sequence[TrialRecord], values: Array) -> tuple[int, _Lines, _Lines] | None:
    """The middle batch, and the ridge on either side of it alone; None where one holds too few trials."""
    middle = float(np.median(points[:, 0]))
    lines = []
    for half in (points[:, 0] <= middle, points[:, 0] > middle):
        if half.sum() < FEWEST or np.ptp(points[half, 0]) < math.log(2):
            return None
        lines.append(_drawn(points[half], [record for record, kept in zip(records, half, strict=True) if kept], values[half]))
    return round(math.exp(middle)), lines[0], lines[1]


def _rate_at(batch: int, lines: _Lines, tried: Array) -> RateAt:
    place = math.log(batch)
    rates = lines.tops + lines.exponents * (place - lines.middle)
    # The rates tried near this batch, failed ones among them: a ridge beyond them was never looked at.
    near = np.argsort(np.abs(tried[:, 0] - place), kind="stable")[: max(8, len(tried) // 4)]
    low, high = tried[near, 1].min(), tried[near, 1].max()
    margin = 0.02 * (high - low)
    outside = float(((rates <= low + margin) | (rates >= high - margin)).mean())
    fitted = _estimate(rates)
    return RateAt(batch, Estimate(math.exp(fitted.value), math.exp(fitted.low), math.exp(fitted.high)), edge=outside > 0.25)


def told_batches(reference_batch: int, front: Sequence[TrialRecord], most: int = 5) -> list[int]:
    """Batches whose best rate a user asks for: the reference, and a few of the front's."""
    batches = sorted({int(record.settings["effective_batch"]) for record in front})
    places = np.linspace(0, len(batches) - 1, min(most, len(batches))).round().astype(int).tolist()
    return sorted({reference_batch, *(batches[place] for place in places)})
