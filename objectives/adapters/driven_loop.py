"""Drive a third-party training loop step by step: which samples, at which learning rate, and when to evaluate.

The loop keeps its forward and backward passes, its hooks and its optimizer. `DrivenLoop` keeps the invariants: every step has
exactly its batch, the budget is exact to the sample, schedule and evaluations are fractions of it, times exclude evaluation.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
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
from ...spaces.trial import Measurement, Parameter, TrialSetup
from ..course import Course
from ..data.batches import Fetcher, RandomState, SampleStream, batches
from ..data.sample_weights import loader_order
from ..data.stream import InOrder
from ..engine import Engine
from ..machine.torch_settings import seed_everything
from ..model.batch_norm import correct_batch_norm
from ..model.buffers import SharedBuffers
from ..model.weight_average import WeightAverage
from ..parallel.data_parallel import Ranks
from ..profiling.memory.live_bytes import LiveBytes
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


class DrivenLoop(Engine):
    """One attempt's budget, trained by a third-party loop: it calls where a step begins and ends.

    `plans[number]` is the next step or the current one, `seen` the samples trained on before it. Where an earlier attempt left
    a checkpoint, both resume from it, and `reported` holds its measurements.

    Args:
        where: the adapter's name, for messages.
        couples_samples: whether the loss compares the samples of a batch, so that no step may be split.
        takes_steps: whether each batch is handed to code that takes its own optimizer steps: no step may be split either.
        coupled_loss: such a loss that is split exactly; None: the loss is the library's own.

    Raises:
        TaskError: the study uses an option that such a loop does not support.
    """

    # The library's training loader: set once it has created it.
    source: Any
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
        self.name = self.where = where
        self.couples_samples, self.coupled_loss, self.takes_steps = couples_samples, coupled_loss, takes_steps
        super().__init__(setup, Ranks())
        # A library's loop is told its number of steps, so a deadline does not shorten it.
        self.course = course = Course(replace(setup, ends_by=None), self.ranks)
        self.plans, self.reported = course.plans, course.reported
        self.number, self.seen = course.number, course.seen
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
        self.measuring = False  # from the step after which to measure until `resume_clock`

    @property
    def options(self) -> tuple[str, ...]:  # type: ignore[override]
        on_gpu = ("training.precision: fp16",) if self.setup.device == "gpu" else ()
        return *on_gpu, "training.precision: bf16", "training.compile", "training.clip_norm"

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
    def plan(self) -> BatchPlan:
        """The plan of the current step, or of the next one."""
        return self.plans[self.number]

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
        dataset: Any = getattr(getattr(self, "source", None), "dataset", None)
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

    def batches(self) -> Iterator[Any]:
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

    def training_data(self) -> Fetcher:
        """The training data, collated as the loader does.

        Raises:
            TaskError: data without length or indexing, or of another length than the study says; a sampler of the user's own.
        """
        dataset: Any = getattr(self.source, "dataset", None)
        if (
            not hasattr(dataset, "__len__")
            or not hasattr(dataset, "__getitem__")
            or isinstance(dataset, IterableDataset)
        ):
            raise TaskError(
                f"{self.where}: expected training data with a length, in a torch DataLoader (map-style, for access by "
                f"index), got {type(self.source if dataset is None else dataset).__name__}. For a stream, "
                "use a Task with Data(train, validation, samples=...)."
            )
        self.weights()  # refuses what a trial cannot draw
        size, expected = len(dataset), self.setup.training.samples
        if expected not in (None, size):
            raise TaskError(
                f"training.samples: expected the length of the training set, {size}, got {expected}"
            )
        return Fetcher(dataset, self.source.collate_fn)

    def weights(self) -> np.ndarray | None:
        """The weights by which the loader's sampler draws, as in `loader_order`.

        Raises:
            TaskError: a sampler of the user's own, or weights that are none.
        """
        return loader_order(self.where, self.source)[0]

    def _batches(self) -> Generator[Any]:
        setup, fetcher = self.setup, self.training_data()
        weights, shuffle = loader_order(self.where, self.source)
        stream = (SampleStream if shuffle else InOrder)(len(fetcher.dataset), setup.seed, weights)  # type: ignore[arg-type]

        def keys(position: int) -> Iterator[Any]:
            for plan in self.plans[self.number :]:
                for samples in plan.micro_batches():
                    yield stream.take(position, samples)
                    position += samples

        workers = setup.training.workers or self.source.num_workers
        pinned = self.source.pin_memory and setup.device == "gpu"
        yield from batches(fetcher, keys(self.seen), workers, pinned)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
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
        self.model, self.optimizers = model, {"optimizer": optimizer}
        self.others = {} if scaler is None else {"scaler": scaler}
        DrivenLoop.newest = weakref.ref(self)
        self.rates = self._make_rates(f"{self.where}: the optimizer")
        optimizer.register_step_pre_hook(lambda *_: self.rates.check())
        self.average, self.buffers = WeightAverage([]), SharedBuffers(model, self.ranks)
        self.device = next(model.parameters()).device
        correct_batch_norm(model, setup.plan.accumulation)
        if not self.number:
            # Dropout depends on the seed alone, not on random numbers drawn while creating the model and reading the data.
            seed_everything(setup.seed)
        self._steps: Any = self.steps()
        self.resume_clock()

    def begin(self) -> None:
        self.course.begin(self, counts_memory=not self.setup.training.compile)

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
        self.course.clock.restart()

    def before_step(self) -> None:
        """Set the learning rate to the schedule's at the middle of the step, and start timing."""
        self._step = next(self._steps)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of the whole loop: closes a step that raised, and ends loader processes."""
        try:
            yield
        finally:
            if hasattr(self, "_steps"):
                self._steps.close()
            if self._micro_batches is not None:
                self._micro_batches.close()  # ends loader processes now rather than at garbage collection

    def after_step(self, loss: Tensor | None) -> bool:
        """Count a step, given its mean loss, if it is known.

        Returns:
            Whether to measure now. If so, the clock is paused until `resume_clock`.
        """
        self.pause()
        if loss is not None:
            self.course.add(loss)
        self.number, self.seen = self.course.number, self.course.seen
        self._tokens += self._fetched_tokens.pop(self.number, 0)
        self.measuring = self._step.evaluates
        if self.measuring:
            # As of this step, which is not one of those after which they are read.
            self.diverged = self.diverged or not math.isfinite(float(self.course.losses))
            self._generators = RandomState.now(self.device)
        return self.measuring

    def has_diverged(self) -> bool:
        # For good: a loop that fetches ahead takes one more step.
        self.diverged = self.diverged or self.course.has_diverged()
        return self.diverged

    # What the library's loop does itself

    def loader(self, plans: Iterable[BatchPlan], position: int = 0) -> Any:
        return None

    def micro_batches(self, plan: BatchPlan, loader: Any) -> list[tuple[int, Any]]:
        return []

    def start(self) -> None:
        """Nothing: modes are its own."""

    def resume(self) -> None:
        """Nothing: it calls `resume_clock`, before it fetches the next batch."""

    def _is_due(self, size: int) -> bool:
        return self.course.number in self._measured_after

    def data_facts(self, seen: int, elapsed_s: float) -> dict[str, Parameter]:
        if not self._tokens:
            return {}
        return {"tokens": self._tokens, "tokens_per_s": self._tokens / elapsed_s if elapsed_s else 0.0}

    def measurement(
        self, scores: Mapping[str, float], facts: Mapping[str, Parameter] | None = None
    ) -> Measurement:
        self._generators.restore()  # a loader draws where an evaluation begins
        # A trainer logs what its model and callbacks name, `train_loss` often.
        return super().measurement(
            {
                reported_name(name) if name in OURS_OF_SCORES else name: score
                for name, score in scores.items()
            },
            facts,
        )

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"tokens": self._tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
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
