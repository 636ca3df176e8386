"""A training that is ready to step: one optimizer step of any integer batch, accumulated over micro-batches.

Each micro-batch back-propagates its summed loss divided by the step's samples. Where the loss has another denominator
(tokens, class weights), the accumulated gradient is rescaled to it before the optimizer step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from ...spaces.errors import TaskError
from ...spaces.plan import BatchPlan
from ...spaces.trial import TrialSetup
from ..data.batches import AHEAD, Loader, mixed, to_device
from ..data.training_samples import TrainingSamples
from ..loading import schedule_of
from ..machine.accelerator import device_of, is_gpu, pins, total_bytes, widest_float
from ..machine.device_memory import limit_memory
from ..model.activation_checkpointing import checkpoint_activations
from ..model.batch_norm import correct_batch_norm
from ..model.buffers import SharedBuffers
from ..model.modes import TrainingModes, set_optimizers
from ..model.weight_average import WeightAverage
from ..parallel.data_parallel import Ranks
from ..parallel.fsdp2 import device_mesh, own_part, shard_parameters, takes_unused_parameters
from ..profiling.memory.live_bytes import LiveBytes
from ..task import Task, acts_after_steps, checked_data, checked_loss, checked_optimizer, embeds, name_of
from .constants import Constants
from .gradient_cache import EmbeddingsOf, GradientCache
from .rates import Rates
from .two_passes import HeldStep

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

from ..machine.torch_settings import configure_torch, seed_everything

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Of fp16's loss: a gradient that overflows below it does so by itself.
_LOWEST_SCALE = 2.0**-20
# Data that take at most this share of a GPU's memory live there: their batches need no copies.
_RESIDENT_SHARE = 0.03


class Stepping(TrainingSamples):
    """The data, model and optimizer of an attempt at a task. On several devices, one rank's part.

    Args:
        ranks: those that the process belongs to; default: as many as the plan has devices.

    Raises:
        TaskError: the task's data, model or optimizer break their contract.
    """

    def __init__(self, task: Task, setup: TrialSetup, ranks: Ranks | None = None) -> None:
        self.task, self.setup = task, setup
        if setup.sharding == "fsdp2" and acts_after_steps(task):
            raise TaskError(
                f"{name_of(task)}.after_step: expected ddp with it, since with fsdp2 each device holds a share of each "
                "parameter; got devices.sharding: fsdp2. Write ddp."
            )
        self.ranks = ranks or Ranks.of(setup.plan.devices)
        # A rank's own is its process's current device.
        self.device = device_of(setup.device)
        self.schedule = schedule_of(setup)
        configure_torch(setup)
        limit_memory(setup.memory_limit_bytes, self.device)
        seed_everything(setup.seed)
        self.open_data(checked_data(task.data(setup)))
        self.validation_fetcher = self.fetcher(self.data.validation)
        self.resident_bytes = 0
        if is_gpu(self.device):
            self.resident_bytes = self.resident_within(setup.memory_limit_bytes or total_bytes(self.device))
        if self.resident_bytes:
            self.train_fetcher.move_to(self.device)
            self.validation_fetcher.move_to(self.device)
        # Initial weights depend on the seed alone, not on random numbers drawn while reading the data.
        seed_everything(setup.seed)
        model = task.model(setup)
        if not isinstance(model, nn.Module):
            raise TaskError(f"{name_of(task)}.model: expected a torch.nn.Module, got {type(model).__name__}")
        self.modes = TrainingModes(model)
        correct_batch_norm(model, len([size for size in setup.plan.micro_batches(self.ranks.rank) if size]))
        if setup.training.sync_batch_norm and self.ranks.count > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        checkpoint_activations(task.checkpoint_blocks(model), setup.plan.activation_checkpointing)
        self._last_weight: tuple[int, Tensor] | None = None
        self.cache = GradientCache() if embeds(task) else None
        if self.fully_sharded:
            self._set_sharded_model(model, device_mesh(self.device, self.ranks.count))
        else:
            self._set_model(model.to(self.device))
            if setup.training.compile:
                # Dynamo counts what it compiles for a whole process: beyond its limit, later trials would silently run eagerly.
                torch.compiler.reset()
                self.model.compile()
            self.loss: Any = self._loss_module()
            if self.ranks.count > 1:
                self.loss = self.ranks.distributed_loss(self.loss, self.device)
        if self.ranks.rank:
            # Weights are identical on all ranks by now; random numbers drawn in training (dropout) must differ.
            torch.manual_seed(int(mixed(setup.seed, self.ranks.rank)) >> 1)
        self._checks_parameters = self.fully_sharded and not takes_unused_parameters(self.loss)
        self.skipped_steps = 0  # for the scale of fp16, and repeated
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=setup.training.precision == "fp16")
        self._buffers = SharedBuffers(self.model, self.ranks)

    def _set_model(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise TaskError(f"{name_of(self.task)}.model: expected trainable parameters, got none")
        self.optimizer = checked_optimizer(self.task, model, self.setup)
        set_optimizers([self.optimizer], "train")
        where = f"{name_of(self.task)}.optimizer"
        self.rates = Rates(where, [self.optimizer], self.schedule, self.setup.training.warmup)
        checked = not (self.fully_sharded or self.setup.training.accept_inexact)
        self._constants = Constants(name_of(self.task), model, checked=checked)
        self.average = WeightAverage(self.parameters)

    @property
    def averages(self) -> Sequence[Tensor]:
        """The average of the weights, if there is one."""
        return self.average.values

    def _loss_module(self) -> nn.Module:
        kind = _LossOf if self.cache is None else EmbeddingsOf
        return kind(self.task, self.model, self.setup)

    @property
    def fully_sharded(self) -> bool:
        """Whether each rank holds only a share of the parameters."""
        return self.setup.sharding == "fsdp2" and self.ranks.count > 1

    def _set_sharded_model(self, model: nn.Module, mesh: DeviceMesh) -> None:
        if self.cache is not None:
            raise TaskError("devices.sharding: expected ddp with embed and batch_loss, got fsdp2. Write ddp.")
        # Around the loss, so that all parameters are gathered for any call that a task makes of its model.
        self.loss = _ShardedLossOf(self.task, model, self.setup)
        shard_parameters(self.loss, self.task.checkpoint_blocks(model), mesh)
        self._set_model(model)

    def on(self, model: nn.Module, device: torch.device, mesh: DeviceMesh | None = None) -> Self:
        """The same run with another copy of the model and its own optimizer, for memory probes.

        Its scaler is off: a fake tensor has no values to check for overflow.

        Args:
            mesh: devices that share out the parameters, of which this is the first; default: this one alone.
        """
        other = copy.copy(self)
        other.device, other.ranks = device, Ranks() if mesh is None else Ranks(0, mesh.size())
        if mesh is not None:
            other._set_sharded_model(model, mesh)
        else:
            other._set_model(model)
            other.loss = other._loss_module()
        other.cache = None if self.cache is None else GradientCache(checked=True)
        other._last_weight = None
        other._buffers = SharedBuffers(model, Ranks())
        other._checks_parameters = False
        other.scaler = torch.amp.GradScaler(device.type, enabled=False)
        return other

    def resident_within(self, limit_bytes: float) -> int:
        """Bytes of the data that live on a GPU with this much memory: all of it or none."""
        sizes = [fetcher.nbytes for fetcher in (self.train_fetcher, self.validation_fetcher)]
        total = sum(size or 0 for size in sizes)
        return total if None not in sizes and total <= _RESIDENT_SHARE * limit_bytes else 0

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of a forward pass: the study's precision."""
        precision = self.setup.training.precision
        if precision not in _DTYPES:
            return nullcontext()
        return torch.autocast(self.device.type, _DTYPES[precision])

    def step(self, micro_batches: Sequence[tuple[int, Any]], size: int) -> Tensor:
        """One optimizer step over `size` samples, this device's share in micro-batches of (samples, batch).

        A batch may be a function that returns it.

        Returns:
            The step's mean loss, a detached scalar on the device, the same on all devices.
        """
        held = None
        if self.scaler.is_enabled():
            held = HeldStep(self.model, self.device, micro_batches, on_device=self.resident_bytes > 0)
        with self._constants.held():
            loss = self._clipped_gradient(micro_batches if held is None else held.micro_batches(), size)
        self.rates.check()
        if held is None:
            self.optimizer.step()
        else:
            loss = self._scaled_step(held, size, loss)
        self._buffers.after_step()
        for parameter in self.parameters:
            parameter.grad = None
        with torch.no_grad():
            self.task.after_step(self.model, self.setup)
        if self.setup.training.ema is not None:
            self.average.update(self.setup.ema_decay(size))
        return loss

    def _scaled_step(self, held: HeldStep, size: int, loss: Tensor) -> Tensor:
        """Step with the gradient of a scaled loss; where it overflowed, it is computed again at lower scales.

        Returns:
            The step's mean loss, infinite where its gradient overflows at every scale.
        """
        # The scaler looks at the gradient anyway, and asking for its scale would wait again; but a fused step skips by itself.
        skips = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        stepped: list[bool] = []
        hook = self.optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        try:
            while True:
                scale = self.scaler.get_scale() if skips else 0.0
                self.scaler.step(self.optimizer)
                self.scaler.update()
                if (self.scaler.get_scale() >= scale if skips else stepped) or not torch.isfinite(loss):
                    return loss
                if self.scaler.get_scale() < _LOWEST_SCALE:
                    return torch.full_like(loss, torch.inf)
                self.skipped_steps += 1
                loss = self._gradient_again(held, size)
        finally:
            hook.remove()

    def _clipped_gradient(self, micro_batches: Sequence[tuple[int, Any]], size: int) -> Tensor:
        """The gradient of a step, clipped, in the parameters' `grad`; returns the step's mean loss."""
        loss = self.accumulate(micro_batches, size)
        if self.setup.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.setup.training.clip_norm)
        return loss

    @torch.enable_grad()
    def _gradient_again(self, held: HeldStep, size: int) -> Tensor:
        """The step's gradient and loss, computed once more."""
        for parameter in self.parameters:
            parameter.grad = None
        with held.again():
            return self._clipped_gradient(held.micro_batches(), size)

    def accumulate(self, micro_batches: Sequence[tuple[int, Any]], size: int) -> Tensor:
        """The gradient of a step's mean loss over `size` samples, before clipping, in the parameters' `grad`.

        Gradients are all-reduced once per step, after the last micro-batch; where parameters are sharded, in each. A
        micro-batch of 0 samples keeps the ranks' collectives aligned and adds nothing.

        Returns:
            The step's mean loss, a detached scalar on the device.
        """
        if self.cache is not None:
            return self._accumulate_embedded(micro_batches, size)
        totals: list[Tensor] = []
        denominator: Tensor | float = 0.0
        for number, (samples, batch) in enumerate(micro_batches, start=1):
            on_device = self.on_device(LiveBytes.fetched(batch) if callable(batch) else batch)
            last = number == len(micro_batches)
            if not samples:
                self.model.eval()  # leaves BatchNorm's statistics as they are
            with self.ranks.sync_context(self.loss, last):
                with self.autocast():
                    loss_total, loss_denominator = self.loss(on_device, samples)
                del on_device
                if samples:
                    totals.append(loss_total.detach())
                    denominator = denominator + loss_denominator
                pending = self.ranks.begin_sum(totals, denominator) if last else None
                weight = self._weight(loss_total, size) if samples else torch.zeros_like(loss_total)
                self.scaler.scale(loss_total).backward(weight)
            if not samples:
                self.modes.train(self.model)
        total, denominator = self.ranks.end_sum(pending)
        if self._checks_parameters:
            self._check_parameters()
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        if isinstance(denominator, Tensor) or denominator != size:
            if not (gradients := self._gradients()):
                raise RuntimeError(
                    f"{name_of(self.task)}.loss: expected a loss of the model that it is given, got one of another"
                )
            rescale_gradients(gradients, denominator, size)
        # Where every label of a step is ignored, its loss is 0 rather than 0/0.
        return total / (
            torch.where(denominator > 0, denominator, 1)
            if isinstance(denominator, Tensor)
            else denominator or 1.0
        )

    def _accumulate_embedded(self, micro_batches: Sequence[tuple[int, Any]], size: int) -> Tensor:
        """The same for a loss over the whole batch's embeddings."""
        assert self.cache is not None
        loss = self.cache.accumulate(self, micro_batches, size)
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        return loss

    def _weight(self, loss_total: Tensor, size: int) -> Tensor:
        """One over the step's samples, like the loss; kept for the next step. `fully_shard` averages over ranks."""
        known = self._last_weight
        if (
            known is None
            or known[0] != size
            or known[1].dtype != loss_total.dtype
            or known[1].device != loss_total.device
        ):
            weight = (self.ranks.count if self.fully_sharded else 1) / size
            known = self._last_weight = size, torch.full_like(loss_total, weight)
        return known[1]

    def on_device(self, batch: Any) -> Any:
        """A batch on this run's device; on a CPU it was fetched there."""
        return batch if self.device.type == "cpu" else to_device(batch, self.device)

    def _gradients(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [own_part(gradient) for gradient in gradients] if self.fully_sharded else gradients

    def loader(self, plans: Iterable[BatchPlan], position: int = 0) -> Loader:
        """This device's micro-batches for steps with these plans, from a position in the sample stream."""
        workers = 0 if self.resident_bytes else self.setup.training.workers
        return self.micro_batches_of(plans, position, workers, pin_memory=self._pins)

    @property
    def fetched_ahead(self) -> int:
        """Micro-batches that loader processes, or the thread that pins batches, fetch beforehand."""
        if self.setup.training.workers and not self.resident_bytes:
            return 2 * (self.setup.training.workers if self.live is None else 1)
        return AHEAD + 1 if self._pins and self.train_fetcher.indexed else 0

    @property
    def _pins(self) -> bool:
        """Whether batches are copied to the device from page-locked memory."""
        return pins(self.device) and not self.resident_bytes

    def micro_batches(self, plan: BatchPlan, loader: Loader) -> list[tuple[int, Any]]:
        """A step's micro-batches on this device: samples, and a function that takes the batch from the loader.

        Where parameters are sharded, every rank has as many; those without a sample of their own get any.
        """
        sizes = [samples for samples in plan.micro_batches(self.ranks.rank) if samples or self.fully_sharded]
        return [
            (samples, partial(loader.take, samples) if samples else self._any_sample) for samples in sizes
        ]

    def _check_parameters(self) -> None:
        """Check that all ranks have gradients of the same parameters, where torch needs that.

        Raises:
            TaskError: they have not.
        """
        self._checks_parameters = False
        used = tuple(parameter.grad is not None for parameter in self.parameters)
        if len(set(self.ranks.all_gathered({"used": [used]})["used"])) > 1:
            raise TaskError(
                f"devices.sharding: expected a newer torch than {torch.__version__} for fsdp2 with a model whose devices use "
                "different parameters in a step. Update torch, or write ddp."
            )

    def _any_sample(self) -> Any:
        return self.train_fetcher.fetch(self.stream.take(0, 1))


class _LossOf(nn.Module):
    """A micro-batch's loss as a module, so that DistributedDataParallel can wrap any use a task makes of its model."""

    def __init__(self, task: Task, model: nn.Module, setup: TrialSetup) -> None:
        super().__init__()
        self.task, self.model, self.setup = task, model, setup

    # On one device, skip nn.Module.__call__: it only adds hooks, and this module has none.
    def __call__(self, batch: Any, samples: int) -> tuple[Tensor, Tensor | float]:
        return self.forward(batch, samples)

    def forward(self, batch: Any, samples: int) -> tuple[Tensor, Tensor | float]:
        loss = checked_loss(self.task, self.task.loss(self.model, batch, self.setup), samples)
        return loss.total, loss.denominator


class _ShardedLossOf(_LossOf):
    """The same where parameters are sharded; their hooks gather them. Without `samples`, the task's scores."""

    __call__ = nn.Module.__call__

    def forward(self, batch: Any, samples: int | None) -> Any:
        if samples is None:
            return self.task.score(self.model, batch, self.setup)
        return super().forward(batch, samples)


def rescale_gradients(gradients: list[Tensor], denominator: Tensor | float, size: float) -> None:
    """Rescale gradients from a mean over `size` samples to the loss's own denominator, in place."""
    if not isinstance(denominator, Tensor):
        if denominator == size:
            return
        # Unlike a copy, a fill does not synchronise with the GPU.
        denominator = torch.full(
            (), denominator, device=gradients[0].device, dtype=widest_float(gradients[0].device)
        )
    # In double precision where there is one: in single, the ratio of two counts would lose eight digits.
    denominator = denominator.to(widest_float(denominator.device))
    # Where every label of a step is ignored, its gradient is 0 rather than 0/0.
    ratio = torch.where(
        denominator > 0, size / denominator.clamp_min(torch.finfo(denominator.dtype).tiny), 0.0
    )
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient._values() if gradient.is_sparse else gradient)
    for dtype, same in by_type.items():
        if dtype in (torch.bfloat16, torch.float16):
            for gradient in same:  # rounded to eight bits, the ratio itself would be off by up to .4 %
                gradient.copy_(gradient.float() * ratio.float())
        else:
            torch._foreach_mul_(same, ratio.to(dtype))
