"""A metric's name says its direction, or it is asked for: in study files, tables, scripts and Python alike."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from bsearch import Search
from bsearch.objectives.script.look import Looked
from bsearch.search.preview.script import files_of, found_in, metric_in
from bsearch.search.sources.columns import columns_of
from bsearch.search.sources.runs import Run
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.names import HIGHER, LOWER, direction_of
from bsearch.spaces.study.file import parse_study

MINIMIZED = (
    *(
        "err",
        "ppl",
        "mse",
        "rmse",
        "mae",
        "wer",
        "cer",
        "nll",
        "bpb",
        "bits_per_byte",
        "val_rmse",
        "val_mse",
        "test_mae",
    ),
    *(
        "top1_err",
        "err_top1",
        "fid",
        "ece",
        "mape",
        "eer",
        "regret",
        "val_loss",
        "Perplexity",
        "error_rate/val",
        "fpr95",
    ),
    *("cross_entropy", "negative_log_likelihood", "epochs_to_accuracy", "testLoss"),
    *(
        "val_loss_at_best_acc",
        "time_to_acc90",
        "steps_to_93_accuracy",
        "loss_per_token",
        "val_loss/dataloader_idx_0",
        "brier_score",
    ),
)
MAXIMIZED = (
    *(
        "accuracy",
        "val_acc",
        "acc@1",
        "val_top1",
        "top5",
        "f1_macro",
        "roc_auc",
        "bleu",
        "miou",
        "mAP",
        "dice_val",
        "r2",
    ),
    *("neg_log_loss", "neg_mean_squared_error", "log_likelihood", "psnr", "reward", "average_precision"),
    *(
        "TPR@FPR",
        "recall_at_fpr",
        "acc_at_best_loss",
        "f1_score",
        "MulticlassF1Score",
        "roc_auc_score",
        "mIoU",
        "nDCG@10",
    ),
    *("metrics/mAP50(B)", "test_acc_epoch", "accuracy_percent", "neg_root_mean_squared_error"),
)
ASKED = (
    *(
        "score",
        "gap",
        "value",
        "val_acc_drop",
        "1 - acc",
        "-val_loss",
        "negative_recall",
        "neg_accuracy",
        "loss_reduction",
    ),
    *("latency", "inverse_loss", "learning_rate", "val", "true_negative_accuracy", "accuracy_std", "std_acc"),
    *(
        "drop_in_accuracy",
        "loss_of_accuracy",
        "negative_sampling_loss",
        "neg_loss",
        "energy_per_acc",
        "latency_at_recall",
    ),
)
STUDY = "study: s\ntask: tasks.py:train\nobjectives: {metric: %s}\nspace:\n  effective_batch: 8\n  reference_rate: 0.1\n"


DIRECTIONS = (
    dict.fromkeys(MINIMIZED, "minimize") | dict.fromkeys(MAXIMIZED, "maximize") | dict.fromkeys(ASKED)
)


@pytest.mark.parametrize(("name", "direction"), DIRECTIONS.items())
def test_all_doors_take_the_same_direction_or_ask(name: str, direction: str | None) -> None:
    rows = [Run(f"row {place}", {"bs": 8, "lr": rate}, {name: rate}) for place, rate in enumerate((0.1, 0.2))]
    for written in (f"'{name}'", f"{{name: '{name}'}}"):
        if direction is None:
            with pytest.raises(
                StudyFileError, match=r"study.yaml:3: objectives.metric.direction: expected minimize or"
            ):
                parse_study(STUDY % written)
        else:
            metric = parse_study(STUDY % written).objectives.metric
            assert (metric.name, metric.direction) == (name, direction)
    if direction is None:
        with pytest.raises(StudyFileError, match="direction: expected one of minimize, maximize"):
            Search({"x": {"low": 0.0, "high": 1.0}}, metric=name)
        with pytest.raises(StudyFileError, match="--metric"):
            columns_of("t", rows, mapped={name: "metric"})
    else:
        assert Search({"x": {"low": 0.0, "high": 1.0}}, metric=name).objectives.metric.direction == direction
        assert columns_of("t", rows, mapped={name: "metric"}).direction == direction


def test_what_is_written_counts_unless_it_would_maximize_a_loss() -> None:
    for written in (
        "{name: gap, direction: minimize}",
        "{name: blossom, direction: maximize}",
        "{name: acc, direction: minimize}",
    ):
        assert parse_study(STUDY % written).objectives.metric.direction in written
    for written in ("{name: val_loss, direction: maximize}", "{name: wer, direction: maximize}"):
        with pytest.raises(
            StudyFileError, match=r"study.yaml:3: objectives.metric: expected direction: minimize with"
        ):
            parse_study(STUDY % written)


def test_no_word_is_on_both_sides_and_each_says_its_own() -> None:
    assert not LOWER & HIGHER
    assert {direction_of(word) for word in LOWER} == {"minimize"}
    assert {direction_of(word) for word in HIGHER} == {"maximize"}


@pytest.mark.parametrize("word", sorted(LOWER | HIGHER | {"score"}))
def test_a_script_that_prints_a_metric_has_its_direction(word: str) -> None:
    found = metric_in([f"epoch 1 val {word}: 0.5"])
    assert found is not None
    assert found[2] == direction_of(word)


def test_a_script_whose_metric_has_no_direction_is_asked_before_it_runs() -> None:
    looked = Looked(
        {"--batch": 8, "--lr": 0.1, "--epochs": 2},
        8,
        64,
        [0.1],
        "SGD",
        2,
        lines=["val score: 0.5"],
        evaluates=True,
    )
    script = found_in("train.py", [], asdict(looked))
    assert "lower or higher is better?" in script.sentence()
    with pytest.raises(
        StudyFileError, match=r"objectives.metric.direction: expected minimize or maximize with 'val_score'"
    ):
        parse_study(files_of(script)["study.yaml"])


@pytest.mark.parametrize(
    "name",
    ["bs", "global_batch_size", "mini_batch_size", "micro_batch_size", "grad_accum", "max_epochs", "lr0"],
)
def test_what_others_call_our_keys_is_no_parameter_of_its_own(name: str) -> None:
    text = f"study: s\ntask: tasks.py:train\nspace:\n  {name}: 8\n"
    with pytest.raises(
        StudyFileError, match=rf"space.{name}: expected (effective_batch|accumulation|epochs|reference_rate)"
    ):
        parse_study(text)
