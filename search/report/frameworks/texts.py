"""One function per framework: a trial's settings as a text to paste, and notes on what the framework cannot express.

Names and values may come from a database that others wrote, so in programs every value is written by `repr` and every
comment on lines of its own.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
import yaml

from ....spaces.errors import cut, plain
from ....spaces.learning_rate import OptimizerSettings
from .settings import ChosenSettings

# torch's optimizers whose settings the study knows, by what they take beside the rate and the decay.
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "SGD": ("momentum", "nesterov"),
    "Adam": ("betas", "eps"),
    "AdamW": ("betas", "eps"),
    "Adamax": ("betas", "eps"),
    "NAdam": ("betas", "eps"),
    "RAdam": ("betas", "eps"),
}

# SGD of `Task` and of the ready tasks, for studies that were run before its momentum was recorded.
USUAL_MOMENTUM = 0.9

# NumPy takes no larger seed, and most frameworks seed it.
_SEEDS = 2**32


@dataclass(frozen=True, slots=True)
class Pasted:
    """A text to paste and what is to be said beside it."""

    text: str
    notes: tuple[str, ...] = ()


def huggingface(chosen: ChosenSettings) -> Pasted:
    """`TrainingArguments`, and an optimizer for `Trainer` where they have no word for the trial's."""
    training, settings = chosen.setup.training, chosen.even_settings
    name, keywords = _optimizer(chosen, settings)
    has_words = name == "AdamW" or (name == "Adam" and settings.weight_decay == 0)
    arguments: dict[str, Any] = {
        "output_dir": "output",
        "per_device_train_batch_size": chosen.even.micro_batch,
        "per_device_eval_batch_size": chosen.evaluation_batch,
        "gradient_accumulation_steps": chosen.even.accumulation,
        "max_steps": chosen.even_steps,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant_with_warmup" if training.schedule == "constant" else training.schedule,
        # Steps, for versions from 4.46 on know them; a share has had two names.
        "warmup_steps": chosen.warmup_steps(chosen.even_steps),
        "weight_decay": settings.weight_decay,
        "max_grad_norm": training.clip_norm or 0.0,
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "torch_compile": training.compile,
        "dataloader_drop_last": False,
        "dataloader_num_workers": training.workers,
        "dataloader_pin_memory": training.pin_memory and chosen.setup.device == "gpu",
        "seed": training.seed % _SEEDS,
    }
    if has_words:
        beta1, beta2 = settings.betas
        arguments |= {"optim": "adamw_torch", "adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": settings.eps}
    if chosen.setup.device == "cpu":
        arguments["use_cpu"] = True
    notes = [*_even_notes(chosen), *_optimizer_notes(chosen), *_seed_notes(chosen)]
    notes += _device_notes(chosen, "use_cpu=True")
    if training.schedule != "constant" or training.warmup:
        notes.append("Trainer's schedule runs half a step behind the trial's, and its warm-up begins with a step at rate 0")
    if has_words and settings.weight_decay:
        notes.append("Trainer decays no biases and no norms' weights; the trial decayed all parameters alike")
    return _program("huggingface", chosen, notes, arguments=arguments, optimizer=None if has_words else (name, keywords))


def lightning(chosen: ChosenSettings) -> Pasted:
    """`Trainer`, a loader's batch size, and `configure_optimizers` with the trial's own schedule."""
    training = chosen.setup.training
    arguments: dict[str, Any] = {
        "accelerator": chosen.setup.device,
        "devices": chosen.even.devices,
        "accumulate_grad_batches": chosen.even.accumulation,
        "precision": {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[training.precision],
        "gradient_clip_val": training.clip_norm,
        "max_epochs": -1,
        "max_steps": chosen.even_steps,
    }
    if training.sync_batch_norm:
        arguments["sync_batchnorm"] = True
    if training.cudnn_benchmark:
        arguments["benchmark"] = True
    notes = [*_even_notes(chosen), *_optimizer_notes(chosen), *_seed_notes(chosen), *_mean_notes(chosen, "Lightning")]
    notes += _device_notes(chosen, "accelerator='cpu'")
    if training.compile:
        notes.append("the trial's model was compiled: module = torch.compile(module) before Trainer.fit")
    return _program("lightning", chosen, notes, arguments=arguments, optimizer=_optimizer(chosen, chosen.even_settings))


def accelerate(chosen: ChosenSettings) -> Pasted:
    """A loop around `Accelerator`, which sets the trial's own schedule step by step."""
    training = chosen.setup.training
    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": chosen.even.accumulation,
        "mixed_precision": {"fp32": "no"}.get(training.precision, training.precision),
    }
    if chosen.setup.device == "cpu":
        arguments["cpu"] = True
    notes = [*_even_notes(chosen), *_optimizer_notes(chosen), *_seed_notes(chosen), *_mean_notes(chosen, "Accelerate")]
    notes += _device_notes(chosen, "cpu=True")
    if training.compile:
        notes.append("the trial's model was compiled: model = torch.compile(model) before train(...)")
    if training.sync_batch_norm:
        notes.append("the trial's BatchNorm was synchronised: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) first")
    return _program("accelerate", chosen, notes, arguments=arguments, optimizer=_optimizer(chosen, chosen.even_settings))


def deepspeed(chosen: ChosenSettings) -> Pasted:
    """DeepSpeed's configuration as JSON, which knows no comments."""
    training, settings, even = chosen.setup.training, chosen.even_settings, chosen.even
    name, keywords = _optimizer(chosen, settings)
    if name == "Adam":
        keywords["adam_w_mode"] = False  # else DeepSpeed's "Adam" decays as AdamW does
    scheduler, steps = None, chosen.running_steps
    warmup_steps = chosen.warmup_steps(steps)
    warmup = {"warmup_num_steps": max(warmup_steps, 1), "warmup_type": "linear"}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": settings.learning_rate}
    total = {"total_num_steps": steps}
    match training.schedule:
        case "cosine":
            ratios = {"warmup_min_ratio": 0.0, "cos_min_ratio": 0.0}
            scheduler = {"type": "WarmupCosineLR", "params": total | warmup | ratios}
        case "linear":
            scheduler = {"type": "WarmupDecayLR", "params": total | warmup | rates}
        case _ if training.warmup:
            scheduler = {"type": "WarmupLR", "params": warmup | rates}
    document: dict[str, Any] = {
        "train_batch_size": even.effective_batch,
        "train_micro_batch_size_per_gpu": even.micro_batch,
        "gradient_accumulation_steps": even.accumulation,
        "optimizer": {"type": name, "params": keywords},
        "scheduler": scheduler,
        "gradient_clipping": training.clip_norm,
        "bf16": {"enabled": True} if training.precision == "bf16" else None,
        "fp16": {"enabled": True} if training.precision == "fp16" else None,
    }
    notes = [
        f"launch: deepspeed --num_gpus {even.devices} train.py; on another number of GPUs train_batch_size has to follow",
        f"DeepSpeed has no word for the length of training: {steps} steps; nor for the seed: {training.seed}",
        *_even_notes(chosen, flushes=False),
        *_optimizer_notes(chosen),
        *_mean_notes(chosen, "DeepSpeed"),
    ]
    if scheduler:
        late = "DeepSpeed's schedules take the first two steps at rate 0 and run up to one and a half steps behind the trial's"
        notes.append(f"{late}, and warm up for at least 2; the trial's warm-up is {warmup_steps}" if warmup_steps < 2 else late)
    if training.precision == "bf16":
        notes.append("DeepSpeed's bf16 keeps the model's weights in bf16; the trial's were fp32 under autocast")
    return Pasted(
        json.dumps({key: value for key, value in document.items() if value is not None}, indent=2) + "\n", tuple(notes)
    )


def pytorch(chosen: ChosenSettings) -> Pasted:
    """A training script that needs torch alone, and trains as the trial did: any integer batch, exactly."""
    notes = [*_optimizer_notes(chosen), "its model and data are an example, marked to be replaced by yours"]
    if chosen.batch_norm and chosen.plan.devices > 1:
        notes.append("BatchNorm's running statistics are the first device's; the trial's were the mean over devices")
    optimizer = _optimizer(chosen, chosen.setup.optimizer)
    return _program("pytorch", chosen, notes, optimizer=optimizer, even=False)


def settings_yaml(chosen: ChosenSettings) -> Pasted:
    """The settings as a mapping, for programs; docs/export.md tells the keys."""
    setup, training, settings = chosen.setup, chosen.setup.training, chosen.setup.optimizer
    document = {
        "study": chosen.study,
        "trial": chosen.trial,
        "chosen": chosen.chosen,
        "metric": chosen.metric,
        "promised": chosen.accuracy,
        "train_s": chosen.train_s,
        "effective_batch": chosen.plan.effective_batch,
        "micro_batch": chosen.plan.largest_micro_batch,
        "accumulation": chosen.plan.accumulation,
        "devices": chosen.plan.devices,
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "optimizer": chosen.optimizer,
        "momentum": chosen.momentum,
        "nesterov": chosen.nesterov,
        "betas": list(settings.betas),
        "eps": settings.eps,
        "schedule": training.schedule,
        "warmup": training.warmup,
        "clip_norm": training.clip_norm,
        "precision": training.precision,
        "compile": training.compile,
        "seed": training.seed,
        "epochs": setup.epochs,
        "samples_budget": setup.samples_budget,
        "steps": sum(count for count, _, _ in chosen.steps),
        "evaluation_batch": chosen.evaluation_batch,
        "rule": setup.rule,
        "reference_rate": setup.reference_rate,
        "reference_batch": setup.reference_batch,
        "parameters": dict(chosen.parameters),
    }
    return Pasted(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), ())


FRAMEWORKS: dict[str, Callable[[ChosenSettings], Pasted]] = {
    "hf": huggingface,
    "lightning": lightning,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "pytorch": pytorch,
    "yaml": settings_yaml,
}


def _optimizer(chosen: ChosenSettings, settings: OptimizerSettings) -> tuple[str, dict[str, Any]]:
    """A class of `torch.optim` and its keyword arguments; AdamW stands for what is not torch's."""
    name = chosen.optimizer if chosen.optimizer in OPTIMIZERS else "AdamW"
    momentum = USUAL_MOMENTUM if chosen.momentum is None else chosen.momentum
    known: dict[str, Any] = {
        "momentum": momentum,
        "nesterov": momentum > 0 and (True if chosen.nesterov is None else chosen.nesterov),
        "betas": settings.betas,
        "eps": settings.eps,
    }
    keywords = {keyword: known[keyword] for keyword in OPTIMIZERS[name]}
    return name, {"lr": settings.learning_rate, **keywords, "weight_decay": settings.weight_decay}


def _optimizer_notes(chosen: ChosenSettings) -> Iterator[str]:
    if chosen.optimizer is None:
        yield "the study does not know the optimizer of a loop of your own: AdamW stands where yours belongs"
    elif chosen.optimizer not in OPTIMIZERS:
        yield f"the trial's optimizer {chosen.optimizer!r} is its task's own: AdamW stands where it belongs"
    elif chosen.optimizer == "SGD" and chosen.momentum is None:
        yield f"the trial's momentum was not recorded: Nesterov {USUAL_MOMENTUM} is what bsearch's own tasks use"


def _even_notes(chosen: ChosenSettings, flushes: bool = True) -> Iterator[str]:
    """What becomes of the batch where passes have to be alike.

    Args:
        flushes: an epoch's last passes are a step of their own; else the next epoch's complete it.
    """
    yield from chosen.even_notes
    even, samples = chosen.even, chosen.training_set
    whole = even.effective_batch if flushes else even.micro_batch * even.devices
    left, budget = samples % whole, chosen.setup.samples_budget
    ours = sum(count for count, _, _ in chosen.steps)
    if left and (budget > samples or even.effective_batch != chosen.plan.effective_batch or even.devices > 1):
        what, count = ("step", chosen.even_steps) if flushes else ("pass", chosen.running_steps)
        filled = ", filled up with samples of its beginning where devices' shares would differ" if even.devices > 1 else ""
        yield (
            f"each epoch of {samples} samples ends with a {what} of {left} instead of {whole}{filled}: {count} steps for the "
            f"trial's {budget} samples, where the trial's steps ran on over epochs{f' and were {ours}' * (ours != count)}"
        )
    if chosen.batch_norm and chosen.even.accumulation > 1:
        yield (
            f"BatchNorm's running statistics move {chosen.even.accumulation} times a step here; the trial's momentum was "
            f"corrected to 1 - (1 - momentum)**(1/{chosen.even.accumulation})"
        )
    if chosen.setup.training.channels_last:
        yield "the trial's images lay channels last: model.to(memory_format=torch.channels_last), and its inputs alike"


def _mean_notes(chosen: ChosenSettings, framework: str) -> Iterator[str]:
    if chosen.even.accumulation * chosen.even.devices > 1:
        yield (
            f"{framework} averages the means of passes: right where each divides by as many samples (tokens, weights) as the "
            "others, as a mean over samples does in every step but an epoch's last"
        )


def _device_notes(chosen: ChosenSettings, words: str) -> Iterator[str]:
    if chosen.setup.device == "cpu":
        yield f"the trial ran on CPUs, hence {words}: without it, on a GPU, the accuracy is to be expected, the time is not"


def _seed_notes(chosen: ChosenSettings) -> Iterator[str]:
    seed = chosen.setup.training.seed
    if seed >= _SEEDS:
        yield f"seed {seed} is {seed % _SEEDS} here: frameworks seed NumPy, which takes none above {_SEEDS - 1}"


def _program(template: str, chosen: ChosenSettings, notes: list[str], *, even: bool = True, **values: Any) -> Pasted:
    text = (
        _templates()
        .get_template(f"{template}.py.jinja")
        .render(chosen=chosen, setup=chosen.setup, training=chosen.setup.training, notes=notes, is_even=even, **values)
    )
    return Pasted(text, tuple(notes))


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__.rpartition(".")[0]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # programs, not pages: values pass `py`, comments pass `comment`
    )
    environment.filters |= {"py": repr, "keywords": _keywords, "comment": _comment}
    return environment


def _keywords(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _comment(text: str, indent: str = "") -> str:
    """Lines of a comment, whatever the text holds.

    >>> print(_comment("two\\nlines"))
    # two\\nlines
    """
    line = plain(cut(str(text), 600)).replace("\n", "\\n").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    wrapped = textwrap.wrap(line, 110, break_long_words=True, break_on_hyphens=False) or [""]
    return f"\n{indent}".join(f"# {part}" if number == 0 else f"#   {part}" for number, part in enumerate(wrapped))
