"""FrontSampler: propose the trial with the largest expected hypervolume improvement at its time.

It is an ordinary Optuna sampler, usable in plain Optuna too. The models behind it are in `front_model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial

from ..analysis.gaussian_process import Array, GaussianProcess, single_threaded_blas
from .batch_rate_prior import ANCHORS, DRAWN, BatchRate, first_point, first_points
from .front_model import LEAST_PROBABILITY, Fits, FrontModel, KnownLogTaken, gap_kernel, success_model
from .space_transform import SpaceTransform
from .trial_history import MOST_POINTS, Observations, PriorTrial, TrialHistory

# Random points before the model is used: this many more than there are parameters.
_FIRST = 2
# Where time or samples limit the search, improvements are divided by them to these powers: plainly per second, it would look
# at fast trials alone for long (docs/decisions/0035, 0036).
_PER_TIME = 0.5
# A paused trial is worth resuming above this share of the best new one's improvement per second, which is the luckiest of
# thousands and will mostly be paused itself.
_NEW = 0.5


class FrontSampler(BaseSampler):
    """Expected hypervolume improvement over seconds (first objective) and accuracy (second).

    Trials that ended without values teach where training fails. A pruned trial with the user attributes `expected_seconds`,
    `expected_accuracy` and `expected_std` (the prediction when it was stopped) counts as an observation with that noise.
    A running trial with the user attributes `paused`, `rung_fraction`, `rung_accuracy` and `expected_seconds` is one that was
    left off there; `paused_or_new` says when it is worth going on with.
    A third objective, minimized and above 0, is another measure of what training takes, such as energy. Studies with other
    objectives use Optuna's multivariate TPE.

    Args:
        space: what is searched; not given, the parameters that finished trials have in common.
        conditions: by parameter of the space, the values of others with which it applies; it has no value in other trials.
        known_seconds: seconds of parameters, where a law knows them beforehand; NaN for what cannot be planned, which is
            never proposed. With three objectives, seconds and the other measure.
        prior_trials: trials of earlier studies: the models learn from them, the front does not contain them.
        scaled: a rule scales `reference_rate` with `effective_batch`, so that the best one is expected not to move with it.
            Only for spaces with `effective_batch` and `reference_rate` or `learning_rate`, both on log scales: parameters of
            other names have a vague prior.
        by_time: the search is limited by time rather than by a number of trials, so fast trials are worth more.
        branches: each trial gives the results of shorter ones too (`epochs` halved, as often as the space has it), so it is
            worth what all of them are; longer trials cost more, whatever limits the search.
        pauses: trials are paused at the rung, so two of the first are at a high and a low rate: their curves show early
            whether curves cross.
        seed: of the random points and of the candidates.
    """

    def __init__(
        self,
        *,
        space: Mapping[str, BaseDistribution] | None = None,
        conditions: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
        known_seconds: Callable[[Mapping[str, Any]], float | tuple[float, ...]] | None = None,
        prior_trials: Sequence[PriorTrial] = (),
        scaled: bool = True,
        by_time: bool = False,
        pauses: bool = False,
        seed: int = 0,
    ) -> None:
        self._by_time, self._pauses = by_time, pauses
        self._scaled = scaled
        self._prior_trials = tuple(prior_trials)
        self._space = dict(space) if space is not None else None
        self._conditions = dict(conditions or {})
        self._known_seconds = known_seconds
        self._seed = seed
        self._independent = RandomSampler(seed=seed)
        self._common = IntersectionSearchSpace()
        self._other_objectives = TPESampler(multivariate=True, constant_liar=True, seed=seed)
        self._last: Fits = {}  # the previous fits, to start the next from
        self._histories: WeakKeyDictionary[Study, TrialHistory] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_histories"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_histories": WeakKeyDictionary()}

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._searched(study)

    def _searched(self, study: Study) -> dict[str, BaseDistribution]:
        """The space, without parameters of one value."""
        space = self._space if self._space is not None else self._common.calculate(study)
        return {name: distribution for name, distribution in space.items() if not distribution.single()}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        proposed, _ = self._proposed(study, trial.number, search_space)
        return proposed[0] if proposed else self._by_tpe(study, trial)

    def proposals(self, study: Study, count: int, *, others: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        """Parameters of the next `count` trials by one fit, each given those before; empty where the objectives are not ours.

        Args:
            others: parameters proposed earlier, of trials that have not begun.
        """
        asked = len(study.get_trials(deepcopy=False)) + len(others)
        return self._proposed(study, asked, self._searched(study), count, others=others)[0]

    def paused_or_new(self, study: Study, *, or_new: bool = True) -> tuple[int | None, dict[str, Any] | None]:
        """The number of the paused trial that is worth more in a second than the best new one; else the new one's parameters.

        Args:
            or_new: a new trial may be started; else the best paused one is resumed, whatever it is worth.
        """
        asked = len(study.get_trials(deepcopy=False))
        proposed, resumed = self._proposed(study, asked, self._searched(study), or_new=or_new)
        return resumed, proposed[0] if proposed and resumed is None else None

    def is_new_ground(self, study: Study, number: int, others: Collection[int]) -> bool:
        """Whether too little is known of how a trial's curve goes on, from those `others` that go on, to pause it."""
        history = self._histories.get(study)
        if history is None:
            return True
        transform, trials = history.transform, study.get_trials(deepcopy=False)
        kernel = gap_kernel(BatchRate.of(transform, self._scaled), self._last, transform.width)
        known = np.array([transform.encode(trials[one].params) for one in others]).reshape(-1, transform.width)
        return kernel.is_unknown(transform.encode(trials[number].params), known)

    def _proposed(
        self,
        study: Study,
        number: int,
        search_space: dict[str, BaseDistribution],
        count: int = 1,
        *,
        others: Sequence[Mapping[str, Any]] = (),
        or_new: bool = True,
    ) -> tuple[list[dict[str, Any]], int | None]:
        """What to try from trial `number` on, empty where the objectives are others'; and the paused trial worth more."""
        if not search_space:
            return [{} for _ in range(count)], None
        transform = SpaceTransform(search_space, self._conditions)
        observations = self._observations(study, transform, number, others)
        if observations is None:
            return [], None
        known = self._known(transform)
        rngs = (np.random.default_rng((self._seed, one)) for one in range(number, number + count))
        if self._too_few(observations, transform):
            begun = len(observations.points) + len(observations.paused) + len(observations.pending)
            points = [self._first(observations, transform, known, rng, begun + one) for one, rng in enumerate(rngs)]
            return [transform.decode(point) for point in points], None
        with single_threaded_blas():
            model = self._model(observations, transform, known)
            best = list(islice(self._best(model, transform, known, next(rngs)), count))
            resumed, paused = None, observations.subset_near_front(MOST_POINTS).paused
            if paused.waiting.any():
                point, improvement = best[0]
                worth = improvement / float(model.seconds_at(point[None, :], known(point[None, :]))[0])
                resumed = model.paused_worth_more(paused, known, _NEW * worth if or_new else -math.inf)
        return [transform.decode(point) for point, _ in best], resumed

    def expected_gain(self, study: Study, trials: int) -> float | None:
        """The share by which that many more trials are expected to enlarge the front's hypervolume; None if it is unknown.

        The hypervolume is over log seconds and accuracy, as the models see it; running trials count as predicted.
        """
        transform, number = SpaceTransform(self._searched(study), self._conditions), len(study.get_trials(deepcopy=False))
        observations = self._observations(study, transform, number) if transform.space else None
        if observations is None or self._too_few(observations, transform):
            return None
        known = self._known(transform)
        with single_threaded_blas():
            model = self._model(observations, transform, known)
            best = self._best(model, transform, known, np.random.default_rng((self._seed, number)))
            (_, first), now = next(best), model.hypervolume()
            gain = first + sum(improvement for _, improvement in islice(best, trials - 1))
        return gain / now if now > 0 else None

    def _observations(
        self, study: Study, transform: SpaceTransform, number: int, others: Sequence[Mapping[str, Any]] = ()
    ) -> Observations | None:
        """What is known when trial `number` is asked for; None where the objectives are others than ours."""
        signs = np.where([direction == StudyDirection.MAXIMIZE for direction in study.directions], 1.0, -1.0)
        if len(signs) not in (2, 3) or signs[0] > 0 or (signs[2:] > 0).any():
            return None
        history = self._histories.get(study)
        if history is None or history.transform.space != transform.space:
            history = self._histories[study] = TrialHistory(transform, signs)
        observations = history.observations(study.get_trials(deepcopy=False), number, self._prior_trials, others)
        return None if (observations.taken <= 0).any() else observations

    def _too_few(self, observations: Observations, transform: SpaceTransform) -> bool:
        """Whether the next points are among the first, which no model chooses."""
        place = BatchRate.of(transform, self._scaled)
        first = transform.parameters + _FIRST if place is None else first_points(self._known_seconds is not None)
        first += ANCHORS if place is not None and self._pauses else 0
        return len(observations.points) + len(observations.paused) < first

    def _model(self, observations: Observations, transform: SpaceTransform, known: KnownLogTaken) -> FrontModel:
        ended = len(observations.points) + len(observations.failed) + len(observations.paused)
        used = observations.subset_near_front(MOST_POINTS)
        model = FrontModel(used, self._last, ended, BatchRate.of(transform, self._scaled))
        model.condition_on_pending(observations.pending, known)
        return model

    def _best(
        self, model: FrontModel, transform: SpaceTransform, known: KnownLogTaken, rng: np.random.Generator
    ) -> Iterator[tuple[Array, float]]:
        return model.best(transform, known, rng, self._cost(model, known))

    def _first(
        self,
        observations: Observations,
        transform: SpaceTransform,
        known: KnownLogTaken,
        rng: np.random.Generator,
        begun: int,
    ) -> Array:
        """A point (width,) before there is a model, after `begun` others."""
        place = BatchRate.of(transform, self._scaled)
        if place is None or len(observations.failed):
            return _random_point(transform, known, rng, success_model(observations))
        return _first_point(place, transform, known, rng, begun, anchors=self._pauses)

    def _cost(self, model: FrontModel, known: KnownLogTaken) -> Callable[[Array], Array] | None:
        """What the improvements of points (n, width) are divided by, (n,); None where every trial costs the same."""
        if self._by_time:
            return lambda points: model.seconds_at(points, known(points)) ** _PER_TIME
        return None

    def _by_tpe(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        """Optuna's own proposal, where the first objective is not a time."""
        tpe = self._other_objectives
        return tpe.sample_relative(study, trial, tpe.infer_relative_search_space(study, trial))

    def _known(self, transform: SpaceTransform) -> KnownLogTaken:
        """Logs of what training takes at points of the cube, by the law; None where there is none."""
        law = self._known_seconds
        if law is None:
            return lambda points: None

        def log_taken(points: Array) -> Array | None:
            taken = np.array([law(values) for values in transform.decode_many(points)], dtype=float).reshape(len(points), -1)
            return np.asarray(np.log(np.where(np.isfinite(taken) & (taken > 0), taken, math.nan)))

        return log_taken


def _random_point(
    transform: SpaceTransform, known: KnownLogTaken, rng: np.random.Generator, success: GaussianProcess | None
) -> Array:
    """A random point (width,) that can be planned, and where training is not known to fail.

    Sobol points in their place found no more (docs/log.md, "the search").
    """
    points = rng.random((256, transform.width))
    taken = known(points)
    if taken is not None and not np.isnan(taken).all():
        points = points[~np.isnan(taken[:, 0])]
    if success is None:
        return np.asarray(points[0])
    probability = np.minimum(success.mean_at(points), LEAST_PROBABILITY)
    return np.asarray(points[int(np.argmax(probability))])


def _first_point(
    place: BatchRate, transform: SpaceTransform, known: KnownLogTaken, rng: np.random.Generator, number: int, *, anchors: bool
) -> Array:
    """One of the first points (width,), where batch and rate are searched."""
    points = transform.round_to_feasible(rng.random((DRAWN, transform.width)))
    taken, times = known(points), None
    if taken is not None and not np.isnan(taken).all():
        planned = ~np.isnan(taken[:, 0])
        points, times = points[planned], taken[planned, 0]
    chosen = first_point(place, points, times, number, transform.parameters, rng, anchors=anchors)
    return np.asarray(transform.round_to_feasible(chosen[None, :])[0])


__all__ = ["FrontSampler"]
