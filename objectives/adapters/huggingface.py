"""A study's trials trained by Hugging Face's `transformers.Trainer`, or by a subclass of your own.

    def train(setup):
        yield from train_with(setup, Trainer, model=..., train_dataset=..., eval_dataset=..., compute_metrics=...)

The Trainer sees every optimizer step as one batch, which holds the plan's micro-batches, and the whole budget as one epoch.
So any integer batch is exact, and the Trainer's own accumulation of equal batches is not used.
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
from ..machine.device_memory import EvaluationMemoryError, is_out_of_memory
from ..machine.environment import environment
from ..state.checkpoint import random_state, set_random_state
from .as_generator import Report, as_generator
from .driven_loop import DrivenLoop, study_faults
from .loop_task import TrainingParts, report_parts_if_profiling

try:
    import accelerate  # noqa: F401  # required by the Trainer, which reports it late
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
except ModuleNotFoundError as error:
    raise TaskError(
        f"bsearch.objectives.adapters.huggingface: expected transformers and accelerate, got no module named {error.name!r}. "
        "Install bsearch[huggingface]."
    ) from None

# Arguments that the study sets, with their keys in study.yaml.
_STUDY_KEYS = {
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
# Arguments without effect in a trial: its folder is temporary, and its samples come in their own order.
_UNSUPPORTED = (
    "output_dir",
    "save_strategy",
    "load_best_model_at_end",
    "resume_from_checkpoint",
    "push_to_hub",
    "dataloader_drop_last",
    "group_by_length",
    "train_sampling_strategy",
)
# Accelerate uses this precision where TrainingArguments say fp32; older versions leave their last one there.
_PRECISION = "ACCELERATE_MIXED_PRECISION"
# Suffixes of the metrics that the Trainer adds to the user's.
_TRAINER_METRICS = ("runtime", "samples_per_second", "steps_per_second", "jit_compilation_time", "model_preparation_time")
# A loss that changes less than this, relatively, when its denominator doubles does not divide by it.
_SAME_LOSS = 1e-3


def train_with(
    setup: TrialSetup, trainer: type[Trainer] = Trainer, *, arguments: Mapping[str, Any] | None = None, **parts: Any
) -> Iterator[Measurement]:
    """Train according to the trial's setup, and yield the metrics of `compute_metrics` at each evaluation.

    Args:
        trainer: the Trainer's class.
        arguments: of `TrainingArguments`, by name, except those that the study sets, such as the learning rate.
        parts: further arguments of the Trainer's class: model, train_dataset, eval_dataset, data_collator, compute_metrics,
            callbacks, ...

    Raises:
        TaskError: arguments that belong to the study, data without a length, several devices.
    """
    driven = DrivenLoop(setup, "transformers.Trainer")
    training_arguments = _arguments(setup, dict(arguments or {}), len(driven.plans) - driven.number)
    if "args" in parts:
        raise TaskError("train_with: expected TrainingArguments as a dict, arguments={...}; got args=")
    if (parts.get("optimizers") or (None, None))[1] is not None:
        raise TaskError(
            "train_with: optimizers: expected (optimizer, None), since training.schedule sets the rate; got a scheduler"
        )
    yield from driven.reported
    if driven.number < len(driven.plans):
        yield from as_generator(lambda report: _train(driven, trainer, training_arguments, parts, report))


def _arguments(setup: TrialSetup, given: dict[str, Any], steps: int) -> dict[str, Any]:
    """Keyword arguments for TrainingArguments.

    Raises:
        TaskError: lists all given arguments that the study sets or a trial does not support.
    """
    faults = study_faults("arguments", given, _STUDY_KEYS)
    faults += [f"arguments: {name}: not supported in a trial; remove it" for name in _UNSUPPORTED if name in given]
    if faults:
        raise TaskError("\n".join(faults))
    training, plan = setup.training, setup.plan
    # The filter of losses that are not finite would synchronise with the GPU twice a step.
    quiet = {"report_to": "none", "logging_strategy": "no", "disable_tqdm": True, "logging_nan_inf_filter": False}
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
        "seed": setup.seed % 2**32,  # NumPy's limit
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
    driven: DrivenLoop, trainer: type[Trainer], arguments: dict[str, Any], parts: dict[str, Any], report: Report[Measurement]
) -> None:
    precision = {"fp32": "no", "tf32": "no"}.get(driven.setup.training.precision, driven.setup.training.precision)
    with tempfile.TemporaryDirectory(prefix="bsearch-") as folder, environment({_PRECISION: precision}), driven.running():
        args = TrainingArguments(output_dir=folder, **arguments)
        if args.n_gpu > 1:
            args._n_gpu = 1  # otherwise it would use every visible GPU for one trial
        driven_class = type(trainer.__name__, (_DrivenTrainer, trainer), {"driven": driven})
        driven_trainer = driven_class(args=args, **parts)
        driven_trainer.remove_callback(PrinterCallback)  # it prints when there is no progress bar
        driven_trainer.add_callback(_MeasuringCallback(driven_trainer, driven, report))
        driven_trainer.train()
        if driven.setup.model_folder is not None and driven.done:
            driven_trainer.save_model(driven.setup.model_folder)


class _Step:
    """One batch to the Trainer: all micro-batches of a step."""

    def __init__(self, plan: BatchPlan, micro_batches: list[Any]) -> None:
        self.plan, self.micro_batches = plan, micro_batches


class _Steps:
    """The loader to the Trainer: one batch per step."""

    def __init__(self, driven: DrivenLoop, loader: Any) -> None:
        self.driven, self.dataset = driven, loader.dataset
        driven.loader = loader
        self._steps = len(driven.plans) - driven.number

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        while self.driven.number < len(self.driven.plans) and not self.driven.diverged:
            yield from self.driven.micro_batches()


class _ConstantRate(torch.optim.lr_scheduler.LRScheduler):
    """Leaves the rate unchanged: the study's schedule sets it, by samples seen rather than steps."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


class _DrivenTrainer:
    """Overrides of a Trainer in a trial; mixed into the user's class, whose methods it calls."""

    driven: DrivenLoop
    step_loss: Tensor  # the last step's mean loss
    counts_items: bool  # whether the Trainer passes the step's number of items to the loss
    _share: float | None = None  # of the micro-batch in its step, where its loss is a mean over the micro-batch
    _divides: bool | None = None  # whether the loss divides by the step's number of items; None until checked

    def get_train_dataloader(self) -> Any:
        return _Steps(self.driven, super().get_train_dataloader())  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *device: Any) -> Any:
        plan = self.driven.plan
        micro_batches, items = super().get_batch_samples(epoch_iterator, len(plan.micro_batches()), *device)  # type: ignore[misc]
        self.counts_items = items is not None
        return [_Step(plan, micro_batches)], items

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = _ConstantRate(optimizer or self.optimizer)  # type: ignore[attr-defined]
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: _Step, num_items_in_batch: Any = None) -> Tensor:
        """Train on every micro-batch of the step, each weighted by its share of the step's loss."""
        micro_batches = inputs.micro_batches
        shares: list[float | None] = [None] * len(micro_batches)
        if len(micro_batches) > 1:
            if self._divides is None:
                self._divides = self._divides_by_items(model, micro_batches[0], num_items_in_batch)
            if not self._divides:
                shares = self._shares(inputs)
        self.step_loss = torch.zeros((), device=self.driven.device)
        for number, share in enumerate(shares):
            self._share = share
            self.step_loss = self.step_loss + super().training_step(model, micro_batches[number], num_items_in_batch)  # type: ignore[misc]
            micro_batches[number] = None  # frees its memory
        self._share = None
        return self.step_loss

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        result = super().compute_loss(model, inputs, return_outputs=return_outputs, **more)  # type: ignore[misc]
        if self._share is None:
            return result
        return (result[0] * self._share, *result[1:]) if return_outputs else result * self._share

    def floating_point_ops(self, inputs: _Step) -> int:
        return 0  # only used in the Trainer's logs, and the micro-batches are freed by then

    def _shares(self, step: _Step) -> list[float | None]:
        """Each micro-batch's share of a step whose loss is a mean: by labels not ignored, or by samples without labels."""
        labels = [one.get("labels") if isinstance(one, Mapping) else None for one in step.micro_batches]
        if all(isinstance(label, Tensor) for label in labels):
            counts = [int(label.ne(-100).sum()) for label in labels if label is not None]
        else:
            counts = list(step.plan.micro_batches())
        return [count / max(sum(counts), 1) for count in counts]

    def _divides_by_items(self, model: nn.Module, inputs: Any, items: Any) -> bool:
        """Whether the loss changes when the number of items doubles: models may accept the number and ignore it."""
        if items is None:
            return False
        was_training, rng_state = model.training, random_state(self.driven.device)
        on_device = to_device(inputs, self.driven.device)
        model.eval()
        with torch.no_grad(), self.compute_loss_context_manager():  # type: ignore[attr-defined]
            once, twice = (
                float(self.compute_loss(model, dict(on_device), num_items_in_batch=items * times)) for times in (1, 2)
            )
        model.train(was_training)
        set_random_state(rng_state, self.driven.device)
        return abs(once - twice) > _SAME_LOSS * abs(once)


class _MeasuringCallback(TrainerCallback):
    """Advances the driven loop with the Trainer's steps, and reports its evaluations."""

    def __init__(self, trainer: Any, driven: DrivenLoop, report: Report[Measurement]) -> None:
        self.trainer, self.driven, self.report = trainer, driven, report

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        optimizer = self.trainer.optimizer
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        self.driven.start(self.trainer.model, getattr(optimizer, "optimizer", optimizer), scaler)

    def _parts(self) -> TrainingParts:
        self.trainer.model.train()  # as the Trainer's step begins
        return TrainingParts(self.trainer.model, self.driven.optimizer, self.driven.fetcher(), self._loss)

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, as the Trainer computes it."""
        device = next(model.parameters()).device
        items = torch.ones((), dtype=torch.int64, device=device) if self.trainer.counts_items else None
        # Only the model's own forward pass is under autocast, which Accelerate has wrapped around it.
        with torch.autocast(self.driven.device.type, enabled=False), self.trainer.compute_loss_context_manager():
            loss: Tensor = self.trainer.compute_loss(model, batch, num_items_in_batch=items)
        return loss

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.report.raise_if_stopped()
        report_parts_if_profiling(self.report, self._parts)
        self.driven.before_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not self.driven.after_step(self.trainer.step_loss):
            return
        try:
            metrics = self.trainer.evaluate()
        except Exception as error:
            if is_out_of_memory(error):
                raise EvaluationMemoryError(str(error)) from error
            raise
        scores = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        self.report(self.driven.measurement({name: value for name, value in scores.items() if _is_score(name, value)}))
        control.should_training_stop = control.should_training_stop or self.driven.diverged
        self.driven.resume_clock()


def _is_score(name: str, value: Any) -> bool:
    return (
        name != "epoch"
        and not name.endswith(_TRAINER_METRICS)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    )
