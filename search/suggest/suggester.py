"""What to try next: a function of the trials so far, which holds no trial and no storage of its own.

`FrontSuggester` is bsearch's own; `OptunaSuggester` asks one of Optuna's samplers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...spaces.record import TrialRecord
from ...spaces.study.goals import Objectives
from .space_transform import SearchSpace
from .trial_history import PriorTrial

# Searched parameters of a new trial, or the number of a paused one that should go on.
Proposal = Mapping[str, Any] | int


class Suggester(ABC):
    """Proposes what to try next.

    Attributes:
        longest_s: no trial that is known to take longer is proposed.
    """

    longest_s = math.inf

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


def suggester_of(
    sampler: str,
    space: SearchSpace,
    objectives: Objectives,
    *,
    trials: int = 0,
    known_seconds: Callable[[Mapping[str, Any]], float | tuple[float, ...]] | None = None,
    prior_trials: Sequence[PriorTrial] = (),
    doubted: bool = False,
    by_time: bool = False,
    pauses: bool = False,
    seed: int = 0,
) -> Suggester:
    """The named sampler: `front`, one of Optuna's, or `module:attr` of any Optuna sampler.

    Args:
        trials: that the study has already.
        known_seconds, prior_trials, doubted, by_time, pauses: as for `FrontSuggester`, the only one that uses them.

    Raises:
        StudyFileError: it cannot be imported or is not a sampler.
    """
    if sampler != "front":
        from .optuna.suggester import OptunaSuggester

        return OptunaSuggester(sampler, space, objectives, seed + trials)
    from .front_suggester import FrontSuggester

    return FrontSuggester(
        space.searched,
        len(objectives.speeds),
        conditions=space.conditions,
        expected=space.expected,
        known_seconds=known_seconds,
        prior_trials=prior_trials,
        doubted=doubted,
        scaled=space.fixed.get("rule") != "constant",
        by_time=by_time,
        pauses=pauses,
        seed=seed,
    )


__all__ = ["Proposal", "Suggester", "suggester_of"]
