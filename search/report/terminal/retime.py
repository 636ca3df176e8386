"""What `bsearch retime` prints: a front on other devices, and which of them takes the least time or money."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from ....spaces.readable import number
from ....spaces.study.goals import Objectives, Speed
from ...analysis.retime import (
    Placement,
    Retimed,
    best_on_each,
    device_sentences,
    front_over_devices,
    placements_over,
    retimed_summary,
)
from ...store.stored import StoredStudy
from ...store.url import shown_url
from ..export import study_document, trial_document
from ..sentences import best_sentence
from .fitted import Fitted
from .tables import front_plot, front_table


def retimed_document(
    study: StoredStudy, each: Mapping[str, Retimed], objectives: Objectives, *, together: bool
) -> dict[str, Any]:
    """The JSON document of `bsearch retime --json`.

    Args:
        each: the study's trials on other devices, by their names.
        together: one front over all devices.
    """
    if not together:
        ((device, after),) = each.items()
        document = study_document(study.name, shown_url(study.url), after.front, after.records)
        return document | {"device": device, "was": after.was, "left_out": after.left_out, "notes": after.notes}
    front = front_over_devices(placements_over(each, objectives), objectives)
    devices = [
        {"device": name, "price": after.price, "left_out": after.left_out, "notes": after.notes} for name, after in each.items()
    ]
    on_front = [
        {"device": placement.device, "cost": placement.trial.taken("cost"), **trial_document(placement.trial, study.front)}
        for placement in front
    ]
    return {"study": study.name, "devices": devices, "front": on_front}


def retimed_parts(
    study: StoredStudy, each: Mapping[str, Retimed], objectives: Objectives, width: int, *, together: bool
) -> Iterator[Fitted | Text | str]:
    """The same for people.

    Args:
        width: of the terminal, in characters.
    """
    if together:
        placements = placements_over(each, objectives)
        yield from placements_parts(study.name, placements, front_over_devices(placements, objectives), objectives)
        for name, after in each.items():
            for sentence in (*after.notes, *after.left_out):
                yield f"{name}: {sentence}"
        return
    ((device, after),) = each.items()
    trials = len(after.records) + len(after.left_out)
    yield Text(f"Front of {study.name} on {device}: {len(after.front.trials)} of {trials} trials", style="bold")
    yield front_table(after.front)
    yield front_plot(after.front, after.records, width)
    yield best_sentence(after.front) or ""
    yield from (retimed_summary(study.front, after), *after.notes, *after.left_out)


def placements_table(placements: Sequence[Placement], metric: str) -> Fitted:
    """Settings on devices, with what they cost and take."""
    measures: tuple[Speed, ...] = ("cost", "train_s", "energy_j")
    shown = [speed for speed in measures if all(placement.trial.taken(speed) is not None for placement in placements)]
    shown = [speed for speed in shown if speed == "train_s" or any(speed in placement.speeds for placement in placements)]
    names = ("device", "trial", *shown, metric, "batch", "rate", "micro\nx acc.")
    rows = (
        (
            placement.device,
            str(placement.trial.number),
            *(number(placement.trial.taken(speed)) for speed in shown),
            number(placement.trial.accuracy),
            number(values.get("effective_batch")),
            number(values.get("learning_rate")),
            f"{values.get('micro_batch', '?')} x {values.get('accumulation', '?')}",
        )
        for placement in placements
        for values in [placement.trial.settings]
    )
    return Fitted.of_rows(names, rows, ("device", "trial", metric, *shown, "batch", "rate"), words=("device",))


def placements_parts(
    name: str, placements: Sequence[Placement], front: Sequence[Placement], objectives: Objectives
) -> Iterator[Fitted | Text | str]:
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
