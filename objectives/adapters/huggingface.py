"""A study's trials trained by Hugging Face's `transformers.Trainer`, or by a subclass of your own.

    def train(setup):
        yield from train_with(setup, Trainer, model=..., train_dataset=..., eval_dataset=..., compute_metrics=...)

The Trainer sees every optimizer step as one batch, which holds the plan's micro-batches, and the whole budget as one epoch.
So any integer batch is exact, and the Trainer's own accumulation of equal batches is not used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...spaces.errors import TaskError
from ...spaces.trial import TRAINER_EVALUATION_BATCH, Measurement, TrialSetup
from ..loading import line_of
from ..machine.device_memory import evaluating
from ..machine.environment import environment
from .as_generator import Report, as_generator
from .coupled_loss import BatchLoss, Embed, coupled_loss
from .driven_loop import DrivenLoop, study_faults
from .driven_trainer import DrivenTrainer
from .loop_task import TrainingParts, report_parts_if_profiling

try:
    import accelerate  # noqa: F401  # required by the Trainer, which reports it late
    from transformers import (
        EarlyStoppingCallback,
        PrinterCallback,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
except ModuleNotFoundError as error:
    raise TaskError(
        f"bsearch.objectives.adapters.huggingface: expected transformers and accelerate, got no module named {error.name!r}. "
        "Install them: pip install transformers accelerate"
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
    "use_legacy_prediction_loop",
)
# Accelerate uses this precision where TrainingArguments say fp32; older versions leave their last one there.
_PRECISION = "ACCELERATE_MIXED_PRECISION"
# Suffixes of the metrics that the Trainer adds to the user's.
_TRAINER_METRICS = (
    "runtime",
    "samples_per_second",
    "steps_per_second",
    "jit_compilation_time",
    "model_preparation_time",
)


def train_with(
    setup: TrialSetup,
    trainer: type[Trainer] = Trainer,
    *,
    arguments: Mapping[str, Any] | None = None,
    denominator: Callable[[Any], Tensor | float] | None = None,
    couples_samples: bool = False,
    embed: Embed | None = None,
    batch_loss: BatchLoss | None = None,
    **parts: Any,
) -> Iterator[Measurement]:
    """Train according to the trial's setup, and yield the metrics of `compute_metrics` at each evaluation.

    Args:
        trainer: the Trainer's class.
        arguments: of the trainer's own class of arguments, such as `SFTConfig`, or of `TrainingArguments`, by name; those that
            the study sets, such as the learning rate, are refused.
        denominator: what the mean loss of a batch divides by, given the batch on the CPU as the collator returns it, such as
            `lambda batch: weights[batch["labels"]].sum()` for class weights; default: its labels other than -100, or its
            samples if it has no labels.
        couples_samples: whether the loss compares the samples of a batch, as contrastive losses do: no step may be split.
        embed, batch_loss: such a loss, split exactly, instead of the Trainer's: see `coupled_loss`. Then no `eval_loss` is
            reported, which would depend on the evaluation batch.
        parts: further arguments of the Trainer's class: model, train_dataset, eval_dataset, data_collator, compute_metrics,
            callbacks, ...

    Raises:
        TaskError: arguments that belong to the study, data without a length or in an order of their own, several devices.
    """
    loss = coupled_loss(embed, batch_loss, couples_samples=couples_samples)
    driven = DrivenLoop(setup, "transformers.Trainer", couples_samples, loss)
    given = dict(arguments or {})
    faults = _faults(given, parts) + list(_override_faults(trainer))
    if loss is not None and denominator is not None:
        faults.append(
            "train_with: denominator: expected None with batch_loss, which returns the mean over its samples"
        )
    if loss is not None and trainer.training_step is not Trainer.training_step:
        faults.append(
            f"{trainer.__name__}.training_step: expected the Trainer's with batch_loss, which replaces it; got an override"
        )
    if faults:
        raise TaskError("\n".join(faults))
    if loss is not None:
        given.setdefault("remove_unused_columns", False)  # what `embed` reads, the Trainer cannot know
    training_arguments = _arguments(setup, given, len(driven.plans) - driven.number)
    divides_by = None if denominator is None else staticmethod(denominator)
    driven_class = type(
        trainer.__name__, (DrivenTrainer, trainer), {"driven": driven, "user_denominator": divides_by}
    )
    yield from driven.reported
    if driven.number < len(driven.plans):
        yield from as_generator(
            lambda report: _train(driven, driven_class, training_arguments, parts, report)
        )


def _faults(given: Mapping[str, Any], parts: Mapping[str, Any]) -> list[str]:
    """What the study sets, or a trial does not support, among the user's arguments."""
    faults = study_faults("arguments", given, _STUDY_KEYS)
    faults += [
        f"arguments: {name}: not supported in a trial; remove it" for name in _UNSUPPORTED if name in given
    ]
    if "args" in parts:
        faults.append("train_with: expected TrainingArguments as a dict, arguments={...}; got args=")
    if (parts.get("optimizers") or (None, None))[1] is not None:
        faults.append(
            "train_with: optimizers: expected (optimizer, None), since training.schedule sets the rate; got a scheduler. For "
            "one of your own write training.schedule: module:function"
        )
    for callback in parts.get("callbacks") or ():
        if issubclass(callback if isinstance(callback, type) else type(callback), EarlyStoppingCallback):
            faults.append(
                "train_with: callbacks: expected no EarlyStoppingCallback, since the study stops trials; write `stopping:` in "
                "study.yaml"
            )
    return faults


def _override_faults(trainer: type[Trainer]) -> Iterator[str]:
    """What a user's class overrides and a trial replaces."""
    if trainer.create_scheduler is not Trainer.create_scheduler:
        yield (
            f"{trainer.__name__}.create_scheduler: expected the Trainer's, since training.schedule sets the rate; got an "
            "override. Remove it; for a schedule of your own write training.schedule: module:function."
        )
    for name in sorted({*vars(DrivenTrainer), *DrivenTrainer.__annotations__} - {*dir(Trainer)}):
        if hasattr(trainer, name):
            yield f"{trainer.__name__}.{name}: expected another name, since a trial's Trainer has one of this name. Rename it."


def _arguments(setup: TrialSetup, given: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Keyword arguments for TrainingArguments."""
    training, plan = setup.training, setup.plan
    # The filter of losses that are not finite would synchronise with the GPU twice a step.
    quiet = {
        "report_to": "none",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
    }
    if "logging_steps" in given:
        del quiet["logging_strategy"]
    # The user's, or less where that ran out of memory in an earlier attempt.
    evaluation = [size for size in (given.get("per_device_eval_batch_size"), setup.evaluation_batch) if size]
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
        "per_device_eval_batch_size": min(evaluation, default=TRAINER_EVALUATION_BATCH),
        "gradient_accumulation_steps": 1,
        "max_steps": steps,
        "seed": setup.seed % 2**32,  # NumPy's limit
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "torch_compile": training.compile,
        "dataloader_num_workers": training.workers,
        "use_cpu": setup.device == "cpu",
        "eval_strategy": "no",
        "save_strategy": "no",
    }


def _train(
    driven: DrivenLoop,
    driven_class: type,
    arguments: dict[str, Any],
    parts: dict[str, Any],
    report: Report[Measurement],
) -> None:
    precision = {"fp32": "no", "tf32": "no"}.get(
        driven.setup.training.precision, driven.setup.training.precision
    )
    with (
        tempfile.TemporaryDirectory(prefix="bsearch-") as folder,
        environment({_PRECISION: precision}),
        driven.running(),
    ):
        args = _arguments_class(driven_class)(output_dir=folder, **arguments)
        if args.n_gpu > 1:
            args._n_gpu = 1  # otherwise it would use every visible GPU for one trial
        driven_trainer = driven_class(args=args, **parts)
        driven_trainer.remove_callback(PrinterCallback)  # it prints when there is no progress bar
        driven_trainer.add_callback(_MeasuringCallback(driven_trainer, driven, report))
        driven_trainer.train()
        if not (driven.done or driven.diverged):
            raise driven.ended_early(
                "a callback set control.should_training_stop or control.should_epoch_stop"
            )
        if driven.setup.model_folder is not None and driven.done:
            driven_trainer.save_model(driven.setup.model_folder)


def _arguments_class(trainer: Any) -> type[TrainingArguments]:
    """The trainer's own class of arguments, as sentence-transformers' and TRL's have: by its attribute, or by the type of its
    argument `args`.
    """
    if found := getattr(trainer, "training_args_class", None):
        return found  # type: ignore[no-any-return]
    # Its hint is that of the Trainer.
    kinds: list[type[TrainingArguments]] = [
        Seq2SeqTrainingArguments if issubclass(trainer, Seq2SeqTrainer) else TrainingArguments
    ]
    for base in trainer.__mro__:
        if "__init__" in vars(base):
            with suppress(NameError, TypeError):  # of types that only a checker imports
                hint = get_type_hints(base.__init__).get("args")
                members = get_args(hint) or (hint,)
                kinds += [
                    kind for kind in members if isinstance(kind, type) and issubclass(kind, TrainingArguments)
                ]
    return max(kinds, key=lambda kind: len(kind.__mro__))


class _MeasuringCallback(TrainerCallback):
    """Advances the driven loop with the Trainer's steps, and reports its evaluations."""

    def __init__(self, trainer: Any, driven: DrivenLoop, report: Report[Measurement]) -> None:
        self.trainer, self.driven, self.report = trainer, driven, report

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        optimizer = self.trainer.optimizer
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        self.driven.prepare(self.trainer.model, getattr(optimizer, "optimizer", optimizer), scaler)

    def _parts(self) -> TrainingParts:
        self.trainer.model.train()  # as the Trainer's step begins
        return TrainingParts(
            self.trainer.model,
            self.driven.optimizer,
            self.driven.training_data(),
            self._loss,
            self._accumulate,
            self.driven.couples_samples,
            weights=self.driven.weights(),
            coupled_loss=None
            if self.driven.coupled_loss is None
            else self.driven.coupled_loss.given(context=self._context),
        )

    def _accumulate(self, micro_batches: Sequence[tuple[int, Any]]) -> Tensor:
        model = self.trainer.model_wrapped
        items = self.trainer.number_of_items([batch for _, batch in micro_batches])
        # The Trainer calls it in every pass; the modules' modes are the caller's.
        with patch.object(model, "train"):
            loss: Tensor = self.trainer.accumulate_step(model, list(micro_batches), items)
        return loss

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, as the Trainer computes it."""
        device = next(model.parameters()).device
        items = torch.ones((), dtype=torch.int64, device=device) if self.trainer.counts_items else None
        with self._context():
            loss: Tensor = self.trainer.compute_loss(model, batch, num_items_in_batch=items)
        return loss

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Context of the loss: only the model's own forward pass is under autocast, which Accelerate has wrapped around it."""
        with (
            torch.autocast(self.driven.device.type, enabled=False),
            self.trainer.compute_loss_context_manager(),
        ):
            yield

    def _loss_location(self) -> str:
        """Where the loss is computed, for messages: in the user's Trainer, or in the model."""
        if self.driven.coupled_loss is not None:
            return self.driven.coupled_loss.where(self.driven.setup)
        kinds: Any = type(self.trainer).__mro__[1:]
        own = next(kind for kind in kinds if "compute_loss" in vars(kind) and kind is not DrivenTrainer)
        if own is Trainer:
            return f"transformers.Trainer, the loss of {type(self.trainer.model).__name__}"
        return f"{line_of(own.compute_loss, self.driven.setup.folder)}{own.__name__}.compute_loss"

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.report.raise_if_stopped()
        report_parts_if_profiling(self.report, self._parts, self._loss_location, self.driven.setup)
        self.driven.before_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not self.driven.after_step(self.trainer.step_loss):
            return
        with evaluating():
            metrics = self.trainer.evaluate()
        scores = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        self.report(
            self.driven.measurement({name: value for name, value in scores.items() if _is_score(name, value)})
        )
        control.should_training_stop = control.should_training_stop or self.driven.diverged
        self.driven.resume_clock()


def _is_score(name: str, value: Any) -> bool:
    return (
        name != "epoch"
        and not name.endswith(_TRAINER_METRICS)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    )
