"""What names mean, and what becomes of a table's cells."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from bsearch.search.sources.columns import UnclearColumnsError, columns_of
from bsearch.search.sources.factors import with_devices_counted
from bsearch.search.sources.imported import imported
from bsearch.search.sources.read import is_source, runs_of
from bsearch.search.sources.runs import Run, flat
from bsearch.search.sources.values import MISSING, NOT_FINITE, cell, seconds
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.names import NAMES, direction_of, words_of
from bsearch.spaces.record import TrialRecord
from hypothesis import given
from hypothesis import strategies as st

TABLE = [
    {"bs": 32, "lr": 0.1, "val_acc": 0.9, "runtime": 60, "wd": 0.0},
    {"bs": 64, "lr": 0.2, "val_acc": 0.8, "runtime": 40, "wd": 0.1},
    {"bs": 65, "lr": 0.3, "val_acc": 0.85, "runtime": 30, "wd": 0.1},
]


def runs(rows: list[dict[str, Any]]) -> list[Run]:
    return [Run(f"t.csv:{place + 2}", values=row) for place, row in enumerate(rows)]


def records(rows: list[dict[str, Any]], **how: Any) -> tuple[TrialRecord, ...]:
    some = runs(rows)
    (group,) = imported("t.csv", some, columns_of("t.csv", some, **how))
    return group.records


def test_a_plain_table_is_read_as_its_owner_means_it() -> None:
    found = records(TABLE)
    assert [
        (one.facts.effective_batch, one.facts.learning_rate, one.accuracy, one.train_s) for one in found
    ] == [
        (32, 0.1, 0.9, 60.0),
        (64, 0.2, 0.8, 40.0),
        (65, 0.3, 0.85, 30.0),
    ]
    assert [one.parameters["weight_decay"] for one in found] == [0.0, 0.1, 0.1]
    assert found[0].facts.train_s_source == "measured"


@given(
    st.sampled_from(NAMES["batch"] + NAMES["effective_batch"]),
    st.sampled_from(NAMES["learning_rate"]),
    st.sampled_from(("val_acc", "eval/accuracy", "valid_acc", "accuracy", "val/top1")),
    st.sampled_from([name for name in NAMES["seconds"] if name not in ("minutes", "hours")]),
    st.sampled_from(("", "config.", "hparams/", "args.")),
    st.permutations(range(4)),
)
def test_names_and_order_do_not_matter(
    batch: str, rate: str, metric: str, time: str, before: str, order: list[int]
) -> None:
    names = [before + batch, before + rate, metric, time]
    rows = []
    for row in TABLE:
        values = [row["bs"], row["lr"], row["val_acc"], row["runtime"]]
        rows.append({names[place]: values[place] for place in order})
    plain = records([{key: value for key, value in row.items() if key != "wd"} for row in TABLE])
    assert [one.values for one in records(rows)] == [one.values for one in plain]
    assert [one.facts.effective_batch for one in records(rows)] == [
        one.facts.effective_batch for one in plain
    ]


def test_a_batch_is_multiplied_by_what_its_name_leaves_out() -> None:
    rows = [
        {
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 3,
            "world_size": 2,
            "lr": rate,
            "eval_loss": 1 / rate,
        }
        for rate in (0.1, 0.2)
    ]
    assert [one.facts.effective_batch for one in records(rows)] == [48, 48]


def test_a_batch_that_may_or_may_not_count_its_passes_is_asked_about() -> None:
    rows = [
        {"batch_size": 8, "gradient_accumulation_steps": 4, "lr": rate, "eval_loss": 1 / rate}
        for rate in (0.1, 0.2)
    ]
    with pytest.raises(
        StudyFileError, match=r"whether batch_size counts gradient_accumulation_steps, 4 at t\.csv:2\. Write"
    ):
        records(rows)
    assert records(rows, mapped={"batch_size": "effective_batch"})[0].facts.effective_batch == 8
    assert records(rows, mapped={"batch_size": "micro_batch"})[0].facts.effective_batch == 32


@pytest.mark.parametrize(
    ("extra", "meaning"),
    [
        ({"val_f1": [0.1, 0.2, 0.3]}, "metric"),
        ({"learning_rate": [1, 2, 3]}, "learning_rate"),
        ({"elapsed": [1, 2, 3]}, "seconds"),
    ],
)
def test_two_names_for_one_thing_are_refused(extra: dict[str, list[float]], meaning: str) -> None:
    rows = [
        {**row, **{name: values[place] for name, values in extra.items()}} for place, row in enumerate(TABLE)
    ]
    with pytest.raises(UnclearColumnsError) as told:
        records(rows)
    assert told.value.meaning == meaning
    assert set(extra) <= set(told.value.names)
    (name,) = extra
    assert records(rows, mapped={name: meaning})


def test_the_same_column_twice_is_one() -> None:
    assert records([{**row, "learning_rate": row["lr"]} for row in TABLE])[1].facts.learning_rate == 0.2


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"lr": 0.1, "acc": 0.5}, {"lr": 0.2, "acc": 0.6}], "expected a column of batch sizes, got none"),
        ([{"accumulation": 4, "lr": 0.1, "acc": 0.5}], "expected a column of batch sizes, got none"),
        ([{"bs": 1, "acc": 0.5}, {"bs": 2, "acc": 0.6}], "expected a column of learning rates, got none"),
        ([{"bs": 1, "lr": 0.5}, {"bs": 2, "lr": 0.6}], "expected a metric, such as val_loss or accuracy"),
        (
            [{"bs": "many", "lr": 0.5, "acc": 0.1}, {"bs": 2, "lr": 0.6, "acc": 0.2}],
            "t.csv:2: bs: expected a number, got 'many'",
        ),
        (
            [{"bs": 2.5, "lr": 0.5, "acc": 0.1}, {"bs": 2, "lr": 0.6, "acc": 0.2}],
            "t.csv:2: bs: expected a whole number",
        ),
        (
            [{"bs": 2, "lr": -0.5, "acc": 0.1}, {"bs": 2, "lr": 0.6, "acc": 0.2}],
            "t.csv:2: lr: expected a number above 0, got -0.5",
        ),
        (
            [{"bs": 2, "lr": "0,5", "acc": 0.1}, {"bs": 2, "lr": "0,6", "acc": 0.2}],
            "t.csv:3: lr: expected a number, got '0,6'",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(StudyFileError) as told:
        records(rows)
    assert said in str(told.value)
    assert "None" not in str(told.value)


def test_a_mapping_to_nothing_known_is_refused() -> None:
    with pytest.raises(StudyFileError, match=r"got 'learning_rat'. Did you mean 'learning_rate'"):
        records(TABLE, mapped={"lr": "learning_rat"})
    with pytest.raises(StudyFileError, match=r"expected a name of the source, got 'lrr'. Did you mean 'lr'"):
        records(TABLE, mapped={"lrr": "learning_rate"})


@pytest.mark.parametrize("spelling", sorted(NOT_FINITE))
def test_a_metric_that_is_no_number_diverged(spelling: str) -> None:
    value = cell(spelling)
    assert isinstance(value, float) and math.isnan(value)
    rows = [*TABLE, {**TABLE[0], "val_acc": value}]
    assert [one.outcome for one in records(rows)] == ["complete"] * 3 + ["diverged"]


@pytest.mark.parametrize("spelling", sorted(MISSING))
def test_a_metric_that_is_missing_is_no_result(spelling: str) -> None:
    assert cell(f" {spelling.upper()} ") is None
    assert len(records([*TABLE, {key: value for key, value in TABLE[0].items() if key != "val_acc"}])) == 3


def test_runs_of_one_setting_stay_what_their_file_says() -> None:
    rows = [{**TABLE[0], "seed": 0}, {**TABLE[1], "seed": 0}, {**TABLE[0], "seed": 1, "val_acc": 0.91}]
    assert [(one.accuracy, one.facts.seed, one.facts.repeats) for one in records(rows)] == [
        (0.9, 0, None),
        (0.8, 0, None),
        (0.91, 1, None),
    ]


def test_other_data_are_another_experiment_unless_said_otherwise() -> None:
    rows = [{**row, "dataset": name} for name in ("cifar", "mnist") for row in TABLE]
    some = runs([*rows, *({**row, "bs": row["bs"] + 1, "dataset": "cifar"} for row in TABLE)])
    groups = imported("t", some, columns_of("t", some))
    assert [(one.name, len(one.records)) for one in groups] == [("cifar", 6), ("mnist", 3)]
    (whole,) = imported("t", some, columns_of("t", some, same=True))
    assert whole.spec.searched()["dataset"].contains("mnist")


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("finished", "complete"),
        ("crashed", "error"),
        ("FAILED", "error"),
        ("running", None),
        ("pruned", None),
    ],
)
def test_a_run_that_failed_or_still_runs_is_no_result(status: str, outcome: str | None) -> None:
    found = records([*TABLE[1:], {**TABLE[0], "state": status}, {**TABLE[0], "bs": 7, "state": "finished"}])
    assert (found[2].outcome if len(found) == 4 else None) == outcome


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        # What a training was planned for, and how far it came.
        ([{"max_epochs": 10, "epoch": 9}, {"max_epochs": 10, "epoch": 2}], "1 stopped before its end"),
        ([{"max_epochs": 3, "epoch": 2}, {"max_epochs": 6, "epoch": 5}], ""),
        (
            [{"max_steps": 300, "global_step": 300}, {"max_steps": 300, "global_step": 100}],
            "1 stopped before its end",
        ),
        ([{"max_steps": -1, "global_step": 300}, {"max_steps": -1, "global_step": 100}], ""),
        ([{"done": True}, {"done": False}], "1 not ended"),
        ([{"exit_code": 0}, {"exit_code": 137}], ""),
        ([{"status": "TIMEOUT"}, {"status": "finished"}], ""),
        ([{"status": "TrialState.PRUNED"}, {"status": "TrialState.COMPLETE"}], "1 not ended"),
        ([{"status": "CANCELLED by 1000"}, {"status": "COMPLETED"}], ""),
        ([{"status": "odd"}, {"status": "COMPLETED"}], "1 of a status that is not known, 'odd'"),
    ],
)
def test_how_far_a_run_came_is_minded(rows: list[dict[str, Any]], outcome: str) -> None:
    some = runs([{**row, **TABLE[place]} for place, row in enumerate(rows)])
    (group,) = imported("t", some, columns_of("t", some))
    assert ", ".join(f"{count} {why}" for why, count in group.left_out.items()) == outcome
    ended = [row.get("exit_code", 0) or row.get("status") in ("TIMEOUT", "CANCELLED by 1000") for row in rows]
    assert sum(record.outcome == "error" for record in group.records) == sum(map(bool, ended))


def test_the_same_run_twice_is_one_and_rows_of_one_run_are_refused() -> None:
    named = [{**row, "run_id": f"r{place}"} for place, row in enumerate(TABLE)]
    assert len(records([*named, *named])) == len(records([*TABLE, *TABLE])) == 3
    with pytest.raises(
        StudyFileError, match=r"expected one row of each run, got 'r0' at t\.csv:2 and t\.csv:5"
    ):
        records([*named, {**named[0], "val_acc": 0.1}])


@pytest.mark.parametrize(
    ("name", "is_rate"),
    [
        *(
            (name, True)
            for name in (
                "lr",
                "config/lr",
                "params.lr",
                "params_lr",
                "optimizer.params.lr",
                "train.lr",
                "optim_lr",
            )
        ),
        *(
            (name, False)
            for name in (
                "min_lr",
                "final_lr",
                "decoder.lr",
                "head_lr",
                "train/lr",
                "metrics.lr",
                "lr_decay",
                "best_lr",
            )
        ),
    ],
)
def test_what_is_a_learning_rate_and_what_is_none(name: str, is_rate: bool) -> None:
    some = runs([{name: row["lr"], "bs": row["bs"], "val_acc": row["val_acc"]} for row in TABLE])
    if is_rate:
        assert columns_of("t", some).one("learning_rate") == name
    else:
        with pytest.raises(StudyFileError, match="expected a column of learning rates, got none"):
            columns_of("t", some)


@pytest.mark.parametrize(
    ("names", "metric"),
    [
        (("loss", "valacc"), "valacc"),
        (("train_loss", "val_psnr"), "val_psnr"),
        (("loss", "test_acc"), None),
        (("loss_weight", "test_acc"), "test_acc"),
        (("tr_loss", "test_acc"), "test_acc"),
        (("eval_loss", "eval_samples_per_second"), "eval_loss"),
        (("val_loss", "val_loss (lowest)"), "val_loss"),
        (("val/loss", "val/acc"), None),
    ],
)
def test_which_result_is_the_metric(names: tuple[str, str], metric: str | None) -> None:
    some = runs(
        [{"bs": row["bs"], "lr": row["lr"], names[0]: row["lr"], names[1]: row["val_acc"]} for row in TABLE]
    )
    if metric is None:
        with pytest.raises(UnclearColumnsError):
            columns_of("t", some)
    else:
        assert columns_of("t", some, direction="maximize").one("metric") == metric


@pytest.mark.parametrize(
    ("name", "value", "length"),
    [
        ("runtime", "3.2min", 192.0),
        ("duration", "5 minutes", 300.0),
        ("duration", "30 sec", 30.0),
        ("Duration", "2 hours", 7200.0),
        ("runtime", "1h 20min", 4800.0),
        ("Time (h)", "1:30", 5400.0),
        ("duration", "0 days 00:01:23.4", 83.4),
        ("time", 1714567890, None),
        ("time", "14:32:10", None),
        ("runtime", "soon", None),
    ],
)
def test_what_a_duration_is(name: str, value: Any, length: float | None) -> None:
    found = records(
        [{"bs": row["bs"], "lr": row["lr"], "val_acc": row["val_acc"], name: value} for row in TABLE]
    )
    assert [record.facts.measured_train_s for record in found] == [length and pytest.approx(length)] * 3


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [
        ("wd", "weight_decay", "wd"),
        ("opt/weight_decay", "weight_decay", "opt_weight_decay"),
        ("weight_decay", "weight_decay", "weight_decay_"),
        ("beta1", "beta1", "beta1_"),
        ("adam_beta2", "beta2", "adam_beta2"),
    ],
)
@pytest.mark.parametrize("value", [0, 0.5, 1, 2.0, -0.1, None])
def test_a_parameter_has_the_studys_name_where_all_its_values_keep_the_studys_rule(
    name: str, own: str, other: str, value: float | None
) -> None:
    keeps = value is not None and 0 <= value < (math.inf if own == "weight_decay" else 1)
    rows = [
        {"bs": 32, "lr": 0.1, "val_acc": 0.9, "warmup": warmup, name: each}
        for warmup, each in enumerate((0.25, value, 0.75))
    ]
    expected = {"effective_batch", "reference_rate", "warmup_", own if keeps else other}
    assert records(rows)[0].parameters.keys() == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, -1, 0, "two"])
def test_counts_that_are_none_are_no_counts(value: Any) -> None:
    rows = [{**row, "world_size": value, "epochs": value, "seed": value} for row in TABLE]
    assert records(rows, mapped={"bs": "effective_batch"})[0].facts.devices == 1


def test_numbers_of_batches_are_no_batch_sizes() -> None:
    some = runs(
        [
            {"batch": place, "bs": row["bs"], "lr": row["lr"], "val_acc": row["val_acc"]}
            for place, row in enumerate(TABLE)
        ]
    )
    assert columns_of("t", some).one("batch") == "bs"


def test_nodes_that_may_multiply_a_batch_are_asked_about() -> None:
    rows = [{**row, "micro_batch_size": row["bs"], "num_nodes": 2} for row in TABLE]
    with pytest.raises(StudyFileError, match=r"whether num_nodes, 2 at t\.csv:2, multiplies the batch"):
        records(rows)
    assert records(rows, mapped={"num_nodes": "nothing"})[0].facts.effective_batch == 32


def test_percents_and_shares_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("bs,lr,acc\n8,0.1,88.8\n16,0.1,95.7%\n")
    with pytest.raises(
        StudyFileError, match=r"t\.csv:3: acc: expected all or none of its numbers with %, got '95\.7%'"
    ):
        runs_of(str(tmp_path / "t.csv"))


@pytest.mark.parametrize(
    ("name", "values", "mixed"),
    [
        ("val_acc", (0.91, 87.5, 0.5), True),
        ("val_acc", (0.1, 76.0, 70.5), False),  # a run at chance, in percent
        ("val_acc", (0.91, 0.875, 1), False),
        ("val_loss", (0.91, 87.5, 0.5), False),
    ],
)
def test_percents_and_shares_without_a_sign_are_not_mixed(
    name: str, values: tuple[float, ...], mixed: bool
) -> None:
    rows = [{"bs": 8, "lr": 0.1 * (place + 1), name: value} for place, value in enumerate(values)]
    if mixed:
        with pytest.raises(
            StudyFileError, match=r"expected shares or percents, got both, such as 0\.91 and 87\.5"
        ):
            records(rows)
        columns = columns_of("t", runs(rows), mapped={name: "metric"})
        assert {one.why for one in columns.columns if one.meaning == "metric"} == {
            "as you chose; 0.91 and 87.5 are taken for one unit"
        }
    else:
        assert len(records(rows)) == 3


def test_lists_in_a_text_are_one_choice_each() -> None:
    some = [
        Run(f"r{place}", {"lr": 0.1 * place, "bs": 8, "hidden": text}, {"val_acc": 0.5 + place / 10})
        for place, text in enumerate(["[64, 64]", "[64]", "[64, 64]", "[128, 64]"], start=1)
    ]
    (group,) = imported("t", some, columns_of("t", some))
    assert group.spec.space.domains()["hidden"].model_dump()["choices"] == ("[64, 64]", "[64]", "[128, 64]")


def test_secrets_are_not_shown() -> None:
    columns = columns_of("t", runs([{**row, "api_key": "hush", "hub_token": "hush"} for row in TABLE]))
    assert {one.why for one in columns.columns if one.name in ("api_key", "hub_token")} == {"may be a secret"}
    assert "hush" not in str(columns)


@given(st.floats(0.001, 1e6))
def test_durations_are_read_back(length: float) -> None:
    whole = round(length)
    hours, rest = divmod(whole, 3600)
    assert seconds(f"{hours}h {rest // 60}m {rest % 60}s") == whole
    assert seconds(f"{hours}:{rest // 60:02}:{rest % 60:02}") == whole
    assert seconds(length) == length


def test_what_refers_to_itself_ends() -> None:
    nested: dict[str, Any] = {"lr": 0.1}
    nested["again"] = nested
    assert dict(flat(nested))["again.again.lr"] == 0.1


TEXTS = {
    "comma.csv": "bs,lr,val_acc\n8,0.1,0.5\n\n16,0.2,0.6\n",
    "semicolon.csv": "bs;lr;val_acc\n8;0,1;0,5\n16;0,2;0,6\n",
    "tab.tsv": "bs\tlr\tval_acc\n8\t0.1\t0.5\n16\t0.2\t0.6\n",
    "mark.csv": "\ufeffbs,lr,val_acc\r\n8,0.1,50%\r\n16,0.2,60%\r\n",
    "lines.jsonl": '{"config": {"bs": 8, "optimizer": {"lr": 0.1}}, "summary": {"val_acc": 0.5}}\n'
    '{"config": {"bs": 16, "optimizer": {"lr": 0.2}}, "summary": {"val_acc": 0.6}}\n',
    "curves.jsonl": '{"bs": 8, "lr": 0.1, "val_acc": [0.4, 0.5]}\n{"bs": 16, "lr": 0.2, "val_acc": [0.7, 0.6]}\n',
    "list.json": '[{"bs": 8, "lr": 0.1, "val_acc": 0.5}, {"bs": 16, "lr": 0.2, "val_acc": 0.6}]',
    "columns.json": '{"bs": [8, 16], "lr": [0.1, 0.2], "val_acc": [0.5, 0.6]}',
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_tables_of_many_kinds_are_one(name: str, encoding: str, tmp_path: Path) -> None:
    if encoding == "utf-16" and "json" in name:
        pytest.skip("JSON is UTF-8")
    path = tmp_path / name
    path.write_bytes(TEXTS[name].removeprefix("\ufeff" if encoding == "utf-16" else "").encode(encoding))
    some = runs_of(str(path))
    (group,) = imported(name, some, columns_of(name, some))
    found = [(one.facts.effective_batch, one.facts.learning_rate, one.accuracy) for one in group.records]
    assert found == [(8, 0.1, 0.5), (16, 0.2, 0.6)]


def test_parquet_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({name: [row[name] for row in TABLE] for name in TABLE[0]}), tmp_path / "t.parquet"
    )
    assert [dict(run.values) for run in runs_of(str(tmp_path / "t.parquet"))] == TABLE


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", b"", "expected runs, got none"),
        ("t.csv", b"bs,lr,bs\n1,2,3\n", "t.csv:1: expected a header of different names, got bs twice"),
        ("t.csv", b"bs lr\n1 2\n", "expected several columns, got one, 'bs lr'. Separate them by commas."),
        ("t.csv", b"bs,lr\n1,2\n1,2,3\n", "t.csv:3: expected 2 cells as in the header, got 3"),
        ("t.csv", b"PK\x03\x04nonsense", "got a spreadsheet. Save it as CSV (UTF-8)."),
        ("t.csv", b"bs,lr\n\0\0\0\n", "got a binary file"),
        ("t.xlsx", b"PK", "expected CSV, got a spreadsheet (.xlsx). Save it as CSV (UTF-8)."),
        ("t.json", b"[{", "t.json:1: expected JSON:"),
        ("t.json", b'"text"', "expected a list of runs, got str"),
        ("t.json", b'{"bs": 1}', "expected a list of runs, got dict"),
        ("t.jsonl", b'{"bs": 1}\n{"bs": \n', "t.jsonl:2: expected JSON:"),
        ("t.jsonl", b"[1]\n", "t.jsonl:1: expected an object with a run's settings and results, got list"),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_line(
    name: str, text: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(StudyFileError) as told:
        runs_of(str(tmp_path / name))
    assert said in str(told.value)


def test_what_is_no_source_is_refused_by_name(tmp_path: Path) -> None:
    for source, said in (
        ("no.csv", "there is no such file"),
        ("wandbb:me/project", "got 'wandbb'. Did you mean 'wandb'?"),
        (str(tmp_path), "expected a folder that holds runs"),
    ):
        with pytest.raises(StudyFileError) as told:
            runs_of(source)
        assert said in str(told.value)
    assert not is_source("study.yaml") and is_source("runs.csv") and is_source("mlflow:digits")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_runs(tmp_path: Path) -> None:
    path, told = tmp_path / "many.csv", list[str]()
    path.write_text(
        "bs,lr,val_acc\n" + "".join(f"{8 + place % 90},0.1,0.{place % 10}\n" for place in range(120_000))
    )
    some = runs_of(str(path), told.append)
    assert 10_000 <= len(some) <= 20_000
    assert told[0] == "100,000 runs read"
    assert told[1].startswith("120,000 runs: one in 8 is used")
    assert len({run.place for run in some}) == len(some)


def test_letters_of_any_script_stay_in_names() -> None:
    assert [words_of(name) for name in ("размер", "模型/宽度", "Größe_max")] == [
        ["размер"],
        ["模型", "宽度"],
        ["größe", "max"],
    ]
    rows = [{**row, "размер": place, "幅": 8} for place, row in enumerate(TABLE)]
    assert {"размер"} <= records(rows, mapped={"размер": "parameter"})[0].parameters.keys()


@pytest.mark.parametrize(
    ("extra", "batches"),
    [
        ({"cards": 4}, None),
        ({"gpu": "4xA100"}, None),
        ({"nproc_per_node": 2}, None),
        ({"CUDA_VISIBLE_DEVICES": "0-3"}, None),
        ({"gpu_ids": "0,1,2,3", "num_workers": 8, "lora_rank": 16}, [128, 256, 260]),
        ({"gpus": "0,1", "gpu_type": "A100", "gpu_mem_gb": 40, "node_name": "n7"}, [64, 128, 130]),
        ({"accum_iter": 3, "dp_rate": 0.1, "hidden_nodes": 64}, [96, 192, 195]),
        ({"gas": 2, "gpu_temperature": 61}, [64, 128, 130]),
    ],
)
def test_what_multiplies_a_micro_batch_is_read_or_asked_about(
    extra: dict[str, Any], batches: list[int] | None
) -> None:
    rows = [
        {"micro_batch_size": row["bs"], **{key: value for key, value in row.items() if key != "bs"}, **extra}
        for row in TABLE
    ]
    some = [with_devices_counted(run) for run in runs(rows)]
    if batches is None:
        with pytest.raises(StudyFileError, match=r"multiplies the batch|expected a number"):
            imported("t.csv", some, columns_of("t.csv", some))
        return
    (group,) = imported("t.csv", some, columns_of("t.csv", some))
    assert [record.facts.effective_batch for record in group.records] == batches


@pytest.mark.parametrize(
    "name", ["1-acc", "100 - val_acc", "-val_loss", "exp(-loss)", "inverse_loss", "val_err=1-acc"]
)
def test_a_formula_has_no_direction_of_its_own(name: str) -> None:
    assert direction_of(name) is None


@pytest.mark.parametrize(("status", "ended"), [("diverged", "diverged"), ("完成", None), ("✓", None)])
def test_a_status_is_what_it_says_or_not_known(status: str, ended: str | None) -> None:
    found = [{**row, "status": "finished" if place else status} for place, row in enumerate(TABLE)]
    (group,) = imported("t.csv", runs(found), columns_of("t.csv", runs(found)))
    assert [record.outcome for record in group.records] == ([ended] if ended else []) + ["complete"] * 2
    assert bool(group.left_out) == (ended is None)


def test_thousands_are_no_decimal_commas(tmp_path: Path) -> None:
    table = tmp_path / "runs.tsv"
    table.write_text("bs\tlr\truntime\tval_loss\n8\t0.00232\t32,526\t1.671\n16\t0.01\t12,526\t1.5\n")
    some = runs_of(str(table))
    (group,) = imported("t", some, columns_of("t", some))
    assert [(one.accuracy, one.facts.measured_train_s) for one in group.records] == [
        (1.671, None),
        (1.5, None),
    ]


def test_devices_in_a_list_are_counted_once_and_a_contradiction_in_any_run_is_seen() -> None:
    for text in ("(0,)", "[0]", "7", "GPU-8f3e"):
        assert with_devices_counted(Run("t", values={"CUDA_VISIBLE_DEVICES": text})).values == {
            "CUDA_VISIBLE_DEVICES": 1
        }, text
    assert with_devices_counted(Run("t", values={"gpus": "(0, 1,)"})).values == {"gpus": 2}
    rows = [{"micro_batch_size": row["bs"], "lr": row["lr"], "val_acc": row["val_acc"]} for row in TABLE]
    rows[1]["train_batch_size"] = 4 * rows[1]["micro_batch_size"]
    with pytest.raises(
        StudyFileError, match=r"expected batches that agree, got train_batch_size 256 .* at t\.csv:3"
    ):
        records(rows)
