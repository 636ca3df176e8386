"""How a study ends with a trained model: by a deadline, for an amount of money, or at a value of its metric.

The search goes on until the end, every complete trial's model is offered, and the best is kept. Trials begin while one that is
expected to fit is left; one that turns out slower trains on fewer samples (`objectives/state/time_left.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from ...objectives.state.time_left import plannable_s
from ...spaces.deadline import StoredDeadline, moment_of
from ...spaces.errors import Fault, StudyFileError
from ...spaces.readable import seconds
from ...spaces.record import TrialRecord
from ...spaces.study.goals import Budget
from ...spaces.study.spec import StudySpec
from ...spaces.trial import TrialSetup
from ..suggest.space_transform import SearchSpace, SpaceTransform
from .decisions.eta import ClockFactors, Span
from .kept_model import KeptModel

# What comes before the first and after the last training: imports, the front, files, leaving Ray. A share of the time, within
# these seconds, and so many times as long at most where the machine is slow.
_CLOSING, _CLOSING_S, _SLOWEST, _MOST_CLOSING = 0.03, (5.0, 15.0), 2.5, 0.12
# Of the longest training that fits, the share that is suggested at most: suggesting takes time too.
_ASKING = 0.9
# Settings by which the shortest trainings of a space are known, and the share of them that counts as short.
_SAMPLED, _SHORT = 512, 0.02

# What parameters take by law, seconds first.
Law = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class Limit:
    """Until when a study runs.

    Args:
        given: as it was written, for words.
        began_at, ends_at: seconds since 1970; infinite where money alone is the limit.
        cost: the most that may be spent; None: any amount.
        hourly: the price of everything that the study holds, busy or idle.
        start_s: what this run took before its driver's time counts, which is paid for too.
    """

    given: str
    began_at: float
    ends_at: float
    cost: float | None
    hourly: float
    start_s: float

    def left_s(self, driven_s: float, slowdown: float) -> float:
        """Seconds until what comes after the last training has to begin.

        Args:
            driven_s: driver time so far, over all runs.
            slowdown: of the machine, as its trials show it.
        """
        left_s = self.ends_at - time.time()
        if (paid_s := self._paid_s) is not None:
            left_s = min(left_s, paid_s - driven_s - self.start_s)
        return left_s - self.closing_s(slowdown)

    def closing_s(self, slowdown: float) -> float:
        """Seconds set aside for what comes after the last training."""
        whole_s, (least, most) = self.whole_s, _CLOSING_S
        aside_s = min(max(_CLOSING * whole_s, least), most) * min(max(slowdown, 1.0), _SLOWEST)
        return min(aside_s, max(_MOST_CLOSING * whole_s, least))

    def paid_until(self, driven_s: float) -> float | None:
        """When what may be spent is spent, in seconds since 1970; None where any amount may be."""
        return None if (paid_s := self._paid_s) is None else time.time() + paid_s - driven_s - self.start_s

    @property
    def whole_s(self) -> float:
        """Seconds from its beginning to its end."""
        whole_s = self.ends_at - self.began_at
        return whole_s if (paid_s := self._paid_s) is None else min(whole_s, paid_s)

    @property
    def _paid_s(self) -> float | None:
        return None if self.cost is None or not self.hourly else self.cost / self.hourly * 3600


class Finish:
    """When a study with a kept model ends, what still fits before, and which model it keeps.

    Args:
        limit: None where a number of trials or a target ends it, and not a time.
        law: seconds of parameters, where known; None: they are not.
        whole: the parameters of a trial with those that are fixed.
        earlier: trials of earlier runs, which show how fast the machine is until those of this run do.
    """

    def __init__(
        self,
        budget: Budget,
        kept: KeptModel,
        limit: Limit | None,
        law: Law | None,
        whole: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        earlier: Sequence[TrialRecord],
    ) -> None:
        self.kept, self.limit = kept, limit
        self._budget, self._law, self._whole = budget, law, whole
        self._earlier = [span for record in earlier if (span := _span_of(record)) is not None]
        self._attempts: Callable[[], tuple[Sequence[Span], float]] = lambda: ((), 0.0)

    def deadline(self) -> StoredDeadline | None:
        """When the study has to be done; None where it is not limited by time or money."""
        limit = self.limit
        if limit is None:
            return None
        ends_at = limit.ends_at if math.isfinite(limit.ends_at) else None
        return StoredDeadline(limit.given, ends_at, limit.began_at, limit.paid_until(self._attempts()[1]))

    def follow(self, attempts: Callable[[], tuple[Sequence[Span], float]]) -> None:
        """Go by a run's attempts, ended and running, and by its driver's seconds over all runs."""
        self._attempts = attempts

    def setup(self, setup: TrialSetup) -> TrialSetup:
        """A trial's setup, whose model is kept if it is the best, and which ends in time."""
        ends_by = None if self.limit is None else time.time() + self._left_s()
        return replace(setup, model_folder=self.kept.folder_of(setup.number), scores_test=False, ends_by=ends_by)

    def longest_s(self) -> float:
        """Known seconds of the longest training to suggest; infinite where there is no limit."""
        return math.inf if self.limit is None else _ASKING * self._fitting_s()

    def fits(self, parameters: Mapping[str, Any]) -> bool:
        """Whether a trial that begins now is expected to be over in time; where its time is unknown, whether any is left."""
        known_s = math.nan if self._law is None else self._law(self._whole(parameters))
        return known_s <= self._fitting_s() if math.isfinite(known_s) else self._left_s() > 0

    def resumes(self) -> bool:
        """Whether there is time for interrupted trials: they take what there is, and have a part behind them."""
        return self._left_s() > 0

    def has_reached(self) -> bool:
        """Whether the kept model is as good as the study's target."""
        target, score = self._budget.until, self.kept.score
        return target is not None and score is not None and score >= self.kept.metric.score(target)

    def _factors(self) -> ClockFactors:
        """How fast the machine is."""
        spans, _ = self._attempts()
        return ClockFactors.of(spans if any(span.ended_s is not None for span in spans) else self._earlier)

    def _left_s(self) -> float:
        """Seconds until what comes after the last training has to begin."""
        return math.inf if self.limit is None else self.limit.left_s(self._attempts()[1], self._factors().slowdown)

    def _fitting_s(self) -> float:
        """Known seconds of the longest training that is expected to be over in time."""
        factors = self._factors()
        return (plannable_s(self._left_s()) - factors.overhead_s) / factors.slowdown


def _span_of(record: TrialRecord) -> Span | None:
    """What a trial of an earlier run took; None where its time was not known beforehand."""
    facts = record.facts
    if record.outcome != "complete" or facts.train_s_source != "known" or not facts.train_s or not facts.measured_train_s:
        return None
    started_s, ended_s = (datetime.fromisoformat(at).timestamp() if at else 0.0 for at in (record.started_at, record.ended_at))
    return Span(started_s, ended_s, facts.train_s, facts.measured_train_s, 1.0, 1.0, 1)


def finish_of(
    spec: StudySpec,
    stored: StoredDeadline | None,
    began_at: float,
    space: SearchSpace,
    law: Law | None,
    kept: KeptModel | None,
    earlier: Sequence[TrialRecord],
    *,
    hourly: float,
    driven_s: float,
) -> Finish | None:
    """How a study ends, by its budget; None where it ends with its search.

    Args:
        stored: its deadline as an earlier run has stored it, which holds for as long as it is written the same.
        began_at: when this run began, in seconds since 1970.
        kept: where it keeps its model.
        earlier: its trials so far.
        hourly: the price of everything that the study holds.

    Raises:
        StudyFileError: the deadline has passed, or nothing can be trained by then.
    """
    budget = spec.budget
    if not budget.keeps_model:
        return None
    assert kept is not None
    limit = _limit(budget, stored, began_at, hourly) if budget.has_deadline else None
    if law is not None and limit is not None:
        left_s = limit.left_s(driven_s, 1.0)
        if faults := list(_too_long(spec, law, space, _shortest_s(law, space), left_s, limit, kept)):
            raise StudyFileError(faults)
    return Finish(budget, kept, limit, law, space.whole, earlier)


def _limit(budget: Budget, stored: StoredDeadline | None, began_at: float, hourly: float) -> Limit:
    money = budget.cost, hourly, time.time() - began_at
    if budget.by is None:
        return Limit(f"{budget.cost:g}", began_at, math.inf, *money)
    if stored is not None and stored.given == budget.by and stored.began_at is not None and stored.ends_at is not None:
        return Limit(stored.given, stored.began_at, stored.ends_at, *money)
    ends = moment_of(budget.by, datetime.fromtimestamp(began_at).astimezone())
    return Limit(budget.by, began_at, ends.timestamp(), *money)


def _shortest_s(law: Law, space: SearchSpace) -> float:
    """Known seconds of short trainings of the space; NaN where none can be planned."""
    transform = SpaceTransform(space.searched, space.conditions)
    points = np.random.default_rng(0).random((_SAMPLED, transform.width))
    known = np.array([law(space.whole(parameters)) for parameters in transform.decode_many(points)])
    known = known[np.isfinite(known)]
    return float(np.quantile(known, _SHORT)) if len(known) else math.nan


def _too_long(
    spec: StudySpec, law: Law, space: SearchSpace, shortest_s: float, left_s: float, limit: Limit, kept: KeptModel
) -> Iterator[Fault]:
    """What cannot be trained in time, although the study asks for it."""
    key = "budget.by" if spec.budget.by else "budget.cost"
    left = f"{seconds(max(left_s, 0.0))} ({limit.given}), with {seconds(limit.closing_s(1.0))} set aside for the end"
    if kept.score is not None:
        return
    if time.time() >= limit.ends_at:
        passed = f"{limit.given} passed at {datetime.fromtimestamp(limit.ends_at).astimezone():%H:%M:%S}"
        yield Fault(key, f"expected a deadline that is ahead; {passed}, and no model was trained by then. Write another one.")
        return
    if shortest_s > left_s:
        yield Fault(
            key,
            f"expected time for at least one training, about {seconds(shortest_s)} for the shortest of this space; got {left}. "
            "Allow more time, or shorter trainings.",
        )
        return
    for index, setting in enumerate(spec.baseline):
        takes_s = law(space.whole(space.chosen(setting)))
        if takes_s > left_s:
            message = f"expected a setting that can be trained in {left}; this one takes about {seconds(takes_s)}."
            yield Fault(f"baseline.{index}", f"{message} Allow more time, or remove it.")
