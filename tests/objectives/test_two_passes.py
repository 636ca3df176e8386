"""Optimizers that compute a step's gradient twice: the same samples, draws and buffers, over any micro-batches and devices."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.objectives.data.batches import SampleStream
from bsearch.objectives.optimizers import needs_closure
from bsearch.objectives.parallel.rank_processes import RankProcesses
from bsearch.objectives.profiling.memory.tracing import MemoryProbe
from bsearch.objectives.task import Loss
from bsearch.objectives.training import TrainingRun, train_task
from bsearch.spaces.errors import BsearchError
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.schedule import rate_factor
from bsearch.spaces.trial import TrialSetup
from helpers import Net, setup
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_jobs import SAM, SHARP, Sharp, trained
from torch import nn


def plain_loop(task: Net, made: TrialSetup) -> nn.Module:
    """The model after a loop that anyone would write: one large batch a step; backward, and again in the closure."""
    torch.manual_seed(made.seed)
    model = task.model(made)
    optimizer: Any = task.optimizer(model, made)
    tensors = task.data(made).train.tensors  # type: ignore[attr-defined]
    stream, seen = SampleStream(len(tensors[0]), made.seed), 0

    def gradient() -> None:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = task.loss(model, batch, made)
            (loss.total / loss.denominator).backward()
        if made.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), made.training.clip_norm)

    while seen < made.samples_budget:
        size = min(made.effective_batch, made.samples_budget - seen)
        batch = [tensor[stream.take(seen, size).index] for tensor in tensors]
        factor = rate_factor(made.training.schedule, made.training.warmup, (seen + size / 2) / made.samples_budget)
        for group in optimizer.param_groups:
            group["lr"] = made.learning_rate * factor
        gradient()
        optimizer.step(gradient)
        seen += size
    return model


@settings(max_examples=8)
@given(
    batch=st.integers(1, 150),
    budget=st.integers(150, 500),
    clip_norm=st.sampled_from([None, 0.3]),
    kind=st.sampled_from(["samples", "weights"]),
    data=st.data(),
)
def test_uneven_micro_batches_give_the_step_of_the_large_batch(
    batch: int, budget: int, clip_norm: float | None, kind: str, data: st.DataObject
) -> None:
    training = {"clip_norm": clip_norm}
    made = setup(batch, data.draw(st.integers(1, min(batch, 6))), budget=budget, rate=0.02, training=training)
    task = Sharp()
    task.kind = kind
    run = TrainingRun(task, made)
    list(run.measurements())
    for one, other in zip(run.model.parameters(), plain_loop(task, made).parameters(), strict=True):
        assert float((one - other).norm().detach()) <= 1e-12 * max(float(other.norm().detach()), 1.0)


class Compares(torch.optim.SGD):
    """Finds in its closure the gradient that is there already, as long as weights have not moved."""

    closures = 0

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        weights = self.param_groups[0]["params"]
        before = [weight.grad.clone() for weight in weights]
        for _ in range(2):
            loss = closure()
            assert loss.isfinite() and not loss.requires_grad
            assert all(torch.equal(weight.grad, value) for weight, value in zip(weights, before, strict=True))
            type(self).closures += 1
        super().step()


class Noisy(Net):
    """Draws numbers, keeps batch statistics and power iterations, and changes its batches in place."""

    def model(self, setup: TrialSetup) -> nn.Module:
        first = nn.utils.spectral_norm(nn.Linear(6, 16))  # updates a buffer in each forward pass
        return nn.Sequential(first, nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 5)).double()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        inputs, labels = batch
        inputs.add_(torch.randn_like(inputs))
        return super().loss(model, [inputs, labels], setup)

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return Compares(model.parameters(), lr=setup.learning_rate)


class NoisyOnce(Noisy):
    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=setup.learning_rate)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_pass_at_the_same_weights_gives_the_same_gradient_to_the_bit(accumulation: int) -> None:
    made = setup(40, accumulation, budget=400)
    Compares.closures = 0
    run, once = TrainingRun(Noisy(), made), TrainingRun(NoisyOnce(), made)
    told = []
    for each in (run, once):
        torch.manual_seed(5)  # both trainings draw from the process's one generator
        told.append([(one.scores, one.train_loss) for one in each.measurements()])
    assert Compares.closures == 2 * 10
    assert told[0] == told[1]  # buffers and generators too are as after one pass
    assert all(torch.equal(value, once.model.state_dict()[name]) for name, value in run.model.state_dict().items())
    assert int(run.model.state_dict()["1.num_batches_tracked"]) == 10 * accumulation


def test_resumed_it_is_bit_for_bit_the_same_with_the_momentum_of_its_base(tmp_path: Path) -> None:
    training = {"evaluations": 5, "ema": 0.9}
    made = setup(33, 2, budget=500, training=training, checkpoint=str(tmp_path / "kept.pt"), checkpoint_every_s=0.0)
    whole = [one.scores for one in train_task(Sharp(), replace(made, checkpoint=None))]
    cut = train_task(Sharp(), made)
    next(cut), next(cut)
    cut.close()
    again = TrainingRun(Sharp(), replace(made, attempt=1))
    measured = list(again.measurements())
    assert measured[-1].facts["resumed_at"] > 0
    assert [one.scores for one in measured] == whole
    optimizer: Any = again.optimizer
    assert optimizer.base.param_groups[0] is optimizer.param_groups[0]


def test_memory_is_predicted_whatever_the_number_of_micro_batches() -> None:
    probe = MemoryProbe(Sharp(), setup(4))
    assert probe.train_peak(4).total == probe.counted("train", 4).total
    assert probe.source == "traced"
    peaks = []
    for accumulation in (2, 8):
        run = TrainingRun(Sharp(), setup(4 * accumulation, accumulation, budget=4 * accumulation * 8))
        peaks.append(int(list(run.measurements())[-1].facts["peak_bytes"]))
    assert peaks[1] - peaks[0] <= 8 * 512  # a scalar loss for each: samples wait in host memory
    gpu = MemoryProbe(Sharp(), setup(4), like_gpu=True)
    assert gpu.train_peak(4).total > 0 and gpu.source == "traced", gpu.note


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "accumulation"), [(33, 1), (101, 3), (3, 2)])
def test_two_ranks_equal_one_process(ranks: RankProcesses, batch: int, accumulation: int) -> None:
    made = setup(batch, training={"clip_norm": 0.5})
    (alone,) = trained(SHARP, made.to_dict(), 5)
    shared = replace(made, plan=BatchPlan(batch, accumulation, 2))
    (together,) = ranks.run(trained, SHARP, shared.to_dict(), 5)
    for one, other in zip(alone, together, strict=True):
        assert float((one - other).norm()) <= 1e-12 * max(float(one.norm()), 1.0)


class Asserts(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "it needs one"


class OwnGroups(SAM):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.param_groups = [dict(group) for group in self.param_groups]


@pytest.mark.parametrize(
    ("optimizer", "changes", "words"),
    [
        (torch.optim.LBFGS, {}, "expected an optimizer that evaluates its closure equally often"),
        (SAM, {"training": {"precision": "fp16"}}, "training.precision: expected another precision with SAM"),
        (SAM, {"sharding": "fsdp2"}, "devices.sharding: expected ddp with SAM"),
        (OwnGroups, {}, "whose base has its own. Write self.param_groups = self.base.param_groups"),
    ],
)
def test_what_cannot_take_two_passes_is_refused(optimizer: Any, changes: dict[str, Any], words: str) -> None:
    class Mine(Net):
        def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
            return optimizer(model.parameters(), lr=setup.learning_rate)  # type: ignore[no-any-return]

    with pytest.raises(BsearchError) as error:
        TrainingRun(Mine(), setup(8, **changes))
    assert words in str(error.value)


def test_only_optimizers_that_say_so_get_a_closure() -> None:
    weights = [nn.Parameter(torch.zeros(2, 2))]
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            assert needs_closure(kind(weights)) == (name == "LBFGS"), name
    assert needs_closure(Asserts(weights, lr=0.1)) and needs_closure(SAM(weights, lr=0.1))
