"""Which training functions hand over their loop instead of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from bsearch.objectives.adapters import as_generator as module
from bsearch.objectives.adapters.as_generator import as_generator
from bsearch.objectives.adapters.loop_task import (
    LoopTask,
    NoTrainingError,
    TrainingParts,
    report_parts_if_profiling,
    uses_adapter,
)
from bsearch.objectives.data.batches import Fetcher
from bsearch.objectives.profiling.memory.tracing import MemoryProbe
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.spaces.errors import StudyFileError, TaskError
from bsearch.spaces.laws.device import DeviceProfile, ProfileRequest
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.trial import Measurement, TrialSetup
from helpers import setup
from torch import nn
from torch.utils.data import TensorDataset

STEPS: list[str] = []
FEATURES = 12


def driven(setup: TrialSetup) -> Iterator[Any]:
    """A loop as an adapter drives it; its optimizer keeps a frozen layer and has two groups."""
    STEPS.append("prepared")
    net = nn.Sequential(
        nn.Linear(FEATURES, int(setup.parameters.get("width", 8))), nn.ReLU(), nn.LazyLinear(3)
    )
    net(torch.zeros(1, FEATURES))
    net[0].bias.requires_grad_(False)
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=setup.learning_rate)
    data = TensorDataset(torch.randn(90, FEATURES), torch.randint(3, (90,)))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def train(report: Any) -> None:
        report_parts_if_profiling(report, lambda: TrainingParts(net, optimizer, Fetcher(data), loss))
        STEPS.append("trained")
        report(1)

    yield from as_generator(train)
    STEPS.append("saved")


def by_module(setup: TrialSetup) -> Iterator[Any]:
    yield from module.as_generator(lambda report: report(1))


def through_another(setup: TrialSetup) -> Iterator[Any]:
    yield from (one for one in driven(setup))


def imports_it_inside(setup: TrialSetup) -> Iterator[Any]:
    from bsearch.objectives.adapters.as_generator import as_generator as adapted

    yield from adapted(lambda report: report(1))


def of_its_own(setup: TrialSetup) -> Iterator[Any]:
    STEPS.append("called")
    nn.Linear(1, 1).driven = 2  # an attribute with the name of a function that uses an adapter
    yield 1


def measures(setup: TrialSetup) -> Iterator[Any]:
    STEPS.append(f"trained {setup.samples_budget}")
    yield Measurement(samples_seen=setup.samples_budget, elapsed_s=0.1, accuracy=0.5)
    STEPS.append("asked again")


def forgets(setup: TrialSetup) -> Iterator[Any]:
    yield Measurement(samples_seen=1, elapsed_s=0.1, accuracy=setup.parameters["rate"])


def asks_again(setup: TrialSetup) -> Iterator[Any]:
    with suppress(AttributeError):
        yield from [one.accuracy for one in driven(setup)]
    STEPS.append("saved")


with_arguments = partial(driven)
of_its_own_with_arguments = partial(of_its_own)


def says_something_first(setup: TrialSetup) -> Iterator[Any]:
    yield "hello"
    yield from driven(setup)


@pytest.fixture(autouse=True)
def clean() -> None:
    STEPS.clear()


def test_functions_that_use_an_adapter_are_told_from_others() -> None:
    assert all(
        map(
            uses_adapter,
            (driven, by_module, through_another, imports_it_inside, says_something_first, with_arguments),
        )
    )
    assert not uses_adapter(of_its_own) and not uses_adapter(of_its_own_with_arguments)


@pytest.mark.slow
def test_a_loop_of_its_own_is_run_up_to_its_first_measurement() -> None:
    def profiled(name: str) -> DeviceProfile:
        return profile_task(
            f"{__name__}:{name}", ProfileRequest(setup(8, budget=1), Memory(limit="1MiB"), highest=64)
        )

    with pytest.raises(
        TaskError, match=rf"task {__name__}:of_its_own: expected to yield Measurement, got int"
    ):
        profiled("of_its_own")
    STEPS.clear()
    profile = profiled("measures")
    assert (profile.memory, profile.limit_bytes, profile.training_set, STEPS) == (
        None,
        None,
        None,
        ["trained 16"],
    )
    assert profile.examination is not None and profile.examination.verdict == "not examined"
    with pytest.raises(
        TaskError, match=rf"task {__name__}:forgets: KeyError: 'rate' .*test_loop_task.py:\d+"
    ):
        profiled("forgets")


@pytest.mark.parametrize(
    ("reference", "left"),
    [
        (f"{__name__}:driven", set()),
        (f"{__name__}:of_its_own", {"space.train_s"}),
        ("loop_tasks:classifier", {"space.train_s", "training.ema"}),
    ],
)
def test_what_a_loop_does_itself_is_refused(reference: str, left: set[str]) -> None:
    made = setup(1, budget=1, sharding="fsdp2", train_s=1.0, training={"ema": 0.9})
    request = ProfileRequest(made, Memory(limit="1MiB", activation_checkpointing=("full",)), highest=64)
    with pytest.raises(StudyFileError) as caught:
        profile_task(reference, request)
    keys = {"devices.sharding", "training.ema", "space.train_s", "memory.activation_checkpointing"}
    assert {fault.key for fault in caught.value.faults} == keys - left


@pytest.mark.parametrize("function", [driven, through_another])
def test_neither_steps_nor_what_comes_after_them_happen(function: Any) -> None:
    parts = LoopTask(function).parts(setup(1, budget=1))
    assert STEPS == ["prepared"]
    assert len(parts.data.dataset) == 90  # type: ignore[arg-type]
    STEPS.clear()
    with closing(function(setup(1, budget=1))) as training:
        assert list(training) == [1]
    assert STEPS == ["prepared", "trained", "saved"]


def test_code_that_asks_for_more_does_not_make_it_train() -> None:
    LoopTask(asks_again).parts(setup(1, budget=1))
    assert "trained" not in STEPS


@pytest.mark.slow
def test_a_function_that_yields_before_it_trains_has_unknown_memory() -> None:
    request = ProfileRequest(setup(1, budget=1), Memory(limit="1MiB"), highest=64)
    assert "got a str first" in profile_task(f"{__name__}:says_something_first", request).note
    with pytest.raises(
        NoTrainingError, match="says_something_first: expected to train by train_with, got a str first"
    ):
        LoopTask(says_something_first).parts(setup(1, budget=1))


def test_copies_have_optimizers_of_their_own_with_the_same_groups() -> None:
    task, made = LoopTask(driven), setup(1, budget=1, rate=0.01)
    one, other = task.model(made), task.model(made)
    optimizers = [task.optimizer(net, made) for net in (one, other)]
    for net, optimizer in zip((one, other), optimizers, strict=True):
        trainable = [parameter for parameter in net.parameters() if parameter.requires_grad]
        held = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        assert [id(each) for each in held] == [id(each) for each in trainable]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.5]
        task.loss(net, (torch.randn(5, FEATURES), torch.randint(3, (5,))), made).total.backward()
        optimizer.step()
    assert not torch.equal(one[2].weight, other[2].weight)
    assert STEPS == ["prepared"]  # once for the same parameters


@pytest.mark.slow
def test_other_parameters_are_another_training() -> None:
    task = LoopTask(driven)
    made = replace(setup(1, budget=1, rate=0.01), plan=BatchPlan(1), smallest_micro_batch=1)
    narrow, wide = (
        MemoryProbe(task, replace(made, parameters={"width": width})).train_peak(32) for width in (8, 800)
    )
    assert wide.total > 20 * narrow.total


def test_a_step_that_fails_leaves_memory_unknown_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "cross_entropy", lambda *_: 1 / 0)
    profile = profile_task(
        f"{__name__}:driven", ProfileRequest(setup(1, budget=1), Memory(limit="1MiB"), highest=64)
    )
    assert (profile.memory, profile.largest_micro_batch, profile.training_set) == (None, None, 90)
    assert profile.note.startswith("Its memory is not known before the first trial: ZeroDivisionError")
