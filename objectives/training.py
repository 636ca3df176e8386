"""The training loop: steps of any integer batch, accumulated over micro-batches, equal to the one large batch.

Each micro-batch back-propagates its summed loss divided by the step's samples. Where the loss has another denominator
(tokens, class weights), the accumulated gradient is rescaled to it before the optimizer step.
"""

from __future__ import annotations

import copy
import ctypes
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..spaces.errors import Fault, StudyFileError, TaskError
from ..spaces.plan import BatchPlan
from ..spaces.schedule import evaluation_points, rate_factor
from ..spaces.trial import EVALUATION_BATCH, Measurement, Parameter, TrialSetup
from .data.batches import AHEAD, Fetcher, SampleKeys, batches, in_order, mixed, to_device
from .data.training_samples import TrainingSamples
from .evaluation import Evaluation, undefined
from .loading import schedule_of
from .machine.accelerator import device_of, is_gpu, pins, total_bytes, widest_float
from .machine.device_memory import EvaluationMemoryError, is_out_of_memory, limit_memory
from .model.activation_checkpointing import checkpoint_activations
from .model.batch_norm import batch_norms, correct_batch_norm
from .model.buffers import SharedBuffers
from .model.modes import TrainingModes
from .model.weight_average import WeightAverage
from .optimizers import load_whole_state, needs_closure, whole_state
from .parallel.data_parallel import Ranks
from .parallel.fsdp2 import (
    device_mesh,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    own_part,
    shard_parameters,
    takes_unused_parameters,
)
from .parallel.zero1 import ShardedOptimizer
from .profiling.live_bytes import LiveBytes
from .state.checkpoint import LEAVE, Checkpoint, random_state, save_state, set_random_state
from .state.leaving import Leaving, asked_to_leave
from .steps.gradient_cache import EmbeddingsOf, GradientCache
from .steps.loss_sum import LossSum
from .steps.noise_scale import NoiseScale
from .steps.step_clock import COUNTED_STEPS, StepClock
from .steps.two_passes import HeldStep
from .task import Task, acts_after_steps, check_loss, checked_data, checked_optimizer, embeds, name_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# From malloc.h: the number of blocks allocated with mmap, and the free memory at the top of the heap that triggers a trim.
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1

# Data that take at most this share of a GPU's memory live there: their batches need no copies.
_RESIDENT_SHARE = 0.03


class TrainingRun(TrainingSamples):
    """One attempt at training a task: its data, model and optimizer, ready to step. On several devices, one rank's part.

    Raises:
        TaskError: the task's data, model or optimizer break their contract.
    """

    def __init__(self, task: Task, setup: TrialSetup) -> None:
        self.task, self.setup = task, setup
        if setup.sharding == "fsdp2" and acts_after_steps(task):
            raise TaskError(
                f"{name_of(task)}.after_step: expected ddp or zero1 with it, since with fsdp2 each device holds a share of "
                "each parameter; got devices.sharding: fsdp2. Write zero1."
            )
        self.ranks = Ranks.of(setup.plan.devices)
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
        if setup.training.channels_last:
            model = model.to(memory_format=torch.channels_last)
        checkpoint_activations(task.checkpoint_blocks(model), setup.plan.activation_checkpointing)
        self._last_weight: tuple[int, Tensor] | None = None
        self.noise = NoiseScale()
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
                self.loss = self.ranks.distributed_loss(self.loss, self.device, self.noise)
        if self.ranks.rank:
            # Weights are identical on all ranks by now; random numbers drawn in training (dropout) must differ.
            torch.manual_seed(int(mixed(setup.seed, self.ranks.rank)) >> 1)
        self._checks_parameters = self.fully_sharded and not takes_unused_parameters(self.loss)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=setup.training.precision == "fp16")
        self.sharded: ShardedOptimizer | None = None
        if setup.sharding == "zero1" and self.ranks.count > 1:
            self.sharded = ShardedOptimizer(self.optimizer, self.ranks.rank, self.ranks.count, self.ranks.all_gathered)
        self._buffers = SharedBuffers(self.model, self.ranks)

    def _set_model(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise TaskError(f"{name_of(self.task)}.model: expected trainable parameters, got none")
        self.optimizer = checked_optimizer(self.task, model, self.setup)
        self._peak_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._two_passes = needs_closure(self.optimizer)
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
            raise TaskError("devices.sharding: expected ddp or zero1 with embed and batch_loss, got fsdp2. Write zero1.")
        # Around the loss, so that all parameters are there whatever a task calls of its model.
        self.loss = _ShardedLossOf(self.task, model, self.setup)
        shard_parameters(self.loss, self.task.checkpoint_blocks(model), mesh)
        self._set_model(model)

    def on(self, model: nn.Module, device: torch.device, mesh: DeviceMesh | None = None) -> TrainingRun:
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
        other.noise, other._last_weight, other.sharded = NoiseScale(), None, None
        other._buffers = SharedBuffers(model, Ranks())
        other._checks_parameters = False
        other.scaler = torch.amp.GradScaler(device.type, enabled=False)
        return other

    def resident_within(self, limit_bytes: float) -> int:
        """Bytes of the data that live on a GPU with so much memory: all of it or none."""
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
        if self._two_passes:
            held = HeldStep(self.model, self.device, micro_batches, on_device=self.resident_bytes > 0)
        loss = self._clipped_gradient(micro_batches if held is None else held.micro_batches(), size)
        if held is not None:
            self.optimizer.step(partial(self._gradient_again, held, size))  # type: ignore[arg-type]  # torch's stub
        elif self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.sharded is not None:
            self.sharded.share_parameters()
        self._buffers.after_step()
        for parameter in self.parameters:
            parameter.grad = None
        with torch.no_grad():
            self.task.after_step(self.model, self.setup)
        if self.setup.training.ema is not None:
            self.average.update(self.setup.ema_decay(size))
        return loss

    def _clipped_gradient(self, micro_batches: Sequence[tuple[int, Any]], size: int) -> Tensor:
        """The gradient of a step, clipped, in the parameters' `grad`; returns the step's mean loss."""
        measures_noise = self.noise.active
        loss, small_batch = self.accumulate(micro_batches, size)
        if self.setup.training.clip_norm is not None:
            norms = [nn.utils.clip_grad_norm_(self.parameters, self.setup.training.clip_norm)]
        elif measures_noise:
            norms = list(torch._foreach_norm(self._gradients()))
        if measures_noise:
            self.noise.add_step(*small_batch, size, norms)
        return loss

    @torch.enable_grad()
    def _gradient_again(self, held: HeldStep, size: int) -> Tensor:
        """The closure of an optimizer: the step's gradient and loss at the weights as they are now."""
        self.noise.active = False
        for parameter in self.parameters:
            parameter.grad = None
        with held.again():
            return self._clipped_gradient(held.micro_batches(), size)

    def accumulate(self, micro_batches: Sequence[tuple[int, Any]], size: int) -> tuple[Tensor, tuple[float, Tensor | float]]:
        """The gradient of a step's mean loss over `size` samples, before clipping, in the parameters' `grad`.

        Gradients are all-reduced once per step, after the last micro-batch; where parameters are sharded, in each. A
        micro-batch of 0 samples keeps the ranks' collectives aligned and adds nothing.

        Returns:
            The step's mean loss, a detached scalar on the device; and the small batch of a noise measurement: its samples and
            its loss's denominator.
        """
        if self.cache is not None:
            return self._accumulate_embedded(micro_batches, size), (0.0, 0.0)
        totals: list[Tensor] = []
        denominator: Tensor | float = 0.0
        small_batch: tuple[float, Tensor | float] = 0.0, 0.0
        measures_noise = self.noise.active
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
            if measures_noise and number == 1 and self.ranks.count == 1:
                self.noise.add_small_batch(self._gradients())
                small_batch = samples, loss_denominator
        if measures_noise and self.ranks.count > 1:
            small_batch = self.ranks.mean_share(size), denominator
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
        mean = total / (torch.where(denominator > 0, denominator, 1) if isinstance(denominator, Tensor) else denominator or 1.0)
        return mean, small_batch

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
        if known is None or known[0] != size or known[1].dtype != loss_total.dtype or known[1].device != loss_total.device:
            weight = (self.ranks.count if self.fully_sharded else 1) / size
            known = self._last_weight = size, torch.full_like(loss_total, weight)
        return known[1]

    def on_device(self, batch: Any) -> Any:
        """A batch on this run's device, in the study's memory format."""
        layout = torch.channels_last if self.setup.training.channels_last else None
        if layout is None and self.device.type == "cpu":
            return batch  # it was fetched there
        return to_device(batch, self.device, layout)

    def _gradients(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [own_part(gradient) for gradient in gradients] if self.fully_sharded else gradients

    def freeze_updates(self) -> None:
        """Set the learning rate to zero from here on: steps take their usual time and leave the parameters unchanged."""
        self._peak_rates = [0.0] * len(self._peak_rates)

    def set_rate(self, fraction: float) -> None:
        """Set every group's learning rate to the schedule's, at a fraction of the budget."""
        training = self.setup.training
        factor = rate_factor(self.schedule, training.warmup, fraction)
        for group, rate in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = rate * factor

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

    def evaluate(self, keys: Sequence[SampleKeys] | None = None, fetcher: Fetcher | None = None) -> dict[str, float]:
        """Every metric of the task over the validation data, each sample once, or over the batches in `keys`.

        Several devices share the batches round-robin. Totals are added exactly and metrics of the whole set are merged, so the
        number of devices changes the result only by rounding within a batch.

        Args:
            fetcher: of other data than those for validation.
        """
        self.model.eval()
        self.ranks.sync_batch_norm_statistics(batch_norms(self.model))
        self._buffers.broadcast()
        fetcher = fetcher or self.validation_fetcher
        count = len(fetcher.dataset)  # type: ignore[arg-type]
        size = self.evaluation_batch
        # Inexact scores may depend on this size, so it must not depend on the number of devices.
        if not self.setup.training.accept_inexact:
            size = min(size, -(-count // self.ranks.count))
        keys = keys or in_order(count, size, self.setup.seed)
        evaluation = Evaluation(self.task)
        try:
            with torch.no_grad(), self.average.in_place():
                own = keys[self.ranks.rank :: self.ranks.count]
                # Where ranks gather parameters for each other, all of them evaluate as many batches.
                spare = -(-len(keys) // self.ranks.count) - len(own) if self.fully_sharded else 0
                batches_of = self._evaluation_batches(fetcher, [*own, *[keys[0]] * spare])
                for number, batch in enumerate(batches_of):
                    scores = self.scores(self.on_device(batch))
                    if number < len(own):
                        evaluation.add(scores)
        except Exception as error:
            if is_out_of_memory(error):
                raise EvaluationMemoryError(str(error)) from error
            raise
        self.modes.train(self.model)
        return evaluation.values(self.ranks.all_gathered)

    def measurements(self) -> Iterator[Measurement]:
        """Train for the whole budget; evaluate at equal fractions of it and at its end.

        Where an earlier attempt left a checkpoint, its measurements are yielded again and training resumes from it.
        """
        setup = self.setup
        plans = [run.plan for run in setup.steps() for _ in range(run.count)]
        clock = StepClock(self, counts_memory=len(plans) >= 4 * COUNTED_STEPS)
        facts: dict[str, Parameter] = self.facts(len(plans))
        checkpoint = Checkpoint.of(setup)
        done, seen, since = self._resume(checkpoint, plans, clock)
        yield from checkpoint.measurements
        if seen:
            facts["resumed_at"] = seen
        loader = self.loader(plans[done:], seen)
        points = (point for point in evaluation_points(setup.samples_budget, setup.training.evaluations) if point > seen)

        self.modes.train(self.model)
        due, loss_steps = next(points), since.steps
        loss_sum = LossSum(self.device, since.loss_sum)
        clock.restart()
        for number, plan in enumerate(plans[done:], start=done + 1):
            size = plan.effective_batch
            if self._measures_noise(plan):
                self.noise.select(number, len(plans))
            else:
                self.noise.active = False
            fraction = (seen + size / 2) / setup.samples_budget
            self.train_step(plan, loader, fraction, clock, loss_sum)
            seen += size
            loss_steps += 1
            # Reading the loss synchronises with the GPU, so it is read at steps 1, 2, 4, 8, ... and every 64th.
            diverged = (number & (number - 1) == 0 or number % 64 == 0) and not math.isfinite(float(loss_sum))
            if seen < due and not diverged:
                if due_now := checkpoint.wanted(number, self.ranks):
                    until_now = clock.fork()
                    since = _SinceEvaluation(float(loss_sum), loss_steps)
                    if math.isfinite(since.loss_sum):
                        self._save(checkpoint, number, seen, until_now, since)
                    if due_now == LEAVE:
                        self.ranks.max_over_ranks(0.0)  # the others wait until rank 0 has written
                        raise Leaving
                    clock.restart()
                continue
            elapsed_s = clock.elapsed_s()
            train_loss = float(loss_sum) / loss_steps
            facts |= clock.facts()
            facts |= self.units_facts(seen, elapsed_s)
            if self.live is not None:
                facts |= self.live.checked_facts(self.ranks)
            self.noise.read(self.ranks.mean)
            scores = self.evaluate()
            if names := ", ".join(undefined(scores)):
                facts["undefined"] = names
            if setup.model_folder is not None and seen >= setup.samples_budget:
                facts |= self._finished(setup.model_folder)
            measurement = Measurement(
                samples_seen=seen,
                elapsed_s=elapsed_s,
                accuracy=scores.get("accuracy"),
                scores=scores,
                train_loss=train_loss,
                facts={**facts, **self.noise.facts(), **checkpoint.facts()},
            )
            checkpoint.add(measurement)
            leaves = self.ranks.max_over_ranks(float(asked_to_leave() and not self.ranks.rank)) > 0
            if math.isfinite(train_loss) and seen < setup.samples_budget:
                due_now = checkpoint.due(self.ranks.max_over_ranks(0.0 if self.ranks.rank else checkpoint.waited_s()))
                if due_now or leaves:
                    self._save(checkpoint, number, seen, clock, _SinceEvaluation())
            yield measurement
            if not math.isfinite(train_loss):
                return
            if leaves and seen < setup.samples_budget:
                raise Leaving
            loss_sum, loss_steps = LossSum(self.device), 0
            due = next((point for point in points if point > seen), setup.samples_budget)
            clock.restart()

    def _finished(self, folder: str) -> dict[str, Parameter]:
        """Save the trained model; returns its scores on the test set, if there is one."""
        state = self.state()
        if not self.ranks.rank:
            model = self.model
            if self.fully_sharded:
                model = self.task.model(self.setup)
                model.load_state_dict(state["model"])
            with self.average.in_place():
                self.task.save(model, Path(folder), self.setup)
            save_state(Path(folder) / "optimizer.pt", state["optimizer"])
        if self.data.test is None:
            return {}
        return {f"test_{name}": score for name, score in self.evaluate(fetcher=self.fetcher(self.data.test)).items()}

    def state(self) -> dict[str, Any]:
        """The whole model's and optimizer's state, whatever ranks share out; complete on rank 0. All ranks must call it."""
        if self.fully_sharded:
            return {"model": model_state(self.model), "optimizer": optimizer_state(self.optimizer)}
        optimizer = whole_state(self.optimizer) if self.sharded is None else self.sharded.state_dict()
        return {"model": self.model.state_dict(), "optimizer": optimizer, "average": [*self.averages]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned on rank 0, with whatever number of ranks."""
        if self.fully_sharded:
            load_model_state(self.model, state["model"])
            load_optimizer_state(self.optimizer, state["optimizer"])
        else:
            self.model.load_state_dict(state["model"])
            if self.sharded is None:
                load_whole_state(self.optimizer, state["optimizer"])
            else:
                self.sharded.load_state_dict(state["optimizer"])
            if state.get("average"):
                self.average.load(state["average"])

    def _save(self, checkpoint: Checkpoint, steps: int, seen: int, clock: StepClock, since: _SinceEvaluation) -> None:
        """Write a checkpoint: rank 0 writes it, with the random state of every rank."""
        self.noise.read(self.ranks.mean)
        # A mean over ranks of running means is the running mean of their mean: between evaluations too, nothing changes.
        self.ranks.sync_batch_norm_statistics(batch_norms(self.model))
        rng_states = self.ranks.all_gathered({"states": [random_state(self.device)]})["states"]
        state = self.state()
        if self.ranks.rank:
            return
        checkpoint.save(
            {
                "steps": steps,
                "samples_seen": seen,
                "since_evaluation": since.to_dict(),
                **state,
                "scaler": self.scaler.state_dict(),
                "noise": self.noise.state(),
                "clock": clock.state(),
                "rng_state": rng_states,
                "stream": None if self.live is None else self.live.state(seen),
            }
        )

    def _resume(
        self, checkpoint: Checkpoint, plans: Sequence[BatchPlan], clock: StepClock
    ) -> tuple[int, int, _SinceEvaluation]:
        """Resume from the checkpoint if there is one; returns steps, samples seen, and what was since the last evaluation."""
        state = checkpoint.load()
        steps = 0 if state is None else int(state["steps"])
        seen = sum(plan.effective_batch for plan in plans[:steps])
        # With another micro-batch cap the last steps may differ. All ranks resume, or none does.
        valid = state is not None and steps > 0 and state["samples_seen"] == seen
        if state is None or not all(self.ranks.all_gathered({"valid": [valid]})["valid"]):
            checkpoint.measurements.clear()
            return 0, 0, _SinceEvaluation()
        self.load_state(state)
        self.scaler.load_state_dict(state["scaler"])
        self.noise.set_state(state["noise"])
        clock.set_state(state["clock"])
        if self.live is not None:
            self.live.set_state(state["stream"])
        states = state["rng_state"]
        if len(states) == self.ranks.count:  # with other ranks, each keeps a beginning of its own
            set_random_state(states[self.ranks.rank], self.device)
        return steps, seen, _SinceEvaluation.from_dict(state["since_evaluation"])

    def train_step(self, plan: BatchPlan, loader: Iterator[Any], fraction: float, clock: StepClock, loss_sum: LossSum) -> None:
        """One planned step at a fraction of the budget, the same in trials and in step-time profiles.

        Args:
            loss_sum: the step's mean loss is added to it.
        """
        with clock.step(plan.effective_batch):
            self.set_rate(fraction)
            loss_sum += self.step(self.micro_batches(plan, loader), plan.effective_batch)

    def loader(self, plans: Iterable[BatchPlan], position: int = 0) -> Iterator[Any]:
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
        return self.setup.training.pin_memory and pins(self.device) and not self.resident_bytes

    def _evaluation_batches(self, fetcher: Fetcher, keys: Sequence[SampleKeys]) -> Iterator[Any]:
        """Batches for evaluation; processes that load them cost a moment to start, so only several batches are worth them."""
        workers = min(self.setup.training.workers, len(keys) - 1) if not self.resident_bytes else 0
        return batches(fetcher, keys, max(workers, 0), self._pins)

    def micro_batches(self, plan: BatchPlan, loader: Iterator[Any]) -> list[tuple[int, Any]]:
        """A step's micro-batches on this device: samples, and a function that takes the batch from the loader.

        Where parameters are sharded, every rank has as many; those without a sample of their own get any.
        """
        sizes = [samples for samples in plan.micro_batches(self.ranks.rank) if samples or self.fully_sharded]
        return [(samples, (lambda: next(loader)) if samples else self._any_sample) for samples in sizes]

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

    def _measures_noise(self, plan: BatchPlan) -> bool:
        # The remainder step is too small and noisy. With a gradient scaler, gradients are not at their true scale.
        splits = plan.largest_micro_batch < plan.effective_batch
        # Sharded gradients are never those of one rank's samples alone.
        # A part of a loss that compares samples is not a smaller batch's loss.
        alone = self.cache is None and not self.scaler.is_enabled() and not self.fully_sharded
        return splits and plan == self.setup.plan and alone

    def facts(self, steps: int) -> dict[str, Parameter]:
        """What is known of a training of so many steps before it begins."""
        plan = self.setup.plan
        facts: dict[str, Parameter] = {
            "steps": steps,
            "optimizer": type(self.optimizer).__name__,
            "model_parameters": sum(parameter.numel() for parameter in self.parameters),
        }
        if self.setup.training.ema is not None:
            facts["ema_decay"] = self.setup.ema_decay(plan.effective_batch)
        group = self.optimizer.param_groups[0]
        if "momentum" in group:
            facts |= {"momentum": float(group["momentum"]), "nesterov": bool(group.get("nesterov", False))}
        if any(True for _ in batch_norms(self.model)):
            # Synchronised BatchNorm normalises over the micro-batches of all devices, otherwise over each device's own.
            all_devices = -(-plan.effective_batch // plan.accumulation)
            facts["ghost_batch"] = all_devices if self.setup.training.sync_batch_norm else plan.largest_micro_batch
        return facts


@dataclass
class _SinceEvaluation:
    """What a training has summed up since its last evaluation: the losses of steps."""

    loss_sum: float = 0.0
    steps: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"loss_sum": self.loss_sum, "steps": self.steps}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> _SinceEvaluation:
        return cls(values["loss_sum"], values["steps"])


class _LossOf(nn.Module):
    """A micro-batch's loss as a module, so that DistributedDataParallel can wrap any use a task makes of its model."""

    def __init__(self, task: Task, model: nn.Module, setup: TrialSetup) -> None:
        super().__init__()
        self.task, self.model, self.setup = task, model, setup

    # On one device, skip nn.Module.__call__: it only adds hooks, and this module has none.
    def __call__(self, batch: Any, samples: int) -> tuple[Tensor, Tensor | float]:
        return self.forward(batch, samples)

    def forward(self, batch: Any, samples: int) -> tuple[Tensor, Tensor | float]:
        loss = self.task.loss(self.model, batch, self.setup)
        check_loss(self.task, loss, samples)
        return loss.total, loss.denominator


class _ShardedLossOf(_LossOf):
    """The same where parameters are sharded; their hooks gather them. Without `samples`, the task's scores."""

    __call__ = nn.Module.__call__

    def forward(self, batch: Any, samples: int | None) -> Any:
        if samples is None:
            return self.task.score(self.model, batch, self.setup)
        return super().forward(batch, samples)


def rescale_gradients(gradients: list[Tensor], denominator: Tensor | float, size: int) -> None:
    """Rescale gradients from a mean over `size` samples to the loss's own denominator, in place."""
    if not isinstance(denominator, Tensor):
        if denominator == size:
            return
        # Unlike a copy, a fill does not synchronise with the GPU.
        denominator = torch.full((), denominator, device=gradients[0].device, dtype=widest_float(gradients[0].device))
    # In double precision where there is one: in single, the ratio of two counts would lose eight digits.
    denominator = denominator.to(widest_float(denominator.device))
    # Where every label of a step is ignored, its gradient is 0 rather than 0/0.
    ratio = torch.where(denominator > 0, size / denominator.clamp_min(torch.finfo(denominator.dtype).tiny), 0.0)
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient._values() if gradient.is_sparse else gradient)
    for dtype, same in by_type.items():
        if dtype in (torch.bfloat16, torch.float16):
            for gradient in same:  # rounded to so few digits, the ratio itself would be off by up to .4 %
                gradient.copy_(gradient.float() * ratio.float())
        else:
            torch._foreach_mul_(same, ratio.to(dtype))


def train_task(task: Task, setup: TrialSetup) -> Iterator[Measurement]:
    """A task as a generator, the interface of a custom training loop."""
    yield from TrainingRun(task, setup).measurements()


def configure_torch(setup: TrialSetup) -> None:
    """Set what torch keeps for the whole process: threads, kernel selection, the precision of matrix products, the heap.

    Raises:
        StudyFileError: a precision that the device does not have.
    """
    precision = setup.training.precision
    if setup.device == "cpu":
        if precision == "tf32":
            message = "expected fp32, bf16 or fp16 on a CPU, got tf32, which only NVIDIA's GPUs have"
            raise StudyFileError(Fault("training.precision", message))
        _disable_heap_trimming()
    if torch.get_num_threads() != setup.cpus:
        torch.set_num_threads(setup.cpus)
    torch.backends.cudnn.benchmark = setup.training.cudnn_benchmark
    # By default convolutions round their factors and matrix products do not: fp32 would mean two things.
    allow_tf32(precision != "fp32")


def allow_tf32(allowed: bool) -> None:
    """Let matrix products and convolutions of a GPU round their factors to TF32, or not."""
    if hasattr(torch.backends, "fp32_precision"):
        # torch 2.9 and newer have names per operation beside these. These set those too, unless this one, which the user's
        # code may have set, says otherwise: then even reading them raises.
        torch.backends.fp32_precision = "none"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def _disable_heap_trimming() -> None:
    """Make malloc keep freed memory: returning large blocks to the system costs up to half the time of a large micro-batch."""
    with suppress(OSError, AttributeError):  # a C library without mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(int(mixed(seed)) & 0xFFFFFFFF)
    torch.manual_seed(seed)
