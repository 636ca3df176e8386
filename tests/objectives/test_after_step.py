"""Laws of `Task.after_step`: once per step for any accumulation, before weights are averaged, in the step that is traced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bsearch.objectives.parallel.rank_processes import RankProcesses
from bsearch.objectives.profiling.memory.tracing import MemoryProbe
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.errors import TaskError
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.trial import TrialSetup
from helpers import setup
from rank_jobs import Clipped, averaged
from tasks_for_tests import WideNet
from torch import nn

JOBS = Path(__file__).parent.parent / "rank_jobs.py"


@pytest.mark.parametrize(("batch", "accumulation"), [(50, 1), (50, 7), (37, 1), (37, 37), (300, 2)])
def test_it_is_called_once_after_each_step_for_any_accumulation(batch: int, accumulation: int) -> None:
    made = setup(batch, accumulation, budget=300, training={"ema": 0.5}, reference_batch=50)
    run = TrainingRun(Clipped(), made)
    list(run.measurements())
    assert int(run.model.steps) == sum(one.count for one in made.steps()) == -(-300 // batch)
    limits = [float(one.detach().abs().max()) for one in (*run.model.parameters(), *run.averages)]
    # The largest weights are at the limit, so that they were clipped; a mean of clipped weights is within it too.
    assert max(limits) == pytest.approx(0.3) and all(limit <= 0.3 + 1e-12 for limit in limits)


def test_a_teacher_in_the_model_is_resumed_with_it(tmp_path: Path) -> None:
    class Taught(Clipped):
        def model(self, setup: TrialSetup) -> nn.Module:
            model = super().model(setup)
            model.teacher = nn.Linear(6, 16, dtype=self.dtype).requires_grad_(False)
            # Beside the student: what a Sequential calls is its own layers.
            return _Beside(model)

        def after_step(self, model: nn.Module, setup: TrialSetup) -> None:
            model.teacher.weight.lerp_(model.student[0].weight, 0.25)

    made = setup(
        33,
        2,
        budget=300,
        checkpoint=str(tmp_path / "0.pt"),
        checkpoint_every_s=0.0,
        training={"evaluations": 3},
    )
    whole = TrainingRun(Taught(), replace(made, checkpoint=None))
    expected = [one.scores for one in whole.measurements()]
    attempt = TrainingRun(Taught(), made).measurements()
    next(attempt)
    attempt.close()  # type: ignore[attr-defined]
    resumed = TrainingRun(Taught(), replace(made, attempt=1))
    assert [one.scores for one in resumed.measurements()] == expected
    assert torch.equal(resumed.model.teacher.weight, whole.model.teacher.weight)
    assert not torch.equal(whole.model.teacher.weight, TrainingRun(Taught(), made).model.teacher.weight)


class _Beside(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.teacher = model.teacher
        del model.teacher
        self.student = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.student(inputs)  # type: ignore[no-any-return]


def test_its_memory_is_a_part_of_the_step_that_is_traced() -> None:
    class Heavy(WideNet):
        def after_step(self, model: nn.Module, setup: TrialSetup) -> None:
            (torch.zeros(10_000_000) + next(model.parameters()).sum()).sum()

    made = setup(4, parameters={"width": 100})
    probe = MemoryProbe(Heavy(), made)
    peak = probe.train_peak(4)
    assert probe.source == "traced"
    assert (
        peak.total
        == probe.counted("train", 4).total
        > MemoryProbe(WideNet(), made).train_peak(4).total + 40_000_000
    )


def test_with_fsdp2_it_is_refused_by_name() -> None:
    with pytest.raises(TaskError, match=r"Clipped\.after_step: expected ddp with it"):
        TrainingRun(Clipped(), replace(setup(), sharding="fsdp2"))


@pytest.mark.slow
def test_what_it_reads_of_a_buffer_that_passes_move_is_the_same_on_all_devices(ranks: RankProcesses) -> None:
    made = setup(plan=BatchPlan(41, 2, 2), budget=300, training={"ema": 0.9})
    ((_, *every),) = ranks.run(averaged, f"{JOBS}:Centered", made.to_dict())
    assert all(map(torch.equal, *every))


@pytest.mark.slow
def test_two_devices_do_the_same_as_one(ranks: RankProcesses) -> None:
    made = setup(41, budget=300, training={"ema": 0.9}, reference_batch=16)
    alone = TrainingRun(Clipped(), made)
    measured = [one.scores["val_loss"] for one in alone.measurements()]
    ((losses, *every),) = ranks.run(
        averaged, f"{JOBS}:Clipped", replace(made, plan=BatchPlan(41, 2, 2)).to_dict()
    )
    assert losses == pytest.approx(measured, rel=1e-6)
    assert all(map(torch.equal, *every))
    for ours, theirs in zip(every[0], alone.averages, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
