"""A study's trials trained by a `lightning.Trainer`, with a LightningModule of your own.

    def train(setup):
        yield from train_with(setup, Net(setup), data=(train_loader, validation_loader))

To Lightning every pass is a batch, and an epoch is the stretch between two measurements. The optimizer is stepped by manual
optimization, which is Lightning's own door for accumulation of another kind: after the last pass of each planned step, and
with each pass weighted by its share of it.
"""

from __future__ import annotations

import inspect
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...spaces.errors import TaskError
from ...spaces.trial import Measurement, TrialSetup
from ..training import is_out_of_memory, rescale_gradients
from .as_generator import Tell, as_generator
from .pace import Pace, study_faults

try:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.utilities.warnings import PossibleUserWarning
except ModuleNotFoundError as error:
    raise TaskError(
        f"bsearch.objectives.adapters.lightning: expected lightning, got no module named {error.name!r}. "
        "Install bsearch[lightning]."
    ) from None

# What the study says, by the key of study.yaml that says it.
_OF_THE_STUDY = {
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
_PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def train_with(
    setup: TrialSetup,
    module: LightningModule,
    data: LightningDataModule | tuple[Any, Any] | None = None,
    **arguments: Any,
) -> Iterator[Measurement]:
    """Train as the trial's setup says, and yield what `validation_step` logs at each evaluation.

    Args:
        module: yours; `training_step` returns the mean loss of its batch, or `{"loss": mean, "denominator": n}` where that
            is no mean over samples, as with tokens; `configure_optimizers` returns one optimizer at `setup.learning_rate`.
        data: a data module, or a loader to train with and one to validate with; None where the module has them. Of the
            loader to train with, its data set, `collate_fn` and workers are used: batches and order are the trial's.
        arguments: of `lightning.Trainer`; all but what the study says, such as max_epochs.

    Raises:
        TaskError: arguments that belong to the study, data without a length, several devices.
    """
    pace = Pace(setup, "lightning.Trainer")
    faults = study_faults("train_with", arguments, _OF_THE_STUDY)
    if setup.training.compile:
        faults.append(
            "training.compile: expected false, for lightning.Trainer does not do it; got true. Compile in the module."
        )
    if not module.automatic_optimization:
        faults.append("train_with: expected a module whose optimizer Lightning steps, got automatic_optimization = False")
    # Lightning calls these where it steps the optimizer itself; left out in silence, they would make another training.
    faults += [
        f"{type(module).__name__}.{name}: expected Lightning's own, as a planned step does not call it; got an override"
        for name in ("optimizer_step", "configure_gradient_clipping", "lr_scheduler_step")
        if getattr(type(module), name) is not getattr(LightningModule, name)
    ]
    if faults:
        raise TaskError("\n".join(faults))
    yield from pace.told
    if pace.number < len(pace.plans):
        yield from as_generator(lambda tell: _train(pace, module, data, arguments, tell))


def _train(pace: Pace, module: LightningModule, data: Any, arguments: dict[str, Any], tell: Tell[Measurement]) -> None:
    setup = pace.setup
    paced = _Paced(pace, module, tell)
    with tempfile.TemporaryDirectory(prefix="bsearch-") as folder, _quiet(), pace.running(), paced.steps_of(module):
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
        }
        callbacks = arguments.pop("callbacks", None) or []
        trainer = Trainer(
            **{**quiet, **arguments},
            callbacks=[paced, *(callbacks if isinstance(callbacks, list) else [callbacks])],
            accelerator=setup.device,
            devices=1,
            precision=_PRECISIONS[setup.training.precision],
            max_epochs=pace.stretches,
            num_sanity_val_steps=0,
        )
        try:
            if isinstance(data, tuple):
                trainer.fit(module, _MicroBatches(pace, data[0]), data[1])
            else:
                with _loader_of(module if data is None else data, pace):
                    trainer.fit(module, datamodule=data)
        except Exception as error:
            if pace.measuring and is_out_of_memory(error):
                raise TaskError(
                    f"lightning.Trainer: validation ran out of memory ({error}): make the validation loader's batches smaller"
                ) from error
            raise


class _MicroBatches:
    """What Lightning takes for its loader: the passes up to the next measurement, as many as there are."""

    def __init__(self, pace: Pace, loader: Any) -> None:
        self.pace, self.loader = pace, loader

    def __iter__(self) -> Iterator[Any]:
        return self.pace.micro_batches(self.loader)


class _Paced(Callback):
    """Takes the module's training step as one pass, and the optimizer's step after a planned step's last pass."""

    def __init__(self, pace: Pace, module: LightningModule, tell: Tell[Measurement]) -> None:
        self.pace, self.tell = pace, tell
        self._users = module.training_step
        self._takes_number = len(inspect.signature(self._users).parameters) > 1
        self._pass = 0  # of the step, that comes next
        self._total: Any = 0.0  # of the step's loss, and what its mean divides by
        self._denominator: Any = 0

    @contextmanager
    def steps_of(self, module: LightningModule) -> Iterator[None]:
        """Stand in for the module's own training step while it trains."""

        def training_step(batch: Any, batch_idx: int) -> Any:
            return self._one_micro_batch(module, batch, batch_idx)

        module.automatic_optimization = False
        module.training_step = training_step
        try:
            yield
        finally:
            del module.training_step
            module.automatic_optimization = True

    def _one_micro_batch(self, module: LightningModule, batch: Any, number: int) -> Any:
        plan = self.pace.plan
        micro_batches, size = plan.micro_batches(), plan.effective_batch
        found = self._users(batch, number) if self._takes_number else self._users(batch)
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if not isinstance(loss, Tensor):
            raise TaskError(
                f"{type(module).__name__}.training_step: expected the batch's mean loss, or a dict with `loss`, got "
                f"{type(found).__name__}"
            )
        told = found.get("denominator") if isinstance(found, Mapping) else None
        denominator = micro_batches[self._pass] if told is None else told
        # A sum over the step's samples; where the loss counts something else, the step's gradient is brought to it below.
        module.manual_backward(loss * denominator / size)
        self._total = self._total + loss.detach().double() * denominator
        self._denominator = self._denominator + denominator
        self._pass += 1
        if self._pass == len(micro_batches):
            gradients = [one.grad for one in module.parameters() if one.grad is not None]
            rescale_gradients(gradients, self._denominator, size)
            optimizer = module.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        detached = loss.detach()
        return {**found, "loss": detached} if isinstance(found, Mapping) else detached

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        name = type(pl_module).__name__
        if len(trainer.optimizers) != 1 or trainer.lr_scheduler_configs:
            raise TaskError(
                f"{name}.configure_optimizers: expected one optimizer and no scheduler, for training.schedule moves the rate; "
                f"got {len(trainer.optimizers)} and {len(trainer.lr_scheduler_configs)}"
            )
        self.pace.begin(pl_module, trainer.optimizers[0], getattr(trainer.precision_plugin, "scaler", None))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.tell.go_on()
        if self._pass == 0:
            self._total = torch.zeros((), dtype=torch.float64, device=self.pace.device)
            self._denominator = 0
            self.pace.before_step()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # Here, since an fp16 scaler has taken its factor out of the gradients by now.
        if (norm := self.pace.setup.training.clip_norm) is not None:
            pl_module.clip_gradients(optimizer, gradient_clip_val=norm, gradient_clip_algorithm="norm")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._pass == len(self.pace.plan.micro_batches()):
            self._pass = 0
            self.pace.after_step(self._total / self._denominator)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.tell(self.pace.measurement(found))
        trainer.should_stop = trainer.should_stop or self.pace.lost
        self.pace.go_on()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.pace.measuring:
            raise TaskError(
                f"{type(pl_module).__name__}: expected a validation_step that logs {self.pace.setup.metric!r}, and data to "
                "validate with; got no validation"
            )


@contextmanager
def _loader_of(owner: Any, pace: Pace) -> Iterator[None]:
    """Stand in for the loader to train with of a data module, or of a module that brings its own."""
    users: Callable[[], Any] = owner.train_dataloader

    def train_dataloader() -> _MicroBatches:
        return _MicroBatches(pace, users())

    owner.train_dataloader = train_dataloader
    try:
        yield
    finally:
        del owner.train_dataloader


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Lightning says of itself and of loaders that might be faster."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    for category in (DeprecationWarning, FutureWarning):  # of torch, which Lightning follows later
        warnings.filterwarnings("ignore", category=category, module=r"lightning\.")
    try:
        yield
    finally:
        log.setLevel(level)
