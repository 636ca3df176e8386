"""The figure of when each attempt ran, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate

from ....spaces.readable import plural
from ....spaces.record import TrialRecord
from ....spaces.trial import OutcomeKind
from ...store.rows import AttemptRow
from .figure import Axis, Figure, Layer, Tone

TONES: dict[OutcomeKind, Tone] = {
    "complete": "front",
    "stopped": "stopped",
    "paused": "paused",
    "diverged": "diverged",
    "infeasible": "infeasible",
    "out_of_memory": "alternative",
    "interrupted": "limit",
    "error": "failed",
}


@dataclass(frozen=True, slots=True)
class _Bar:
    """An attempt's time on one lane of a host, in seconds since 1970."""

    start: float
    end: float
    host: str
    record: TrialRecord
    outcome: str
    lane: int = 0


def timeline_figure(
    records: Iterable[TrialRecord], attempts: Sequence[AttemptRow], label: Callable[[TrialRecord], str]
) -> Figure | None:
    """When each attempt ran, and where; None where none has ended.

    Args:
        attempts: as stored in the database.
        label: a trial's hover text.
    """
    bars, rows = _on_lanes(_bars({record.number: record for record in records}, attempts))
    if not bars:
        return None
    first = min(bar.start for bar in bars)
    layers = []
    for outcome, tone in TONES.items():
        group = [bar for bar in bars if bar.outcome == outcome]
        layers.append(
            Layer(
                outcome.replace("_", " "),
                "bars",
                tone,
                tuple((bar.start + bar.end) / 2 - first for bar in group),
                tuple(float(rows.index((bar.host, bar.lane))) for bar in group),
                low=tuple(bar.start - first for bar in group),
                high=tuple(bar.end - first for bar in group),
                labels=tuple(label(bar.record) for bar in group),
                trials=tuple(bar.record.number for bar in group),
            )
        )
    lanes = Counter(host for host, _ in rows)
    names = [host if lanes[host] == 1 else f"{host} #{lane + 1}" for host, lane in rows]
    return Figure(
        "timeline",
        "Trials on devices",
        f"{plural(len(bars), 'attempt')}. A bar starts when its attempt was scheduled and a device was free; it includes the "
        "process's start and evaluations.",
        Axis("elapsed_s", "seconds since the first trial started"),
        Axis("place", "", ticks=tuple((float(row), name) for row, name in enumerate(names))),
        tuple(layers),
    )


def _bars(by_number: Mapping[int, TrialRecord], attempts: Sequence[AttemptRow]) -> list[_Bar]:
    """Attempts that have ended, in the order of their start."""
    bars = []
    for attempt in attempts:
        record = by_number.get(attempt.number)
        if record is not None and attempt.ended_at and attempt.started_at:
            start, end = _instant(attempt.started_at), _instant(attempt.ended_at)
            host = str(record.facts.host or "here")
            bars.append(_Bar(start, end, host, record, attempt.outcome or "interrupted"))
    return sorted(bars, key=lambda bar: (bar.start, bar.end))


def _on_lanes(bars: Sequence[_Bar]) -> tuple[list[_Bar], list[tuple[str, int]]]:
    """Bars without the time that they waited for a free device, and the lanes: host and number.

    Attempts are scheduled ahead and wait, so a host has as many lanes as attempts were training at once.
    """
    placed, rows = [], []
    for host in dict.fromkeys(bar.host for bar in bars):
        own = [bar for bar in bars if bar.host == host]
        ends = [own[0].start] * _at_once([(max(bar.start, bar.end - _trained_s(bar.record)), bar.end) for bar in own])
        rows += [(host, lane) for lane in range(len(ends))]
        for bar in own:
            lane = min(range(len(ends)), key=ends.__getitem__)
            placed.append(replace(bar, start=min(max(bar.start, ends[lane]), bar.end), lane=lane))
            ends[lane] = bar.end
    return placed, rows


def _trained_s(record: TrialRecord) -> float:
    """Seconds that a trial certainly ran: its training, without its start and evaluations."""
    return (record.facts.measured_train_s or 0.0) * record.trained_share


def _at_once(spans: Iterable[tuple[float, float]]) -> int:
    """The most of these spans that overlap, at least 1.

    >>> _at_once([(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)])
    2
    """
    changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))  # ends before starts
    return max(1, *accumulate(change for _, change in changes))


def _instant(text: str) -> float:
    """A stored time in seconds since 1970."""
    when = datetime.fromisoformat(text)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
