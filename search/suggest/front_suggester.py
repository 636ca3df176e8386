"""FrontSuggester: propose the trial that is expected to be worth most at its time.

The models behind it are in `front_model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution

from ...spaces.record import TrialRecord
from ...spaces.study.goals import Metric
from ..analysis.gaussian_process import Array, GaussianProcess, single_threaded_blas
from .front_model import LEAST_PROBABILITY, Fits, FrontModel, KnownLogTaken, gap_kernel, success_model
from .pausing import PauseAtRung
from .priors.batch_rate_prior import ANCHORS, DRAWN, BatchRate, first_point, first_points
from .priors.doubt import Doubt
from .priors.optimum_prior import OptimumPrior
from .space_transform import SpaceTransform
from .stopping import EarlyStopping
from .suggester import Proposal, Suggester
from .trial_history import MOST_POINTS, Observations, PriorTrial, TrialHistory

# Most random points before the model is used; 15 of them in 13 dimensions delayed the rest (docs/log.md).
_FIRST = 5
# Where time limits the search, worths are divided by seconds to this power: divided by plain seconds, it would try only fast
# trials for a long time (docs/decisions/0035, 0036, 0077).
_PER_TIME = 0.75
# A paused trial is worth resuming above this share of the best new one's improvement per second, which is the luckiest of
# thousands and will mostly be paused itself.
_NEW = 0.5


class FrontSuggester(Suggester):
    """Expected hypervolume improvement over seconds (first objective) and score (second).

    Trials that ended without values teach where training fails. One that was stopped early counts as an observation of the
    prediction for its end, with that prediction's noise; one that is paused, likewise by what its rest is expected to add.

    Args:
        space: what is searched.
        conditions: by parameter of the space, the values of others with which it applies; it has no value in other trials.
        expected: by parameter, its best value as far as the author of the study knows, and the upper end of where it lies nine
            times in ten.
        known_seconds: seconds of parameters, where a law knows them beforehand; NaN for what cannot be planned, which is
            never proposed.
        prior_trials: trials of earlier studies: the models learn from them, the front does not contain them.
        doubted: those may have trained something else, so they are believed as far as they predict this study's own.
        scaled: a rule scales `reference_rate` with `effective_batch`, so that the best one is expected not to move with it.
            Only for spaces with `effective_batch` and `reference_rate` or `learning_rate`, both on log scales: parameters of
            other names have a vague prior.
        by_time: the search is limited by time rather than by a number of trials, so fast trials are worth more.
        pauses: trials are paused at the rung, so two of the first are at a high and a low rate: their curves show early
            whether curves cross.
        floor: scores below it are worth nothing, once a trial reaches it.
        seed: of the random points and of the candidates; together with a trial's number.
    """

    def __init__(
        self,
        space: Mapping[str, BaseDistribution],
        *,
        conditions: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
        expected: Mapping[str, tuple[float, float]] | None = None,
        known_seconds: Callable[[Mapping[str, Any]], float] | None = None,
        prior_trials: Sequence[PriorTrial] = (),
        doubted: bool = False,
        scaled: bool = True,
        by_time: bool = False,
        pauses: bool = False,
        floor: float = -math.inf,
        seed: int = 0,
    ) -> None:
        searched = {name: distribution for name, distribution in space.items() if not distribution.single()}
        self.transform = SpaceTransform(searched, conditions)
        self._only = {
            name: _only_value(distribution) for name, distribution in space.items() if distribution.single()
        }
        self._history = TrialHistory(self.transform)
        self._by_time, self._pauses = by_time, pauses
        self._prior = OptimumPrior.of(self.transform, expected or {})
        self._place = BatchRate.of(self.transform, scaled)
        self._prior_trials = tuple(prior_trials)
        self._doubt = Doubt() if doubted else None
        self._known_seconds = known_seconds
        self._seed, self._floor = seed, floor
        self._last: Fits = {}  # the previous fits, to start the next from

    def suggest(
        self, trials: Sequence[TrialRecord], count: int = 1, *, ready: Sequence[Mapping[str, Any]] = ()
    ) -> Sequence[Proposal]:
        if not any(trial.is_paused for trial in trials):
            return self.proposed(trials, len(trials) + len(ready), count, ready=ready)[0]
        proposed, number = self.proposed(trials, len(trials))
        return proposed if number is None else [number]

    def early_stopping(
        self, kind: str, metric: Metric, trials: Sequence[TrialRecord], *, pauses: bool
    ) -> EarlyStopping:
        def is_new_ground(number: int, others: Collection[int]) -> bool:
            transform = self.transform
            kernel = gap_kernel(self._place, self._last, transform.width)
            known = np.array([transform.encode(trials[other].parameters) for other in others]).reshape(
                -1, transform.width
            )
            return kernel.is_unknown(transform.encode(trials[number].parameters), known)

        return (
            PauseAtRung(metric, is_new_ground)
            if pauses and kind != "none"
            else super().early_stopping(kind, metric, trials, pauses=False)
        )

    def proposed(
        self,
        trials: Sequence[TrialRecord],
        number: int,
        count: int = 1,
        *,
        ready: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[list[dict[str, Any]], int | None]:
        """Settings to try from trial `number` on, by one fit, each given those before; and a paused trial worth more."""
        transform = self.transform
        if not transform.space:
            return [dict(self._only) for _ in range(count)], None
        observations = self._observations(trials, ready)
        known = self._known(self.longest_s)
        rngs = (
            np.random.default_rng((self._seed, trial_number))
            for trial_number in range(number, number + count)
        )
        if self._too_few(observations):
            begun = len(observations.points) + len(observations.paused) + len(observations.pending)
            points = [
                self._first(observations, known, rng, begun + offset) for offset, rng in enumerate(rngs)
            ]
            return [transform.decode(point) | self._only for point in points], None
        with single_threaded_blas():
            model = self._model(observations, known)
            best = list(islice(self._best(model, known, next(rngs)), count))
            resumed, paused = None, observations.subset_near_front(MOST_POINTS).paused
            if paused.waiting.any():
                point, improvement = best[0]
                worth = improvement / float(model.seconds_at(point[None, :], known(point[None, :]))[0])
                resumed = model.paused_worth_more(paused, known, _NEW * worth)
        return [transform.decode(point) | self._only for point, _ in best], resumed

    def expected_gain(self, trials: Sequence[TrialRecord], more: int) -> float | None:
        """The share by which so many more trials are expected to enlarge the front's hypervolume; None if it is unknown.

        The hypervolume is over log seconds and score, as the models see it; running trials count as predicted.
        """
        transform = self.transform
        if not transform.space:
            return None
        observations = self._observations(trials)
        if self._too_few(observations):
            return None
        known = self._known()
        with single_threaded_blas():
            model = self._model(observations, known)
            best = self._best(model, known, np.random.default_rng((self._seed, len(trials))))
            gain = 0.0
            now = 0.0
            for point, _ in islice(best, more):
                now = now or model.hypervolume()  # the first has set where the last strip ends
                gain += float(
                    model.expected_hypervolume_improvement(point[None, :], known(point[None, :]))[0]
                )
        return gain / now if now > 0 else None

    def _observations(
        self, trials: Sequence[TrialRecord], ready: Sequence[Mapping[str, Any]] = ()
    ) -> Observations:
        observations = self._history.observations(trials, self._prior_trials, ready)
        return observations if self._doubt is None else self._doubt.of(observations)

    def _too_few(self, observations: Observations) -> bool:
        """Whether the next points are among the first, which no model chooses."""
        place = self._place
        known = self._known_seconds is not None
        first = min(self.transform.parameters + 2, _FIRST) if place is None else first_points(known)
        first += ANCHORS if place is not None and self._pauses else 0
        return len(observations.points) + len(observations.paused) < first

    def _model(self, observations: Observations, known: KnownLogTaken) -> FrontModel:
        ended = len(observations.points) + len(observations.failed) + len(observations.paused)
        used = observations.subset_near_front(MOST_POINTS)
        model = FrontModel(used, self._last, ended, self._place, self._floor)
        model.condition_on_pending(observations.pending, known)
        return model

    def _best(
        self, model: FrontModel, known: KnownLogTaken, rng: np.random.Generator
    ) -> Iterator[tuple[Array, float]]:
        return model.best(self.transform, known, rng, self._cost(model, known), self._prior)

    def _first(
        self,
        observations: Observations,
        known: KnownLogTaken,
        rng: np.random.Generator,
        begun: int,
    ) -> Array:
        """A point (width,) before there is a model, after `begun` others."""
        place, prior, points = self._place, self._prior, rng.random((DRAWN, self.transform.width))
        if begun % 2:
            prior = None  # every second one lies anywhere, since it may be wrong
        if prior is not None:
            points = prior.drawn(points, rng)
        if place is None or len(observations.failed):
            return _random_point(points, known, success_model(observations))
        points, times = self.transform.round_to_feasible(points), None
        taken = known(points)
        if taken is not None and not np.isnan(taken).all():
            planned = ~np.isnan(taken)
            points, times = points[planned], taken[planned]
        chosen = first_point(
            place,
            points,
            times,
            begun,
            self.transform.parameters,
            rng,
            anchors=self._pauses,
            on_ridge=prior is None or not prior.knows(place.rate),
        )
        return np.asarray(self.transform.round_to_feasible(chosen[None, :])[0])

    def _cost(self, model: FrontModel, known: KnownLogTaken) -> Callable[[Array], Array] | None:
        """What the improvements of points (n, width) are divided by, (n,); None where every trial costs the same."""
        if self._by_time:
            return lambda points: (model.seconds_at(points, known(points)) + self.overhead) ** _PER_TIME
        return None

    def _known(self, longest_s: float = math.inf) -> KnownLogTaken:
        """Logs of what training takes at points of the cube, by the law; None where there is none.

        Args:
            longest_s: what takes longer counts as what cannot be planned.
        """
        law, transform, only = self._known_seconds, self.transform, self._only
        if law is None:
            return lambda points: None

        def log_taken(points: Array) -> Array | None:
            taken = np.array(
                [law({**only, **values}) for values in transform.decode_many(points)], dtype=float
            )
            planned = np.isfinite(taken) & (taken > 0) & (taken <= longest_s)
            return np.asarray(np.log(np.where(planned, taken, math.nan)))

        return log_taken


def _only_value(distribution: BaseDistribution) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[0]
    return distribution.low  # type: ignore[attr-defined]


def _random_point(points: Array, known: KnownLogTaken, success: GaussianProcess | None) -> Array:
    """One of random points (n, width) that can be planned, and where training is not known to fail.

    Sobol points in their place found no more (docs/log.md, "the search").
    """
    taken = known(points)
    if taken is not None and not np.isnan(taken).all():
        points = points[~np.isnan(taken)]
    if success is None:
        return np.asarray(points[0])
    probability = np.minimum(success.mean_at(points), LEAST_PROBABILITY)
    return np.asarray(points[int(np.argmax(probability))])
