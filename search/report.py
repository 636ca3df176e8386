"""Words, tables and plots for the terminal: what a study came to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.table import Table

from ..objectives.probe import MemoryRow
from ..spaces.device import DeviceProfile
from ..spaces.memory import readable_bytes
from ..spaces.study import StudySpec
from ..spaces.trial import ParetoFront, TrialRecord
from .pareto import no_slower, no_worse


def seconds(value: float | None) -> str:
    """Seconds as people say them.

    >>> seconds(0.0123), seconds(75.2), seconds(7260)
    ('0.0123 s', '1 min 15 s', '2 h 1 min')
    """
    if value is None or not math.isfinite(value):
        return "-"
    if value < 60:
        return f"{value:.3g} s"
    if value < 3600:
        return f"{int(value // 60)} min {int(value % 60)} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"


def number(value: object) -> str:
    """A value of a table: four digits are enough to read, whole numbers stay whole."""
    if isinstance(value, bool) or not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.4g}"


def front_table(front: ParetoFront, most: int | None = None) -> Table:
    """The front, fastest first, with the settings that give each point."""
    trials = front.trials if most is None else front.trials[:most]
    searched = sorted({name for trial in trials for name in trial.parameters} - {*_SHOWN, "accumulation", "reference_rate"})
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("trial", "train_s", front.metric, *_SHOWN, "micro\nx acc.", *searched, ""):
        _column(table, name, "left" if name == "rule" else "right")
    for trial in trials:
        values = {**trial.facts, **trial.parameters}
        passes = f"{values.get('micro_batch', '?')} x {values.get('accumulation', '?')}"
        marks = [word for word, holds in (("knee", trial.number == front.knee), ("yours", "start" in trial.facts)) if holds]
        table.add_row(
            str(trial.number),
            number(trial.train_s),
            number(trial.accuracy),
            *(number(values.get(name)) for name in _SHOWN),
            passes,
            *(number(values.get(name)) for name in searched),
            " ".join(marks),
        )
    return table


def _column(table: Table, name: str, justify: Literal["left", "right"]) -> None:
    """Long names go over two lines."""
    table.add_column(name.replace("_", "\n", 1) if len(name) > 8 else name, justify=justify, no_wrap=True, vertical="bottom")


_SHOWN = ("effective_batch", "learning_rate", "rule", "epochs")


def trials_table(records: Sequence[TrialRecord], front: ParetoFront) -> Table:
    """Every trial in order, with how it came out."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("trial", "outcome", "train_s", front.metric, *_SHOWN, ""):
        _column(table, name, "left" if name in ("outcome", "rule", "") else "right")
    members = {trial.number for trial in front.trials}
    for record in records:
        values = {**record.facts, **record.parameters}
        note = record.message or ("front" if record.number in members else "")
        table.add_row(
            str(record.number),
            record.outcome,
            number(record.train_s),
            number(record.accuracy),
            *(number(values.get(name)) for name in _SHOWN),
            note.splitlines()[0][:60] if note else "",
        )
    return table


def front_plot(front: ParetoFront, records: Iterable[TrialRecord], width: int, height: int = 16) -> str:
    """Accuracy over seconds as text, without colour: o the front, * the user's own, . other trials."""
    import plotext

    complete = [record for record in records if record.outcome == "complete" and record.train_s]
    if len(complete) < 2:
        return ""
    members = {trial.number for trial in front.trials}
    groups = {
        ".": [record for record in complete if record.number not in members],
        "o": [record for record in complete if record.number in members],
        "*": [record for record in complete if "start" in record.facts],
    }
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(max(min(width, 100), 40), height)
    plotext.xscale("log")
    for marker, group in groups.items():
        if group:
            plotext.scatter([record.train_s for record in group], [record.accuracy for record in group], marker=marker)
    low, high = min(r.train_s or 1 for r in complete), max(r.train_s or 1 for r in complete)
    ticks = [low * (high / low) ** (part / 4) for part in range(5)]
    plotext.xticks(ticks, [f"{tick:.2g}" for tick in ticks])
    plotext.xlabel("train_s (o front, * yours)")
    plotext.ylabel(front.metric)
    text: str = plotext.uncolorize(plotext.build())
    return "\n".join(line.rstrip() for line in text.splitlines())


def memory_document(spec: StudySpec, profile: DeviceProfile, rows: Sequence[MemoryRow]) -> dict[str, Any]:
    """The JSON document of `bsearch profile --json`."""
    law = profile.memory
    assert law is not None
    largest = profile.largest_micro_batch
    return {
        "study": spec.study,
        "device": profile.device,
        "source": law.source,
        "note": law.note,
        "limit_bytes": profile.limit_bytes,
        "headroom": spec.memory.headroom,
        "scale": law.scale,
        "fixed_bytes": law.fixed_bytes,
        "largest_micro_batch": largest,
        "evaluation_batch": profile.evaluation_batch,
        "smallest_micro_batch": profile.smallest_micro_batch,
        "breakdown": dict(law.breakdown),
        "curve": [
            {
                "micro_batch": row.micro_batch,
                "predicted_bytes": row.predicted,
                "measured_bytes": row.measured,
                "difference": None if row.measured is None else row.predicted / row.measured - 1,
            }
            for row in rows
        ],
        "largest_effective_batch": None
        if profile.limit_bytes is None or largest is None
        else {str(passes): passes * largest * spec.devices.per_trial for passes in (1, 2, 4, 8, 16, 32)},
    }


def memory_tables(document: Mapping[str, Any]) -> Iterator[Table | str]:
    """The words and tables of `bsearch profile`."""
    how = "traced on fake tensors" if document["source"] == "traced" else f"counted on real tensors ({document['note']})"
    yield f"Memory of {document['study']} on {document['device']}, {how}"
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("micro_batch", "predicted", "measured", "difference"):
        _column(table, name, "right")
    for row in document["curve"]:
        measured, difference = row["measured_bytes"], row["difference"]
        table.add_row(
            str(row["micro_batch"]),
            readable_bytes(row["predicted_bytes"]),
            "-" if measured is None else readable_bytes(measured),
            "-" if difference is None else f"{difference:+.1%}",
        )
    yield table
    parts = ", ".join(f"{part} {readable_bytes(value)}" for part, value in document["breakdown"].items() if value)
    yield f"At the largest size looked at that fits: {parts}"
    largest = document["largest_micro_batch"]
    if document["limit_bytes"] is None:
        yield "memory.limit is not set: nothing limits the micro-batch here. Write limit: 10GiB, 90% or device."
        return
    yield (
        f"Limit {readable_bytes(document['limit_bytes'])}, {document['headroom']:.0%} kept free: the largest micro-batch is "
        f"{largest}, an evaluation pass takes {document['evaluation_batch']}"
    )
    reach = ", ".join(f"{batch} in {passes}" for passes, batch in document["largest_effective_batch"].items())
    yield f"Largest effective batch by passes per step: {reach}"
    if document["note"] and document["source"] == "traced":
        yield f"Note: {document['note']}"


def memory_plot(document: Mapping[str, Any], width: int) -> str:
    """Peak bytes against the micro-batch as text: o predicted, x measured."""
    import plotext

    rows = document["curve"]
    if len(rows) < 2:
        return ""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(max(min(width, 100), 40), 14)
    scale = 1 << 20
    plotext.scatter([row["micro_batch"] for row in rows], [row["predicted_bytes"] / scale for row in rows], marker="o")
    known = [row for row in rows if row["measured_bytes"] is not None]
    if known:
        plotext.scatter([row["micro_batch"] for row in known], [row["measured_bytes"] / scale for row in known], marker="x")
    plotext.xlabel("micro_batch (o predicted, x measured)")
    plotext.ylabel("peak MiB")
    text: str = plotext.uncolorize(plotext.build())
    return "\n".join(line.rstrip() for line in text.splitlines())


def knee_words(front: ParetoFront) -> str | None:
    """The point where the front bends, in a sentence."""
    trial = next((trial for trial in front.trials if trial.number == front.knee), None)
    if trial is None:
        return None
    fastest, best = front.trials[0], front.trials[-1]
    assert trial.train_s is not None and best.train_s is not None and best.accuracy is not None and trial.accuracy is not None
    saved = 1 - trial.train_s / best.train_s
    return (
        f"Knee: trial {trial.number}, {front.metric} {number(trial.accuracy)} in {seconds(trial.train_s)}: "
        f"{saved:.0%} less time than the best ({number(best.accuracy)} in {seconds(best.train_s)}); "
        f"the fastest is {seconds(fastest.train_s)} with {number(fastest.accuracy)}."
    )


def comparison(front: ParetoFront, records: Iterable[TrialRecord]) -> Iterator[str]:
    """How the front compares with what the user uses today, a sentence per setting under `start:`."""
    for setting in records:
        if "start" not in setting.facts:
            continue
        where = f"Your setting today (trial {setting.number}"
        if setting.outcome != "complete" or setting.train_s is None or setting.accuracy is None:
            yield f"{where}): {setting.outcome}, so there is nothing to compare with."
            continue
        where += f": {front.metric} {number(setting.accuracy)} in {seconds(setting.train_s)})"
        faster, better = no_worse(front, setting), no_slower(front, setting)
        if faster is None or better is None or faster.number == better.number == setting.number:
            yield f"{where} is on the front: no trial beat it in both."
            continue
        parts = []
        if faster.train_s is not None and faster.train_s < setting.train_s:
            change = faster.train_s / setting.train_s - 1
            parts.append(
                f"trial {faster.number} has at least its {front.metric} ({number(faster.accuracy)}) in "
                f"{seconds(faster.train_s)} ({change:+.0%} time)"
            )
        if better.number != faster.number and better.accuracy is not None:
            change = better.accuracy - setting.accuracy
            parts.append(
                f"trial {better.number} has {front.metric} {number(better.accuracy)} ({change:+.3g}) in its time or less"
            )
        yield f"{where} -> {'; '.join(parts)}."
