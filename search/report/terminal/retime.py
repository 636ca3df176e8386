"""What `bsearch retime` prints of several devices: which of them gives a result for the least time or money."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from ....spaces.readable import number
from ....spaces.study.goals import Objectives, Speed
from ...analysis.retime import Placement, best_on_each, device_sentences
from .tables import column


def placements_table(placements: Sequence[Placement], metric: str) -> Table:
    """Settings on devices, with what they cost and take."""
    measures: tuple[Speed, ...] = ("cost", "train_s", "energy_j")
    shown = [speed for speed in measures if all(placement.trial.taken(speed) is not None for placement in placements)]
    shown = [speed for speed in shown if speed == "train_s" or any(speed in placement.speeds for placement in placements)]
    names = ("device", "trial", *shown, metric, "batch", "rate", "micro\nx acc.")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        column(table, name, "left" if name == "device" else "right")
    for placement in placements:
        values = placement.trial.settings
        table.add_row(
            placement.device,
            str(placement.trial.number),
            *(number(placement.trial.taken(speed)) for speed in shown),
            number(placement.trial.accuracy),
            number(values.get("effective_batch")),
            number(values.get("learning_rate")),
            f"{values.get('micro_batch', '?')} x {values.get('accumulation', '?')}",
        )
    return table


def placements_parts(
    name: str, placements: Sequence[Placement], front: Sequence[Placement], objectives: Objectives
) -> Iterator[Table | Text | str]:
    """The front over devices, and its most accurate setting on each of them."""
    metric, devices = objectives.metric.name, list(dict.fromkeys(placement.device for placement in placements))
    speeds = placements[0].speeds if placements else objectives.speeds
    what = " and ".join(speeds)
    pairs = f"{len(front)} of {len(placements)} pairs of setting and device"
    yield Text(f"Front of {name} over {len(devices)} devices, by {what}: {pairs}", style="bold")
    yield placements_table(front, metric)
    if not front:
        return
    same = best_on_each(placements, front, objectives)
    yield Text(f"\nThe best {metric}, trial {same[0].trial.number}, on each device", style="bold")
    yield placements_table(same, metric)
    yield from device_sentences(placements, front, objectives)
