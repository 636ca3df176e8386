"""TODO."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial, TrialState
from scipy.special import ndtr
from scipy.stats import qmc

from ..analysis.accuracy_scale import AccuracyScale
from ..analysis.gaussian_process import Array, GaussianProcess, conditioned, fitted
from .space_transform import Coding

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
