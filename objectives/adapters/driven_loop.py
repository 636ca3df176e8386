"""Drive a third-party training loop step by step: which samples, at which learning rate, and when to evaluate.

The loop keeps its forward and backward passes, its hooks and its optimizer. `DrivenLoop` keeps the invariants: every step has
exactly its batch, the budget is exact to the sample, schedule and evaluations are fractions of it, times exclude evaluation.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from ...spaces.errors import TaskError
from ...spaces.plan import BatchPlan
from ...spaces.record import OURS_OF_SCORES, reported_name
from ...spaces.schedule import evaluation_points
from ...spaces.trial import Measurement, TrialSetup
from ..course import Course
from ..data.batches import Fetcher, RandomState, SampleStream, batches
from ..data.sample_weights import loader_order
from ..data.stream import InOrder
from ..loading import schedule_of
from ..machine.torch_settings import configure_torch, seed_everything
from ..model.batch_norm import correct_batch_norm
from ..optimizers import load_whole_state, whole_state
from ..parallel.data_parallel import Ranks
from ..profiling.memory.live_bytes import LiveBytes
from ..steps.rates import Rates
from ..steps.step_clock import StepClock
from ..task import check_kind, check_optimizer
from .coupled_loss import CoupledLoss


def study_faults(where: str, given: Container[str], study_keys: Mapping[str, str]) -> list[str]:
    """A fault for each trainer argument that the study sets itself, with its key in study.yaml."""
    return [
        f"{where}: {name}: set by the study; write {key} in study.yaml"
        for name, key in study_keys.items()
        if name in given
    ]


def zero_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give trainable parameters without a gradient one of 0: that of a step in which nothing counts."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class DrivenLoop:
    """One attempt's budget, trained by a third-party loop.

    `plans[number]` is the next step, `seen` the samples trained on. Where an earlier attempt left a checkpoint, both resume
    from it, and `reported` holds its measurements.

    Args:
        where: the adapter's name, for messages.
        couples_samples: whether the loss compares the samples of a batch, so that no step may be split.
        takes_steps: whether each batch is handed to code that takes its own optimizer steps: no step may be split either.
        coupled_loss: such a loss that is split exactly; None: the loss is the library's own.

    Raises:
        TaskError: the study uses an option that such a loop does not support.
    """

    # The library's training loader: set once it has created it.
    loader: Any
    # Set in `start`, once the loop has created them.
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    clock: StepClock
    averages: Sequence[Tensor] = ()
    # The loop that has begun last, while it lives.
    newest: ClassVar[Callable[[], DrivenLoop | None]] = staticmethod(lambda: None)

    def __init__(
        self,
        setup: TrialSetup,
        where: str,
        couples_samples: bool = False,
        coupled_loss: CoupledLoss | None = None,
        *,
        takes_steps: bool = False,
    ) -> None:
        self.setup, self.where, self.couples_samples = setup, where, couples_samples
        self.coupled_loss, self.takes_steps = coupled_loss, takes_steps
        self._check_supported()
        self.schedule = schedule_of(setup)
        configure_torch(setup)
        self.course = Course(setup, Ranks())
        self.plans, self.reported = self.course.plans, self.course.reported
        self._check_whole_steps()
        ends = tuple(accumulate(plan.effective_batch for plan in self.plans))
        points = evaluation_points(setup.samples_budget, setup.training.evaluations)
        # Each point maps to the first step that ends at or after it; one step may cover several points.
        self._measured_after = {bisect_left(ends, point) + 1 for point in points}
        self.diverged = False  # the loss is no longer finite: measure and end
        self._fetched = self.number
        self._tokens = 0  # of the steps so far
        self._fetched_tokens: dict[int, int] = {}  # by step, of those that are not over
        self._micro_batches: Generator[Any] | None = None
        self._step_context: AbstractContextManager[None] | None = None
        self.measuring = False  # from the step after which to measure until `resume_clock`

    def _check_supported(self) -> None:
        training = self.setup.training
        if self.setup.plan.devices > 1:
            raise TaskError(
                f"{self.where}: expected one device for each trial, got {self.setup.plan.devices}. "
                "Write devices: {per_trial: 1}, or train on several with a Task."
            )
        if training.precision == "fp16" and self.setup.device == "cpu":
            raise TaskError(
                f"training.precision: expected fp32 or bf16, because {self.where} supports fp16 on GPUs only; got fp16"
            )
        if training.ema is not None:
            raise TaskError(
                f"training.ema: expected null, because {self.where} evaluates and saves its own model; got {training.ema:g}. "
                "Remove it, or train a Task."
            )
        if training.sync_batch_norm:
            raise TaskError(
                f"training.sync_batch_norm: expected false, because {self.where} does not support it; got true"
            )

    def _check_whole_steps(self) -> None:
        reason = "couples_samples", "the loss compares the samples of a batch"
        if self.takes_steps:
            reason = "manual optimization", "the training step takes its own optimizer steps"
        for plan in self.plans if self.couples_samples or self.takes_steps else ():
            if len(sizes := plan.micro_batches()) > 1:
                raise TaskError(
                    f"{self.where}: {reason[0]}: expected steps of one micro-batch, because {reason[1]}; got "
                    f"{plan.effective_batch} samples as {' + '.join(map(str, sizes))}. Lower space.effective_batch, or raise "
                    "memory.largest_micro_batch, to batches that are one micro-batch."
                )

    @property
    def number(self) -> int:
        """The next step."""
        return self.course.number

    @property
    def seen(self) -> int:
        """Samples that were trained on."""
        return self.course.seen

    @property
    def plan(self) -> BatchPlan:
        """The plan of the current step, or of the next one."""
        return self.course.plan

    @property
    def done(self) -> bool:
        """Whether the whole budget was trained."""
        return self.number == len(self.plans) and not self.diverged

    def ended_early(self, reason: str) -> TaskError:
        """The error of a loop that left out steps, for this reason."""
        return TaskError(
            f"{self.where}: expected to train on {self.setup.samples_budget} samples; training ended after {self.seen}, "
            f"because {reason}. Leave stopping to the study: `stopping:` in study.yaml."
        )

    @property
    def _training_set(self) -> int:
        """Samples of the training set; 0 while unknown."""
        dataset: Any = getattr(getattr(self, "loader", None), "dataset", None)
        return len(dataset) if hasattr(dataset, "__len__") else 0

    @property
    def epoch(self) -> int:
        """Complete passes over the training set so far; while it is measured, an epoch has not ended."""
        return int(
            (self.seen - self.measuring)
            // (self._training_set or self.setup.samples_budget / self.setup.epochs)
        )

    @property
    def epochs(self) -> int:
        """Passes over the training set in the whole budget; the last one may be a part."""
        samples = self._training_set
        return -(-self.setup.samples_budget // samples) if samples else math.ceil(self.setup.epochs)

    @property
    def measurements_left(self) -> int:
        """Number of measurements still to come."""
        return sum(after > self.number for after in self._measured_after)

    def micro_batches(self) -> Iterator[Any]:
        """The micro-batches up to the next measurement, collated as the loader does.

        Call again after each measurement. Called again without a step in between, it starts with the same samples.

        Raises:
            TaskError: data without length or indexing, or of another length than the study says; a sampler of the user's own.
        """
        if self._micro_batches is None or self._fetched != self.number:
            self._micro_batches, self._fetched = self._batches(), self.number
        stream = self._micro_batches
        while self._fetched < len(self.plans) and not self.diverged:
            plan = self.plans[self._fetched]
            self._fetched += 1
            tokens, sizes = 0, plan.micro_batches()
            counts = self.coupled_loss is None or len(sizes) == 1  # otherwise they wait in host memory
            for _ in sizes:
                batch = LiveBytes.fetched(lambda: next(stream), counts=counts)
                tokens += _tokens_of(batch)
                self._fetched_tokens[self._fetched] = tokens
                yield batch
            if self._fetched in self._measured_after:
                return

    def fetcher(self) -> Fetcher:
        """The training data, collated as the loader does.

        Raises:
            TaskError: data without length or indexing, or of another length than the study says; a sampler of the user's own.
        """
        dataset: Any = getattr(self.loader, "dataset", None)
        if (
            not hasattr(dataset, "__len__")
            or not hasattr(dataset, "__getitem__")
            or isinstance(dataset, IterableDataset)
        ):
            raise TaskError(
                f"{self.where}: expected training data with a length, in a torch DataLoader (map-style, for access by "
                f"index), got {type(self.loader if dataset is None else dataset).__name__}. For a stream, "
                "use a Task with Data(train, validation, samples=...)."
            )
        self.weights()  # refuses what a trial cannot draw
        size, expected = len(dataset), self.setup.training.samples
        if expected not in (None, size):
            raise TaskError(
                f"training.samples: expected the length of the training set, {size}, got {expected}"
            )
        return Fetcher(dataset, self.loader.collate_fn)

    def weights(self) -> np.ndarray | None:
        """The weights by which the loader's sampler draws, as in `loader_order`.

        Raises:
            TaskError: a sampler of the user's own, or weights that are none.
        """
        return loader_order(self.where, self.loader)[0]

    def _batches(self) -> Generator[Any]:
        setup, fetcher = self.setup, self.fetcher()
        weights, shuffle = loader_order(self.where, self.loader)
        stream = (SampleStream if shuffle else InOrder)(len(fetcher.dataset), setup.seed, weights)  # type: ignore[arg-type]

        def keys(position: int) -> Iterator[Any]:
            for plan in self.plans[self.number :]:
                for samples in plan.micro_batches():
                    yield stream.take(position, samples)
                    position += samples

        workers = setup.training.workers or self.loader.num_workers
        pinned = self.loader.pin_memory and setup.device == "gpu"
        yield from batches(fetcher, keys(self.seen), workers, pinned)

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        """Call before the first step, once model and optimizer are on their device.

        Args:
            scaler: the fp16 gradient scaler, if there is one.

        Raises:
            TaskError: the optimizer does not use the scaling rule's settings.
        """
        setup = self.setup
        check_optimizer(f"{self.where}: the optimizer", optimizer, setup)
        check_kind(f"{self.where}: the optimizer", optimizer)
        self._check_own_parameters(model, optimizer)
        self.model, self.optimizer, self._scaler = model, optimizer, scaler
        DrivenLoop.newest = weakref.ref(self)
        self.rates = Rates(f"{self.where}: the optimizer", [optimizer], self.schedule, setup.training.warmup)
        optimizer.register_step_pre_hook(lambda *_: self.rates.check())
        self.device = next(model.parameters()).device
        correct_batch_norm(model, setup.plan.accumulation)
        if not self.number:
            # Dropout depends on the seed alone, not on random numbers drawn while creating the model and reading the data.
            seed_everything(setup.seed)
        self.course.begin(self, counts_memory=not setup.training.compile)
        self.clock = self.course.clock
        self.resume_clock()

    def _check_own_parameters(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        own = {id(parameter) for parameter in model.parameters()}
        others = [
            tuple(parameter.shape)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and id(parameter) not in own
        ]
        if others:
            raise TaskError(
                f"{self.where}: the optimizer: expected parameters of the model alone, which are saved and resumed; got "
                f"{len(others)} of something else, such as a loss with weights of its own, the first of shape {others[0]}. "
                "Make it a part of the model, such as model.loss = loss."
            )

    def resume_clock(self) -> None:
        """Start the clock, or restart it after a measurement."""
        self.measuring = False
        self.clock.restart()

    def before_step(self) -> None:
        """Set the learning rate to the schedule's at the middle of the step, and start timing."""
        size = self.plan.effective_batch
        self.rates.set((self.seen + size / 2) / self.setup.samples_budget)
        self._step_context = self.clock.step(size)
        self._step_context.__enter__()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of the whole loop: closes a step that raised, and ends loader processes."""
        try:
            yield
        except BaseException as error:
            if self._step_context is not None:
                self._step_context.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            if self._micro_batches is not None:
                self._micro_batches.close()  # ends loader processes now rather than at garbage collection

    def after_step(self, loss: Tensor | None) -> bool:
        """Count a step, given its mean loss, if it is known.

        Returns:
            Whether to measure now. If so, the clock is paused until `resume_clock`.
        """
        assert self._step_context is not None
        context, self._step_context = self._step_context, None
        context.__exit__(None, None, None)
        if loss is not None:
            self.course.losses += loss
        self.course.advance(losses=loss is not None)
        self._tokens += self._fetched_tokens.pop(self.number, 0)
        # For good: a loop that fetches ahead takes one more step.
        self.diverged = self.diverged or self.course.has_diverged()
        self.measuring = self.number in self._measured_after or self.diverged
        if self.measuring:
            self._elapsed_s = self.clock.elapsed_s()
            self._generators = RandomState.now(self.device)
        return self.measuring

    def measurement(self, scores: Mapping[str, float]) -> Measurement:
        """The measurement with these scores; writes a checkpoint if one is due."""
        self._generators.restore()  # a loader draws where an evaluation begins
        facts = self.rates.facts(self.setup.weight_decay)
        if self._tokens:
            per_s = self._tokens / self._elapsed_s if self._elapsed_s else 0.0
            facts |= {"tokens": self._tokens, "tokens_per_s": per_s}
        # A trainer logs what its model and callbacks name, `train_loss` often.
        named = {
            reported_name(name) if name in OURS_OF_SCORES else name: score for name, score in scores.items()
        }
        measurement = self.course.measurement(named, facts, self._elapsed_s)
        goes_on = math.isfinite(measurement.train_loss or 0.0) and self.number < len(self.plans)
        if goes_on and self.course.checkpoint.due():
            self.course.save(self.clock)
        return measurement

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {
            "model": self.model.state_dict(),
            "optimizer": whole_state(self.optimizer),
            "scaler": self._scaler.state_dict() if self._scaler is not None else {},
            "tokens": self._tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        load_whole_state(self.optimizer, state["optimizer"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        self._tokens = state["tokens"]


def _tokens_of(batch: Any) -> int:
    """Tokens of a batch of text as `transformers` collates it, without padding; 0 in any other."""
    total = 0
    for name, tokens in batch.items() if isinstance(batch, Mapping) else ():
        # Of several texts, as of pairs, with a prefix each.
        if isinstance(name, str) and name.endswith("input_ids") and isinstance(tokens, Tensor):
            mask = batch.get(name.removesuffix("input_ids") + "attention_mask")
            total += (
                int(mask.sum()) if isinstance(mask, Tensor) and mask.shape == tokens.shape else tokens.numel()
            )
    return total
