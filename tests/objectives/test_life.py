"""What holds in every step of a training and over its whole life, and is not known by anything's name."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bsearch.objectives.data.batches import Loader, SampleKeys
from bsearch.objectives.examination.census import census, check_no_living_scheduler, learning
from bsearch.objectives.loop import newest_loop
from bsearch.objectives.machine.torch_settings import seed_everything
from bsearch.objectives.profiling.step_time import timed_rounds
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.state.checkpoint import Checkpoint
from bsearch.objectives.steps.rates import Rates
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.errors import TaskError
from bsearch.spaces.laws.device import ProfileRequest
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.trial import TrialSetup
from helpers import Net, setup
from torch import Tensor, nn
from zoo.life import evaluation_mode, plain

# Data


def test_a_micro_batch_of_another_plan_is_never_trained_on() -> None:
    keys = [SampleKeys(np.arange(size), np.zeros(size, dtype=np.int64), 0) for size in (3, 5)]
    # All read ahead.
    loader = Loader(keys, lambda noted: iter([list(range(len(each))) for each in list(noted)]))
    assert len(loader.take(3)) == 3
    with pytest.raises(RuntimeError, match="a micro-batch of 4 samples, as planned; got one of 5"):
        loader.take(4)


def test_what_is_timed_is_what_was_planned_however_far_ahead_is_read() -> None:
    """A table's small micro-batches are read many at a time, while the numbers of timed steps are still being found."""
    plans = [BatchPlan(size, parts) for size, parts in ((4, 2), (8, 1), (9, 3), (32, 1))]
    rounds = timed_rounds("helpers:Net", setup(8), plans)
    for _, measured in zip(range(5), rounds, strict=False):
        assert len(measured.steps) == len(plans)  # a micro-batch of another plan would have raised


# Rates


def group(rate: float, **more: Any) -> dict[str, Any]:
    return {"params": [nn.Parameter(torch.zeros(1))], "lr": rate, **more}


def test_rates_are_the_schedules_times_each_groups_share() -> None:
    for groups in (
        [group(0.1, lr_scale=1.0), group(0.1, lr_scale=0.5)],  # as timm leaves them to its scheduler
        [group(0.1, lr_scale=1.0), group(0.05, lr_scale=0.5)],  # multiplied already
        [group(0.1), group(0.05)],
    ):
        optimizer = torch.optim.SGD(groups)
        Rates("here", [optimizer], "linear", 0.0).set(0.25)
        assert [one["lr"] for one in optimizer.param_groups] == pytest.approx([0.075, 0.0375])


def test_a_rate_that_something_else_sets_ends_the_training() -> None:
    optimizer = torch.optim.SGD([group(0.1), group(0.2)])
    rates = Rates("here", [optimizer], "constant", 0.0)
    rates.set(0.5)
    rates.check()
    optimizer.param_groups[1]["lr"] = 6e-4
    for look in (rates.check, lambda: rates.set(0.6)):
        with pytest.raises(TaskError, match=r"0\.2 in group 1 of SGD; got 0\.0006: something else sets it"):
            look()
    rates.forget()  # as after loading a checkpoint
    rates.set(0.6)


# Weights


class Unfreezing(Net):
    def after_step(self, model: nn.Module, setup: TrialSetup) -> None:
        model[0].weight.requires_grad_(False)  # type: ignore[index]


class Moving(Net):
    calls = 0

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        self.calls += 1
        if self.calls == 5:  # long after any examination
            with torch.no_grad():
                model[0].weight.mul_(0.9)  # type: ignore[index]
        return super().loss(model, batch, setup)


@pytest.mark.parametrize(
    ("task", "told"), [(Unfreezing, "0.weight, which is frozen now"), (Moving, "0.weight changed meanwhile")]
)
def test_weights_stay_within_a_step_and_the_trained_ones_are_always_the_same(
    task: type[Net], told: str
) -> None:
    with pytest.raises(TaskError, match=told):
        list(TrainingRun(task(), setup(16, 2, 64)).measurements())
    list(TrainingRun(task(), setup(16, 2, 64, training={"accept_inexact": True})).measurements())


# Modes


def test_evaluation_mode_that_a_loop_leaves_on_ends_with_the_evaluation() -> None:
    weights = []
    for training in (plain, evaluation_mode):
        seed_everything(0)
        list(training(setup(20, 2, 120, training={"evaluations": 3})))
        loop = newest_loop()
        assert loop is not None
        weights.append([parameter.detach().clone() for parameter in loop.parameters])
    assert all(map(torch.equal, *weights))


# Half precision


class Half(Net):
    dtype = torch.float32  # type: ignore[assignment]


class Fused(Half):
    """Its optimizer skips by itself what overflowed."""

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=setup.learning_rate, fused=True)


@pytest.mark.parametrize("task", [Half, Fused])
def test_a_step_that_overflows_is_repeated_at_a_lower_scale(task: type[Half]) -> None:
    """Skipped, it would count as trained: the larger the batch, the larger the share of the training that is lost."""
    results = []
    for scale in (2.0**8, 2.0**40):
        run = TrainingRun(task(), setup(20, 2, 60, training={"precision": "fp16", "evaluations": 1}))
        run.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        *_, last = run.measurements()
        results.append(
            (torch.cat([parameter.detach().flatten() for parameter in run.parameters]), last.facts)
        )
    (straight, facts), (repeated, others) = results
    assert "skipped_steps" not in facts
    assert 10 < others["skipped_steps"] < 40  # type: ignore[operator]
    assert float((repeated - straight).norm() / straight.norm()) < 1e-3


# Recomputation


class Noisy(nn.Module):
    """Draws from NumPy and Python, or from a generator of its own, and counts its calls."""

    calls: Tensor

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=torch.float64)
        self.generator = np.random.default_rng(0) if own else None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        noise = (
            np.random.randn(*inputs.shape)
            if self.generator is None
            else self.generator.standard_normal(inputs.shape)
        )
        self.calls += 1
        return torch.tanh(self.linear(inputs) * torch.from_numpy(noise + random.random())) / self.calls


class WithNoise(Net):
    own = False

    def model(self, setup: TrialSetup) -> nn.Module:
        model: Any = super().model(setup)
        return nn.Sequential(model[0], Noisy(own=self.own), model[2])

    def checkpoint_blocks(self, model: Any) -> Sequence[nn.Module]:
        return [model[1]]


class WithOwnNoise(WithNoise):
    own = True


def test_recomputed_blocks_find_buffers_and_generators_as_the_first_time() -> None:
    results = []
    for mode in ("none", "full", "selective"):
        run = TrainingRun(
            WithNoise(), setup(12, 3, 36, plan=replace(BatchPlan(12, 3), activation_checkpointing=mode))
        )
        list(run.measurements())
        results.append(
            [*run.model.state_dict().values(), torch.from_numpy(np.random.get_state()[1].astype(np.int64))]
        )  # type: ignore[index, union-attr]
    assert all(
        torch.equal(one, other)
        for others in results[1:]
        for one, other in zip(results[0], others, strict=True)
    )


def test_blocks_with_a_generator_of_their_own_are_refused_where_they_may_be_recomputed() -> None:
    memory = Memory(activation_checkpointing=("none", "full"))
    with pytest.raises(
        TaskError, match=r"checkpoint_blocks: expected blocks with the same gradient .* full activation"
    ):
        profile_task("objectives.test_life:WithOwnNoise", ProfileRequest(setup(8), memory, highest=40))


# What learns


def test_a_tensor_of_one_step_alone_is_its_own_affair() -> None:
    model, beside = nn.Linear(3, 1), torch.ones(3, requires_grad=True)

    def step() -> None:
        inputs = torch.randn(4, 3, requires_grad=True)
        (model(inputs * beside).sum() + inputs.square().sum()).backward()

    found = list(census("here", learning(step), model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    assert [finding.kind for finding in found] == ["beside"]
    assert "a tensor of shape (3,)" in found[0].message


def test_parameters_without_an_optimizer_and_schedulers_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    learns = learning(lambda: model(torch.ones(2, 3)).sum().backward())
    (found,) = census("here", learns, model, [optimizer])
    assert found.kind == "unstepped"
    assert (
        all(name in found.message for name in ("0.bias", "1.weight", "1.bias"))
        and "0.weight" not in found.message
    )
    check_no_living_scheduler("here", [optimizer])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(TaskError, match=r"here: expected no scheduler, .* got StepLR"):
        check_no_living_scheduler("here", [scheduler.optimizer])


# Lives


def test_a_life_that_was_not_resumed_is_not_said_to_have_been_examined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = ProfileRequest(setup(8), Memory(), highest=40)
    found = profile_task("helpers:Net", request).examination
    assert found is not None and not found.findings
    monkeypatch.setattr(Checkpoint, "load", lambda self: None)
    found = profile_task("helpers:Net", request).examination
    assert found is not None and [finding.kind for finding in found.findings] == ["unexamined"]
    assert "resuming was not examined: it began anew" in found.findings[0].message


def test_memory_that_runs_out_while_two_trainings_are_compared_is_told_and_refuses_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("made")

    monkeypatch.setattr("bsearch.objectives.examination.examine._recomputed", full)
    monkeypatch.setattr("bsearch.objectives.examination.examine._census", full)
    found = profile_task("helpers:Net", ProfileRequest(setup(8), Memory(), highest=40)).examination
    assert found is not None and found.verdict == "exact"
    assert [finding.message for finding in found.findings] == [
        "what learns could not be examined: memory ran out",
        "recomputing blocks could not be examined: memory ran out",
    ]


def test_groups_that_come_later_are_refused() -> None:
    optimizer = torch.optim.SGD([group(0.1)])
    rates = Rates("here", [optimizer], "constant", 0.0)
    rates.set(0.5)
    optimizer.add_param_group(group(0.2))
    with pytest.raises(TaskError, match="expected the 1 groups that SGD began with, got 2"):
        rates.check()


# Plans


class Divided(Net):
    """What `setup.plan` says, as if the step had not been split already."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        whole = super().loss(model, batch, setup)
        return replace(whole, total=whole.total / setup.plan.accumulation)


class DividedBeforehand(Net):
    parts = 1

    def model(self, setup: TrialSetup) -> nn.Module:
        self.parts = setup.plan.accumulation
        return super().model(setup)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        whole = super().loss(model, batch, setup)
        return replace(whole, total=whole.total / self.parts)


class PerDevice(Net):
    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        whole = super().loss(model, batch, setup)
        return replace(whole, total=whole.total / setup.plan.devices)


def examined(task: type[Net], changes: dict[str, Any] | None = None, **request: Any) -> list[tuple[str, str]]:
    known = setup(8, training={"accept_inexact": True}, **(changes or {}))
    found = profile_task(
        f"objectives.test_life:{task.__name__}", ProfileRequest(known, Memory(), highest=40, **request)
    )
    assert found.examination is not None
    return [(one.kind, one.message) for one in found.examination.findings]


@pytest.mark.parametrize("task", [Divided, DividedBeforehand])
def test_what_a_task_computes_from_the_plan_once_more_is_named(task: type[Net]) -> None:
    ((kind, message),) = examined(task)
    assert kind == "plan"
    assert "differs by 0.5 (relative) where setup.plan says 2 micro-batches rather than 1" in message


def test_what_it_computes_from_the_devices_matters_where_there_are_several() -> None:
    assert not examined(PerDevice)
    ((kind, message),) = examined(PerDevice, devices=(1, 2))
    assert kind == "plan" and "2 devices rather than 1" in message


CALLS = [0]


class Counting(Net):
    """Counts its steps in a variable of its module, which begins anew with each process."""

    def after_step(self, model: nn.Module, setup: TrialSetup) -> None:
        CALLS[0] += 1
        with torch.no_grad():
            model[0].weight.mul_(1 - 0.01 * CALLS[0])  # type: ignore[index]


def test_a_life_is_resumed_as_in_a_new_process() -> None:
    ((kind, message),) = examined(Counting)
    assert kind == "resumed" and "variables of modules" in message


# What bsearch itself could get wrong


class Dropping(Net):
    """With momentum and dropout, so that a life depends on all that a trial carries."""

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Sequential(*super().model(setup).children(), nn.Dropout(0.3))  # type: ignore[operator]

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9)


@contextmanager
def modes_left(*_: Any) -> Iterator[None]:
    yield


FAULTS = {
    "a checkpoint without one of its parts": (
        "objectives.course.set_random_state",
        lambda *_: None,
        Dropping,
        "resumed",
    ),
    "a mode that is not put back": ("objectives.engine.untouched", modes_left, Dropping, "evaluation"),
    "a generator that is not put back": (
        "objectives.model.buffers.RandomState.restore",
        lambda _: None,
        WithNoise,
        "recomputed",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_bsearch_would_be_found_by_a_pair(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, wrong, task, kind = FAULTS[fault]
    memory = Memory(activation_checkpointing=("none", "full"))
    request = ProfileRequest(setup(8, training={"accept_inexact": True}), memory, highest=40)
    reference = f"objectives.test_life:{task.__name__}"
    right = profile_task(reference, request).examination
    assert right is not None and kind not in [finding.kind for finding in right.refusals]
    monkeypatch.setattr(f"bsearch.{place}", wrong)
    found = profile_task(reference, request).examination
    assert found is not None and kind in [finding.kind for finding in found.refusals]
