"""One function per framework: a trial's settings as text to paste, and notes on what the framework cannot express.

Names and values may come from a database that others wrote, so in programs every value is written with `repr` and every
comment on its own lines.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml

from ....objectives.task_code import schedule_reference
from ....spaces.errors import cut, plain
from ....spaces.learning_rate import LION_BETAS, OptimizerSettings
from ....spaces.schedule import DECAY, is_own
from ....spaces.trial import TrialSetup
from .settings import ChosenSettings

# torch's optimizers whose settings the study knows: the arguments they take besides learning rate and weight decay.
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "SGD": ("momentum", "nesterov"),
    "Adam": ("betas", "eps"),
    "AdamW": ("betas", "eps"),
    "Adamax": ("betas", "eps"),
    "NAdam": ("betas", "eps"),
    "RAdam": ("betas", "eps"),
}

# Those of bitsandbytes, by Trainer's names.
BITSANDBYTES = {"AdamW8bit": "adamw_bnb_8bit", "Lion": "lion_32bit", "Lion8bit": "lion_8bit"}

# Schedules of other names there.
TRAINERS_SCHEDULES = {"constant": "constant_with_warmup", "wsd": "warmup_stable_decay"}

# SGD momentum of `Task` and the built-in tasks, for studies that did not record it.
USUAL_MOMENTUM = 0.9

# NumPy's seeds are smaller than this, and most frameworks seed NumPy.
_SEEDS = 2**32


@dataclass(frozen=True, slots=True)
class Exported:
    """A trial's settings as text for a framework, and notes on what it cannot express.

    Args:
        beside: writes what the text reads, into the folder in which it will be.
    """

    text: str
    notes: tuple[str, ...] = ()
    beside: Callable[[Path], None] | None = None


def huggingface(chosen: ChosenSettings) -> Exported:
    """`TrainingArguments`, and an optimizer for `Trainer` if they do not support the trial's."""
    arguments, optimizer, notes = huggingface_arguments(chosen)
    return program("huggingface", chosen, notes, arguments=arguments, optimizer=optimizer)


def huggingface_arguments(
    chosen: ChosenSettings, *, own_schedule: bool = False
) -> tuple[dict[str, Any], tuple[str, dict[str, Any]] | None, list[str]]:
    """Keyword arguments of `TrainingArguments`, an optimizer that they do not support, and notes.

    Args:
        own_schedule: the text makes torch's optimizers itself, and gives them the trial's schedule.
    """
    training, settings = chosen.setup.training, chosen.even_settings
    name, keywords = torch_optimizer(chosen, settings)
    supported = name == "AdamW" or (name == "Adam" and settings.weight_decay == 0)
    trainers_name = BITSANDBYTES.get(str(chosen.optimizer), "adamw_torch")
    arguments: dict[str, Any] = {
        "output_dir": "output",
        "per_device_train_batch_size": chosen.even.micro_batch,
        "per_device_eval_batch_size": chosen.evaluation_batch,
        "gradient_accumulation_steps": chosen.even.accumulation,
        "max_steps": chosen.even_steps,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": trainers_schedule(chosen),
        **trainers_decay(chosen),
        # In steps, which all versions from 4.46 support; the argument for a share was renamed.
        "warmup_steps": chosen.warmup_steps(chosen.even_steps),
        "weight_decay": settings.weight_decay,
        "max_grad_norm": training.clip_norm or 0.0,
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        **({"tf32": True} if training.precision == "tf32" else {}),
        "torch_compile": training.compile,
        "dataloader_drop_last": False,
        "dataloader_num_workers": training.workers,
        "dataloader_pin_memory": training.pin_memory and chosen.setup.device == "gpu",
        "seed": training.seed % _SEEDS,
    }
    checkpoints = _is_transformers(chosen) and chosen.plan.activation_checkpointing != "none"
    if checkpoints:
        arguments |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if supported:
        beta1, beta2 = LION_BETAS if trainers_name.startswith("lion") else settings.betas
        arguments |= {"optim": trainers_name, "adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": settings.eps}
    if chosen.setup.device == "cpu":
        arguments["use_cpu"] = True
    notes = [
        *_even_notes(chosen),
        *optimizer_notes(chosen, known=BITSANDBYTES),
        *_seed_notes(chosen),
        *_checkpointing_notes(chosen, enabled=checkpoints),
    ]
    notes += _device_notes(chosen, "use_cpu=True")
    if own_schedule and chosen.optimizer in OPTIMIZERS:
        return arguments, None, notes
    notes += own_schedule_notes(chosen)
    if training.schedule != "constant" or training.warmup:
        notes.append(
            "Trainer's schedule lags the trial's by half a step, and its warm-up starts with a step at learning rate 0"
        )
    if supported and settings.weight_decay and chosen.kind != "huggingface":
        notes.append("Trainer applies no weight decay to biases and norm layers; the trial decayed all parameters")
    return arguments, None if supported else (name, keywords), notes


def lightning(chosen: ChosenSettings) -> Exported:
    """`Trainer`, data loaders, and `configure_optimizers` with the trial's schedule."""
    training = chosen.setup.training
    arguments: dict[str, Any] = {
        "accelerator": chosen.setup.device,
        "devices": chosen.even.devices,
        "accumulate_grad_batches": chosen.even.accumulation,
        "precision": {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[training.precision],
        "gradient_clip_val": training.clip_norm,
        "max_epochs": -1,
        "max_steps": chosen.even_steps,
    }
    if training.sync_batch_norm:
        arguments["sync_batchnorm"] = True
    if training.cudnn_benchmark:
        arguments["benchmark"] = True
    notes = [*_even_notes(chosen), *optimizer_notes(chosen), *_seed_notes(chosen), *mean_notes(chosen, "Lightning")]
    notes += [*_device_notes(chosen, "accelerator='cpu'"), *_tf32_notes(chosen), *_checkpointing_notes(chosen, enabled=False)]
    if training.compile:
        notes.append("the trial's model was compiled: call module = torch.compile(module) before Trainer.fit")
    return program("lightning", chosen, notes, arguments=arguments, optimizer=torch_optimizer(chosen, chosen.even_settings))


def accelerate(chosen: ChosenSettings) -> Exported:
    """A training loop with `Accelerator` that follows the trial's schedule step by step."""
    training = chosen.setup.training
    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": chosen.even.accumulation,
        "mixed_precision": {"fp32": "no", "tf32": "no"}.get(training.precision, training.precision),
    }
    if chosen.setup.device == "cpu":
        arguments["cpu"] = True
    notes = [*_even_notes(chosen), *optimizer_notes(chosen), *_seed_notes(chosen), *mean_notes(chosen, "Accelerate")]
    notes += [*_device_notes(chosen, "cpu=True"), *_tf32_notes(chosen), *_checkpointing_notes(chosen, enabled=False)]
    if training.compile:
        notes.append("the trial's model was compiled: call model = torch.compile(model) before train(...)")
    if training.sync_batch_norm:
        notes.append("the trial used synchronised BatchNorm: call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) first")
    return program("accelerate", chosen, notes, arguments=arguments, optimizer=torch_optimizer(chosen, chosen.even_settings))


def deepspeed(chosen: ChosenSettings) -> Exported:
    """DeepSpeed's configuration as JSON, which has no comments."""
    training, settings, even = chosen.setup.training, chosen.even_settings, chosen.even
    name, keywords = torch_optimizer(chosen, settings)
    if name == "Adam":
        keywords["adam_w_mode"] = False  # otherwise DeepSpeed's "Adam" applies weight decay as AdamW does
    scheduler, steps = None, chosen.running_steps
    warmup_steps = chosen.warmup_steps(steps)
    warmup = {"warmup_num_steps": max(warmup_steps, 1), "warmup_type": "linear"}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": settings.learning_rate}
    total = {"total_num_steps": steps}
    match "constant" if is_own(training.schedule) else training.schedule:
        case "cosine":
            ratios = {"warmup_min_ratio": 0.0, "cos_min_ratio": 0.0}
            scheduler = {"type": "WarmupCosineLR", "params": total | warmup | ratios}
        case "linear":
            scheduler = {"type": "WarmupDecayLR", "params": total | warmup | rates}
        case "constant" if training.warmup:
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
        "zero_optimization": {"stage": 1} if _is_sharded(chosen) else None,
        "zero_allow_untested_optimizer": True if _is_sharded(chosen) and name not in ("Adam", "AdamW") else None,
    }
    notes = [
        f"launch: deepspeed --num_gpus {even.devices} train.py; for another number of GPUs, change train_batch_size",
        f"DeepSpeed's configuration has no key for the length of training, {steps} steps, nor for the seed, {training.seed}",
        *_even_notes(chosen, flushes=False),
        *optimizer_notes(chosen),
        *mean_notes(chosen, "DeepSpeed"),
        *own_schedule_notes(chosen),
        *_checkpointing_notes(chosen, enabled=False),
    ]
    if scheduler:
        late = "DeepSpeed's schedules start with two steps at learning rate 0 and lag the trial's by up to one and a half steps"
        notes.append(
            f"{late}, and warm up for at least 2 steps; the trial's warm-up is {warmup_steps}" if warmup_steps < 2 else late
        )
    if training.schedule == "wsd":
        notes.append("DeepSpeed has no schedule like wsd: pass one of torch to deepspeed.initialize, or the rate never falls")
    if training.precision == "bf16":
        notes.append("DeepSpeed's bf16 stores the model's weights in bf16; the trial's were fp32 under autocast")
    return Exported(
        json.dumps({key: value for key, value in document.items() if value is not None}, indent=2) + "\n", tuple(notes)
    )


def pytorch(chosen: ChosenSettings) -> Exported:
    """A training script that reproduces the trial, any integer batch exactly: of the study's own task, or of an example."""
    own = chosen.kind == "task" and not chosen.task.startswith(_WITHOUT_SAMPLES)
    if own:
        notes = ["it imports the study's own task, which needs bsearch; `bsearch train` does the same without a script"]
    else:
        notes = [*optimizer_notes(chosen), "the model and data are examples to replace with yours"]
    notes += [] if own else _checkpointing_notes(chosen, enabled=False)
    if chosen.batch_norm and chosen.plan.devices > 1:
        notes.append("BatchNorm's running statistics are those of the first device; the trial's were averaged over devices")
    optimizer = torch_optimizer(chosen, chosen.setup.optimizer)
    place, _, name = chosen.task.rpartition(":")
    file = Path(place) if place.endswith(".py") else None
    source = {
        "folder": str(file.parent) if file else "",
        "module": file.stem if file else place,
        "name": name,
        "setup": _portable(chosen.setup),
    }
    return program("pytorch", chosen, notes, optimizer=optimizer, even=False, own=source if own else None)


def _portable(setup: TrialSetup) -> dict[str, Any]:
    """A setup as a dict, without what belongs to the run of the study."""
    own = ("checkpoint", "model_folder", "scores_test", "ends_by")
    return {name: value for name, value in setup.to_dict().items() if name not in own}


# The ready task whose data come in batches only, which torch's loader cannot fetch one by one.
_WITHOUT_SAMPLES = "bsearch.objectives.vision:"


def yaml_text(document: Mapping[str, Any]) -> str:
    """A document as YAML; where it holds what a terminal interprets, such as bidirectional marks, all but ASCII is escaped."""
    text = yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)
    return text if plain(text) == text else yaml.safe_dump(dict(document), sort_keys=False)


def settings_yaml(chosen: ChosenSettings) -> Exported:
    """The settings as a mapping, for programs; docs/export.md describes the keys."""
    setup, training, settings = chosen.setup, chosen.setup.training, chosen.setup.optimizer
    document = {
        "study": chosen.study,
        "trial": chosen.trial,
        "chosen": chosen.chosen,
        "metric": chosen.metric,
        "value": chosen.accuracy,
        "train_s": chosen.train_s,
        "effective_batch": chosen.plan.effective_batch,
        "micro_batch": chosen.plan.largest_micro_batch,
        "accumulation": chosen.plan.accumulation,
        "activation_checkpointing": chosen.plan.activation_checkpointing,
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
        "ema": training.ema,
        "ema_scaling": training.ema_scaling,
        "precision": training.precision,
        "compile": training.compile,
        "seed": training.seed,
        "epochs": setup.epochs,
        "samples_budget": setup.samples_budget,
        "steps": sum(run.count for run in setup.steps()),
        "evaluation_batch": chosen.evaluation_batch,
        "rule": setup.rule,
        "reference_rate": setup.reference_rate,
        "reference_batch": setup.reference_batch,
        "parameters": dict(chosen.parameters),
    }
    return Exported(yaml_text(document), ())


def trainers_schedule(chosen: ChosenSettings) -> str:
    """Trainer's name of the schedule; a function of one's own has none, which a note says."""
    schedule = chosen.setup.training.schedule
    return TRAINERS_SCHEDULES.get("constant" if is_own(schedule) else schedule, schedule)


def own_schedule_notes(chosen: ChosenSettings) -> Iterator[str]:
    """What becomes of a schedule of one's own where the text cannot call it."""
    schedule = chosen.setup.training.schedule
    if is_own(schedule):
        yield f"the trial's schedule is {schedule}, which is not called here: the rate stays at its peak after warm-up"


def trainers_decay(chosen: ChosenSettings) -> dict[str, Any]:
    """What Trainer's `warmup_stable_decay` needs besides its name."""
    if chosen.setup.training.schedule != "wsd":
        return {}
    after_warmup = chosen.even_steps - chosen.warmup_steps(chosen.even_steps)
    return {"lr_scheduler_kwargs": {"num_decay_steps": max(1, round(DECAY * after_warmup)), "decay_type": "linear"}}


def torch_optimizer(chosen: ChosenSettings, settings: OptimizerSettings) -> tuple[str, dict[str, Any]]:
    """A class of `torch.optim` and its keyword arguments; AdamW as a placeholder for other optimizers."""
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


def optimizer_notes(chosen: ChosenSettings, known: Container[str] = ()) -> Iterator[str]:
    """What becomes of the trial's optimizer.

    Args:
        known: optimizers that the text names although torch does not have them.
    """
    if chosen.kind == "loop":
        yield (
            "the trial ran a loop of its own: schedule, warm-up, clipping and precision are the study's settings, which the "
            "loop may not have used"
        )
    if chosen.optimizer is None:
        yield "the study does not know the optimizer of a custom training loop: AdamW is a placeholder for yours"
    elif chosen.optimizer in known:
        if chosen.optimizer in BITSANDBYTES:
            yield f"the trial's optimizer {chosen.optimizer} needs bitsandbytes"
    elif chosen.optimizer not in OPTIMIZERS:
        yield f"the trial's optimizer {chosen.optimizer!r} is defined by its task: AdamW is a placeholder for it"
    elif chosen.optimizer == "SGD" and chosen.momentum is None:
        yield f"the trial's momentum was not recorded: assuming Nesterov {USUAL_MOMENTUM}, as in bsearch's own tasks"


def _even_notes(chosen: ChosenSettings, flushes: bool = True) -> Iterator[str]:
    """How the batch changes where micro-batches have to be equal.

    Args:
        flushes: an epoch ends with a smaller step; otherwise the next epoch's micro-batches complete it.
    """
    yield from chosen.even_notes
    even, samples = chosen.even, chosen.training_set
    whole = even.effective_batch if flushes else even.micro_batch * even.devices
    left, budget = samples % whole, chosen.setup.samples_budget
    ours = sum(count for count, _, _ in chosen.steps)
    if (
        left
        and not chosen.in_order
        and (budget > samples or even.effective_batch != chosen.plan.effective_batch or even.devices > 1)
    ):
        what, count = ("step", chosen.even_steps) if flushes else ("micro-batch", chosen.running_steps)
        padded = ", padded with the epoch's first samples if devices' shares would differ" if even.devices > 1 else ""
        yield (
            f"each epoch of {samples} samples ends with a {what} of {left} instead of {whole}{padded}: {count} steps for the "
            f"trial's {budget} samples, whereas the trial's {f'{ours} ' * (ours != count)}steps crossed epoch boundaries"
        )
    if chosen.batch_norm and chosen.even.accumulation > 1:
        yield (
            f"BatchNorm's running statistics are updated {chosen.even.accumulation} times per step here; the trial's momentum "
            f"was corrected to 1 - (1 - momentum)**(1/{chosen.even.accumulation})"
        )
    yield from average_notes(chosen)
    if _is_sharded(chosen):
        shared = {"zero1": "the optimizer state", "fsdp2": "parameters, gradients and the optimizer state"}
        sharding = chosen.setup.sharding
        yield (
            f"the trial sharded {shared[sharding]} over its devices ({sharding}); where this is not done, a device needs more "
            "memory"
        )
    if chosen.setup.training.channels_last:
        yield "the trial used channels-last images: model.to(memory_format=torch.channels_last), and the same for its inputs"


def _checkpointing_notes(chosen: ChosenSettings, *, enabled: bool) -> Iterator[str]:
    """What becomes of the trial's activation checkpointing.

    Args:
        enabled: the text turns it on; frameworks know the full kind only.
    """
    mode = chosen.plan.activation_checkpointing
    if mode == "none" or (enabled and mode == "full"):
        return
    if enabled:
        yield "the trial used selective activation checkpointing; here it is full, which takes less memory and more time"
    else:
        yield (
            f"the trial used {mode} activation checkpointing, which is not enabled here: wrap the model's blocks in "
            "torch.utils.checkpoint, or this micro-batch may run out of memory"
        )


def average_notes(chosen: ChosenSettings) -> Iterator[str]:
    """What becomes of the trial's average of weights, where the text does not make it."""
    if chosen.setup.training.ema is not None:
        yield (
            "the trial's result is that of an exponential moving average of its weights, which is not made here: update "
            "torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn"
            f"({chosen.setup.ema_decay(chosen.even.effective_batch):.9g})) after each step, and evaluate it"
        )


def _is_transformers(chosen: ChosenSettings) -> bool:
    """Whether the model is certainly one of `transformers`, which turns activation checkpointing on by itself."""
    return chosen.task.startswith("bsearch.objectives.language:")


def _is_sharded(chosen: ChosenSettings) -> bool:
    return chosen.setup.sharding != "ddp" and chosen.plan.devices > 1


def mean_notes(chosen: ChosenSettings, framework: str) -> Iterator[str]:
    if chosen.even.accumulation * chosen.even.devices > 1:
        yield (
            f"{framework} averages the micro-batches' means, which equals the step's mean only if all have the same "
            "denominator (samples, tokens or weights); for a mean over samples, that holds in every step except an epoch's last"
        )


def _tf32_notes(chosen: ChosenSettings) -> list[str]:
    if chosen.setup.training.precision != "tf32":
        return []
    return ["the trial's products were rounded to tf32: call torch.set_float32_matmul_precision('high') first"]


def _device_notes(chosen: ChosenSettings, argument: str) -> Iterator[str]:
    if chosen.setup.device == "cpu":
        yield f"the trial ran on a CPU, so {argument} is set; without it, on a GPU, expect a different training time"


def _seed_notes(chosen: ChosenSettings) -> Iterator[str]:
    seed = chosen.setup.training.seed
    if seed >= _SEEDS:
        yield f"seed {seed} becomes {seed % _SEEDS}: frameworks seed NumPy, whose seeds are at most {_SEEDS - 1}"


def program(template: str, chosen: ChosenSettings, notes: list[str], *, even: bool = True, **values: Any) -> Exported:
    setup = chosen.setup
    place, _, name = schedule_reference(setup.training.schedule, setup.folder).rpartition(":")
    file = Path(place)
    own = {"folder": str(file.parent), "module": file.stem} if place.endswith(".py") else {"folder": "", "module": place}
    values["own_schedule"] = {**own, "name": name} if is_own(setup.training.schedule) else None
    known = {"chosen": chosen, "setup": setup, "training": setup.training, "decay": DECAY, "notes": notes, "is_even": even}
    return Exported(_templates().get_template(f"{template}.py.jinja").render(**known, **values), tuple(notes))


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__.rpartition(".")[0]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # programs, not pages: values go through `py`, comments through `comment`
    )
    environment.filters |= {"py": repr, "keywords": _keywords, "comment": commented}
    return environment


def _keywords(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def commented(text: str, indent: str = "") -> str:
    """Text as lines of a comment, whatever it contains.

    >>> print(commented("two\\nlines"))
    # two\\nlines
    """
    line = plain(cut(str(text), 600)).replace("\n", "\\n").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    wrapped = textwrap.wrap(line, 110, break_long_words=True, break_on_hyphens=False) or [""]
    return f"\n{indent}".join(f"# {part}" if number == 0 else f"#   {part}" for number, part in enumerate(wrapped))
