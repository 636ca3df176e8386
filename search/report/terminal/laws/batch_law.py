"""What `bsearch fit-batch` prints: the law of samples to a target, of each workload in a table; or a study's own samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from ....analysis.rates import Estimate
from ....laws.runs_table import RunsToTarget
from ....laws.samples_by_batch import SamplesByBatch
from ....laws.samples_to_target import BatchLaw
from ..tables import column

# A median that differs from the law by this factor is reported: MLPerf's 90 points differ by less.
_FAR = 2.0


def law_document(points: Sequence[RunsToTarget], law: BatchLaw, batches: Sequence[int]) -> dict[str, Any]:
    """A workload's law as JSON holds it.

    Args:
        batches: to predict beside the measured ones.
    """
    groups = sorted({point.group for point in points})
    return {
        "floor": {group: asdict(law.floor(group)) for group in groups},
        "critical_batch": asdict(law.critical_batch()),
        "spread": asdict(Estimate.of(law.spread)),
        "measured_batches": list(law.batches),
        "predicted": [
            {"effective_batch": batch, "group": group, "within": law.covers(batch), **asdict(law.samples_at(batch, group))}
            for batch in sorted({*batches, *(point.effective_batch for point in points)})
            for group in groups
        ],
    }


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


def law_parts(
    workload: str, points: Sequence[RunsToTarget], law: BatchLaw, batches: Sequence[int]
) -> Iterator[str | Text | Table]:
    """A workload's law for people."""
    groups = sorted({point.group for point in points})
    runs = sum(len(point.samples) for point in points)
    count = len({point.effective_batch for point in points})
    yield Text(f"{workload or 'samples to target'}: {runs} runs at {count} batches", style="bold")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("effective\nbatch", *(("group",) if len(groups) > 1 else ()), "runs", "median", "law", "90 % interval"):
        column(table, name)
    rows: list[tuple[int, str, RunsToTarget | None]] = [(point.effective_batch, point.group, point) for point in points]
    rows += [(batch, group, None) for batch in batches for group in groups]
    for batch, group, point in sorted(rows, key=lambda row: row[:2]):
        found = law.samples_at(batch, group)
        measured = (str(len(point.samples)), f"{point.median:.4g}") if point is not None else ("", "")
        outside = "" if law.covers(batch) else ", outside"
        named = (group,) if len(groups) > 1 else ()
        table.add_row(str(batch), *named, *measured, f"{found.value:.4g}", f"{found.low:.4g} to {found.high:.4g}{outside}")
    yield table
    for group in groups:
        floor = law.floor(group)
        of_group = f", {group}" if len(groups) > 1 else ""
        yield f"Minimum samples to target{of_group}: {floor.value:.4g} ({floor.low:.4g} to {floor.high:.4g})."
    yield from _critical(law)
    spread = Estimate.of(law.spread)
    yield (
        f"Settings scatter around the law by {spread.value:.1%} ({spread.low:.1%} to {spread.high:.1%}) on top of run-to-run "
        "variation, probably because other hyperparameters were not tuned equally well at every batch."
    )
    yield from _far(points, law)
    if any(not law.covers(batch) for batch in batches):
        low, high = law.batches
        yield f"Outside the measured batches, {low} to {high}, intervals rest mostly on the law's prior."


def _far(points: Sequence[RunsToTarget], law: BatchLaw) -> Iterator[str]:
    """Of the points that the law cannot follow, as where samples fall with the batch."""
    times = [(point, point.median / law.samples_at(point.effective_batch, point.group).value) for point in points]
    if far := [f"{point.effective_batch} ({of_law:.3g} times)" for point, of_law in times if not 1 / _FAR < of_law < _FAR]:
        yield (
            f"Far from the law are the medians at batch {', '.join(far)}. Check these batches' learning rates, and that the "
            "table holds samples or epochs, in the same unit everywhere."
        )


def _critical(law: BatchLaw) -> Iterator[str]:
    critical = law.critical_batch()
    text = f"Critical batch, which needs twice the minimum: {critical.value:,.0f} ({critical.low:,.0f} to {critical.high:,.0f})"
    low, high = law.batches
    if critical.low > high:
        yield f"{text}: beyond the measured batches, so larger ones are worth trying."
    elif critical.high < low:
        yield f"{text}: below the measured batches, so the minimum is extrapolated."
    elif critical.low < low or critical.high > high:
        yield f"{text}: the interval reaches beyond the measured batches, {low} to {high}."
    else:
        yield f"{text}."
