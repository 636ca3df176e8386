"""What a study that ends with a trained model does with a free device, as its trials end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ....spaces.record import TrialRecord
from ....spaces.trial import COUNTED
from ...suggest.outlook import Outlook
from ...suggest.suggester import Suggester
from .deadline import Decision, decide
from .final import Final, Pace, final_of
from .target import Reach, reach

# Complete trials before a final training begins, unless so much of the time is used.
_LEAST_TRIALS, _LEAST_SHARE = 6, 0.3
# Of the longest training that fits, the share that is suggested at most: suggesting takes time too.
_ASKING = 0.9
# A final training is worth it if it is expected to add so much of the accuracy's spread.
_LEAST_GAIN = 0.002
# Of trainings that models expect to reach the target, one in so many does, before any has been tried: the best of many chances
# is the luckiest (docs/log.md).
_PROMISED = 3.0
# A training that reaches the target in this share of the draws is a final one: its model may well be the study's.
_LIKELY = 0.5
# With less chance than this a training tells less than a trial of the search.
_WORTH_IT = 0.07
# With less chance than this to reach the target in time, the study makes the best of the time instead.
_HOPEFUL = 0.5

# A training that is, or may become, the study's model; any trial of the search; or nothing.
Step = Final | Literal["search"] | None


class FinalPlanner:
    """Decides what devices do until a deadline, or until a model is good enough.

    Args:
        sure: the probability with which a final training is to be done in time, as it is planned.
        whole_s: from the study's beginning to its deadline; infinite: there is none.
        target: what the model has to measure, higher is better; None: as much as there is time for.

    Attributes:
        decision: the latest about the deadline.
        reach: the latest about the target.
        first: the training towards the target that would begin now; None where none is expected to reach it.
    """

    def __init__(self, suggester: Suggester, sure: float, whole_s: float = math.inf, target: float | None = None) -> None:
        self._suggester, self._sure, self._whole_s, self._target = suggester, sure, whole_s, target
        self._outlook: tuple[tuple[int, int], Outlook | None] = (-1, -1), None
        self._over = -1, -1  # the state of the trials in which there was nothing more to do
        self.decision, self.reach = Decision(None, 0), Reach()
        self.first: Final | None = None

    @property
    def knows(self) -> bool:
        """Whether enough trials have ended for models to tell."""
        return self._outlook[1] is not None

    def next(self, trials: Sequence[TrialRecord], pace: Pace, *, searches: bool = True) -> Step:
        """What to do with a free device.

        None: nothing that fits is expected to do any good.

        Args:
            trials: of the study.
            searches: whether the search may go on.
        """
        if self._over == _state(trials):
            return None
        if math.isfinite(self._whole_s):
            self._suggester.longest_s = _ASKING * pace.wall.longest_s(pace.left_s, self._sure)
        outlook = self._seen(trials)
        if outlook is None:
            return "search" if searches and self._suggester.longest_s > 0 else None
        if self._target is not None:
            # Those that were to reach it so far have not, or the study would be over: the mean of the share that comes true,
            # with an exponential prior.
            missed = sum(trial.facts.target_chance or 0.0 for trial in trials if trial.outcome in COUNTED)
            self.reach = reach(outlook, self._target, pace, self._sure, 1 / (_PROMISED + missed))
            hopeful = self.reach.chance >= _HOPEFUL or not math.isfinite(self._whole_s)
            if hopeful and (step := self._towards(outlook, pace, searches=searches)) is not None:
                return step
            self.first = None
        return self._by_deadline(trials, outlook, pace, searches=searches) if math.isfinite(self._whole_s) else None

    def _towards(self, outlook: Outlook, pace: Pace, *, searches: bool) -> Step:
        """The cheapest way to the target; None where only a search is left to do, and may not be done."""
        assert self._target is not None
        row, self.decision, self.first = self.reach.first, Decision(None, 0), None
        if row is not None:
            chance = float((outlook.measured[:, row] >= self._target).mean())
            self.first = final_of(outlook, row, pace, is_last=chance >= _LIKELY, chance=chance)
        if self.first is not None and self.reach.first_chance >= _WORTH_IT and (searches or self.first.is_last):
            return self.first
        return "search" if searches else None

    def _by_deadline(self, trials: Sequence[TrialRecord], outlook: Outlook, pace: Pace, *, searches: bool) -> Step:
        """What is worth most in the time that is left."""
        ended = sum(trial.outcome == "complete" for trial in trials)
        self.decision = decide(outlook, pace, self._sure)
        early = ended < _LEAST_TRIALS and pace.left_s > (1 - _LEAST_SHARE) * self._whole_s
        if searches and (self.decision.trials or early):
            return "search"
        final = self.decision.final
        if final is not None and final.gain > _LEAST_GAIN:
            return final
        if searches:
            return "search"  # there is nothing better to do with the time
        self._over = self._outlook[0]
        return None

    def _seen(self, trials: Sequence[TrialRecord]) -> Outlook | None:
        """The outlook after these trials, which takes a moment."""
        state = _state(trials)
        if self._outlook[0] != state:
            self._outlook = state, self._suggester.outlook(trials)
        return self._outlook[1]


def _state(trials: Sequence[TrialRecord]) -> tuple[int, int]:
    """What decisions depend on beside the time: how many trials there are, and how many have ended."""
    return len(trials), sum(trial.has_ended for trial in trials)


__all__ = ["FinalPlanner", "Step"]
