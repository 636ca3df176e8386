"""How much of a training fits before the moment at which it has to be done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...spaces.schedule import evaluation_points, next_point
from ...spaces.trial import TrialSetup

if TYPE_CHECKING:
    from ..parallel.data_parallel import Ranks

# Steps between two readings of the clock, on which several devices agree.
_EVERY = 8
# The latest readings of the clock, which tell the speed; the first says nothing yet, since a training begins slowly.
_READINGS = 12
# What is left is not planned to the last second.
_SPARE = 0.02
_SPARE_S = 1.0


def plannable_s(left_s: float) -> float:
    """Of the seconds until a training has to be done, those that it may be planned to take without being shortened."""
    return (left_s - _SPARE_S) / (1 + _SPARE)


class TimeLeft:
    """The samples that a training still has time for: its budget, or less where it is slower than planned.

    Checkpoints on the way count as they were; evaluations to come and what follows the last one are set aside. The
    schedule of the rate follows the samples, so a shortened training ends on the low rate that it was planned to end on (as in
    Li, Yumer & Ramanan 2020, arXiv 1905.04753).

    Args:
        seen: samples that were trained on before.
        points: samples at which a training of so many is evaluated; default: at equal fractions of it.

    Attributes:
        samples: the budget that fits now.
        due: samples after which to evaluate next.
    """

    def __init__(
        self, setup: TrialSetup, seen: int, points: Callable[[int], Sequence[int]] | None = None
    ) -> None:
        self._ends_by, self._whole, self._size = setup.ends_by, setup.samples_budget, setup.effective_batch
        self.samples = setup.samples_budget
        self._readings: deque[tuple[float, int]] = deque(maxlen=_READINGS)
        self._points = points or (lambda samples: evaluation_points(samples, setup.training.evaluations))
        self._evaluating_s = self._evaluation_s = 0.0  # so far, and the longest one
        self._plan_evaluation(seen)

    def _plan_evaluation(self, seen: int) -> None:
        self.due = next_point(self._points(self.samples), seen)

    def evaluated(self, seconds: float, seen: int) -> None:
        """An evaluation after `seen` samples took this long; those to come, the test and saving are expected to take as long
        each.
        """
        self._evaluating_s += seconds
        self._evaluation_s = max(self._evaluation_s, seconds)
        self._plan_evaluation(seen)

    def update(self, steps: int, seen: int, ranks: Ranks) -> None:
        """Read the clock after this many steps and samples, where more are to come. Several devices go by the first's.

        Never less than one more step, and never more than was planned.
        """
        if self._ends_by is None or (steps > _EVERY and steps % _EVERY):
            return
        self._readings.append((time.time() - self._evaluating_s, seen))
        self.samples = int(ranks.max_over_ranks(0.0 if ranks.rank else float(self._fits())))
        self._plan_evaluation(seen)

    def _fits(self) -> int:
        (began, first), (now, seen) = self._readings[0], self._readings[-1]
        if seen == first or seen >= self._whole:
            return self.samples
        middle, half = self._readings[len(self._readings) // 2]
        per_sample = (now - began) / (seen - first)
        if seen > half:
            per_sample = max(per_sample, (now - middle) / (seen - half))  # it may have become slower
        assert self._ends_by is not None
        to_come = sum(point > seen for point in self._points(self.samples)) + 2
        left_s = plannable_s(self._ends_by - now - self._evaluating_s - to_come * self._evaluation_s)
        steps = int(left_s / (per_sample * self._size))
        return min(seen + max(steps, 1) * self._size, self._whole)

    def facts(self, seen: int) -> dict[str, float]:
        """For the last measurement: the share of what was planned, where it is less."""
        return {"shortened_to": seen / self._whole} if self.samples <= seen < self._whole else {}
