"""What the columns of tables are, as far as their names alone say so.

Only whole parts of a name count: `config/optimizer.lr` is a learning rate, `min_lr` and `decoder.lr` are none, and
`warmup_steps` are no steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from ...spaces.names import METRICS, NAMES, TEST, TO_GOAL, TRAINING, VALIDATION, is_unit, words_of

Meaning = str
Role = Literal["setting", "result", ""]

# Where true, the run is none to be compared.
_FLAGS = frozenset(
    {"failed", "crashed", "oom", "outlier", "exclude", "excluded", "ignore", "ignored", "invalid", "broken"}
)
_FLAGS |= {"discard", "discarded", "bad"}
# What holds for a group of runs: other values are other experiments.
_GROUPS = frozenset(
    {
        "dataset",
        "data",
        "task",
        "model",
        "arch",
        "architecture",
        "network",
        "backbone",
        "workload",
        "env",
        "benchmark",
    }
    | {"corpus", "experiment", "project", "split", "optimizer", "optim", "scheduler", "schedule"}
)
# Results of which nothing is made: speed, memory.
_OTHER_RESULTS = frozenset(
    {"memory", "mem", "flos", "flops", "throughput", "grad", "norm", "second", "timestamp", "runtime"}
)
# Names of energy and power, as words.
_ENERGY = "(total_)?(energy|joules)(_used|_consumed|_consumption)?(_to_.*|_[km]?_?(j|wh))?"
_POWER = "(average|avg|mean)_power(_w|_watts)?|watts|power_(w|watts|draw|usage)"
# What is no value of the training itself: predictions, extremes of curves.
_DERIVED = frozenset({"lowest", "highest", "expected", "measured", "stopped", "rung", "best", "find"})
# What stands before a name without changing it.
_BEFORE = frozenset(
    {
        "config",
        "cfg",
        "args",
        "arg",
        "hparams",
        "hparam",
        "params",
        "param",
        "hyperparameters",
        "settings",
        "trainer",
    }
    | {"optimizer", "optim", "opt", "sgd", "adam", "adamw", "train", "training"}
)
# A part of a model or of a schedule, whose rate is not the training's.
_PARTS = frozenset(
    {
        "decoder",
        "encoder",
        "head",
        "backbone",
        "embed",
        "embedding",
        "embeddings",
        "lora",
        "bias",
        "text",
        "vision",
    }
    | {
        "generator",
        "discriminator",
        "critic",
        "actor",
        "policy",
        "teacher",
        "student",
        "min",
        "final",
        "end",
        "warmup",
    }
)
_SETTING_BEFORE = ("params.", "params_", "param_", "config/", "config.", "hparams/", "hparams.", "args.")
_RESULT_BEFORE = (
    "metrics.",
    "metric.",
    "summary.",
    "train/",
    "training/",
    "eval/",
    "val/",
    "valid/",
    "test/",
)
# Of validation, and settings.
_NO_METRIC = frozenset(
    {"split", "fraction", "ratio", "size", "every", "interval", "frequency", "freq", "batches"}
)
# Parameters by their names, in tables that do not say what was set and what came out.
_SETTINGS = frozenset(
    {
        "weight_decay",
        "wd",
        "momentum",
        "dropout",
        "warmup",
        "beta1",
        "beta2",
        "width",
        "depth",
        "layers",
        "hidden",
        "units",
    }
    | {"nesterov", "label_smoothing", "clip_norm", "clip", "l2", "l1", "heads", "rank"}
    | {
        "alpha",
        "gamma",
        "precision",
        "augment",
        "augmentation",
        "ema",
        "eps",
        "size",
        "dim",
        "temperature",
        "decay",
        "bits",
    }
    | {"loss_weight", "loss_fn", "activation"}
)
_OPTIMIZERS = frozenset(
    {"sgd", "adam", "adamw", "nadam", "radam", "muon", "lion", "lamb", "adafactor", "shampoo", "soap"}
)
_PLACES = frozenset(
    {"dir", "path", "folder", "file", "url", "uri", "id", "name", "version", "commit", "git", "host", "user"}
)
_COUNTED = frozenset({"samples", "images", "tokens", "examples", "steps", "iterations", "batches", "it"})
_OF_TRAINING = frozenset({"seconds", "batch", "micro_batch", "effective_batch", "samples", "steps", "epochs"})


@lru_cache(1 << 14)
def meaning_of(name: str) -> Meaning:
    """What a name means, without what people write before it, or a unit after it; empty where it is none of `NAMES`.

    >>> [meaning_of(name) for name in ("config/optimizer.lr", "runtime (min)", "min_lr", "decoder.lr", "eval_batch_size")]
    ['learning_rate', 'seconds', '', '', '']
    """
    name = name.removeprefix("user_attrs_")  # as Optuna's table has them
    words = words_of(name)
    if (
        set(words) & _DERIVED and words[-2:] != ["stopped", "epoch"]
    ) or name == "_step":  # W&B's counts what was logged
        return ""
    before, slash, _ = name.rpartition("/")
    if slash and (is_unit(word := words_of(before)[-1]) or word in _COUNTED):
        return ""  # of each epoch or step
    part = words_of(re.split(r"[./]", name.strip("./"))[-1])
    found = _known(part, words) or (_known(part[:-1], words) if len(part) > 1 and is_unit(part[-1]) else "")
    if found == "learning_rate" and set(words) & _PARTS:
        return ""
    return "" if found in _OF_TRAINING and set(words) & {*VALIDATION, *TEST} else found


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
    return (
        "setting" if low.startswith(_SETTING_BEFORE) else "result" if low.startswith(_RESULT_BEFORE) else ""
    )


def is_metric(name: str) -> bool:
    """Whether a name is that of a measure of quality, by its last word, or as one of validation.

    >>> [is_metric(name) for name in ("val_acc", "loss", "loss_weight", "eval_bits_per_byte", "eval_samples_per_second")]
    [True, True, False, True, False]
    """
    words = words_of(name)
    if (
        meaning_of(name)
        or set(words) & (_OTHER_RESULTS | _DERIVED | _NO_METRIC)
        or words[-1] in _BEFORE
        or _is_to_goal(words)
    ):
        return False
    return words[-1] in METRICS or (
        is_of_validation(name) and not {"steps", "step", "time", "s"} & set(words)
    )


def _is_to_goal(words: Sequence[str]) -> bool:
    return re.search(f"{TO_GOAL}$", "_".join(words)) is not None


def is_of_validation(name: str) -> bool:
    return bool(set(words_of(name)) & set(VALIDATION))


def is_of_training(name: str) -> bool:
    return bool({*TRAINING} & set(words_of(name)))


def is_other_result(name: str) -> bool:
    """Whether it is a result of which nothing is made, such as energy.

    >>> [is_other_result(name) for name in ("energy_to_target", "average_power", "Energy (kWh)", "energy_weight", "power_cap")]
    [True, True, True, False, False]
    """
    words = words_of(name)
    known = (
        {*words} & (_OTHER_RESULTS | _DERIVED) or words[0] in ("eval", "test", "train") or _is_to_goal(words)
    )
    return bool(known or re.fullmatch(f"{_ENERGY}|{_POWER}", "_".join(words)))


def is_group(name: str, text: bool) -> bool:
    """Whether a name tells experiments apart: a data set's, a task's, a model's; by a number only where it says so."""
    words = words_of(name)
    if {"augment", "augmentation", "aug", "workers", "seed", "size"} & set(words) or (
        words[-1] == "split" and not text
    ):
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
    return words_of(name)[-1] in _FLAGS and set(words_of(name)) <= _FLAGS | {
        "is",
        "was",
        "has",
        "run",
        "sys",
        "marked",
    }


def is_place(name: str) -> bool:
    """Whether texts under this name are names or places."""
    return bool(set(words_of(name)) & _PLACES)


def is_share(name: str) -> bool:
    """Whether a metric is a share that some write in percent, and of which 1 percent is hardly ever meant."""
    return bool(
        {"accuracy", "acc", "acc1", "top1", "f1", "auc", "auroc", "iou", "miou"} & set(words_of(name))
    )
