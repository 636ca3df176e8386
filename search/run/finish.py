"""How a study ends with a trained model: by a deadline, for an amount of money, or at a value of its metric."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from ...objectives.state.time_left import plannable_s
from ...spaces.deadline import Plan, StoredDeadline, moment_of
from ...spaces.errors import Fault, StudyFileError
from ...spaces.readable import seconds
from ...spaces.record import TrialRecord
from ...spaces.study.goals import Budget, Metric
from ...spaces.study.spec import StudySpec
from ...spaces.trial import Measurement, TrialSetup
from ..suggest.outlook import EPOCHS
from ..suggest.space_transform import SearchSpace, SpaceTransform
from ..suggest.suggester import Suggester
from .decisions.eta import ClockFactors, Span, at_once
from .decisions.final import Pace
from .decisions.final_planner import FinalPlanner, Step
from .decisions.wall_time import WallTime
from .kept_model import KeptModel

# What comes before the first and after the last training: imports, the front, files, leaving Ray. A share of the time, within
# these seconds, and so many times as long at most where the machine is slow.
_CLOSING, _CLOSING_S, _SLOWEST, _MOST_CLOSING = 0.03, (5.0, 15.0), 2.5, 0.12
# The latest attempts, whose mean time is that of the next.
_RECENT = 12

# Without any attempt that has ended, the next is taken to last so long.
_SOON_S = 60.0
# Settings by which the shortest trainings of a space are known, and the share of them that counts as short.
_SAMPLED, _SHORT = 512, 0.02

# What parameters take by law, seconds first.
Law = Callable[[Mapping[str, Any]], "float | tuple[float, ...]"]


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
    cost: float | None = None
    hourly: float = 0.0
    start_s: float = 0.0

    def left_s(self, driven_s: float, slowdown: float = 1.0) -> float:
        """Seconds until what comes after the last training has to begin.

        Args:
            driven_s: driver time so far, over all runs.
            slowdown: of the machine, as its trials show it.
        """
        left_s = self.ends_at - time.time()
        if (paid_s := self._paid_s) is not None:
            left_s = min(left_s, paid_s - driven_s - self.start_s)
        return left_s - self.closing_s(slowdown)

    def closing_s(self, slowdown: float = 1.0) -> float:
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
    """What a study with a kept model does with a free device, and which model it keeps.

    Args:
        limit: None where a number of trials or a target ends it, and not a time.
        planner: None where the study's objective is not time, so that no training's time is known: it ends with its search.
        law: seconds of parameters, where known; None: they are not.
        whole: the parameters of a trial with those that are fixed.
        earlier: trials of earlier runs, which tell how fast the machine is until those of this run do.
        devices: of all trials that run side by side.
    """

    def __init__(
        self,
        budget: Budget,
        metric: Metric,
        kept: KeptModel,
        limit: Limit | None,
        planner: FinalPlanner | None,
        law: Law | None,
        whole: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        earlier: Sequence[TrialRecord] = (),
        devices: int = 1,
    ) -> None:
        self._devices = devices
        self._clock: Callable[[], tuple[Sequence[Span], float]] = lambda: ((), 0.0)
        self._earlier = [span for record in earlier if (span := _span_of(record)) is not None]
        self.kept, self.limit, self.plan = kept, limit, Plan()
        self._budget, self._metric, self._planner, self._law, self._whole = budget, metric, planner, law, whole

    def deadline(self) -> StoredDeadline:
        """When the study has to be done, with the plan until then."""
        limit = self.limit
        if limit is None:
            return StoredDeadline(self._target, None, None, self.plan)
        ends_at = limit.ends_at if math.isfinite(limit.ends_at) else None
        return StoredDeadline(limit.given, ends_at, limit.began_at, self.plan, limit.paid_until(self._clock()[1]))

    @property
    def _target(self) -> str:
        return "" if self._budget.until is None else f"{self._metric.name} {self._budget.until:g}"

    def follow(self, clock: Callable[[], tuple[Sequence[Span], float]]) -> None:
        """Go by a run's attempts, ended and running, and by its driver's seconds over all runs."""
        self._clock = clock

    def setup(self, setup: TrialSetup, *, final: bool) -> TrialSetup:
        """A trial's setup, whose model is kept if it is the best, and which ends in time."""
        ends_by = None if self.limit is None else time.time() + self._left_s()
        return replace(setup, model_folder=self.kept.folder_of(setup.number), scores_test=final, ends_by=ends_by)

    def step(self, trials: Sequence[TrialRecord], *, searches: bool) -> Step:
        """What to do with a free device; None: nothing more, since what fits is not expected to do any good.

        Args:
            searches: whether the search may go on.
        """
        if self._planner is None:
            return "search" if searches else None
        left_s, wall = self._left()
        if left_s <= 0:
            return None
        spans, _ = self._clock()
        took = [span.ended_s - span.started_s for span in spans if span.ended_s is not None][-_RECENT:]
        trial_s = sum(took) / len(took) / at_once(spans) if took else min(left_s, _SOON_S)
        pace = Pace(wall, left_s, trial_s, _free_in_s(spans, trial_s, self._devices))
        step = self._planner.next(trials, pace, searches=searches)
        self.plan = Plan() if step is None else self._planned(self._planner, trials, pace, searching=step == "search")
        return step

    def fits(self, parameters: Mapping[str, Any]) -> bool:
        """Whether a trial is over in time, as surely as is wanted."""
        if self.limit is None:
            return True
        left_s, wall = self._left()
        known_s = math.nan if self._law is None else known_seconds(self._law, self._whole(parameters))
        if not math.isfinite(known_s):
            return left_s > 0  # what cannot be planned is told elsewhere
        return float(wall.probability(known_s, left_s)) >= self._budget.sure

    def resumes(self) -> bool:
        """Whether there is time for interrupted trials: they take what there is, and have a part behind them."""
        return self.limit is None or self._left_s() > 0

    def offer(self, setup: TrialSetup, measurements: Sequence[Measurement]) -> None:
        """A trial is complete: keep its model if it is the best.

        Raises:
            OutputError: it is not there, or cannot be written.
        """
        if setup.model_folder is not None:
            self.kept.offer(setup, measurements)

    def has_reached(self) -> bool:
        """Whether the kept model is as good as the study's target."""
        target, score = self._budget.until, self.kept.score
        return target is not None and score is not None and self.kept.sign * score >= self.kept.sign * target

    def _wall(self) -> WallTime:
        """How long trainings take."""
        spans, _ = self._clock()
        shown = spans if any(span.ended_s is not None for span in spans) else self._earlier
        return WallTime.of(shown, math.inf if self.limit is None else self.limit.whole_s)

    def _left_s(self) -> float:
        """Seconds until what comes after the last training has to begin."""
        return math.inf if self.limit is None else self.limit.left_s(self._clock()[1], self._wall().slowdown)

    def _left(self) -> tuple[float, WallTime]:
        """Seconds that trainings may be planned to take, and how long they take."""
        return plannable_s(self._left_s()), self._wall()

    def _planned(self, planner: FinalPlanner, trials: Sequence[TrialRecord], pace: Pace, *, searching: bool) -> Plan:
        decision, reach, now = planner.decision, planner.reach, time.time()
        final = planner.first if decision.final is None else decision.final
        if final is None:
            known = planner.knows and self._target and decision.final is None
            return Plan(metric=self._metric.name, target=self._target, chance=0.0 if known else None)
        search_s = max(decision.trials, 1) * pace.trial_s if searching and decision.final is not None else 0.0
        epochs, train_s = final.parameters.get(EPOCHS), float(pace.wall.expected_s(final.known_s))
        scores = [trial.accuracy for trial in trials if trial.outcome == "complete" and trial.accuracy is not None]
        low, high = final.interval(self._metric.sign, scores)
        plan = Plan(
            tried=final.tried if final.tried >= 0 else None,
            epochs=None if epochs is None else float(epochs),
            devices=final.devices,
            train_s=train_s,
            metric=self._metric.name,
            low=low,
            high=high,
        )
        if self.limit is None or decision.final is None:
            return replace(
                plan,
                target=self._target,
                chance=reach.first_chance,
                reached_by=now + reach.expected_s if math.isfinite(reach.expected_s) else None,
                not_before=now + reach.earliest_s if math.isfinite(reach.earliest_s) else None,
            )
        return replace(
            plan,
            search_until=now + search_s if searching else None,
            done_by=now + search_s + final.wait_s + train_s + self.limit.closing_s(pace.wall.slowdown),
            sure=float(pace.wall.probability(final.known_s, pace.left_s - search_s - final.wait_s)),
        )


def _free_in_s(spans: Sequence[Span], trial_s: float, devices: int) -> tuple[float, ...]:
    """Seconds until each of so many devices is free, ascending: at least one is, others when their trials end."""
    now_s, factors = time.monotonic(), ClockFactors.of(spans)
    left = ((span.devices, factors.left_s(span, now_s)) for span in spans if span.ended_s is None)
    busy = [trial_s if s is None else s for held, s in left for _ in range(held)]
    return tuple(sorted([*busy, *[0.0] * max(devices - len(busy), 1)]))


def _span_of(record: TrialRecord) -> Span | None:
    """What a trial of an earlier run took; None where its time was not known beforehand."""
    facts = record.facts
    if record.outcome != "complete" or facts.train_s_source != "known" or not facts.train_s or not facts.measured_train_s:
        return None
    started_s, ended_s = (datetime.fromisoformat(at).timestamp() if at else 0.0 for at in (record.started_at, record.ended_at))
    return Span(started_s, ended_s, facts.train_s, facts.measured_train_s, 1.0)


def known_seconds(law: Law, parameters: Mapping[str, Any]) -> float:
    """Seconds of a training by law; NaN for what cannot be planned."""
    taken = law(parameters)
    return float(taken[0] if isinstance(taken, tuple) else taken)


def finish_of(
    spec: StudySpec,
    stored: StoredDeadline | None,
    began_at: float,
    suggester: Suggester,
    space: SearchSpace,
    law: Law | None,
    kept: KeptModel | None,
    earlier: Sequence[TrialRecord],
    *,
    devices: int,
    hourly: float,
    driven_s: float,
) -> Finish | None:
    """How a study ends, by its budget; None where it ends with its search.

    Args:
        stored: its deadline as an earlier run has stored it, which holds for as long as it is written the same.
        began_at: when this run began, in seconds since 1970.
        kept: where it keeps its model.
        earlier: its trials so far.
        devices: of all trials that run side by side.
        hourly: the price of everything that the study holds.

    Raises:
        StudyFileError: the deadline has passed, or nothing can be trained by then.
    """
    budget = spec.budget
    if not budget.keeps_model:
        return None
    assert kept is not None
    metric = spec.objectives.metric
    limit = _limit(budget, stored, began_at, hourly) if budget.trains_at_end else None
    if law is not None and limit is not None:
        left_s = limit.left_s(driven_s)
        if faults := list(_too_long(spec, law, space, _shortest_s(law, space), left_s, limit, kept)):
            raise StudyFileError(faults)
    target = None if budget.until is None else metric.sign * budget.until
    planner = None
    if spec.objectives.speeds[0] == "train_s":
        planner = FinalPlanner(suggester, budget.sure, math.inf if limit is None else limit.whole_s, target)
    return Finish(budget, metric, kept, limit, planner, law, space.whole, earlier, devices)


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
    known = np.array([known_seconds(law, space.whole(parameters)) for parameters in transform.decode_many(points)])
    known = known[np.isfinite(known)]
    return float(np.quantile(known, _SHORT)) if len(known) else math.nan


def _too_long(
    spec: StudySpec, law: Law, space: SearchSpace, shortest_s: float, left_s: float, limit: Limit, kept: KeptModel
) -> Iterator[Fault]:
    """What cannot be trained in time, although the study asks for it."""
    key, wall = "budget.by" if spec.budget.by else "budget.cost", WallTime()
    left = f"{seconds(max(left_s, 0.0))} ({limit.given}), with {seconds(limit.closing_s())} set aside for the end"
    least_s = wall.at_most_s(shortest_s, spec.budget.sure)
    if kept.score is None and least_s > left_s:
        yield Fault(
            key,
            f"expected time for at least one training, up to {seconds(least_s)} for the shortest of this space; got {left}. "
            "Allow more time, or shorter trainings.",
        )
        return
    for index, setting in enumerate(spec.baseline):
        most_s = wall.at_most_s(known_seconds(law, space.whole(space.chosen(setting))), spec.budget.sure)
        if most_s > left_s and kept.score is None:
            message = f"expected a setting that can be trained in {left}; this one takes up to {seconds(most_s)}."
            yield Fault(f"baseline.{index}", f"{message} Allow more time, or remove it.")


__all__ = ["Finish", "Law", "Limit", "finish_of", "known_seconds"]
