"""What is known of one trial that somebody wants to train with, and the nearest plan whose passes are all alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ....spaces.errors import BsearchError, InfeasiblePlanError, StudyFileError
from ....spaces.learning_rate import OptimizerSettings
from ....spaces.plan import BatchPlan, step_plans
from ....spaces.planning import optimizer_settings
from ....spaces.readable import seconds
from ....spaces.study import StudySpec
from ....spaces.trial import Parameter, TrialRecord, TrialSetup
from ...store.stored import StoredStudy

# Passes beyond this many times the trial's own would reach a batch more closely, but in a time that nobody promised:
# 257 samples in passes of at most 96 are 258 = 3 x 86 then, and not 257 passes of one sample.
MOST_PASSES = 2

# Samples of an evaluation pass, where the study did not look for the largest.
EVALUATION_BATCH = 512


@dataclass(frozen=True, slots=True)
class EvenPlan:
    """A step whose passes are all alike: devices x micro_batch x accumulation samples, as most frameworks know it."""

    micro_batch: int
    accumulation: int = 1
    devices: int = 1

    @property
    def effective_batch(self) -> int:
        return self.devices * self.micro_batch * self.accumulation


def nearest_even_plan(plan: BatchPlan, largest_micro_batch: int | None = None, smallest_micro_batch: int = 1) -> EvenPlan:
    """The even plan nearest to a plan's effective batch, on its devices, under a cap, in at most twice its passes.

    Among plans equally near: one with as many passes as the plan, else fewer passes, else the smaller batch.

    >>> nearest_even_plan(BatchPlan(257)), nearest_even_plan(BatchPlan(257, accumulation=3), largest_micro_batch=96)
    (EvenPlan(micro_batch=257, accumulation=1, devices=1), EvenPlan(micro_batch=86, accumulation=3, devices=1))
    >>> nearest_even_plan(BatchPlan(500, accumulation=3), largest_micro_batch=200).accumulation
    4
    """
    largest = largest_micro_batch or plan.effective_batch  # without a cap, fewer passes than the plan's may do as well
    candidates = [
        EvenPlan(min(max(micro_batch, smallest_micro_batch), largest), micro_batches, plan.devices)
        for micro_batches in range(1, MOST_PASSES * plan.accumulation + 1)
        for below in (plan.effective_batch // (plan.devices * micro_batches),)
        for micro_batch in (below, below + 1)
    ]

    def distance(even: EvenPlan) -> tuple[Any, ...]:
        away = abs(even.effective_batch - plan.effective_batch)
        return away, even.accumulation != plan.accumulation, even.accumulation, even.effective_batch

    return min(candidates, key=distance)


@dataclass(frozen=True)
class ChosenSettings:
    """One trial's settings and what they promise.

    Args:
        chosen: why this trial: `knee`, `best`, ... for people.
        accuracy: of the metric that the study names; the mean of so many `runs`.
        setup: what the trial's last attempt was told.
        optimizer: class name of its optimizer; None where the study does not know it (a loop of one's own).
        momentum, nesterov: of that optimizer; None where they were not recorded.
        batch_norm: the model has batch statistics.
        even: the nearest plan of equal passes, and the optimizer's settings there.
    """

    study: str
    trial: int
    chosen: str
    metric: str
    accuracy: float | None
    train_s: float | None
    setup: TrialSetup
    optimizer: str | None
    momentum: float | None
    nesterov: bool | None
    batch_norm: bool
    even: EvenPlan
    even_settings: OptimizerSettings
    even_notes: tuple[str, ...] = ()
    runs: int = 1

    @property
    def plan(self) -> BatchPlan:
        return self.setup.plan

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Of the study's task, beside those that every study has."""
        return self.setup.parameters

    @property
    def promise(self) -> str:
        value = "unknown" if self.accuracy is None else f"{self.accuracy:.4g}"
        mean = f" (mean of {self.runs} runs)" if self.runs > 1 else ""
        return f"{self.metric} {value}{mean} in {seconds(self.train_s)} of training"

    @cached_property
    def training_set(self) -> int:
        """Samples of one epoch."""
        return max(1, round(self.setup.samples_budget / self.setup.epochs))

    @property
    def evaluation_batch(self) -> int:
        return self.setup.evaluation_batch or max(self.plan.largest_micro_batch, EVALUATION_BATCH)

    @cached_property
    def steps(self) -> tuple[tuple[int, int, int], ...]:
        """The trial's steps: (how many, samples, passes on each device) of steps that are alike, in order."""
        full, last = step_plans(self.plan, self.setup.samples_budget, **self.setup.limits)
        alike = [(full, self.plan.effective_batch, self.plan.accumulation)] if full else []
        return (*alike, *((1, plan.effective_batch, plan.accumulation) for plan in last))

    @property
    def even_steps(self) -> int:
        """Optimizer steps after which a loop that ends every epoch with what is left has seen the trial's samples."""
        epochs, rest = divmod(self.setup.samples_budget, self.training_set)
        batch = self.even.effective_batch
        return epochs * math.ceil(self.training_set / batch) + math.ceil(rest / batch)

    @property
    def running_steps(self) -> int:
        """The same of a loop whose steps run on over epochs, where only an epoch's last pass is short."""
        epochs, rest = divmod(self.setup.samples_budget, self.training_set)
        together = self.even.devices * self.even.micro_batch
        micro_batches = epochs * math.ceil(self.training_set / together) + math.ceil(rest / together)
        return math.ceil(micro_batches / self.even.accumulation)

    def warmup_steps(self, steps: int) -> int:
        """How many of so many steps the rate rises in."""
        return math.ceil(steps * self.setup.training.warmup)


def chosen_settings(study: StoredStudy, record: TrialRecord, chosen: str) -> ChosenSettings:
    """The settings of one trial of a study's front.

    Raises:
        StudyFileError: the study does not hold what the trial was told.
    """
    return settings_of(study, record, _setup(study, record), chosen)


def settings_of(study: StoredStudy, record: TrialRecord, setup: TrialSetup, chosen: str) -> ChosenSettings:
    """The same of a setup that is known already."""
    optimizer, momentum = record.facts.optimizer, record.facts.momentum
    even = nearest_even_plan(setup.plan, setup.largest_micro_batch, setup.smallest_micro_batch)
    even_settings, notes = _at_even_batch(study.spec, record, setup, even)
    return ChosenSettings(
        study=study.name,
        trial=record.number,
        chosen=chosen,
        metric=study.front.metric,
        accuracy=record.accuracy,
        train_s=record.train_s,
        setup=setup,
        optimizer=None if optimizer is None else str(optimizer),
        momentum=float(momentum) if isinstance(momentum, int | float) else None,
        nesterov=None if momentum is None else bool(record.facts.nesterov),
        batch_norm=record.facts.ghost_batch is not None,
        even=even,
        even_settings=even_settings,
        even_notes=notes,
        runs=record.facts.runs or 1,
    )


def _setup(study: StoredStudy, record: TrialRecord) -> TrialSetup:
    attempts = study.tables().attempts(study.name, record.number)
    if not attempts:
        raise StudyFileError(
            f"study {study.name}: trial {record.number}: expected what it was told when it was trained, but it was trained "
            "outside `bsearch run`. `bsearch export --format json` has its settings."
        )
    try:
        setup = TrialSetup.from_dict(attempts[-1]["setup"])
        _check_numbers(setup)
    except (KeyError, TypeError, ValueError, BsearchError) as error:
        raise StudyFileError(
            f"study {study.name}: trial {record.number}: what it was told cannot be read from its database: {error}"
        ) from None
    return setup


def _check_numbers(setup: TrialSetup) -> None:
    """A database may have been written by others, and these go into programs.

    Raises:
        ValueError: one of them is no finite number.
    """
    optimizer = setup.optimizer
    for name, value in {
        "learning_rate": optimizer.learning_rate,
        "betas": sum(optimizer.betas),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "epochs": setup.epochs,
        "samples_budget": setup.samples_budget,
    }.items():
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{name}: expected a finite number >= 0, got {value!r}")
    if setup.epochs <= 0 or not isinstance(setup.samples_budget, int) or setup.samples_budget < setup.effective_batch:
        raise ValueError(f"samples_budget: expected at least one step, got {setup.samples_budget!r} in {setup.epochs} epochs")
    for size in (setup.largest_micro_batch, setup.evaluation_batch, setup.smallest_micro_batch):
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"micro-batch: expected an integer >= 1, got {size!r}")


def _at_even_batch(
    spec: StudySpec, record: TrialRecord, setup: TrialSetup, even: EvenPlan
) -> tuple[OptimizerSettings, tuple[str, ...]]:
    """The rule's settings at the batch of an even plan, and what is to be said where it is not the trial's."""
    plan, batch = setup.plan, even.effective_batch
    other_time = (
        f"the trial made each step in {plan.accumulation} passes of at most {plan.largest_micro_batch} samples, here it is "
        f"{even.accumulation} of {even.micro_batch}, which takes another time"
    )
    notes = [] if even.accumulation == plan.accumulation else [other_time]
    if batch == plan.effective_batch:
        return setup.optimizer, tuple(notes)
    cap = "" if setup.largest_micro_batch is None else f" within {setup.largest_micro_batch} samples a pass"
    note = (
        f"effective batch {plan.effective_batch} is not devices x micro-batch x accumulation on {even.devices} "
        f"device{'s' * (even.devices > 1)}{cap} in at most {MOST_PASSES * plan.accumulation} passes: {batch} = "
        f"{even.devices} x {even.micro_batch} x {even.accumulation} instead, {100 * (batch / plan.effective_batch - 1):+.2g} %"
    )
    values = {**spec.fixed(), **record.parameters, "rule": setup.rule, "reference_rate": setup.reference_rate}
    try:
        settings = optimizer_settings(spec, batch, setup.epochs, values)
    except InfeasiblePlanError as error:
        return setup.optimizer, (f"{note}; the rate stays that of {plan.effective_batch}, since {error}", *notes)
    rate = f"learning rate {setup.learning_rate:.6g} becomes {settings.learning_rate:.6g} by the rule {setup.rule}"
    return settings, (f"{note}; {rate}", *notes)
