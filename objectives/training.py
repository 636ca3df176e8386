"""The training loop: a step of any integer batch in passes that equal the one large batch.

Each pass back-propagates its summed loss over the step's samples; where the loss divides by something else
(tokens, class weights), the step's gradient is brought to that denominator before the optimizer moves.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..spaces.errors import TaskError
from ..spaces.plan import BatchPlan, step_plans
from ..spaces.schedule import evaluation_points, rate_factor
from ..spaces.trial import Measurement, Parameter, TrialSetup
from .batches import Fetcher, SampleKeys, SampleStream, batches, in_order, mixed, to_device
from .checkpoint import Checkpoint, random_state, set_random_state
from .data_parallel import Ranks
from .noise_scale import NoiseScale
from .step_clock import COUNTED_STEPS, StepClock
from .task import Data, Loss, Score, Task

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Of malloc.h: blocks that may be mapped one by one, and free memory at the heap's top that goes back to the system.
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1

# Evaluation keeps no activations, so it takes more samples at once than training does.
_EVALUATION_BATCH = 512


class EvaluationMemoryError(torch.OutOfMemoryError):
    """Memory ran out while evaluating: the passes of evaluation are to shrink, not those of training."""


class TrainingRun:
    """One attempt at training a task: its data, model and optimizer, ready to step; on several devices, one rank's part.

    Raises:
        TaskError: the task's data, model or optimizer break their contract.
    """

    def __init__(self, task: Task, setup: TrialSetup) -> None:
        self.task, self.setup = task, setup
        self.ranks = Ranks.of(setup.plan.devices)
        self.device = torch.device("cuda", self.ranks.rank) if setup.device == "gpu" else torch.device("cpu")
        if self.device.type == "cpu":
            keep_heap()
        if torch.get_num_threads() != setup.cpus:
            torch.set_num_threads(setup.cpus)
        torch.backends.cudnn.benchmark = setup.training.cudnn_benchmark
        if self.device.type == "cuda" and setup.memory_limit_bytes is not None:
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(setup.memory_limit_bytes / total, 1.0), self.device)
        seed_everything(setup.seed)
        self.data = _checked_data(task.data(setup))
        self.stream = SampleStream(len(self.data.train), setup.seed)  # type: ignore[arg-type]
        self.train_fetcher = Fetcher(self.data.train)
        self.evaluation_fetcher = Fetcher(self.data.evaluation)
        # The model's first weights hang on the seed alone, not on what reading the data drew before.
        seed_everything(setup.seed)
        model = task.model(setup)
        if not isinstance(model, nn.Module):
            raise TaskError(f"{_name(task)}.model: expected a torch.nn.Module, got {type(model).__name__}")
        correct_batch_norm(model, len([size for size in setup.plan.micro_batches(self.ranks.rank) if size]))
        if setup.training.sync_batch_norm and self.ranks.count > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if setup.training.channels_last:
            model = model.to(memory_format=torch.channels_last)
        self._train_on(model.to(self.device))
        if setup.training.compile:
            self.model.compile()
        self.noise = NoiseScale()
        self.loss: Any = _LossOf(task, self.model, setup)
        if self.ranks.count > 1:
            self.loss = self.ranks.data_parallel(self.loss, self.device, self.noise)
        if self.ranks.rank:
            # Weights are alike everywhere by now; what a model draws while it trains (dropout) is not to be.
            torch.manual_seed(int(mixed(setup.seed, self.ranks.rank)) >> 1)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=setup.training.precision == "fp16")

    def _train_on(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise TaskError(f"{_name(self.task)}.model: expected parameters to train, got none")
        self.optimizer = self.task.optimizer(iter(self.parameters), self.setup)
        check_optimizer(f"{_name(self.task)}.optimizer", self.optimizer, self.setup)
        self._peak_rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def on(self, model: nn.Module, device: torch.device) -> TrainingRun:
        """The same run with another copy of the model and an optimizer of its own, to look at memory with.

        Its scaler is off: a fake tensor has no value to look for overflows in.
        """
        other = copy.copy(self)
        other.device = device
        other._train_on(model)
        other.loss = _LossOf(self.task, model, self.setup)
        other.noise = NoiseScale()
        other.scaler = torch.amp.GradScaler(device.type, enabled=False)
        return other

    def autocast(self) -> AbstractContextManager[Any]:
        """Around a forward pass: the precision the study asks for."""
        precision = self.setup.training.precision
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, _DTYPES[precision])

    def step(self, micro_batches: Sequence[tuple[int, Any]], size: int) -> Tensor:
        """One optimizer step over `size` samples, this device's part in passes of (samples, batch).

        A batch may be a function that makes it. Devices talk in the last pass alone.

        Returns:
            The step's mean loss, a detached scalar on the device, the same on all devices.
        """
        totals: list[Tensor] = []
        denominator: Tensor | float = 0.0
        looks = self.noise.looks
        for number, (samples, batch) in enumerate(micro_batches, start=1):
            made = self._on_device(batch() if callable(batch) else batch)
            last = number == len(micro_batches)
            with self.ranks.sync_context(self.loss, last):
                with self.autocast():
                    loss_total, loss_denominator = self.loss(made, samples)
                del made
                totals.append(loss_total.detach().double())
                denominator = denominator + loss_denominator
                summing = self.ranks.begin_sum(totals, denominator) if last else None
                self.scaler.scale(loss_total).backward(torch.full_like(loss_total, 1 / size))
            if looks and number == 1 and self.ranks.count == 1:
                self.noise.see(self._gradients())
                part: tuple[float, Tensor | float] = samples, loss_denominator
        if self.ranks.count > 1:
            part = self.ranks.mean_share(size), denominator
        total, denominator = self.ranks.end_sum(summing)
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        rescale_gradients(self._gradients(), denominator, size)
        if self.setup.training.clip_norm is not None:
            whole = [nn.utils.clip_grad_norm_(self.parameters, self.setup.training.clip_norm)]
        elif looks:
            whole = list(torch._foreach_norm(self._gradients()))
        if looks:
            self.noise.add_step(*part, size, whole)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # A step whose every label is ignored has no loss, rather than 0/0.
        return total / (torch.where(denominator > 0, denominator, 1) if isinstance(denominator, Tensor) else denominator or 1.0)

    def _on_device(self, batch: Any) -> Any:
        images_last = torch.channels_last if self.setup.training.channels_last else None
        return to_device(batch, self.device, images_last)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def freeze_updates(self) -> None:
        """Train at rate zero from here on: every step costs what it costs and changes nothing that the optimizer moves."""
        self._peak_rates = [0.0] * len(self._peak_rates)

    def set_rate(self, fraction: float) -> None:
        """Put the schedule's learning rate for a fraction of the budget into every group."""
        factor = rate_factor(self.setup.training.schedule, self.setup.training.warmup, fraction)
        for group, rate in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = rate * factor

    def evaluate(self, some: Sequence[SampleKeys] | None = None) -> dict[str, float]:
        """Every metric of the task over the evaluation data, or over some of it, each sample once.

        Several devices take turns at the batches. What they found is added up exactly, so neither the number of devices nor
        their order changes a digit where the batches are the same.
        """
        self.model.eval()
        self.ranks.sync_batch_norm_statistics(batch_norms(self.model))
        count = len(self.data.evaluation)  # type: ignore[arg-type]
        size = self.setup.evaluation_batch or max(self.setup.plan.largest_micro_batch, _EVALUATION_BATCH)
        keys = some or in_order(count, min(size, -(-count // self.ranks.count)), self.setup.seed)
        found: dict[str, list[tuple[Any, Any]]] = {}
        try:
            with torch.no_grad():
                for batch in batches(self.evaluation_fetcher, keys[self.ranks.rank :: self.ranks.count], 0):
                    with self.autocast():
                        scores = self.task.score(self.model, self._on_device(batch), self.setup)
                    for name, score in named_scores(self.task, scores).items():
                        found.setdefault(name, []).append((score.total, score.denominator))
        except Exception as error:
            if is_out_of_memory(error):
                raise EvaluationMemoryError(str(error)) from error
            raise
        self.model.train()
        # Read at the end: each reading waits for a GPU.
        sums = {name: [(float(total), float(many)) for total, many in pairs] for name, pairs in found.items()}
        ratios = {
            name: _fsum(total for total, _ in pairs) / _fsum(many for _, many in pairs)
            for name, pairs in self.ranks.gathered(sums).items()
        }
        if ratios.get("accuracy", 0.0) > 1 + 1e-6:
            raise TaskError(
                f"{_name(self.task)}.score: expected an accuracy of right answers over all, so at most 1, got "
                f"{ratios['accuracy']:.4g}. Look at the shapes: (N, 1) == (N,) compares each with each."
            )
        return ratios

    def measurements(self) -> Iterator[Measurement]:
        """Train the whole budget; measure at equal fractions of it and at its end.

        Where an earlier attempt left a checkpoint, what it measured is told again and training goes on from there.
        """
        setup = self.setup
        full, last = step_plans(setup.plan, setup.samples_budget, **setup.limits)
        plans = [setup.plan] * full + list(last)
        clock = StepClock(self, counts_memory=len(plans) >= 4 * COUNTED_STEPS)
        facts: dict[str, Parameter] = self._facts(len(plans))
        checkpoint = Checkpoint.of(setup)
        done, seen = self._resume(checkpoint, plans, clock)
        yield from checkpoint.measurements
        if seen:
            facts["resumed_at"] = seen
        loader = self.loader(plans[done:], seen)
        points = (point for point in evaluation_points(setup.samples_budget, setup.training.evaluations) if point > seen)

        self.model.train()
        due, summed, since = next(points), torch.zeros((), device=self.device, dtype=torch.float64), 0
        clock.restart()
        for number, plan in enumerate(plans[done:], start=done + 1):
            size = plan.effective_batch
            if self._shows_noise(plan):
                self.noise.look_at(number, len(plans))
            else:
                self.noise.looks = False
            self.train_step(plan, loader, (seen + size / 2) / setup.samples_budget, clock, summed)
            seen += size
            since += 1
            # Reading the loss waits for a GPU, so it is read at steps 1, 2, 4, 8, ... and every 64th.
            lost = (number & (number - 1) == 0 or number % 64 == 0) and not math.isfinite(float(summed))
            if seen < due and not lost:
                continue
            elapsed_s = clock.elapsed_s()
            train_loss = float(summed) / since
            if clock.peak_bytes:
                facts["peak_bytes"] = clock.peak_bytes
            self.noise.read(self.ranks.mean)
            scores = self.evaluate()
            measurement = Measurement(
                samples_seen=seen,
                elapsed_s=elapsed_s,
                accuracy=scores.get("accuracy"),
                scores=scores,
                train_loss=train_loss,
                facts={**facts, **self.noise.facts()},
            )
            checkpoint.add(measurement)
            if math.isfinite(train_loss) and seen < setup.samples_budget:
                self._save(checkpoint, number, clock)
                if checkpoint.trouble:
                    facts["checkpoint"] = checkpoint.trouble
            yield measurement
            if not math.isfinite(train_loss):
                return
            summed, since = torch.zeros_like(summed), 0
            due = next((point for point in points if point > seen), setup.samples_budget)
            clock.restart()

    def _save(self, checkpoint: Checkpoint, steps: int, clock: StepClock) -> None:
        """Write a checkpoint down where it is time to; rank 0 does, and all ranks say where their dice stand."""
        waited_s = 0.0 if self.ranks.rank else checkpoint.waited_s()
        if checkpoint.url is None or not checkpoint.due(self.ranks.longest(waited_s)):
            return
        dice = self.ranks.gathered({"dice": [random_state(self.device)]})["dice"]
        if self.ranks.rank:
            return
        checkpoint.save(
            {
                "steps": steps,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "noise": self.noise.state(),
                "clock": clock.state(),
                "dice": dice,
            }
        )

    def _resume(self, checkpoint: Checkpoint, plans: Sequence[BatchPlan], clock: StepClock) -> tuple[int, int]:
        """Go on from the checkpoint where there is one: steps taken and samples seen, or zeros."""
        state = checkpoint.load()
        steps = 0 if state is None else int(state["steps"])
        seen = sum(plan.effective_batch for plan in plans[:steps])
        # Smaller passes may end a budget in other steps; and what one rank cannot read, no rank goes on from.
        agreed = steps and checkpoint.measurements and checkpoint.measurements[-1].samples_seen == seen
        if state is None or not all(self.ranks.gathered({"agreed": [bool(agreed)]})["agreed"]):
            checkpoint.measurements.clear()
            return 0, 0
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.noise.set_state(state["noise"])
        clock.set_state(state["clock"])
        set_random_state(state["dice"][self.ranks.rank], self.device)
        return steps, seen

    def train_step(self, plan: BatchPlan, loader: Iterator[Any], fraction: float, clock: StepClock, summed: Tensor) -> None:
        """One planned step at a fraction of the budget, as trials take it and as the step-time law is told of it.

        Args:
            summed: what the step's mean loss is added to.
        """
        with clock.step(plan.effective_batch):
            self.set_rate(fraction)
            summed += self.step(self.micro_batches(plan, loader), plan.effective_batch)

    def loader(self, plans: Iterable[BatchPlan], position: int = 0) -> Iterator[Any]:
        """This device's batches of every pass of so planned steps, from a position of the stream on."""
        training = self.setup.training
        pinned = training.pin_memory and self.device.type == "cuda"
        return batches(self.train_fetcher, self._micro_batch_keys(plans, position), training.workers, pinned)

    def _micro_batch_keys(self, plans: Iterable[BatchPlan], position: int) -> Iterator[SampleKeys]:
        for plan in plans:
            mine = position + sum(plan.shares[: self.ranks.rank])
            for samples in plan.micro_batches(self.ranks.rank):
                if samples:
                    yield self.stream.take(mine, samples)
                    mine += samples
            position += plan.effective_batch

    def micro_batches(self, plan: BatchPlan, loader: Iterator[Any]) -> list[tuple[int, Any]]:
        """A planned step's passes on this device, each with a call that takes its batch from the loader."""
        return [(samples, lambda: next(loader)) for samples in plan.micro_batches(self.ranks.rank) if samples]

    def _shows_noise(self, plan: BatchPlan) -> bool:
        # A remainder of a few samples would say little, and loudly. A scaler's gradients are not what they seem.
        in_parts = plan.largest_micro_batch < plan.effective_batch
        return in_parts and plan == self.setup.plan and not self.scaler.is_enabled()

    def _facts(self, steps: int) -> dict[str, Parameter]:
        plan = self.setup.plan
        facts: dict[str, Parameter] = {
            "steps": steps,
            "optimizer": type(self.optimizer).__name__,
            "model_parameters": sum(parameter.numel() for parameter in self.parameters),
        }
        group = self.optimizer.param_groups[0]
        if "momentum" in group:
            facts |= {"momentum": float(group["momentum"]), "nesterov": bool(group.get("nesterov", False))}
        if any(True for _ in batch_norms(self.model)):
            # Synchronised, the passes of all devices are one; else each device's BatchNorm sees its own.
            whole = -(-plan.effective_batch // plan.accumulation)
            facts["ghost_batch"] = whole if self.setup.training.sync_batch_norm else plan.largest_micro_batch
        return facts


class _LossOf(nn.Module):
    """A pass's loss as a module, which DistributedDataParallel can wrap whatever the task does with its model."""

    def __init__(self, task: Task, model: nn.Module, setup: TrialSetup) -> None:
        super().__init__()
        self.task, self.model, self.setup = task, model, setup

    # Alone it is a plain function: what a module's call adds is for hooks, and it has none.
    def __call__(self, batch: Any, samples: int) -> tuple[Tensor, Tensor | float]:
        return self.forward(batch, samples)

    def forward(self, batch: Any, samples: int) -> tuple[Tensor, Tensor | float]:
        loss = self.task.loss(self.model, batch, self.setup)
        _check_loss(self.task, loss, samples)
        return loss.total, loss.denominator


def rescale_gradients(gradients: list[Tensor], denominator: Tensor | float, size: int) -> None:
    """Gradients over `size` samples become gradients over the loss's own denominator, in place."""
    if not isinstance(denominator, Tensor):
        if denominator == size:
            return
        device = gradients[0].device
        denominator = torch.full((), denominator, device=device)  # a fill does not wait for a GPU as a copy does
    # In double precision: a count of tokens over a count of samples would lose eight digits in single.
    denominator = denominator.double()
    # A step whose every label is ignored has no gradient, rather than 0/0.
    ratio = torch.where(denominator > 0, size / denominator.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    torch._foreach_mul_(gradients, ratio.to(gradients[0].dtype))


def train_task(task: Task, setup: TrialSetup) -> Iterator[Measurement]:
    """A task as the same kind of generator that people with a loop of their own write."""
    yield from TrainingRun(task, setup).measurements()


def is_out_of_memory(error: BaseException) -> bool:
    """Allocations that fail outside torch's caching allocator come as plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and any(sign in text for sign in ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA out of memory"))
    )


def release_memory(kind: str) -> None:
    """Give a GPU back what nobody here uses any more; DistributedDataParallel and its buckets hold each other."""
    if kind == "gpu":
        gc.collect()
        torch.cuda.empty_cache()


def batch_norms(model: nn.Module) -> Iterator[nn.modules.batchnorm._BatchNorm]:
    return (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))


def correct_batch_norm(model: nn.Module, micro_batches: int) -> None:
    """Running statistics move once a pass; this momentum makes k moves weigh as much as one."""
    for module in batch_norms(model):
        if module.momentum is not None:
            module.momentum = 1 - (1 - module.momentum) ** (1 / micro_batches)


def keep_heap() -> None:
    """Have malloc keep what it once got: handing large blocks back and forth costs up to half of a large pass's time."""
    with suppress(OSError, AttributeError):  # not the C library we know
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def _fsum(numbers: Iterable[float]) -> float:
    """The exact sum; what is not finite stays so rather than being an error."""
    values = list(numbers)
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(int(mixed(seed)) & 0xFFFFFFFF)
    torch.manual_seed(seed)


def _name(task: Task) -> str:
    return type(task).__name__


def _checked_data(data: Any) -> Data:
    if not isinstance(data, Data):
        raise TaskError(f"Task.data: expected Data(train, evaluation), got {type(data).__name__}")
    for name in ("train", "evaluation"):
        dataset = getattr(data, name)
        if not hasattr(dataset, "__len__") or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "fetch")):
            raise TaskError(f"Task.data: {name}: expected a map-style data set with a length, got {type(dataset).__name__}")
        if len(dataset) == 0:
            raise TaskError(f"Task.data: {name}: expected at least one sample, got an empty data set")
    return data


def _check_loss(task: Task, loss: Any, samples: int) -> None:
    where = f"{_name(task)}.loss"
    if not isinstance(loss, Loss):
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise TaskError(
            f"{where}: expected Loss(total, denominator), got {type(loss).__name__}{shape}. "
            "Write Loss(cross_entropy(..., reduction='sum'), len(labels))."
        )
    if not isinstance(loss.total, Tensor) or loss.total.dim() != 0:
        shape = str(tuple(loss.total.shape)) if isinstance(loss.total, Tensor) else type(loss.total).__name__
        raise TaskError(f"{where}: expected a scalar sum over {samples} samples, got shape {shape}. Use reduction='sum'.")
    if not isinstance(loss.denominator, Tensor) and not (math.isfinite(loss.denominator) and loss.denominator >= 0):
        raise TaskError(f"{where}: expected a denominator >= 0 that the mean divides by, got {loss.denominator!r}")
    if not loss.total.requires_grad:
        raise TaskError(f"{where}: expected a total that hangs on the model's parameters, got one without a graph")


def named_scores(task: Task, scores: Any) -> Mapping[str, Score]:
    """What a task's `score` gave, by name.

    Raises:
        TaskError: no scores.
    """
    if isinstance(scores, Score):
        return {"accuracy": scores}
    if isinstance(scores, Mapping) and all(isinstance(score, Score) for score in scores.values()):
        return scores
    raise TaskError(f"{_name(task)}.score: expected Score(total, denominator) or a dict of them, got {type(scores).__name__}")


def check_optimizer(where: str, optimizer: Any, setup: TrialSetup) -> None:
    """The settings of the rule must have reached the optimizer; layers may have fractions of them besides.

    Raises:
        TaskError: they have not; `where` is what made the optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"{where}: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    groups = optimizer.param_groups
    if not any(math.isclose(float(group["lr"]), setup.learning_rate, rel_tol=1e-6) for group in groups):
        rates = ", ".join(f"{float(group['lr']):.4g}" for group in groups)
        raise TaskError(
            f"{where}: expected a group at setup.learning_rate = {setup.learning_rate:.4g}, got {rates}. "
            "Write lr=setup.learning_rate."
        )
    if setup.rule == "adam_sde" and not any(
        all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(group.get("betas", (0, 0)), setup.betas, strict=True))
        for group in groups
    ):
        raise TaskError(
            f"{where}: rule adam_sde: expected a group with betas=setup.betas = {setup.betas}. "
            "Write betas=setup.betas, eps=setup.eps."
        )
    if setup.rule == "adamw_tau" and not any(
        math.isclose(float(group.get("weight_decay", 0.0)), setup.weight_decay, rel_tol=1e-6) for group in groups
    ):
        raise TaskError(
            f"{where}: rule adamw_tau: expected a group with weight_decay=setup.weight_decay = {setup.weight_decay:.4g}. "
            "Write weight_decay=setup.weight_decay."
        )
