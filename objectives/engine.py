"""The one loop that steps: the plans, samples, rates, averages, clock, evaluations and checkpoints of a training.

What a step computes is its body's affair: a `Task`'s losses (`training`), a user's own passes and optimizers (`loop`), a
script's as it is (`script`), or a library's trainer's (`adapters`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..spaces.errors import TaskError
from ..spaces.plan import BatchPlan
from ..spaces.trial import Measurement, Parameter, TrialSetup
from .course import Course
from .data.batches import AHEAD, Loader, mixed, to_device
from .data.training_samples import TrainingSamples
from .loading import schedule_of
from .machine.accelerator import device_of, pins
from .machine.torch_settings import configure_torch
from .model.batch_norm import batch_norms, correct_batch_norm
from .model.buffers import SharedBuffers
from .model.modes import TrainingModes, untouched
from .model.weight_average import WeightAverage
from .optimizers import load_whole_state, whole_state
from .parallel.data_parallel import Ranks
from .parallel.fsdp2 import load_model_state, load_optimizer_state, model_state, optimizer_state
from .steps.constants import Constants
from .steps.rates import Rates, Stepped


class PlannedStep:
    """One optimizer step of a training.

    Attributes:
        micro_batches: this device's, as pairs of samples and a function that fetches the batch: call each once, in order, and
            move the batch by `Engine.on_device`. A probe may give batches themselves; a library that fetches its own has none.
        samples: of the whole step, on all devices.
        number: from 0.
        fraction: of the budget that is trained on, at the middle of the step.
        paused: its time has ended before its body, which evaluates.
    """

    def __init__(
        self,
        engine: Any,
        micro_batches: Sequence[tuple[int, Any]],
        samples: int,
        number: int,
        fraction: float,
    ) -> None:
        self.samples, self.number, self.fraction = samples, number, fraction
        self.micro_batches = list(micro_batches)
        self._engine = engine
        self._due = self.paused = self._finished = False

    @property
    def sizes(self) -> list[int]:
        """Samples of its micro-batches."""
        return [samples for samples, _ in self.micro_batches]

    @property
    def evaluates(self) -> bool:
        """Whether to evaluate now and yield a measurement; to be asked once a step, after its last optimizer step, where its
        time ends.
        """
        if not self.paused and (self._due or self._engine.has_diverged()):
            self.due()
            self.finish()
            self.paused = True
            self._engine.pause()
            self._engine.begin_evaluation()
        return self.paused

    def due(self) -> None:
        """Let it be one after which the training is evaluated."""
        self._due = True
        self._engine.measured = False

    def finish(self) -> None:
        """What belongs to it after its body, once, within its time."""
        if not self._finished:
            self._finished = True
            self._engine.finish(self)


class Engine(TrainingSamples):
    """An attempt's training: its steps, measured and saved. On several devices, one rank's part.

    A road sets what is declared below, in this order: `name` and `options`; its data by `open_data`; `model`, `optimizers` and
    `others`; then it calls `_know_modes` and `_step_with`, and sets `buffers`. CONTRIBUTING has an example.

    Attributes:
        optimizers: by name.
        others: what else a checkpoint holds, by name.
        reported: measurements of earlier attempts, where this one has resumed.
        measured: the last evaluation that was due has its measurement.
    """

    course: Course
    model: nn.Module
    optimizers: Mapping[str, Optimizer]
    others: Mapping[str, Any]
    rates: Any
    buffers: SharedBuffers
    # Bytes of the data that live on the device.
    resident_bytes = 0
    # Samples at which a training of so many is evaluated, where not at equal fractions of it.
    evaluated_at: Callable[[int], Sequence[int]] | None = None
    step_type: Any = PlannedStep
    # Whether a checkpoint holds all that a training is in the midst of, between two evaluations as well.
    saves_between = True
    # What its body does of a study's options. Any other that is asked for is refused: by default, all of them.
    options: Collection[str] = ()
    # In messages.
    name = "this training loop"

    def __init__(self, setup: TrialSetup, ranks: Ranks | None = None) -> None:
        self.setup = setup
        self._check_supported()
        self.ranks = ranks or Ranks.of(setup.plan.devices)
        # A rank's own is its process's current device.
        self.device, self.schedule = device_of(setup.device), schedule_of(setup)
        configure_torch(setup)
        self.others = {}
        self.reported: tuple[Measurement, ...] = ()
        self.current: Any = None
        self.measured = True
        self._timing, self._evaluation = ExitStack(), ExitStack()
        self._elapsed_s = self._evaluating_since = 0.0

    def _check_supported(self) -> None:
        """Check that its body does what the study asks for.

        Raises:
            TaskError: it does not.
        """
        setup, training = self.setup, self.setup.training
        asked = {
            f"training.precision: {training.precision}": training.precision in ("bf16", "fp16"),
            "training.compile": training.compile,
            "training.sync_batch_norm": training.sync_batch_norm,
            "training.clip_norm": training.clip_norm is not None,
            "training.ema": training.ema is not None,
            "devices.per_trial": setup.plan.devices > 1,
            "space.train_s": setup.is_timed_by_clock,
        }
        if refused := ", ".join(
            option for option, given in asked.items() if given and option not in self.options
        ):
            raise TaskError(
                f"{self.name}: expected options that it supports ({', '.join(self.options) or 'none'}), got {refused}. Leave "
                "that out of the study and do it in your code, or train a Task."
            )

    def _know_modes(self, model: nn.Module) -> None:
        """Note the modes of a model as it was given, and correct its BatchNorm for a step's passes."""
        self.modes = TrainingModes(model)
        passes = [size for size in self.setup.plan.micro_batches(self.ranks.rank) if size]
        correct_batch_norm(model, len(passes))

    def _step_with(self, name: str, where: str) -> None:
        """Set up what steps with the optimizers; both names are for messages."""
        self.rates = self._make_rates(where)
        checked = not (self.fully_sharded or self.setup.training.accept_inexact)
        self.constants = Constants(name, self.model, checked=checked)
        self.average = WeightAverage(self.parameters)

    def _make_rates(self, where: str) -> Stepped:
        return Rates(where, [*self.optimizers.values()], self.schedule, self.setup.training.warmup)

    @property
    def optimizer(self) -> Optimizer:
        """The first optimizer."""
        return next(iter(self.optimizers.values()))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def averages(self) -> Sequence[Tensor]:
        """The average of the weights, if there is one."""
        return self.average.values

    @property
    def fully_sharded(self) -> bool:
        """Whether each rank holds only a share of the parameters."""
        return self.setup.sharding == "fsdp2" and self.ranks.count > 1

    # Its samples

    def loader(self, plans: Iterable[BatchPlan], position: int = 0) -> Loader:
        """This device's micro-batches for steps with these plans, from a position in training."""
        workers = 0 if self.resident_bytes else self.setup.training.workers
        return self.micro_batches_of(plans, position, workers, pin_memory=self._pins)

    @property
    def _pins(self) -> bool:
        """Whether batches are copied to the device from page-locked memory."""
        return pins(self.device) and not self.resident_bytes

    @property
    def fetched_ahead(self) -> int:
        """Micro-batches that loader processes, or the thread that pins batches, fetch beforehand."""
        if self.setup.training.workers and not self.resident_bytes:
            return 2 * (self.setup.training.workers if self.live is None else 1)
        return AHEAD + 1 if self._pins and self.train_fetcher.indexed else 0

    def micro_batches(self, plan: BatchPlan, loader: Loader) -> list[tuple[int, Any]]:
        """A step's micro-batches on this device: samples, and a function that takes the batch from the loader.

        Where parameters are sharded, every rank has as many; those without a sample of their own get any.
        """
        sizes = [samples for samples in plan.micro_batches(self.ranks.rank) if samples or self.fully_sharded]
        return [
            (samples, partial(loader.take, samples) if samples else self._any_sample) for samples in sizes
        ]

    def _any_sample(self) -> Any:
        return self.train_fetcher.fetch(self.stream.take(0, 1))

    def on_device(self, batch: Any) -> Any:
        """A batch on this training's device; on a CPU it was fetched there."""
        return batch if self.device.type == "cpu" else to_device(batch, self.device)

    # Its steps

    def begin(self) -> None:
        """Begin, or go on where an earlier attempt left a checkpoint."""
        self.course = Course(self.setup, self.ranks)
        if self.ranks.rank:
            # Weights are identical on all ranks by now; random numbers drawn in training (dropout) must differ.
            torch.manual_seed(int(mixed(self.setup.seed, self.ranks.rank)) >> 1)
        self.course.begin(self, points=self.evaluated_at)
        self.reported = self.course.reported

    def start(self) -> None:
        """Be ready to step."""
        self.modes.train(self.model)

    def steps(self) -> Any:
        """Every step of the budget that is left, to be taken by a body; or those that a probe asks for.

        Raises:
            Leaving: this process was asked to leave.
        """
        if (server := _server.get()) is not None:
            return server.serve(self)
        self.begin()
        return self._planned()

    def hooked(self) -> AbstractContextManager[Any]:
        """Context of all steps."""
        return nullcontext()

    def _planned(self) -> Generator[Any]:
        course, planned = self.course, 0
        self.start()
        loader = self.loader(course.plans[course.number :], course.seen)
        self.resume()
        try:
            with self.hooked(), self._evaluation, self._timing:
                while course.goes_on:
                    plan, fraction = course.plan, course.next_fraction()
                    self.rates.set(fraction)
                    step = self.step_type(
                        self, self.micro_batches(plan, loader), plan.effective_batch, course.number, fraction
                    )
                    course.advance()
                    if self._is_due(plan.effective_batch):
                        step.due()
                    self.current = step
                    self._timing.enter_context(course.clock.step(plan.effective_batch))
                    yield step
                    step.finish()
                    self.pause()
                    self._evaluation.close()
                    self.end(step)
                    planned += sum(step.sizes)
                    if loader is not None:
                        self._check_taken(step, loader, planned)
                    if step.paused:
                        self.resume()
                    if course.goes_on and (self.saves_between or step.paused):
                        course.save_between()
        finally:
            # It refers back, and to a loader, whose processes would wait for a garbage collection.
            self.current = None

    def _check_taken(self, step: PlannedStep, loader: Loader, planned: int) -> None:
        """Check that the body has taken the step's samples, each once, and measured where it was to.

        Args:
            planned: samples of this device so far.

        Raises:
            TaskError: it has taken others, or not measured.
        """
        if not self.measured:
            raise TaskError(
                f"{self.name}: expected to yield a measurement where step.evaluates is true, got none in step {step.number}"
            )
        if loader.taken != planned:
            raise TaskError(
                f"{self.name}: expected every micro-batch of a step to be taken once, got {loader.taken} samples of {planned} "
                f"after step {step.number}"
            )

    def _is_due(self, size: int) -> bool:
        """Whether a step of this size, the last that was counted, is followed by an evaluation."""
        return self.course.is_due

    def has_diverged(self) -> bool:
        """Whether the losses that the body has told the course are no longer finite."""
        return self.course.has_diverged()

    def finish(self, step: Any) -> None:
        """What belongs to a step after its body."""
        self.buffers.after_step()
        self.average_weights(step.samples)

    def average_weights(self, samples: int) -> None:
        """Add the weights as they are after a step of so many samples to their average, if there is one."""
        if self.setup.training.ema is not None:
            self.average.update(self.setup.ema_decay(samples))

    def pause(self) -> None:
        """End the time of the current step."""
        self._timing.close()
        if not self.measured:
            self._elapsed_s = self.course.clock.elapsed_s()

    def resume(self) -> None:
        """Go on after something that is no training."""
        self.course.clock.restart()

    def end(self, step: Any) -> None:
        """The body of a step has ended."""

    # Evaluations and checkpoints

    def begin_evaluation(self) -> None:
        """The body evaluates from here on."""
        self._evaluating_since = time.monotonic()

    @contextmanager
    def as_evaluated(self) -> Iterator[None]:
        """Meanwhile the model is as it is to be evaluated: the same on all devices, with averaged weights."""
        self.ranks.sync_batch_norm_statistics(batch_norms(self.model))
        self.buffers.broadcast()
        with untouched(self.model, self.optimizers.values(), self.device), self.average.in_place():
            yield

    def measurement(
        self, scores: Mapping[str, float], facts: Mapping[str, Parameter] | None = None
    ) -> Measurement:
        """What was measured after the current step; a checkpoint is written if one is due."""
        course = self.course
        course.time_left.evaluated(time.monotonic() - self._evaluating_since, course.seen)
        self.measured = True
        own = self.rates.facts(self.setup.weight_decay) | self.data_facts(course.seen, self._elapsed_s)
        measurement = course.measurement(scores, own | dict(facts or {}), self._elapsed_s)
        if course.saves():
            course.save(course.clock)
        return measurement

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole model and of its optimizers, sharded or not; complete on rank 0. All ranks call it."""
        # A mean over ranks of running means is the running mean of their mean: between evaluations too, nothing changes.
        self.ranks.sync_batch_norm_statistics(batch_norms(self.model))
        state_of = optimizer_state if self.fully_sharded else whole_state
        return {
            "model": model_state(self.model) if self.fully_sharded else self.model.state_dict(),
            "optimizers": {name: state_of(optimizer) for name, optimizer in self.optimizers.items()},
            "others": {name: other.state_dict() for name, other in self.others.items()},
            "average": [*self.average.values],
            "stream": None if self.live is None or self.ranks.rank else self.live.state(self.course.seen),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on rank 0, with any number of ranks."""
        load = load_optimizer_state if self.fully_sharded else load_whole_state
        if self.fully_sharded:
            load_model_state(self.model, state["model"])
        else:
            self.model.load_state_dict(state["model"])
        for name, optimizer in self.optimizers.items():
            load(optimizer, state["optimizers"][name])
        self.rates.forget()
        for name, other in self.others.items():
            other.load_state_dict(state["others"][name])
        if state["average"]:
            self.average.load(state["average"])
        if self.live is not None:
            self.live.set_state(state["stream"])


# What asks this thread's training for steps in the place of a trial, to time, trace or examine them: a `profiling.held.Held`.
_server: ContextVar[Any] = ContextVar("server", default=None)


@contextmanager
def served(server: Any) -> Iterator[None]:
    """Context in which a training gets its steps from a probe; with None, those of its trial."""
    token = _server.set(server)
    try:
        yield
    finally:
        _server.reset(token)


def is_served() -> bool:
    """Whether a probe asks this thread's training for single steps."""
    return _server.get() is not None
