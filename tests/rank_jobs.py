"""What tests have ranks do; a module of its own, for the ranks' processes import it."""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from bsearch.objectives.batches import in_order
from bsearch.objectives.loading import load_objective
from bsearch.objectives.training import TrainingRun, batch_norms
from bsearch.spaces.trial import TrialSetup


def trained(reference: str, setup: dict[str, Any], steps: int) -> Iterator[list[torch.Tensor]]:
    """Parameters after so many steps, then the running statistics all agree on."""
    run = TrainingRun(load_objective(reference), TrialSetup.from_dict(setup))  # type: ignore[arg-type]
    run.model.train()
    plan = run.setup.plan
    loader = run.loader([plan] * steps)
    losses = [float(run.step(run.passes(plan, loader), plan.effective_batch)) for _ in range(steps)]
    run.ranks.agree_on_buffers(run.model)
    statistics = [norm.running_mean for norm in batch_norms(run.model) if norm.running_mean is not None]
    yield [torch.tensor(losses, dtype=torch.float64), *(p.detach().clone() for p in run.parameters), *statistics]


def evaluated(reference: str, setup: dict[str, Any], batch: int | None) -> Iterator[dict[str, float]]:
    run = TrainingRun(load_objective(reference), TrialSetup.from_dict(setup))  # type: ignore[arg-type]
    count = len(run.data.evaluation)  # type: ignore[arg-type]
    yield run.evaluate(None if batch is None else in_order(count, batch, 0))


def who(times: int) -> Iterator[int]:
    """This rank's process, again and again."""
    for _ in range(times):
        dist.barrier()
        yield os.getpid()
