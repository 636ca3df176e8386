"""How far a training is, whoever steps it: its plans and position, its clock and losses, its checkpoint and measurements."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..spaces.plan import BatchPlan
from ..spaces.trial import Measurement, Parameter, TrialSetup
from .model.batch_norm import batch_norms
from .parallel.data_parallel import Ranks
from .state.checkpoint import LEAVE, Checkpoint, random_state, set_random_state
from .state.leaving import Leaving, asked_to_leave
from .state.time_left import TimeLeft
from .steps.loss_sum import LossSum
from .steps.step_clock import COUNTED_STEPS, StepClock, Timed

if TYPE_CHECKING:
    from .engine import Engine


class Course:
    """One attempt's way through the trial's budget. Where an earlier attempt left a checkpoint, it goes on from there.

    Attributes:
        plans: of every step.
        number, seen: the next step, and the samples that were trained on before it.
        reported: measurements of earlier attempts up to here.
        facts: of the training, for every measurement.
        losses: of the steps since the last measurement.
    """

    clock: StepClock
    time_left: TimeLeft
    losses: LossSum

    def __init__(self, setup: TrialSetup, ranks: Ranks) -> None:
        self.setup, self.ranks = setup, ranks
        self.plans = [run.plan for run in setup.steps() for _ in range(run.count)]
        self.checkpoint = Checkpoint.of(setup)
        self._state = self._resumable()
        self.number = 0 if self._state is None else int(self._state["steps"])
        self.seen = 0 if self._state is None else int(self._state["samples_seen"])
        self.reported = tuple(self.checkpoint.measurements)
        self.facts: dict[str, Parameter] = {
            "steps": len(self.plans),
            **({"resumed_at": self.seen} if self.seen else {}),
        }

    def _resumable(self) -> dict[str, Any] | None:
        """The checkpoint, if training can go on from it. All ranks do, or none does."""
        state = self.checkpoint.load()
        # With another micro-batch cap the last steps may differ.
        valid = state is not None and state["steps"] > 0
        valid = valid and state["samples_seen"] == sum(
            plan.effective_batch for plan in self.plans[: state["steps"]]
        )
        if all(self.ranks.all_gathered({"valid": [valid]})["valid"]):
            return dict(state)
        self.checkpoint.measurements.clear()
        return None

    def begin(
        self,
        training: Engine,
        *,
        counts_memory: bool = True,
        points: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """Load into the training what the checkpoint holds, and start the clock.

        Args:
            counts_memory: a training of enough steps counts the live bytes of the first ones on a CPU.
            points: as in `TimeLeft`.
        """
        # It holds its course: referred to in a circle, its model would stay in memory until a garbage collection.
        training = weakref.proxy(training)
        self._training, self._begun = training, self.number
        self.clock = StepClock(training, counts_memory and len(self.plans) >= 4 * COUNTED_STEPS)
        self.facts |= _facts_of(training)
        self._begin_losses()
        if (state := self._state) is not None:
            training.load_state_dict(state["training"])
            self.clock.set_state(state["clock"])
            self._begin_losses(state["loss_sum"], state["losses"])
            # With other ranks, each keeps a beginning of its own.
            if len(state["rng_state"]) == self.ranks.count:
                set_random_state(state["rng_state"][self.ranks.rank], training.device)
            self._state = None
        self.time_left = TimeLeft(self.setup, self.seen, points)
        self._leaves = self._has_ended = False

    def _begin_losses(self, total: float = 0.0, count: int = 0) -> None:
        self.losses, self._count = LossSum(self._training.device, total), count

    @property
    def plan(self) -> BatchPlan:
        """Of the next step."""
        return self.plans[self.number]

    def next_fraction(self) -> float:
        """The share of the budget that is trained at the middle of the next step.

        Before a deadline it reads the clock, on which all ranks agree, so they all call it once a step.
        """
        self.time_left.update(self.number - self._begun, self.seen, self.ranks)
        return (self.seen + self.plan.effective_batch / 2) / self.time_left.samples

    def advance(self) -> None:
        """Count the next step."""
        self.seen += self.plan.effective_batch
        self.number += 1

    def add(self, loss: Tensor) -> None:
        """Add a step's mean loss to those since the last measurement."""
        self.losses += loss
        self._count += 1

    @property
    def is_over(self) -> bool:
        return self.seen >= self.time_left.samples

    @property
    def goes_on(self) -> bool:
        """Whether there is another step: the budget is not over, and the losses were finite when they were last measured."""
        return not (self.is_over or self._has_ended)

    @property
    def is_due(self) -> bool:
        """Whether to evaluate after the step that was counted last."""
        return self.seen >= self.time_left.due

    def has_diverged(self) -> bool:
        """Whether the losses are no longer finite."""
        # Reading them waits for a GPU.
        reads = self.number & (self.number - 1) == 0 or self.number % 64 == 0
        return reads and not math.isfinite(float(self.losses))

    def measurement(
        self, scores: Mapping[str, float], facts: Mapping[str, Parameter], elapsed_s: float
    ) -> Measurement:
        """What is measured here; the losses begin anew."""
        shortened = self.time_left.facts(self.seen)
        self.facts |= {
            **facts,
            **self.clock.facts(),
            **shortened,
            **({"steps": self.number} if shortened else {}),
        }
        loss = float(self.losses) / self._count if self._count else None
        measurement = Measurement(
            samples_seen=self.seen,
            elapsed_s=elapsed_s,
            accuracy=scores.get("accuracy"),
            scores=scores,
            train_loss=loss,
            facts={**self.facts, **self.checkpoint.facts()},
        )
        # A library's loop may not say its loss.
        told = (
            scores.get(self.setup.metric, 0.0) if measurement.train_loss is None else measurement.train_loss
        )
        self._is_finite = math.isfinite(told)
        self._has_ended = not math.isfinite(measurement.train_loss or 0.0)
        self._begin_losses()
        self.checkpoint.add(measurement)
        return measurement

    def saves(self) -> bool:
        """Whether to save at this measurement, if it is finite: a checkpoint is due, or this process was asked to leave.

        Scores may differ between ranks, what is done may not: it is what the first says.
        """
        first = not self.ranks.rank
        goes_on = self.ranks.max_over_ranks(float(first and self._is_finite)) > 0 and self.goes_on
        leaves = self.ranks.max_over_ranks(float(first and asked_to_leave())) > 0
        waited_s = self.ranks.max_over_ranks(self.checkpoint.waited_s() if first else 0.0)
        self._leaves = goes_on and leaves
        return goes_on and (leaves or self.checkpoint.due(waited_s))

    def save(self, clock: StepClock) -> None:
        """Write a checkpoint: rank 0 writes it, with the random state of every rank."""
        rng_states = self.ranks.all_gathered({"states": [random_state(self._training.device)]})["states"]
        state = self._training.state_dict()
        if self.ranks.rank:
            return
        self.checkpoint.save(
            {
                "steps": self.number,
                "samples_seen": self.seen,
                "training": state,
                "clock": clock.state(),
                "loss_sum": float(self.losses),
                "losses": self._count,
                "rng_state": rng_states,
            }
        )

    def save_between(self) -> None:
        """Between two evaluations, save if it is time to.

        Raises:
            Leaving: this process was asked to leave.
        """
        if self._leaves:  # and has saved at its measurement
            raise Leaving
        if not (wanted := self.checkpoint.wanted(self.number, self.ranks)):
            return
        until_now = self.clock.fork()
        if math.isfinite(float(self.losses)):
            self.save(until_now)
        if wanted == LEAVE:
            self.ranks.max_over_ranks(0.0)  # the others wait until rank 0 has written
            raise Leaving
        self.clock.restart()


def _facts_of(training: Timed) -> dict[str, Parameter]:
    """What is known of a training before it begins."""
    model, setup, plan = training.model, training.setup, training.setup.plan
    trained = (parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    facts: dict[str, Parameter] = {"model_parameters": sum(trained)}
    if setup.training.ema is not None:
        facts["ema_decay"] = setup.ema_decay(plan.effective_batch)
    if any(True for _ in batch_norms(model)):
        # Synchronised BatchNorm normalises over the micro-batches of all devices, otherwise over each device's own.
        all_devices = -(-plan.effective_batch // plan.accumulation)
        facts["ghost_batch"] = all_devices if setup.training.sync_batch_norm else plan.largest_micro_batch
    return facts
