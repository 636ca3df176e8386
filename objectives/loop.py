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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..spaces.boundary.files import file_name
from ..spaces.boundary.given import number_of
from ..spaces.errors import TaskError
from ..spaces.trial import Measurement, TrialSetup
from .engine import Engine, PlannedStep
from .machine.accelerator import moved
from .model.buffers import SharedBuffers
from .model.modes import untouched
from .state.checkpoint import save_state
from .steps.two_passes import fresh, held
from .task import Data, check_kind, check_no_scheduler, check_optimizer, checked_data, closure_error


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


class Step(PlannedStep):
    """One optimizer step of the trial: iterate it for its parts, any number of times; they are the same each time."""

    _engine: Loop

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._taken = self._passes = 0
        self.stepped: set[str] = set()  # names of the optimizers that have stepped

    def __iter__(self) -> Iterator[Part]:
        self._check_open("takes parts")
        self._passes += 1
        with self._engine.constants.held(self._passes):
            for place, (samples, batch) in enumerate(self.micro_batches):
                batch = held(batch)
                self.micro_batches[place] = samples, batch
                self._taken = max(self._taken, place + 1)
                yield Part(
                    self._engine.on_device(fresh(batch, self._engine.device)), samples, samples / self.samples
                )

    def _check_open(self, what: str) -> None:
        if self.paused:
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
        if self._taken < len(self.micro_batches):
            used = sum(samples for samples, _ in self.micro_batches[: self._taken])
            total = sum(samples for samples, _ in self.micro_batches)
            raise TaskError(
                f"Loop: expected every step to use all of its parts, got {used} of {total} samples in step {self.number}. "
                "Write `for part in step:` without break."
            )
        if not self.stepped:
            raise TaskError(
                f"Loop: expected an optimizer step in every step, got none in step {self.number}. Call step() of one of "
                f"{', '.join(self._engine.optimizers)}."
            )


class Loop(Engine):
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

    step_type = Step
    name = "Loop"
    options: Collection[str] = (
        "training.precision: bf16",
        "training.clip_norm",
        "training.ema",
        "devices.per_trial",
    )

    def __init__(
        self,
        setup: TrialSetup,
        data: Data,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(setup)
        self.models = dict(models)
        self.optimizers, self.others = dict(optimizers), dict(state or {})
        self.model: nn.Module = moved(nn.ModuleDict(self.models), self.device)
        self._check_optimizers()
        self.open_data(checked_data(data))
        self._know_modes(self.model)
        self._step_with("Loop", "Loop: optimizers")
        self.buffers = SharedBuffers(self.model, self.ranks)
        self._casts = False
        self._ever: set[str] = set()
        global _newest
        _newest = self

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

    def _check_settings(self, where: str, optimizer: Optimizer) -> None:
        check_optimizer(where, optimizer, self.setup)

    # The steps

    def __iter__(self) -> Iterator[Step]:
        """Every step that is left, and the models at their end."""
        yield from self.steps()
        if missing := [name for name in self.optimizers if name not in self._ever]:
            raise TaskError(
                f"Loop: expected every optimizer to step at least once, but {', '.join(missing)} never did"
            )
        folder = self.setup.model_folder
        if folder is not None and not self.ranks.rank:
            with untouched(self.model, self.optimizers.values(), self.device), self.average.in_place():
                for name, model in self.models.items():
                    save_state(Path(folder) / f"{file_name(name)}.pt", model.state_dict())

    def start(self) -> None:
        """Make all devices' models those of the first, and put them into training mode."""
        self.ranks.broadcast([tensor.data for tensor in (*self.model.parameters(), *self.model.buffers())])
        super().start()

    def begin_evaluation(self) -> None:
        self._evaluation.enter_context(self.as_evaluated())
        super().begin_evaluation()

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

    # Whether the study's schedule sets the rates, and whether a step may come in parts.
    schedules = splits = True
    # Called with an optimizer's name and parameters in each of its steps, with its gradient there.
    listeners: tuple[Callable[[str, Sequence[Tensor]], None], ...] = ()

    # Measurements and checkpoints

    def measure(self, **scores: float | Tensor) -> Measurement:
        """The measurement to yield where `step.evaluates` is true: `accuracy`, or any metrics by name.

        Raises:
            TaskError: it is not time to.
        """
        if self.current is None or self.measured or not self.current.paused:
            raise TaskError(
                "Loop.measure: expected a call where step.evaluates is true, and one for each such step"
            )
        self.current.check_complete()
        self._evaluation.close()
        return self.measurement(
            {name: number_of(f"Loop.measure: {name}", value) for name, value in scores.items()}
        )

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"ever": sorted(self._ever | self.current.stepped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._ever = set(state["ever"])


_newest: Loop | None = None


def newest_loop() -> Loop | None:
    """The loop that this process's training code has created last; None since `forget_loop`."""
    return _newest


def forget_loop() -> None:
    global _newest
    _newest = None
