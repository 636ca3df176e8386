"""The training loop: steps for exactly the budget, evaluations at equal fractions of it, checkpoints and resuming."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..spaces.plan import BatchPlan
from ..spaces.schedule import next_point
from ..spaces.trial import EVALUATION_BATCH, Measurement, Parameter, TrialSetup
from .data.batches import Fetcher, SampleKeys, batches, in_order
from .evaluation import Evaluation, undefined
from .machine.device_memory import EvaluationMemoryError, is_out_of_memory
from .model.batch_norm import batch_norms
from .optimizers import load_whole_state, whole_state
from .parallel.fsdp2 import (
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)
from .state.checkpoint import LEAVE, Checkpoint, random_state, save_state, set_random_state
from .state.leaving import Leaving, asked_to_leave
from .state.time_left import TimeLeft
from .steps.loss_sum import LossSum
from .steps.step_clock import COUNTED_STEPS, StepClock
from .task import Task

if TYPE_CHECKING:
    pass

from .steps.stepping import Stepping


class TrainingRun(Stepping):
    """One attempt at training a task for its whole budget: evaluates, saves, resumes. On several devices, one rank's part.

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
        self.model.eval()
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
        try:
            with torch.no_grad(), self.average.in_place():
                own = keys[self.ranks.rank :: self.ranks.count]
                # Where ranks gather parameters for each other, all of them evaluate as many batches.
                spare = -(-len(keys) // self.ranks.count) - len(own) if self.fully_sharded else 0
                batches_of = self._evaluation_batches(fetcher, [*own, *[keys[0]] * spare])
                for number, batch in enumerate(batches_of):
                    scores = self.scores(self.on_device(batch))
                    if number < len(own):
                        evaluation.add(scores)
        except Exception as error:
            if is_out_of_memory(error):
                raise EvaluationMemoryError(str(error)) from error
            raise
        self.modes.train(self.model)
        return evaluation.values(self.ranks.all_gathered)

    def measurements(self) -> Iterator[Measurement]:
        """Train for the whole budget; evaluate at equal fractions of it and at its end.

        Where an earlier attempt left a checkpoint, its measurements are yielded again and training resumes from it.
        """
        setup = self.setup
        plans = [run.plan for run in setup.steps() for _ in range(run.count)]
        clock = StepClock(self, counts_memory=len(plans) >= 4 * COUNTED_STEPS)
        facts: dict[str, Parameter] = self.facts(len(plans))
        checkpoint = Checkpoint.of(setup)
        done, seen, since = self._resume(checkpoint, plans, clock)
        yield from checkpoint.measurements
        if seen:
            facts["resumed_at"] = seen
        loader = self.loader(plans[done:], seen)
        time_left, evaluations = TimeLeft(setup), setup.training.evaluations

        self.modes.train(self.model)
        due, loss_steps = next_point(time_left.points(evaluations), seen), since.steps
        loss_sum = LossSum(self.device, since.loss_sum)
        clock.restart()
        for number, plan in enumerate(plans[done:], start=done + 1):
            size = plan.effective_batch
            if setup.ends_by is not None:
                time_left.update(number - 1 - done, seen, self.ranks)
                due = next_point(time_left.points(evaluations), seen)
            if self._measures_noise(plan):
                self.noise.select(number, len(plans))
            else:
                self.noise.active = False
            fraction = (seen + size / 2) / time_left.samples
            self.train_step(plan, loader, fraction, clock, loss_sum)
            seen += size
            loss_steps += 1
            # Reading the loss synchronises with the GPU, so it is read at steps 1, 2, 4, 8, ... and every 64th.
            diverged = (number & (number - 1) == 0 or number % 64 == 0) and not math.isfinite(float(loss_sum))
            if seen < due and not diverged:
                if due_now := checkpoint.wanted(number, self.ranks):
                    until_now = clock.fork()
                    since = _SinceEvaluation(float(loss_sum), loss_steps)
                    if math.isfinite(since.loss_sum):
                        self._save(checkpoint, number, seen, until_now, since)
                    if due_now == LEAVE:
                        self.ranks.max_over_ranks(0.0)  # the others wait until rank 0 has written
                        raise Leaving
                    clock.restart()
                continue
            elapsed_s = clock.elapsed_s()
            train_loss = float(loss_sum) / loss_steps
            facts |= clock.facts()
            facts |= self.units_facts(seen, elapsed_s)
            if self.live is not None:
                facts |= self.live.checked_facts(self.ranks)
            self.noise.read(self.ranks.mean)
            began = time.monotonic()
            scores = self.evaluate()
            time_left.evaluated(time.monotonic() - began)
            is_over = seen >= time_left.samples
            if shortened := time_left.facts(seen):
                facts |= {**shortened, "steps": number}
            if names := ", ".join(undefined(scores)):
                facts["undefined"] = names
            if setup.model_folder is not None and is_over:
                facts |= self._finished(setup.model_folder)
            measurement = Measurement(
                samples_seen=seen,
                elapsed_s=elapsed_s,
                accuracy=scores.get("accuracy"),
                scores=scores,
                train_loss=train_loss,
                facts={**facts, **self.noise.facts(), **checkpoint.facts()},
            )
            checkpoint.add(measurement)
            leaves = self.ranks.max_over_ranks(float(asked_to_leave() and not self.ranks.rank)) > 0
            if math.isfinite(train_loss) and not is_over:
                due_now = checkpoint.due(self.ranks.max_over_ranks(0.0 if self.ranks.rank else checkpoint.waited_s()))
                if due_now or leaves:
                    self._save(checkpoint, number, seen, clock, _SinceEvaluation())
            yield measurement
            if not math.isfinite(train_loss) or is_over:
                return
            if leaves:
                raise Leaving
            loss_sum, loss_steps = LossSum(self.device), 0
            due = next_point(time_left.points(evaluations), seen)
            clock.restart()

    def _finished(self, folder: str) -> dict[str, Parameter]:
        """Save the trained model; returns its scores on the test set, if there is one."""
        state = self.state()
        if not self.ranks.rank:
            model = self.model
            if self.fully_sharded:
                model = self.task.model(self.setup)
                model.load_state_dict(state["model"])
            with self.average.in_place():
                self.task.save(model, Path(folder), self.setup)
            save_state(Path(folder) / "optimizer.pt", state["optimizer"])
        if self.data.test is None or not self.setup.scores_test:
            return {}
        return {f"test_{name}": score for name, score in self.evaluate(fetcher=self.fetcher(self.data.test)).items()}

    def state(self) -> dict[str, Any]:
        """The whole model's and optimizer's state, whatever ranks share out; complete on rank 0. All ranks must call it."""
        if self.fully_sharded:
            return {"model": model_state(self.model), "optimizer": optimizer_state(self.optimizer)}
        optimizer = whole_state(self.optimizer) if self.sharded is None else self.sharded.state_dict()
        return {"model": self.model.state_dict(), "optimizer": optimizer, "average": [*self.averages]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned on rank 0, with whatever number of ranks."""
        if self.fully_sharded:
            load_model_state(self.model, state["model"])
            load_optimizer_state(self.optimizer, state["optimizer"])
        else:
            self.model.load_state_dict(state["model"])
            if self.sharded is None:
                load_whole_state(self.optimizer, state["optimizer"])
            else:
                self.sharded.load_state_dict(state["optimizer"])
            if state.get("average"):
                self.average.load(state["average"])

    def _save(self, checkpoint: Checkpoint, steps: int, seen: int, clock: StepClock, since: _SinceEvaluation) -> None:
        """Write a checkpoint: rank 0 writes it, with the random state of every rank."""
        self.noise.read(self.ranks.mean)
        # A mean over ranks of running means is the running mean of their mean: between evaluations too, nothing changes.
        self.ranks.sync_batch_norm_statistics(batch_norms(self.model))
        rng_states = self.ranks.all_gathered({"states": [random_state(self.device)]})["states"]
        state = self.state()
        if self.ranks.rank:
            return
        checkpoint.save(
            {
                "steps": steps,
                "samples_seen": seen,
                "since_evaluation": since.to_dict(),
                **state,
                "scaler": self.scaler.state_dict(),
                "noise": self.noise.state(),
                "clock": clock.state(),
                "rng_state": rng_states,
                "stream": None if self.live is None else self.live.state(seen),
            }
        )

    def _resume(
        self, checkpoint: Checkpoint, plans: Sequence[BatchPlan], clock: StepClock
    ) -> tuple[int, int, _SinceEvaluation]:
        """Resume from the checkpoint if there is one; returns steps, samples seen, and what was since the last evaluation."""
        state = checkpoint.load()
        steps = 0 if state is None else int(state["steps"])
        seen = sum(plan.effective_batch for plan in plans[:steps])
        # With another micro-batch cap the last steps may differ. All ranks resume, or none does.
        valid = state is not None and steps > 0 and state["samples_seen"] == seen
        if state is None or not all(self.ranks.all_gathered({"valid": [valid]})["valid"]):
            checkpoint.measurements.clear()
            return 0, 0, _SinceEvaluation()
        self.load_state(state)
        self.scaler.load_state_dict(state["scaler"])
        self.noise.set_state(state["noise"])
        clock.set_state(state["clock"])
        if self.live is not None:
            self.live.set_state(state["stream"])
        states = state["rng_state"]
        if len(states) == self.ranks.count:  # with other ranks, each keeps a beginning of its own
            set_random_state(states[self.ranks.rank], self.device)
        return steps, seen, _SinceEvaluation.from_dict(state["since_evaluation"])

    def train_step(self, plan: BatchPlan, loader: Iterator[Any], fraction: float, clock: StepClock, loss_sum: LossSum) -> None:
        """One planned step at a fraction of the budget, the same in trials and in step-time profiles.

        Args:
            loss_sum: the step's mean loss is added to it.
        """
        with clock.step(plan.effective_batch):
            self.set_rate(fraction)
            loss_sum += self.step(self.micro_batches(plan, loader), plan.effective_batch)

    def _evaluation_batches(self, fetcher: Fetcher, keys: Sequence[SampleKeys]) -> Iterator[Any]:
        """Batches for evaluation; processes that load them cost a moment to start, so only several batches are worth them."""
        workers = min(self.setup.training.workers, len(keys) - 1) if not self.resident_bytes else 0
        return batches(fetcher, keys, max(workers, 0), self._pins)

    def _measures_noise(self, plan: BatchPlan) -> bool:
        # The remainder step is too small and noisy. With a gradient scaler, gradients are not at their true scale.
        splits = plan.largest_micro_batch < plan.effective_batch
        # Sharded gradients are never those of one rank's samples alone.
        # A part of a loss that compares samples is not a smaller batch's loss.
        alone = self.cache is None and not self.scaler.is_enabled() and not self.fully_sharded
        return splits and plan == self.setup.plan and alone

    def facts(self, steps: int) -> dict[str, Parameter]:
        """What is known of a training of so many steps before it begins."""
        plan = self.setup.plan
        facts: dict[str, Parameter] = {
            "steps": steps,
            "optimizer": type(self.optimizer).__name__,
            "model_parameters": sum(parameter.numel() for parameter in self.parameters),
        }
        if self.setup.training.ema is not None:
            facts["ema_decay"] = self.setup.ema_decay(plan.effective_batch)
        group = self.optimizer.param_groups[0]
        if "momentum" in group:
            facts |= {"momentum": float(group["momentum"]), "nesterov": bool(group.get("nesterov", False))}
        if any(True for _ in batch_norms(self.model)):
            # Synchronised BatchNorm normalises over the micro-batches of all devices, otherwise over each device's own.
            all_devices = -(-plan.effective_batch // plan.accumulation)
            facts["ghost_batch"] = all_devices if self.setup.training.sync_batch_norm else plan.largest_micro_batch
        return facts


@dataclass
class _SinceEvaluation:
    """What a training has summed up since its last evaluation: the losses of steps."""

    loss_sum: float = 0.0
    steps: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"loss_sum": self.loss_sum, "steps": self.steps}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> _SinceEvaluation:
        return cls(values["loss_sum"], values["steps"])


def train_task(task: Task, setup: TrialSetup) -> Iterator[Measurement]:
    """A task as a generator, the interface of a custom training loop."""
    yield from TrainingRun(task, setup).measurements()
