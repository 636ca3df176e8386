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
from .data.batches import Fetcher, Loader, SampleKeys, batches, in_order
from .evaluation import Evaluation
from .machine.device_memory import evaluating
from .model.batch_norm import batch_norms
from .model.modes import untouched
from .optimizers import load_whole_state, whole_state
from .parallel.fsdp2 import load_model_state, load_optimizer_state, model_state, optimizer_state
from .state.checkpoint import LEAVE, Checkpoint, random_state, save_state, set_random_state
from .state.leaving import Leaving, asked_to_leave
from .state.time_left import TimeLeft
from .steps.loss_sum import LossSum
from .steps.step_clock import COUNTED_STEPS, StepClock
from .steps.stepping import Stepping
from .task import Task


class TrainingRun(Stepping):
    """An attempt's training that is ready to step, and evaluates and saves its state. On several devices, one rank's part.

    Raises:
        TaskError: as `Stepping`.
    """

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
        with evaluating(), untouched(self.model, [self.optimizer], self.device), torch.no_grad(), self.average.in_place():
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
        yield from _WholeTraining(self).measurements()

    def save_model(self, folder: str) -> dict[str, Parameter]:
        """Save the trained model; returns its scores on the test set, if there is one."""
        state = self.state()
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
        return {f"test_{name}": score for name, score in self.evaluate(fetcher=self.fetcher(self.data.test)).items()}

    def state(self) -> dict[str, Any]:
        """The state of the whole model and optimizer, sharded or not; complete on rank 0. All ranks must call it."""
        if self.fully_sharded:
            return {"model": model_state(self.model), "optimizer": optimizer_state(self.optimizer)}
        return {"model": self.model.state_dict(), "optimizer": whole_state(self.optimizer), "average": [*self.averages]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned on rank 0, with any number of ranks."""
        if self.fully_sharded:
            load_model_state(self.model, state["model"])
            load_optimizer_state(self.optimizer, state["optimizer"])
        else:
            self.model.load_state_dict(state["model"])
            load_whole_state(self.optimizer, state["optimizer"])
            if state.get("average"):
                self.average.load(state["average"])
        self.rates.forget()

    def train_step(self, plan: BatchPlan, loader: Loader, fraction: float, clock: StepClock, loss_sum: LossSum) -> None:
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

    def facts(self, steps: int) -> dict[str, Parameter]:
        """What is known of a training before it begins, given its number of steps."""
        plan = self.setup.plan
        facts: dict[str, Parameter] = {
            "steps": steps,
            "model_parameters": sum(parameter.numel() for parameter in self.parameters),
        }
        if self.setup.training.ema is not None:
            facts["ema_decay"] = self.setup.ema_decay(plan.effective_batch)
        if any(True for _ in batch_norms(self.model)):
            # Synchronised BatchNorm normalises over the micro-batches of all devices, otherwise over each device's own.
            all_devices = -(-plan.effective_batch // plan.accumulation)
            facts["ghost_batch"] = all_devices if self.setup.training.sync_batch_norm else plan.largest_micro_batch
        return facts


class _WholeTraining:
    """A run's training for its whole budget: how far it is, the losses since its last evaluation, and its checkpoint."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.plans = [part.plan for part in run.setup.steps() for _ in range(part.count)]
        self.clock = StepClock(run, counts_memory=len(self.plans) >= 4 * COUNTED_STEPS)
        self.facts = run.facts(len(self.plans))
        self.checkpoint = Checkpoint.of(run.setup)
        self.steps = self.seen = self.loss_steps = 0
        self.loss_sum = LossSum(run.device)
        self._resume()
        self.time_left = TimeLeft(run.setup, self.seen)

    @property
    def is_over(self) -> bool:
        return self.seen >= self.time_left.samples

    def measurements(self) -> Iterator[Measurement]:
        run = self.run
        yield from self.checkpoint.measurements
        begun = self.steps
        loader = run.loader(self.plans[begun:], self.seen)
        run.modes.train(run.model)
        self.clock.restart()
        for plan in self.plans[begun:]:
            self.time_left.update(self.steps - begun, self.seen, run.ranks)
            self._step(plan, loader)
            # Reading the loss synchronises with the GPU, so it is read at steps 1, 2, 4, 8, ... and every 64th.
            reads = self.steps & (self.steps - 1) == 0 or self.steps % 64 == 0
            if self.seen < self.time_left.due and not (reads and not math.isfinite(float(self.loss_sum))):
                self._save_between_evaluations()
                continue
            measurement = self._measured()
            self.checkpoint.add(measurement)
            goes_on = math.isfinite(measurement.train_loss or 0.0) and not self.is_over
            leaves = run.ranks.max_over_ranks(float(asked_to_leave() and not run.ranks.rank)) > 0
            if goes_on:
                waited_s = run.ranks.max_over_ranks(0.0 if run.ranks.rank else self.checkpoint.waited_s())
                if self.checkpoint.due(waited_s) or leaves:
                    self._save(self.clock)
            yield measurement
            if not goes_on:
                return
            if leaves:
                raise Leaving
            self.clock.restart()

    def _step(self, plan: BatchPlan, loader: Loader) -> None:
        run, size = self.run, plan.effective_batch
        run.train_step(plan, loader, (self.seen + size / 2) / self.time_left.samples, self.clock, self.loss_sum)
        self.steps += 1
        self.loss_steps += 1
        self.seen += size

    def _measured(self) -> Measurement:
        """Evaluate; the losses begin anew."""
        run, setup = self.run, self.run.setup
        elapsed_s = self.clock.elapsed_s()
        train_loss = float(self.loss_sum) / self.loss_steps
        self.loss_sum, self.loss_steps = LossSum(run.device), 0
        self.facts |= run.rates.facts(setup.weight_decay) | self.clock.facts() | run.units_facts(self.seen, elapsed_s)
        if run.skipped_steps:
            self.facts["skipped_steps"] = run.skipped_steps
        if run.live is not None:
            self.facts |= run.live.checked_facts(run.ranks)
        began = time.monotonic()
        scores = run.evaluate()
        self.time_left.evaluated(time.monotonic() - began, self.seen)
        if shortened := self.time_left.facts(self.seen):
            self.facts |= {**shortened, "steps": self.steps}
        if undefined := ", ".join(name for name, score in scores.items() if math.isnan(score)):
            self.facts["undefined"] = undefined
        if setup.model_folder is not None and self.is_over:
            self.facts |= run.save_model(setup.model_folder)
        return Measurement(
            samples_seen=self.seen,
            elapsed_s=elapsed_s,
            accuracy=scores.get("accuracy"),
            scores=scores,
            train_loss=train_loss,
            facts={**self.facts, **self.checkpoint.facts()},
        )

    def _save_between_evaluations(self) -> None:
        """Save if it is time to.

        Raises:
            Leaving: this process was asked to leave.
        """
        if not (wanted := self.checkpoint.wanted(self.steps, self.run.ranks)):
            return
        until_now = self.clock.fork()
        if math.isfinite(float(self.loss_sum)):
            self._save(until_now)
        if wanted == LEAVE:
            self.run.ranks.max_over_ranks(0.0)  # the others wait until rank 0 has written
            raise Leaving
        self.clock.restart()

    def _save(self, clock: StepClock) -> None:
        """Write a checkpoint: rank 0 writes it, with the random state of every rank."""
        run = self.run
        # A mean over ranks of running means is the running mean of their mean: between evaluations too, nothing changes.
        run.ranks.sync_batch_norm_statistics(batch_norms(run.model))
        rng_states = run.ranks.all_gathered({"states": [random_state(run.device)]})["states"]
        state = run.state()
        if run.ranks.rank:
            return
        self.checkpoint.save(
            {
                "steps": self.steps,
                "samples_seen": self.seen,
                "since_evaluation": {"loss_sum": float(self.loss_sum), "steps": self.loss_steps},
                **state,
                "scaler": run.scaler.state_dict(),
                "skipped_steps": run.skipped_steps,
                "clock": clock.state(),
                "rng_state": rng_states,
                "stream": None if run.live is None else run.live.state(self.seen),
            }
        )

    def _resume(self) -> None:
        """Resume from the checkpoint if there is one."""
        run, state = self.run, self.checkpoint.load()
        steps = 0 if state is None else int(state["steps"])
        seen = sum(plan.effective_batch for plan in self.plans[:steps])
        # With another micro-batch cap the last steps may differ. All ranks resume, or none does.
        valid = state is not None and steps > 0 and state["samples_seen"] == seen
        if state is None or not all(run.ranks.all_gathered({"valid": [valid]})["valid"]):
            self.checkpoint.measurements.clear()
            return
        run.load_state(state)
        run.scaler.load_state_dict(state["scaler"])
        run.skipped_steps = state.get("skipped_steps", 0)
        self.clock.set_state(state["clock"])
        if run.live is not None:
            run.live.set_state(state["stream"])
        states = state["rng_state"]
        if len(states) == run.ranks.count:  # with other ranks, each keeps a beginning of its own
            set_random_state(states[run.ranks.rank], run.device)
        since = state["since_evaluation"]
        self.loss_sum, self.loss_steps = LossSum(run.device, since["loss_sum"]), since["steps"]
        self.steps, self.seen = steps, seen
        self.facts["resumed_at"] = seen


def train_task(task: Task, setup: TrialSetup) -> Iterator[Measurement]:
    """A task as a generator, the interface of a custom training loop."""
    yield from TrainingRun(task, setup).measurements()
