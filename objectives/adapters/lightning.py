"""A study's trials trained by a `lightning.Trainer`, with a LightningModule of your own.

    def train(setup):
        yield from train_with(setup, Net(setup), data=(train_loader, validation_loader))

To Lightning every micro-batch is a batch, and an epoch spans the steps between two measurements. Accumulation uses Lightning's
manual optimization: the optimizer steps after the last micro-batch of each planned step, with each micro-batch weighted by its
share of the step. A module with manual optimization of its own gets each planned step as one batch.
"""

from __future__ import annotations

import inspect
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...spaces.errors import TaskError
from ...spaces.laws.examination import Examination
from ...spaces.trial import Measurement, TrialSetup
from ..data.batches import to_device
from ..loading import line_of
from ..machine.accelerator import widest_float
from ..machine.device_memory import is_out_of_memory
from ..optimizers import Joined
from ..steps.rescale import rescale_gradients
from ..task import check_no_scheduler
from .as_generator import Report, as_generator
from .coupled_loss import BatchLoss, CoupledSteps, Embed, coupled_loss
from .driven_loop import DrivenLoop, study_faults, zero_gradients
from .loop_task import TrainingParts, report_parts_if_profiling

try:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, callbacks
    from lightning.pytorch.utilities.warnings import PossibleUserWarning
except ModuleNotFoundError as error:
    raise TaskError(
        f"bsearch.objectives.adapters.lightning: expected lightning, got no module named {error.name!r}. "
        "Install it: pip install lightning"
    ) from None

# Arguments that the study sets, with their keys in study.yaml.
_STUDY_KEYS = {
    "max_epochs": "space.epochs",
    "min_epochs": "space.epochs",
    "max_steps": "space.epochs",
    "min_steps": "space.epochs",
    "max_time": "space.epochs",
    "limit_train_batches": "space.epochs",
    "overfit_batches": "space.epochs",
    "fast_dev_run": "space.epochs",
    "accumulate_grad_batches": "space.accumulation",
    "gradient_clip_val": "training.clip_norm",
    "gradient_clip_algorithm": "training.clip_norm",
    "precision": "training.precision",
    "val_check_interval": "training.evaluations",
    "check_val_every_n_epoch": "training.evaluations",
    "num_sanity_val_steps": "training.evaluations",
    "accelerator": "devices.kind",
    "devices": "devices.per_trial",
    "num_nodes": "devices.per_trial",
    "strategy": "devices.per_trial",
    "reload_dataloaders_every_n_epochs": "training.workers",
}
# Callbacks that change what the study controls: when training ends, what a step is, the learning rate.
_REFUSED = {
    callbacks.EarlyStopping: "the study stops trials, by `stopping:` in study.yaml",
    callbacks.StochasticWeightAveraging: "it sets learning rates, which training.schedule does",
    callbacks.GradientAccumulationScheduler: "space.accumulation sets it",
    callbacks.BatchSizeFinder: "the study searches it, as space.effective_batch",
    callbacks.LearningRateFinder: "the study searches it, as space.reference_rate",
    callbacks.BaseFinetuning: "it adds parameter groups during training; freeze layers in the module",
    callbacks.ModelCheckpoint: "the study keeps checkpoints; for a trained model write bsearch train --keep model",
}
if hasattr(callbacks, "WeightAveraging"):  # since 2.6
    _REFUSED[callbacks.WeightAveraging] = (
        "its averages are in no checkpoint; average weights in the module, as buffers"
    )
# What Lightning calls in automatic optimization alone, and a planned step does not: where to put an override instead.
_NOT_CALLED = {
    "optimizer_step": "Write it in on_before_optimizer_step, or, for a rate, training.schedule: module:function.",
    "configure_gradient_clipping": "Write training.clip_norm, or clip in on_before_optimizer_step.",
    "lr_scheduler_step": "Write training.schedule: module:function.",
}
_PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def train_with(
    setup: TrialSetup,
    module: LightningModule,
    data: LightningDataModule | tuple[Any, Any] | None = None,
    *,
    couples_samples: bool = False,
    embed: Embed | None = None,
    batch_loss: BatchLoss | None = None,
    **arguments: Any,
) -> Iterator[Measurement]:
    """Train according to the trial's setup, and yield the metrics that `validation_step` logs at each evaluation.

    Args:
        module: `training_step` returns the mean loss of its batch, or `{"loss": mean, "denominator": n}` where the mean is
            not over samples, as with tokens; `configure_optimizers` returns one optimizer at `setup.learning_rate`. With manual
            optimization, `training_step` takes the steps of one or several optimizers, whose rates follow the schedule, and
            batches are never split.
        data: a data module, or a training and a validation loader; None where the module has them. Only the dataset,
            `collate_fn` and workers of the training loader are used, the weights of a `WeightedRandomSampler`, and whether it
            shuffles: the trial sets its batches.
        couples_samples: whether the loss compares the samples of a batch, as contrastive losses do: no step may be split.
        embed, batch_loss: such a loss, split exactly, instead of `training_step`: see `coupled_loss`. The model that they get
            is the module.
        arguments: of `lightning.Trainer`, except those that the study sets, such as max_epochs.

    Raises:
        TaskError: arguments that belong to the study, data without a length or in an order of their own, several devices.
    """
    loss = coupled_loss(embed, batch_loss, couples_samples=couples_samples)
    manual = not module.automatic_optimization
    driven = DrivenLoop(setup, "lightning.Trainer", couples_samples, loss, takes_steps=manual)
    driven.saves_between = False  # what it averages over an interval, it keeps to itself
    faults = study_faults("train_with", arguments, _STUDY_KEYS)
    if setup.training.compile:
        faults.append(
            "training.compile: expected false, because lightning.Trainer does not compile; got true. Compile in the module."
        )
    if manual and loss is not None:
        faults.append(
            "train_with: expected a module with automatic optimization beside embed and batch_loss, got a manual one"
        )
    if manual and setup.training.clip_norm is not None:
        faults.append(
            f"training.clip_norm: expected null, because {type(module).__name__} takes its own optimizer steps; got "
            f"{setup.training.clip_norm:g}. Clip in training_step, by self.clip_gradients."
        )
    given = arguments.pop("callbacks", None) or []
    arguments["callbacks"] = given = given if isinstance(given, list) else [given]
    faults += _callback_faults("train_with: callbacks", given)
    if any(isinstance(callback, callbacks.LearningRateMonitor) for callback in given) and not arguments.get(
        "logger"
    ):
        faults.append(
            "train_with: callbacks: expected a logger for LearningRateMonitor, got none. Pass logger=, or remove it."
        )
    faults += [
        f"{type(module).__name__}.{name}: expected Lightning's default, since a planned step does not call it; got an "
        f"override. {advice}"
        for name, advice in _NOT_CALLED.items()
        if getattr(type(module), name) is not getattr(LightningModule, name)
    ]
    if faults:
        raise TaskError("\n".join(faults))
    yield from driven.reported
    if driven.number < len(driven.plans):
        yield from as_generator(lambda report: _train(driven, module, data, arguments, report))


def _callback_faults(where: str, given: Iterable[Callback]) -> list[str]:
    return [
        f"{where}: expected no {kind.__name__}, because {reason}"
        for kind, reason in _REFUSED.items()
        if any(isinstance(callback, kind) for callback in given)
    ]


def _train(
    driven: DrivenLoop,
    module: LightningModule,
    data: Any,
    arguments: dict[str, Any],
    report: Report[Measurement],
) -> None:
    setup = driven.setup
    driver = _DrivingCallback(driven, module, report)
    with (
        tempfile.TemporaryDirectory(prefix="bsearch-") as folder,
        _quiet(),
        driven.running(),
        driver.replaced_step(module),
    ):
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
        }
        trainer = type(Trainer.__name__, (_DrivenTrainer, Trainer), {"driven": driven})(
            **{**quiet, **arguments, "callbacks": [driver, *arguments["callbacks"]]},
            accelerator=setup.device,
            devices=1,
            precision=_PRECISIONS[setup.training.precision],
            max_epochs=driven.measurements_left,
            num_sanity_val_steps=0,
        )
        try:
            if isinstance(data, tuple):
                trainer.fit(module, _MicroBatches(driven, data[0]), data[1])
            else:
                with _replaced_loader(module if data is None else data, driven):
                    trainer.fit(module, datamodule=data)
            if not (driven.done or driven.diverged):
                raise driven.ended_early(_reason(trainer))
            if setup.model_folder is not None and driven.done:
                trainer.save_checkpoint(Path(setup.model_folder) / "model.ckpt")
        except Exception as error:
            if driven.measuring and is_out_of_memory(error):
                raise TaskError(
                    f"lightning.Trainer: validation ran out of memory ({error}): make the validation loader's batches smaller"
                ) from error
            raise


def _reason(trainer: Trainer) -> str:
    """Why the loop has left out steps."""
    if trainer.should_stop:
        return "a callback or the module set trainer.should_stop"
    return "on_train_batch_start returned -1, which makes Lightning end the epoch"


class _DrivenTrainer:
    """Counters as user code expects them, although the loop's epochs are the intervals between measurements."""

    driven: DrivenLoop

    @property
    def current_epoch(self) -> int:
        return self.driven.epoch

    @property
    def max_epochs(self) -> int:
        return self.driven.epochs

    @property
    def global_step(self) -> int:
        return self.driven.number

    @property
    def estimated_stepping_batches(self) -> int:
        return len(self.driven.plans)


class _MicroBatches:
    """The loader to Lightning: the micro-batches up to the next measurement."""

    def __init__(self, driven: DrivenLoop, loader: Any) -> None:
        self.driven = driven
        driven.source = loader

    def __iter__(self) -> Iterator[Any]:
        return self.driven.batches()


class _Accumulation:
    """The gradient and the mean loss of a step over `size` samples, added up micro-batch by micro-batch.

    Args:
        outputs: of a batch and its index, what `training_step` returns.
    """

    def __init__(self, module: LightningModule, size: float, outputs: Callable[[Any, int], Any]) -> None:
        self.module, self.size, self._outputs = module, size, outputs
        # The summed loss.
        self._total = torch.zeros((), dtype=widest_float(module.device), device=module.device)
        self._denominator = 0.0  # that of its mean

    def add(self, batch: Any, index: int, samples: int) -> Any:
        """Back-propagate what `training_step` returns for a micro-batch; returns it without its graph."""
        output = self._outputs(batch, index)
        loss = _mean_loss(self.module, output)
        reported = output.get("denominator") if isinstance(output, Mapping) else None
        # Of a tensor on a GPU, this synchronises.
        denominator = float(samples if reported is None else reported)
        if not (math.isfinite(denominator) and denominator >= 0):
            raise TaskError(
                f"{type(self.module).__name__}.training_step: expected a denominator >= 0 that the mean divides by, got "
                f"{denominator}"
            )
        detached = loss.detach()
        if samples == self.size and denominator:
            self.size = denominator  # a whole step needs no weight, and hooks see its loss as it is
        if denominator:  # otherwise the mean is 0/0, and NaN times a weight of 0 is NaN
            # Summed over the step's samples; for another denominator, the gradient is rescaled in `end`.
            # As Lightning, though within training_step's context.
            with torch.autocast(self.module.device.type, enabled=False):
                self.module.manual_backward(loss * (denominator / self.size))
            self._total = self._total + detached.to(self._total.dtype) * denominator
            self._denominator += denominator
        return {**output, "loss": detached} if isinstance(output, Mapping) else detached

    def end(self) -> Tensor:
        """The step's mean loss; its gradient is complete."""
        if not self._denominator:
            zero_gradients(self.module.parameters())
            return self._total
        if self._denominator != self.size:
            gradients = [
                parameter.grad for parameter in self.module.parameters() if parameter.grad is not None
            ]
            rescale_gradients(gradients, torch.full_like(self._total, self._denominator), self.size)
        return self._total / self._denominator


class _OwnSteps:
    """A planned step of a module with manual optimization, which takes its optimizers' steps itself."""

    def __init__(self, module: LightningModule, outputs: Callable[[Any, int], Any]) -> None:
        self._module, self._outputs = module, outputs
        self._loss: Tensor | None = None
        self.taken = 0  # steps of its optimizers

    def add(self, batch: Any, index: int, samples: int) -> Any:
        """Run `training_step`; returns what it returned.

        Raises:
            TaskError: no optimizer has stepped.
        """
        output = self._outputs(batch, index)
        if not self.taken:
            raise TaskError(
                f"{type(self._module).__name__}.training_step: expected a step of an optimizer for every batch, got none in "
                f"batch {index}. Call step() of one of self.optimizers()."
            )
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self._loss = loss.detach() if isinstance(loss, Tensor) else None
        return output

    def end(self) -> Tensor | None:
        """The loss that `training_step` returned, if it did."""
        return self._loss


class _CoupledAccumulation:
    """The same for a loss over the embeddings of the whole step: its micro-batches wait in host memory for its end."""

    def __init__(self, steps: CoupledSteps) -> None:
        self._steps, self._waiting = steps, list[tuple[int, Any]]()

    def add(self, batch: Any, index: int, samples: int) -> None:
        self._waiting.append((samples, to_device(batch, torch.device("cpu"))))

    def end(self) -> Tensor:
        return self._steps.accumulate(self._waiting)


class _DrivingCallback(Callback):
    """Runs the module's training step per micro-batch, and the optimizer step after a planned step's last micro-batch."""

    def __init__(self, driven: DrivenLoop, module: LightningModule, report: Report[Measurement]) -> None:
        self.driven, self.report = driven, report
        self._training_step = module.training_step
        self._takes_index = len(inspect.signature(self._training_step).parameters) > 1
        self._next = 0  # index of the next micro-batch in its step
        self._step: _Accumulation | _CoupledAccumulation | _OwnSteps  # the current one
        self._coupled_steps: CoupledSteps | None = None
        self._loss: Tensor | None  # the last step's mean
        self._validated = False  # at the end of the loop's epoch

    @contextmanager
    def replaced_step(self, module: LightningModule) -> Iterator[None]:
        """Replace the module's training step while it trains."""

        def training_step(batch: Any, batch_idx: int) -> Any:
            return self._train_micro_batch(module, batch, batch_idx)

        was_automatic, module.automatic_optimization = module.automatic_optimization, False
        module.training_step = training_step
        try:
            yield
        finally:
            del module.training_step
            module.automatic_optimization = was_automatic

    def _train_micro_batch(self, module: LightningModule, batch: Any, index: int) -> Any:
        sizes = self.driven.plan.micro_batches()
        output = self._step.add(batch, index, sizes[self._next])
        self._next += 1
        if self._next == len(sizes):
            if isinstance(self._step, _CoupledAccumulation):
                self._clear_gradients(module, index)
            self._loss = self._step.end()
            if not self.driven.takes_steps:
                self._take_step(module)
        return output

    def _clear_gradients(self, module: LightningModule, index: int) -> None:
        """Clear the gradients of the step before, with Lightning's hooks: after the forward pass, as it does.

        Raises:
            TaskError: some are left.
        """
        loop = module.trainer.fit_loop.epoch_loop.automatic_optimization
        optimizer = module.trainer.optimizers[0]
        with torch.autocast(module.device.type, enabled=False):
            loop._on_before_zero_grad(optimizer)
            loop._optimizer_zero_grad(index, optimizer)
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        if any(gradient is not None and bool(gradient.any()) for gradient in gradients):
            raise TaskError(
                f"{type(module).__name__}.optimizer_zero_grad: expected cleared gradients, since a planned step has those of "
                "its own samples alone; got some that are not 0. Write optimizer.zero_grad()."
            )

    def _take_step(self, module: LightningModule) -> None:
        optimizer: Any = module.optimizers()
        losses = iter([self._loss])

        def closure() -> Tensor | None:
            for loss in losses:
                return loss
            raise TaskError(
                f"{type(module).__name__}.configure_optimizers: expected an optimizer that evaluates its closure once, since a "
                f"planned step has its gradient once; got {type(optimizer.optimizer).__name__}. Use another, or train a Task."
            )

        module.automatic_optimization = True  # so that it clips, after all hooks
        try:
            with torch.autocast(module.device.type, enabled=False):
                optimizer.step(closure)
        finally:
            module.automatic_optimization = False

    def _output_cleared(self, module: LightningModule, batch: Any, index: int) -> Any:
        output = self._output(batch, index)
        if self._next == 0:
            self._clear_gradients(module, index)
        return output

    def _output(self, batch: Any, index: int) -> Any:
        return self._training_step(batch, index) if self._takes_index else self._training_step(batch)

    def _accumulate(
        self, trainer: Trainer, module: LightningModule, micro_batches: Sequence[tuple[int, Any]]
    ) -> Tensor:
        """A step's gradient without a step: neither callbacks nor logs see it."""
        step = self._begun(trainer, module, sum(samples for samples, _ in micro_batches))
        with (
            patch.object(trainer, "callbacks", []),
            patch.multiple(module, log=_log_nothing, log_dict=_log_nothing),
        ):
            for index, (samples, batch) in enumerate(micro_batches):
                batch = trainer.precision_plugin.convert_input(batch)
                batch = trainer.strategy.batch_to_device(module._on_before_batch_transfer(batch))
                with trainer.precision_plugin.train_step_context():
                    step.add(batch, index, samples)
            with trainer.precision_plugin.train_step_context():
                return step.end()

    def _begun(
        self,
        trainer: Trainer,
        module: LightningModule,
        size: int,
        outputs: Callable[[Any, int], Any] | None = None,
    ) -> _Accumulation | _CoupledAccumulation:
        """A new step of `size` samples, accumulated."""
        if self.driven.coupled_loss is None:
            return _Accumulation(module, size, outputs or self._output)
        if self._coupled_steps is None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self._coupled_steps = CoupledSteps(
                self.driven.coupled_loss, module, self.driven.setup, scaler=scaler
            )
        return _CoupledAccumulation(self._coupled_steps)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if faults := _callback_faults(f"{type(pl_module).__name__}.configure_callbacks", trainer.callbacks):
            raise TaskError("\n".join(faults))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        name = type(pl_module).__name__
        several = len(trainer.optimizers) > 1 and self.driven.takes_steps
        if not (len(trainer.optimizers) == 1 or several) or trainer.lr_scheduler_configs:
            raise TaskError(
                f"{name}.configure_optimizers: expected one optimizer{' or several' * self.driven.takes_steps} and no "
                f"scheduler, since training.schedule sets the rate; got {len(trainer.optimizers)} and "
                f"{len(trainer.lr_scheduler_configs)}. For a schedule of your own write training.schedule: module:function."
            )
        # Which manual optimization refuses as an argument.
        trainer.gradient_clip_val = self.driven.setup.training.clip_norm
        # Lightning has set it to `max_epochs` of the Trainer.
        trainer.fit_loop.max_epochs = self.driven.measurements_left
        optimizer = Joined(trainer.optimizers) if several else trainer.optimizers[0]
        check_no_scheduler("lightning.Trainer: the optimizer", optimizer)
        self.driven.prepare(pl_module, optimizer, getattr(trainer.precision_plugin, "scaler", None))

    def _parts(self, trainer: Trainer, module: LightningModule) -> TrainingParts:
        def loss(copied: nn.Module, batch: Any) -> Tensor:
            return self._loss_of(trainer, copied, batch)

        def accumulate(micro_batches: Sequence[tuple[int, Any]]) -> Tensor:
            return self._accumulate(trainer, module, micro_batches)

        driven = self.driven
        coupled, data, weights = driven.coupled_loss, driven.training_data(), driven.weights()
        if coupled is not None:
            coupled = coupled.given(lambda copied, batch: self._transferred(trainer, copied, batch))
        parts = TrainingParts(
            module, driven.optimizer, data, loss, accumulate, driven.couples_samples, weights=weights
        )
        if driven.takes_steps:
            never_split = Examination(couples_samples=True, takes_steps=True)
            return replace(parts, accumulate=None, couples_samples=True, examination=never_split)
        return replace(parts, coupled_loss=coupled)

    def _transferred(self, trainer: Trainer, module: Any, batch: Any) -> Any:
        """A batch after the hooks of its transfer, for a copy of the module, whose log goes nowhere."""
        trainer.training = True  # the end of the profiled training has reset it
        module.trainer = trainer  # copies of a module have none
        module.log = module.log_dict = _log_nothing
        return module.on_after_batch_transfer(module.on_before_batch_transfer(batch, 0), 0)

    def _loss_of(self, trainer: Trainer, module: Any, batch: Any) -> Tensor:
        """The mean loss of a batch for a copy of the module."""
        batch = self._transferred(trainer, module, batch)
        step = self._training_step.__func__  # a method of the original
        if self.driven.takes_steps:
            module.optimizers = lambda **options: _StillOptimizer.all_of(trainer, module)
        output = step(module, batch, 0) if self._takes_index else step(module, batch)
        if self.driven.takes_steps:  # and its backward passes
            return (
                torch.stack(
                    [parameter.sum() for parameter in module.parameters() if parameter.requires_grad]
                ).sum()
                * 0
            )
        return _mean_loss(module, output)

    def _loss_location(self, own: type[LightningModule]) -> str:
        loss, setup = self.driven.coupled_loss, self.driven.setup
        return (
            loss.where(setup)
            if loss
            else f"{line_of(own.training_step, setup.folder)}{own.__name__}.training_step"
        )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measure(trainer)
        # Lightning starts the loader again where `current_epoch` is positive.
        if trainer.fit_loop.epoch_progress.current.completed and not trainer.current_epoch:
            iter(trainer.fit_loop._data_fetcher)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.report.raise_if_stopped()
        parts, where = partial(self._parts, trainer, pl_module), partial(self._loss_location, type(pl_module))
        report_parts_if_profiling(self.report, parts, where, self.driven.setup)
        if self._next == 0:
            if self.driven.takes_steps:
                self._step = _OwnSteps(pl_module, self._output)
            else:
                cleared = partial(self._output_cleared, pl_module)
                self._step = self._begun(trainer, pl_module, self.driven.plan.effective_batch, cleared)
            self.driven.before_step()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if isinstance(self._step, _OwnSteps):
            self._step.taken += 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._next == len(self.driven.plan.micro_batches()):
            self._next = 0
            self.driven.after_step(self._loss)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.driven.measuring:
            raise self.driven.ended_early(_reason(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.driven.diverged
        self._validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validated:
            return
        if not self.driven.measuring:
            raise self.driven.ended_early(_reason(trainer))
        raise TaskError(
            f"{type(pl_module).__name__}: expected a validation_step that logs {self.driven.setup.metric!r}, and "
            "validation data; got no validation"
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measure(trainer)

    def _measure(self, trainer: Trainer) -> None:
        """Report the interval that is over: with the means over it, and after all hooks of its end."""
        if self._validated:
            self._validated = False
            self.report(
                self.driven.measurement(
                    {name: float(value) for name, value in trainer.callback_metrics.items()}
                )
            )
            self.driven.resume_clock()


class _StillOptimizer:
    """In the place of an optimizer where a copy of its module is traced: the probe takes the step.

    Args:
        parameters: of the copy that the optimizer's stand for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self.param_groups, self.optimizer, self.defaults = (
            optimizer.param_groups,
            optimizer,
            optimizer.defaults,
        )
        self._parameters = parameters

    @classmethod
    def all_of(cls, trainer: Trainer, copied: nn.Module) -> Any:
        """What a module's `optimizers()` returns: one, or a list of several."""
        assert trainer.lightning_module is not None
        pairs = zip(trainer.lightning_module.parameters(), copied.parameters(), strict=True)
        copies = {id(original): parameter for original, parameter in pairs}
        made = [
            cls(
                optimizer,
                [copies[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]],
            )
            for optimizer in trainer.optimizers
        ]
        return made if len(made) > 1 else made[0]

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        yield


def _mean_loss(module: LightningModule, output: Any) -> Tensor:
    """The loss in what a module's `training_step` returned."""
    if output is None:
        raise TaskError(
            f"{type(module).__name__}.training_step: expected the batch's mean loss, got None, which would make Lightning skip "
            'the micro-batch. If nothing in it counts, return {"loss": loss, "denominator": 0}.'
        )
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TaskError(
            f"{type(module).__name__}.training_step: expected the batch's mean loss, or a dict with `loss`, got "
            f"{type(output).__name__}"
        )
    return loss


def _log_nothing(*values: Any, **options: Any) -> None:
    """In the place of a module's `log`."""


@contextmanager
def _replaced_loader(owner: Any, driven: DrivenLoop) -> Iterator[None]:
    """Replace the training loader of a data module, or of a module that has its own."""
    original: Callable[[], Any] = owner.train_dataloader

    def train_dataloader() -> _MicroBatches:
        return _MicroBatches(driven, original())

    owner.train_dataloader = train_dataloader
    try:
        yield
    finally:
        del owner.train_dataloader


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Lightning's log messages and its warnings about slow loaders."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    for category in (DeprecationWarning, FutureWarning):  # of torch, to which Lightning has not adapted yet
        warnings.filterwarnings("ignore", category=category, module=r"lightning\.")
    try:
        yield
    finally:
        log.setLevel(level)
