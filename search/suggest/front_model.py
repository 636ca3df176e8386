"""The sampler's models of time and score, and the acquisition function computed from them.

Gaussian processes model score and log seconds (or a law knows those). Expected hypervolume improvement then has a closed form:
the front cuts the time axis into strips with a level each, and in every strip that a candidate is fast enough for, its
improvement is the amount by which it is expected to exceed that level. Seconds stand for whatever the study's measure of speed
is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from scipy.linalg import block_diag
from scipy.special import ndtr

from ..analysis.gaussian_process import Array, Bowls, GaussianProcess, Plain, Structure, conditioned, fitted
from ..analysis.score_scale import ScoreScale
from .pausing import GapKernel
from .priors.batch_rate_prior import BatchRate, ScorePrior, SecondsPrior
from .priors.optimum_prior import OptimumPrior
from .space_transform import SpaceTransform
from .trial_history import MOST_POINTS, Observations, PausedTrials, front_places

# Candidates evaluated: spread over the space, then around the best, in several rounds of shrinking radius.
_SPREAD, _AROUND, _ROUNDS = 1024, 256, 3
# Candidates evaluated at a time: with all at once, their matrices leave the cache.
_BLOCK = 256
# Candidates evaluated at once when points are chosen after the first; as many are added around the best, within this radius.
_AGAIN, _AGAIN_RADIUS = 128, 0.03
# L-BFGS steps of a fit from the priors, and from the previous fit, which one more point changes little.
_FIRST_STEPS, _MORE_STEPS = 40, 8
# Trials from which the previous fit is a good start; before, one more may change the picture.
_WARM_START_FROM = 60
# Beyond MOST_POINTS, length scales are refitted when the number of ended trials has grown by this factor: half of an ask was
# fitting.
_REFIT_GROWTH = 1.02
# The reference point's score: this many times as far below the best as the median is, or the worst seen.
_WORST = 20.0
# Where candidates are ranked: the share of the front's range below its best within which scores count linearly, further down by
# their logarithm; and how far beyond the slowest candidate, in log seconds, the last strip ends.
_NEAR, _LATER = 0.05, math.log(2.0)
# Points where training is less likely to finish than this are proposed only if there are no others.
LEAST_PROBABILITY = 0.5
# Nodes and weights of Gauss-Hermite quadrature, for expectations of what is normal on the `ScoreScale`.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(20)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()

# Where the front's strips end on the log axis of seconds, and the level of each, both (strips,).
Strips = tuple[Array, Array]
Scale = Callable[[Array], Array]
# Log length scales and log noise variance of the last fit of each process, and how many trials had ended.
Fits = dict[str, tuple[Array, float, int]]
# Logs of what training takes at points (n, width), as (n,), by a law; NaN where it knows none; None without a law.
KnownLogTaken = Callable[[Array], "Array | None"]


def preload() -> None:
    """Import what `FrontModel.best` needs, which takes a second: better while trials train than while one is asked for."""
    import scipy.stats  # noqa: F401


class FrontModel:
    """Models of what training takes and of score, and the expected hypervolume improvement of points of the cube.

    Args:
        observations: the trials to condition on.
        last: fits to start from; updated in place.
        ended: trials that have ended in all, of which `observations` may be a selection.
        place: of batch and rate in the space, where they are searched; then what is known of them is the models' prior.
        floor: scores below it are worth nothing, once a trial reaches it.
    """

    def __init__(
        self,
        observations: Observations,
        last: Fits,
        ended: int = 0,
        place: BatchRate | None = None,
        floor: float = -math.inf,
    ) -> None:
        paused = observations.paused
        self.log_taken = np.log(np.append(observations.taken, paused.seconds))
        self.scale = ScoreScale(np.append(observations.score, paused.score))
        self.points = np.vstack([observations.points, paused.points])
        self.on_front = np.append(observations.own, np.zeros(len(paused), dtype=bool))
        self.most = -math.inf  # log of the most that a candidate takes, where the last strip ends
        self._last, self._ended, self._floor = last, ended, floor
        # Of one or two parameters, the vague prior found more of Zeus's batches.
        width = self.points.shape[1]
        self._structures: dict[str, Structure] = {"score": Bowls(width)} if width > 2 else {}
        if place is not None:
            self._structures = {"seconds": SecondsPrior(place), "score": ScorePrior(place)}
        self._set_score(observations, place)
        self.score_model = self._fit("score", self.score, self.own_noise)
        # Where a law knows what all trials take, it is never fitted.
        self._taken_model: GaussianProcess | None = None
        self.success = success_model(
            observations, self._current_fit("success"), self._start("success", len(self.points))
        )
        if self.success is not None:
            self._store_fit("success", self.success)

    def _set_score(self, observations: Observations, place: BatchRate | None) -> None:
        """Values and noise of the score's process: as predicted for stopped trials, with the gap for paused ones."""
        paused = observations.paused
        at_end = self.scale.of(observations.score)
        up, down = (self.scale.of(observations.score + std) for std in (observations.std, -observations.std))
        variance = np.where(observations.std > 0, ((up - down) / 2) ** 2, 0.0)
        self.score, self.own_noise = at_end, np.diag(variance)
        if not len(paused):
            return
        measured = np.isfinite(observations.rung_score)
        gaps = at_end[measured] - self.scale.of(observations.rung_score[measured])
        mean, covariance = gap_kernel(place, self._last, self.points.shape[1]).predicted(
            observations.points[measured],
            gaps,
            observations.rung_fractions[measured],
            paused.points,
            paused.fractions,
        )
        self.score = np.append(at_end, self.scale.of(paused.score) + mean)
        self.own_noise = block_diag(self.own_noise, covariance)

    def _size(self, name: str) -> int:
        """The number of free parameters of a process, beside its noise."""
        return len(self._structures[name].means) if name in self._structures else self.points.shape[1]

    def _current_fit(self, name: str) -> tuple[Array, float] | None:
        """The last fit of a process, where there are so many trials that it is still good."""
        scales, noise, ended = self._last.get(name, (np.empty(0), 0.0, 0))
        current = len(scales) == self._size(name) and MOST_POINTS < self._ended < _REFIT_GROWTH * ended
        return (scales, noise) if current else None

    def _start(self, name: str, count: int) -> tuple[Array, float] | None:
        """The last fit, from which to start a fit to `count` trials; None if they are so few that one more changes much."""
        scales, noise, _ = self._last.get(name, (np.empty(0), 0.0, 0))
        return (scales, noise) if len(scales) == self._size(name) and count >= _WARM_START_FROM else None

    def _store_fit(self, name: str, process: GaussianProcess) -> None:
        if self._current_fit(name) is None:
            self._last[name] = process.free, process.log_noise, self._ended

    def _fit(self, name: str, values: Array, own_noise: Array | None = None) -> GaussianProcess:
        structure, points = self._structures.get(name), self.points[: len(values)]
        if (known := self._current_fit(name)) is not None:
            mean, std = float(values.mean()), float(values.std()) or 1.0
            return conditioned(points, values, *known, mean, std, own_noise, structure=structure)
        start = self._start(name, len(points))
        process = fitted(
            points, values, start, _MORE_STEPS if start else _FIRST_STEPS, own_noise, structure=structure
        )
        self._store_fit(name, process)
        return process

    @property
    def taken_model(self) -> GaussianProcess:
        """The process of the log of what training takes, conditioned like that of score."""
        if self._taken_model is None:
            observed = len(self.score)
            self._taken_model = self._fit("seconds", self.log_taken[:observed]).believing(
                self.points[observed:]
            )
        return self._taken_model

    def condition_on_pending(self, pending: Array, known: KnownLogTaken) -> None:
        """Impute running trials at their predicted outcomes, without noise, so that no near copy of them is proposed.

        Source: the kriging believer of Ginsbourger, Le Riche & Carraro 2010, https://doi.org/10.1007/978-3-642-10701-6_6

        Args:
            pending: (m, width).
        """
        by_law = known(self.points)
        if by_law is not None:
            self.log_taken = np.where(np.isnan(by_law), self.log_taken, by_law)
        if len(pending):
            self.believe(pending, known(pending))

    def believe(self, points: Array, log_taken: Array | None) -> None:
        """Treat points (m, width) as trials with their predicted outcomes; `log_taken` (m,) is by a law, if any."""
        expected = self._log_taken_at(points, log_taken)
        self.points = np.vstack([self.points, points])
        self.on_front = np.append(self.on_front, np.ones(len(points), dtype=bool))
        self.log_taken = np.append(self.log_taken, expected)
        self.score_model = self.score_model.believing(points)
        if self._taken_model is not None:
            self._taken_model = self._taken_model.believing(points)

    def expected_hypervolume_improvement(self, points: Array, log_taken: Array | None) -> Array:
        """Expected hypervolume improvement at points, over log seconds t and score a.

            EHVI(x) = sum_i T_i(x) · E[(a(x) - l_i)+],  T_i(x) = E[(c_i - t(x))+] - E[(c_{i-1} - t(x))+]

        where the front's strips end at times c_i with levels l_i, and t(x), a(x) are the models' independent posteriors. Score
        is normal on the `ScoreScale`; its expectation is taken by Gauss-Hermite quadrature on the plain scale.

        Args:
            points: (m, width).
            log_taken: (m,) by a law, NaN for points that cannot be planned; None: by the model.

        Returns:
            (m,); -1 for points that cannot be planned. Weighted by the probability that training finishes.
        """
        return self._improvements(self._strips(), points, log_taken)

    def worth(self, points: Array, log_taken: Array | None) -> Array:
        """The same of scores on the scale of `nearness`, which candidates are ranked by: people take the fastest setting within
        so much of the best, so a front is worth what it has near its best score.
        """
        ends, levels = self._strips(floored=False)
        later = np.append(ends[:-1], ends[-1] + _LATER)
        return self._improvements(
            (later, self._floored(levels)), points, log_taken, partial(nearness, levels=levels)
        )

    def _improvements(
        self, strips: Strips, points: Array, log_taken: Array | None, on_scale: Scale = np.asarray
    ) -> Array:
        blocks = [slice(begin, begin + _BLOCK) for begin in range(0, len(points), _BLOCK)]
        taken = (None if log_taken is None else log_taken[block] for block in blocks)
        parts = [
            self._improvement(strips, points[each], some, on_scale)
            for each, some in zip(blocks, taken, strict=True)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _improvement(self, strips: Strips, points: Array, log_taken: Array | None, on_scale: Scale) -> Array:
        ends, levels = strips
        mean, std = self.score_model.predict(points)
        if log_taken is None:
            taken, taken_std = self.taken_model.predict(points)
        else:
            taken, taken_std = log_taken, np.full(len(points), 1e-9)
        # What is expected to be left below each cut; a strip's width is the difference of two.
        below = _expected_improvement(ends[None, :] - taken[:, None], taken_std[:, None])
        widths = np.diff(below, axis=1, prepend=0.0)
        # (m, nodes), as score.
        drawn = on_scale(self.scale.back(mean[:, None] + std[:, None] * _NODES[None, :]))
        each, place = np.unique(levels, return_inverse=True)
        above = drawn[:, None, :] - on_scale(each)[None, :, None]
        rises = np.maximum(above, 0.0, out=above) @ _WEIGHTS
        improvement = np.nan_to_num((widths * rises[:, place]).sum(axis=1), nan=-1.0)
        if self.success is not None:
            success = np.clip(self.success.mean_at(points), 0.01, 1.0)
            # Where training probably fails, even the largest improvement ranks after every point that should finish.
            improvement = np.where(
                improvement < 0,
                improvement,
                improvement * success * np.where(success < LEAST_PROBABILITY, 1e-12, 1.0),
            )
        return np.asarray(improvement)

    def _floored(self, levels: Array) -> Array:
        return np.maximum(levels, self._floor) if levels.max() > self._floor else levels

    def _strips(self, *, floored: bool = True) -> Strips:
        """Where strips end, and the level of each, from the models' noise-free front: the best score of what takes no more than
        the strip's beginning.
        """
        mean = self.scale.back(self.score_model.mean_at(self.points))
        # A diverging loss as reference point would make everything that is merely faster look valuable.
        worst = max(float(np.min(mean)), self.scale.best - _WORST * self.scale.unit)
        counts = self.on_front & (mean > worst)
        members = np.flatnonzero(counts)[front_places(self.log_taken[counts], mean[counts])]
        begins, place = np.unique(self.log_taken[members], return_inverse=True)
        ends = np.append(begins, max(self.most, self.log_taken.max()) + 0.05)
        levels = np.full(len(ends), worst)
        np.maximum.at(levels, place + 1, mean[members])
        levels = np.maximum.accumulate(levels)
        return ends, self._floored(levels) if floored else levels

    def hypervolume(self) -> float:
        """The front's hypervolume over the log of what training takes, up to the most that a candidate takes (after `best`),
        and score above the worst.
        """
        ends, levels = self._strips()
        return float((levels - levels[0])[1:] @ np.diff(ends))

    def best(
        self,
        transform: SpaceTransform,
        known: KnownLogTaken,
        rng: np.random.Generator,
        cost: Callable[[Array], Array] | None = None,
        prior: OptimumPrior | None = None,
    ) -> Iterator[tuple[Array, float]]:
        """The points (width,) of largest `worth` among many candidates, and that.

        One after the other, each given those before at their predicted outcomes.

        Args:
            cost: of points, by which their worths are divided.
            prior: of the optimum, by whose weight they are multiplied.
        """

        strength = (
            0.0 if prior is None else prior.strength(self.points[: len(self.score)], self.score, self._ended)
        )

        def worth_of(points: Array, times: Array | None) -> tuple[Array, Array]:
            improvement = self.worth(points, times)
            worth = improvement if cost is None else improvement / cost(points)
            if prior is not None:
                worth = worth * prior.weights(points, strength)
            return improvement, np.where(improvement < 0, improvement, worth)

        # It takes a second to import, and the first points do without it: other trials are running by now.
        from scipy.stats import qmc

        spread = qmc.Sobol(transform.width, scramble=True, rng=rng).random(_SPREAD)
        if prior is not None:
            near = round(_SPREAD / 2 * strength)
            spread[:near] = prior.drawn(spread[:near], rng)
        spread = transform.round_to_feasible(spread)
        times = taken = known(spread)
        if taken is None or np.isnan(taken).all():
            taken = self._log_taken_at(spread, None)
        # The last strip ends at the slowest candidate: points better and slower than the front improve it up to there.
        self.most = float(np.nanmax(taken))
        candidates = _Candidates(worth_of, spread, times)

        def add_around(points: Array, count: int, radius: float) -> None:
            near = transform.round_to_feasible(_perturb(points, count, radius, rng))
            candidates.add(near, known(near))

        add_around(self.points[np.argsort(-self.margin_to_front())[:8]], _AROUND, 0.1)
        for part in range(_ROUNDS):
            add_around(candidates.top(8), _AROUND, 0.1 / 3**part)
        while True:
            chosen, improvement = candidates.best()
            yield chosen, improvement
            self.believe(chosen[None, :], known(chosen[None, :]))
            candidates.evaluate_again()
            add_around(candidates.top(8), _AGAIN, _AGAIN_RADIUS)

    def seconds_at(self, points: Array, log_taken: Array | None) -> Array:
        """Seconds of full trainings at points (m, width), as (m,): by the law, or where it knows none by the model."""
        return np.asarray(np.exp(self._log_taken_at(points, log_taken)))

    def _log_taken_at(self, points: Array, log_taken: Array | None) -> Array:
        if log_taken is not None and not np.isnan(log_taken).any():
            return log_taken
        by_model = self.taken_model.mean_at(points)
        return by_model if log_taken is None else np.where(np.isnan(log_taken), by_model, log_taken)

    def paused_worth_more(self, paused: PausedTrials, known: KnownLogTaken, worth: float) -> int | None:
        """The waiting trial of the largest worth per second of the rest of its training; None if none is above `worth`.

        Args:
            worth: per second.
        """
        times = known(paused.points)
        left_s = self.seconds_at(paused.points, times) * (1 - paused.fractions)
        each = np.where(paused.waiting, self.worth(paused.points, times) / left_s, -math.inf)
        best = int(np.argmax(each))
        return int(paused.numbers[best]) if each[best] > worth else None

    def margin_to_front(self) -> Array:
        """Score of each trial minus its strip's level, (n,): 0 on the front, negative below."""
        mean = self.scale.back(self.score_model.mean_at(self.points))
        ends, levels = self._strips()
        return np.asarray(mean - levels[np.searchsorted(ends, self.log_taken, side="right")])


def nearness(score: Array, levels: Array) -> Array:
    """How near scores come to the front's best: halving what is missing is worth as much anywhere, down to a share of the
    front's range; beyond the best it goes on with the slope there.

        -log(d + ε) for d > 0, -log ε - d / ε otherwise;  d = min(1, (best - score) / range)

    Args:
        levels: of the front's strips.
    """
    best, members = float(levels.max()), np.unique(levels)[1:]
    lowest = float(members[0] if len(members) > 1 else levels.min())
    missing = np.minimum((best - score) / max(best - lowest, 1e-9 * max(abs(best), 1.0)), 1.0)
    return np.where(
        missing > 0, -np.log(np.maximum(missing, 0.0) + _NEAR), -math.log(_NEAR) - missing / _NEAR
    )


class _Candidates:
    """Points with their expected improvements, and what they are worth.

    Args:
        worth_of: improvements and worths, two of (n,), of points (n, width) and the logs of what they take by law.
        points: (n, width), the first ones; `times`: those logs, None where there is no law.
    """

    def __init__(
        self,
        worth_of: Callable[[Array, Array | None], tuple[Array, Array]],
        points: Array,
        times: Array | None,
    ) -> None:
        self._worth_of, self._points, self._times = worth_of, points, times
        self._improvement, self._worth = worth_of(points, times)

    def add(self, points: Array, times: Array | None) -> None:
        self._points = np.vstack([self._points, points])
        if self._times is not None and times is not None:
            self._times = np.append(self._times, times)
        new = self._worth_of(points, times)
        self._improvement, self._worth = np.append(self._improvement, new[0]), np.append(self._worth, new[1])

    def top(self, count: int) -> Array:
        """The `count` points that are worth most, (count, width)."""
        return np.asarray(self._points[np.argsort(-self._worth)[:count]])

    def best(self) -> tuple[Array, float]:
        """The point (width,) that is worth most, and its improvement."""
        best = int(np.argmax(self._worth))
        return self._points[best], float(self._improvement[best])

    def evaluate_again(self) -> None:
        """Re-evaluate the candidates that may be worth most, after one more point has been believed.

        That hardly makes any point worth more: variances are smaller and the front is higher. So only points that were worth
        more before than the best is now are evaluated.
        """
        order, done = np.argsort(-self._worth), 0
        while done < len(order) and (not done or self._worth[order[done]] > self._worth[order[:done]].max()):
            part = order[done : done + _AGAIN]
            self._improvement[part], self._worth[part] = self._worth_of(
                self._points[part], None if self._times is None else self._times[part]
            )
            done += len(part)


def success_model(
    observations: Observations,
    known: tuple[Array, float] | None = None,
    start: tuple[Array, float] | None = None,
) -> GaussianProcess | None:
    """A model of the probability that training finishes; None where it never failed.

    Args:
        known: log length scales and log noise variance of an earlier fit, else they are fitted.
        start: those that the fit starts from; None: the prior's.
    """
    if not len(observations.failed):
        return None
    tried = np.vstack([observations.points, observations.failed])
    ended = np.append(np.ones(len(observations.points)), np.zeros(len(observations.failed)))
    # Prior mean and std far from all trials: training is expected to finish, and few failures say nothing of remote points.
    prior = 1.0, 0.5
    if known is not None:
        return conditioned(tried, ended, *known, *prior)
    steps = _MORE_STEPS if start else _FIRST_STEPS
    return fitted(tried, ended, start, steps, prior=prior, structure=Plain(tried.shape[1], math.log(0.4)))


def gap_kernel(place: BatchRate | None, last: Fits, width: int) -> GapKernel:
    """The kernel of gaps over points (n, width), with the score's length scales as last fitted."""
    structure: Structure = Plain(width) if place is None else ScorePrior(place)
    free = last["score"][0] if "score" in last else np.empty(0)
    return GapKernel(
        structure,
        free if len(free) == len(structure.means) else structure.means,
        None if place is None else place.rate,
    )


def _perturb(points: Array, count: int, std: float, rng: np.random.Generator) -> Array:
    """`count` points around the given ones (n, width), each coordinate moved with probability one half."""
    chosen = points[rng.integers(len(points), size=count)]
    moves = rng.normal(0.0, std, chosen.shape) * (rng.random(chosen.shape) < 0.5)
    return np.clip(chosen + moves, 0.0, 1.0)


def _expected_improvement(mean: Array, std: Array) -> Array:
    """E[max(0, X)] of a normal X (Jones, Schonlau & Welch 1998, https://doi.org/10.1023/A:1008306431147)."""
    z = mean / std
    return np.asarray(mean * ndtr(z) + std * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))
