"""The step-time law: seconds of an optimizer step under any plan, fitted to whole steps that were timed.

step_s(plan) = sum over the passes of pass_s(m) + update_s. pass_s is known at the micro-batches that were timed and runs
straight between them; it never falls. One law holds for one number of devices, whose talk is in its update. Beyond the
largest size that was timed it says nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Self

import numpy as np
from scipy.optimize import nnls

from .errors import ProbeError
from .memory import check_points
from .plan import BatchPlan, step_plans

# The interval, relative, at which timing is content.
PRECISION = 0.02
# Resamples of the rounds for an interval; more move its first digit no further.
_RESAMPLES = 200
# Passes beyond which none was ever faster.
_MOST_PASSES = 64
# Rounds below which resampling says nothing.
_FEWEST_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class TimedPlan:
    """Seconds of one optimizer step under a plan, a figure for each round in which it was timed.

    `input_s` is what of them went into waiting for the samples.
    """

    plan: BatchPlan
    rounds: tuple[float, ...]
    input_s: float = 0.0

    @property
    def step_s(self) -> float:
        return median(self.rounds)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of an optimizer step on so many devices.

    Args:
        points: (micro-batch, seconds of a forward and backward pass), sizes ascending.
        update_s: what a step takes besides its passes: the optimizer, and on several devices their talk.
        evaluate_sample_s: seconds of evaluating one sample, where that was timed; no part of a step.
        interval: half width of the predictions' 95 % interval, relative, the widest of the timed plans; None where too
            few rounds were timed to say.
        misfit: how far the law misses a timed plan that it was not fitted to, relative, median and worst.
        timed: what it was fitted to.

    >>> round(StepTime(((1, 0.011), (101, 0.111)), update_s=0.005).step_s(BatchPlan(100, accumulation=2)), 6)
    0.125
    """

    points: tuple[tuple[int, float], ...]
    update_s: float
    devices: int = 1
    evaluate_sample_s: float | None = None
    interval: float | None = None
    misfit: tuple[float, float] | None = None
    timed: tuple[TimedPlan, ...] = ()

    def __post_init__(self) -> None:
        check_points("step time", self.points)
        if not 0 <= self.update_s < math.inf or self.devices < 1:
            raise ProbeError(f"step time: expected seconds >= 0 on at least one device, got {self.update_s} on {self.devices}")

    @property
    def largest_micro_batch(self) -> int:
        """The largest size timed."""
        return self.points[-1][0]

    def step_s(self, plan: BatchPlan) -> float:
        """Seconds of one step.

        Raises:
            ProbeError: another number of devices, or passes larger than any that was timed.
        """
        if plan.devices != self.devices:
            raise ProbeError(f"step time: known on {self.devices} devices, asked on {plan.devices}")
        if plan.largest_micro_batch > self.largest_micro_batch:
            raise ProbeError(
                f"micro-batch {plan.largest_micro_batch}: step time is known up to {self.largest_micro_batch} samples"
            )
        return self._seconds(plan)

    def train_s(self, plan: BatchPlan, samples_budget: int, **limits: Any) -> float:
        """Seconds of a whole training: its steps times the seconds of one, its last step as large as it is.

        Args:
            limits: those that the trial plans under: see `spaces.plan.step_plans`.

        >>> StepTime(((1, 1.0), (100, 1.0)), update_s=0.0).train_s(BatchPlan(100, accumulation=2), 1050)
        21.0
        """
        full, last = step_plans(plan, samples_budget, **limits)
        return full * self.step_s(plan) + sum(map(self._seconds, last))

    def pass_s(self, micro_batch: int) -> float:
        """Seconds of one forward and backward pass."""
        sizes = [size for size, _ in self.points]
        # Beyond the ends only the last step's odd remainder gets here.
        place = min(max(bisect_left(sizes, micro_batch), 1), len(sizes) - 1)
        if place < 1:
            return self.points[0][1]
        (low, low_s), (high, high_s) = self.points[place - 1], self.points[place]
        return low_s + (high_s - low_s) * (micro_batch - low) / (high - low)

    def _seconds(self, plan: BatchPlan) -> float:
        return sum(self.pass_s(size) for size in plan.passes() if size) + self.update_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        timed = tuple(TimedPlan(BatchPlan(**one["plan"]), tuple(one["rounds"]), one["input_s"]) for one in values["timed"])
        points = tuple((int(size), float(pass_s)) for size, pass_s in values["points"])
        misfit = values["misfit"]
        return cls(**{**values, "timed": timed, "points": points, "misfit": misfit and (misfit[0], misfit[1])})


def fit_step_time(timed: Sequence[TimedPlan]) -> StepTime:
    """Least squares in which no seconds are negative and no pass gets faster as it grows; every step weighs the same.

    >>> law = StepTime(((8, 0.1), (100, 0.5), (400, 3.5)), update_s=0.05)
    >>> plans = [BatchPlan(8), BatchPlan(100), BatchPlan(400), BatchPlan(16, accumulation=2), BatchPlan(200, accumulation=2)]
    >>> fit = fit_step_time([TimedPlan(plan, (law.step_s(plan),)) for plan in plans])
    >>> [(size, round(pass_s, 6)) for size, pass_s in fit.points], round(fit.update_s, 6)
    ([(8, 0.1), (100, 0.5), (400, 3.5)], 0.05)
    """
    sizes = _sizes(timed)
    terms = np.array([_terms(one.plan, sizes) for one in timed])
    update_s, first_s, *slopes = (float(value) for value in _solved(terms, np.array([one.step_s for one in timed])))
    points = [(sizes[0], first_s)]
    for size, slope in zip(sizes[1:], slopes, strict=True):
        points.append((size, points[-1][1] + slope * (size - points[-1][0])))
    return StepTime(tuple(points), update_s, devices=timed[0].plan.devices, timed=tuple(timed))


def _sizes(timed: Iterable[TimedPlan]) -> list[int]:
    """The micro-batches that were timed in a single pass: where the law may bend."""
    timed = list(timed)
    return sorted({one.plan.largest_micro_batch for one in timed if one.plan.accumulation == 1})


def _terms(plan: BatchPlan, sizes: Sequence[int]) -> list[float]:
    """What a plan's seconds are made of: a step, its passes, and their samples between each two sizes."""
    passes = [size for size in plan.passes() if size]
    between = [sum(min(max(size - low, 0), high - low) for size in passes) for low, high in pairwise(sizes)]
    return [1.0, len(passes), *between]


def _solved(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Seconds of each term, none below zero; columns scaled alike, for samples count in thousands and steps in ones."""
    weighed = terms / seconds[:, None]
    scale = np.abs(weighed).max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(weighed / scale, np.ones(len(seconds)))
    return np.asarray(solution / scale)


def with_trust(law: StepTime, seed: int = 0) -> StepTime:
    """The law with its interval (its rounds resampled) and its misfit (each timed plan foretold from the others)."""
    return replace(law, interval=_interval(law.timed, seed), misfit=_misfit(law.timed))


def _interval(timed: Sequence[TimedPlan], seed: int) -> float | None:
    """Whole rounds are resampled: plans of one round were timed under the same load."""
    seconds = np.array([one.rounds for one in timed])  # (plans, rounds)
    if seconds.shape[1] < _FEWEST_ROUNDS:
        return None
    sizes = _sizes(timed)
    terms = np.array([_terms(one.plan, sizes) for one in timed])
    chance = np.random.default_rng(seed)
    predictions = []
    for _ in range(_RESAMPLES):
        drawn = chance.integers(seconds.shape[1], size=seconds.shape[1])
        predictions.append(terms @ _solved(terms, np.median(seconds[:, drawn], axis=1)))
    low, middle, high = np.percentile(np.array(predictions), [2.5, 50, 97.5], axis=0)
    return float(((high - low) / 2 / middle).max())


def _misfit(timed: Sequence[TimedPlan]) -> tuple[float, float] | None:
    """Plans at the ends of the range are not left out: what lies beyond the others is no interpolation."""
    sizes = _sizes(timed)
    errors = []
    for left_out in timed:
        if left_out.plan.accumulation == 1 and left_out.plan.largest_micro_batch in (sizes[0], sizes[-1]):
            continue
        law = fit_step_time([one for one in timed if one is not left_out])
        errors.append(abs(law._seconds(left_out.plan) / left_out.step_s - 1))
    return (median(errors), max(errors)) if errors else None


def fastest_plan(plan: BatchPlan, law: StepTime, *, smallest_micro_batch: int = 1) -> BatchPlan:
    """The number of passes, from the plan's own up, of the least known step time.

    More passes than needed have to save 3 % of the time, and twice the law's interval and misfit; what saves less may be
    noise, or a line drawn where the truth bends.

    >>> law = StepTime(((1, 0.002), (64, 0.065), (256, 2.0)), update_s=0.0, interval=0.01)
    >>> fastest_plan(BatchPlan(256), law).accumulation
    4
    """
    if law.interval is None:
        return plan
    misfit = law.misfit[0] if law.misfit else 0.0
    best, best_s = plan, law.step_s(plan) * (1 - max(0.03, 2 * law.interval, 2 * misfit))
    for accumulation in range(plan.accumulation + 1, min(_MOST_PASSES, plan.shares[-1] // smallest_micro_batch) + 1):
        other = BatchPlan(plan.effective_batch, accumulation, plan.devices)
        if (other_s := law.step_s(other)) < best_s * (1 - 1e-9):
            best, best_s = other, other_s
    return best


def timing_plans(smallest: int, highest: int, *, devices: int = 1, edges: bool = False) -> list[BatchPlan]:
    """Nine plans or so that show the whole law: micro-batches spread over the range, some of them in several passes.

    Args:
        edges: time sizes just beside multiples of 8 and powers of two as well, where kernels may change.

    >>> [(plan.effective_batch, plan.accumulation) for plan in timing_plans(1, 256)]
    [(1, 1), (3, 1), (9, 1), (28, 1), (84, 1), (256, 1), (6, 2), (27, 3), (168, 2)]
    """
    gaps = 3 if edges else 5
    sizes = sorted({round(smallest * (highest / smallest) ** (part / gaps)) for part in range(gaps + 1)})
    if edges:
        near = 1 << max((smallest + highest) // 2, 1).bit_length() - 1
        sizes = sorted({*sizes, *(size for size in (near - 1, near, near + 1) if smallest <= size <= highest)})
    plans = [BatchPlan(size * devices, 1, devices) for size in sizes]
    inner = [size for size in sizes if size < highest] or [max(highest // 2, smallest)]
    several = [(inner[len(inner) // 4], 2), (inner[len(inner) // 2], 3), (inner[-1], 2)]
    return plans + [BatchPlan(size * passes * devices, passes, devices) for size, passes in dict.fromkeys(several)]


__all__ = ["StepTime", "TimedPlan", "fastest_plan", "fit_step_time", "timing_plans", "with_trust"]
