"""What our own training loop is made of, for loops that no `Task` describes: several optimizers, several passes over a step.

    def train(setup):
        loop = Loop(setup, Data(train, validation), models={"g": g, "d": d}, optimizers={"g": og, "d": od})
        for step in loop:
            for part in step:
                (part.weight * d_loss(part.batch)).backward()
            od.step(); od.zero_grad()
            for part in step: ...
            if step.evaluates:
                yield loop.measure(accuracy=...)

The loop has the steps of any integer batch, the rates of the schedule, checkpoints and several devices; the body is the user's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..spaces.boundary.files import file_name
from ..spaces.boundary.given import number_of
from ..spaces.errors import TaskError
from ..spaces.plan import BatchPlan
from ..spaces.trial import Measurement, TrialSetup
from .course import Course
from .data.batches import Loader, mixed, to_device
from .data.training_samples import TrainingSamples
from .loading import schedule_of
from .machine.accelerator import device_of, moved, pins
from .machine.torch_settings import configure_torch
from .model.batch_norm import batch_norms, correct_batch_norm
from .model.buffers import SharedBuffers
from .model.modes import TrainingModes, untouched
from .model.weight_average import WeightAverage
from .optimizers import load_whole_state, whole_state
from .parallel.data_parallel import Ranks
from .state.checkpoint import save_state
from .steps.constants import Constants
from .steps.rates import Rates
from .steps.two_passes import fresh, held
from .task import Data, check_kind, check_no_scheduler, check_optimizer, checked_data, closure_error


class Server(Protocol):
    """What takes the place of a trial where a loop is profiled: it serves the body steps of its own."""

    def serve(self, loop: Loop) -> Iterator[Step]: ...


@dataclass(frozen=True, slots=True)
class Part:
    """One micro-batch of a step.

    Args:
        batch: on the device, as the data's collate function returns it.
        samples: in it.
        weight: its share of the step: the weighted mean losses of all parts add up to the mean loss of the step.
    """

    batch: Any
    samples: int
    weight: float


class Step:
    """One optimizer step of the trial: iterate it for its parts, any number of times; they are the same each time.

    Attributes:
        samples: of the whole step, on all devices.
        number: from 0.
        fraction: of the budget that is trained on, at the middle of the step.
    """

    def __init__(
        self, loop: Loop, micro_batches: Sequence[tuple[int, Any]], samples: int, number: int, fraction: float
    ) -> None:
        self.samples, self.number, self.fraction = samples, number, fraction
        self._loop, self._micro_batches, self._due = loop, list(micro_batches), False
        self._taken = self._passes = 0
        self.stepped: set[str] = set()  # names of the optimizers that have stepped
        self._over = False
        self.finished = False

    def __iter__(self) -> Iterator[Part]:
        self._check_open("takes parts")
        self._passes += 1
        with self._loop.constants.held(self._passes):
            for place, (samples, batch) in enumerate(self._micro_batches):
                batch = held(batch)
                self._micro_batches[place] = samples, batch
                self._taken = max(self._taken, place + 1)
                yield Part(
                    self._loop.on_device(fresh(batch, self._loop.device)), samples, samples / self.samples
                )

    @property
    def sizes(self) -> list[int]:
        """Samples of its parts."""
        return [samples for samples, _ in self._micro_batches]

    @property
    def evaluates(self) -> bool:
        """Whether to evaluate now and yield `loop.measure(...)`; asked after the last optimizer step, where its time ends."""
        if self._due and not self._over:
            self._loop.finish(self)
            self._over = True
            self._loop.pause()
            self._loop.begin_evaluation()
        return self._due

    @property
    def paused(self) -> bool:
        """Whether its time has ended before its body, which has evaluated since."""
        return self._over

    def due(self) -> None:
        """Let it be one after which the training is evaluated."""
        self._due = True

    def _check_open(self, what: str) -> None:
        if self._over:
            raise TaskError(
                f"Loop: expected step.evaluates after the last optimizer step, since what follows is not timed; step "
                f"{self.number} {what} afterwards"
            )

    def optimizer_steps(self, name: str) -> None:
        self._check_open(f"steps optimizer {name!r}")
        self.stepped.add(name)

    def check_complete(self) -> None:
        """Check that all of its samples were used and that an optimizer has stepped.

        Raises:
            TaskError: they were not, or none has.
        """
        if self._taken < len(self._micro_batches):
            used = sum(samples for samples, _ in self._micro_batches[: self._taken])
            total = sum(samples for samples, _ in self._micro_batches)
            raise TaskError(
                f"Loop: expected every step to use all of its parts, got {used} of {total} samples in step {self.number}. "
                "Write `for part in step:` without break."
            )
        if not self.stepped:
            raise TaskError(
                f"Loop: expected an optimizer step in every step, got none in step {self.number}. Call step() of one of "
                f"{', '.join(self._loop.optimizers)}."
            )


class Loop(TrainingSamples):
    """The steps of a trial, for the user's own training loop: see the module.

    Args:
        setup: the trial's.
        data: as for a `Task`; training data may be a stream.
        models: all modules that are trained, evaluated or saved, by name. Moved to the trial's device.
        optimizers: all optimizers, of these models' parameters, by name; their rates at creation are the schedule's peaks.
        state: other objects with `state_dict` and `load_state_dict`, saved and resumed with the rest.

    Raises:
        TaskError: an optimizer of other parameters, none with the setup's settings, or options that it does not support.
    """

    def __init__(
        self,
        setup: TrialSetup,
        data: Data,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.setup = setup
        self.models, self.optimizers, self.others = dict(models), dict(optimizers), dict(state or {})
        self._check_supported()
        self.ranks = Ranks.of(setup.plan.devices)
        self.device = device_of(setup.device)
        configure_torch(setup)
        self.model: nn.Module = moved(nn.ModuleDict(self.models), self.device)
        self._check_optimizers()
        self.rates = self._make_rates()
        self.open_data(checked_data(data))
        correct_batch_norm(
            self.model, len([size for size in setup.plan.micro_batches(self.ranks.rank) if size])
        )
        self.modes = TrainingModes(self.model)
        self.constants = Constants("Loop", self.model, checked=not setup.training.accept_inexact)
        self.average, self._buffers = WeightAverage(self.parameters), SharedBuffers(self.model, self.ranks)
        self._evaluation = ExitStack()
        self._elapsed_s = self._evaluating_since = 0.0
        self.current: Step | None = None
        self._casts = False
        self._ever: set[str] = set()
        self.reported: tuple[Measurement, ...] = ()
        self._measured = True
        global _newest
        _newest = self

    @property
    def optimizer(self) -> Optimizer:
        """The first optimizer."""
        return next(iter(self.optimizers.values()))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of all models."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _check_supported(self) -> None:
        training = self.setup.training
        if training.precision == "fp16":
            raise TaskError(
                "training.precision: expected fp32, tf32 or bf16 with a Loop, which scales no gradients; got fp16"
            )
        for key in ("compile", "sync_batch_norm"):
            if getattr(training, key):
                raise TaskError(f"training.{key}: expected false with a Loop: do it in your code; got true")

    def _check_optimizers(self) -> None:
        where = "Loop: optimizers"
        if not self.optimizers:
            raise TaskError(f"{where}: expected at least one, got none")
        known = {id(parameter) for parameter in self.model.parameters()}
        faults: list[TaskError] = []
        for name, optimizer in self.optimizers.items():
            try:
                self._check_settings(f"{where}: {name}", optimizer)
            except TaskError as error:
                faults.append(error)
            if not isinstance(optimizer, Optimizer):
                raise faults[-1]
            if self.schedules:
                check_no_scheduler(f"{where}: {name}", optimizer)
            check_kind(f"{where}: {name}", optimizer)
            if any(
                id(parameter) not in known
                for group in optimizer.param_groups
                for parameter in group["params"]
            ):
                raise TaskError(
                    f"{where}: {name}: expected parameters of {', '.join(self.models)}, got some that no model holds. Pass all "
                    "modules as models."
                )
        # One has to follow the rule; others may have rates of their own.
        if len(faults) == len(self.optimizers):
            raise faults[0]

    def _make_rates(self) -> Rates:
        training = self.setup.training
        return Rates(
            "Loop: optimizers", list(self.optimizers.values()), schedule_of(self.setup), training.warmup
        )

    def _check_settings(self, where: str, optimizer: Optimizer) -> None:
        check_optimizer(where, optimizer, self.setup)

    course: Course

    # The steps

    def __iter__(self) -> Iterator[Step]:
        session = _session.get()
        return session.serve(self) if session is not None else self._steps()

    def _steps(self) -> Iterator[Step]:
        """Every step of the budget, or what an earlier attempt has left of it."""
        setup = self.setup
        self.course = course = Course(setup, self.ranks)
        if self.ranks.rank:  # before a checkpoint has put back what it drew last
            torch.manual_seed(int(mixed(setup.seed, self.ranks.rank)) >> 1)
        course.begin(self, points=self.evaluated_at)
        self.reported = course.reported
        self.start()
        loader = self.loader(course.plans[course.number :], course.seen)
        with self.hooked():
            course.clock.restart()
            while not course.is_over:
                plan, fraction = course.plan, course.next_fraction()
                self.rates.set(fraction)
                step = self._step(plan, loader, fraction)
                course.advance()
                if self._is_due(plan.effective_batch):
                    step.due()
                    self._measured = False
                self._timing = course.clock.step(plan.effective_batch)
                self._timing.__enter__()
                self.current = step
                try:
                    yield step
                except BaseException:
                    self.pause()
                    self._evaluation.close()
                    raise
                self.finish(step)
                self.pause()
                self._evaluation.close()
                self.end(step)
                if not self._measured:
                    raise TaskError(
                        f"Loop: expected `yield loop.measure(...)` where step.evaluates is true, got none in step {step.number}"
                    )
                if step.paused:
                    course.clock.restart()
                if not course.is_over:
                    course.save_between()
        if missing := [name for name in self.optimizers if name not in self._ever]:
            raise TaskError(
                f"Loop: expected every optimizer to step at least once, but {', '.join(missing)} never did"
            )
        if setup.model_folder is not None and not self.ranks.rank:
            with untouched(self.model, self.optimizers.values(), self.device), self.average.in_place():
                for name, model in self.models.items():
                    save_state(Path(setup.model_folder) / f"{file_name(name)}.pt", model.state_dict())

    def _is_due(self, size: int) -> bool:
        """Whether a step of this size, the last that was counted, is followed by an evaluation."""
        return self.course.is_due

    def start(self) -> None:
        """Make all devices' models those of the first, and put them into training mode."""
        self.ranks.broadcast([tensor.data for tensor in (*self.model.parameters(), *self.model.buffers())])
        self.modes.train(self.model)

    def _step(self, plan: BatchPlan, loader: Loader, fraction: float) -> Step:
        sizes = [size for size in plan.micro_batches(self.ranks.rank) if size]
        return Step(
            self,
            [(size, partial(loader.take, size)) for size in sizes],
            plan.effective_batch,
            self.course.number,
            fraction,
        )

    def finish(self, step: Step) -> None:
        """What belongs to a step after its body, once, within its time."""
        if step.finished:
            return
        step.finished = True
        self._buffers.after_step()
        if self.setup.training.ema is not None:
            self.average.update(self.setup.ema_decay(step.samples))

    def begin_evaluation(self) -> None:
        """Until the measurement the models are as they are to be evaluated: the same on all devices, with averaged weights."""
        self.ranks.sync_batch_norm_statistics(batch_norms(self.model))
        self._buffers.broadcast()
        self._evaluation.enter_context(untouched(self.model, self.optimizers.values(), self.device))
        self._evaluation.enter_context(self.average.in_place())
        self._evaluating_since = time.monotonic()

    def end(self, step: Step) -> None:
        """The body of a step has ended.

        Raises:
            TaskError: it left something out.
        """
        step.check_complete()
        self._ever |= step.stepped
        if self.setup.training.precision == "bf16" and not self._casts:
            raise TaskError(
                "training.precision: expected `with loop.autocast():` around the forward passes, as bf16 needs; got none in "
                "the first step"
            )

    def loader(self, plans: Iterable[BatchPlan], position: int = 0) -> Loader:
        """This device's micro-batches for steps with these plans, from a position in training."""
        return self.micro_batches_of(
            plans, position, self.setup.training.workers, pin_memory=pins(self.device)
        )

    def on_device(self, batch: Any) -> Any:
        return batch if self.device.type == "cpu" else to_device(batch, self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of the forward passes: the study's precision."""
        self._casts = True
        if self.setup.training.precision != "bf16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def hooked(self) -> AbstractContextManager[Any]:
        """Context in which the optimizers' steps are seen: gradients are summed over devices and clipped before each."""
        stack = ExitStack()
        names = {id(optimizer): name for name, optimizer in self.optimizers.items()}

        inside: list[Optimizer] = []  # one that is stepping: those that it steps itself are its own affair

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _newest is not self or inside:  # or left over from a body that has failed
                return
            name = names.get(id(optimizer))
            if name is None:
                raise TaskError(
                    f"Loop: expected steps of the optimizers it was given ({', '.join(self.optimizers)}), got one of another "
                    f"{type(optimizer).__name__}. Pass it in optimizers={{...}}: otherwise its state is not saved, nor its "
                    "rate set."
                )
            self.rates.check()
            if self.current is not None:
                self.current.optimizer_steps(name)
            if (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
                raise closure_error(f"Loop: optimizers: {name}", optimizer)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.ranks.sum_gradients(parameters)
            if (norm := self.setup.training.clip_norm) is not None:
                nn.utils.clip_grad_norm_(parameters, norm)
            for listener in self.listeners:
                listener(name, parameters)
            inside.append(optimizer)

        def after(optimizer: Optimizer, *_: Any) -> None:
            if inside and inside[0] is optimizer:
                inside.clear()

        stack.callback(register_optimizer_step_pre_hook(before).remove)
        stack.callback(register_optimizer_step_post_hook(after).remove)
        return stack

    # Samples at which a training of so many is evaluated, where not at equal fractions of it.
    evaluated_at: Callable[[int], Sequence[int]] | None = None
    # Whether the study's schedule sets the rates, and whether a step may come in parts.
    schedules = splits = True
    # Called with an optimizer's name and parameters in each of its steps, with its gradient there.
    listeners: tuple[Callable[[str, Sequence[Tensor]], None], ...] = ()

    def pause(self) -> None:
        """End the time of the current step."""
        timing, self._timing = self._timing, None
        if timing is not None:
            timing.__exit__(None, None, None)
            if self.current is not None and not self._measured:
                self._elapsed_s = self.course.clock.elapsed_s()

    _timing: AbstractContextManager[None] | None = None

    # Measurements and checkpoints

    def measure(self, **scores: float | Tensor) -> Measurement:
        """The measurement to yield where `step.evaluates` is true: `accuracy`, or any metrics by name.

        Raises:
            TaskError: it is not time to.
        """
        if self.current is None or self._measured or not self.current.paused:
            raise TaskError(
                "Loop.measure: expected a call where step.evaluates is true, and one for each such step"
            )
        self.pause()
        course = self.course
        course.time_left.evaluated(time.monotonic() - self._evaluating_since, course.seen)
        self._measured = True
        self._evaluation.close()
        values = {name: number_of(f"Loop.measure: {name}", value) for name, value in scores.items()}
        facts = {**self.rates.facts(self.setup.weight_decay), **self.data_facts(course.seen, self._elapsed_s)}
        measurement = course.measurement(values, facts, self._elapsed_s)
        # Scores may differ between ranks, what is done may not.
        own = float(not self.ranks.rank and all(map(math.isfinite, values.values())))
        finite = self.ranks.max_over_ranks(own)
        saves = course.saves()
        if finite and saves and not course.is_over:
            self.current.check_complete()
            course.save(course.clock)
        return measurement

    @property
    def averages(self) -> Sequence[Tensor]:
        """The average of the weights, if there is one."""
        return self.average.values

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        # A mean over ranks of running means is the running mean of their mean: between evaluations too, nothing changes.
        self.ranks.sync_batch_norm_statistics(batch_norms(self.model))
        return {
            "models": self.model.state_dict(),
            "optimizers": {name: whole_state(optimizer) for name, optimizer in self.optimizers.items()},
            "others": {name: other.state_dict() for name, other in self.others.items()},
            "ever": sorted(self._ever | (self.current.stepped if self.current else set())),
            "average": [*self.average.values],
            "stream": None if self.live is None or self.ranks.rank else self.live.state(self.course.seen),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.model.load_state_dict(state["models"])
        for name, optimizer in self.optimizers.items():
            load_whole_state(optimizer, state["optimizers"][name])
        self.rates.forget()
        for name, other in self.others.items():
            other.load_state_dict(state["others"][name])
        if state["average"]:
            self.average.load(state["average"])
        if self.live is not None:
            self.live.set_state(state["stream"])
        self._ever = set(state["ever"])


_session: ContextVar[Server | None] = ContextVar("session", default=None)


@contextmanager
def serving(session: Server) -> Iterator[None]:
    """Context of a training function whose loop gets its steps from a session."""
    token = _session.set(session)
    try:
        yield
    finally:
        _session.reset(token)


_newest: Loop | None = None


@contextmanager
def unserved() -> Iterator[None]:
    """Context in which this thread's loops train as in a trial."""
    token = _session.set(None)
    try:
        yield
    finally:
        _session.reset(token)


def being_served() -> bool:
    """Whether a profile asks this thread's loop for single steps."""
    return _session.get() is not None


def newest_loop() -> Loop | None:
    """The loop that this process's training code has created last; None since `forget_loop`."""
    return _newest


def forget_loop() -> None:
    global _newest
    _newest = None
