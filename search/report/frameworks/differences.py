"""How a framework trains otherwise than the trial did: notes, for people to read beside the exported text."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from ....spaces.learning_rate import OptimizerSettings
from ....spaces.schedule import is_own
from .settings import ChosenSettings

# torch's optimizers: the arguments they take besides learning rate and weight decay.
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "SGD": ("momentum", "nesterov", "dampening", "maximize"),
    "Adam": ("betas", "eps", "amsgrad", "maximize", "decoupled_weight_decay"),
    "AdamW": ("betas", "eps", "amsgrad", "maximize"),
    "Adamax": ("betas", "eps", "maximize"),
    "NAdam": ("betas", "eps", "momentum_decay", "decoupled_weight_decay", "maximize"),
    "RAdam": ("betas", "eps", "decoupled_weight_decay", "maximize"),
}
# Those that are written only where a trial had another value.
_USUAL = {
    "dampening": 0,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": False,
    "momentum_decay": 4e-3,
}

# Those of bitsandbytes, by Trainer's names.
BITSANDBYTES = {"AdamW8bit": "adamw_bnb_8bit", "Lion": "lion_32bit", "Lion8bit": "lion_8bit"}

# SGD momentum of `Task` and the built-in tasks, for studies that did not record it.
USUAL_MOMENTUM = 0.9

# NumPy's seeds are smaller than this, and most frameworks seed NumPy.
SEEDS = 2**32


def torch_optimizer(chosen: ChosenSettings, settings: OptimizerSettings) -> tuple[str, dict[str, Any]]:
    """A class of `torch.optim` and its keyword arguments; AdamW as a placeholder for other optimizers."""
    name = chosen.optimizer if chosen.optimizer in OPTIMIZERS else "AdamW"
    known: dict[str, Any] = {"momentum": USUAL_MOMENTUM, "nesterov": True, **_USUAL}
    known |= {name: value for name, value in chosen.main.items() if not isinstance(value, str)}
    known |= {"betas": settings.betas, "eps": settings.eps}
    keywords = {
        keyword: known[keyword] for keyword in OPTIMIZERS[name] if known[keyword] != _USUAL.get(keyword)
    }
    return name, {"lr": settings.learning_rate, **keywords, "weight_decay": settings.weight_decay}


def keywords_text(values: Mapping[str, Any]) -> str:
    """Values as a call has them."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


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
    elif chosen.optimizer == "SGD" and not chosen.groups:
        yield f"the trial's momentum was not recorded: assuming Nesterov {USUAL_MOMENTUM}, as in bsearch's own tasks"
    changed = [
        f"{name} {value}"
        for name, value in chosen.main.items()
        if name != "optimizer" and isinstance(value, str)
    ]
    if changed:
        yield f"the trial's optimizer changed its settings in training ({', '.join(changed)}), which is not done here"
    for group in chosen.groups[1:]:
        differs = {name: value for name, value in group.items() if value != chosen.main.get(name)}
        yield f"the trial's optimizer had another group, which is not made here: {keywords_text(differs)}"


def even_notes(chosen: ChosenSettings, flushes: bool = True) -> Iterator[str]:
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
        padded = (
            ", padded with the epoch's first samples if devices' shares would differ"
            if even.devices > 1
            else ""
        )
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
    if is_sharded(chosen):
        yield (
            "the trial sharded parameters, gradients and the optimizer state over its devices (fsdp2); where this is not done, "
            "a device needs more memory"
        )


def checkpointing_notes(chosen: ChosenSettings, *, enabled: bool) -> Iterator[str]:
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


def is_sharded(chosen: ChosenSettings) -> bool:
    return chosen.setup.sharding != "ddp" and chosen.plan.devices > 1


def mean_notes(chosen: ChosenSettings, framework: str) -> Iterator[str]:
    if chosen.even.accumulation * chosen.even.devices > 1:
        yield (
            f"{framework} averages the micro-batches' means, which equals the step's mean only if all have the same "
            "denominator (samples, tokens or weights); for a mean over samples, that holds in every step except an epoch's last"
        )


def device_notes(chosen: ChosenSettings, argument: str) -> Iterator[str]:
    if chosen.setup.device == "cpu":
        yield f"the trial ran on a CPU, so {argument} is set; without it, on a GPU, expect a different training time"


def seed_notes(chosen: ChosenSettings) -> Iterator[str]:
    seed = chosen.setup.training.seed
    if seed >= SEEDS:
        yield f"seed {seed} becomes {seed % SEEDS}: frameworks seed NumPy, whose seeds are at most {SEEDS - 1}"


def own_schedule_notes(chosen: ChosenSettings) -> Iterator[str]:
    """What becomes of a schedule of one's own where the text cannot call it."""
    schedule = chosen.setup.training.schedule
    if is_own(schedule):
        yield f"the trial's schedule is {schedule}, which is not called here: the rate stays at its peak after warm-up"


def loop_notes(chosen: ChosenSettings, library: str, *, cpu: str, compiled: str) -> list[str]:
    """What holds for a library's own loop with the trial's schedule and one of torch's optimizers.

    Args:
        cpu: the argument that keeps training on a CPU.
        compiled: how the model is compiled.
    """
    notes = [*even_notes(chosen), *optimizer_notes(chosen), *seed_notes(chosen), *mean_notes(chosen, library)]
    notes += device_notes(chosen, cpu)
    if chosen.setup.training.precision == "tf32":
        notes.append(
            "the trial's products were rounded to tf32: call torch.set_float32_matmul_precision('high') first"
        )
    notes += checkpointing_notes(chosen, enabled=False)
    if chosen.setup.training.compile:
        notes.append(f"the trial's model was compiled: call {compiled}")
    return notes
