"""What tests have ranks do; a module of its own, for the ranks' processes import it."""

import copy
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from bsearch.objectives.batches import in_order
from bsearch.objectives.loading import load_task
from bsearch.objectives.model.batch_norm import batch_norms
from bsearch.objectives.profiling import probe
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.laws.device import ProfileRequest
from bsearch.spaces.study import Memory
from bsearch.spaces.trial import TrialSetup


def trained(reference: str, setup: dict[str, Any], steps: int, measures_noise: bool = False) -> Iterator[list[torch.Tensor]]:
    """The losses of so many steps, then the parameters after them."""
    run = TrainingRun(load_task(reference), TrialSetup.from_dict(setup))  # type: ignore[arg-type]
    run.noise.active = measures_noise
    run.model.train()
    plan = run.setup.plan
    loader = run.loader([plan] * steps)
    losses = [float(run.step(run.micro_batches(plan, loader), plan.effective_batch)) for _ in range(steps)]
    yield [torch.tensor(losses, dtype=torch.float64), *(p.detach().clone() for p in run.parameters)]


def noise_pairs(reference: str, setup: dict[str, Any], steps: int) -> Iterator[list[tuple[float, float]]]:
    """What so many steps say of the gradient's noise and of the gradient."""
    run = TrainingRun(load_task(reference), TrialSetup.from_dict(setup))  # type: ignore[arg-type]
    run.noise.active = True
    plan = run.setup.plan
    loader = run.loader([plan] * steps)
    for _ in range(steps):
        run.step(run.micro_batches(plan, loader), plan.effective_batch)
    run.noise.read(run.ranks.mean)
    yield run.noise._pairs


def statistics(reference: str, setup: dict[str, Any], steps: int) -> Iterator[tuple[list[list[float]], list[float]]]:
    """Every rank's running means and variances after so many steps, and what they agreed on."""
    run = TrainingRun(load_task(reference), TrialSetup.from_dict(setup))  # type: ignore[arg-type]
    run.model.train()
    plan = run.setup.plan
    loader = run.loader([plan] * steps)
    for _ in range(steps):
        run.step(run.micro_batches(plan, loader), plan.effective_batch)

    def here() -> list[float]:
        norms = list(batch_norms(run.model))
        return [float(x) for norm in norms for part in (norm.running_mean, norm.running_var) if part is not None for x in part]

    before = run.ranks.all_gathered({"all": [here()]})["all"]
    run.ranks.sync_batch_norm_statistics(batch_norms(run.model))
    after = run.ranks.all_gathered({"all": [here()]})["all"]
    assert all(one == after[0] for one in after)
    yield before, after[0]


def evaluated(reference: str, setup: dict[str, Any], batch: int | None) -> Iterator[dict[str, float]]:
    run = TrainingRun(load_task(reference), TrialSetup.from_dict(setup))  # type: ignore[arg-type]
    count = len(run.data.validation)  # type: ignore[arg-type]
    yield run.evaluate(None if batch is None else in_order(count, batch, 0))


def plans_run(reference: str, setup: dict[str, Any]) -> Iterator[list[tuple[int, ...]]]:
    """The sizes of the micro-batches that this rank ran, step by step."""
    run = TrainingRun(load_task(reference), TrialSetup.from_dict(setup))  # type: ignore[arg-type]
    ran: list[tuple[int, ...]] = []
    step = run.step
    run.step = lambda micro_batches, size: (
        ran.append(tuple(samples for samples, _ in micro_batches)),
        step(micro_batches, size),
    )[1]  # type: ignore[method-assign,func-returns-value]
    for _ in run.measurements():
        pass
    yield ran


def who(times: int) -> Iterator[int]:
    """This rank's process, again and again."""
    for _ in range(times):
        dist.barrier()
        yield os.getpid()


def profiled(name: str) -> int:
    """The number of devices that a profile was made for, by one function of the probe or the other."""
    from helpers import setup

    request = ProfileRequest(setup(), Memory(), highest=4, devices=(2,), timing_s=0.1)
    made = getattr(probe, name)("bsearch.objectives.digits:Digits", request)
    return int(made.step_times[0].devices)


def cut_off(reference: str, setup: dict[str, Any], measurements: int) -> Iterator[tuple[list[Any], list[torch.Tensor]]]:
    """So many measurements of a training that is left then, and the weights it stood at."""
    run = TrainingRun(load_task(reference), TrialSetup.from_dict(setup))  # type: ignore[arg-type]
    measured = [(one.samples_seen, one.accuracy, one.train_loss) for one in islice(run.measurements(), measurements)]
    yield measured, [value.clone() for value in run.model.state_dict().values()]


def optimizer_states(
    reference: str, setup: dict[str, Any], steps: int, before: Any = None
) -> Iterator[tuple[list[torch.Tensor], dict[str, Any], dict[str, Any], list[int]]]:
    """Parameters, the model's and the whole optimizer's state, and every rank's bytes of it, after so many more steps."""
    run = TrainingRun(load_task(reference), TrialSetup.from_dict(setup))  # type: ignore[arg-type]
    optimizer = run.sharded or run.optimizer
    if before is not None:
        model, state, _ = copy.deepcopy(before)  # tensors sent to several processes share their memory
        run.model.load_state_dict(model)
        optimizer.load_state_dict(state)
    run.model.train()
    plan = run.setup.plan
    loader = run.loader([plan] * steps, 0 if before is None else before[2])
    for _ in range(steps):
        run.step(run.micro_batches(plan, loader), plan.effective_batch)
    tensors = [value for state in run.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    held = run.ranks.all_gathered({"bytes": [sum(one.numel() * one.element_size() for one in tensors)]})["bytes"]
    yield [one.detach().clone() for one in run.parameters], run.model.state_dict(), optimizer.state_dict(), held
