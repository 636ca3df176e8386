"""What `bsearch ask STUDY --until` prints: the samples that a study needs to reach a value of its metric, by batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from ....analysis.rates import Estimate
from ....laws.samples_by_batch import SamplesByBatch
from ..tables import column


def samples_document(found: SamplesByBatch) -> dict[str, Any]:
    """A study's samples to a target as JSON holds them; null where more are needed than were tried."""

    def ends(estimate: Estimate | None) -> dict[str, float | None] | None:
        if estimate is None:
            return None
        return {name: value if math.isfinite(value) else None for name, value in asdict(estimate).items()}

    return {
        "target": found.target,
        "trials": found.trials,
        "samples_tried": [found.least, found.most],
        "critical_batch": ends(found.critical_batch()),
        "predicted": [
            {"effective_batch": batch, "reached": found.reached(place), **(ends(found.samples_at(place)) or {})}
            for place, batch in enumerate(found.batches)
        ],
    }


def samples_parts(study: str, metric: str, found: SamplesByBatch) -> Iterator[str | Text | Table]:
    """A study's samples to a target for people."""

    def text(samples: float) -> str:
        if math.isinf(samples):
            return f"> {found.most:.4g}"
        return f"{samples:.4g}" if samples > found.least else f"<= {found.least:.4g}"

    title = (
        f"Samples to {metric} {found.target:.12g} in {study}: {found.trials} settings, {found.least:.4g} to {found.most:.4g}"
    )
    yield Text(f"{title} samples", style="bold")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("effective\nbatch", "samples", "90 % interval", "steps", "reached"):
        column(table, name)
    for place, batch in enumerate(found.batches):
        samples = found.samples_at(place)
        steps = f"{samples.value / batch:.4g}" if found.least < samples.value < math.inf else ""
        interval = f"{text(samples.low)} to {text(samples.high)}" if samples.low < samples.high else text(samples.low)
        table.add_row(str(batch), text(samples.value), interval, steps, f"{found.reached(place):.0%}")
    yield table
    critical = found.critical_batch()
    if critical is None:
        yield "Whether any batch reaches the target within the samples tried is too uncertain to name a critical batch."
    else:
        value, low, high = (
            f"{end:.4g}" if math.isfinite(end) else f"> {found.batches[-1]}"
            for end in (critical.value, critical.low, critical.high)
        )
        yield f"Critical batch, which needs twice the fewest samples: {value} ({low} to {high})."
        if found.starts_late:
            yield (
                f"Some batches reach the target with the fewest samples tried, {found.least:.4g}, and may need less: then the "
                "critical batch is smaller. Lower the range of epochs to find out."
            )
    yield (
        "Each batch with the best of everything else that was searched. Only the ends of trainings count; reached: the "
        "probability that the most samples tried are enough."
    )
