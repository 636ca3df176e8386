"""One law's runs, written as people write them: what is read is right, or it is told or asked; never silently another."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bsearch.search.sources.columns import columns_of
from bsearch.search.sources.imported import imported
from bsearch.search.sources.read import runs_of
from bsearch.spaces.errors import StudyFileError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FORTY = 40


@dataclass(frozen=True)
class Truth:
    """One run: what its training was."""

    micro: int
    passes: int
    devices: int
    rate: float
    epochs: int
    seconds: float
    accuracy: float

    @property
    def batch(self) -> int:
        return self.micro * self.passes * self.devices


def law(seed: int, devices: int) -> list[Truth]:
    """Forty runs whose accuracy falls with the distance from a best rate of .003 at batch 64."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(FORTY):
        micro, passes, epochs = int(rng.integers(4, 40)), int(rng.integers(1, 5)), int(rng.integers(2, 9))
        batch = micro * passes * devices
        rate = float(f"{0.003 * math.sqrt(batch / 64) * math.exp(rng.normal(0, 0.7)):.3g}")
        away = math.log(rate / (0.003 * math.sqrt(batch / 64)))
        seconds = round(1500 * epochs / (batch + 20) + rng.uniform(60, 300), 1)
        accuracy = round(0.95 - 0.05 * away**2 - 0.1 / epochs + rng.normal(0, 0.002), 4)
        made.append(Truth(micro, passes, devices, rate, epochs, seconds, accuracy))
    return made


# How people say on how many devices; True: it can be read.
DEVICES: dict[str, Any] = {
    "world_size": lambda n: {"world_size": n},
    "a list": lambda n: {"gpus": str(list(range(n)))},
    "numbers": lambda n: {"gpus": ",".join(map(str, range(n)))},
    "visible": lambda n: {"CUDA_VISIBLE_DEVICES": ",".join(str(7 - place) for place in range(n))},
    "auto": lambda n: {"n_gpu": "auto"},
    "data parallel": lambda n: {
        "data_parallel_size": n,
        "tensor_parallel_size": 2,
        "world_size_total": 2 * n,
    },
    "of a world": lambda n: {"world_size": 2 * n, "tensor_model_parallel_size": 2},
    "an unknown name": lambda n: {"cards_per_node": n, "nodes": 1} if n == 1 else {"gpu_count": n},
}
# What else is said of the batch, given the run.
BATCHES: dict[str, Any] = {
    "nothing": lambda run: {},
    "the step's": lambda run: {"global_batch_size": run.batch},
    "DeepSpeed's": lambda run: {"train_batch_size": run.batch},
    "Trainer's": lambda run: {"train_batch_size": run.micro * run.devices},
    "another": lambda run: {"train_batch_size": 4 * run.micro * run.passes * run.devices},
}
NOTATIONS = ("plain", "decimal commas", "percent", "minutes", "units", "mean", "merged", "clock")


def loss_of(accuracy: float) -> float:
    """A metric of which less is better, above 1 in some runs."""
    return round(4 * (1 - accuracy), 4)


def written(runs: list[Truth], devices: str, batch: str, notation: str, metric: str = "val_acc") -> str:
    """The runs as CSV."""
    rows = []
    for place, run in enumerate(runs):
        row: dict[str, Any] = {"run": f"run-{place}", "micro_batch_size": run.micro, "grad_accum": run.passes}
        row |= DEVICES[devices](run.devices) | BATCHES[batch](run)
        row |= {"lr": run.rate, "epochs": run.epochs, "runtime": run.seconds, "val_acc": run.accuracy}
        rows.append(row)
    if notation == "percent":
        rows = [{**row, "val_acc": f"{100 * row['val_acc']:.2f} %"} for row in rows]
    if metric == "val_loss":
        rows = [
            {
                metric if key == "val_acc" else key: loss_of(run.accuracy) if key == "val_acc" else value
                for key, value in row.items()
            }
            for run, row in zip(runs, rows, strict=True)
        ]
    if notation == "minutes":
        rows = [
            {("runtime (min)" if key == "runtime" else key): value for key, value in row.items()}
            for row in rows
        ]
        rows = [{**row, "runtime (min)": row["runtime (min)"] / 60} for row in rows]
    if notation == "clock":
        rows = [
            {**row, "runtime": f"{int(row['runtime']) // 60}:{int(row['runtime']) % 60:02d}"} for row in rows
        ]
    if notation == "merged":
        rows = [{**row, "epochs": row["epochs"] if place % 4 == 0 else ""} for place, row in enumerate(rows)]
    delimiter = ";" if notation == "decimal commas" else ","
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    if notation == "units":
        writer.writerow({"runtime": "min", metric: "-"})
        rows = [{**row, "runtime": row["runtime"] / 60} for row in rows]
    for row in rows:
        if notation == "decimal commas":
            shown = {
                key: f"{value:,.1f}".translate(str.maketrans(",.", ".,"))
                for key, value in row.items()
                if key == "runtime"
            }
            commas = {
                key: str(value).replace(".", ",") for key, value in row.items() if isinstance(value, float)
            }
            row = {**row, **commas, **shown}
        writer.writerow(row)
    if notation == "mean":
        last = {
            key: float(np.mean([row[key] for row in rows]))
            for key in ("micro_batch_size", "lr", "runtime", metric)
        }
        writer.writerow({"run": "mean", **last})
    return text.getvalue()


def judged(runs: list[Truth], text: str, folder: Path, metric: str = "val_acc") -> str:
    """right, or why not: asked (refused with words), told (a run or a column is left out by name), silently other."""
    path = folder / "runs.csv"
    path.write_text(text, encoding="utf-8")
    said: list[str] = []
    try:
        found = runs_of(str(path), said.append)
        columns = columns_of(str(path), found)
        group, *others = imported(str(path), found, columns)
    except StudyFileError as error:
        assert str(error)
        return "asked"
    if others or group.spec.objectives.metric.direction != (
        "minimize" if metric == "val_loss" else "maximize"
    ):
        return "silently other"
    records = group.records
    if len(records) != len(runs):
        return "told" if sum(group.left_out.values()) + len(records) == len(runs) else "silently other"
    for run, record in zip(runs, records, strict=True):
        facts = record.facts
        same = facts.effective_batch == run.batch and facts.learning_rate == pytest.approx(run.rate)
        value = loss_of(run.accuracy) if metric == "val_loss" else run.accuracy
        same = same and record.values is not None and record.values[1] == pytest.approx(value, abs=1e-6)
        same = same and facts.measured_train_s == pytest.approx(run.seconds, abs=1.0)
        if not same:
            return "silently other"
        if facts.epochs != run.epochs:
            told = any(
                one.name == "epochs" and one.meaning == "nothing" and one.why for one in columns.columns
            )
            return "told" if facts.epochs is None and told else "silently other"
    return "right"


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 99),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(list(DEVICES)),
    st.sampled_from(list(BATCHES)),
    st.sampled_from(NOTATIONS),
    st.sampled_from(["val_acc", "val_loss"]),
)
def test_nothing_is_silently_another(
    tmp_path: Path, seed: int, devices: int, said: str, batch: str, notation: str, metric: str
) -> None:
    runs = law(seed, devices)
    verdict = judged(runs, written(runs, said, batch, notation, metric), tmp_path, metric)
    assert verdict != "silently other"


@pytest.mark.parametrize("notation", NOTATIONS)
def test_what_can_be_read_is(tmp_path: Path, notation: str) -> None:
    expected = {"clock": "asked", "merged": "told"}.get(notation, "right")
    for said in ("world_size", "a list", "numbers", "visible"):
        for batch in ("nothing", "the step's", "DeepSpeed's", "Trainer's"):
            runs = law(1, 4)
            assert judged(runs, written(runs, said, batch, notation), tmp_path) == expected, (said, batch)
