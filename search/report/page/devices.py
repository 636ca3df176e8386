"""A study's settings on several devices, drawn: which device gives a result for the least time or money."""

from __future__ import annotations

from ....spaces.front import amount
from ....spaces.readable import number
from ...analysis.retime import Placement, device_sentences, front_over_devices, placements_over
from .figure import Axis, Figure, Layer, Tone
from .study_data import MEASURES, StudyData

# One for each device; with more devices than tones, hover texts tell them apart.
_TONES: tuple[Tone, ...] = ("front", "limit", "measured", "alternative", "other", "stopped")


def devices_figure(data: StudyData) -> Figure | None:
    """The front of each device, by cost or by what the study is compared by; None where no setting can be trained on any."""
    each, objectives = data.devices, data.study.spec.objectives
    placements = placements_over(each, objectives)
    front = front_over_devices(placements, objectives)
    if not front:
        return None
    metric, layers = objectives.metric.name, []
    for place, device in enumerate(each):
        own = front_over_devices([placement for placement in placements if placement.device == device], objectives)
        tone = _TONES[place % len(_TONES)]
        x = tuple(placement.taken[0] for placement in own)
        y = tuple(float(placement.trial.accuracy or 0.0) for placement in own)
        layers.append(Layer(f"{device}, front", "steps", tone, x, y))
        layers.append(
            Layer(
                device,
                "points",
                tone,
                x,
                y,
                labels=tuple(_label(placement, metric) for placement in own),
                trials=tuple(placement.trial.number for placement in own),
            )
        )
    sentences = [
        "The front of each device alone, from the same trials: accuracies as measured, times from each device's profile.",
        f"The front over all of them has {len(front)} points.",
        *device_sentences(placements, front, objectives),
        *(
            f"Left out on {device}: {len(after.left_out)} trial{'s' * (len(after.left_out) > 1)}, such as {after.left_out[0]}."
            for device, after in each.items()
            if after.left_out
        ),
    ]
    speed = placements[0].speeds[0]
    what, unit = MEASURES[speed]
    return Figure(
        "devices",
        f"{metric} against {what} on each device",
        " ".join(sentences),
        Axis(speed, f"{speed} ({unit})", log=True),
        Axis(metric, f"{metric} ({'higher' if objectives.metric.direction == 'maximize' else 'lower'} is better)"),
        tuple(layer for layer in layers if layer.x),
    )


def _label(placement: Placement, metric: str) -> str:
    values = placement.trial.settings
    taken = ", ".join(amount(speed, placement.trial.taken(speed)) for speed in dict.fromkeys((*placement.speeds, "train_s")))
    plan = f"micro-batch {values.get('micro_batch', '?')}, accumulation {values.get('accumulation', '?')}"
    return "\n".join(
        [
            f"trial {placement.trial.number} on {placement.device}",
            f"{metric} {number(placement.trial.accuracy)}: {taken}",
            f"effective batch {values.get('effective_batch', '?')} ({plan})",
        ]
    )


__all__ = ["devices_figure"]
