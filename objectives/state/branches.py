"""Shorter trainings that branch off a longer one: as long as their learning rates agree, one run serves as both.

With `wsd`, a branch leaves where the shorter training's rate begins to fall, and decays from a saved state, which is then
restored; with `constant` it leaves at its end. The longer training continues as if nothing had happened.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from ...spaces.plan import BatchPlan
from ...spaces.schedule import rate_factor
from ...spaces.trial import Measurement, TrialSetup
from ..steps.loss_sum import LossSum
from ..steps.step_clock import StepClock
from .checkpoint import random_state, set_random_state

if TYPE_CHECKING:
    from ..training import TrainingRun

# Rates that differ by less are the same: the same fractions, rounded.
_SAME = 1e-9


def forks(setup: TrialSetup, plans: Sequence[BatchPlan]) -> dict[int, list[TrialSetup]]:
    """The setups of a training's branches, by the number of its steps after which they leave it.

    Args:
        plans: of its steps.
    """
    found: dict[int, list[TrialSetup]] = {}
    for epochs, samples in setup.branches:
        branch, seen, steps = setup.branch(epochs, samples), 0, 0
        for ours, its in zip(plans, _plans(branch), strict=False):
            size = ours.effective_batch
            if its != ours or abs(_rate(setup, seen + size / 2) - _rate(branch, seen + size / 2)) > _SAME:
                break
            seen, steps = seen + size, steps + 1
        if steps:
            found.setdefault(steps, []).append(branch)
    return found


def _plans(setup: TrialSetup) -> list[BatchPlan]:
    return [run.plan for run in setup.steps() for _ in range(run.count)]


def _rate(setup: TrialSetup, samples: float) -> float:
    return rate_factor(setup.training.schedule, setup.training.warmup, samples / setup.samples_budget)


def trained(run: TrainingRun, branch: TrialSetup, steps: int, clock: StepClock) -> Measurement:
    """The result of a branch that leaves a training after so many steps; the training's own state stays.

    Args:
        clock: of the training so far.
    """
    own = clock.fork()
    plans = _plans(branch)
    seen = branched_at = sum(plan.effective_batch for plan in plans[:steps])
    loss_sum = LossSum(run.device)
    with _trained_as(run, branch):
        loader = run.loader(plans[steps:], seen)
        own.restart()
        for plan in plans[steps:]:
            size = plan.effective_batch
            run.train_step(plan, loader, (seen + size / 2) / branch.samples_budget, own, loss_sum)
            seen += size
        elapsed_s = own.elapsed_s()
        scores = run.evaluate()
    clock.restart(evaluated=True)
    return Measurement(
        samples_seen=seen,
        elapsed_s=elapsed_s,
        accuracy=scores.get("accuracy"),
        scores=scores,
        train_loss=float(loss_sum) / (len(plans) - steps) if len(plans) > steps else None,
        facts={**run.facts(len(plans)), **own.facts(), **run.units_facts(seen, elapsed_s), "branched_at": branched_at},
    )


@contextmanager
def _trained_as(run: TrainingRun, branch: TrialSetup) -> Iterator[None]:
    """Meanwhile steps are those of a branch; afterwards the training's setup and state are as they were."""
    setup, run.setup = run.setup, branch
    live, run.live = run.live, copy.copy(run.live)  # which notes what the branch reads
    state = _in_host_memory(run.state()), _in_host_memory(run.scaler.state_dict()), random_state(run.device)
    run.noise.active = False
    try:
        yield
    finally:
        run.setup, run.live = setup, live
        run.optimizer.state.clear()  # or a GPU would hold two states at once
        run.load_state(state[0])
        run.scaler.load_state_dict(state[1])
        set_random_state(state[2], run.device)


def _in_host_memory(state: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda one: one.detach().to("cpu", copy=True), state)


__all__ = ["forks", "trained"]
