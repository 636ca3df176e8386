"""Laws of `training.ema`: torch's own average after the same steps, the same horizon in samples, resumed bit for bit."""

from __future__ import annotations

import math
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.objectives.parallel.rank_processes import RankProcesses
from bsearch.objectives.profiling.memory.tracing import MemoryProbe
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.laws.device import ProfileRequest
from bsearch.spaces.learning_rate import average_decay
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.schedule import rate_factor
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.trial import TrialSetup
from conftest import TASKS
from helpers import Net, setup
from hypothesis import given
from hypothesis import strategies as st
from rank_jobs import averaged
from tasks_for_tests import Noisy, WideNet
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

HELPERS = Path(__file__).parent.parent / "helpers.py"


def plain(task: Net, made: TrialSetup) -> tuple[nn.Module, nn.Module, list[float]]:
    """The obvious twin: each step's whole batch at once, torch's own average; the model, the average and the decays."""
    run, decays, seen = TrainingRun(task, made), list[float](), 0
    model, optimizer = run.model, run.optimizer
    average, rates = AveragedModel(model), [group["lr"] for group in optimizer.param_groups]
    for size in [one.plan.effective_batch for one in made.steps() for _ in range(one.count)]:
        factor = rate_factor("cosine", 0.05, (seen + size / 2) / made.samples_budget)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        inputs, labels = run.train_fetcher.fetch(run.stream.take(seen, size))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        decays.append(0.9 ** (size / 20))
        average.multi_avg_fn = get_ema_multi_avg_fn(decays[-1])
        average.update_parameters(model)
        seen += size
    return model, average.module, decays


@pytest.mark.parametrize(("batch", "accumulation"), [(3, 2), (37, 1), (37, 5), (61, 3)])
def test_a_run_ends_with_torchs_average_of_the_same_steps(batch: int, accumulation: int) -> None:
    made = setup(batch, accumulation, budget=500, training={"ema": 0.9}, reference_batch=20, rule="linear")
    run = TrainingRun(Net(), made)
    (*_, last) = run.measurements()
    model, average, decays = plain(Net(), made)
    assert 500 % batch == 0 or decays[-1] != decays[0]
    with run.average.in_place():
        for ours, theirs in zip(run.model.parameters(), average.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    for ours, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    # What is measured is the average, not the model beside it.
    inputs, labels = run.data.validation.tensors  # type: ignore[attr-defined]
    loss, raw = (nn.functional.cross_entropy(one(inputs), labels).item() for one in (average, model))
    assert last.scores["val_loss"] == pytest.approx(loss, rel=1e-6)
    assert abs(loss - raw) > 1e-5
    assert last.facts["ema_decay"] == made.ema_decay(batch)


def test_unsplit_steps_give_the_very_bits_of_torchs_average() -> None:
    made = setup(37, budget=300, training={"ema": 0.97}, reference_batch=8)
    run = TrainingRun(Net(), made)
    average = AveragedModel(run.model)
    step = run.step

    def stepped(micro_batches: Any, size: int) -> torch.Tensor:
        loss = step(micro_batches, size)
        average.multi_avg_fn = get_ema_multi_avg_fn(0.97 ** (size / 8))
        average.update_parameters(run.model)
        return loss

    run.step = stepped  # type: ignore[method-assign]
    list(run.measurements())
    own = [parameter.clone() for parameter in run.model.parameters()]
    with run.average.in_place():
        assert all(map(torch.equal, run.model.parameters(), average.module.parameters()))
    assert all(map(torch.equal, run.model.parameters(), own))


@given(st.floats(0.5, 0.99999), st.integers(1, 4096), st.lists(st.integers(1, 9000), min_size=1, max_size=9))
def test_the_horizon_in_samples_is_the_same_at_every_batch(
    decay: float, reference: int, sizes: list[int]
) -> None:
    """Whatever steps so many samples are taken in, a weight of before them keeps the same share."""
    made = setup(training={"ema": decay}, reference_batch=reference)
    kept = math.fsum(math.log(made.ema_decay(size)) for size in sizes if made.ema_decay(size) > 1e-300)
    samples = sum(size for size in sizes if made.ema_decay(size) > 1e-300)
    assert kept == pytest.approx(samples * math.log(decay) / reference, rel=1e-6)
    assert average_decay(decay, 1.0) == decay


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_cut_off_and_resumed_the_average_is_bit_for_bit_the_same(tmp_path: Path, cut: int) -> None:
    training = {"evaluations": 4, "schedule": "wsd", "ema": 0.95}
    url = f"{tmp_path}/{uuid.uuid4().hex}.pt"
    made = setup(
        29,
        3,
        budget=400,
        training=training,
        reference_batch=16,
        epochs=4.0,
        checkpoint=url,
        checkpoint_every_s=0.0,
        smallest_micro_batch=2,
    )
    uninterrupted = TrainingRun(Noisy(), replace(made, checkpoint=None))
    expected = list(uninterrupted.measurements())
    attempt = TrainingRun(Noisy(), made).measurements()
    for _ in range(cut):
        next(attempt)
    attempt.close()  # type: ignore[attr-defined]
    resumed = TrainingRun(Noisy(), replace(made, attempt=1))
    found = list(resumed.measurements())
    assert [(one.scores, one.train_loss) for one in found] == [
        (one.scores, one.train_loss) for one in expected
    ]
    assert all(map(torch.equal, resumed.averages, uninterrupted.averages))
    assert all(
        map(torch.equal, resumed.model.state_dict().values(), uninterrupted.model.state_dict().values())
    )


def test_what_is_saved_is_the_average_and_batch_norm_keeps_the_statistics_of_the_raw_weights(
    tmp_path: Path,
) -> None:
    made = setup(
        25,
        2,
        budget=300,
        training={"ema": 0.9},
        reference_batch=10,
        model_folder=str(tmp_path),
        smallest_micro_batch=2,
    )
    run = TrainingRun(Noisy(), made)
    (*_, last) = run.measurements()
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    names = [name for name, _ in run.model.named_parameters()]
    assert all(torch.equal(saved[name], value) for name, value in zip(names, run.averages, strict=True))
    assert not all(torch.equal(saved[name], value) for name, value in run.model.named_parameters())
    assert all(torch.equal(saved[name], value) for name, value in run.model.named_buffers())
    fresh = TrainingRun(Noisy(), replace(made, training=setup().training))
    fresh.model.load_state_dict(saved)
    assert fresh.evaluate() == last.scores


def test_weights_of_16_bits_are_averaged_in_32() -> None:
    class Half(Net):
        dtype = torch.bfloat16

    run = TrainingRun(Half(), setup(20, budget=200, training={"ema": 0.999}, reference_batch=20))
    list(run.measurements())
    assert {value.dtype for value in run.averages} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in run.averages)
    with run.average.in_place():
        assert {one.dtype for one in run.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["train", "evaluation"])
def test_the_average_is_in_the_predicted_memory(kind: str) -> None:
    peaks = []
    for ema in (None, 0.99):
        probe = MemoryProbe(WideNet(), setup(4, training={"ema": ema}, parameters={"width": 300}))
        peak = probe.train_peak(4) if kind == "train" else probe.evaluation_peak(4)
        assert probe.source == "traced"
        assert peak.total == probe.counted(kind, 4).total
        peaks.append(peak)
    copies = sum(-(-one.nbytes // 512) * 512 for one in probe.run.parameters)
    # An evaluation keeps the raw weights aside, in the place of the gradients that a step has.
    assert peaks[1].total - peaks[0].total == copies * (1 if kind == "train" else 2)
    if kind == "train":
        assert peaks[1].parts["weight average"] == copies


def test_a_trials_own_count_is_the_predicted_peak() -> None:
    made = setup(16, budget=160, training={"ema": 0.99}, parameters={"width": 300})
    (*_, last) = TrainingRun(WideNet(), made).measurements()
    whole = MemoryProbe(WideNet(), made)
    assert last.facts["peak_bytes"] <= whole.train_peak(16).total
    without = replace(made, training=made.training.model_copy(update={"ema": None}))
    (*_, raw) = TrainingRun(WideNet(), without).measurements()
    copies = sum(-(-one.nbytes // 512) * 512 for one in whole.run.parameters)
    assert last.facts["peak_bytes"] - raw.facts["peak_bytes"] == copies  # type: ignore[operator]


def test_a_loop_of_ones_own_is_refused_before_it_runs() -> None:
    request = ProfileRequest(setup(training={"ema": 0.9, "samples": 400}), Memory(), highest=32)
    with pytest.raises(StudyFileError, match=r"training\.ema: expected null"):
        profile_task(f"{TASKS}:own_loop", request)


@pytest.mark.slow
def test_two_devices_have_the_same_average_as_one(ranks: RankProcesses) -> None:
    made = setup(41, budget=300, training={"ema": 0.9}, reference_batch=16)
    alone = TrainingRun(Net(), made)
    measured = [one.scores["val_loss"] for one in alone.measurements()]
    job = replace(made, plan=BatchPlan(41, 2, 2)).to_dict()
    ((losses, *every),) = ranks.run(averaged, f"{HELPERS}:Net", job)
    assert losses == pytest.approx(measured, rel=1e-6)  # in single precision
    assert len(every) == 2 and all(map(torch.equal, *every))
    for ours, theirs in zip(every[0], alone.averages, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
