"""A study at one moment, for display: built from the run itself, or from its database by another process."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ...spaces.deadline import Deadline
from ...spaces.front import ParetoFront
from ...spaces.readable import UNLIMITED
from ...spaces.record import TrialRecord
from ...spaces.study.spec import StudySpec
from ...spaces.trial import Measurement, TrialSetup
from .decisions.eta import ClockFactors, Span, eta_s


@dataclass(frozen=True, slots=True)
class RunningTrial:
    """A running trial: where it runs, and its progress.

    Args:
        where: the machine and its devices; empty while unknown.
        devices: that it trains on.
        share: of its budget trained, from 0 to 1.
        score: the study's metric at the last measurement.
        left_s: estimated seconds until it is done.
    """

    number: int
    where: str
    effective_batch: int
    learning_rate: float
    share: float
    score: float | None
    left_s: float | None
    devices: int

    @classmethod
    def of(
        cls,
        setup: TrialSetup,
        measured: Measurement | None,
        host: str,
        span: Span,
        factors: ClockFactors,
        now_s: float,
    ) -> RunningTrial:
        devices = f"{setup.plan.devices} {setup.device}s" if setup.plan.devices > 1 else setup.device
        return cls(
            number=setup.number,
            where=f"{host} {devices}".strip(),
            effective_batch=setup.effective_batch,
            learning_rate=setup.learning_rate,
            share=span.share,
            score=None if measured is None else measured.value(setup.metric),
            left_s=factors.left_s(span, now_s),
            devices=setup.plan.devices,
        )


@dataclass(frozen=True, slots=True)
class StudyView:
    """A study at one moment.

    Args:
        trials: the budget's.
        counted: trials that count towards it.
        outcomes: how many trials ended in which way.
        records: every trial that ended, for the plot.
        elapsed_s: of this run.
        eta_s: estimated seconds until the budget is met; None while there is no estimate.
        driver: who runs it, in words; empty where it is this process.
        deadline: when it has to be done.
    """

    name: str
    trials: int
    counted: int
    outcomes: Mapping[str, int]
    running: tuple[RunningTrial, ...]
    front: ParetoFront
    records: tuple[TrialRecord, ...]
    elapsed_s: float
    eta_s: float | None
    driver: str = ""
    deadline: Deadline | None = None


def study_view(
    name: str,
    spec: StudySpec,
    front: ParetoFront,
    done: tuple[TrialRecord, ...],
    running: list[tuple[TrialSetup, Measurement | None, str, Span]],
    ended: list[Span],
    *,
    now_s: float,
    elapsed_s: float,
    driven_s: float,
    counted: int,
    driver: str = "",
    deadline: Deadline | None = None,
) -> StudyView:
    """The view of a study, the same from a run and from its database.

    Args:
        done: trials that ended or are paused.
        running: each running trial's setup, last measurement, machine and time on the clock.
        ended: attempts that ended, on the same clock.
        now_s: by that clock.
        elapsed_s: of this run.
        driven_s: of all runs of the study, which `budget.hours` limits.
        counted: trials that count towards the budget.
    """
    spans = [*ended, *(span for _, _, _, span in running)]
    factors = ClockFactors.of(spans)
    to_come = max(math.ceil(spec.budget.trials - counted - sum(span.counts for _, _, _, span in running)), 0)
    # Where money alone ends it, nobody knows when.
    is_known = spec.budget.trials != UNLIMITED or spec.budget.hours is not None
    left_s = eta_s(spans, now_s, to_come) if is_known else None
    if deadline is not None:
        left_s = max(deadline.ends_at - time.time(), 0.0)
    if spec.budget.hours is not None and left_s is not None:
        left_s = min(left_s, max(spec.budget.hours * 3600 - driven_s, 0.0))
    return StudyView(
        name=name,
        trials=spec.budget.trials,
        counted=counted,
        outcomes=Counter(record.outcome for record in done),
        running=tuple(
            RunningTrial.of(setup, measured, host, span, factors, now_s)
            for setup, measured, host, span in sorted(running, key=lambda attempt: attempt[0].number)
        ),
        front=front,
        records=done,
        elapsed_s=elapsed_s,
        eta_s=left_s,
        driver=driver,
        deadline=deadline,
    )


def span_of(
    setup: TrialSetup,
    measured: Measurement | None,
    known_s: float | None,
    started_s: float,
    ended_s: float | None = None,
    *,
    counts: float = 1.0,
) -> Span:
    """An attempt on the clock, by its setup and what it measured last."""
    share = setup.share_of(measured) if measured else 0.0
    return Span(
        started_s,
        ended_s,
        known_s,
        measured.elapsed_s if measured else 0.0,
        share,
        counts,
        setup.plan.devices,
    )
