"""What the names in a source mean: found by themselves, shown before anything is believed, and corrected by `--map`.

A name means something by its last part: `config/optimizer.lr` is a learning rate. Where two names could mean the same and
differ, none is taken: the user says which.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...spaces.boundary.secrets import is_secret
from ...spaces.errors import Fault, StudyFileError, cut, near_miss
from ...spaces.study.goals import sounds_minimized
from .runs import Run, Scalar
from .values import number

# The settings and results that verdicts need, and the names that people give them, after other words or before a unit.
NAMES: Mapping[str, tuple[str, ...]] = {
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
        *("gradient_accumulation", "accumulation", "accum_steps", "accum", "update_freq", "iter_size"),
    ),
    "devices": (
        *("world_size", "n_gpu", "n_gpus", "num_gpus", "ngpus", "gpus", "num_devices", "n_devices", "devices"),
        *("num_processes", "nproc"),
    ),
    "learning_rate": ("learning_rate", "lr", "base_lr", "init_lr", "initial_lr", "peak_lr", "max_lr", "learningrate", "lr0"),
    "seconds": (
        *("train_s", "train_runtime", "runtime", "run_time", "duration", "duration_s", "time_total_s", "elapsed", "wall_time"),
        *("walltime", "elapsed_s", "train_time", "training_time", "total_time", "wall_clock", "seconds", "hours", "minutes"),
        *("elapsed_time", "time"),
    ),
    "started": ("started", "start_time", "started_at", "created_at", "start", "datetime_start"),
    "ended": ("ended", "end_time", "ended_at", "finished_at", "heartbeat_at", "end", "datetime_complete"),
    "epochs": ("epochs", "num_epochs", "n_epochs", "num_train_epochs", "max_epochs", "nb_epochs", "total_epochs", "epoch"),
    "steps": ("max_steps", "steps", "global_step", "num_steps", "total_steps", "train_steps", "iterations", "iters", "step"),
    "samples": ("samples", "samples_seen", "samples_budget", "total_samples", "num_samples", "train_samples", "examples_seen"),
    "seed": ("seed", "random_seed", "rng_seed", "random_state", "trial_seed"),
    "status": ("status", "state", "run_status", "outcome"),
    "run": ("run", "run_id", "id", "run_name", "name", "trial", "trial_id", "number", "uuid", "experiment_id"),
}
# What holds for a group of runs: other values are other experiments.
GROUPS = frozenset(
    {
        "dataset",
        "dataset_name",
        "data",
        "task",
        "task_name",
        "model",
        "model_name",
        "model_name_or_path",
        "arch",
        "architecture",
    }
    | {"network", "backbone", "workload", "env", "env_name", "benchmark", "corpus", "config_name"}
)
_VALIDATION = frozenset({"val", "valid", "validation", "eval", "evaluation", "dev", "heldout"})
_METRIC_WORDS = frozenset(
    {"loss", "accuracy", "acc", "acc1", "top1", "error", "err", "perplexity", "ppl", "bleu", "rouge", "f1", "auc", "auroc"}
    | {"score", "reward", "mse", "rmse", "mae", "iou", "miou", "map", "wer", "cer", "bits", "bpb", "nll", "r2", "value"}
)
_LOWER = frozenset({"loss", "error", "err", "perplexity", "ppl", "mse", "rmse", "mae", "wer", "cer", "bits", "bpb", "nll"})
_HIGHER = _METRIC_WORDS - _LOWER - {"value", "score", "map"}
# Results of which nothing is made: speed, memory, and what is only of the training data.
_OTHER_RESULTS = frozenset(
    {"train", "training", "samples_per_second", "steps_per_second", "memory", "mem", "flos", "throughput", "grad", "norm"}
    | {"timestamp", "version", "path", "dir", "url", "host", "hostname", "user", "git", "commit"}
)
# What stands before a name without changing it.
_BEFORE = frozenset(
    {"config", "cfg", "args", "arg", "hparams", "hparam", "params", "param", "hyperparameters", "settings", "trainer"}
    | {"optimizer", "optim", "opt", "sgd", "adam", "adamw", "train", "training"}
)
# Of evaluations they mean something else.
_OF_TRAINING = frozenset({"seconds", "batch", "micro_batch", "effective_batch", "samples", "steps", "epochs"})
# What is no value of the training itself: predictions, extremes of curves, rates.
_DERIVED = frozenset({"lowest", "highest", "expected", "measured", "stopped", "rung"})
_OTHER_RESULTS |= _DERIVED
# Parameters by their names, in tables that do not say what was set and what came out.
_SETTINGS = frozenset(
    {"weight_decay", "wd", "momentum", "dropout", "warmup", "beta1", "beta2", "width", "depth", "layers", "hidden", "units"}
    | {"optimizer", "schedule", "scheduler", "nesterov", "label_smoothing", "clip_norm", "clip", "l2", "l1", "heads", "rank"}
    | {"alpha", "gamma", "precision", "augment", "augmentation", "ema", "eps", "size", "dim", "rule", "temperature", "decay"}
)
_PLACES = frozenset({"dir", "path", "folder", "file", "url", "uri", "id", "name", "version", "commit", "git", "host", "user"})
# More different texts than this are names of runs rather than choices.
_MOST_CHOICES = 12
_UNITS = frozenset({"s", "sec", "secs", "seconds", "min", "mins", "minutes", "h", "hours", "ms"})
_WRITTEN = ("metric", "parameter", "group", "nothing")

Meaning = str
Role = Literal["setting", "result", ""]


@dataclass(frozen=True, slots=True)
class Column:
    """A name of a source, and what it is taken for.

    Args:
        meaning: a key of `NAMES`, `metric`, `parameter`, `group`, or `nothing`.
        why: in words; of `nothing`, why it is left out.
    """

    name: str
    meaning: Meaning
    why: str = ""


@dataclass(frozen=True, slots=True)
class Columns:
    """What every name of a source means.

    Args:
        direction: of the metric.
    """

    columns: tuple[Column, ...]
    direction: Literal["minimize", "maximize"]

    def named(self, meaning: Meaning) -> tuple[str, ...]:
        """The names that have a meaning, in the source's order."""
        return tuple(column.name for column in self.columns if column.meaning == meaning)

    def one(self, meaning: Meaning) -> str | None:
        return next(iter(self.named(meaning)), None)


class UnclearColumnsError(StudyFileError):
    """Names that could mean the same: the user has to say which.

    Args:
        meaning: of them.
        names: that could have it.
    """

    def __init__(self, where: str, meaning: Meaning, names: Sequence[str], hint: str) -> None:
        self.meaning, self.names = meaning, tuple(names)
        shown = ", ".join(cut(name, 60) for name in names[:8]) + (", ..." if len(names) > 8 else "")
        super().__init__(Fault("", f"expected one {meaning}, got {shown}. {hint}", where))


def columns_of(
    where: str,
    runs: Sequence[Run],
    *,
    mapped: Mapping[str, Meaning] | None = None,
    direction: Literal["minimize", "maximize"] | None = None,
    same: bool = False,
) -> Columns:
    """What the names of runs mean.

    Args:
        where: the source, for messages.
        mapped: names and their meanings, as the user says.
        direction: of the metric, where its name does not tell.
        same: names that tell groups of runs apart are parameters.

    Raises:
        UnclearColumnsError: two names could mean the same.
        StudyFileError: no batch, rate or metric is found, or the user names what is not there.
    """
    mapped = dict(mapped or {})
    found = _Found(where, runs, mapped, same)
    found.check_mapped()
    taken = [found.column(name) for name in found.roles]
    taken = _one_each(where, found, taken)
    metric = _metric(where, found, taken)
    taken = [Column(one.name, "metric", "as you say" * (metric in mapped)) if one.name == metric else one for one in taken]
    columns = Columns(tuple(taken), direction or _direction(where, found, metric))
    _needed(where, columns)
    return columns


class _Found:
    """The names in runs: where they stand, and their values."""

    def __init__(self, where: str, runs: Sequence[Run], mapped: Mapping[str, Meaning], same: bool) -> None:
        self.where, self.mapped, self.same = where, mapped, same
        self.roles: dict[str, Role] = {}
        self.values: dict[str, list[Scalar]] = {}
        for run in runs:
            for role, values in (("setting", run.settings), ("", run.values), ("result", run.results)):
                for name, value in values.items():
                    self.roles.setdefault(name, role)  # type: ignore[arg-type]
                    self.values.setdefault(name, []).append(value)
        self.runs = len(runs)

    def check_mapped(self) -> None:
        known = (*NAMES, *_WRITTEN)
        faults = [
            Fault("--map", f"expected a name of the source, got {name!r}.{near_miss(name, self.roles)}", self.where)
            for name in self.mapped
            if name not in self.roles
        ]
        faults += [
            Fault("--map", f"expected one of {', '.join(known)}; got {meaning!r}.{near_miss(meaning, known)}")
            for meaning in self.mapped.values()
            if meaning not in known
        ]
        if faults:
            raise StudyFileError(faults)

    def varies(self, name: str) -> bool:
        values = self.values[name]
        return any(value != values[0] and value == value for value in values)

    def column(self, name: str) -> Column:
        """What one name means, by itself."""
        if name in self.mapped:
            return Column(name, self.mapped[name], "as you say")
        role = self.roles[name]
        if is_secret(name) or name.endswith("_token"):
            return Column(name, "nothing", "may be a secret")
        words = words_of(name)
        if words == ["rule"] or words[:2] == ["reference", "rate"]:
            return Column(name, "nothing", "the learning rate is the optimizer's own")
        meaning = _named(name)
        result = _OTHER_RESULTS & set(words)
        derived = _DERIVED & set(words) or (meaning in _OF_TRAINING and (_VALIDATION | {"test", "find"}) & set(words))
        derived = derived or name == "_step" or any(isinstance(value, bool) for value in self.values[name])
        if meaning and not derived and (meaning in _OF_TRAINING or not result):
            wrong_role = role == "setting" and meaning in ("seconds", "status", "started", "ended")
            wrong_role |= role == "result" and meaning in ("learning_rate", "seed", "batch", "devices", "accumulation")
            if not wrong_role:
                return Column(name, meaning)
        if role == "result" or (role == "" and (set(words) & _METRIC_WORDS or result)):
            return Column(name, "nothing", "a result")
        if not self.varies(name):
            return Column(name, "nothing", f"the same in every run, {cut(str(self.values[name][0]), 40)}")
        if words[-1] in GROUPS or "_".join(words[-2:]) in GROUPS:
            return Column(name, "parameter" if self.same else "group")
        return self._other(name, words, role)

    def _other(self, name: str, words: Sequence[str], role: Role) -> Column:
        """A name that is none of those known: a parameter, or nothing."""
        values = self.values[name]
        if len(values) < self.runs:
            return Column(name, "nothing", f"{self.runs - len(values)} of {self.runs} runs do not have it")
        known = role == "setting" or set(words) & _SETTINGS or "_".join(words[-2:]) in _SETTINGS
        if any(isinstance(value, str) for value in values):
            if len(set(map(str, values))) == len(values) or set(words) & _PLACES:
                return Column(name, "nothing", "a name or a place")
            if (several := len(set(map(str, values)))) > _MOST_CHOICES:
                return Column(name, "nothing", f"text, {several} different ones")
            return Column(name, "parameter" if known else "nothing", "" if known else "not a known setting")
        return Column(name, "parameter" if known else "nothing", "" if known else "not a known setting")


def words_of(name: str) -> list[str]:
    """A name's words, in lower case.

    >>> words_of("eval/Accuracy"), words_of("optimizer.learningRate")
    (['eval', 'accuracy'], ['optimizer', 'learning', 'rate'])
    """
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[:300])
    return [word for word in re.split(r"[^a-z0-9]+", apart.lower()) if word] or ["?"]


def _named(name: str) -> Meaning:
    """The meaning that a name's last part has, without what people write before it, or a unit after it.

    Only whole parts count: `min_lr` is no learning rate, and `warmup_steps` are no steps.
    """
    part = words_of(re.split(r"[./]", name.strip("./"))[-1])
    for without_unit in (False, True):
        if without_unit and (len(part) < 2 or part[-1] not in _UNITS):
            continue
        words = part[:-1] if without_unit else part
        for first in range(len(words)):
            text = "_".join(words[first:])
            for meaning, names in NAMES.items():
                # Data, models and optimizers have names too.
                if text in names and (meaning != "run" or words_of(name) == words):
                    return meaning
            if words[first] not in _BEFORE:
                break
    return ""


def _one_each(where: str, found: _Found, columns: Sequence[Column]) -> list[Column]:
    """One name a meaning: what the user says, then settings, then the name listed first; where values differ, none."""
    taken = list(columns)
    if micro := next((column.name for column in taken if column.meaning == "micro_batch"), None):
        # Such as Trainer's train_batch_size, that of one device too.
        taken = [Column(one.name, "nothing", f"instead of it, {micro}") if one.meaning == "batch" else one for one in taken]
    for meaning in NAMES:
        places = [place for place, column in enumerate(taken) if column.meaning == meaning]
        said = [place for place in places if taken[place].name in found.mapped]
        if len(places) < 2:
            continue
        chosen = said[:1] or [min(places, key=lambda place: _rank(meaning, taken[place].name, found))]
        others = [place for place in places if place not in chosen]
        first = taken[chosen[0]].name
        unlike = [taken[place].name for place in others if found.values[taken[place].name] != found.values[first]]
        lenient = meaning in ("run", "status", "started", "ended", "epochs", "steps")
        if unlike and not said and not lenient:
            hint = f"Write --map {first}={meaning}, or the other."
            raise UnclearColumnsError(where, meaning, [first, *unlike], hint)
        for place in others:
            alike = "as" if taken[place].name not in unlike else "instead of it,"
            taken[place] = Column(taken[place].name, "nothing", f"{alike} {first}")
    return taken


def _rank(meaning: Meaning, name: str, found: _Found) -> tuple[bool, int, int]:
    """Which name is meant first: a setting before a result, what varies, and the earlier in the list."""
    text = "_".join(words_of(name))
    order = [place for place, known in enumerate(NAMES[meaning]) if text.endswith(known)]
    return found.roles[name] != "setting", min(order, default=99), len(text)


def _metric(where: str, found: _Found, columns: Sequence[Column]) -> str:
    """The name of the metric: the only one of validation data, or the only one."""
    if said := [name for name, meaning in found.mapped.items() if meaning == "metric"]:
        if len(said) > 1:
            raise UnclearColumnsError(where, "metric", said, "Map one of them.")
        return said[0]
    free = [column.name for column in columns if column.meaning == "nothing" and found.roles[column.name] != "setting"]
    numeric = [name for name in free if any(number(value) is not None for value in found.values[name]) and found.varies(name)]
    named = [
        name for name in numeric if set(words_of(name)) & _METRIC_WORDS and not set(words_of(name)) & {"lowest", "highest"}
    ]
    validation = [name for name in named if set(words_of(name)) & _VALIDATION]
    plain = [name for name in named if not set(words_of(name)) & {"train", "training", "test"}]
    candidates = validation or plain or [name for name in named if "test" in words_of(name)]
    distinct = [name for place, name in enumerate(candidates) if not _repeated(found, candidates[:place], name)]
    if len(distinct) > 1:
        raise UnclearColumnsError(where, "metric", distinct, f"Write --metric {distinct[0]}, or another.")
    if not distinct:
        got = ", ".join(cut(name, 40) for name in list(found.roles)[:12]) or "nothing"
        hint = "Write --metric NAME, the result by which runs are compared."
        raise StudyFileError(Fault("", f"expected a metric, such as val_loss or accuracy; got {got}. {hint}", where))
    return distinct[0]


def _repeated(found: _Found, before: Iterable[str], name: str) -> bool:
    return any(found.values[other] == found.values[name] for other in before)


def _direction(where: str, found: _Found, metric: str) -> Literal["minimize", "maximize"]:
    words = set(words_of(metric))
    told = {value for value in found.values.get("direction", []) if value in ("minimize", "maximize")}
    if len(told) == 1:
        return told.pop()  # type: ignore[return-value]
    if words & _LOWER or sounds_minimized(metric):
        return "minimize"
    if words & _HIGHER:
        return "maximize"
    raise StudyFileError(
        Fault("", f"expected to know whether a lower {cut(metric, 60)} is better. Write --minimize or --maximize.", where)
    )


def _needed(where: str, columns: Columns) -> None:
    faults = []
    if not any(columns.named(meaning) for meaning in ("effective_batch", "micro_batch", "batch")):
        faults.append(Fault("", "expected a column of batch sizes, got none. Write --map NAME=effective_batch.", where))
    if not columns.named("learning_rate"):
        faults.append(Fault("", "expected a column of learning rates, got none. Write --map NAME=learning_rate.", where))
    plain, parts = columns.named("batch"), (*columns.named("accumulation"), *columns.named("devices"))
    if plain and parts and not columns.named("effective_batch") and not columns.named("micro_batch"):
        hint = f"Write --map {plain[0]}=effective_batch where it is the batch of a whole step, or --map {plain[0]}=micro_batch."
        message = f"expected to know whether {plain[0]} counts {' and '.join(parts)}. {hint}"
        faults.append(Fault("", message, where))
    if faults:
        raise StudyFileError(faults)


def shown_columns(columns: Columns) -> Iterator[tuple[str, str, str]]:
    """Rows of the table that is shown: name, meaning, remark."""
    for column in columns.columns:
        yield column.name, "left out" if column.meaning == "nothing" else column.meaning, column.why
