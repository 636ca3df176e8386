"""The figure of when each attempt ran, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import accumulate

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


def timeline_figure(
    records: Iterable[TrialRecord], attempts: Sequence[AttemptRow], label: Callable[[TrialRecord], str]
) -> Figure | None:
    """When each attempt ran, and where; None where none has ended.

    Args:
        attempts: as stored in the database.
        label: a trial's hover text.
    """
    by_number = {record.number: record for record in records}
    spans = []
    for attempt in attempts:
        record = by_number.get(attempt.number)
        if record is None or not attempt.ended_at:
            continue
        host = str(record.facts.host or "here")
        spans.append((_instant(attempt.started_at), _instant(attempt.ended_at), host, record, attempt.outcome))
    if not spans:
        return None
    spans.sort(key=lambda span: span[:2])
    first = spans[0][0]
    # Attempts are scheduled ahead and wait: as many run at once as were training at once.
    lanes = {
        host: [first] * _at_once([(max(start, end - _trained_s(run)), end) for start, end, at, run, _ in spans if at == host])
        for host in dict.fromkeys(host for _, _, host, _, _ in spans)
    }
    placed = []
    for start, end, host, record, outcome in spans:
        ends = lanes[host]
        lane = min(range(len(ends)), key=ends.__getitem__)
        began = min(max(start, ends[lane]), end)
        ends[lane] = end
        placed.append((host, lane, began - first, end - first, record, outcome))
    order = {place: row for row, place in enumerate((host, lane) for host, ends in lanes.items() for lane in range(len(ends)))}
    layers = []
    for outcome, tone in TONES.items():
        group = [bar for bar in placed if (bar[5] or "interrupted") == outcome]
        if not group:
            continue
        layers.append(
            Layer(
                outcome.replace("_", " "),
                "bars",
                tone,
                tuple((start + end) / 2 for _, _, start, end, _, _ in group),
                tuple(float(order[host, lane]) for host, lane, *_ in group),
                low=tuple(start for _, _, start, *_ in group),
                high=tuple(end for _, _, _, end, *_ in group),
                labels=tuple(label(record) for *_, record, _ in group),
                trials=tuple(record.number for *_, record, _ in group),
            )
        )
    counts = Counter(host for host, _ in order)
    caption = (
        f"{len(placed)} attempt{'s' * (len(placed) != 1)}. A bar starts when its attempt was scheduled and a "
        "device was free; it includes the process's start and evaluations."
    )
    return Figure(
        "timeline",
        "Trials on devices",
        caption,
        Axis("elapsed_s", "seconds since the first trial started"),
        Axis(
            "place",
            "",
            ticks=tuple(
                (float(row), host if counts[host] == 1 else f"{host} #{lane + 1}") for (host, lane), row in order.items()
            ),
        ),
        tuple(layers),
    )


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
