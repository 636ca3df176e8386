"""Fronts and trials as files: CSV, JSON and a picture. docs/export.md describes the columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...spaces.boundary.files import write_file
from ...spaces.errors import plain
from ...spaces.front import ParetoFront
from ...spaces.record import TrialRecord
from .columns import MEASURES, Column
from .stdio.console import json_text

PLAN_COLUMNS = (
    *(
        "effective_batch",
        "micro_batch",
        "accumulation",
        "activation_checkpointing",
        "devices",
        "learning_rate",
        "rule",
    ),
)
FIRST_COLUMNS = (
    *("trial", "outcome", "on_front", "train_s", "device_s", "cost", "accuracy"),
    *PLAN_COLUMNS,
    *("reference_rate", "epochs"),
)


def trial_document(record: TrialRecord, front: ParetoFront) -> dict[str, Any]:
    """One trial as a flat mapping: outcome and objectives, then parameters and derived values by name.

    The metric's column has the metric's name (`accuracy` unless the study sets another).
    """
    return {
        "trial": record.number,
        "outcome": record.outcome,
        "on_front": any(record.number == trial.number for trial in front.trials),
        "train_s": record.train_s,
        **({} if record.facts.price is None else {"cost": record.taken("cost")}),
        front.metric: record.accuracy,
        **record.settings,
        "started_at": record.started_at,
        "ended_at": record.ended_at,
    }


def study_document(
    name: str, storage: str, front: ParetoFront, records: Iterable[TrialRecord]
) -> dict[str, Any]:
    """The JSON document of `export --to json` and of `front.json`: each member of the front with everything that is known."""
    records = list(records)
    outcomes = sorted({record.outcome for record in records})
    return {
        "study": name,
        "storage": storage,
        "objectives": {
            "speed": {"name": front.speed, "unit": MEASURES[front.speed].unit, "direction": "minimize"},
            "metric": {"name": front.metric, "direction": front.direction},
        },
        "trials": {outcome: sum(record.outcome == outcome for record in records) for outcome in outcomes},
        "front": [trial_document(record, front) for record in front.trials],
    }


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV: the main columns first, the others sorted by name."""
    names = {name for row in rows for name in row}
    columns = [name for name in FIRST_COLUMNS if name in names] + sorted(names - set(FIRST_COLUMNS))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, columns))
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    return text.getvalue()


def html_table(columns: Sequence[Column]) -> str:
    """Trials as an HTML table for notebooks."""
    head = "".join(f"<th>{escape(plain(column.name))}</th>" for column in columns)
    rows = zip(*(column.cells for column in columns), strict=True)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(plain(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> Any:
    """Text that neither a terminal nor a spreadsheet interprets: a quote is put before what would start a formula."""
    if not isinstance(value, str):
        return value
    return f"'{plain(value)}" if value.startswith(("=", "+", "-", "@", "\t")) else plain(value)


def write_front(folder: Path, document: Mapping[str, Any]) -> list[Path]:
    """Write front.csv and front.json into a folder."""
    return [
        write_file(folder / "front.csv", csv_text(document["front"])),
        write_file(folder / "front.json", json_text(document)),
    ]
