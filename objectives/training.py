"""A `Task`'s training: its model, loss and optimizer as a body of the engine.

Each micro-batch back-propagates its summed loss divided by the step's samples. Where the loss has another denominator
(tokens, class weights), the accumulated gradient is rescaled to it before the optimizer step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from ..spaces.errors import TaskError
from ..spaces.trial import EVALUATION_BATCH, Measurement, Parameter, TrialSetup
from .data.batches import Fetcher, SampleKeys, batches, in_order
from .engine import Engine, PlannedStep
from .evaluation import Evaluation
from .machine.accelerator import is_gpu, total_bytes
from .machine.device_memory import evaluating, limit_memory
from .machine.torch_settings import seed_everything
from .model.activation_checkpointing import checkpoint_activations
from .model.buffers import SharedBuffers
from .model.modes import set_optimizers, untouched
from .parallel.data_parallel import Ranks
from .parallel.fsdp2 import device_mesh, own_part, shard_parameters, takes_unused_parameters
from .profiling.memory.live_bytes import LiveBytes
from .state.checkpoint import save_state
from .steps.gradient_cache import EmbeddingsOf, GradientCache
from .steps.rescale import rescale_gradients
from .steps.two_passes import HeldStep
from .task import Task, acts_after_steps, checked_data, checked_loss, checked_optimizer, embeds, name_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Of fp16's loss: a gradient that overflows below it does so by itself.
_LOWEST_SCALE = 2.0**-20
# Data that take at most this share of a GPU's memory live there: their batches need no copies.
_RESIDENT_SHARE = 0.03


class TrainingRun(Engine):
    """The data, model and optimizer of an attempt at a task, ready to step. On several devices, one rank's part.

    Args:
        ranks: those that the process belongs to; default: as many as the plan has devices.

    Raises:
        TaskError: the task's data, model or optimizer break their contract.
    """

    options = (
        "training.precision: bf16",
        "training.precision: fp16",
        "training.compile",
        "training.sync_batch_norm",
        "training.clip_norm",
        "training.ema",
        "devices.per_trial",
    )

    def __init__(self, task: Task, setup: TrialSetup, ranks: Ranks | None = None) -> None:
        self.task, self.name = task, name_of(task)
        if setup.sharding == "fsdp2" and acts_after_steps(task):
            raise TaskError(
                f"{name_of(task)}.after_step: expected ddp with it, since with fsdp2 each device holds a share of each "
                "parameter; got devices.sharding: fsdp2. Write ddp."
            )
        super().__init__(setup, ranks)
        limit_memory(setup.memory_limit_bytes, self.device)
        seed_everything(setup.seed)
        self.open_data(checked_data(task.data(setup)))
        self.validation_fetcher = self.fetcher(self.data.validation)
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
        self._know_modes(model)
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
        self._checks_parameters = self.fully_sharded and not takes_unused_parameters(self.loss)
        self.skipped_steps = 0  # for the scale of fp16, and repeated
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=setup.training.precision == "fp16")
        self.buffers = SharedBuffers(self.model, self.ranks)

    def _set_model(self, model: nn.Module) -> None:
        self.model = model
        self._parameters = super().parameters
        if not self._parameters:
            raise TaskError(f"{name_of(self.task)}.model: expected trainable parameters, got none")
        self.optimizers = {"optimizer": checked_optimizer(self.task, model, self.setup)}
        set_optimizers([self.optimizer], "train")
        self._step_with(name_of(self.task), f"{name_of(self.task)}.optimizer")

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return self._parameters

    def _loss_module(self) -> nn.Module:
        kind = _LossOf if self.cache is None else EmbeddingsOf
        return kind(self.task, self.model, self.setup)

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
        other.buffers = SharedBuffers(model, Ranks())
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
        with self.constants.held():
            loss = self._clipped_gradient(micro_batches if held is None else held.micro_batches(), size)
        self.rates.check()
        if held is None:
            self.optimizer.step()
        else:
            loss = self._scaled_step(held, size, loss)
        self.buffers.after_step()
        for parameter in self.parameters:
            parameter.grad = None
        with torch.no_grad():
            self.task.after_step(self.model, self.setup)
        self.average_weights(size)
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

    def _gradients(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [own_part(gradient) for gradient in gradients] if self.fully_sharded else gradients

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

    def scores(self, batch: Any) -> Any:
        """The task's scores of one batch."""
        with self.autocast():
            if self.fully_sharded:
                return self.loss(batch, None)
            return self.task.score(self.model, batch, self.setup)

    @property
    def evaluation_batch(self) -> int:
        """Samples per forward pass of evaluation: the study's, never the trial's."""
        return self.setup.evaluation_batch or EVALUATION_BATCH

    def evaluate(
        self, keys: Sequence[SampleKeys] | None = None, fetcher: Fetcher | None = None
    ) -> dict[str, float]:
        """Every metric of the task over the validation data, each sample once, or over the batches in `keys`.

        Several devices share the batches round-robin. Totals are added exactly and metrics of the whole set are merged, so the
        number of devices changes the result only by rounding within a batch.

        Args:
            fetcher: of other data than those for validation.
        """
        fetcher = fetcher or self.validation_fetcher
        count = len(fetcher.dataset)  # type: ignore[arg-type]
        size = self.evaluation_batch
        # Inexact scores may depend on this size, so it must not depend on the number of devices.
        if not self.setup.training.accept_inexact:
            size = min(size, -(-count // self.ranks.count))
        keys = keys or in_order(count, size, self.setup.seed)
        evaluation = Evaluation(self.task)
        with evaluating(), self.as_evaluated(), torch.no_grad():
            self.model.eval()
            own = keys[self.ranks.rank :: self.ranks.count]
            # Where ranks gather parameters for each other, all of them evaluate as many batches.
            spare = -(-len(keys) // self.ranks.count) - len(own) if self.fully_sharded else 0
            batches_of = self._evaluation_batches(fetcher, [*own, *[keys[0]] * spare])
            for number, batch in enumerate(batches_of):
                scores = self.scores(self.on_device(batch))
                if number < len(own):
                    evaluation.add(scores)
        return evaluation.values(self.ranks.all_gathered)

    def measurements(self) -> Generator[Measurement]:
        """Train for the whole budget; evaluate at equal fractions of it and at its end.

        Where an earlier attempt left a checkpoint, its measurements are yielded again and training resumes from it.
        """
        steps = self.steps()
        yield from self.reported
        for step in steps:
            self.course.add(self.step(step.micro_batches, step.samples))
            if step.evaluates:
                yield self._measured()

    def finish(self, step: PlannedStep) -> None:
        """Nothing: `step` has done it."""

    def _measured(self) -> Measurement:
        """Evaluate."""
        facts: dict[str, Parameter] = {"skipped_steps": self.skipped_steps} if self.skipped_steps else {}
        scores = self.evaluate()
        if undefined := ", ".join(name for name, score in scores.items() if math.isnan(score)):
            facts["undefined"] = undefined
        if self.setup.model_folder is not None and self.course.is_over:
            facts |= self.save_model(self.setup.model_folder)
        return self.measurement(scores, facts)

    def save_model(self, folder: str) -> dict[str, Parameter]:
        """Save the trained model; returns its scores on the test set, if there is one."""
        state = self.state_dict()
        if not self.ranks.rank:
            model = self.model
            if self.fully_sharded:
                model = self.task.model(self.setup)
                model.load_state_dict(state["model"])
            with untouched(model, [self.optimizer], self.device), self.average.in_place():
                self.task.save(model, Path(folder), self.setup)
            save_state(Path(folder) / "optimizer.pt", state["optimizers"]["optimizer"])
        if self.data.test is None or not self.setup.scores_test:
            return {}
        return {
            f"test_{name}": score
            for name, score in self.evaluate(fetcher=self.fetcher(self.data.test)).items()
        }

    def state_dict(self) -> dict[str, Any]:
        more = {"scaler": self.scaler.state_dict(), "skipped_steps": self.skipped_steps}
        return super().state_dict() | more

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.scaler.load_state_dict(state["scaler"])
        self.skipped_steps = state["skipped_steps"]

    def _evaluation_batches(self, fetcher: Fetcher, keys: Sequence[SampleKeys]) -> Iterator[Any]:
        """Batches for evaluation; processes that load them cost a moment to start, so only several batches are worth them."""
        workers = min(self.setup.training.workers, len(keys) - 1) if not self.resident_bytes else 0
        return batches(fetcher, keys, max(workers, 0), self._pins)


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


def train_task(task: Task, setup: TrialSetup) -> Iterator[Measurement]:
    """A task as a generator, the interface of a custom training loop."""
    yield from TrainingRun(task, setup).measurements()
