"""FrontSampler: propose the trial with the most expected gain in hypervolume at its time.

Two Gaussian processes believe in log seconds (or a law that knows them) and in accuracy. For two objectives the expected
gain has a closed form: the front cuts the time axis into strips with a level each, and a candidate gains, in every strip it
is early enough for, what it is expected to rise above that level. It is an ordinary Optuna sampler, for plain Optuna too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState
from scipy.special import ndtr
from scipy.stats import qmc
from threadpoolctl import ThreadpoolController

from .accuracy_scale import AccuracyScale
from .gaussian_process import Array, GaussianProcess, conditioned, fitted

# Candidates that are looked at: spread over the space, then around the best, in so many ever smaller rounds.
_SPREAD, _AROUND, _ROUNDS = 1024, 256, 3
# Steps of a fit from nothing, and from the last trial's, which one more point moves little.
_FIRST_STEPS, _MORE_STEPS = 40, 8
# Trials from which the last fit is a good beginning; before, one more may turn the picture round.
_SETTLED = 60
# Trials that the processes are conditioned on: their cost grows with the cube. Of more, those nearest the front and some of
# the others speak for all.
MOST_POINTS = 300
_NEAREST = 200
# Of more than that, length scales are fitted anew when so many times as many have ended: half of an ask was fitting.
_FITTED_FOR = 1.02
# Points before the model speaks: so many more than there are parameters.
_FIRST = 2
# Accuracy from which a front counts: so many times as far below the best as the median is, or the worst that was seen.
_WORST = 20.0
# A place is tried only where training is expected to finish at least so often, unless there is none.
_LEAST_CHANCE = 0.5
# User attributes of a stopped trial that say what it would have come to.
EXPECTED = {"expected_seconds", "expected_accuracy", "expected_deviation"}
# Nodes of Gauss and Hermite's quadrature, for expectations of what is normal on the scale of accuracies.
_NODES, _SHARES = np.polynomial.hermite_e.hermegauss(20)
_SHARES = _SHARES / _SHARES.sum()

# Length scales and noise of the last fit of each process, and how many trials had ended.
Fits = dict[str, tuple[Array, float, int]]
# Parameters, seconds and accuracy of a trial of an earlier study.
PastTrial = tuple[Mapping[str, Any], float, float]


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


class Coding:
    """Parameters as points of a cube: numbers on their own scale, categories as corners."""

    def __init__(self, space: Mapping[str, BaseDistribution]) -> None:
        self.space = dict(space)
        self.parameters = len(space)
        # Of each parameter: its name, its distribution, its first coordinate, and where its scale begins and how wide it is.
        self._parts: list[tuple[str, BaseDistribution, int, float, float]] = []
        self.width = 0
        for name, distribution in space.items():
            low, wide = 0.0, 1.0
            if not isinstance(distribution, CategoricalDistribution):
                low, high = _ends(distribution)
                wide = high - low
            self._parts.append((name, distribution, self.width, low, wide))
            self.width += len(distribution.choices) if isinstance(distribution, CategoricalDistribution) else 1

    def encode(self, parameters: Mapping[str, Any]) -> Array:
        point = np.zeros(self.width)
        for name, distribution, place, low, wide in self._parts:
            value = parameters[name]
            if isinstance(distribution, CategoricalDistribution):
                point[place : place + len(distribution.choices)] = [choice == value for choice in distribution.choices]
            else:
                at = math.log(value) if distribution.log else value  # type: ignore[attr-defined]
                point[place] = (at - low) / wide
        return point

    def decode(self, point: Array) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, distribution, place, low, wide in self._parts:
            if isinstance(distribution, CategoricalDistribution):
                count = len(distribution.choices)
                values[name] = distribution.choices[int(np.argmax(point[place : place + count]))]
                continue
            assert isinstance(distribution, IntDistribution | FloatDistribution)
            number = low + float(point[place]) * wide
            number = math.exp(number) if distribution.log else number
            if isinstance(distribution, IntDistribution):
                step = distribution.step
                number = distribution.low + step * round((number - distribution.low) / step)
                values[name] = int(min(max(number, distribution.low), distribution.high))
            else:
                values[name] = float(min(max(number, distribution.low), distribution.high))
        return values

    def decoded(self, points: Array) -> list[dict[str, Any]]:
        """Parameters of many points, a parameter at a time."""
        columns: list[list[Any]] = []
        for _, distribution, place, low, wide in self._parts:
            if isinstance(distribution, CategoricalDistribution):
                best = np.argmax(points[:, place : place + len(distribution.choices)], axis=1)
                columns.append([distribution.choices[index] for index in best])
                continue
            assert isinstance(distribution, IntDistribution | FloatDistribution)
            numbers = low + points[:, place] * wide
            numbers = np.exp(numbers) if distribution.log else numbers
            if isinstance(distribution, IntDistribution):
                numbers = distribution.low + distribution.step * np.round((numbers - distribution.low) / distribution.step)
            numbers = np.clip(numbers, distribution.low, distribution.high)
            columns.append((numbers.astype(int) if isinstance(distribution, IntDistribution) else numbers).tolist())
        return [dict(zip(self.space, values, strict=True)) for values in zip(*columns, strict=True)]

    def settled(self, points: Array) -> Array:
        """Points (n, width) moved to where their parameters really are: whole numbers, single choices."""
        settled = np.clip(points, 0.0, 1.0)
        for _, distribution, place, low, wide in self._parts:
            if isinstance(distribution, CategoricalDistribution):
                corners = slice(place, place + len(distribution.choices))
                settled[:, corners] = np.eye(len(distribution.choices))[np.argmax(points[:, corners], axis=1)]
            elif isinstance(distribution, IntDistribution):
                numbers = low + settled[:, place] * wide
                numbers = np.exp(numbers) if distribution.log else numbers
                steps = np.round((numbers - distribution.low) / distribution.step)
                numbers = np.clip(distribution.low + distribution.step * steps, distribution.low, distribution.high)
                settled[:, place] = ((np.log(numbers) if distribution.log else numbers) - low) / wide
        return settled


def _ends(distribution: BaseDistribution) -> tuple[float, float]:
    """Of a number's own scale."""
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return (
        (math.log(distribution.low), math.log(distribution.high)) if distribution.log else (distribution.low, distribution.high)
    )


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


@dataclass(frozen=True)
class Evidence:
    """What trials have shown so far, as points of the cube.

    Args:
        points: (n, width) of trials that were trained to their end or stopped on the way.
        seconds: (n,), > 0, of their whole training.
        accuracy: (n,), higher is better; what a stopped one was expected to come to.
        doubt: (n,), standard deviation of that expectation, 0 where training ended.
        own: (n,), of this study rather than an earlier one.
        pending: (m, width) of those that run.
        failed: (l, width) of those that ended without values.
    """

    points: Array
    seconds: Array
    accuracy: Array
    doubt: Array
    own: np.ndarray[Any, np.dtype[np.bool_]]
    pending: Array
    failed: Array

    def finishing(self, known: tuple[Array, float] | None = None) -> GaussianProcess | None:
        """The chance that training finishes; None where it never failed. Length scales and noise are fitted or known."""
        if not len(self.failed):
            return None
        tried = np.vstack([self.points, self.failed])
        ended = np.append(np.ones(len(self.points)), np.zeros(len(self.failed)))
        # Far from all that was tried, training is expected to finish; and a few failures say nothing of places far away.
        around = 1.0, 0.5
        if known is not None:
            return conditioned(tried, ended, *known, *around)
        return fitted(tried, ended, None, _FIRST_STEPS, around=around, log_scale=math.log(0.4))

    def nearest_front(self, most: int) -> Evidence:
        """At most so many of them: those that lack least to the front at their time, and of the others every n-th."""
        if len(self.points) <= most:
            return self
        order = np.lexsort((-self.accuracy, self.seconds))
        reached = np.empty(len(order))
        reached[order] = np.maximum.accumulate(self.accuracy[order])
        ranked = np.argsort(reached - self.accuracy, kind="stable")
        near, rest = ranked[:_NEAREST], np.sort(ranked[_NEAREST:])
        kept = np.concatenate([near, rest[np.linspace(0, len(rest) - 1, most - _NEAREST).astype(int)]])
        return Evidence(
            self.points[kept],
            self.seconds[kept],
            self.accuracy[kept],
            self.doubt[kept],
            self.own[kept],
            self.pending,
            self.failed[-most:],
        )


_OPEN, _TOLD, _FAILED, _VOID = range(4)


class Ended:
    """What a study's trials came to, read once each as they end: thousands of them are not read again for every ask.

    Args:
        signs: 1 for objectives to maximize.
    """

    def __init__(self, coding: Coding, signs: Array) -> None:
        self.coding, self._signs = coding, signs
        # By trial number, which Optuna counts from 0 without gaps.
        self._said = np.empty(0, dtype=np.int8)
        self._points, self._values = np.empty((0, coding.width)), np.empty((0, 3))

    def evidence(self, trials: Sequence[FrozenTrial], asked: int, past: Sequence[PastTrial] = ()) -> Evidence:
        """All that the trials say but the one that is asked for."""
        count, room = len(trials), len(self._said)
        if count > room:  # doubled, so that copying stays rare
            self._said = np.append(self._said, np.zeros(count, dtype=np.int8))
            self._points = np.vstack([self._points, np.zeros((count, self.coding.width))])
            self._values = np.vstack([self._values, np.zeros((count, 3))])
        pending = []
        for number in np.flatnonzero(self._said[:count] == _OPEN).tolist():
            one = trials[number]
            known = set(self.coding.space) <= set(one.params)
            if one.state.is_finished():
                self._said[number] = self._read(number, one) if known else _VOID
            elif known and one.state == TrialState.RUNNING and number != asked:
                pending.append(self.coding.encode(one.params))
        told, failed = (np.flatnonzero(self._said[:count] == what) for what in (_TOLD, _FAILED))
        before = np.array([self.coding.encode(parameters) for parameters, _, _ in past]).reshape(-1, self.coding.width)
        came = [(seconds, self._signs[1] * accuracy, 0.0) for _, seconds, accuracy in past]
        values = np.vstack([np.array(came).reshape(-1, 3), self._values[told]])
        return Evidence(
            np.vstack([before, self._points[told]]),
            values[:, 0],
            values[:, 1],
            values[:, 2],
            np.arange(len(values)) >= len(past),
            np.array(pending).reshape(-1, self.coding.width),
            self._points[failed],
        )

    def _read(self, number: int, one: FrozenTrial) -> int:
        """Keep where an ended trial was and what it came to; tells what it is good for."""
        facts, signs = one.user_attrs, self._signs
        self._points[number] = self.coding.encode(one.params)
        if one.state == TrialState.COMPLETE and np.isfinite(one.values).all():
            self._values[number] = -signs[0] * one.values[0], signs[1] * one.values[1], 0.0
            return _TOLD
        if one.state == TrialState.PRUNED and set(facts) >= EXPECTED:
            self._values[number] = (
                facts["expected_seconds"],
                signs[1] * facts["expected_accuracy"],
                facts["expected_deviation"],
            )
            return _TOLD
        # A trial whose driver died is tried again, and did not fail.
        return _VOID if "continued_by" in facts else _FAILED


class FrontModel:
    """What is believed of seconds and accuracy, and the gain that points of the cube promise."""

    def __init__(self, evidence: Evidence, last: Fits, ended: int = 0) -> None:
        """`ended` trials in all stand behind the evidence."""
        self.log_seconds = np.log(evidence.seconds)
        self.scale = AccuracyScale(evidence.accuracy)
        self.accuracy = self.scale.of(evidence.accuracy)
        up, down = (self.scale.of(evidence.accuracy + sign * evidence.doubt) for sign in (1, -1))
        self.doubt = np.where(evidence.doubt > 0, ((up - down) / 2) ** 2, 0.0)
        self.points, self.own = evidence.points, evidence.own
        self.end = -math.inf
        self._last, self._ended = last, ended
        self.believes = {
            "seconds": self._fit("seconds", self.log_seconds),
            "accuracy": self._fit("accuracy", self.accuracy, self.doubt),
        }
        self.finishing = evidence.finishing(self._known_fit("finishing"))
        if self.finishing is not None:
            self._remember("finishing", self.finishing)

    def _known_fit(self, name: str) -> tuple[Array, float] | None:
        """The last fit of a process of many trials, where it still holds."""
        scales, noise, ended = self._last.get(name, (np.empty(0), 0.0, 0))
        holds = len(scales) == self.points.shape[1] and MOST_POINTS < self._ended < _FITTED_FOR * ended
        return (scales, noise) if holds else None

    def _remember(self, name: str, process: GaussianProcess) -> None:
        if self._known_fit(name) is None:
            self._last[name] = process.log_scales, process.log_noise, self._ended

    def _fit(self, name: str, values: Array, doubt: Array | None = None) -> GaussianProcess:
        if (known := self._known_fit(name)) is not None:
            return conditioned(self.points, values, *known, float(values.mean()), float(values.std()) or 1.0, doubt)
        start = self._last.get(name)
        near = start is not None and len(start[0]) == self.points.shape[1] and len(self.points) >= _SETTLED
        begin = start[:2] if start is not None and near else None
        process = fitted(self.points, values, begin, _MORE_STEPS if near else _FIRST_STEPS, doubt)
        self._remember(name, process)
        return process

    def await_(self, pending: Array, known: Callable[[Array], Array | None]) -> None:
        """Take running trials for finished as they are expected to, so that no near copy of them is proposed."""
        own_known = known(self.points)
        if own_known is not None:
            self.log_seconds = np.where(np.isnan(own_known), self.log_seconds, own_known)
        if not len(pending):
            return
        expected = {name: process.expect(pending) for name, process in self.believes.items()}
        times = known(pending)
        self.points = np.vstack([self.points, pending])
        self.own = np.append(self.own, np.ones(len(pending), dtype=bool))
        times = expected["seconds"] if times is None else np.where(np.isnan(times), expected["seconds"], times)
        self.log_seconds = np.append(self.log_seconds, times)
        self.accuracy = np.append(self.accuracy, expected["accuracy"])
        self.doubt = np.append(self.doubt, np.zeros(len(pending)))
        for name, values, doubt in (("seconds", self.log_seconds, None), ("accuracy", self.accuracy, self.doubt)):
            old = self.believes[name]
            # Without noise, so that the place of a running trial is known ground however noisy trials are.
            self.believes[name] = conditioned(
                self.points, values, old.log_scales, old.log_noise, old.mean, old.deviation, doubt, certain=len(pending)
            )

    def gain(self, points: Array, log_seconds: Array | None) -> Array:
        """Expected hypervolume improvement at points (m, width), (m,)."""
        mean, deviation = self.believes["accuracy"].predict(points)
        if log_seconds is None:
            time, time_deviation = self.believes["seconds"].predict(points)
        else:
            time, time_deviation = log_seconds, np.full(len(points), 1e-9)
        cuts, levels = self._strips()
        # Seconds saved up to each cut, expected; a strip's share is the difference of two.
        early = _rise(cuts[None, :] - time[:, None], time_deviation[:, None])
        widths = np.diff(early, axis=1, prepend=0.0)
        drawn = self.scale.back(mean[:, None] + deviation[:, None] * _NODES[None, :])  # (m, nodes), as accuracy
        rises = np.maximum(drawn[:, :, None] - levels[None, None, :], 0.0).transpose(0, 2, 1) @ _SHARES
        gains = np.nan_to_num((widths * rises).sum(axis=1), nan=-1.0)
        if self.finishing is not None:
            finishes = np.clip(self.finishing.expect(points), 0.01, 1.0)
            # Where training is known to fail, even the largest promise comes after everything that is expected to finish.
            gains = np.where(gains < 0, gains, gains * finishes * np.where(finishes < _LEAST_CHANCE, 1e-12, 1.0))
        return np.asarray(gains)

    def _strips(self) -> tuple[Array, Array]:
        """Ends of the strips on the log time axis, and the accuracy to rise above in each; of the believed, noiseless front."""
        mean = self.scale.back(self.believes["accuracy"].expect(self.points))
        order = [index for index in np.lexsort((-mean, self.log_seconds)) if self.own[index]]
        # A loss that ran away would make all that is merely faster look precious.
        worst = max(float(np.min(mean)), self.scale.best - _WORST * self.scale.unit)
        cuts, levels, best = [], [worst], worst
        for index in order:
            if mean[index] > best:
                best = float(mean[index])
                cuts.append(float(self.log_seconds[index]))
                levels.append(best)
        cuts.append(max(self.end, float(self.log_seconds.max())) + 0.05)
        return np.array(cuts), np.array(levels)

    def best(self, coding: Coding, known: Callable[[Array], Array | None], chance: np.random.Generator) -> Array:
        """The point of the most expected gain among many candidates."""
        engine = qmc.Sobol(coding.width, scramble=True, rng=chance)
        spread = np.asarray(engine.random(_SPREAD))
        times = known(spread)
        if times is None or np.isnan(times).all():
            times = self.believes["seconds"].expect(spread)
        # The slowest that may be tried is where the last strip ends: what is better and slower gains up to there.
        self.end = float(np.nanmax(times))
        front = self.points[np.argsort(-self.gain_of_members())[:8]]
        candidates = coding.settled(np.vstack([spread, _near(front, _AROUND, 0.1, chance)]))
        gains = self.gain(candidates, known(candidates))
        for part in range(_ROUNDS):
            top = candidates[np.argsort(-gains)[:8]]
            around = coding.settled(_near(top, _AROUND, 0.1 / 3**part, chance))
            candidates = np.vstack([candidates, around])
            gains = np.append(gains, self.gain(around, known(around)))
        return np.asarray(candidates[int(np.argmax(gains))])

    def gain_of_members(self) -> Array:
        """How near each trial is to the front: what its strip's level lacks of it."""
        mean = self.scale.back(self.believes["accuracy"].expect(self.points))
        cuts, levels = self._strips()
        return np.asarray(mean - levels[np.searchsorted(cuts, self.log_seconds, side="right")])


def _near(points: Array, count: int, deviation: float, chance: np.random.Generator) -> Array:
    """Points around some, each coordinate moved with probability one half."""
    chosen = points[chance.integers(len(points), size=count)]
    moves = chance.normal(0.0, deviation, chosen.shape) * (chance.random(chosen.shape) < 0.5)
    return np.clip(chosen + moves, 0.0, 1.0)


def _rise(difference: Array, deviation: Array) -> Array:
    """E[max(0, X)] of X normal with this mean and standard deviation: expected improvement."""
    z = difference / deviation
    return np.asarray(difference * ndtr(z) + deviation * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))


__all__ = ["Coding", "FrontModel", "FrontSampler"]
