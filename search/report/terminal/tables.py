"""A study's results as tables and plots for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.table import Table

from ....spaces.front import ParetoFront
from ....spaces.readable import number
from ....spaces.record import TrialRecord
from ..columns import Column, front_columns, trial_columns
from .plot import scatter


def front_table(front: ParetoFront, target: float | None = None) -> Table:
    """The front, fastest first, with the settings that give each point; `target` as for `front_columns`."""
    return drawn(front_columns(front, target=target))


def trials_table(records: Sequence[TrialRecord], front: ParetoFront) -> Table:
    """Every trial in order, with its outcome."""
    table = drawn(trial_columns(records, front))
    table.columns[-1].no_wrap = False  # where it is narrow, notes take more lines before numbers are cut
    return table


def drawn(columns: Iterable[Column]) -> Table:
    """Columns as a table."""
    table, columns = Table(box=None, header_style="bold", pad_edge=False), list(columns)
    for each in columns:
        column(table, each.name, "left" if each.words else "right")
    for cells in zip(*(each.cells for each in columns), strict=True):
        table.add_row(*cells)
    return table


def column(table: Table, name: str, justify: Literal["left", "right"] = "right") -> None:
    """Add a column; a long name is its heading in two lines."""
    table.add_column(name.replace("_", "\n", 1) if len(name) > 8 else name, justify=justify, no_wrap=True, vertical="bottom")


def trial_parts(document: Mapping[str, Any], record: TrialRecord, metric: str) -> Iterator[str | Table]:
    """What `bsearch show --pick` prints: every value, and what was measured while it trained.

    Args:
        document: of `trial_document`, with its `curve`.
    """
    if record.outcome == "stopped":
        yield "Stopped early: train_s, device_s and cost are for the full budget."
    if record.outcome == "paused":
        yield "Paused: accuracy is as of the pause; train_s, device_s and cost are for the full budget."
    values = Table(box=None, show_header=False, pad_edge=False)
    for name, value in document.items():
        if name not in ("curve", "attempts"):
            values.add_row(name, number(value))
    yield values
    if not document["curve"]:
        return
    curve = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("attempt", "samples\nseen", "seconds by\nthe clock", metric, "training\nloss"):
        column(curve, name)
    for point in document["curve"]:
        names = ("attempt", "samples_seen", "elapsed_s", "accuracy", "train_loss")
        curve.add_row(*(number(point[name]) for name in names))
    yield curve


def front_plot(front: ParetoFront, records: Iterable[TrialRecord], width: int, height: int = 16) -> str:
    """Accuracy over seconds as text, without colour: o the front, * the baseline, . other trials."""
    complete = [
        record for record in records if record.outcome == "complete" and front.taken(record) and record.accuracy is not None
    ]
    # A single diverged loss would flatten all others.
    levels = [trial.accuracy for trial in front.trials if trial.accuracy is not None]
    if len(levels) > 1:
        reach = 3 * (max(levels) - min(levels))
        near = (min(levels) - reach, max(levels) + reach)
        complete = [record for record in complete if near[0] <= (record.accuracy or 0.0) <= near[1]]
    if len(complete) < 2:
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
        log=True,
    )
