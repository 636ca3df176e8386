"""The best batch and learning rate of a larger training, from trials of smaller ones and what is published.

What is best moves with the samples D of a training and the parameters N of its model as powers of them:

    batch ∝ D^a N^b,    rate ∝ D^c N^d

so in coordinates that move along, u = ln batch − a ln D − b ln N and v = ln rate − c ln D − d ln N, trainings of every size
have the same best setting: one Gaussian process of accuracy over (u, v, ln D, ln N, other parameters) serves all of them. The
exponents are draws from a prior around the published laws, each weighted by how well that process then explains the trials.
Trials of one size say nothing about exponents, and the interval is the disagreement of what is published.

Sources: Step Law, arXiv 2503.04715; Power Lines, arXiv 2505.13738, whose batches nanochat takes, with rates that follow the
square root of the batch and width^-0.5, here N^-0.25; the critical batch follows data and not model size, arXiv 2410.21676; the
timescale of weight decay is a constant share of the training, arXiv 2405.13698, or shrinks with samples per parameter, Power
Lines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...search.analysis.blow_ups import told_apart
from ...search.analysis.cliff import Cliff
from ...search.analysis.coordinates import other_coordinates
from ...search.analysis.gaussian_process import Array, GaussianProcess, conditioned, fitted, single_threaded_blas
from ...search.analysis.rates import Estimate
from ...search.analysis.score_scale import DEEPEST
from ...search.suggest.priors.batch_rate_prior import BARE, BatchRate, ScorePrior
from ...spaces.errors import StudyFileError
from ...spaces.record import TrialRecord
from .scaled_up import EXPONENTS, NextStudy, ScaledUp, SettingAt, Size, follows_size, size_of

# The fewest complete trials of a fit, and the most trials: of more, an even selection of all sizes.
FEWEST, _MOST = 12, 160
# What a failed training is worth on the scale of accuracies, where the median lies at -1: all is lost, and by too low a rate
# little.
_FAILED = -10.0
# The share of trials within one unit of the best on that scale, each size counted alike.
_CLOSE = 0.2
# Draws of the exponents from their prior, those that are kept, and where each looks for its best: random points, points of a
# line, and of a side of the grid for all.
_DRAWS, _KEPT, _POINTS, _LINE, _GRID = 1200, 120, 220, 25, 24
# So many draws have to carry the weight, else they are drawn anew around those that do, at most so often, this much wider.
_ENOUGH, _ROUNDS, _WIDER = 150, 3, 1.4
# Batches at which a rate is reported, as multiples of the best, where they lie among those tried.
_MULTIPLES = (0.5, 1.0, 2.0, 4.0)
_JITTER = 1e-6
# A bound of what was tried is the best's as far as is known where so large a share of the draws end at it.
_AT_EDGE, _MARGIN = 0.25, 0.04
_ADAPTIVE = ("adam", "lion", "rmsprop", "adafactor", "sophia", "adagrad", "adadelta", "lamb", "muon", "soap", "shampoo")
# How much of the number of samples per parameter the timescale of weight decay follows: from none to this power.
_DECAY_POWER = 0.527
# A next study: its trials, its samples relative to the largest tried, what it may cost, in trainings of the target's size, by
# what factor it has to differ from every size tried, and how much it has to narrow one of the intervals.
NEXT_TRIALS, _NEXT_SIZES, _NEXT_COST, _NEXT_APART, _NEXT_NARROWS = 16, (0.1, 0.2, 0.33, 0.5, 2.0, 3.0, 5.0), 2.0, 1.5, 0.95
# Sizes that differ by less in samples and in parameters tell nothing of the exponents: their noise was taken for an effect of
# size, and more trials made predictions worse.
_APART = 1.5
# An exponent whose posterior mean is so many prior standard deviations away contradicts what is published.
_FAR = 2.0


def scale_up(
    name: str,
    records: Sequence[TrialRecord],
    data: float = 1.0,
    model: float = 1.0,
) -> ScaledUp:
    """Predict the best setting of a larger training.

    Args:
        name: of the study, for messages.
        records: of one study or of several that differ in nothing but sizes. Trials that diverged or blew up say where
            trainings fail.
        data, model: the samples and the parameters of the larger training, over those of the largest tried.

    Raises:
        StudyFileError: too few complete trials, or they do not differ in batch and rate.
    """
    records = told_apart(records)
    ended = [record for record in records if record.outcome in ("complete", "diverged") and record.facts.learning_rate]
    complete = [record for record in ended if record.outcome == "complete" and record.accuracy is not None]
    if len(complete) >= FEWEST and len({record.accuracy for record in complete}) == 1:
        raise StudyFileError(f"study {name}: expected trials that differ in the metric, got {complete[0].accuracy:g} in all")
    if len(complete) < FEWEST:
        raise StudyFileError(
            f"study {name}: expected at least {FEWEST} complete trials, got {len(complete)}. Raise budget.trials; trials that "
            "were stopped early do not count here, which `stopping: none` avoids."
        )
    if len({record.facts.model_parameters is None for record in complete}) > 1:
        raise StudyFileError(f"study {name}: expected trials that all know their model's parameters, got some that do not")
    begin = Size(max(size_of(record).samples for record in complete), max(size_of(record).parameters for record in complete))
    sizes = sorted({size_of(record) for record in complete}, key=lambda size: (size.cost, size.samples))
    ended = [record for record in ended if record.outcome == "diverged" or record.accuracy is not None]
    if len(ended) > _MOST:
        ended.sort(key=lambda record: size_of(record).cost)
        ended = [ended[place] for place in np.linspace(0, len(ended) - 1, _MOST).round().astype(int)]
    tried = np.array(
        [[math.log(record.settings["effective_batch"]), math.log(record.facts.learning_rate or 1)] for record in ended]
    )
    _check_spread(name, tried, [size_of(record) for record in ended])
    with single_threaded_blas():
        fit = _Fit(ended, tried, begin)
        return fit.scaled(Size(begin.samples * data, begin.parameters * model), tuple(sizes))


def _check_spread(name: str, tried: Array, sizes: Sequence[Size]) -> None:
    """Raise unless trials of one size differ in their batches, and in the rates at a batch."""
    within = tried.copy()
    for size in set(sizes):
        same = np.array([other == size for other in sizes])
        within[same] -= within[same].mean(axis=0)
    batches, rates = within.T
    key = ""
    if np.ptp(batches) < math.log(1.5):
        key = "effective_batch"
    elif (rates - batches * (batches @ rates) / (batches @ batches)).std() < 0.1:
        key = "reference_rate"
    if key:
        raise StudyFileError(
            f"study {name}: space.{key}: expected trials of one size that differ in it, to see which is best. Search a range."
        )


def _adaptive(records: Sequence[TrialRecord]) -> bool | None:
    """Whether the trials' optimizers divide by the gradient's size, as those of the published laws do; None: none is named."""
    names = {record.facts.optimizer.lower() for record in records if record.facts.optimizer}
    return all(any(word in name for word in _ADAPTIVE) for name in names) if names else None


class _Scale:
    """Accuracies of all sizes: 0 at the best, −1 at the median; linear close to the best, logarithmic below.

    What matters is where the best is, and bad settings and small sizes span most of the range. On the sampler's scale, whose
    linear part reaches beyond the median, a process took the best tenth of the trials of a size for equal.

    Args:
        values: of complete trials, higher is better.
        weights: of these trials in the quantiles.
    """

    def __init__(self, values: Array, weights: Array) -> None:
        self.best = float(values.max())
        below, order = self.best - values, np.argsort(-values)
        weights = weights[order]
        shares = (np.cumsum(weights) - weights) / (weights.sum() - weights[-1])
        close, median = np.interp([_CLOSE, 0.5], shares, below[order])
        self.unit = max(float(close), 1e-3 * max(abs(self.best), 1e-9))
        self.median = max(math.asinh(float(median) / self.unit), math.asinh(1))

    def of(self, values: Array) -> Array:
        with np.errstate(over="ignore"):
            below = np.minimum((self.best - values) / self.unit, np.sinh(DEEPEST))
        return np.asarray(-np.arcsinh(below) / self.median)

    def back(self, scaled: Array) -> Array:
        """The inverse of `of`, but linear above the best: a draw may reach far up there."""
        below = -scaled * self.median
        return np.asarray(self.best - self.unit * np.where(below > 0, np.sinh(np.clip(below, 0.0, DEEPEST)), below))


_Draw = tuple[GaussianProcess, Array, Cliff | None]  # a process, the exponents of its coordinates, and where trainings fail


@dataclass(frozen=True, slots=True)
class _Line:
    """The best rates at one batch.

    Args:
        log_rates: of each draw.
        rate: with the highest expected accuracy, and the interval of the draws.
        given_up: accuracy below that of the best batch.
    """

    log_rates: Array
    rate: Estimate
    given_up: Estimate


class _Fit:
    """The posterior of exponents and surface.

    Args:
        tried: (n, 2), logarithms of batch and rate.
        begin: the size that coordinates are relative to.

    Attributes:
        tried_away: (n, 2), logarithms of all trials' samples and parameters, relative to `begin`.
        failed: (n,), which of them diverged or blew up.
        told_by_sizes: whether sizes differ enough to tell exponents.
        away, records, values: of those that did not fail.
    """

    def __init__(self, records: Sequence[TrialRecord], tried: Array, begin: Size) -> None:
        every = np.array([size_of(record).logs for record in records]) - begin.logs
        self.begin, self.tried, self.tried_away = begin, tried, every
        self.failed = np.array([record.outcome == "diverged" for record in records])
        self.told_by_sizes = bool((np.ptp(every, axis=0) >= math.log(_APART)).any())
        # The surface is that of trainings that work; those that failed say where the cliff is.
        records = [record for record in records if record.outcome != "diverged"]
        self.records, self.away = records, every[~self.failed]
        held = Counter(size_of(record) for record in records)
        accuracies = np.array([record.score for record in records], dtype=np.float64)
        self.scale = _Scale(accuracies, np.array([1 / held[size_of(record)] for record in records]))
        self.values = self.scale.of(accuracies)
        names = {name for record in records for name in record.parameters}
        partly = {name for name in names if not all(name in record.parameters or name in record.settings for record in records)}
        others = other_coordinates(records, without={"epochs"} | partly)
        self.others = others[:, [not follows_size(column, self.away) for column in others.T]]
        self.best = 0
        self.adaptive = _adaptive(records)
        self.passes = max(record.facts.epochs or 1.0 for record in records)
        self.slope = (0.5, 0.2) if self.adaptive else BARE
        width = 4 + self.others.shape[1]
        self.structure = ScorePrior(BatchRate(0, 1, np.ones(width), self.slope))
        self.middle = tried.mean(axis=0)
        self.rng = np.random.default_rng(0)
        # Of a, b, d, and of the rest of c beside the ridge's slope.
        if self.adaptive and self.passes <= 1:
            self.prior_mean, self.prior_std = np.array([0.477, 0.0, -0.48, 0.02]), np.array([0.12, 0.1, 0.2, 0.1])
        else:
            # Nothing is published of SGD, nor of trainings that repeat their data. Expected is something between Power Lines
            # and settings that stay, and it is less certain. Measured: docs/decisions/0041-the-next-size.md.
            self.prior_mean, self.prior_std = np.array([0.3, 0.0, -0.2, 0.0]), np.array([0.2, 0.1, 0.2, 0.15])

    def _exponents(self, free: Array) -> Array:
        """a, b, c and d from a, b, d and the rest of c: (draws, 4)."""
        by_data, by_model, rate_by_model, rest = free.T
        return np.column_stack([by_data, by_model, self.slope[0] * (by_data + by_model) + rest, rate_by_model])

    def _moved(self, exponents: Array) -> Array:
        """u and v of all trials under these exponents, (n, 2)."""
        return np.asarray(self.tried - self.middle - self.tried_away @ np.reshape(exponents, (2, 2)).T)

    def _points(self, exponents: Array) -> Array:
        """The trials that did not fail under these exponents, (n, 4 + others); a process's own coordinates begin at a half."""
        return np.asarray(np.column_stack([self._moved(exponents)[~self.failed], self.away, self.others]) + 0.5)

    def _draw(self, process: GaussianProcess, exponents: Array) -> _Draw:
        cliff = Cliff.fitted(self._moved(exponents), self.failed.astype(float)) if self.failed.any() else None
        return self._given(process, exponents), exponents, cliff

    def scaled(self, target: Size, sizes: tuple[Size, ...]) -> ScaledUp:
        free, log_weights, process = self._posterior()
        weights = np.exp(log_weights - log_weights.max())
        weights /= weights.sum()
        # Evenly spaced quantiles instead of random draws.
        order = np.searchsorted(np.cumsum(weights), (np.arange(_KEPT) + 0.5) / _KEPT)
        exponents = self._exponents(free)
        kept = exponents[np.minimum(order, len(exponents) - 1)]
        self.best = self._best(process, weights @ exponents)
        draws = [self._draw(process, drawn) for drawn in kept]
        tops = np.array([self._top(draw) for draw in draws])  # (kept, 2): u, v
        moved = np.einsum("kij,j->ki", kept.reshape(-1, 2, 2), target.logs - self.begin.logs)
        best = self._expected_best(draws, moved)
        begun = self._expected_best(draws, np.zeros_like(moved)) + self.middle
        carried = np.exp(begun)
        settings = []
        for multiple in _MULTIPLES:
            batch = best[0] + math.log(multiple)
            line, inside = self._at_batch(draws, moved, batch, best[0])
            if multiple == 1 or inside >= 0.5:
                batches = np.full(len(kept), batch + self.middle[0])
                settings.append(
                    SettingAt(
                        multiple,
                        max(1, round(math.exp(batches[0]))),
                        line.rate,
                        self._weight_decay(target, begun, batches, line.log_rates),
                        line.given_up,
                    )
                )
        beforehand = self._exponents(self._prior())
        before = {key: Estimate.of(each) for key, each in zip(EXPONENTS, beforehand.T, strict=True)}
        after = {key: _weighted(each, weights) for key, each in zip(EXPONENTS, exponents.T, strict=True)}
        apart = np.abs(weights @ exponents - beforehand.mean(axis=0)) / beforehand.std(axis=0)
        return ScaledUp(
            begin=self.begin,
            target=target,
            trials=len(self.tried),
            sizes=sizes,
            batch=_around(best[0] + self.middle[0], tops[:, 0] + moved[:, 0] + self.middle[0]),
            settings=tuple(settings),
            exponents={key: (before[key], after[key]) for key in EXPONENTS},
            carried=(float(carried[0]), float(carried[1])),
            adaptive=self.adaptive,
            passes=self.passes,
            edges=self._edges(tops, kept),
            contradicted=tuple(key for key, far in zip(EXPONENTS, apart, strict=True) if far > _FAR),
            effective_draws=float(1 / (weights**2).sum()),
            next=self._next(kept, tops, tops + moved + self.middle, target, sizes),
        )

    def _prior(self) -> Array:
        """Draws of the free exponents, (draws, 4)."""
        return np.asarray(self.prior_mean + self.prior_std * self.rng.standard_normal((_DRAWS, 4)))

    def _posterior(self) -> tuple[Array, Array, GaussianProcess]:
        """Draws of the free exponents with their log weights, and the process with the likeliest length scales."""
        free = self._prior()
        log_weights, correction = np.zeros(len(free)), np.zeros(len(free))
        for turn in range(2 + _ROUNDS):
            weights = np.exp(log_weights - log_weights.max())
            weights /= weights.sum()
            if turn >= 2:
                if 1 / (weights**2).sum() >= _ENOUGH:
                    break
                # Trials that determine the exponents leave few draws of the prior: more around those, at their true weight.
                mean = weights @ free
                spread = free - mean
                covariance = _WIDER**2 * (spread.T * weights) @ spread + np.diag((0.05 * self.prior_std) ** 2)
                free = self.rng.multivariate_normal(mean, covariance, len(free))
                spread = free - mean
                drawn = -0.5 * np.einsum("ij,jk,ik->i", spread, np.linalg.inv(covariance), spread)
                correction = -0.5 * (((free - self.prior_mean) / self.prior_std) ** 2).sum(axis=1) - drawn
            else:
                likely = self._exponents((weights @ free)[None])[0]
                process = fitted(self._points(likely), self.values, structure=self.structure, prior=(0.0, 1.0))
            if self.told_by_sizes:
                log_weights = correction + [
                    self._log_likelihood(self._draw(process, exponent)) for exponent in self._exponents(free)
                ]
        return free, log_weights, process

    def _best(self, process: GaussianProcess, exponents: Array) -> int:
        """The trial that would be best at the largest size."""
        points = self._points(exponents)
        points[:, 2:4] = 0.5
        return int(self._given(process, exponents).mean_at(points).argmax())

    def _given(self, process: GaussianProcess, exponents: Array) -> GaussianProcess:
        return conditioned(
            self._points(exponents), self.values, process.free, process.log_noise, 0.0, 1.0, structure=self.structure
        )

    def _log_likelihood(self, draw: _Draw) -> float:
        process, _, cliff = draw
        spread = process.factor.T @ process.weights
        of_cliff = 0.0 if cliff is None else cliff.log_posterior
        return float(-0.5 * spread @ spread - np.log(np.diag(process.factor)).sum()) + of_cliff

    def _places(self, spots: Array) -> Array:
        """Points of the largest size with the best trial's other parameters at (u, v), (m, 2)."""
        others = np.tile(self.others[self.best], (len(spots), 1))
        return np.asarray(np.column_stack([spots, np.zeros_like(spots), others]) + 0.5)

    def _bounds(self, exponents: Array) -> tuple[Array, Array]:
        """The smallest and the largest u and v tried."""
        spots = self._moved(exponents)
        return spots.min(axis=0), spots.max(axis=0)

    def _top(self, draw: _Draw) -> Array:
        """Where one draw of the surface has its maximum, (2,)."""
        low, high = self._bounds(draw[1])
        spots = low + (high - low) * self.rng.random((_POINTS, 2))
        return np.asarray(spots[self._drawn(draw, spots).argmax()])

    def _drawn(self, draw: _Draw, spots: Array) -> Array:
        """One draw of the surface at spots (m, 2), (m,), and of the far lower one where failure is the likelier."""
        process, _, cliff = draw
        middle, covariance = process.joint(self._places(spots))
        covariance[np.diag_indices_from(covariance)] += _JITTER
        drawn = middle + np.linalg.cholesky(covariance) @ self.rng.standard_normal(len(spots))
        return drawn if cliff is None else np.where(cliff.chance(spots) < 0.5, drawn, _FAILED + drawn)

    def _expected_best(self, draws: Sequence[_Draw], moved: Array) -> Array:
        """Log batch and log rate, less the middle, with the highest expected accuracy over all draws, (2,).

        The draws' own maxima disagree: in the middle between them may be a cliff, or nothing.

        Args:
            moved: what the size adds to each draw's u and v, (draws, 2).
        """
        bounds = np.array([self._bounds(exponents) for _, exponents, _ in draws]) + moved[:, None, :]
        low, high = np.median(bounds, axis=0)
        for _ in range(2):  # coarse, then fine around the best
            axes = [np.linspace(low[axis], high[axis], _GRID) for axis in (0, 1)]
            spots = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
            best = spots[self._expected(draws, moved, spots).argmax()]
            step = 2 * (high - low) / _GRID
            low, high = np.maximum(best - step, low), np.minimum(best + step, high)
        return np.asarray(best)

    def _expected(self, draws: Sequence[_Draw], moved: Array, spots: Array) -> Array:
        """Mean over the draws of the expected accuracy at log batches and rates, (m, 2) less the middle."""
        each = (
            _with_failures(process.mean_at(self._places(spots - by)), cliff, spots - by)
            for (process, _, cliff), by in zip(draws, moved, strict=True)
        )
        return np.asarray(sum(each) / len(draws))

    def _at_batch(self, draws: Sequence[_Draw], moved: Array, batch: float, best: float) -> tuple[_Line, float]:
        """The best rates at a log batch, and the share of the draws that tried it.

        Args:
            best: the best log batch, for the accuracy given up.
        """
        rates, given_up, tried = [], [], []
        for draw, by in zip(draws, moved, strict=True):
            low, high = self._bounds(draw[1])
            line = np.linspace(low[1], high[1], _LINE)
            spots = np.vstack([np.column_stack([np.full(_LINE, log_batch - by[0]), line]) for log_batch in (batch, best)])
            drawn = self._drawn(draw, spots)
            here, there = self.scale.back(np.array([drawn[:_LINE].max(), drawn[_LINE:].max()]))
            rates.append(line[drawn[:_LINE].argmax()] + by[1])
            given_up.append(there - here)
            tried.append(low[0] - 1e-9 <= batch - by[0] <= high[0] + 1e-9)
        log_rates = np.array(rates)
        low, high = np.quantile(log_rates, [0.02, 0.98])
        axis = np.linspace(low, high, _LINE)
        expected = self._expected(draws, moved, np.column_stack([np.full(_LINE, batch), axis]))
        rate = _around(axis[expected.argmax()] + self.middle[1], log_rates + self.middle[1])
        return _Line(log_rates + self.middle[1], rate, Estimate.of(np.array(given_up))), float(np.mean(tried))

    def _weight_decay(self, target: Size, begun: Array, batches: Array, rates: Array) -> Estimate | None:
        """The decay that keeps the best trial's timescale, batch / (rate · decay · samples) as a share of the training.

        Args:
            begun: log batch and log rate that are best at `begin`.
        """
        decay = self.records[self.best].facts.weight_decay
        if not decay:
            return None
        per_parameter = (target.samples / target.parameters) / (self.begin.samples / self.begin.parameters)
        shorter = self.rng.uniform(0.0, _DECAY_POWER, len(batches)) * math.log(per_parameter)
        moved = (batches - begun[0]) - (rates - begun[1]) - math.log(target.samples / self.begin.samples) + shorter
        return _exp(moved + math.log(decay))

    def _edges(self, tops: Array, kept: Array) -> tuple[str, ...]:
        bounds = np.array([self._bounds(exponents) for exponents in kept])  # (kept, 2, 2)
        share = (tops - bounds[:, 0]) / (bounds[:, 1] - bounds[:, 0])
        found = []
        for column, name in enumerate(("effective_batch", "learning_rate")):
            if (share[:, column] < _MARGIN).mean() > _AT_EDGE:
                found.append(f"smallest {name}")
            elif (share[:, column] > 1 - _MARGIN).mean() > _AT_EDGE:
                found.append(f"largest {name}")
        return tuple(found)

    def _next(self, kept: Array, tops: Array, at: Array, target: Size, sizes: Sequence[Size]) -> NextStudy | None:
        """The study of one more size that would narrow the intervals most, by linear regression between draws.

        A study's best is taken to be known as well as this one's is, with as many trials, on top of its exponents.
        """
        spread = np.maximum(tops.var(axis=0) * len(self.tried) / NEXT_TRIALS, 0.01)
        found: list[tuple[float, NextStudy]] = []
        for times in _NEXT_SIZES:
            size = Size(self.begin.samples * times, self.begin.parameters)
            cost = NEXT_TRIALS * size.cost / target.cost
            near = any(max(other.samples, size.samples) < _NEXT_APART * min(other.samples, size.samples) for other in sizes)
            if cost > _NEXT_COST or size.samples > target.samples or near:
                continue
            there = tops + np.einsum("kij,j->ki", kept.reshape(-1, 2, 2), size.logs - self.begin.logs)
            told = at.var(axis=0) * (there.var(axis=0) + spread)
            explained = ((at - at.mean(axis=0)) * (there - there.mean(axis=0))).mean(axis=0) ** 2 / told
            explained -= (1 - explained) / (len(at) - 2)  # what so few draws explain by chance
            narrows = np.sqrt(np.clip(1 - explained, 0.01, 1.0)).tolist()
            if min(narrows) > _NEXT_NARROWS:
                continue
            middle = np.exp(np.median(there + self.middle, axis=0))
            study = NextStudy(size, float(middle[0]), float(middle[1]), NEXT_TRIALS, (narrows[0], narrows[1]), cost)
            found.append((math.log(narrows[0]) + math.log(narrows[1]), study))
        return min(found, key=lambda candidate: candidate[0])[1] if found else None


def _with_failures(values: Array, cliff: Cliff | None, spots: Array) -> Array:
    """Values at spots (m, 2), with what failures cost on average, (m,)."""
    if cliff is None:
        return values
    chance = cliff.chance(spots)
    return np.asarray((1 - chance) * values + chance * _FAILED)


def _weighted(draws: Array, weights: Array) -> Estimate:
    order = draws.argsort()
    low, value, high = np.interp((0.05, 0.5, 0.95), np.cumsum(weights[order]), draws[order])
    return Estimate(float(value), float(low), float(high))


def _around(log: float, draws: Array) -> Estimate:
    """A value from its logarithm, with the interval of draws, which it may be at the end of."""
    low, high = np.quantile(draws, [0.05, 0.95])
    return Estimate(math.exp(log), math.exp(min(low, log)), math.exp(max(high, log)))


def _exp(logs: Array) -> Estimate:
    found = Estimate.of(logs)
    return Estimate(math.exp(found.value), math.exp(found.low), math.exp(found.high))
