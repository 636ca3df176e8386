"""How much a run of a setting varies with its seed, and how biased first runs are: learned from repeated settings.

Short trainings vary more than long ones, so the logarithm of the variance is a line in the logarithm of the training time,
fitted to the repeated settings. A setting's own variance is shrunk towards it, because its runs are few, as in limma
(Smyth, 2004), which shrinks the variances of many small groups towards a trend.

First runs are biased, for two reasons: settings are on the front because theirs was good, and all first runs share one seed,
which may suit the model. Each repeat has a seed of its own, so first runs and repeats of a setting differ by that bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Prior of the line's slope: the variance falls with about the time to its square.
_SLOPE, _SLOPE_STD = -1.5, 1.0
# Degrees of freedom of the line: how closely settings follow it, as if it were a variance of so many runs plus one.
_LINE_FREEDOM = 4.0
# Prior of the bias, in standard deviations of a run: in nine studies it was -0.8 to 2.5, 0.7 in the mean (docs/log.md).
_BIAS, _BIAS_STD = 0.8, 0.5
_ITERATIONS = 6


@dataclass(frozen=True, slots=True)
class RunNoise:
    """The noise of a study's runs.

    Args:
        stds: standard deviation of a single run around its setting's mean, (n,).
        freedom: its degrees of freedom, (n,).
        bias, bias_std: of first runs, in those standard deviations; positive where they were better.
    """

    stds: Any
    freedom: Any
    bias: float
    bias_std: float

    def means(self, groups: Sequence[Sequence[float]]) -> tuple[Any, Any]:
        """Each setting's mean without that bias, and its standard error: two of (n,)."""
        import numpy as np

        counts = np.array([len(group) for group in groups])
        means = np.array([np.mean(group) for group in groups]) - self.bias * self.stds / counts
        return means, self.stds * np.sqrt(1 / counts + (self.bias_std / counts) ** 2)


def run_noise(groups: Sequence[Sequence[float]], seconds: Sequence[float]) -> RunNoise | None:
    """The noise of runs, from settings that have several; None where none has.

    Args:
        groups: each setting's scores, higher is better, its first run first.
        seconds: each setting's training time.

    >>> noise = run_noise([[1.0, 3.0], [5.0], [2.0, 2.2, 2.4]], [1.0, 10.0, 10.0])
    >>> noise.stds.round(2).tolist(), noise.freedom.tolist(), round(noise.bias, 2)
    ([1.76, 0.26, 0.25], [5.0, 4.0, 6.0], 0.36)
    """
    import numpy as np

    free = np.array([len(group) - 1.0 for group in groups])
    if not free.sum():
        return None
    scores = [np.asarray(group, dtype=float) for group in groups]
    log_seconds = np.log(np.maximum(np.asarray(seconds, dtype=float), 1e-9))
    repeated = np.flatnonzero(free)
    # A first run's difference from the mean of its setting's repeats has this variance, in that of a run.
    weights = 1 / (1 + 1 / free[repeated])
    precision = weights.sum() + 1 / _BIAS_STD**2
    bias, stds = 0.0, np.zeros(len(groups))
    for _ in range(_ITERATIONS):
        unbiased = [
            group - bias * std * (np.arange(len(group)) == 0) for group, std in zip(scores, stds, strict=True)
        ]
        own = np.array([np.var(group, ddof=1) if len(group) > 1 else 0.0 for group in unbiased])
        line = _line(own, free, log_seconds)
        stds = np.sqrt((_LINE_FREEDOM * line + free * own) / (_LINE_FREEDOM + free))
        ahead = [
            (scores[place][0] - scores[place][1:].mean()) / max(stds[place], 1e-300) for place in repeated
        ]
        bias = max(float((weights @ np.array(ahead) + _BIAS / _BIAS_STD**2) / precision), 0.0)
    return RunNoise(stds, _LINE_FREEDOM + free, bias, float(precision**-0.5))


def _line(own: Any, free: Any, log_seconds: Any) -> Any:
    """Each setting's variance by the line, (n,): the most probable one where a setting's variance is a scaled chi-square."""
    import numpy as np

    repeated = free > 0
    centre = np.average(log_seconds, weights=free)
    x, s2, nu = log_seconds[repeated] - centre, own[repeated], free[repeated]
    # A tiny share of the mean variance stands for settings whose runs are equal.
    floor = 1e-6 * np.average(s2, weights=nu) + 1e-30
    level, slope = float(np.log(np.average(s2, weights=nu) + floor)), _SLOPE
    for _ in range(50):  # Newton's steps on a convex function of two numbers
        ratio = (s2 + floor) / np.exp(np.clip(level + slope * x, -600, 600))
        gradient = np.array([np.sum(nu * (1 - ratio)), np.sum(nu * (1 - ratio) * x)]) / 2
        gradient[1] += (slope - _SLOPE) / _SLOPE_STD**2
        weight = nu * ratio / 2
        curve = np.array([[weight.sum(), weight @ x], [weight @ x, weight @ (x * x)]])
        curve[1, 1] += 1 / _SLOPE_STD**2
        step = np.linalg.solve(curve + 1e-9 * np.eye(2), gradient)
        step *= min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-12))
        level, slope = level - float(step[0]), slope - float(step[1])
        if np.abs(step).max() < 1e-8:
            break
    return np.exp(level + slope * (log_seconds - centre))
