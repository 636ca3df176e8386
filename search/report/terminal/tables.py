"""A study's results as tables and plots for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ....spaces.front import ParetoFront
from ....spaces.readable import number
from ....spaces.record import TrialRecord
from ..columns import Column, front_columns, trial_columns
from .fitted import Fitted
from .plot import scatter


def front_table(front: ParetoFront, target: float | None = None) -> Fitted:
    """The front, fastest first, with the settings that give each point; `target` as for `front_columns`."""
    return Fitted(front_columns(front, target=target), worth_of_front(front))


def worth_of_front(front: ParetoFront) -> tuple[str, ...]:
    """Columns of trials that are needed most: what is decided by, then the settings to copy, then how sure they are."""
    results = (front.metric, front.speed, "reaches", "effective_batch", "learning_rate")
    return ("trial", "run", "outcome", *results, "", "+/-", "rule", "epochs", "on\nfront", "runs")


def trials_table(records: Sequence[TrialRecord], front: ParetoFront) -> Fitted:
    """Every trial in order, with its outcome."""
    return Fitted(trial_columns(records, front), worth_of_front(front))


def trial_parts(document: Mapping[str, Any], record: TrialRecord, metric: str) -> Iterator[str | Fitted]:
    """What `bsearch show --pick` prints: every value, and what was measured while it trained.

    Args:
        document: of `trial_document`, with its `curve`.
    """
    if record.outcome == "stopped":
        yield "Stopped early: train_s, device_s and cost are for the full budget."
    if record.outcome == "paused":
        yield "Paused: accuracy is as of the pause; train_s, device_s and cost are for the full budget."
    values = {name: number(value) for name, value in document.items() if name not in ("curve", "attempts")}
    yield Fitted(
        [Column("", tuple(values), words=True), Column("", tuple(values.values()), flows=True)], headed=False
    )
    if not document["curve"]:
        return
    names = {"attempt": "attempt", "samples\nseen": "samples_seen", "seconds by\nthe clock": "elapsed_s"}
    names |= {metric: "accuracy", "training\nloss": "train_loss"}
    curve = [
        Column(shown, tuple(number(point[name]) for point in document["curve"]))
        for shown, name in names.items()
    ]
    yield Fitted(curve, ("samples\nseen", metric))


def front_plot(front: ParetoFront, records: Iterable[TrialRecord], width: int, height: int = 16) -> str:
    """Accuracy over seconds as text, without colour: o the front, * the baseline, . other trials."""
    complete = [
        record
        for record in records
        if record.outcome == "complete" and front.taken(record) and record.accuracy is not None
    ]
    # A single diverged loss would flatten all others.
    levels = [trial.accuracy for trial in front.trials if trial.accuracy is not None]
    if len(levels) > 1:
        reach = 3 * (max(levels) - min(levels))
        near = (min(levels) - reach, max(levels) + reach)
        complete = [record for record in complete if near[0] <= (record.accuracy or 0.0) <= near[1]]
    if len({front.taken(record) for record in complete}) < 2:
        return ""
    members = {trial.number for trial in front.trials}
    groups = {
        ".": [record for record in complete if record.number not in members],
        "o": [record for record in complete if record.number in members],
        "*": [record for record in complete if record.is_baseline],
    }
    return scatter(
        {
            marker: [(front.taken(record) or 1.0, record.accuracy or 0.0) for record in group]
            for marker, group in groups.items()
        },
        width=width,
        height=height,
        x_label=f"{front.speed} (o front, * baseline)",
        y_label=front.metric,
    )
