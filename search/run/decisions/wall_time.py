"""How long a training takes by the clock: how fast the machine is, as its trials have shown, and how that drifts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtr

from ...analysis.gaussian_process import Array
from .eta import ClockFactors, Span

# Before any trial has ended, training takes longer or shorter than known by this standard deviation of the log.
_UNKNOWN = 0.2
# Standard deviations of the log by which the machine's speed moves over a whole study, and by which single trials differ, with
# what is believed of each beforehand.
_DRIFTS = (0.0, 0.05, 0.15, 0.4), (0.3, 0.3, 0.25, 0.15)
_NOISES = (0.02, 0.05, 0.12, 0.3), (0.3, 0.35, 0.25, 0.1)
_PAIRS = np.array(list(itertools.product(_DRIFTS[0], _NOISES[0]))).T
_BELIEFS = np.array([drift * noise for drift, noise in itertools.product(_DRIFTS[1], _NOISES[1])])
# A machine that has been steady may begin to drift: for each whole study, with this probability.
_BEGINS = 0.5
# Halvings of an interval that a quantile lies in.
_HALVINGS = 50


@dataclass(frozen=True)
class WallTime:
    """Seconds by the clock of a training whose seconds are known, with how they vary.

    The log of the clock's seconds of training for each known one moves as a random walk, and single trials differ from it: a
    local level model for each pair of a drift and a noise, weighted by how likely it makes the trials so far (West & Harrison,
    Bayesian Forecasting and Dynamic Models, 1997, chapters 2 and 12).

    Args:
        means, variances: (pairs,), of the log now.
        weights: (pairs,), of each drift and noise.
        overhead_s: of an attempt, outside training.
        whole_s: over which the drift is counted.
    """

    means: Array = field(default_factory=lambda: np.zeros(len(_BELIEFS)))
    variances: Array = field(default_factory=lambda: np.full(len(_BELIEFS), _UNKNOWN**2))
    weights: Array = field(default_factory=lambda: _BELIEFS)
    overhead_s: float = 0.0
    whole_s: float = math.inf

    @classmethod
    def of(cls, spans: Sequence[Span], whole_s: float = math.inf) -> WallTime:
        """As the attempts that ended have shown.

        Args:
            whole_s: from the study's beginning to its deadline.
        """
        ended = sorted(
            (span.ended_s - span.trained_s / 2, math.log(span.trained_s / (span.known_s * span.share)))
            for span in spans
            if span.ended_s is not None and span.known_s and span.share > 0 and span.trained_s > 0
        )
        drift, noise = _PAIRS[0] ** 2 / whole_s, _PAIRS[1] ** 2
        mean, variance, evidence = np.zeros(len(noise)), np.full(len(noise), _UNKNOWN**2), np.log(_BELIEFS)
        for number, (at_s, log) in enumerate(ended):
            if number:
                variance = variance + drift * (at_s - ended[number - 1][0])
            expected = variance + noise
            evidence = evidence - 0.5 * (np.log(expected) + (log - mean) ** 2 / expected)
            mean, variance = mean + variance / expected * (log - mean), variance * noise / expected
        weights = np.exp(evidence - evidence.max())
        return cls(mean, variance, weights / weights.sum(), ClockFactors.of(spans).overhead_s, whole_s)

    @property
    def slowdown(self) -> float:
        """The clock's seconds of training for each known one."""
        return math.exp(float(self.weights @ self.means))

    def expected_s(self, known_s: Array | float) -> Array | float:
        return np.multiply(known_s, self.slowdown) + self.overhead_s

    def probability(self, known_s: Array | float, within_s: Array | float) -> Array:
        """That a training is done within so many seconds by the clock, elementwise."""
        share = np.maximum(within_s, 0.0) / np.asarray(self.expected_s(known_s))
        return self._below(known_s, np.log(share, out=np.full(np.shape(share), -math.inf), where=share > 0))

    def longest_s(self, within_s: float, sure: float) -> float:
        """Known seconds of the longest training that is done within so many by the clock with probability `sure`."""
        low, high = 0.0, max(within_s, 0.0) / self.slowdown * 4
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if float(self.probability(middle, within_s)) >= sure else (low, middle)
        return low

    def at_most_s(self, known_s: float, sure: float) -> float:
        """What it takes at most, with probability `sure`."""
        low, high = -5.0, 5.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if float(self._below(known_s, np.array(middle))) >= sure else (middle, high)
        return float(self.expected_s(known_s)) * math.exp(high)

    def _below(self, known_s: Array | float, log: Array) -> Array:
        """The probability that a training takes less than exp(log) times what is expected, elementwise."""
        share = np.minimum(np.asarray(self.expected_s(known_s)) / self.whole_s, 1.0)[..., None]
        # The mean of a random walk over a training varies by a third of what its end does.
        variance = self.variances + _PAIRS[0] ** 2 * share / 3 + _PAIRS[1] ** 2
        shifted = log[..., None] - (self.means - math.log(self.slowdown))
        begins = _BEGINS * share
        return np.asarray((ndtr(shifted / np.sqrt(variance)) * ((1 - begins) * self.weights + begins * _BELIEFS)).sum(axis=-1))


__all__ = ["WallTime"]
