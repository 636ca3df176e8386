"""A training held before its first step, which probes ask for steps: to try, time, trace or examine them.

The training code runs in a thread of its own, as in a trial, and both threads take turns. What a probe does runs in that thread
too: modes of torch, waits for a core and the current device are its.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from ...spaces.trial import TrialSetup
from ..adapters.as_generator import Report, as_generator
from ..adapters.loop_task import NoTrainingError, plain
from ..engine import Engine, served
from ..steps.loss_sum import LossSum
from ..task import Task, TrainFunction
from ..training import train_task

# Yields steps, to be taken by the training's body, and returns what it has found.
Steps = Generator[Any, None, Any]
# A probe of a training, given its engine.
Ask = Callable[[Any], Steps]


class _Course:
    """In the place of a trial's: its steps are not counted, evaluated or saved."""

    def __init__(self, engine: Engine) -> None:
        self.losses = LossSum(engine.device)

    def add(self, loss: Any) -> None:
        self.losses += loss

    def has_diverged(self) -> bool:
        return False


class Held:
    """One call of training code, held before its first step; close it at the end.

    Raises:
        NoTrainingError: the code yields or ends before it takes a step.
    """

    def __init__(self, training: Task | TrainFunction, setup: TrialSetup) -> None:
        self._function: Any = partial(train_task, training) if isinstance(training, Task) else training
        self.setup = setup
        self._ask: Ask
        self._served: Generator[Any] | None = None
        self._answers = as_generator(self._train)
        self.engine: Any = next(self._answers)

    def _train(self, report: Report[Any]) -> None:
        self._report = report
        try:
            with served(self):
                for _ in self._function(self.setup):
                    break
            raise NoTrainingError(
                f"{plain(self._function).__name__}: expected to iterate its Loop, got an end or a measurement first"
            )
        finally:
            if (
                self._served is not None
            ):  # what a body that has failed left open, whose modes are those of this thread
                self._served.close()

    def serve(self, engine: Engine) -> Iterator[Any]:
        self._served = self._asked(engine)
        return self._served

    def _asked(self, engine: Any) -> Generator[Any]:
        engine.start()
        engine.rates.freeze()
        engine.rates.set(0.5)
        engine.course = _Course(engine)
        found: Any = engine
        with engine.hooked():
            while True:
                self._report(found)
                found = yield from self._ask(engine)

    def run(self, ask: Ask) -> Any:
        """Let a probe ask for steps; returns what it returns.

        Raises:
            Exception: of the training code, which ends with it.
        """
        self._ask = ask
        return next(self._answers)

    def step(
        self,
        micro_batches: Sequence[tuple[int, Any]],
        samples: int,
        contexts: Sequence[AbstractContextManager[Any]] = (),
    ) -> None:
        """One step of these micro-batches, pairs of samples and a batch, inside the contexts."""

        def asked(engine: Any) -> Steps:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                yield from step_of(engine, micro_batches, samples)

        self.run(asked)

    def close(self) -> None:
        self._answers.close()  # type: ignore[attr-defined]  # a generator


def step_of(engine: Any, micro_batches: Sequence[tuple[int, Any]], samples: int) -> Steps:
    """One step, at the middle of the budget."""
    engine.current = step = engine.step_type(engine, micro_batches, samples, 0, 0.5)
    yield step
    step.finish()
    engine.end(step)
