"""How a study ends with a trained model: by a deadline, or at a value of its metric.

The search goes on until the end, every complete trial's model is offered, and the best is kept. Trials begin while one that is
expected to fit is left; one that turns out slower trains on fewer samples (`objectives/state/time_left.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np

from ...objectives.state.time_left import plannable_s
from ...spaces.deadline import Deadline, moment_of
from ...spaces.errors import Fault, StudyFileError
from ...spaces.readable import seconds
from ...spaces.record import TrialRecord
from ...spaces.study.goals import Budget
from ...spaces.study.spec import StudySpec
from ...spaces.trial import TrialSetup
from ..suggest.space_transform import SearchSpace, SpaceTransform
from .decisions.eta import ClockFactors, Span
from .kept_model import KeptModel

# Of the longest training that fits, the share that is suggested at most: suggesting takes time too.
_ASKING = 0.9
# Settings by which the shortest trainings of a space are known, and the share of them that counts as short.
_SAMPLED, _SHORT = 512, 0.02

# What parameters take by law, seconds first.
Law = Callable[[Mapping[str, Any]], float]


class Finish:
    """When a study with a kept model ends, what still fits before, and which model it keeps.

    Args:
        deadline: None where a number of trials or a target ends it, and not a time.
        law: seconds of parameters, where known; None: they are not.
        whole: the parameters of a trial with those that are fixed.
        earlier: trials of earlier runs, which show how fast the machine is until those of this run do.
    """

    def __init__(
        self,
        budget: Budget,
        kept: KeptModel,
        deadline: Deadline | None,
        law: Law | None,
        whole: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        earlier: Sequence[TrialRecord],
    ) -> None:
        self.kept, self.deadline = kept, deadline
        self._budget, self._law, self._whole = budget, law, whole
        self._earlier = [span for record in earlier if (span := _span_of(record)) is not None]
        self._attempts: Callable[[], Sequence[Span]] = tuple

    def follow(self, attempts: Callable[[], Sequence[Span]]) -> None:
        """Go by a run's attempts, ended and running."""
        self._attempts = attempts

    def setup(self, setup: TrialSetup) -> TrialSetup:
        """A trial's setup, whose model is kept if it is the best, and which ends in time."""
        ends_by = None if self.deadline is None else time.time() + self._left_s()
        return replace(
            setup, model_folder=self.kept.folder_of(setup.number), scores_test=False, ends_by=ends_by
        )

    def longest_s(self) -> float:
        """Known seconds of the longest training to suggest; infinite where there is no deadline."""
        return math.inf if self.deadline is None else _ASKING * self._fitting_s()

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
        spans = self._attempts()
        return ClockFactors.of(spans if any(span.ended_s is not None for span in spans) else self._earlier)

    def _left_s(self) -> float:
        """Seconds until what comes after the last training has to begin."""
        return math.inf if self.deadline is None else self.deadline.left_s(slowdown=self._factors().slowdown)

    def _fitting_s(self) -> float:
        """Known seconds of the longest training that is expected to be over in time."""
        factors = self._factors()
        return (plannable_s(self._left_s()) - factors.overhead_s) / factors.slowdown


def _span_of(record: TrialRecord) -> Span | None:
    """What a trial of an earlier run took; None where its time was not known beforehand."""
    facts = record.facts
    if (
        record.outcome != "complete"
        or facts.train_s_source != "known"
        or not facts.train_s
        or not facts.measured_train_s
    ):
        return None
    started_s, ended_s = (
        datetime.fromisoformat(at).timestamp() if at else 0.0 for at in (record.started_at, record.ended_at)
    )
    return Span(started_s, ended_s, facts.train_s, facts.measured_train_s, 1.0, 1.0, 1)


def finish_of(
    spec: StudySpec,
    stored: Deadline | None,
    began_at: float,
    space: SearchSpace,
    law: Law | None,
    kept: KeptModel | None,
    earlier: Sequence[TrialRecord],
) -> Finish | None:
    """How a study ends, by its budget; None where it ends with its search.

    Args:
        stored: its deadline as an earlier run has stored it, which holds for as long as it is written the same.
        began_at: when this run began, in seconds since 1970.
        kept: where it keeps its model.
        earlier: its trials so far.

    Raises:
        StudyFileError: the deadline has passed, or nothing can be trained by then.
    """
    budget = spec.budget
    if not budget.keeps_model:
        return None
    assert kept is not None
    deadline = None if budget.by is None else _deadline(budget.by, stored, began_at)
    if law is not None and deadline is not None:
        left_s = deadline.left_s(slowdown=1.0)
        if faults := list(_too_long(spec, law, space, _shortest_s(law, space), left_s, deadline, kept)):
            raise StudyFileError(faults)
    return Finish(budget, kept, deadline, law, space.whole, earlier)


def _deadline(by: str, stored: Deadline | None, began_at: float) -> Deadline:
    if stored is not None and stored.given == by:
        return stored
    return Deadline(by, began_at, moment_of(by, datetime.fromtimestamp(began_at).astimezone()).timestamp())


def _shortest_s(law: Law, space: SearchSpace) -> float:
    """Known seconds of short trainings of the space; NaN where none can be planned."""
    transform = SpaceTransform(space.searched, space.conditions)
    points = np.random.default_rng(0).random((_SAMPLED, transform.width))
    known = np.array([law(space.whole(parameters)) for parameters in transform.decode_many(points)])
    known = known[np.isfinite(known)]
    return float(np.quantile(known, _SHORT)) if len(known) else math.nan


def _too_long(
    spec: StudySpec,
    law: Law,
    space: SearchSpace,
    shortest_s: float,
    left_s: float,
    deadline: Deadline,
    kept: KeptModel,
) -> Iterator[Fault]:
    """What cannot be trained in time, although the study asks for it."""
    left = f"{seconds(max(left_s, 0.0))} ({deadline.given}), with {seconds(deadline.closing_s(1.0))} set aside for the end"
    if kept.score is not None:
        return
    if time.time() >= deadline.ends_at:
        passed = (
            f"{deadline.given} passed at {datetime.fromtimestamp(deadline.ends_at).astimezone():%H:%M:%S}"
        )
        yield Fault(
            "budget.by",
            f"expected a deadline that is ahead; {passed}, and no model was trained by then. Write another one.",
        )
        return
    if shortest_s > left_s:
        yield Fault(
            "budget.by",
            f"expected time for at least one training, about {seconds(shortest_s)} for the shortest of this space; got {left}. "
            "Allow more time, or shorter trainings.",
        )
        return
    for index, setting in enumerate(spec.baseline):
        takes_s = law(space.whole(space.chosen(setting)))
        if takes_s > left_s:
            message = (
                f"expected a setting that can be trained in {left}; this one takes about {seconds(takes_s)}."
            )
            yield Fault(f"baseline.{index}", f"{message} Allow more time, or remove it.")
