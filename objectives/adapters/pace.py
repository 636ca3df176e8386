"""What a trial asks of somebody else's training loop, step by step: which samples, at which rate, and when to measure.

The loop keeps its forward and backward passes, its hooks and its optimizer; `Pace` keeps the laws: every step holds exactly
its batch, the budget is met to the sample, schedule and evaluations are fractions of it, seconds leave evaluation out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ...spaces.errors import TaskError
from ...spaces.plan import BatchPlan, step_plans
from ...spaces.schedule import evaluation_points, rate_factor
from ...spaces.trial import Measurement, Parameter, TrialSetup
from ..batches import Fetcher, SampleStream, batches
from ..checkpoint import Checkpoint, random_state, set_random_state
from ..step_clock import StepClock
from ..training import batch_norms, check_optimizer, correct_batch_norm, keep_heap, seed_everything


def study_faults(where: str, given: Container[str], says: Mapping[str, str]) -> list[str]:
    """A fault for each of a trainer's arguments that the study says itself, with the key of study.yaml that says it."""
    return [f"{where}: {name}: the study says it; write {key} in study.yaml" for name, key in says.items() if name in given]


class Pace:
    """One attempt's budget, walked by a loop that is not ours.

    `plans[number]` is the step that comes next, `seen` the samples trained on. Where an earlier attempt left a checkpoint,
    both begin there, and `told` holds what it measured.

    Args:
        where: the adapter's name, for messages.

    Raises:
        TaskError: the study asks for what such a loop cannot be given.
    """

    # Made in `begin`, when the loop has them.
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    clock: StepClock

    def __init__(self, setup: TrialSetup, where: str) -> None:
        self.setup, self.where = setup, where
        self._refuse()
        if setup.device == "cpu":
            keep_heap()
        if torch.get_num_threads() != setup.cpus:
            torch.set_num_threads(setup.cpus)
        torch.backends.cudnn.benchmark = setup.training.cudnn_benchmark
        full, last = step_plans(setup.plan, setup.samples_budget, **setup.limits)
        self.plans = (setup.plan,) * full + tuple(last)
        ends = tuple(accumulate(plan.effective_batch for plan in self.plans))
        points = evaluation_points(setup.samples_budget, setup.training.evaluations)
        # The first step that ends at a point or past it; a long step may pass several.
        self._measured_after = {bisect_left(ends, point) + 1 for point in points}
        self.checkpoint = Checkpoint.of(setup)
        self._state = self.checkpoint.load()
        self.number = 0 if self._state is None else int(self._state["steps"])
        self.seen = ends[self.number - 1] if self.number else 0
        told = self.checkpoint.measurements
        if not told or told[-1].samples_seen != self.seen:  # smaller passes may end a budget in other steps
            self._state, self.number, self.seen = None, 0, 0
            told.clear()
        self.told = tuple(told)
        self.lost = False  # the loss is not finite any more: measure and end
        self._facts: dict[str, Parameter] = {"steps": len(self.plans), **({"resumed_at": self.seen} if self.seen else {})}
        self._fetched = self.number
        self._micro_batches: Generator[Any] | None = None
        self._timed: AbstractContextManager[None] | None = None
        self.measuring = False  # between the step that says so and `go_on`

    def _refuse(self) -> None:
        training = self.setup.training
        if self.setup.plan.devices > 1:
            raise TaskError(
                f"{self.where}: expected one device for each trial, got {self.setup.plan.devices}. "
                "Write devices: {per_trial: 1}, or train on several with a Task."
            )
        if training.precision == "fp16" and self.setup.device == "cpu":
            raise TaskError(f"training.precision: expected fp32 or bf16, for {self.where} knows fp16 on GPUs alone; got fp16")
        for key in ("channels_last", "sync_batch_norm"):
            if getattr(training, key):
                raise TaskError(f"training.{key}: expected false, for {self.where} does not do it; got true")

    @property
    def plan(self) -> BatchPlan:
        """The step that is taken, or comes next."""
        return self.plans[self.number]

    @property
    def stretches(self) -> int:
        """Measurements that are still to come."""
        return sum(after > self.number for after in self._measured_after)

    def micro_batches(self, loader: Any) -> Iterator[Any]:
        """The passes from the next step on up to the next measurement, as batches that `loader` would make of those samples.

        Ask again after each measurement; asked again without a step in between, it begins with the same samples.

        Raises:
            TaskError: data that has no places, or more or less of it than the study says.
        """
        if self._micro_batches is None or self._fetched != self.number:
            self._micro_batches, self._fetched = self._batches(loader), self.number
        while self._fetched < len(self.plans) and not self.lost:
            plan = self.plans[self._fetched]
            self._fetched += 1
            for _ in plan.micro_batches():
                yield next(self._micro_batches)
            if self._fetched in self._measured_after:
                return

    def _batches(self, loader: Any) -> Generator[Any]:
        setup = self.setup
        dataset: Any = getattr(loader, "dataset", None)
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TaskError(
                f"{self.where}: expected training data with a length, in a torch DataLoader (map-style, so that any sample may "
                f"be asked for), got {type(loader if dataset is None else dataset).__name__}"
            )
        size = len(dataset)
        if setup.training.samples not in (None, size):
            raise TaskError(f"training.samples: expected the length of the training set, {size}, got {setup.training.samples}")
        stream = SampleStream(size, setup.seed)

        def keys(position: int) -> Iterator[Any]:
            for plan in self.plans[self.number :]:
                for samples in plan.micro_batches():
                    yield stream.take(position, samples)
                    position += samples

        workers = setup.training.workers or loader.num_workers
        pinned = setup.training.pin_memory and setup.device == "gpu"
        yield from batches(Fetcher(dataset, loader.collate_fn), keys(self.seen), workers, pinned)

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        """Before the first step, when model and optimizer lie on their device.

        Args:
            scaler: of fp16's gradients, where there is one.

        Raises:
            TaskError: the rule's settings did not reach the optimizer.
        """
        setup = self.setup
        check_optimizer(f"{self.where}: the optimizer", optimizer, setup)
        self.model, self.optimizer, self._scaler = model, optimizer, scaler
        self._peak_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.device = next(model.parameters()).device
        correct_batch_norm(model, setup.plan.accumulation)
        self._facts["optimizer"] = type(optimizer).__name__
        self._facts["model_parameters"] = sum(one.numel() for one in model.parameters() if one.requires_grad)
        if any(True for _ in batch_norms(model)):
            self._facts["ghost_batch"] = setup.plan.largest_micro_batch
        self.clock = StepClock(self, counts_memory=len(self.plans) >= 8 and not setup.training.compile)
        if self._state is None:
            # Dropout hangs on the seed alone, not on what making the model and reading the data drew.
            seed_everything(setup.seed)
        else:
            model.load_state_dict(self._state["model"])
            optimizer.load_state_dict(self._state["optimizer"])
            if scaler is not None:
                scaler.load_state_dict(self._state["scaler"])
            self.clock.set_state(self._state["clock"])
            set_random_state(self._state["dice"], self.device)
            self._state = None
        self.go_on()

    def go_on(self) -> None:
        """Begin, or go on after a measurement: seconds count from here."""
        self._summed, self._since = torch.zeros((), device=self.device, dtype=torch.float64), 0
        self.measuring = False
        self.clock.restart()

    def before_step(self) -> None:
        """Put the schedule's rate at the step's middle into the optimizer, and begin to time."""
        setup, size = self.setup, self.plan.effective_batch
        factor = rate_factor(setup.training.schedule, setup.training.warmup, (self.seen + size / 2) / setup.samples_budget)
        for group, rate in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = rate * factor
        self._timed = self.clock.step(size)
        self._timed.__enter__()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the whole of the loop: a step that raises is left as it was entered, and loaders end."""
        try:
            yield
        except BaseException as error:
            if self._timed is not None:
                self._timed.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            if self._micro_batches is not None:
                self._micro_batches.close()  # loader processes end with the training, not with a collection

    def after_step(self, loss: Tensor) -> bool:
        """Count a step whose mean loss this was.

        Returns:
            Whether to measure now. The clock stands still from here until `go_on`.
        """
        assert self._timed is not None
        timed, self._timed = self._timed, None
        timed.__exit__(None, None, None)
        self._summed += loss
        self._since += 1
        self.seen += self.plan.effective_batch
        self.number += 1
        number = self.number
        # Reading the loss waits for a GPU, so it is read at steps 1, 2, 4, 8, ... and every 64th.
        self.lost = (number & (number - 1) == 0 or number % 64 == 0) and not math.isfinite(float(self._summed))
        self.measuring = number in self._measured_after or self.lost
        if self.measuring:
            self._elapsed_s = self.clock.elapsed_s()
        return self.measuring

    def measurement(self, scores: Mapping[str, float]) -> Measurement:
        """What was measured after the step that said so, kept in the checkpoint where it is time to."""
        train_loss = float(self._summed) / max(self._since, 1)
        if self.clock.peak_bytes:
            self._facts["peak_bytes"] = self.clock.peak_bytes
        made = Measurement(
            samples_seen=self.seen,
            elapsed_s=self._elapsed_s,
            accuracy=scores.get("accuracy"),
            scores=dict(scores),
            train_loss=train_loss,
            facts=dict(self._facts),
        )
        self.checkpoint.add(made)
        if math.isfinite(train_loss) and self.number < len(self.plans) and self.checkpoint.due():
            self.checkpoint.save(
                {
                    "steps": self.number,
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "scaler": self._scaler.state_dict() if self._scaler is not None else {},
                    "clock": self.clock.state(),
                    "dice": random_state(self.device),
                }
            )
            if self.checkpoint.trouble:
                self._facts["checkpoint"] = self.checkpoint.trouble
        return made
