"""Activation checkpointing: less memory and more time at the same result, and a plan that chooses it where it pays."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from bsearch.objectives.model.activation_checkpointing import checkpoint_activations
from bsearch.objectives.parallel.rank_processes import RankProcesses
from bsearch.objectives.profiling.memory import limit
from bsearch.objectives.profiling.memory.tracing import MemoryProbe
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.errors import InfeasiblePlanError, StudyFileError, TaskError
from bsearch.spaces.laws.device import DeviceProfile, ProfileRequest
from bsearch.spaces.laws.memory import MemoryLaw
from bsearch.spaces.laws.step_time import StepTime
from bsearch.spaces.plan import ActivationCheckpointing, BatchPlan
from bsearch.spaces.planning import known_train_s, planned, trial_setup
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.study.file import parse_study
from bsearch.spaces.study.spec import StudySpec
from bsearch.spaces.trial import Suggestion, TrialSetup
from conftest import TASKS
from helpers import setup
from hypothesis import given
from hypothesis import strategies as st
from rank_jobs import trained
from tasks_for_tests import Block, ExactWords, Words
from torch import nn

MODES: tuple[ActivationCheckpointing, ...] = get_args(ActivationCheckpointing)


class WithBatchNorm(Words):
    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 8), nn.BatchNorm1d(self.length), nn.Linear(8, 50))

    def checkpoint_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return [model]


def with_mode(one: TrialSetup, mode: ActivationCheckpointing) -> TrialSetup:
    return replace(one, plan=replace(one.plan, activation_checkpointing=mode))


@pytest.mark.parametrize("mode", MODES[1:])
def test_training_is_the_same_with_dropout_and_uneven_micro_batches(mode: ActivationCheckpointing) -> None:
    weights, scores = [], []
    for one in ("none", mode):
        run = TrainingRun(ExactWords(), with_mode(setup(9, 2, 45, 0.1), one))  # type: ignore[arg-type]
        *_, last = run.measurements()
        weights.append([parameter.detach().clone() for parameter in run.parameters])
        scores.append(last.accuracy)
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    assert scores[0] == scores[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_is_traced_as_it_is_used(mode: ActivationCheckpointing, precision: str) -> None:
    probe = MemoryProbe(Words(), with_mode(setup(8, training={"precision": precision}), mode))
    assert probe.train_peak(8).total == pytest.approx(probe.counted("train", 8).total, rel=0.04)
    assert not probe.note


@pytest.mark.slow
@pytest.mark.parametrize("like_gpu", [False, True])
def test_more_checkpointing_takes_less_memory(like_gpu: bool) -> None:
    peaks = [
        MemoryProbe(Words(), with_mode(setup(8), mode), like_gpu=like_gpu).train_peak(64).live
        for mode in MODES
    ]
    assert peaks[0] > 1.2 * peaks[1] > 1.2 * 1.2 * peaks[2]


def test_a_copy_of_the_model_runs_its_own_blocks() -> None:
    model = nn.Sequential(Block(8), Block(8))
    checkpoint_activations(model, "full")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    inputs = torch.randn(2, 3, 8, requires_grad=True)
    assert torch.equal(copied(inputs), inputs)
    assert not torch.equal(model(inputs), inputs)
    assert list(model.state_dict()) == list(nn.Sequential(Block(8), Block(8)).state_dict())


def test_batch_norm_would_count_twice_and_is_refused() -> None:
    with pytest.raises(TaskError, match="expected blocks without BatchNorm"):
        TrainingRun(WithBatchNorm(), with_mode(setup(4), "full"))


# ---------------------------------------------------------------- the plan


def study(**memory: Any) -> StudySpec:
    document = {
        "study": "s",
        "task": "bsearch.objectives.digits:Digits",
        "space": {"effective_batch": {"low": 1, "high": 100}, "reference_rate": 0.1, "epochs": 1},
        "budget": {"trials": 1},
        "memory": {"limit": "1GB", **memory},
    }
    return parse_study(json.dumps(document))


def law(
    mode: ActivationCheckpointing, per_sample_s: float, per_pass_s: float, largest: int, devices: int = 1
) -> StepTime:
    points = ((1, per_pass_s + per_sample_s), (largest, per_pass_s + largest * per_sample_s))
    return StepTime(
        points[: 1 if largest == 1 else 2], 0.0, devices, interval=0.0, activation_checkpointing=mode
    )


def profile(caps: Sequence[int], sample_s: Sequence[float], pass_s: float) -> DeviceProfile:
    """Laws under which more checkpointing costs more per sample and allows larger micro-batches."""
    each = [
        DeviceProfile(
            "gpu",
            "a card",
            1000,
            limit_bytes=10**9,
            largest_micro_batch=cap,
            memory=MemoryLaw(((1, 10), (cap + 1, 10**9 + 1))),
            step_times=(law(mode, per_sample, pass_s, cap),),
            activation_checkpointing=mode,
        )
        for mode, cap, per_sample in zip(MODES, caps, sample_s, strict=False)
    ]
    return replace(each[0], alternatives=tuple(each[1:]))


@given(
    st.lists(st.integers(1, 60), min_size=3, max_size=3).map(sorted),
    st.lists(st.floats(0.001, 0.01), min_size=3, max_size=3).map(sorted),
    st.floats(0.0, 0.05),
    st.integers(1, 100),
)
def test_the_plan_is_the_fastest_that_fits_as_a_slow_search_finds(
    caps: list[int], sample_s: list[float], pass_s: float, batch: int
) -> None:
    spec, known = study(), profile(caps, sample_s, pass_s)
    plan = planned(spec, known, batch, 1)

    def seconds(one: BatchPlan) -> float:
        step_time = known.under(one).step_time(1)
        assert step_time is not None
        return step_time.step_s(one)

    every = [
        BatchPlan(batch, passes, 1, mode)
        for mode, cap in zip(MODES, caps, strict=True)
        for passes in range(1, batch + 1)
        if -(-batch // passes) <= cap
    ]
    assert plan.largest_micro_batch <= dict(zip(MODES, caps, strict=True))[plan.activation_checkpointing]
    # Another plan must be faster by 3 % at each of the two choices to be preferred.
    assert seconds(plan) <= min(map(seconds, every), default=seconds(plan)) / 0.97**2 * (1 + 1e-9)
    if plan.activation_checkpointing != "none":
        assert seconds(plan) < min(seconds(one) for one in every if one.activation_checkpointing == "none")


def test_without_times_the_least_checkpointing_that_fits_is_taken() -> None:
    known = profile((2, 8, 30), (1, 1, 1), 0)
    known = known.with_step_times(())
    assert planned(study(), known, 20, 1) == BatchPlan(20, 10)


def test_a_trial_keeps_its_mode_to_its_last_step_and_is_timed_with_it() -> None:
    known = profile((1, 1, 32), (0.001, 0.001, 0.0012), 0.05)
    values = {
        "effective_batch": 32,
        "reference_rate": 0.1,
        "rule": "sqrt",
        "epochs": 1,
        "devices": 1,
        "weight_decay": 0.0,
    }
    one = trial_setup(study(), "s", Suggestion(0, values), known, "gpu")
    assert (one.plan.activation_checkpointing, one.largest_micro_batch) == ("full", 32)
    assert one.limits["activation_checkpointing"] == "full"
    assert TrialSetup.from_dict(one.to_dict()) == one
    full = 1000 // 32
    assert known_train_s(known, one) == pytest.approx(
        full * (0.05 + 32 * 0.0012) + 0.05 + (1000 - 32 * full) * 0.0012
    )


def test_a_profile_keeps_its_alternatives_and_tells_them_apart() -> None:
    known = profile((2, 8, 30), (0.001, 0.002, 0.003), 0.01)
    assert DeviceProfile.from_dict(known.to_dict()) == known
    untimed = known.with_step_times(())
    assert not untimed.all_step_times and untimed.with_step_times(known.all_step_times) == known
    plan = BatchPlan(20, 1, 1, "full")
    smaller = known.updated(known.under(plan).after_out_of_memory(30))
    assert [one.largest_micro_batch for one in smaller.each] == [2, 8, 15]
    assert known.updated(replace(known, largest_micro_batch=1)).each[1:] == known.each[1:]
    with pytest.raises(InfeasiblePlanError):
        planned(
            study(), replace(known.updated(replace(known, smallest_micro_batch=200)), alternatives=()), 100, 1
        )


def request(limit: int, *modes: str, **changes: Any) -> ProfileRequest:
    memory = Memory.model_validate(
        {"limit": limit, **({"activation_checkpointing": list(modes)} if modes else {})}
    )
    return ProfileRequest(setup(1, **changes), memory, highest=64)


@pytest.mark.long
@pytest.mark.slow
def test_a_profile_looks_at_more_checkpointing_only_where_memory_binds() -> None:
    plenty = profile_task(f"{TASKS}:Words", request(10**9))
    assert [one.activation_checkpointing for one in plenty.each] == ["none"]
    few = profile_task(f"{TASKS}:Words", request(12 * 2**20))
    assert [one.activation_checkpointing for one in few.each] == list(MODES)
    caps = [one.largest_micro_batch or 0 for one in few.each]
    assert caps == sorted(caps)
    assert caps[2] > 2 * caps[0]
    least = MemoryProbe(Words(), setup(1)).train_peak(1).total
    full = profile_task(f"{TASKS}:Words", request(int(least * 1.03)))
    # With less, not even one sample fits the limit minus headroom.
    assert full.activation_checkpointing != "none"
    one = profile_task(f"{TASKS}:Words", request(12 * 2**20, "full"))
    assert [each.activation_checkpointing for each in one.each] == ["full"]


def test_a_stated_mode_holds_without_a_limit_too() -> None:
    free = ProfileRequest(setup(1), Memory(activation_checkpointing=("full",)), highest=64)
    assert profile_task(f"{TASKS}:Words", free).activation_checkpointing == "full"


class Breaks(Words):
    """Computed again, it does something else."""

    def model(self, setup: TrialSetup) -> nn.Module:
        model = super().model(setup)
        calls = [0]

        def changing(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            calls[0] += 1
            if calls[0] % 2 == 0 and setup.plan.activation_checkpointing != "none":
                raise ValueError("a second time")

        for module in self.checkpoint_blocks(model):
            module.wide.register_forward_pre_hook(changing)  # type: ignore[union-attr,arg-type]
        return model


@pytest.mark.slow
def test_a_model_that_cannot_be_computed_again_trains_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is said, beside what a busy machine leaves unconfirmed."""
    monkeypatch.setattr(limit.verified, "__defaults__", (0.0,))
    known = profile_task(f"{__file__}:Breaks", request(12 * 2**20))
    assert [one.activation_checkpointing for one in known.each] == ["none"]
    assert known.memory is not None
    for said in (
        "full activation checkpointing failed: ValueError: a second time",
        "selective activation",
        "not confirmed on",
    ):
        assert said in known.memory.note


@pytest.mark.slow
def test_a_task_without_blocks_keeps_all_its_activations(tmp_path: Path) -> None:
    reference = "bsearch.objectives.digits:Digits"
    limited = profile_task(reference, request(10**6))
    assert [one.activation_checkpointing for one in limited.each] == ["none"]
    with pytest.raises(
        StudyFileError,
        match=r"expected a list that includes none, since Digits.checkpoint_blocks returns no blocks",
    ):
        profile_task(reference, request(10**6, "full"))


@pytest.mark.parametrize("written", ["ful", ["none", 3], [], True])
def test_what_is_no_checkpointing_is_told(written: Any) -> None:
    with pytest.raises(StudyFileError, match="expected none, selective or full, or a list of them, got"):
        study(activation_checkpointing=written)


def test_one_or_several_may_be_written_in_any_order() -> None:
    assert study(activation_checkpointing=["full", "none"]).memory.activation_checkpointing == (
        "none",
        "full",
    )
    assert study(activation_checkpointing="selective").memory.activation_checkpointing == ("selective",)
    assert (
        "memory" not in study().identity() or "activation_checkpointing" not in study().identity()["memory"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[1:])
def test_two_ranks_that_compute_again_equal_one_process_that_keeps_all(mode: ActivationCheckpointing) -> None:
    reference, made = f"{TASKS}:StillWords", setup(9, rate=0.1)
    (alone,) = trained(reference, made.to_dict(), 4)
    ranks = RankProcesses(2, "cpu", 1)
    try:
        (shared,) = ranks.run(trained, reference, replace(made, plan=BatchPlan(9, 2, 2, mode)).to_dict(), 4)
    finally:
        ranks.close()
    for one, other in zip(alone, shared, strict=True):
        assert float((one - other).norm()) <= 1e-12 * max(float(one.norm()), 1e-3)
