"""FrontSampler: propose the trial with the most expected gain in hypervolume at its time.

Two Gaussian processes believe in log seconds (or a law that knows them) and in accuracy. For two objectives the expected
gain has a closed form: the front cuts the time axis into strips with a level each, and a candidate gains, in every strip it
is early enough for, what it is expected to rise above that level. It is an ordinary Optuna sampler, for plain Optuna too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial
from threadpoolctl import ThreadpoolController

from ..analysis.gaussian_process import Array, GaussianProcess
from .front_model import _LEAST_CHANCE, MOST_POINTS, Ended, Fits, FrontModel, PastTrial
from .space_transform import Coding

# Points before the model speaks: so many more than there are parameters.
_FIRST = 2


class FrontSampler(BaseSampler):
    """Expected hypervolume improvement over seconds (first objective) and accuracy (second).

    Trials that ended without values teach where training fails; a pruned trial with the user attributes `expected_seconds`,
    `expected_accuracy` and `expected_deviation` (what its curve promised when it was stopped) teaches as much as they say.
    Studies of other than two objectives, or whose first is no time (to be minimized, above 0), go to Optuna's multivariate TPE.

    Args:
        space: what is searched; not given, what finished trials have in common.
        known_seconds: seconds of parameters, where a law knows them beforehand; NaN for what cannot be planned at all, which
            is then never proposed.
        past: trials of an earlier study: what is believed hangs on them too, the front does not.
        seed: of the first points and of the candidates.
    """

    def __init__(
        self,
        *,
        space: Mapping[str, BaseDistribution] | None = None,
        known_seconds: Callable[[Mapping[str, Any]], float] | None = None,
        past: Sequence[PastTrial] = (),
        seed: int = 0,
    ) -> None:
        self._past = tuple(past)
        self._space = dict(space) if space is not None else None
        self._known_seconds = known_seconds
        self._seed = seed
        self._independent = RandomSampler(seed=seed)
        self._common = IntersectionSearchSpace()
        self._many = TPESampler(multivariate=True, constant_liar=True, seed=seed)
        self._last: Fits = {}  # to begin the next from
        self._read: WeakKeyDictionary[Study, Ended] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_read"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_read": WeakKeyDictionary()}

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        space = self._space if self._space is not None else self._common.calculate(study)
        return {name: distribution for name, distribution in space.items() if not distribution.single()}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        if not search_space:
            return {}
        coding = Coding(search_space)
        signs = np.where([direction == StudyDirection.MAXIMIZE for direction in study.directions], 1.0, -1.0)
        if len(signs) != 2 or signs[0] > 0:
            return self._elsewhere(study, trial)
        ended = self._read.get(study)
        if ended is None or ended.coding.space != coding.space:
            ended = self._read[study] = Ended(coding, signs)
        evidence = ended.evidence(study.get_trials(deepcopy=False), trial.number, self._past)
        if (evidence.seconds <= 0).any():
            return self._elsewhere(study, trial)
        if len(evidence.points) < coding.parameters + _FIRST:
            chance = np.random.default_rng((self._seed, trial.number))
            return coding.decode(_first_point(coding, self._known(coding), chance, evidence.finishing()))
        with _one_thread():
            model = FrontModel(evidence.nearest_front(MOST_POINTS), self._last, len(evidence.points) + len(evidence.failed))
            model.await_(evidence.pending, self._known(coding))
            best = model.best(coding, self._known(coding), np.random.default_rng((self._seed, trial.number)))
        return coding.decode(best)

    def _elsewhere(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        """What Optuna's own proposes where the first objective is no time."""
        return self._many.sample_relative(study, trial, self._many.infer_relative_search_space(study, trial))

    def _known(self, coding: Coding) -> Callable[[Array], Array | None]:
        """Log seconds of encoded points by the law; None where there is none."""
        law = self._known_seconds
        if law is None:
            return lambda points: None

        def log_seconds(points: Array) -> Array | None:
            seconds = np.array([law(values) for values in coding.decoded(points)], dtype=float)
            return np.asarray(np.log(np.where(np.isfinite(seconds) & (seconds > 0), seconds, math.nan)))

        return log_seconds


def _one_thread() -> Any:
    """Matrices of a few hundred rows gain nothing by threads; on cores that trials keep busy an ask took 20 times as long."""
    return _libraries().limit(limits=1, user_api="blas")


@cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()  # looking for them takes some milliseconds


def _first_point(
    coding: Coding,
    known: Callable[[Array], Array | None],
    chance: np.random.Generator,
    finishing: GaussianProcess | None,
) -> Array:
    """A point by dice that can be planned, and where training is not known to fail.

    Sobol's points in their place found no more (docs/log.md, "the search").
    """
    points = chance.random((256, coding.width))
    times = known(points)
    if times is not None and not np.isnan(times).all():
        points = points[~np.isnan(times)]
    if finishing is None:
        return np.asarray(points[0])
    finishes = np.minimum(finishing.expect(points), _LEAST_CHANCE)
    return np.asarray(points[int(np.argmax(finishes))])


__all__ = ["Coding", "FrontModel", "FrontSampler"]
