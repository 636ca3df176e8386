"""What to try next: a function of the trials so far, which holds no trial and no storage of its own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...spaces.record import TrialRecord

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
        self, trials: Sequence[TrialRecord], count: int = 1, *, ready: Sequence[Mapping[str, Any]] = (), new: bool = True
    ) -> Sequence[Proposal]:
        """Up to `count` proposals; may take seconds.

        Args:
            trials: all of the study, by number.
            ready: parameters proposed before, of trials that have not begun.
            new: a new trial may be started; else a paused one goes on, or there is no proposal.
        """

    def expected_gain(self, trials: Sequence[TrialRecord], more: int) -> float | None:
        """The share by which so many more trials are expected to enlarge the front's hypervolume; None if it is unknown."""
        return None

    def is_new_ground(self, trials: Sequence[TrialRecord], number: int, others: Collection[int]) -> bool:
        """Whether a trial should not be paused: the `others` that train on say too little about how its curve continues."""
        return False
