"""What to try next: a function of the trials so far, which holds no trial and no storage of its own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ...spaces.record import TrialRecord
from ...spaces.study.goals import Metric
from .stopping import EarlyStopping, early_stopping

# Searched parameters of a new trial, or the number of a paused one that should go on.
Proposal = Mapping[str, Any] | int


class Suggester(ABC):
    """Proposes what to try next.

    Attributes:
        longest_s: no trial that is known to take longer is proposed.
        overhead: what a trial takes besides training, in the same unit; it counts where time limits the study.
    """

    longest_s = math.inf
    overhead = 0.0

    @abstractmethod
    def suggest(
        self, trials: Sequence[TrialRecord], count: int = 1, *, ready: Sequence[Mapping[str, Any]] = ()
    ) -> Sequence[Proposal]:
        """Up to `count` proposals; may take seconds.

        Args:
            trials: all of the study, by number.
            ready: parameters proposed before, of trials that have not begun.
        """

    def expected_gain(self, trials: Sequence[TrialRecord], more: int) -> float | None:
        """The share by which so many more trials are expected to enlarge the front's hypervolume; None if it is unknown."""
        return None

    def early_stopping(
        self, kind: str, metric: Metric, trials: Sequence[TrialRecord], *, pauses: bool
    ) -> EarlyStopping:
        """What stops a study's trials, `front` or `none`; with `pauses`, which only some can resume, it pauses them instead."""
        return early_stopping(kind, metric)
