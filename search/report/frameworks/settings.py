"""The settings of one trial to be exported, and the nearest plan whose micro-batches are all equal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ....objectives.task_code import task_kind
from ....spaces.errors import InfeasiblePlanError
from ....spaces.learning_rate import BESIDE_RATE, OptimizerSettings
from ....spaces.plan import BatchPlan, step_plans
from ....spaces.planning import optimizer_settings
from ....spaces.readable import seconds
from ....spaces.record import TrialRecord
from ....spaces.study.spec import StudySpec
from ....spaces.trial import EVALUATION_BATCH, Parameter, TrialSetup
from ...analysis.choice import Choice, chosen_trial
from ...store.stored import StoredStudy

# Accumulation may exceed the trial's by this factor. More would match the batch more closely, but at an unknown training time:
# 257 samples in micro-batches of at most 96 become 258 = 3 x 86, not 257 micro-batches of one sample.
MOST_ACCUMULATION = 2


@dataclass(frozen=True, slots=True)
class EvenPlan:
    """A step of equal micro-batches, devices x micro_batch x accumulation samples, as most frameworks define it."""

    micro_batch: int
    accumulation: int = 1
    devices: int = 1

    @property
    def effective_batch(self) -> int:
        return self.devices * self.micro_batch * self.accumulation


def nearest_even_plan(
    plan: BatchPlan, largest_micro_batch: int | None = None, smallest_micro_batch: int = 1
) -> EvenPlan:
    """The even plan nearest to a plan's effective batch, on its devices, within a cap, with at most twice its accumulation.

    Among equally near plans: the one with the same accumulation, else with less accumulation, else with the smaller batch.

    >>> nearest_even_plan(BatchPlan(257)), nearest_even_plan(BatchPlan(257, accumulation=3), largest_micro_batch=96)
    (EvenPlan(micro_batch=257, accumulation=1, devices=1), EvenPlan(micro_batch=86, accumulation=3, devices=1))
    >>> nearest_even_plan(BatchPlan(500, accumulation=3), largest_micro_batch=200).accumulation
    4
    """
    # Without a cap, less accumulation than the plan's is possible.
    largest = largest_micro_batch or plan.effective_batch
    candidates = [
        EvenPlan(min(max(micro_batch, smallest_micro_batch), largest), accumulation, plan.devices)
        for accumulation in range(1, MOST_ACCUMULATION * plan.accumulation + 1)
        for below in (plan.effective_batch // (plan.devices * accumulation),)
        for micro_batch in (below, below + 1)
    ]

    def distance(even: EvenPlan) -> tuple[Any, ...]:
        difference = abs(even.effective_batch - plan.effective_batch)
        return difference, even.accumulation != plan.accumulation, even.accumulation, even.effective_batch

    return min(candidates, key=distance)


@dataclass(frozen=True)
class ChosenSettings:
    """One trial's settings and its results.

    Args:
        chosen: why this trial was chosen (such as `the best`), to be displayed.
        accuracy: value of the study's metric, averaged over `runs`.
        setup: the setup of the trial's last attempt.
        optimizer: class name of its optimizer; None if unknown (a custom training loop).
        settings: rate, betas, epsilon and weight decay that it stepped with, where that was recorded, else the setup's.
        groups: everything that its groups stepped with, the one first that speaks for all; empty where it was not recorded.
        batch_norm: the model has batch statistics.
        task, kind: the study's training code, and what it is, as `task_kind` says.
        even: the nearest plan of equal micro-batches, with the optimizer's settings at its batch.
        by_clock: the trial was ended by its clock; the setup has the samples that it came to.
        in_order: the framework is given the samples of the whole training in the trial's order, so no step ends with an epoch.
    """

    study: str
    trial: int
    chosen: str
    metric: str
    accuracy: float | None
    train_s: float | None
    setup: TrialSetup
    optimizer: str | None
    settings: OptimizerSettings
    groups: tuple[Mapping[str, Any], ...]
    batch_norm: bool
    even: EvenPlan
    even_settings: OptimizerSettings
    even_notes: tuple[str, ...] = ()
    runs: int = 1
    task: str = ""
    kind: str | None = None
    in_order: bool = False
    by_clock: bool = False

    @property
    def plan(self) -> BatchPlan:
        return self.setup.plan

    @property
    def main(self) -> Mapping[str, Any]:
        """The settings of the group that speaks for all; empty where none was recorded."""
        return self.groups[0] if self.groups else {}

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Of the study's task, besides those that every study has."""
        return self.setup.parameters

    @property
    def result(self) -> str:
        """What the trial reached, to be displayed."""
        value = "unknown" if self.accuracy is None else f"{self.accuracy:.4g}"
        mean = f" (mean of {self.runs} runs)" if self.runs > 1 else ""
        return f"{self.metric} {value}{mean} in {seconds(self.train_s)} of training"

    @cached_property
    def training_set(self) -> int:
        """Samples of one epoch."""
        return max(1, round(self.setup.samples_budget / self.setup.epochs))

    @property
    def evaluation_batch(self) -> int:
        return self.setup.evaluation_batch or EVALUATION_BATCH

    @cached_property
    def steps(self) -> tuple[tuple[int, int, int], ...]:
        """The trial's steps in order, had its batch not grown, in groups of equal steps: (count, samples, accumulation)."""
        runs = step_plans(self.plan, self.setup.samples_budget, **self.setup.limits)
        return tuple((run.count, run.plan.effective_batch, run.plan.accumulation) for run in runs)

    @property
    def even_steps(self) -> int:
        """Optimizer steps that see the trial's samples, in a loop that ends every epoch with a smaller step."""
        epochs, rest = (
            (0, self.setup.samples_budget)
            if self.in_order
            else divmod(self.setup.samples_budget, self.training_set)
        )
        batch = self.even.effective_batch
        return epochs * math.ceil(self.training_set / batch) + math.ceil(rest / batch)

    @property
    def running_steps(self) -> int:
        """The same for a loop whose steps cross epoch boundaries, where only an epoch's last micro-batch is smaller."""
        epochs, rest = divmod(self.setup.samples_budget, self.training_set)
        together = self.even.devices * self.even.micro_batch
        micro_batches = epochs * math.ceil(self.training_set / together) + math.ceil(rest / together)
        return math.ceil(micro_batches / self.even.accumulation)

    def warmup_steps(self, steps: int) -> int:
        """How many of `steps` steps are warm-up."""
        return math.ceil(steps * self.setup.training.warmup)


def settings_to_export(study: StoredStudy, choice: Choice) -> ChosenSettings:
    """The settings of the trial of the front that is chosen.

    Raises:
        StudyFileError: see `chosen_trial`; or the study does not hold the trial's setup.
    """
    return chosen_settings(
        study, chosen_trial(study.name, study.front, choice, study.records), choice.reason(study.front)
    )


def chosen_settings(study: StoredStudy, record: TrialRecord, chosen: str) -> ChosenSettings:
    """The settings of one trial of a study's front.

    Raises:
        StudyFileError: the study does not hold the trial's setup.
    """
    return settings_of(study, record, study.setup_of(record), chosen)


def settings_of(study: StoredStudy, record: TrialRecord, setup: TrialSetup, chosen: str) -> ChosenSettings:
    """The same for a setup that is already known."""
    facts = record.facts
    by_clock = setup.is_timed_by_clock
    setup = setup.as_trained(record.facts.samples_budget, record.facts.epochs)
    if setup.couples_samples or setup.embedding:  # accumulation would compare fewer samples with each other
        even = EvenPlan(setup.effective_batch)
    else:
        even = nearest_even_plan(setup.plan, setup.largest_micro_batch, setup.smallest_micro_batch)
    even_settings, notes = _at_even_batch(study.spec, record, setup, even)
    groups = facts.groups
    if not groups and facts.momentum is not None:  # a loop of one's own has said so
        groups = ({"momentum": facts.momentum, "nesterov": bool(facts.nesterov)},)
    # What the task sets itself is the same at every batch.
    own = {name: value for name in BESIDE_RATE if (value := getattr(facts, name)) is not None}
    own = {name: value for name, value in own.items() if value != getattr(setup.optimizer, name)}
    peak = next(
        (group["lr"] for group in facts.groups[:1] if isinstance(group.get("lr"), float)), setup.learning_rate
    )
    share = peak / setup.learning_rate if setup.learning_rate else 1.0  # of its largest group
    return ChosenSettings(
        study=study.name,
        trial=record.number,
        chosen=chosen,
        metric=study.front.metric,
        accuracy=record.accuracy,
        train_s=record.train_s,
        setup=setup,
        optimizer=None if facts.optimizer is None else str(facts.optimizer),
        settings=replace(setup.optimizer, learning_rate=share * setup.learning_rate, **own),
        groups=groups,
        batch_norm=record.facts.ghost_batch is not None,
        even=even,
        even_settings=replace(even_settings, learning_rate=share * even_settings.learning_rate, **own),
        even_notes=notes,
        runs=record.facts.runs or 1,
        task=study.spec.task,
        kind=task_kind(study.spec.task),
        by_clock=by_clock,
    )


def _at_even_batch(
    spec: StudySpec, record: TrialRecord, setup: TrialSetup, even: EvenPlan
) -> tuple[OptimizerSettings, tuple[str, ...]]:
    """The optimizer's settings by the rule at the batch of an even plan, and notes on how it differs from the trial's plan."""
    plan, batch = setup.plan, even.effective_batch
    if setup.embedding == "cached":
        note = (
            f"the loss compares all {batch} samples of a step, whose embeddings the trial computed {plan.largest_micro_batch} "
            "at a time; here one micro-batch has them all. Where memory does not suffice, use a loss that caches them, such as "
            f"CachedMultipleNegativesRankingLoss(mini_batch_size={plan.largest_micro_batch}): accumulation is another training"
        )
        return setup.optimizer, (note,)
    other_accumulation = (
        f"the trial accumulated {plan.accumulation} micro-batches of at most {plan.largest_micro_batch} samples per step, here "
        f"it is {even.accumulation} of {even.micro_batch}, so the training time differs"
    )
    notes = [] if even.accumulation == plan.accumulation else [other_accumulation]
    if batch == plan.effective_batch:
        return setup.optimizer, tuple(notes)
    cap = "" if setup.largest_micro_batch is None else f" of at most {setup.largest_micro_batch} samples"
    note = (
        f"effective batch {plan.effective_batch} does not divide into equal micro-batches{cap} on {even.devices} "
        f"device{'s' * (even.devices > 1)} with accumulation up to {MOST_ACCUMULATION * plan.accumulation}: {batch} = "
        f"{even.devices} x {even.micro_batch} x {even.accumulation} instead, {100 * (batch / plan.effective_batch - 1):+.2g} %"
    )
    values = {**spec.fixed(), **record.parameters, "rule": setup.rule, "reference_rate": setup.reference_rate}
    try:
        settings = optimizer_settings(spec, batch, setup.epochs, values)
    except InfeasiblePlanError as error:
        return setup.optimizer, (
            f"{note}; the learning rate stays that of batch {plan.effective_batch}, because {error}",
            *notes,
        )
    rate = (
        f"learning rate {setup.learning_rate:.6g} becomes {settings.learning_rate:.6g} by rule {setup.rule}"
    )
    return settings, (f"{note}; {rate}", *notes)
