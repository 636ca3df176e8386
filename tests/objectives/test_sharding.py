"""ZeRO stage 1: the same training in less memory, and checkpoints that go on with another number of devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.objectives.parallel.rank_processes import RankProcesses
from bsearch.objectives.parallel.zero1 import owners
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.state.checkpoint import experiment_of
from bsearch.objectives.task_code import task_code_hash
from bsearch.search.run.driver import run_study
from bsearch.search.run.serial import SerialRunner
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.laws.device import DeviceProfile, ProfileRequest
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.study.file import read_study, study_from_dict
from bsearch.spaces.trial import TrialSetup
from conftest import TASKS, small_study
from helpers import Net, setup
from hypothesis import given
from hypothesis import strategies as st
from rank_jobs import optimizer_states
from torch import nn

DIGITS = "bsearch.objectives.digits:Digits"


pytestmark = pytest.mark.usefixtures("ended_ranks")


def on(devices: int, sharding: str, optimizer: str = "adamw", batch: int = 33) -> dict[str, Any]:
    made = setup(batch, rate=0.003, parameters={"optimizer": optimizer, "width": 7}, training={"clip_norm": 0.5})
    return replace(made, plan=BatchPlan(batch, 3, devices), sharding=sharding).to_dict()  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30), st.integers(1, 8))
def test_every_parameter_has_one_owner_and_ranks_hold_about_as_much(sizes: list[int], count: int) -> None:
    chosen = owners(sizes, count)
    loads = [sum(size for size, rank in zip(sizes, chosen, strict=True) if rank == one) for one in range(count)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "muon"])
def test_sharded_training_is_the_same_to_the_bit(ranks: RankProcesses, optimizer: str) -> None:
    (whole,) = ranks.run(optimizer_states, DIGITS, on(2, "ddp", optimizer), 5)
    (sharded,) = ranks.run(optimizer_states, DIGITS, on(2, "zero1", optimizer), 5)
    assert all(torch.equal(one, other) for one, other in zip(whole[0], sharded[0], strict=True))
    assert same(whole[2]["state"], sharded[2]["state"])
    assert whole[3][0] == whole[3][1] == sum(sharded[3])
    assert max(sharded[3]) < whole[3][0]


@pytest.mark.long
def test_a_state_goes_on_sharded_or_not(ranks: RankProcesses) -> None:
    (through,) = ranks.run(optimizer_states, DIGITS, on(2, "ddp"), 6)
    for first, second in (("zero1", "ddp"), ("ddp", "zero1"), ("zero1", "zero1")):
        (half,) = ranks.run(optimizer_states, DIGITS, on(2, first), 3)
        (end,) = ranks.run(optimizer_states, DIGITS, on(2, second), 3, (half[1], half[2], 3 * 33))
        assert all(torch.equal(one, other) for one, other in zip(through[0], end[0], strict=True))
    (alone,) = optimizer_states(DIGITS, on(1, "ddp"), 3, (half[1], half[2], 3 * 33))
    for one, other in zip(through[0], alone[0], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_what_others_keep_is_memory_for_samples() -> None:
    known = DeviceProfile("gpu", "a card", 100, limit_bytes=1000, gradient_bytes=100, state_bytes=((1, 400), (2, 220)))
    assert known.usable_bytes(1, 0.0) == 1000
    assert known.usable_bytes(2, 0.0) == 1000 - 100 + 180
    assert replace(known, state_bytes=()).usable_bytes(2, 0.0) == 900
    assert DeviceProfile.from_dict(known.to_dict()) == known


class Layers(Net):
    """Eight layers of the same size, and AdamW."""

    dtype = torch.float32

    def model(self, setup: TrialSetup) -> nn.Module:
        hidden = [layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.Tanh())]
        return nn.Sequential(nn.Linear(6, 128), *hidden, nn.Linear(128, 5))

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=setup.learning_rate)


@pytest.mark.long
def test_what_is_sharded_leaves_room_for_larger_micro_batches_and_models() -> None:
    made = setup(1)

    def known(limit: int, devices: int, sharding: str) -> DeviceProfile:
        memory = Memory.model_validate({"limit": limit, "headroom": 0.0})
        each = ProfileRequest(replace(made, sharding=sharding), memory, highest=600, devices=(devices,))  # type: ignore[arg-type]
        return profile_task(f"{__file__}:Layers", each)

    whole, sharded = known(3_000_000, 4, "ddp"), known(3_000_000, 4, "zero1")
    more = sharded.cap_on(4, 0.0), whole.cap_on(4, 0.0)
    assert more[0] is not None
    assert more[1] is not None
    assert more[0] > more[1] > 1
    with pytest.raises(StudyFileError, match=r"memory\.limit"):
        known(2_700_000, 4, "ddp")
    assert known(2_200_000, 4, "zero1").cap_on(4, 0.0)
    with pytest.raises(StudyFileError, match=r"memory\.limit"):
        known(1_000_000, 4, "zero1")


def test_sharding_is_no_other_experiment() -> None:
    made = setup(8)
    assert experiment_of(made) == experiment_of(replace(made, sharding="zero1"))


@pytest.mark.long
def test_the_state_is_known_beforehand(ranks: RankProcesses) -> None:
    made = replace(setup(1, parameters={"optimizer": "adamw", "width": 7}), sharding="zero1")
    profile = profile_task(DIGITS, ProfileRequest(made, Memory(), highest=64, devices=(2,)))
    (sharded,) = ranks.run(optimizer_states, DIGITS, on(2, "zero1"), 1)
    assert dict(profile.state_bytes) == {1: sum(sharded[3]), 2: max(sharded[3])}


@pytest.mark.long
@pytest.mark.long
def test_a_study_of_sharded_trials_keeps_its_limit(study_file: Callable[..., Path]) -> None:
    space = {
        "effective_batch": {"low": 3, "high": 101},
        "reference_rate": 0.01,
        "epochs": 1,
        "optimizer": "adamw",
        "width": 512,
    }
    path = study_file(
        task=DIGITS,
        space=space,
        devices={"per_trial": 2, "kind": "cpu", "sharding": "zero1"},
        memory={"limit": "5MB"},
        budget={"trials": 4, "profile_s": 0.5},
    )
    spec = read_study(path)
    result = run_study(spec, SerialRunner(spec.devices), task_code_hash(spec.task))
    records = result.study.records
    assert [record.outcome for record in records] == ["complete"] * 4
    assert all((record.facts.peak_bytes or 0) <= 5e6 for record in records)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"devices": {"sharding": "zero1"}},
            "devices.sharding: expected ddp for one device per trial, got zero1. Write per_trial: 2",
        ),
        (
            {"devices": {"sharding": "zero1", "per_trial": 2}, "training": {"precision": "fp16"}},
            "devices.sharding: expected ddp with fp16, since each device would unscale only a share of gradients; got zero1.",
        ),
        (
            {"devices": {"sharding": "zero2", "per_trial": 2}},
            "devices.sharding: expected one of ddp, zero1, fsdp2; got 'zero2'",
        ),
    ],
)
def test_what_cannot_be_sharded_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyFileError) as told:
        study_from_dict(small_study(**changes))
    assert message in str(told.value)


def test_a_loop_of_its_own_has_its_own_optimizer() -> None:
    made = replace(setup(1), sharding="zero1")
    with pytest.raises(
        StudyFileError, match=r"devices\.sharding: expected ddp, since the task's training loop creates the optimizer itself"
    ):
        profile_task(f"{TASKS}:own_loop", ProfileRequest(made, Memory(), highest=64, devices=(2,)))
