"""What people call settings and metrics: one list for study files, tables, scripts and Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

Direction = Literal["minimize", "maximize"]

# How many epochs a training had, whatever was planned.
TRAINED = ("stopped_epoch", "epochs_run", "epochs_trained", "epochs_completed", "last_epoch")
# Units of time in seconds, and what people write for them.
UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0}
UNITS |= {"h": 3600.0, "hr": 3600.0, "hour": 3600.0, "d": 86400.0, "day": 86400.0}
UNIT_WORDS = "ms|seconds?|secs?|s|minutes?|mins?|m|hours?|hrs?|h|days?|d"
# Names of how far a training came; of a plan only where there is no other.
REACHED = frozenset({"epoch", "step", "global_step", "training_iteration", *TRAINED})
# The settings and results that verdicts need.
NAMES: Mapping[str, tuple[str, ...]] = {
    "effective_batch": (
        *("effective_batch", "effective_batch_size", "global_batch_size", "global_batch", "total_batch_size"),
        *("total_train_batch_size", "train_global_batch_size"),
    ),
    "micro_batch": (
        *(
            "per_device_train_batch_size",
            "per_gpu_train_batch_size",
            "per_device_batch_size",
            "batch_size_per_gpu",
        ),
        *(
            "train_micro_batch_size_per_gpu",
            "micro_batch_size",
            "micro_batch",
            "device_batch_size",
            "batch_size_per_device",
        ),
    ),
    "batch": (
        "batch_size",
        "train_batch_size",
        "batchsize",
        "bs",
        "batch",
        "minibatch_size",
        "mini_batch_size",
    ),
    "accumulation": (
        *(
            "gradient_accumulation_steps",
            "accumulate_grad_batches",
            "grad_accum_steps",
            "accumulation_steps",
            "grad_accum",
        ),
        *("gas", "ga", "accum_iter", "accum_freq", "accum_grad", "accumulate", "grad_acc", "grad_acc_steps"),
        "gradient_acc_steps",
        *(
            "grad_accumulation",
            "gradient_accumulate_every",
            "accumulation_factor",
            "num_microbatches",
            "batch_multiplier",
        ),
        *("backward_passes_per_step", "update_every", "delay_update", "subdivisions", "batch_split"),
        *("gradient_accumulation", "accumulation", "accum_steps", "accum", "update_freq", "iter_size"),
    ),
    "devices": (
        *(
            "world_size",
            "n_gpu",
            "n_gpus",
            "num_gpus",
            "ngpus",
            "gpus",
            "num_devices",
            "n_devices",
            "devices",
        ),
        *(
            "num_processes",
            "nproc",
            "data_parallel_size",
            "data_parallel",
            "dp_size",
            "num_replicas",
            "cuda_visible_devices",
        ),
        *("gpu_ids", "device_ids"),
    ),
    "learning_rate": (
        *(
            "learning_rate",
            "lr",
            "base_lr",
            "init_lr",
            "initial_lr",
            "peak_lr",
            "max_lr",
            "lr0",
            "learning_rate_init",
        ),
    ),
    "seconds": (
        *(
            "train_s",
            "train_runtime",
            "runtime",
            "run_time",
            "duration",
            "duration_s",
            "time_total_s",
            "elapsed",
            "wall_time",
        ),
        *(
            "walltime",
            "elapsed_s",
            "train_time",
            "training_time",
            "total_time",
            "wall_clock",
            "seconds",
            "hours",
            "minutes",
        ),
        *("elapsed_time", "time"),
    ),
    "started": ("started", "start_time", "started_at", "created_at", "start", "datetime_start"),
    "ended": ("ended", "end_time", "ended_at", "finished_at", "heartbeat_at", "end", "datetime_complete"),
    "epochs": (
        *(
            "epochs",
            "num_epochs",
            "n_epochs",
            "num_train_epochs",
            "max_epochs",
            "nb_epochs",
            "total_epochs",
            "epoch",
        ),
        *("training_iteration", *TRAINED),
    ),
    "steps": (
        "max_steps",
        "steps",
        "global_step",
        "num_steps",
        "total_steps",
        "train_steps",
        "iterations",
        "iters",
        "step",
    ),
    "samples": (
        "samples_seen",
        "samples_budget",
        "examples_seen",
        "tokens",
        "total_tokens",
        "train_tokens",
        "tokens_seen",
    ),
    "size": (
        "model_size",
        "model_parameters",
        "num_parameters",
        "n_parameters",
        "num_params",
        "n_params",
        "param_count",
    ),
    "seed": ("seed", "random_seed", "rng_seed", "random_state", "trial_seed"),
    "status": ("status", "state", "run_status", "outcome", "exit_code", "done", "finished", "completed"),
    "run": ("run", "run_id", "id", "run_name", "name", "trial", "trial_id", "number", "uuid"),
}
# Which data a metric is of, as words of its name.
VALIDATION = ("validation", "valid", "val", "evaluation", "eval", "dev", "heldout", "holdout")
TEST = ("testing", "test", "tst")
TRAINING = ("training", "train", "trn", "tr")
# The last word of a metric of which lower is better, or higher.
LOWER = frozenset(
    {
        "loss",
        "losses",
        "logloss",
        "error",
        "errors",
        "err",
        "perplexity",
        "ppl",
        "nll",
        "ce",
        "bce",
        "xent",
        "crossentropy",
    }
    | {
        "mse",
        "rmse",
        "mae",
        "mape",
        "smape",
        "msle",
        "rmsle",
        "wer",
        "cer",
        "eer",
        "ece",
        "fpr",
        "fid",
        "lpips",
        "brier",
    }
    | {"chamfer", "bpb", "bpc", "bpd", "regret"}
)
HIGHER = frozenset(
    {
        "accuracy",
        "acc",
        "precision",
        "prec",
        "recall",
        "tpr",
        "f1",
        "auc",
        "auroc",
        "ap",
        "map",
        "iou",
        "miou",
        "dice",
        "mcc",
    }
    | {"r2", "likelihood", "bleu", "rouge", "rougel", "rougelsum", "psnr", "ssim", "ndcg", "mrr", "reward"}
)
# Of tables: no column of these names is a setting.
METRICS = (LOWER | HIGHER | {"acc1", "top1", "value", "score"}) - {"precision", "prec", "ce"}
# What a name ends with that says what it took to reach a level of a metric.
TO_GOAL = "_to_(the_)?(target|(target_)?(accuracy|acc|loss|metric|quality)|converge|convergence|threshold)"
_EFFORT = "time|steps|epochs|iterations|iters|updates|samples|tokens|hours|minutes|seconds"
_LOWER_PHRASES = re.compile(rf"({TO_GOAL}|(^|_)(bits_per_[a-z]+|cross_entropy))$|(^|_)({_EFFORT})_to_")
# Words that change nothing: of means, classes, data, and how often it is logged.
_NEUTRAL = {
    "mean",
    "avg",
    "average",
    "macro",
    "micro",
    "weighted",
    "rate",
    "roc",
    "pr",
    "score",
    "pct",
    "percent",
}
_NEUTRAL |= {"epoch", "step", "metrics", "dataloader", "idx", *VALIDATION, *TEST, *TRAINING}
# Before these stands what is measured; behind them, where or for what.
_BOUNDARY = frozenset({"at", "per", "to"})
# With one of these it is no value of the metric.
_SPREAD = frozenset(
    {
        "std",
        "stdev",
        "var",
        "variance",
        "delta",
        "diff",
        "difference",
        "gap",
        "drop",
        "lost",
        "change",
        "in",
        "of",
    }
)
_NEGATED = frozenset({"neg", "negative", "minus"})
# scikit-learn's; other `neg_loss` may be of negative samples.
_TURNED = re.compile("neg_(mean|root|median|max|log|brier)_")
_FORMULA = re.compile(r"^\s*([\d.]+\s*[-/]|-)|=|(exp|log)\(|^(inv|one_?minus|negated)")
_GLUED = (*VALIDATION, "test", "train")  # as in `valacc`


def words_of(name: str) -> list[str]:
    """A name's words, in lower case; a word of validation or training is one of its own.

    >>> words_of("eval/Accuracy"), words_of("optimizer.learningRate"), words_of("valacc (%)")
    (['eval', 'accuracy'], ['optimizer', 'learning', 'rate'], ['val', 'acc'])
    """
    return list(_words(name))


@lru_cache(1 << 14)  # tables ask for each cell
def _words(name: str) -> tuple[str, ...]:
    found: list[str] = []
    for chunk in re.split(r"[\W_]+", name[:300]):  # letters of any script stay
        known = chunk.lower().rstrip("0123456789") in METRICS  # such as mIoU
        for word in (
            [chunk.lower()] if known else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", chunk).lower().split("_")
        ):
            data = next(
                (data for data in _GLUED if word.startswith(data) and word[len(data) :] in METRICS), ""
            )
            found += [part for part in (data, word[len(data) :]) if part]
    return tuple(found or ["?"])


def direction_of(metric: str) -> Direction | None:
    """Whether a lower or a higher metric is better; None where its name does not say so.

    >>> [direction_of(name) for name in ("val_loss (lowest)", "neg_mean_squared_error", "acc@1", "error_rate/val", "TPR@FPR")]
    ['minimize', 'maximize', 'maximize', 'minimize', 'maximize']
    >>> {direction_of(name) for name in ("score", "generalization_gap", "val_acc_drop", "1 - acc", "neg_recall", "std_acc")}
    {None}
    """
    if _FORMULA.search(metric.lower()):
        return None
    # Of a curve; of boxes.
    words = words_of(re.sub(r" \((lowest|highest)\)$|\([A-Z]\)$", "", metric).replace("@", "_at_"))
    if _LOWER_PHRASES.search("_".join(words)):
        return "minimize"
    end = next((place for place, word in enumerate(words) if word in _BOUNDARY), len(words))
    said = [word for word in words[:end] if word not in {*VALIDATION, *TEST, *TRAINING}]
    named = [word for word in said if word not in _NEUTRAL and not re.fullmatch(r"(top)?\d*", word)]
    last = named[-1] if named else "accuracy" if any(word.startswith("top") for word in said) else ""
    lower, higher = ({last, last.rstrip("0123456789")} & some for some in (LOWER, HIGHER))
    if not (lower or higher) or _SPREAD & {*words}:
        return None
    if not _NEGATED & {*words}:
        return "minimize" if lower else "maximize"
    text = "_".join(said)
    if text in ("neg_log_likelihood", "negative_log_likelihood"):
        return "minimize"
    return "maximize" if lower and _TURNED.match(text) else None


def is_unit(word: str) -> bool:
    """Whether a word is a unit of time."""
    return re.fullmatch(UNIT_WORDS, word) is not None
