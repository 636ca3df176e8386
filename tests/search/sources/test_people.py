"""Records as people keep them, each of which was read as something else once: right, or told, or asked about with a cell."""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bsearch.search.sources.columns import columns_of
from bsearch.search.sources.imported import Imported, imported
from bsearch.search.sources.read import runs_of, without
from bsearch.search.sources.values import spent
from bsearch.spaces.errors import StudyFileError

Row = dict[str, Any]


def runs(number: int = 24) -> list[Row]:
    """Runs of a law, by names that need no guess."""
    rng, made = np.random.default_rng(0), list[Row]()
    for _ in range(number):
        batch = int(rng.integers(8, 200))
        rate = float(f"{0.003 * math.exp(rng.normal(0, 0.5)):.3g}")
        accuracy = round(0.95 - 0.05 * math.log(rate / 0.003) ** 2 + rng.normal(0, 0.002), 4)
        made.append(
            {
                "batch_size": batch,
                "lr": rate,
                "epochs": 30,
                "runtime": round(4000 / batch + 30, 1),
                "val_acc": accuracy,
            }
        )
    return made


def table(folder: Path, rows: list[Row]) -> str:
    path = folder / "runs.csv"
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def read(source: str, **mapped: str) -> list[Imported]:
    found, meanings = without(runs_of(source), mapped)
    return imported(source, found, columns_of(source, found, mapped=meanings))


def one(source: str, **mapped: str) -> Imported:
    (group,) = read(source, **mapped)
    return group


def asked(folder: Path, rows: list[Row], *words: str) -> None:
    with pytest.raises(StudyFileError) as caught:
        read(table(folder, rows))
    for word in words:
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize("flag", ["failed", "outlier", "is_broken", "exclude"])
def test_marked_runs_are_left_out_by_count(tmp_path: Path, flag: str) -> None:
    found = one(table(tmp_path, [{**row, flag: place % 6 == 0} for place, row in enumerate(runs())]))
    assert len(found.records) == 20
    assert found.left_out == {f"marked as {flag}": 4}


@pytest.mark.parametrize("name", ["stopped_epoch", "epochs_run"])
def test_early_stopping_has_as_many_epochs_as_it_trained(tmp_path: Path, name: str) -> None:
    rows = [
        {**row, "patience": 3, name: (7 if place % 3 == 0 else 0 if name == "stopped_epoch" else 30)}
        for place, row in enumerate(runs())
    ]
    lengths = [record.facts.epochs for record in one(table(tmp_path, rows)).records]
    assert lengths == [(8 if name == "stopped_epoch" else 7) if place % 3 == 0 else 30 for place in range(24)]


def test_minutes_of_an_epoch_are_no_epochs(tmp_path: Path) -> None:
    rows = [{**row, "min/epoch": 0.5 + place / 100} for place, row in enumerate(runs())]
    assert [record.facts.epochs for record in one(table(tmp_path, rows)).records] == [30] * 24


@pytest.mark.parametrize(
    "written",
    [
        lambda second: (
            f"202607{1 + second // 86400:02d}{second // 3600 % 24:02d}{second // 60 % 60:02d}{second % 60:02d}"
        ),
        lambda second: (1_780_000_000 + second) * 1000,
        lambda second: (1_780_000_000 + second) * 10**6,
        lambda second: (1_780_000_000 + second) * 10**9,
    ],
    ids=["digits", "milliseconds", "microseconds", "nanoseconds"],
)
def test_moments_of_any_unit(tmp_path: Path, written: Callable[[int], Any]) -> None:
    rows = [
        {name: value for name, value in row.items() if name != "runtime"}
        | {"start_time": written(400 * place), "end_time": written(400 * place + 100 + place)}
        for place, row in enumerate(runs())
    ]
    assert [record.facts.measured_train_s for record in one(table(tmp_path, rows)).records] == [
        100 + n for n in range(24)
    ]


def test_seconds_that_contradict_a_clock_are_asked_about(tmp_path: Path) -> None:
    def clock(second: float) -> str:
        return f"2026-07-01T{int(second) // 3600:02d}:{int(second) // 60 % 60:02d}:{second % 60:06.3f}"

    rows = [{**row, "start_time": clock(0), "end_time": clock(row["runtime"] + 2)} for row in runs()]
    assert len(one(table(tmp_path, rows)).records) == 24
    asked(
        tmp_path,
        [{**row, "runtime": round(row["runtime"] / 60, 4)} for row in rows],
        "runtime",
        "runs.csv:",
        "(min)",
    )
    asked(tmp_path, [{**row, "runtime": 2 * row["runtime"]} for row in rows], "runtime", "end_time")


def test_errors_in_shares_and_in_percent_are_asked_about(tmp_path: Path) -> None:
    rows = [
        {
            **{name: value for name, value in row.items() if name != "val_acc"},
            "val_error": round(error if place % 2 else 100 * error, 4),
        }
        for place, row in enumerate(runs())
        for error in [1 - row["val_acc"]]
    ]
    asked(tmp_path, rows, "val_error", "shares or percents")


def test_two_optimizers_rates_are_asked_about(tmp_path: Path) -> None:
    rows = [
        {
            **{name: value for name, value in row.items() if name != "lr"},
            "muon_lr": row["lr"],
            "adamw_lr": round(0.1 * row["lr"], 7),
        }
        for row in runs()
    ]
    asked(tmp_path, rows, "muon_lr", "adamw_lr", "--map")
    found = one(table(tmp_path, rows), muon_lr="learning_rate")
    assert found.records[0].facts.learning_rate == rows[0]["muon_lr"]


def test_a_batch_split_over_processes_is_asked_about(tmp_path: Path) -> None:
    rows = [
        {
            "per_device_train_batch_size": row.pop("batch_size"),
            **row,
            "num_processes": 2,
            "split_batches": True,
        }
        for row in runs()
    ]
    asked(tmp_path, rows, "split_batches", "runs.csv:2")


@pytest.mark.parametrize("label", ["Mean (n=24)", "avg.", "Sum", ""])
def test_rows_made_of_others_are_left_out(tmp_path: Path, label: str) -> None:
    rows = [{"run": f"run-{place}", **row} for place, row in enumerate(runs())]
    values = {name: np.mean([row[name] for row in rows]) for name in rows[0] if name != "run"}
    found = one(table(tmp_path, [*rows, {"run": label, **values}]))
    assert len(found.records) == 24


def test_a_choice_called_mean_is_no_mean(tmp_path: Path) -> None:
    for choices in (("mean", "max"), ("cls", "mean", "cls2")):
        rows = [{"pooling": choices[place % len(choices)], **row} for place, row in enumerate(runs())]
        assert len(one(table(tmp_path, rows)).records) == 24


def test_rows_of_epochs_are_asked_about(tmp_path: Path) -> None:
    rows = [
        {
            **{name: value for name, value in row.items() if name not in ("epochs", "val_acc")},
            "epoch": epoch,
            "val_acc": 0.1 * epoch,
        }
        for row in runs(6)
        for epoch in range(1, 9)
    ]
    asked(tmp_path, rows, "epoch", "run in each row", "runs.csv:2 and runs.csv:3")


def test_a_batch_that_lacks_a_factor_is_found_by_its_steps(tmp_path: Path) -> None:
    rows = []
    for place, row in enumerate(runs()):
        devices = (1, 2, 4)[place % 3]
        rows.append({**row, "max_steps": 30 * math.ceil(50_000 / (row["batch_size"] * devices))})
    asked(tmp_path, rows, "batch_size × max_steps / epochs", "runs.csv:", "--map batch_size=effective_batch")
    fine = [{**row, "max_steps": 30 * math.ceil(50_000 / row["batch_size"])} for row in runs()]
    assert len(one(table(tmp_path, fine)).records) == 24


@pytest.mark.parametrize("column", [{"batch_size": None}, {"val_split": 0.1}, {"n_gpu": 0}])
def test_what_needs_no_question(tmp_path: Path, column: Row) -> None:
    rows = []
    for place, row in enumerate(runs()):
        given = {name: place + 1 if value is None else value for name, value in column.items()}
        rows.append({**row, **({"val_split": 0.1 + place % 3 / 10} if "val_split" in given else given)})
    found = one(table(tmp_path, rows))
    assert [record.facts.effective_batch for record in found.records] == [row["batch_size"] for row in rows]


def test_one_bad_run_is_left_out_by_its_place(tmp_path: Path) -> None:
    rows = runs()
    rows[7] = {**rows[7], "lr": "0.003?"}
    asked(tmp_path, rows, "runs.csv:9: lr", "--map runs.csv:9=nothing")
    assert len(one(table(tmp_path, rows), **{"runs.csv:9": "nothing"}).records) == 23


def test_settings_in_one_cell(tmp_path: Path) -> None:
    rows = []
    for row in runs():
        config = {"lr": {"value": row.pop("lr"), "desc": None}, "batch_size": row.pop("batch_size")}
        rows.append({**row, "config": str(config)})
    assert [record.facts.effective_batch for record in one(table(tmp_path, rows)).records] == [
        row["batch_size"] for row in runs()
    ]


def test_sizes_of_models_are_numbers_and_no_noise(tmp_path: Path) -> None:
    rows = [
        {**row, "n_params": size, "tokens": "1.5B"} for row in runs(10) for size in ("124M", "355M", "1.07B")
    ]
    found = one(table(tmp_path, rows))
    assert {record.facts.model_parameters for record in found.records} == {
        124_000_000,
        355_000_000,
        1_070_000_000,
    }
    assert {record.facts.samples_budget for record in found.records} == {1_500_000_000}


@pytest.mark.parametrize("written", ["1 day, 3:04:05", "1 day 03:04:05", "27h 4m 5s"])
def test_durations_over_a_day(tmp_path: Path, written: str) -> None:
    found = one(table(tmp_path, [{**row, "runtime": written} for row in runs()]))
    assert {record.facts.measured_train_s for record in found.records} == {97445.0}


def test_no_run_that_ended_says_which_states_were_met(tmp_path: Path) -> None:
    asked(
        tmp_path,
        [{**row, "state": "archived"} for row in runs()],
        "24 of a status that is not known, 'archived'",
        "--map state=",
    )
    assert len(one(table(tmp_path, [{**row, "state": "Inactive"} for row in runs()])).records) == 24


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([10] * 9, 90),
        ([10] * 5 + [30_000] + [10] * 3, 90),
        ([10] * 5 + [-3600] + [10] * 3, 90),
        ([400] * 9, 3600),
    ],
    ids=["even", "a night", "clock set back", "slow"],
)
def test_seconds_without_pauses(tmp_path: Path, gaps: list[int], expected: float) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer, at = SummaryWriter(str(tmp_path / "run")), time.time()  # type: ignore[no-untyped-call]
    for step, gap in enumerate(gaps, start=1):
        at += gap
        writer.add_scalar("val/accuracy", 0.1 * step, step, walltime=at)  # type: ignore[no-untyped-call]
    writer.close()  # type: ignore[no-untyped-call]
    said: list[str] = []
    (run,) = runs_of(f"tensorboard:{tmp_path}", said.append)
    assert run.results["duration_s"] == pytest.approx(expected, abs=2)
    assert bool(said) == (expected == 90 and gaps != [10] * 9)


def test_a_resumed_training_has_no_seconds(tmp_path: Path) -> None:
    def state(folder: Path, written_at: float, **more: Any) -> None:
        folder.mkdir(parents=True)
        log = [{"step": 10, "loss": 1.0}, {"step": 20, "train_runtime": 600.0}]
        path = folder / "trainer_state.json"
        path.write_text(json.dumps({"global_step": 20, "max_steps": 20, "epoch": 2.0, "log_history": log}))
        os.utime(path, (written_at, written_at))

    for name, first in (("resumed", 40_000.0), ("whole", 500.0)):
        state(tmp_path / name, 100_000.0)
        state(tmp_path / name / "checkpoint-10", 100_000.0 - first)
    said: list[str] = []
    resumed, whole = runs_of(str(tmp_path), said.append)
    assert ("train_runtime" in resumed.results, whole.results["train_runtime"]) == (False, 600.0)
    assert "resumed" in said[0] and "1 run" in said[0]


def test_steps_that_were_reached_are_compared_with_epochs_that_were(tmp_path: Path) -> None:
    rows = []
    for place, row in enumerate(runs()):
        epochs = 7 if place % 3 == 0 else 30
        rows.append(
            {
                **row,
                "patience": 3,
                "epoch": epochs,
                "global_step": epochs * math.ceil(50_000 / row["batch_size"]),
            }
        )
    assert len(one(table(tmp_path, rows)).records) == 24


def test_several_logs_of_a_step_and_a_training_before_its_first_metric_are_no_pauses() -> None:
    each = [600 * epoch + 1e-4 * scalar for epoch in range(20) for scalar in range(4)]
    assert spent(each) == (pytest.approx(600 * 19, abs=1), "")
    assert spent([0, *(3600 + second for second in range(10))]) == (3609, "")


@pytest.mark.parametrize(
    "column",
    [
        {"use_skip": True}, {"steps_skipped": 1}, {"early_stopping": False, "epoch": 30}, {"plateau_patience": 5},
        {"user_time": 9.0},
        {"data_fraction": 0.5, "max_steps": 7}, {"model_size": "124M"}, {"tokens": 10**9}, {"val_set_size": 100},
    ],
    ids=lambda column: "-".join(column),
)  # fmt: skip
def test_columns_that_change_nothing(tmp_path: Path, column: Row) -> None:
    doubled = {name: 2 * value if isinstance(value, float) else value for name, value in column.items()}
    rows = [{**row, **(column if place % 2 else doubled)} for place, row in enumerate(runs())]
    found = one(table(tmp_path, rows))
    assert [record.facts.effective_batch for record in found.records] == [row["batch_size"] for row in rows]
    assert [record.facts.epochs for record in found.records] == [30] * 24


def test_a_sweep_over_lengths_is_no_rows_of_epochs_where_it_is_said(tmp_path: Path) -> None:
    rows = [
        {**{name: value for name, value in row.items() if name != "epochs"}, "epoch": length}
        for row in runs(6)
        for length in (1, 2, 4, 8)
    ]
    asked(tmp_path, rows, "--map epoch=epochs")
    assert len(one(table(tmp_path, rows), epoch="epochs").records) == 24


def test_names_that_begin_like_sums(tmp_path: Path) -> None:
    rows = [
        {"run": f"{('mean', 'max', 'attention')[place % 3]} pooling {place}", **row}
        for place, row in enumerate(runs())
    ]
    assert len(one(table(tmp_path, rows)).records) == 24


def test_tokens_do_not_replace_steps(tmp_path: Path) -> None:
    rows = [{**row, "max_steps": 1000, "tokens": 1000 * row["batch_size"] * 1024} for row in runs()]
    rows = [{name: value for name, value in row.items() if name != "epochs"} for row in rows]
    assert {record.facts.samples_budget for record in one(table(tmp_path, rows)).records} == {
        1000 * row["batch_size"] for row in rows
    }


def test_a_clock_that_is_set_back_over_the_same_seconds_loses_none_of_them() -> None:
    hour = [float(second) for second in range(3600)]
    found, told = spent([*hour, *hour])  # two hours, the second with the first's times
    assert (found, bool(told)) == (pytest.approx(7200, abs=5), True)


def test_what_is_left_out_is_counted_once_over_groups(tmp_path: Path) -> None:
    rows = [
        {"dataset": "ab"[place % 2], **row, "state": "running", "outlier": place < 3}
        for place, row in enumerate(runs())
    ]
    asked(tmp_path, rows, "3 marked as outlier, 21 not ended")
