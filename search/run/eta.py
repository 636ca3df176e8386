"""How long a study will still take: from the times that its trials are known to need and took so far."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# The starts of so many attempts tell how many run at once now: machines come and go.
_LATELY = 16


@dataclass(frozen=True, slots=True)
class Span:
    """One attempt on the clock.

    Args:
        begun_s, ended_s: on any one clock; `ended_s` is None while it runs.
        known_s: seconds its whole training takes by the law; None where trials are timed by the clock.
        trained_s: seconds of training by the clock when it last measured, evaluation left out.
        share: of its budget trained by then, from 0 to 1.
        counts: it ended a trial that counts towards the budget.
    """

    begun_s: float
    ended_s: float | None = None
    known_s: float | None = None
    trained_s: float = 0.0
    share: float = 0.0
    counts: bool = False


@dataclass(frozen=True, slots=True)
class Pace:
    """What an attempt takes on the clock beside what is known of it, as those that ended did.

    Args:
        slowdown: seconds of training by the clock for each that was known; neighbours make it larger than one.
        overhead_s: seconds of an attempt that are no training: its start, evaluations, checkpoints.
    """

    slowdown: float = 1.0
    overhead_s: float = 0.0

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Pace:
        ended = [(span, span.ended_s - span.begun_s) for span in spans if span.ended_s is not None]
        known = sum(span.known_s * span.share for span, _ in ended if span.known_s is not None)
        trained = sum(span.trained_s for span, _ in ended if span.known_s is not None and span.share)
        overhead = [max(took_s - span.trained_s, 0.0) for span, took_s in ended]
        return cls(trained / known if known > 0 and trained > 0 else 1.0, sum(overhead) / len(overhead) if overhead else 0.0)

    def left_s(self, span: Span, now_s: float) -> float | None:
        """Seconds that a running attempt still takes; None where nothing is known of it yet.

        One that is over its time goes by its own speed, and so does one whose time was never known.
        """
        run_s = max(now_s - span.begun_s, 0.0)
        if span.known_s is not None:
            left_s = span.known_s * self.slowdown + self.overhead_s - run_s
            if left_s > 0:
                return left_s
        return run_s * (1 - span.share) / span.share if span.share > 0 else None


def at_once(spans: Sequence[Span]) -> int:
    """How many attempts run side by side: the most that did at the latest starts.

    >>> at_once([Span(0, 2), Span(1, 3), Span(3, None)])
    2
    """
    latest = sorted(spans, key=lambda span: span.begun_s)[-_LATELY:]
    return max(
        (
            sum(span.begun_s <= one.begun_s and (span.ended_s is None or span.ended_s > one.begun_s) for span in spans)
            for one in latest
        ),
        default=1,
    )


def _idle_s(spans: Sequence[Span], slots: int) -> float:
    """Seconds that a slot waits between two attempts: the middle one, for a study may have rested for days."""
    begun = sorted(span.begun_s for span in spans)
    ended = sorted(span.ended_s for span in spans if span.ended_s is not None)
    waits = [max(start - end, 0.0) for start, end in zip(begun[slots:], ended, strict=False)]
    return median(waits) if waits else 0.0


def remaining_s(spans: Sequence[Span], now_s: float, to_come: int) -> float | None:
    """Seconds until so many further trials and those that run are done; None where no trial tells anything yet.

    What runs is done after its known training time (at the pace of the trials that ended: how much longer than known they
    trained, and what they took beside training) less what it ran already. Each trial to come is expected to hold its
    slot as long as the mean of all so far: what the ended ones took on the clock, stopped and failed ones too, and what
    the running ones will have taken, for else the quick ones, which end first, would make the study look short; and a slot
    is idle between two of them as it was so far. They are dealt out, one after another, to the slot that is free first; the
    answer is when the last slot falls idle. So it is right to the second where all trials take equally long, and as good
    as the mean where they do not: trials that will be stopped, and the front's members that `confirm:` trains again, are
    not foreseen.

    Args:
        spans: every attempt so far, running and ended.
        now_s: by the clock of the spans.
        to_come: trials that are to be finished beside those that run.
    """
    pace = Pace.of(spans)
    running = [span for span in spans if span.ended_s is None]
    ended_s = [span.ended_s - span.begun_s for span in spans if span.ended_s is not None]
    counted = sum(span.counts for span in spans)
    left = [pace.left_s(span, now_s) for span in running]
    told = [(span, left_s) for span, left_s in zip(running, left, strict=True) if left_s is not None]
    if not told and not counted:
        return None
    whole_s = sum(ended_s) + sum(max(now_s - span.begun_s, 0.0) + left_s for span, left_s in told)
    slots = max(at_once(spans), len(running), 1)
    each_s = whole_s / (counted + len(told)) + _idle_s(spans, slots)
    free_at = [max(each_s - (now_s - span.begun_s), 0.0) if s is None else s for span, s in zip(running, left, strict=True)]
    free_at += [0.0] * min(slots - len(running), to_come)
    heapq.heapify(free_at)
    last_s = max(free_at, default=0.0)
    for _ in range(to_come):
        done_s = free_at[0] + each_s
        heapq.heapreplace(free_at, done_s)
        last_s = max(last_s, done_s)
    return last_s
