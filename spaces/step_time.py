"""How long a step takes: a line in passes and samples, fitted to a few timed steps.

step_s = pass_s * passes + sample_s * samples + update_s. This is the sketch that `bsearch check` forecasts with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from .plan import BatchPlan


@dataclass(frozen=True, slots=True)
class TimedStep:
    """Median seconds of one optimizer step under a plan."""

    plan: BatchPlan
    step_s: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds that a pass, a sample and an optimizer update add to a step on one device.

    >>> round(StepTime(pass_s=0.01, sample_s=0.001, update_s=0.005).step_s(BatchPlan(100, accumulation=2)), 6)
    0.125
    """

    pass_s: float
    sample_s: float
    update_s: float

    def step_s(self, plan: BatchPlan) -> float:
        return self.pass_s * plan.accumulation + self.sample_s * plan.shares[0] + self.update_s

    def train_s(self, plan: BatchPlan, samples_budget: float) -> float:
        """Seconds of a whole training: its steps times the seconds of one."""
        return math.ceil(samples_budget / plan.effective_batch) * self.step_s(plan)


def fit_step_time(timed: Sequence[TimedStep]) -> StepTime:
    """Least squares with no negative seconds, every step weighed by its own length.

    >>> law = StepTime(pass_s=0.01, sample_s=0.001, update_s=0.005)
    >>> plans = [BatchPlan(8), BatchPlan(100), BatchPlan(100, accumulation=2), BatchPlan(400)]
    >>> fit = fit_step_time([TimedStep(plan, law.step_s(plan)) for plan in plans])
    >>> [round(value, 9) for value in (fit.pass_s, fit.sample_s, fit.update_s)]
    [0.01, 0.001, 0.005]
    """
    terms = np.array([[step.plan.accumulation, step.plan.shares[0], 1.0] for step in timed])
    seconds = np.array([step.step_s for step in timed])
    (pass_s, sample_s, update_s), _ = nnls(terms / seconds[:, None], np.ones(len(timed)))
    return StepTime(float(pass_s), float(sample_s), float(update_s))
