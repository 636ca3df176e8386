"""What `bsearch retime` prints of several devices: which of them gives a result for the least time or money."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from ....spaces.readable import number, seconds
from ....spaces.study import Objectives
from ...analysis.retime import Placement
from .tables import column


def placements_table(placements: Sequence[Placement], metric: str) -> Table:
    """Settings on devices, with what they cost and take."""
    priced = any(one.cost is not None for one in placements)
    names = ("device", "trial", *(("cost",) if priced else ()), "train_s", metric, "batch", "rate", "micro\nx acc.")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        column(table, name, "left" if name == "device" else "right")
    for one in placements:
        values = one.trial.settings
        table.add_row(
            one.device,
            str(one.trial.number),
            *((number(one.cost),) if priced else ()),
            number(one.trial.train_s),
            number(one.trial.accuracy),
            number(values.get("effective_batch")),
            number(values.get("learning_rate")),
            f"{values.get('micro_batch', '?')} x {values.get('accumulation', '?')}",
        )
    return table


def placements_parts(
    name: str, placements: Sequence[Placement], front: Sequence[Placement], objectives: Objectives
) -> Iterator[Table | Text | str]:
    """The front over devices, and its most accurate setting on each of them."""
    metric, priced = objectives.metric.name, any(one.cost is not None for one in placements)
    devices = list(dict.fromkeys(one.device for one in placements))
    what = "cost" if priced else objectives.speed
    pairs = f"{len(front)} of {len(placements)} pairs of setting and device"
    yield Text(f"Front of {name} over {len(devices)} devices, by {what}: {pairs}", style="bold")
    yield placements_table(front, metric)
    if not front:
        return
    best = front[-1].trial.number
    same = sorted((one for one in placements if one.trial.number == best), key=lambda one: one.taken)
    yield Text(f"\nThe most accurate, trial {best}, on each device", style="bold")
    yield placements_table(same, metric)
    least = same[0].taken
    for device in devices:
        count = sum(one.device == device for one in front)
        there = next((one.taken for one in same if one.device == device), None)
        if there is None:
            taken = f"trial {best} cannot be trained there"
        else:
            more = f", {there / least:.3g} times the least" if there > least > 0 else ""
            taken = f"trial {best} {f'costs {number(there)}' if priced else f'takes {seconds(there)}'} there{more}"
        yield f"{device}: {count} of the front's {len(front)}; {taken}."
