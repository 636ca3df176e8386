"""FSDP: parameters shared out among ranks, the same training, and the memory of one rank known without the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rank_jobs
import torch
from bsearch.cluster.study import Study
from bsearch.objectives.loading import load_task
from bsearch.objectives.parallel.rank_processes import RankProcesses
from bsearch.objectives.profiling.memory.tracing import MemoryProbe
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.state.checkpoint import experiment_of
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.laws.device import ProfileRequest
from bsearch.spaces.plan import ActivationCheckpointing, BatchPlan, Sharding
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.study.file import study_from_dict
from conftest import small_study
from helpers import run, setup
from rank_jobs import cut_off, evaluated, optimizer_states, peak

DIGITS = "bsearch.objectives.digits:Digits"
TASKS = rank_jobs.__file__
BLOCKS = f"{TASKS}:Blocks"


def on(
    devices: int,
    sharding: Sharding,
    batch: int = 33,
    micro_batches: int = 3,
    mode: ActivationCheckpointing = "none",
) -> dict[str, Any]:
    made = setup(batch, rate=0.003, training={"clip_norm": 0.5})
    return replace(made, plan=BatchPlan(batch, micro_batches, devices, mode), sharding=sharding).to_dict()


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(("batch", "micro_batches"), [(33, 3), (51, 2), (5, 3), (2, 1)])
@pytest.mark.parametrize("kind", ["Blocks", "IgnoredBlocks", "WeighedBlocks"])
def test_five_steps_are_those_of_one_device(
    ranks: RankProcesses, kind: str, batch: int, micro_batches: int
) -> None:
    task = f"{TASKS}:{kind}"
    (sharded,) = ranks.run(optimizer_states, task, on(2, "fsdp2", batch, micro_batches), 5)
    (alone,) = optimizer_states(task, on(1, "ddp", batch, micro_batches), 5)
    assert distance(sharded[0], alone[0]) < 1e-10
    assert sum(sharded[3]) < 1.1 * alone[3][0]
    assert max(sharded[3]) < 0.6 * alone[3][0]


@pytest.mark.long
def test_ranks_may_use_different_parameters(ranks: RankProcesses) -> None:
    task = f"{TASKS}:MixedExperts"
    for batch, micro_batches in ((4, 2), (5, 3), (33, 3)):
        (sharded,) = ranks.run(optimizer_states, task, on(2, "fsdp2", batch, micro_batches), 4)
        (alone,) = optimizer_states(task, on(1, "ddp", batch, micro_batches), 4)
        assert distance(sharded[0], alone[0]) < 1e-10


@pytest.mark.long
def test_a_state_goes_on_with_any_sharding_and_number_of_devices(ranks: RankProcesses) -> None:
    (through,) = ranks.run(optimizer_states, BLOCKS, on(2, "ddp"), 6)
    for first, second in (("fsdp2", "ddp"), ("ddp", "fsdp2"), ("fsdp2", "fsdp2")):
        (half,) = ranks.run(optimizer_states, BLOCKS, on(2, first), 3)  # type: ignore[arg-type]
        before = half[1], half[2], 3 * 33
        (end,) = ranks.run(optimizer_states, BLOCKS, on(2, second), 3, before)  # type: ignore[arg-type]
        assert distance(through[0], end[0]) < 1e-10
    (alone,) = optimizer_states(BLOCKS, on(1, "ddp"), 3, before)
    assert distance(through[0], alone[0]) < 1e-10


@pytest.mark.long
def test_an_attempt_goes_on_from_its_checkpoint_to_the_same_end(ranks: RankProcesses, tmp_path: Path) -> None:
    made = replace(
        setup(33, budget=600, rate=0.003, training={"evaluations": 4}),
        sharding="fsdp2",
        plan=BatchPlan(33, 3, 2),
    )
    (through,) = ranks.run(cut_off, BLOCKS, made.to_dict(), 4)
    made = replace(made, checkpoint=f"file://{tmp_path}/c.pt", checkpoint_every_s=0.0)
    (first,) = ranks.run(cut_off, BLOCKS, made.to_dict(), 3)
    assert (tmp_path / "c.pt").exists()
    (second,) = ranks.run(cut_off, BLOCKS, replace(made, attempt=1).to_dict(), 4)
    assert first[0] == through[0][:3] == second[0][:3]
    assert second[0] == through[0]
    assert all(torch.equal(one, other) for one, other in zip(through[1], second[1], strict=True))


@pytest.mark.long
@pytest.mark.parametrize("batch", [7, 100, 250, 600])
def test_every_sample_is_evaluated_once(ranks: RankProcesses, batch: int) -> None:
    (sharded,) = ranks.run(evaluated, BLOCKS, on(2, "fsdp2"), batch)
    (alone,) = evaluated(BLOCKS, on(1, "ddp"), batch)
    assert sharded == pytest.approx(alone, rel=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "frozen"),
    [
        ("full", False),
        ("none", True),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in [("none", False), ("selective", False), ("selective", True), ("full", True)]
        ),
    ],
)
def test_the_memory_of_a_rank_is_known_without_the_others(
    ranks: RankProcesses, mode: ActivationCheckpointing, frozen: bool
) -> None:
    task = f"{TASKS}:{'FrozenBlocks' if frozen else 'Blocks'}"
    for size in (1, 64, 300):
        made = replace(
            setup(1, training={"clip_norm": 0.5}),
            sharding="fsdp2",
            plan=BatchPlan(1, activation_checkpointing=mode),
        )
        probe = MemoryProbe(load_task(task), made, ranks=2)  # type: ignore[arg-type]
        traced = probe.train_peak(size).total
        (measured,) = ranks.run(peak, task, on(2, "fsdp2", 4 * size, 2, mode))
        assert not probe.note
        # gloo's threads let go of what they gathered a moment later: of two blocks where gathering is the peak, else of one.
        block = 33_088 * 8
        late = 2 * block if size == 1 else max(block, 0.04 * measured)
        assert 0 <= measured - traced <= late
        whole = MemoryProbe(load_task(task), replace(made, sharding="ddp")).train_peak(size).total  # type: ignore[arg-type]
        assert traced < whole


@pytest.mark.long
@pytest.mark.long
def test_more_devices_leave_less_on_each_and_a_gpu_that_is_not_here_is_traced() -> None:
    made = replace(setup(1), sharding="fsdp2")
    task: Any = load_task(BLOCKS)
    peaks = [MemoryProbe(task, made, ranks=count).train_peak(16).total for count in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[3] < 0.4 * peaks[0]
    on_gpu = MemoryProbe(task, made, 1e9, like_gpu=True, ranks=2)
    assert on_gpu.train_peak(300).live == pytest.approx(
        MemoryProbe(task, made, ranks=2).train_peak(300).total, rel=0.02
    )
    assert not on_gpu.note


@pytest.mark.long
@pytest.mark.slow
def test_a_model_too_large_for_one_device_is_searched_and_trained(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "task": BLOCKS,
        "space": {"effective_batch": {"low": 3, "high": 101}, "reference_rate": 0.01, "epochs": 1},
        "memory": {"limit": "5.5MB", "activation_checkpointing": ["none", "full"]},
        "budget": {"trials": 3, "profile_s": 0.5},
    }
    with pytest.raises(StudyFileError, match=r"memory\.limit: expected room for a micro-batch of 1 sample"):
        run(study_file(**changes, devices={"kind": "cpu"}))
    path = study_file(**changes, devices={"per_trial": 2, "kind": "cpu", "sharding": "fsdp2"})
    result = run(path)
    records = result.study.records
    assert [record.outcome for record in records] == ["complete"] * 3
    assert all(0 < (record.facts.peak_bytes or 0) <= 5.5e6 for record in records)
    Study(path).train(trial="best", serial=True, out=tmp_path / "model", say=lambda line: None)
    whole = torch.load(tmp_path / "model" / "model.pt", weights_only=True)
    assert sum(value.numel() for value in whole.values()) == records[0].facts.model_parameters


def test_what_does_not_go_together_is_told() -> None:
    with pytest.raises(
        StudyFileError, match=r"training\.compile: expected false with devices\.sharding: fsdp2, got true"
    ):
        study_from_dict(
            small_study(devices={"sharding": "fsdp2", "per_trial": 2}, training={"compile": True})
        )


def test_several_numbers_of_devices_are_refused() -> None:
    with pytest.raises(
        StudyFileError, match=r"devices\.per_trial: expected one number with fsdp2, .* got 2, 4"
    ):
        study_from_dict(small_study(devices={"sharding": "fsdp2", "per_trial": [2, 4]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"devices": {"sharding": "fsdp2"}},
            "devices.sharding: expected ddp for one device per trial, got fsdp2. Write per_trial: 2",
        ),
        (
            {"devices": {"sharding": "fsdp2", "per_trial": 2}, "training": {"precision": "fp16"}},
            "devices.sharding: expected ddp with fp16, since each device would unscale only a share of gradients; got fsdp2.",
        ),
        (
            {"devices": {"sharding": "zero1", "per_trial": 2}},
            "devices.sharding: expected one of ddp, fsdp2; got 'zero1'",
        ),
    ],
)
def test_what_cannot_be_sharded_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyFileError) as told:
        study_from_dict(small_study(**changes))
    assert message in str(told.value)


def test_sharding_is_no_other_experiment() -> None:
    made = setup(8)
    assert experiment_of(made) == experiment_of(replace(made, sharding="fsdp2"))


def test_an_optimizer_of_whole_matrices_is_refused() -> None:
    made = replace(setup(1, parameters={"optimizer": "adafactor"}), sharding="fsdp2")
    with pytest.raises(StudyFileError, match=r"devices\.sharding: expected ddp with Adafactor"):
        profile_task(DIGITS, ProfileRequest(made, Memory(), highest=64, devices=(2,)))
