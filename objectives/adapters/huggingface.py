"""A study's trials trained by Hugging Face's `transformers.Trainer`, or by a subclass of your own.

    def train(setup):
        yield from train_with(setup, Trainer, model=..., train_dataset=..., eval_dataset=..., compute_metrics=...)

The Trainer sees every optimizer step as one batch, made of the plan's passes, and the whole budget as one epoch; so any
integer batch is exact, and its own accumulation of equal batches is not used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...spaces.errors import TaskError
from ...spaces.plan import BatchPlan
from ...spaces.trial import Measurement, TrialSetup
from ..batches import to_device
from ..checkpoint import random_state, set_random_state
from ..environment import environment
from ..training import EvaluationMemoryError, is_out_of_memory
from .as_generator import Tell, as_generator
from .pace import Pace, study_faults

try:
    import accelerate  # noqa: F401  # the Trainer needs it, and says so late
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
except ModuleNotFoundError as error:
    raise TaskError(
        f"bsearch.objectives.adapters.huggingface: expected transformers and accelerate, got no module named {error.name!r}. "
        "Install bsearch[huggingface]."
    ) from None

# What the study says, by the key of study.yaml that says it.
_OF_THE_STUDY = {
    "learning_rate": "space.reference_rate",
    "weight_decay": "space.weight_decay",
    "adam_beta1": "training.betas",
    "adam_beta2": "training.betas",
    "adam_epsilon": "training.eps",
    "lr_scheduler_type": "training.schedule",
    "lr_scheduler_kwargs": "training.schedule",
    "warmup_steps": "training.warmup",
    "warmup_ratio": "training.warmup",
    "max_grad_norm": "training.clip_norm",
    "per_device_train_batch_size": "space.effective_batch",
    "gradient_accumulation_steps": "space.accumulation",
    "auto_find_batch_size": "memory",
    "num_train_epochs": "space.epochs",
    "max_steps": "space.epochs",
    "seed": "training.seed",
    "data_seed": "training.seed",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "torch_compile": "training.compile",
    "dataloader_num_workers": "training.workers",
    "dataloader_pin_memory": "training.pin_memory",
    "eval_strategy": "training.evaluations",
    "eval_steps": "training.evaluations",
    "use_cpu": "devices.kind",
}
# What a trial has no use for: its folder is gone when it ends, and its samples come in an order of their own.
_WITHOUT_USE = (
    "output_dir",
    "save_strategy",
    "load_best_model_at_end",
    "resume_from_checkpoint",
    "push_to_hub",
    "dataloader_drop_last",
    "group_by_length",
    "train_sampling_strategy",
)
# Accelerate trains in this precision where TrainingArguments say fp32, and older ones leave their last one there.
_PRECISION = "ACCELERATE_MIXED_PRECISION"
# What the Trainer adds to a user's metrics.
_SPEEDS = ("runtime", "samples_per_second", "steps_per_second", "jit_compilation_time", "model_preparation_time")
# A loss that stays within this of itself when its denominator doubles does not divide by it.
_ALIKE = 1e-3


def train_with(
    setup: TrialSetup, trainer: type[Trainer] = Trainer, *, arguments: Mapping[str, Any] | None = None, **parts: Any
) -> Iterator[Measurement]:
    """Train as the trial's setup says, and yield what `compute_metrics` finds at each evaluation.

    Args:
        trainer: the Trainer's class.
        arguments: of `TrainingArguments`, by name; all but what the study says, such as the learning rate.
        parts: what else the Trainer's class takes: model, train_dataset, eval_dataset, data_collator, compute_metrics,
            callbacks, ...

    Raises:
        TaskError: arguments that belong to the study, data without a length, several devices.
    """
    pace = Pace(setup, "transformers.Trainer")
    made = _arguments(setup, dict(arguments or {}), len(pace.plans) - pace.number)
    if "args" in parts:
        raise TaskError("train_with: expected TrainingArguments as a dict, arguments={...}; got args=")
    if (parts.get("optimizers") or (None, None))[1] is not None:
        raise TaskError(
            "train_with: optimizers: expected (optimizer, None), for training.schedule moves the rate; got a scheduler"
        )
    yield from pace.told
    if pace.number < len(pace.plans):
        yield from as_generator(lambda tell: _train(pace, trainer, made, parts, tell))


def _arguments(setup: TrialSetup, given: dict[str, Any], steps: int) -> dict[str, Any]:
    """Keywords of TrainingArguments.

    Raises:
        TaskError: some that the study says, all of them told at once.
    """
    faults = study_faults("arguments", given, _OF_THE_STUDY)
    faults += [f"arguments: {name}: a trial has no use for it; leave it out" for name in _WITHOUT_USE if name in given]
    if faults:
        raise TaskError("\n".join(faults))
    training, plan = setup.training, setup.plan
    quiet = {"report_to": "none", "logging_strategy": "no", "disable_tqdm": True}
    if "logging_steps" in given:
        del quiet["logging_strategy"]
    evaluation = {"per_device_eval_batch_size": plan.largest_micro_batch, **given}["per_device_eval_batch_size"]
    return {
        **quiet,
        **given,
        "learning_rate": setup.learning_rate,
        "weight_decay": setup.weight_decay,
        "adam_beta1": setup.betas[0],
        "adam_beta2": setup.betas[1],
        "adam_epsilon": setup.eps,
        "max_grad_norm": training.clip_norm or 0.0,
        "per_device_train_batch_size": plan.largest_micro_batch,
        "per_device_eval_batch_size": setup.evaluation_batch or evaluation,
        "gradient_accumulation_steps": 1,
        "max_steps": steps,
        "seed": setup.seed % 2**32,  # NumPy takes no more
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "torch_compile": training.compile,
        "dataloader_num_workers": training.workers,
        "dataloader_pin_memory": training.pin_memory and setup.device == "gpu",
        "use_cpu": setup.device == "cpu",
        "eval_strategy": "no",
        "save_strategy": "no",
    }


def _train(
    pace: Pace, trainer: type[Trainer], arguments: dict[str, Any], parts: dict[str, Any], tell: Tell[Measurement]
) -> None:
    precision = {"fp32": "no"}.get(pace.setup.training.precision, pace.setup.training.precision)
    with tempfile.TemporaryDirectory(prefix="bsearch-") as folder, environment({_PRECISION: precision}), pace.running():
        args = TrainingArguments(output_dir=folder, **arguments)
        if args.n_gpu > 1:
            args._n_gpu = 1  # else it would spread one trial over every GPU it sees
        paced = type(trainer.__name__, (_PacedTrainer, trainer), {"pace": pace})
        made = paced(args=args, **parts)
        made.remove_callback(PrinterCallback)  # it prints where there is no progress bar
        made.add_callback(_Measures(made, pace, tell))
        made.train()


class _Step:
    """What the Trainer takes for one batch: a step's passes."""

    def __init__(self, plan: BatchPlan, micro_batches: list[Any]) -> None:
        self.plan, self.micro_batches = plan, micro_batches


class _Steps:
    """What the Trainer takes for its loader: as many batches as there are steps."""

    def __init__(self, pace: Pace, loader: Any) -> None:
        self.pace, self.dataset, self._loader = pace, loader.dataset, loader
        self._left = len(pace.plans) - pace.number

    def __len__(self) -> int:
        return self._left

    def __iter__(self) -> Iterator[Any]:
        while self.pace.number < len(self.pace.plans) and not self.pace.lost:
            yield from self.pace.micro_batches(self._loader)


class _StandingRate(torch.optim.lr_scheduler.LRScheduler):
    """Leaves the rate to the study's schedule, which follows the samples seen and not the steps."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


class _PacedTrainer:
    """What a Trainer does otherwise in a trial; mixed into the user's own class, whose methods it calls."""

    pace: Pace
    step_loss: Tensor  # the mean over the step that was taken last
    _share: float | None = None  # of the pass in its step, where its loss is a mean over the pass alone
    _divides: bool | None = None  # whether the loss divides by the step's number of items; None until it was looked at

    def get_train_dataloader(self) -> Any:
        return _Steps(self.pace, super().get_train_dataloader())  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *device: Any) -> Any:
        plan = self.pace.plan
        micro_batches, items = super().get_batch_samples(epoch_iterator, len(plan.micro_batches()), *device)  # type: ignore[misc]
        return [_Step(plan, micro_batches)], items

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = _StandingRate(optimizer or self.optimizer)  # type: ignore[attr-defined]
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: _Step, num_items_in_batch: Any = None) -> Tensor:
        """Every pass of the step, each with its share of the step's loss."""
        micro_batches = inputs.micro_batches
        shares: list[float | None] = [None] * len(micro_batches)
        if len(micro_batches) > 1:
            if self._divides is None:
                self._divides = self._divides_by_items(model, micro_batches[0], num_items_in_batch)
            if not self._divides:
                shares = self._shares(inputs)
        self.step_loss = torch.zeros((), device=self.pace.device)
        for number, share in enumerate(shares):
            self._share = share
            self.step_loss = self.step_loss + super().training_step(model, micro_batches[number], num_items_in_batch)  # type: ignore[misc]
            micro_batches[number] = None  # what was trained on makes room
        self._share = None
        return self.step_loss

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        found = super().compute_loss(model, inputs, return_outputs=return_outputs, **more)  # type: ignore[misc]
        if self._share is None:
            return found
        return (found[0] * self._share, *found[1:]) if return_outputs else found * self._share

    def floating_point_ops(self, inputs: _Step) -> int:
        return 0  # counted for the Trainer's own logs alone, and a step's passes are gone by then

    def _shares(self, step: _Step) -> list[float | None]:
        """Each pass's part of a step whose loss is a mean: over labels that count, or over samples where it has none."""
        labels = [one.get("labels") if isinstance(one, Mapping) else None for one in step.micro_batches]
        if all(isinstance(some, Tensor) for some in labels):
            counts = [int(some.ne(-100).sum()) for some in labels if some is not None]
        else:
            counts = list(step.plan.micro_batches())
        return [count / max(sum(counts), 1) for count in counts]

    def _divides_by_items(self, model: nn.Module, inputs: Any, items: Any) -> bool:
        """Whether the loss halves when the number of items doubles: models may take the number and not use it."""
        if items is None:
            return False
        kept, dice = model.training, random_state(self.pace.device)
        there = to_device(inputs, self.pace.device)
        model.eval()
        with torch.no_grad(), self.compute_loss_context_manager():  # type: ignore[attr-defined]
            once, twice = (float(self.compute_loss(model, dict(there), num_items_in_batch=items * times)) for times in (1, 2))
        model.train(kept)
        set_random_state(dice, self.pace.device)
        return abs(once - twice) > _ALIKE * abs(once)


class _Measures(TrainerCallback):
    """Walks the pace with the Trainer's steps, and tells what its evaluations find."""

    def __init__(self, trainer: Any, pace: Pace, tell: Tell[Measurement]) -> None:
        self.trainer, self.pace, self.tell = trainer, pace, tell

    def on_train_begin(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        optimizer = self.trainer.optimizer
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        self.pace.begin(self.trainer.model, getattr(optimizer, "optimizer", optimizer), scaler)

    def on_step_begin(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        self.tell.go_on()
        self.pace.before_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        if not self.pace.after_step(self.trainer.step_loss):
            return
        try:
            found = self.trainer.evaluate()
        except Exception as error:
            if is_out_of_memory(error):
                raise EvaluationMemoryError(str(error)) from error
            raise
        scores = {name.removeprefix("eval_"): value for name, value in found.items()}
        self.tell(self.pace.measurement({name: value for name, value in scores.items() if _is_score(name, value)}))
        control.should_training_stop = control.should_training_stop or self.pace.lost
        self.pace.go_on()


def _is_score(name: str, value: Any) -> bool:
    return name != "epoch" and not name.endswith(_SPEEDS) and isinstance(value, int | float) and not isinstance(value, bool)
