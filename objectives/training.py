"""The training loop: steps for exactly the budget, evaluations at equal fractions of it, checkpoints and resuming."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..spaces.plan import BatchPlan
from ..spaces.trial import EVALUATION_BATCH, Measurement, Parameter, TrialSetup
from .course import Course
from .data.batches import Fetcher, Loader, SampleKeys, batches, in_order
from .evaluation import Evaluation
from .machine.device_memory import evaluating
from .model.batch_norm import batch_norms
from .model.modes import untouched
from .optimizers import load_whole_state, whole_state
from .parallel.fsdp2 import load_model_state, load_optimizer_state, model_state, optimizer_state
from .state.checkpoint import save_state
from .state.leaving import Leaving, asked_to_leave
from .steps.loss_sum import LossSum
from .steps.step_clock import StepClock
from .steps.stepping import Stepping
from .task import Task


class TrainingRun(Stepping):
    """An attempt's training that is ready to step, and evaluates and saves its state. On several devices, one rank's part.

    Raises:
        TaskError: as `Stepping`.
    """

    course: Course

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
        with (
            evaluating(),
            untouched(self.model, [self.optimizer], self.device),
            torch.no_grad(),
            self.average.in_place(),
        ):
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
        self.course = course = Course(self.setup, self.ranks)
        course.begin(self)
        yield from course.reported
        loader = self.loader(course.plans[course.number :], course.seen)
        self.modes.train(self.model)
        course.clock.restart()
        while not course.is_over:
            self.train_step(course.plan, loader, course.next_fraction(), course.clock, course.losses)
            course.advance(losses=1)
            if not course.is_due and not course.has_diverged():
                course.save_between()
                continue
            measurement = self._measured()
            goes_on = math.isfinite(measurement.train_loss or 0.0) and not course.is_over
            leaves = self.ranks.max_over_ranks(float(asked_to_leave() and not self.ranks.rank)) > 0
            if goes_on and (course.saves() or leaves):
                course.save(course.clock)
            yield measurement
            if not goes_on:
                return
            if leaves:
                raise Leaving
            course.clock.restart()

    def _measured(self) -> Measurement:
        """Evaluate."""
        course, elapsed_s = self.course, self.course.clock.elapsed_s()
        facts = self.rates.facts(self.setup.weight_decay) | self.data_facts(course.seen, elapsed_s)
        if self.skipped_steps:
            facts["skipped_steps"] = self.skipped_steps
        began = time.monotonic()
        scores = self.evaluate()
        course.time_left.evaluated(time.monotonic() - began, course.seen)
        if undefined := ", ".join(name for name, score in scores.items() if math.isnan(score)):
            facts["undefined"] = undefined
        if self.setup.model_folder is not None and course.is_over:
            facts |= self.save_model(self.setup.model_folder)
        return course.measurement(scores, facts, elapsed_s)

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
            save_state(Path(folder) / "optimizer.pt", state["optimizer"])
        if self.data.test is None or not self.setup.scores_test:
            return {}
        return {
            f"test_{name}": score
            for name, score in self.evaluate(fetcher=self.fetcher(self.data.test)).items()
        }

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole model and optimizer, sharded or not; complete on rank 0. All ranks must call it."""
        # A mean over ranks of running means is the running mean of their mean: between evaluations too, nothing changes.
        self.ranks.sync_batch_norm_statistics(batch_norms(self.model))
        sharded, average = self.fully_sharded, [*self.average.values]
        return {
            "model": model_state(self.model) if sharded else self.model.state_dict(),
            "optimizer": optimizer_state(self.optimizer) if sharded else whole_state(self.optimizer),
            "average": average,
            "scaler": self.scaler.state_dict(),
            "skipped_steps": self.skipped_steps,
            "stream": None if self.live is None or self.ranks.rank else self.live.state(self.course.seen),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on rank 0, with any number of ranks."""
        if self.fully_sharded:
            load_model_state(self.model, state["model"])
            load_optimizer_state(self.optimizer, state["optimizer"])
        else:
            self.model.load_state_dict(state["model"])
            load_whole_state(self.optimizer, state["optimizer"])
        if state["average"]:
            self.average.load(state["average"])
        self.rates.forget()
        self.scaler.load_state_dict(state["scaler"])
        self.skipped_steps = state["skipped_steps"]
        if self.live is not None:
            self.live.set_state(state["stream"])

    def train_step(
        self, plan: BatchPlan, loader: Loader, fraction: float, clock: StepClock, loss_sum: LossSum
    ) -> None:
        """One planned step at a fraction of the budget, the same in trials and in step-time profiles.

        Args:
            loss_sum: the step's mean loss is added to it.
        """
        with clock.step(plan.effective_batch):
            self.rates.set(fraction)
            loss_sum += self.step(self.micro_batches(plan, loader), plan.effective_batch)

    def _evaluation_batches(self, fetcher: Fetcher, keys: Sequence[SampleKeys]) -> Iterator[Any]:
        """Batches for evaluation; processes that load them cost a moment to start, so only several batches are worth them."""
        workers = min(self.setup.training.workers, len(keys) - 1) if not self.resident_bytes else 0
        return batches(fetcher, keys, max(workers, 0), self._pins)


def train_task(task: Task, setup: TrialSetup) -> Iterator[Measurement]:
    """A task as a generator, the interface of a custom training loop."""
    yield from TrainingRun(task, setup).measurements()
