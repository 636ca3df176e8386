"""What tests have ranks do; a module of its own, for the ranks' processes import it."""

import copy
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from bsearch.objectives.data.batches import in_order
from bsearch.objectives.loading import load_task
from bsearch.objectives.model.batch_norm import batch_norms
from bsearch.objectives.parallel.fsdp2 import own_part, whole
from bsearch.objectives.profiling.memory.live_bytes import LiveBytes
from bsearch.objectives.state import checkpoint, leaving
from bsearch.objectives.task import Loss
from bsearch.objectives.training import TrainingRun
from bsearch.objectives.trial import attempt
from bsearch.spaces.trial import TrialSetup
from helpers import Net
from torch import nn


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256, dtype=dtype), nn.Linear(256, 64, dtype=dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.narrow(torch.tanh(self.wide(inputs)))  # type: ignore[no-any-return]


class Blocks(Net):
    """Blocks that ranks may gather one at a time, in double precision, and AdamW."""

    def model(self, setup: TrialSetup) -> nn.Module:
        blocks = [Block(self.dtype) for _ in range(6)]
        return nn.Sequential(nn.Linear(6, 64, dtype=self.dtype), *blocks, nn.Linear(64, 5, dtype=self.dtype))

    def checkpoint_blocks(self, model: nn.Module) -> list[nn.Module]:
        return [block for block in model.children() if isinstance(block, Block)]

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=setup.learning_rate)


class IgnoredBlocks(Blocks):
    kind = "ignored"


class WeighedBlocks(Blocks):
    kind = "weights"


class FrozenBlocks(Blocks):
    """Most layers are left as they are."""

    def model(self, setup: TrialSetup) -> nn.Module:
        model = super().model(setup)
        for parameter in list(model.parameters())[2:-6]:
            parameter.requires_grad_(False)
        return model


class Experts(nn.Module):
    """Two layers, of which each sample uses one: ranks may use different parameters."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16, dtype=dtype), nn.Linear(16, 5, dtype=dtype)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, size, dtype=dtype), nn.Tanh(), nn.Linear(size, 16, dtype=dtype))
            for size in sizes
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        mixed = torch.zeros_like(hidden)
        for expert, chosen in zip(self.experts, (inputs[:, 0] > 0, inputs[:, 0] <= 0), strict=True):
            if chosen.any():
                mixed = mixed.index_copy(0, chosen.nonzero()[:, 0], expert(hidden[chosen]))
        return self.last(mixed)  # type: ignore[no-any-return]


class MixedExperts(Blocks):
    def model(self, setup: TrialSetup) -> nn.Module:
        return Experts(self.dtype, (16, 24))

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        # To which a gradient of zero is none; with momentum, a parameter that no sample of a step uses would still move.
        return torch.optim.SGD(model.parameters(), lr=setup.learning_rate)


# Batches, and in how many parts each of two ranks takes them.
SPLITS = [(501, 1), (385, 3), (7, 3), (3, 2), (2, 1), (128, 4)]


def run_of(reference: str, setup: dict[str, Any]) -> TrainingRun:
    return TrainingRun(load_task(reference), TrialSetup.from_dict(setup))  # type: ignore[arg-type]


def peak(reference: str, setup: dict[str, Any]) -> Iterator[int]:
    """Bytes of live tensors on this rank, at most, in two steps."""
    run = run_of(reference, setup)
    run.model.train()
    plan = run.setup.plan
    loader = run.loader([plan] * 2)
    with LiveBytes().counting(run.model, run.optimizer) as counter:
        for _ in range(2):
            run.step(run.micro_batches(plan, loader), plan.effective_batch)
    yield counter.peak_bytes


def trained(reference: str, setup: dict[str, Any], steps: int) -> Iterator[list[torch.Tensor]]:
    """The losses of so many steps, then the parameters after them."""
    run = run_of(reference, setup)
    run.model.train()
    plan = run.setup.plan
    loader = run.loader([plan] * steps)
    losses = [float(run.step(run.micro_batches(plan, loader), plan.effective_batch)) for _ in range(steps)]
    yield [torch.tensor(losses, dtype=torch.float64), *(p.detach().clone() for p in run.parameters)]


def statistics(
    reference: str, setup: dict[str, Any], steps: int
) -> Iterator[tuple[list[list[float]], list[float]]]:
    """Every rank's running means and variances after so many steps, and what they agreed on."""
    run = run_of(reference, setup)
    run.model.train()
    plan = run.setup.plan
    loader = run.loader([plan] * steps)
    for _ in range(steps):
        run.step(run.micro_batches(plan, loader), plan.effective_batch)

    def here() -> list[float]:
        norms = list(batch_norms(run.model))
        return [
            float(x)
            for norm in norms
            for part in (norm.running_mean, norm.running_var)
            if part is not None
            for x in part
        ]

    before = run.ranks.all_gathered({"all": [here()]})["all"]
    run.ranks.sync_batch_norm_statistics(batch_norms(run.model))
    after = run.ranks.all_gathered({"all": [here()]})["all"]
    assert all(one == after[0] for one in after)
    yield before, after[0]


def after_evaluation(
    reference: str, setup: dict[str, Any], steps: int
) -> Iterator[tuple[list[list[float]], list[int]]]:
    """Every rank's running means and variances after so many steps and an evaluation, and how many batches it scored."""
    run, scored = run_of(reference, setup), [0]
    run.model.train()
    plan = run.setup.plan
    loader = run.loader([plan] * steps)
    for _ in range(steps):
        run.step(run.micro_batches(plan, loader), plan.effective_batch)
    scores = run.scores

    def counted(batch: Any) -> Any:
        scored[0] += 1
        return scores(batch)

    run.scores = counted  # type: ignore[method-assign]
    run.evaluate()
    norms = list(batch_norms(run.model))
    own = [
        float(x)
        for norm in norms
        for part in (norm.running_mean, norm.running_var)
        if part is not None
        for x in part
    ]
    gathered = run.ranks.all_gathered({"statistics": [own], "scored": scored})
    yield gathered["statistics"], gathered["scored"]


def evaluated(reference: str, setup: dict[str, Any], batch: int | None) -> Iterator[dict[str, float]]:
    run = run_of(reference, setup)
    count = len(run.data.validation)  # type: ignore[arg-type]
    yield run.evaluate(None if batch is None else in_order(count, batch, 0))


def plans_run(reference: str, setup: dict[str, Any]) -> Iterator[list[tuple[int, ...]]]:
    """The sizes of the micro-batches that this rank ran, step by step."""
    run = run_of(reference, setup)
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


def averaged(reference: str, setup: dict[str, Any]) -> Iterator[list[Any]]:
    """The validation loss at every evaluation, and every rank's average of the weights at the end."""
    run = run_of(reference, setup)
    losses = [one.scores["val_loss"] for one in run.measurements()]
    yield [losses, *run.ranks.all_gathered({"values": [[one.clone() for one in run.averages]]})["values"]]


class Clipped(Net):
    """Clips its weights after each step, and counts the steps in a buffer."""

    def model(self, setup: TrialSetup) -> nn.Module:
        model = super().model(setup)
        model.register_buffer("steps", torch.zeros((), dtype=torch.long))
        return model

    def after_step(self, model: nn.Module, setup: TrialSetup) -> None:
        model.steps += 1
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)


class Centered(Clipped):
    """Its passes move a buffer, which differs between devices until it is shared, and which its step reads."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        model.steps += batch[1].sum().long()
        return super().loss(model, batch, setup)

    def after_step(self, model: nn.Module, setup: TrialSetup) -> None:
        for parameter in model.parameters():
            parameter.add_(model.steps / 1000)


def cut_off(
    reference: str, setup: dict[str, Any], measurements: int
) -> Iterator[tuple[list[Any], list[torch.Tensor]]]:
    """So many measurements of a training that is left then, and the weights it stood at."""
    run = run_of(reference, setup)
    measured = [
        (one.samples_seen, one.accuracy, one.train_loss) for one in islice(run.measurements(), measurements)
    ]
    yield measured, [value.clone() for value in run.state_dict()["model"].values() if value is not None]


def cut_off_in_step(reference: str, setup: dict[str, Any], steps: int) -> Iterator[int]:
    """A training that is left after so many steps, wherever that is between two evaluations."""
    checkpoint._SAVING = 0  # as often as asked, however long it takes
    run = run_of(reference, setup)
    step, taken = run.step, 0

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal taken
        if taken == steps:
            raise KeyboardInterrupt
        taken += 1
        return step(*arguments)

    run.step = counted  # type: ignore[method-assign]
    with suppress(KeyboardInterrupt):
        list(run.measurements())
    yield taken


def optimizer_states(
    reference: str, setup: dict[str, Any], steps: int, before: Any = None
) -> Iterator[tuple[list[torch.Tensor], dict[str, Any], dict[str, Any], list[int]]]:
    """Parameters, the model's and the whole optimizer's state, and every rank's bytes of it, after so many more steps."""
    run = run_of(reference, setup)
    if before is not None:
        model, state, _ = copy.deepcopy(before)  # tensors sent to several processes share their memory
        run.load_state_dict(
            {"model": model, "optimizer": state, "average": [], "scaler": {}, "skipped_steps": 0}
        )
    run.model.train()
    plan = run.setup.plan
    loader = run.loader([plan] * steps, 0 if before is None else before[2])
    for _ in range(steps):
        run.step(run.micro_batches(plan, loader), plan.effective_batch)
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    tensors = [own_part(value) for value in states if isinstance(value, torch.Tensor)]
    held = run.ranks.all_gathered({"bytes": [sum(one.numel() * one.element_size() for one in tensors)]})[
        "bytes"
    ]
    parameters = [whole(one.detach().clone()) for one in run.parameters]
    state = run.state_dict()
    yield parameters, state["model"], state["optimizer"], held


def left_while_saving_takes_long(reference: str, setup: dict[str, Any]) -> Iterator[Any]:
    """A training that is asked to leave at once, and whose checkpoint takes longer to write than ranks are waited for."""
    save = checkpoint.Checkpoint.save

    def slow_save(self: checkpoint.Checkpoint, state: Any) -> None:
        time.sleep(4)
        save(self, state)

    checkpoint.Checkpoint.save = slow_save  # type: ignore[method-assign]
    if dist.get_rank() == 0:
        leaving.ask_to_leave()
    try:
        yield from attempt(reference, TrialSetup.from_dict(setup))
    finally:
        checkpoint.Checkpoint.save = save  # type: ignore[method-assign]


def ids() -> Iterator[list[int]]:
    """The process of every rank."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    yield pids


def buffers_of(reference: str, setup: dict[str, Any]) -> Iterator[tuple[list[float], list[float]]]:
    """After a whole training: the counting buffer of every rank, and how far the ranks' codebooks lie from the first one's."""
    run = run_of(reference, setup)
    for _ in run.measurements():
        pass
    codebook = run.model.codebook
    first = codebook.clone()
    dist.broadcast(first, 0)
    apart = run.ranks.all_gathered({"all": [float((codebook - first).abs().max())]})["all"]
    yield run.ranks.all_gathered({"all": [float(codebook.sum())]})["all"], apart


class OwnGroups(torch.optim.SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.base = torch.optim.SGD([dict(group) for group in self.param_groups], **options)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation: the gradient is there before `step`; the closure gives it at the worst weights nearby."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        weights = [
            weight for group in self.param_groups for weight in group["params"] if weight.grad is not None
        ]
        kept = [weight.clone() for weight in weights]
        scale = 0.1 / (torch.stack([weight.grad.norm() for weight in weights]).norm() + 1e-12)
        for weight in weights:
            weight.add_(weight.grad * scale)
        closure()
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)
        self.base.step()
