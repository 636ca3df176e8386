"""One function per framework: a trial's settings as text to paste, and notes on what the framework cannot express.

Names and values may come from a database that others wrote, so in programs every value is written with `repr` and every
comment on its own lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pprint import pformat
from typing import Any

import jinja2
import yaml

from ....objectives.task_code import schedule_reference
from ....spaces.errors import cut, plain
from ....spaces.learning_rate import LION_BETAS
from ....spaces.schedule import DECAY, is_own
from ....spaces.trial import UNTIMED_SAMPLES
from .differences import (
    BITSANDBYTES,
    OPTIMIZERS,
    SEEDS,
    checkpointing_notes,
    device_notes,
    even_notes,
    keywords_text,
    loop_notes,
    optimizer_notes,
    own_schedule_notes,
    seed_notes,
    torch_optimizer,
)
from .library import TRAINER, Library, written
from .settings import ChosenSettings

_TEMPLATES = Path(__file__).parent / "templates"
# Trainer's names of schedules, where they are not ours.
_TRAINERS_SCHEDULES = {"constant": "constant_with_warmup", "wsd": "warmup_stable_decay"}
# What belongs to the run of the study and its machine, not to the training.
_OF_THE_RUN = (
    *("checkpoint", "checkpoint_every_s", "pauses_at", "model_folder", "scores_test", "ends_by", "device"),
    *("cpus", "memory_limit_bytes"),
)


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
    return program(
        _TEMPLATES / "huggingface.py.jinja", chosen, notes, arguments=arguments, optimizer=optimizer
    )


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
    supported = supported and keywords.keys() <= {"lr", "betas", "eps", "weight_decay"}
    arguments: dict[str, Any] = {
        **trainers_arguments(chosen, TRAINER),
        "per_device_eval_batch_size": chosen.evaluation_batch,
        **({"tf32": True} if training.precision == "tf32" else {}),
        "dataloader_drop_last": False,
        "dataloader_num_workers": training.workers,
    }
    # Models of `transformers` turn activation checkpointing on by themselves.
    checkpoints = (
        chosen.task.startswith("bsearch.objectives.language:")
        and chosen.plan.activation_checkpointing != "none"
    )
    if checkpoints:
        arguments |= {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        }
    if supported:
        arguments |= {"optim": BITSANDBYTES.get(str(chosen.optimizer), "adamw_torch")}
        arguments |= adam_arguments(chosen)
    if chosen.setup.device == "cpu":
        arguments["use_cpu"] = True
    notes = [
        *even_notes(chosen),
        *optimizer_notes(chosen, known=BITSANDBYTES),
        *seed_notes(chosen),
        *checkpointing_notes(chosen, enabled=checkpoints),
    ]
    notes += device_notes(chosen, "use_cpu=True")
    if own_schedule and chosen.optimizer in OPTIMIZERS:
        return arguments, None, notes
    notes += own_schedule_notes(chosen)
    if training.schedule != "constant" or training.warmup:
        notes.append(
            "Trainer's schedule lags the trial's by half a step, and its warm-up starts with a step at learning rate 0"
        )
    if supported and settings.weight_decay and chosen.kind != "huggingface":
        notes.append(
            "Trainer applies no weight decay to biases and norm layers; the trial decayed all parameters"
        )
    return arguments, None if supported else (name, keywords), notes


def lightning(chosen: ChosenSettings) -> Exported:
    """`Trainer`, data loaders, and `configure_optimizers` with the trial's schedule."""
    training = chosen.setup.training
    arguments: dict[str, Any] = {
        "accelerator": chosen.setup.device,
        "devices": chosen.even.devices,
        "accumulate_grad_batches": chosen.even.accumulation,
        "precision": {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[
            training.precision
        ],
        "gradient_clip_val": training.clip_norm,
        "max_epochs": -1,
        "max_steps": chosen.even_steps,
    }
    if training.sync_batch_norm:
        arguments["sync_batchnorm"] = True
    compiled = "module = torch.compile(module) before Trainer.fit"
    notes = loop_notes(chosen, "Lightning", cpu="accelerator='cpu'", compiled=compiled)
    optimizer = torch_optimizer(chosen, chosen.even_settings)
    return program(_TEMPLATES / "lightning.py.jinja", chosen, notes, arguments=arguments, optimizer=optimizer)


def pytorch(chosen: ChosenSettings) -> Exported:
    """A script that trains the study's own code as the trial did, any integer batch exactly."""
    notes = [
        "it runs the study's own training code, which needs bsearch; `bsearch train` does the same without a script"
    ]
    setup = {name: value for name, value in chosen.setup.to_dict().items() if name not in _OF_THE_RUN}
    setup |= {"samples_budget": UNTIMED_SAMPLES} if chosen.by_clock else {}
    return program(
        _TEMPLATES / "pytorch.py.jinja",
        chosen,
        notes,
        even=False,
        values=pformat(setup, width=110, sort_dicts=False),
    )


def yaml_text(document: Mapping[str, Any]) -> str:
    """A document as YAML; where it holds what a terminal interprets, such as bidirectional marks, all but ASCII is escaped."""
    text = yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)
    return text if plain(text) == text else yaml.safe_dump(dict(document), sort_keys=False)


def settings_yaml(chosen: ChosenSettings) -> Exported:
    """The settings as a mapping, for programs; docs/export.md describes the keys."""
    setup, plan, settings = chosen.setup, chosen.plan, chosen.settings
    of_training = ("schedule", "warmup", "clip_norm", "ema", "precision", "compile", "seed")
    document = {
        **{name: getattr(chosen, name) for name in ("study", "trial", "chosen", "metric")},
        "value": chosen.accuracy,
        "train_s": chosen.train_s,
        "effective_batch": plan.effective_batch,
        "micro_batch": plan.largest_micro_batch,
        **{name: getattr(plan, name) for name in ("accumulation", "activation_checkpointing", "devices")},
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "optimizer": chosen.optimizer,
        **{name: chosen.main.get(name) for name in ("momentum", "nesterov")},
        "betas": list(settings.betas),
        "eps": settings.eps,
        **({"groups": [dict(group) for group in chosen.groups]} if len(chosen.groups) > 1 else {}),
        **{name: getattr(setup.training, name) for name in of_training},
        "epochs": setup.epochs,
        "samples_budget": setup.samples_budget,
        "steps": sum(run.count for run in setup.steps()),
        "evaluation_batch": chosen.evaluation_batch,
        **{name: getattr(setup, name) for name in ("rule", "reference_rate", "reference_batch")},
        "parameters": dict(chosen.parameters),
    }
    return Exported(yaml_text(document), ())


def trainers_arguments(chosen: ChosenSettings, library: Library) -> dict[str, Any]:
    """Steps, schedule and precision for Trainer or a library that is built on it."""
    training, settings = chosen.setup.training, chosen.even_settings
    steps = chosen.even_steps
    warmup_steps = chosen.warmup_steps(steps)
    schedule = "constant" if is_own(training.schedule) else training.schedule
    decay = {"num_decay_steps": max(1, round(DECAY * (steps - warmup_steps))), "decay_type": "linear"}
    return {
        "output_dir": "output",
        **written(
            library,
            {
                "micro_batch": chosen.even.micro_batch,
                "accumulation": chosen.even.accumulation,
                "steps": steps,
                "rate": settings.learning_rate,
                "schedule": _TRAINERS_SCHEDULES.get(schedule, schedule),
                "warmup_steps": warmup_steps,
                "decay": settings.weight_decay,
                "bf16": training.precision == "bf16",
                "fp16": training.precision == "fp16",
            },
        ),
        **({"lr_scheduler_kwargs": decay} if schedule == "wsd" else {}),
        "max_grad_norm": training.clip_norm or 0.0,
        "torch_compile": training.compile,
        "seed": training.seed % SEEDS,
    }


def adam_arguments(chosen: ChosenSettings) -> dict[str, Any]:
    """Adam's constants for Trainer or a library that is built on it."""
    settings = chosen.even_settings
    beta1, beta2 = LION_BETAS if str(chosen.optimizer).startswith("Lion") else settings.betas
    return {"adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": settings.eps}


def program(
    template: Path, chosen: ChosenSettings, notes: list[str], *, even: bool = True, **values: Any
) -> Exported:
    """A program, from a template that knows the settings and these values.

    Args:
        even: its micro-batches are those of `chosen.even`.
    """
    setup = chosen.setup
    place, _, name = schedule_reference(setup.training.schedule, setup.folder).rpartition(":")
    file = Path(place)
    own = (
        {"folder": str(file.parent), "module": file.stem}
        if place.endswith(".py")
        else {"folder": "", "module": place}
    )
    values["own_schedule"] = {**own, "name": name} if is_own(setup.training.schedule) else None
    known = {
        "chosen": chosen,
        "setup": setup,
        "training": setup.training,
        "decay": DECAY,
        "notes": notes,
        "is_even": even,
    }
    text = _environment().from_string(template.read_text(encoding="utf-8")).render(**known, **values)
    return Exported(text, tuple(notes))


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # programs, not pages: values go through `py`, comments through `comment`
    )
    environment.filters |= {"py": repr, "keywords": keywords_text, "comment": commented}
    return environment


def commented(text: str, indent: str = "") -> str:
    """Text as lines of a comment, whatever it contains.

    >>> print(commented("two\\nlines"))
    # two\\nlines
    """
    line = (
        plain(cut(str(text), 600))
        .replace("\n", "\\n")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )
    wrapped = textwrap.wrap(line, 110, break_long_words=True, break_on_hyphens=False) or [""]
    return f"\n{indent}".join(
        f"# {part}" if number == 0 else f"#   {part}" for number, part in enumerate(wrapped)
    )
