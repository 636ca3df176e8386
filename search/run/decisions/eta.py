"""Estimated time left of a study, from its trials' known times and their time on the clock so far."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# The latest starts show how many attempts run at once now: machines come and go.
_RECENT = 16


@dataclass(frozen=True, slots=True)
class Span:
    """One attempt's start and end on a clock.

    Args:
        started_s, ended_s: on any one clock; `ended_s` is None while it runs.
        known_s: seconds of its full training by the law; None where trials are timed by the clock.
        trained_s: seconds of training by the clock at its last measurement, evaluation left out.
        share: of its budget trained by then, from 0 to 1.
        counts: what its trial counts towards the budget, 0 where it ended without.
        devices: that it holds.
    """

    started_s: float
    ended_s: float | None
    known_s: float | None
    trained_s: float
    share: float
    counts: float
    devices: int


@dataclass(frozen=True, slots=True)
class ClockFactors:
    """Factors that convert known training time into wall-clock time, estimated from attempts that ended.

    Args:
        slowdown: clock seconds of training per known second; other load on the device makes it larger than one.
        overhead_s: seconds of an attempt outside training: its start, evaluations, checkpoints.
    """

    slowdown: float
    overhead_s: float

    @classmethod
    def of(cls, spans: Sequence[Span]) -> ClockFactors:
        ended = [(span, span.ended_s - span.started_s) for span in spans if span.ended_s is not None]
        known = sum(span.known_s * span.share for span, _ in ended if span.known_s is not None)
        trained = sum(span.trained_s for span, _ in ended if span.known_s is not None and span.share)
        overhead = [max(took_s - span.trained_s, 0.0) for span, took_s in ended]
        return cls(
            trained / known if known > 0 and trained > 0 else 1.0,
            sum(overhead) / len(overhead) if overhead else 0.0,
        )

    def left_s(self, span: Span, now_s: float) -> float | None:
        """Seconds until a running attempt is done; None where nothing is known of it yet.

        An attempt that has exceeded its known time, or has none, is extrapolated from its own speed.
        """
        run_s = max(now_s - span.started_s, 0.0)
        if span.known_s is not None:
            left_s = span.known_s * self.slowdown + self.overhead_s - run_s
            if left_s > 0:
                return left_s
        return run_s * (1 - span.share) / span.share if span.share > 0 else None


def at_once(spans: Sequence[Span]) -> int:
    """How many attempts run side by side: the most that did at any of the latest starts.

    >>> at_once([Span(began, ended, None, 0.0, 0.0, 1.0, 1) for began, ended in ((0, 2), (1, 3), (3, None))])
    2
    """
    latest = sorted(spans, key=lambda span: span.started_s)[-_RECENT:]
    return max(
        (
            sum(
                span.started_s <= recent.started_s
                and (span.ended_s is None or span.ended_s > recent.started_s)
                for span in spans
            )
            for recent in latest
        ),
        default=1,
    )


def _idle_s(spans: Sequence[Span], slots: int) -> float:
    """Median seconds that a slot waits between two attempts; the mean would count days between runs."""
    starts = sorted(span.started_s for span in spans)
    ends = sorted(span.ended_s for span in spans if span.ended_s is not None)
    waits = [max(start - end, 0.0) for start, end in zip(starts[slots:], ends, strict=False)]
    return median(waits) if waits else 0.0


def eta_s(spans: Sequence[Span], now_s: float, to_come: int) -> float | None:
    """Seconds until the running trials and `to_come` further ones are done; None while no trial gives an estimate.

    A running trial is done after its known training time, scaled by the slowdown and overhead of ended trials, minus what it
    has run already. Each further trial is expected to hold its slot for the mean over all trials so far: clock time of ended
    ones, stopped and failed ones included, and the expected total of running ones, since fast trials end first and would bias
    the mean. Slots are idle between trials as they were so far. Trials are assigned to the slot that is free first; the
    estimate is when the last slot becomes idle. It is exact where all trials take equally long. Trials that will be stopped
    early, and repeats under `confirm:`, are not modelled.

    Args:
        spans: every attempt so far, running and ended.
        now_s: by the clock of the spans.
        to_come: trials still to be started.
    """
    factors = ClockFactors.of(spans)
    running = [span for span in spans if span.ended_s is None]
    ended_s = [span.ended_s - span.started_s for span in spans if span.ended_s is not None]
    counted = sum(span.counts for span in spans if span.ended_s is not None)
    left = [factors.left_s(span, now_s) for span in running]
    known = [(span, left_s) for span, left_s in zip(running, left, strict=True) if left_s is not None]
    if not known and not counted:
        return None
    whole_s = sum(ended_s) + sum(max(now_s - span.started_s, 0.0) + left_s for span, left_s in known)
    slots = max(at_once(spans), len(running), 1)
    each_s = whole_s / (counted + sum(span.counts for span, _ in known)) + _idle_s(spans, slots)
    free_at = [
        max(each_s - (now_s - span.started_s), 0.0) if s is None else s
        for span, s in zip(running, left, strict=True)
    ]
    free_at += [0.0] * min(slots - len(running), to_come)
    heapq.heapify(free_at)
    last_s = max(free_at, default=0.0)
    for _ in range(to_come):
        done_s = free_at[0] + each_s
        heapq.heapreplace(free_at, done_s)
        last_s = max(last_s, done_s)
    return last_s
