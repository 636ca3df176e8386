"""Fronts and trials as files: CSV, JSON and a picture. The columns are told in docs/export.md."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..spaces.errors import LauncherError, plain
from ..spaces.trial import ParetoFront, TrialRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST_COLUMNS = (
    "trial",
    "outcome",
    "on_front",
    "knee",
    "train_s",
    "device_s",
    "accuracy",
    "effective_batch",
    "micro_batch",
    "accumulation",
    "devices",
    "learning_rate",
    "rule",
    "reference_rate",
    "epochs",
)


def trial_document(record: TrialRecord, front: ParetoFront) -> dict[str, Any]:
    """One trial as a flat mapping: outcome and objectives, then parameters and derived values by name.

    The metric's column bears its own name (`accuracy` unless the study names another).
    """
    return {
        "trial": record.number,
        "outcome": record.outcome,
        "on_front": any(record.number == trial.number for trial in front.trials),
        "knee": record.number == front.knee,
        "train_s": record.train_s,
        front.metric: record.accuracy,
        **record.settings,
        "started_at": record.started_at,
        "ended_at": record.ended_at,
    }


def study_document(name: str, storage: str, front: ParetoFront, records: Iterable[TrialRecord]) -> dict[str, Any]:
    """The JSON document of `run --json`, `show --json` and `export --format json`."""
    records = list(records)
    outcomes = sorted({record.outcome for record in records})
    return {
        "study": name,
        "storage": storage,
        "objectives": {
            "speed": {"name": front.speed, "unit": "s", "direction": "minimize"},
            "accuracy": {"name": front.metric, "direction": front.direction},
        },
        "trials": {outcome: sum(record.outcome == outcome for record in records) for outcome in outcomes},
        "knee": front.knee,
        "front": [trial_document(record, front) for record in front.trials],
    }


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, the best known columns first and the rest by name."""
    names = {name for row in rows for name in row}
    columns = [name for name in FIRST_COLUMNS if name in names] + sorted(names - set(FIRST_COLUMNS))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Text that neither a terminal nor a spreadsheet obeys: what would begin a formula gets a quote before it."""
    if not isinstance(value, str):
        return value
    return f"'{plain(value)}" if value.startswith(("=", "+", "-", "@", "\t")) else plain(value)


def json_text(document: Any) -> str:
    return json.dumps(document, indent=2, allow_nan=False, default=str) + "\n"


def write_file(path: Path, content: str | bytes) -> Path:
    """Write the whole file or nothing of it.

    Raises:
        LauncherError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # /dev/null, a pipe: written to, never replaced
            path.write_bytes(content.encode() if isinstance(content, str) else content)
            return path
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as part:
            try:
                part.write(content.encode() if isinstance(content, str) else content)
                part.flush()
                os.fsync(part.fileno())  # some file systems say only then that they are full
                os.fchmod(part.fileno(), 0o644)
                os.replace(part.name, path)
            except BaseException:
                os.unlink(part.name)
                raise
    except OSError as error:
        raise LauncherError(f"{path}: cannot be written: {error.strerror}. Name another folder with --out.") from None
    return path


def write_front(folder: Path, document: Mapping[str, Any], records: Iterable[TrialRecord], front: ParetoFront) -> list[Path]:
    """Write front.csv, front.json and front.png into a folder."""
    return [
        write_file(folder / "front.csv", csv_text(document["front"])),
        write_file(folder / "front.json", json_text(document)),
        write_file(folder / "front.png", front_picture(list(records), front, str(document["study"]))),
    ]


def front_picture(records: Sequence[TrialRecord], front: ParetoFront, title: str) -> bytes:
    """The front as PNG: accuracy over seconds, other trials faint, the user's own setting and the knee marked."""
    from matplotlib.figure import Figure  # 0.5 s, and only pictures need it

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()

    def points(chosen: Iterable[TrialRecord]) -> tuple[list[float], list[float]]:
        pairs = [(front.seconds(record), record.accuracy) for record in chosen]
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        return [x for x, _ in known], [y for _, y in known]

    others = [record for record in records if record.outcome == "complete" and record not in front.trials]
    axes.scatter(*points(others), s=18, color="0.75", label="other trials")
    axes.plot(
        *points(front.trials),
        marker="o",
        drawstyle="steps-post",
        color="C0",
        label="front",
    )
    for record in front.trials:
        batch = record.parameters.get("effective_batch", record.facts.get("effective_batch"))
        axes.annotate(
            f"{batch}",
            (front.seconds(record) or 0.0, record.accuracy or 0.0),
            textcoords="offset points",
            xytext=(4, -11),
            fontsize=8,
        )
        if record.number == front.knee:
            axes.scatter(*points([record]), s=140, facecolors="none", edgecolors="C3", label="knee", zorder=3)
    started = [record for record in records if "start" in record.facts and record.outcome == "complete"]
    if started:
        axes.scatter(*points(started), marker="*", s=130, color="C1", label="yours")
    axes.set_xscale("log")
    axes.set(
        xlabel=f"{front.speed} (seconds of training{' x devices' * (front.speed == 'device_s')})",
        ylabel=front.metric,
        title=f"{title} (numbers: effective_batch)",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    return png_of(figure)


def png_of(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
