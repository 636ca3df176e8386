"""What people call things: the names of settings and results, and what can be told from a name alone.

Only whole parts of a name count: `config/optimizer.lr` is a learning rate, `min_lr` and `decoder.lr` are none, and
`warmup_steps` are no steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

Meaning = str
Role = Literal["setting", "result", ""]

# How many epochs a training had, whatever was planned.
_TRAINED = ("stopped_epoch", "epochs_run", "epochs_trained", "epochs_completed", "last_epoch")
# The settings and results that verdicts need.
NAMES: Mapping[Meaning, tuple[str, ...]] = {
    "effective_batch": (
        *("effective_batch", "effective_batch_size", "global_batch_size", "global_batch", "total_batch_size"),
        *("total_train_batch_size", "train_global_batch_size"),
    ),
    "micro_batch": (
        *("per_device_train_batch_size", "per_gpu_train_batch_size", "per_device_batch_size", "batch_size_per_gpu"),
        *("train_micro_batch_size_per_gpu", "micro_batch_size", "micro_batch", "device_batch_size", "batch_size_per_device"),
    ),
    "batch": ("batch_size", "train_batch_size", "batchsize", "bs", "batch", "minibatch_size", "mini_batch_size"),
    "accumulation": (
        *("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps", "accumulation_steps", "grad_accum"),
        *("gas", "ga", "accum_iter", "accum_freq", "accum_grad", "accumulate", "grad_acc", "grad_acc_steps"),
        "gradient_acc_steps",
        *("grad_accumulation", "gradient_accumulate_every", "accumulation_factor", "num_microbatches", "batch_multiplier"),
        *("backward_passes_per_step", "update_every", "delay_update", "subdivisions", "batch_split"),
        *("gradient_accumulation", "accumulation", "accum_steps", "accum", "update_freq", "iter_size"),
    ),
    "devices": (
        *("world_size", "n_gpu", "n_gpus", "num_gpus", "ngpus", "gpus", "num_devices", "n_devices", "devices"),
        *("num_processes", "nproc", "data_parallel_size", "data_parallel", "dp_size", "num_replicas", "cuda_visible_devices"),
        *("gpu_ids", "device_ids"),
    ),
    "learning_rate": (
        *("learning_rate", "lr", "base_lr", "init_lr", "initial_lr", "peak_lr", "max_lr", "lr0", "learning_rate_init"),
    ),
    "seconds": (
        *("train_s", "train_runtime", "runtime", "run_time", "duration", "duration_s", "time_total_s", "elapsed", "wall_time"),
        *("walltime", "elapsed_s", "train_time", "training_time", "total_time", "wall_clock", "seconds", "hours", "minutes"),
        *("elapsed_time", "time"),
    ),
    "started": ("started", "start_time", "started_at", "created_at", "start", "datetime_start"),
    "ended": ("ended", "end_time", "ended_at", "finished_at", "heartbeat_at", "end", "datetime_complete"),
    "epochs": (
        *("epochs", "num_epochs", "n_epochs", "num_train_epochs", "max_epochs", "nb_epochs", "total_epochs", "epoch"),
        *("training_iteration", *_TRAINED),
    ),
    "steps": ("max_steps", "steps", "global_step", "num_steps", "total_steps", "train_steps", "iterations", "iters", "step"),
    "samples": ("samples_seen", "samples_budget", "examples_seen", "tokens", "total_tokens", "train_tokens", "tokens_seen"),
    "size": ("model_size", "model_parameters", "num_parameters", "n_parameters", "num_params", "n_params", "param_count"),
    "seed": ("seed", "random_seed", "rng_seed", "random_state", "trial_seed"),
    "status": ("status", "state", "run_status", "outcome", "exit_code", "done", "finished", "completed"),
    "run": ("run", "run_id", "id", "run_name", "name", "trial", "trial_id", "number", "uuid"),
}
# Names of how far a training came; of a plan only where there is no other.
REACHED = frozenset({"epoch", "step", "global_step", "training_iteration", *_TRAINED})
# Where true, the run is none to be compared.
_FLAGS = frozenset({"failed", "crashed", "oom", "outlier", "exclude", "excluded", "ignore", "ignored", "invalid", "broken"})
_FLAGS |= {"discard", "discarded", "bad"}
# What holds for a group of runs: other values are other experiments.
_GROUPS = frozenset(
    {"dataset", "data", "task", "model", "arch", "architecture", "network", "backbone", "workload", "env", "benchmark"}
    | {"corpus", "experiment", "project", "split", "optimizer", "optim", "scheduler", "schedule"}
)
_VALIDATION = ("validation", "valid", "val", "evaluation", "eval", "dev", "heldout")
_METRICS = frozenset(
    {"loss", "accuracy", "acc", "acc1", "top1", "error", "err", "perplexity", "ppl", "bleu", "rouge", "f1", "auc", "auroc"}
    | {"score", "reward", "mse", "rmse", "mae", "iou", "miou", "map", "wer", "cer", "bpb", "nll", "r2", "value", "psnr", "ssim"}
)
_LOWER = frozenset({"loss", "error", "err", "perplexity", "ppl", "mse", "rmse", "mae", "wer", "cer", "bpb", "nll"})
_HIGHER = _METRICS - _LOWER - {"value", "score", "map"}
_NEGATED = frozenset({"neg", "negative", "minus"})
# Results of which nothing is made: speed, memory.
_OTHER_RESULTS = frozenset({"memory", "mem", "flos", "flops", "throughput", "grad", "norm", "second", "timestamp", "runtime"})
# What a name ends with that says what it took to reach a level of a metric, and names of energy and power, as words.
TO_GOAL = "_to_(the_)?(target|(target_)?(accuracy|acc|loss|metric|quality)|converge|convergence|threshold)"
_ENERGY = "(total_)?(energy|joules)(_used|_consumed|_consumption)?(_to_.*|_[km]?_?(j|wh))?"
_POWER = "(average|avg|mean)_power(_w|_watts)?|watts|power_(w|watts|draw|usage)"
# What is no value of the training itself: predictions, extremes of curves.
_DERIVED = frozenset({"lowest", "highest", "expected", "measured", "stopped", "rung", "best", "find"})
# What stands before a name without changing it.
_BEFORE = frozenset(
    {"config", "cfg", "args", "arg", "hparams", "hparam", "params", "param", "hyperparameters", "settings", "trainer"}
    | {"optimizer", "optim", "opt", "sgd", "adam", "adamw", "train", "training"}
)
# A part of a model or of a schedule, whose rate is not the training's.
_PARTS = frozenset(
    {"decoder", "encoder", "head", "backbone", "embed", "embedding", "embeddings", "lora", "bias", "text", "vision"}
    | {"generator", "discriminator", "critic", "actor", "policy", "teacher", "student", "min", "final", "end", "warmup"}
)
_SETTING_BEFORE = ("params.", "params_", "param_", "config/", "config.", "hparams/", "hparams.", "args.")
_RESULT_BEFORE = ("metrics.", "metric.", "summary.", "train/", "training/", "eval/", "val/", "valid/", "test/")
# Of validation, and settings.
_NO_METRIC = frozenset({"split", "fraction", "ratio", "size", "every", "interval", "frequency", "freq", "batches"})
# Parameters by their names, in tables that do not say what was set and what came out.
_SETTINGS = frozenset(
    {"weight_decay", "wd", "momentum", "dropout", "warmup", "beta1", "beta2", "width", "depth", "layers", "hidden", "units"}
    | {"nesterov", "label_smoothing", "clip_norm", "clip", "l2", "l1", "heads", "rank"}
    | {"alpha", "gamma", "precision", "augment", "augmentation", "ema", "eps", "size", "dim", "temperature", "decay", "bits"}
    | {"loss_weight", "loss_fn", "activation"}
)
_OPTIMIZERS = frozenset({"sgd", "adam", "adamw", "nadam", "radam", "muon", "lion", "lamb", "adafactor", "shampoo", "soap"})
_PLACES = frozenset({"dir", "path", "folder", "file", "url", "uri", "id", "name", "version", "commit", "git", "host", "user"})
_COUNTED = frozenset({"samples", "images", "tokens", "examples", "steps", "iterations", "batches", "it"})
_UNITS = frozenset({"s", "sec", "secs", "seconds", "min", "mins", "minutes", "h", "hours", "ms"})
_OF_TRAINING = frozenset({"seconds", "batch", "micro_batch", "effective_batch", "samples", "steps", "epochs"})


@lru_cache(1 << 14)  # tables ask for each cell
def _words(name: str) -> tuple[str, ...]:
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[:300])
    found: list[str] = []
    for word in re.split(r"[\W_]+", apart.lower()):  # letters of any script stay
        before = next(
            (one for one in (*_VALIDATION, "test", "train") if word.startswith(one) and word[len(one) :] in _METRICS), ""
        )
        found += [before, word[len(before) :]] if before else [word] if word else []
    return tuple(found or ["?"])


def words_of(name: str) -> list[str]:
    """A name's words, in lower case; a word of validation or training is one of its own.

    >>> words_of("eval/Accuracy"), words_of("optimizer.learningRate"), words_of("valacc (%)")
    (['eval', 'accuracy'], ['optimizer', 'learning', 'rate'], ['val', 'acc'])
    """
    return list(_words(name))


@lru_cache(1 << 14)
def meaning_of(name: str) -> Meaning:
    """What a name means, without what people write before it, or a unit after it; empty where it is none of `NAMES`.

    >>> [meaning_of(name) for name in ("config/optimizer.lr", "runtime (min)", "min_lr", "decoder.lr", "eval_batch_size")]
    ['learning_rate', 'seconds', '', '', '']
    """
    name = name.removeprefix("user_attrs_")  # as Optuna's table has them
    words = words_of(name)
    if (set(words) & _DERIVED and words[-2:] != ["stopped", "epoch"]) or name == "_step":  # W&B's counts what was logged
        return ""
    before, slash, _ = name.rpartition("/")
    if slash and words_of(before)[-1] in _UNITS | _COUNTED:
        return ""  # of each epoch or step
    part = words_of(re.split(r"[./]", name.strip("./"))[-1])
    found = _known(part, words) or (_known(part[:-1], words) if len(part) > 1 and part[-1] in _UNITS else "")
    if found == "learning_rate" and set(words) & _PARTS:
        return ""
    return "" if found in _OF_TRAINING and set(words) & {*_VALIDATION, "test"} else found


def _known(words: Sequence[str], whole: Sequence[str]) -> Meaning:
    for first in range(len(words)):
        text = "_".join(words[first:])
        for meaning, names in NAMES.items():
            # Data, models and optimizers have names too.
            if text in names and (meaning != "run" or [*words] == [*whole]):
                return meaning
        if words[first] not in _BEFORE:
            break
    return ""


def role_of(name: str) -> Role:
    """Whether a table's column was set or came out, where its name begins with that."""
    low = name.lower()
    return "setting" if low.startswith(_SETTING_BEFORE) else "result" if low.startswith(_RESULT_BEFORE) else ""


def is_metric(name: str) -> bool:
    """Whether a name is that of a measure of quality, by its last word, or as one of validation.

    >>> [is_metric(name) for name in ("val_acc", "loss", "loss_weight", "eval_bits_per_byte", "eval_samples_per_second")]
    [True, True, False, True, False]
    """
    words = words_of(name)
    if meaning_of(name) or set(words) & (_OTHER_RESULTS | _DERIVED | _NO_METRIC) or words[-1] in _BEFORE or _is_to_goal(words):
        return False
    return words[-1] in _METRICS or (is_of_validation(name) and not {"steps", "step", "time", "s"} & set(words))


def _is_to_goal(words: Sequence[str]) -> bool:
    return re.search(f"{TO_GOAL}$", "_".join(words)) is not None


def is_of_validation(name: str) -> bool:
    return bool(set(words_of(name)) & set(_VALIDATION))


def is_of_training(name: str) -> bool:
    return bool({"train", "training", "tr"} & set(words_of(name)))


def is_other_result(name: str) -> bool:
    """Whether it is a result of which nothing is made, such as energy.

    >>> [is_other_result(name) for name in ("energy_to_target", "average_power", "Energy (kWh)", "energy_weight", "power_cap")]
    [True, True, True, False, False]
    """
    words = words_of(name)
    known = {*words} & (_OTHER_RESULTS | _DERIVED) or words[0] in ("eval", "test", "train") or _is_to_goal(words)
    return bool(known or re.fullmatch(f"{_ENERGY}|{_POWER}", "_".join(words)))


def is_group(name: str, text: bool) -> bool:
    """Whether a name tells experiments apart: a data set's, a task's, a model's; by a number only where it says so."""
    words = words_of(name)
    if {"augment", "augmentation", "aug", "workers", "seed", "size"} & set(words) or (words[-1] == "split" and not text):
        return False
    return words[-1] in _GROUPS or (bool(set(words) & _GROUPS) and (text or "experiment" in words))


def is_setting(name: str) -> bool:
    """Whether a name is that of a known setting."""
    words = words_of(name)
    return bool(set(words) & _SETTINGS or "_".join(words[-2:]) in _SETTINGS) or is_rate_of_one(name)


def is_rate_of_one(name: str) -> bool:
    """Whether it is the rate of one optimizer by its name, beside which there may be another's."""
    words = words_of(name)
    return words[-1] in ("lr", "rate") and any(word in _OPTIMIZERS for word in words[:-1])


def is_flag(name: str) -> bool:
    """Whether a name says of a run, where it is true, that it is not to be compared."""
    return words_of(name)[-1] in _FLAGS and set(words_of(name)) <= _FLAGS | {"is", "was", "has", "run", "sys", "marked"}


def is_place(name: str) -> bool:
    """Whether texts under this name are names or places."""
    return bool(set(words_of(name)) & _PLACES)


def is_share(name: str) -> bool:
    """Whether a metric is a share that some write in percent, and of which 1 percent is hardly ever meant."""
    return bool({"accuracy", "acc", "acc1", "top1", "f1", "auc", "auroc", "iou", "miou"} & set(words_of(name)))


def direction_of(name: str) -> Literal["minimize", "maximize"] | None:
    """Whether a lower or a higher metric is better; None where its name does not tell.

    >>> direction_of("val_loss (lowest)"), direction_of("neg_mean_squared_error"), direction_of("val_acc_drop")
    ('minimize', 'maximize', None)
    """
    words = words_of(re.sub(r" \((lowest|highest)\)$", "", name))  # of a curve
    last = "bpb" if words[-3:] == ["bits", "per", "byte"] else words[-1]
    if re.search(r"^\s*([\d.]+\s*[-/]|-)|=|(exp|log)\(|^(inverse|negated)", name.lower()):
        return None  # a formula
    lower, negated = last in _LOWER or _is_to_goal(words), bool(set(words) & _NEGATED)
    if not lower and last not in _HIGHER:
        return None
    return "minimize" if lower != negated else "maximize"
