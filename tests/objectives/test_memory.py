"""The memory law: predicted before anything runs, exact to the sample, and kept by every trial."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from bsearch.objectives.digits import Digits
from bsearch.objectives.machine.device_memory import is_out_of_memory
from bsearch.objectives.profiling.memory.limit import fastest_evaluation_batch, verified
from bsearch.objectives.profiling.memory.tracing import MemoryProbe, Peak, evaluation_batch, memory_law
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.task import Data, Loss, Score, Task
from bsearch.objectives.training import TrainingRun, train_task
from bsearch.search.store.tables import Tables
from bsearch.spaces.errors import ProfilingError, StudyFileError
from bsearch.spaces.laws.device import DeviceProfile, ProfileRequest
from bsearch.spaces.laws.memory import MemoryLaw, bytes_of, largest_fitting
from bsearch.spaces.readable import readable_bytes
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.study.file import parse_study
from bsearch.spaces.trial import TrialSetup
from conftest import TASKS
from helpers import as_optuna, bsearch, run, setup
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

lines = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 5000)), min_size=1, max_size=4)


@given(lines, st.integers(1, 10**7), st.integers(1, 20), st.integers(0, 5000))
def test_the_largest_that_fits_is_exact_on_every_convex_curve(
    phases: list[tuple[int, int]], limit: int, low: int, width: int
) -> None:
    def peak(size: int) -> int:
        return max(fixed + each * size for fixed, each in phases)

    found = largest_fitting(peak, limit, low, low + width)
    slow = [size for size in range(low, low + width + 1) if peak(size) <= limit]
    assert found == (slow[-1] if slow else None)


@given(lines, st.integers(1, 10**7), st.integers(2, 20000))
def test_it_takes_few_looks(phases: list[tuple[int, int]], limit: int, high: int) -> None:
    looks: set[int] = set()

    def peak(size: int) -> int:
        looks.add(size)
        return max(fixed + each * size for fixed, each in phases)

    largest_fitting(peak, limit, 1, high)
    assert len(looks) <= 24  # halving alone takes 17; a kind curve five


@given(lines, st.integers(0, 5000))
def test_between_known_sizes_the_law_never_promises_too_little(
    phases: list[tuple[int, int]], size: int
) -> None:
    def peak(size: int) -> int:
        return max(fixed + each * size for fixed, each in phases)

    law = MemoryLaw(tuple((known, peak(known)) for known in (1, 50, 700, 5001)))
    if size:
        assert law.predicted_bytes(size) >= peak(size) * (1 - 1e-9)
    with pytest.raises(ProfilingError, match="known only up to"):
        law.predicted_bytes(5002)


def test_what_failed_is_never_allowed_again_and_a_measurement_replaces_the_law_both_ways() -> None:
    law = MemoryLaw(((1, 100), (101, 1100)))
    assert law.largest_micro_batch(1000) == 91
    failed = law.failed_at(80)
    assert failed.largest_micro_batch(1000) == 79
    assert failed.failed_at(90).failed == 80
    assert failed.failed_at(1).largest_micro_batch(1000) is None
    assert MemoryLaw.from_dict(json.loads(json.dumps(failed.to_dict()))) == failed
    assert law.largest_micro_batch(10) is None
    for factor in (0.5, 2.0):
        measured = law.measured_at(1, 100 * factor).measured_at(61, 700 * factor)
        assert [measured.peak_bytes(size) for size in (1, 61, 101)] == pytest.approx(
            [factor * b for b in (100, 700, 1100)]
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10GiB", 10 * 2**30), ("10GB", 10**10), ("1.5 kib", 1536), ("7", 7), (".5 MB", 500000)],
)
def test_bytes_are_read_in_both_kinds_of_units(text: str, expected: int) -> None:
    assert bytes_of(text) == expected


@given(st.integers(1, 2**50))
def test_readable_bytes_are_near_enough(value: int) -> None:
    assert bytes_of(readable_bytes(value)) == pytest.approx(value, rel=0.006, abs=1)


@pytest.mark.parametrize(
    ("written", "limit"),
    [("10GiB", 10 * 2**30), ("90%", 900), ("100%", 1000), ("device", 1000), ("5000", 5000), ("null", None)],
)
def test_a_limit_is_bytes_a_share_or_the_device(written: str, limit: int | None) -> None:
    text = "study: a\ntask: a.py:B\nspace: {effective_batch: 3, reference_rate: 1}\nmemory: {limit: %s}"
    memory = parse_study(text % written).memory
    assert memory.limit_bytes(1000, "cpu") == limit
    assert Memory.model_validate(memory.model_dump(mode="json")) == memory
    if written == "null":
        assert memory.limit_bytes(1000, "gpu") == 1000
    for nonsense in ("-1", "0", "0%", "150%", "ten", "10 parsecs", "true", "[1]"):
        with pytest.raises(
            StudyFileError,
            match=r"memory.limit: expected bytes such as 10GiB, a share of the device such as 90%",
        ):
            parse_study(text % nonsense)


class Images(Task):
    """A torchvision model on random images; SGD with momentum or Adam."""

    def __init__(self, name: str, size: int, adam: bool = False) -> None:
        self.name, self.size, self.adam = name, size, adam

    def data(self, setup: TrialSetup) -> Data:
        data = TensorDataset(torch.randn(64, 3, self.size, self.size), torch.randint(0, 10, (64,)))
        return Data(data, data)

    def model(self, setup: TrialSetup) -> nn.Module:
        options = {"image_size": self.size} if self.name.startswith("vit") else {}
        model: nn.Module = torchvision.models.get_model(self.name, weights=None, num_classes=10, **options)
        return model

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(model.parameters(), lr=setup.learning_rate)
        return super().optimizer(model, setup)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(64, 500)
        self.checkpointed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.checkpointed else layer(hidden)
        return self.head(hidden)


class Tokens(Task):
    """A small transformer on sentences; its loss counts the tokens that are not padding."""

    checkpointed = False

    def data(self, setup: TrialSetup) -> Data:
        data = TensorDataset(torch.randint(0, 500, (64, 24)))
        return Data(data, data)

    def model(self, setup: TrialSetup) -> nn.Module:
        model = Transformer()
        model.checkpointed = self.checkpointed
        return model

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        (tokens,) = batch
        targets = tokens[:, 1:].masked_fill(tokens[:, 1:] < 50, -100)
        total = nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), targets.flatten(), reduction="sum"
        )
        return Loss(total, (targets >= 0).sum())

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=setup.learning_rate)

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Score:
        (tokens,) = batch
        return Score((model(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]).sum(), tokens[:, 1:].numel())


class Checkpointed(Tokens):
    checkpointed = True


MODELS: list[Any] = [
    (Digits(), 200),
    (Images("resnet18", 32), 24),
    pytest.param(Images("mobilenet_v3_large", 64), 16, marks=pytest.mark.long),
    pytest.param(Images("vit_b_16", 64, adam=True), 4, marks=pytest.mark.long),
    (Tokens(), 32),
    (Checkpointed(), 32),
]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("task", "size"), MODELS, ids=lambda value: getattr(value, "name", type(value).__name__)
)
def test_the_trace_is_within_four_percent_of_real_tensors(task: Task, size: int, precision: str) -> None:
    probe = MemoryProbe(task, setup(rate=0.01, training={"precision": precision}, smallest_micro_batch=2))
    predicted, real = probe.train_peak(size), probe.counted("train", size)
    assert probe.source == "traced"
    assert predicted.total == pytest.approx(real.total, rel=0.04)
    assert probe.evaluation_peak(size).total == pytest.approx(
        probe.counted("evaluation", size).total, rel=0.04
    )
    assert predicted.total == pytest.approx(sum(predicted.parts.values()))
    assert predicted.parts["parameters"] >= sum(4 * p.numel() for p in probe.run.parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "size"), MODELS, ids=lambda value: getattr(value, "name", type(value).__name__)
)
def test_the_trace_is_what_torchs_own_tracker_counts(task: Task, size: int) -> None:
    """A second opinion, on real tensors, by other code; ours counts in blocks of 512 bytes, as allocators do."""
    made = setup(rate=0.01, smallest_micro_batch=2)
    probe, run = MemoryProbe(task, made), TrainingRun(task, made)
    run.modes.train(run.model)
    keys, tracker = run.stream.take(0, size), MemTracker()

    def batch() -> Any:
        tracker.reset_mod_stats()  # it counts by modules, which are called again for each micro-batch
        return run.train_fetcher.fetch(keys)

    tracker.track_external(run.model, run.optimizer)
    with tracker:
        for _ in range(2):
            run.step([(size, batch)] * probe.micro_batches, size * probe.micro_batches)
    (counted,) = tracker.get_tracker_snapshot("peak").values()
    total = next(value for part, value in counted.items() if str(part).endswith("Total"))
    assert total <= probe.train_peak(size).total <= 1.01 * total


@pytest.mark.long
@pytest.mark.parametrize(
    "task",
    [
        Digits(),
        Checkpointed(),
        *(pytest.param(one, marks=pytest.mark.long) for one in (Tokens(), Images("resnet18", 32))),
    ],
    ids=lambda t: type(t).__name__,
)
def test_the_largest_micro_batch_fits_and_one_more_does_not(task: Task) -> None:
    probe = MemoryProbe(task, setup(rate=0.01, smallest_micro_batch=2))
    limit = round(probe.train_peak(20).total * 1.01)
    law = memory_law(probe, limit, 2, 500)
    largest = law.largest_micro_batch(limit)
    assert largest is not None
    assert largest >= 20
    assert len(law.points) <= 9
    probe.counted("train", largest, limit)
    with pytest.raises(torch.OutOfMemoryError, match="over the limit"):
        probe.counted("train", largest + 1, limit)


class LooksAtValues(Digits):
    """A loss that reads a number off the batch: no trace can follow it."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        loss = super().loss(model, batch, setup)
        return Loss(loss.total * (2.0 if float(batch[0].mean()) > 1e9 else 1.0), loss.denominator)


@dataclass
class Points:
    """A batch that is no tuple, list or dict of tensors."""

    inputs: torch.Tensor
    labels: torch.Tensor


class PointsData(TensorDataset):
    def fetch(self, keys: Any) -> Points:
        return Points(*(tensor[torch.from_numpy(keys.index)] for tensor in self.tensors))


class OpaqueBatches(Digits):
    def data(self, setup: TrialSetup) -> Data:
        data = PointsData(*super().data(setup).train.tensors)  # type: ignore[attr-defined]
        return Data(data, data)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        return super().loss(model, (batch.inputs, batch.labels), setup)


def test_batches_that_cannot_be_made_of_any_size_are_counted() -> None:
    probe = MemoryProbe(OpaqueBatches(), setup(1, budget=1))
    small, large = (probe.train_peak(size).total for size in (2, 200))
    assert probe.source == "counted"
    assert "expected a batch of tensors, in tuples, lists or dicts, to trace; got Points" in probe.note
    assert large > 3 * small


def test_what_cannot_be_traced_is_counted_and_says_so() -> None:
    probe = MemoryProbe(LooksAtValues(), setup())
    peak = probe.train_peak(50)
    assert probe.source == "counted"
    assert "DataDependent" in probe.note
    assert peak.total == pytest.approx(MemoryProbe(Digits(), setup()).train_peak(50).total, rel=0.04)


class Triples(Digits):
    """Compares each three samples, and cannot be traced: twice the batch takes eight times the memory."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        inputs, labels = batch
        outputs = model(inputs)
        nearness = (outputs @ outputs.T).abs()
        triples = nearness[:, :, None] + nearness[:, None, :]
        SIZES.append(len(labels))
        return Loss(triples.mean() * float(triples.detach().max() > -1) * len(labels), len(labels))


SIZES: list[int] = []


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2e6, 12e6, math.inf])
def test_real_steps_never_take_much_more_than_they_may(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1437 samples the triples alone would take 12 GB."""
    monkeypatch.setattr("bsearch.objectives.profiling.memory.tracing.host_bytes", lambda: 400e6)
    SIZES.clear()
    probe = MemoryProbe(Triples(), setup())
    law = memory_law(probe, limit, 1, 1437)
    assert law is not None and law.source == "counted"
    most = min(limit, 100e6)
    assert max(4 * size**3 for size in SIZES) < 2.1 * most
    if limit < math.inf:
        largest = law.largest_micro_batch(limit)
        assert (
            largest is not None
            and law.peak_bytes(largest) <= limit < probe.counted("train", largest + 1).total
        )


@pytest.mark.long
@pytest.mark.parametrize("by_count", ["0", "1"])
def test_a_gpu_is_traced_with_its_own_optimizer_defaults(
    by_count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of tensors at once hold more than one tensor after the other."""
    # By which torch counts devices, as some libraries set it.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", by_count)
    cpu = MemoryProbe(Images("resnet18", 32, adam=True), setup(rate=0.01)).train_peak(2)
    gpu = MemoryProbe(Images("resnet18", 32, adam=True), setup(rate=0.01))
    gpu.setup = replace(gpu.setup, device="gpu")
    assert gpu.train_peak(2).total > 1.1 * cpu.total


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_built_in_optimizers_are_fused_on_a_gpu_and_allocate_nothing(optimizer: str) -> None:
    """A fused kernel updates parameters in place: the step's peak is that of the backward pass."""
    on_gpu = replace(setup(), device="gpu", parameters={"optimizer": optimizer})
    probe = MemoryProbe(Digits(), replace(on_gpu, device="cpu"))
    probe.setup = probe.run.setup = on_gpu
    fused = probe.train_peak(1)
    assert probe.source == "traced"
    assert probe.run.task.optimizer(probe.run.model, on_gpu).param_groups[0]["fused"]
    weights = sum(4 * parameter.numel() for parameter in probe.run.parameters)
    assert fused.parts["workspace"] < weights


def test_a_limit_above_a_gpu_is_the_gpus() -> None:
    assert Memory(limit="80GiB").limit_bytes(40 * 2**30, "gpu") == 40 * 2**30
    assert Memory(limit="80GiB").limit_bytes(40 * 2**30, "cpu") == 80 * 2**30


def test_evaluation_takes_more_at_once_than_training() -> None:
    probe = MemoryProbe(Digits(), setup())
    limit = probe.train_peak(64).total
    batch, looks = evaluation_batch(probe, limit, MemoryLaw(((1, 1),)), 64)
    assert batch > 64
    assert probe.evaluation_peak(batch).total <= limit < probe.evaluation_peak(batch + 1).total
    assert looks[batch] <= limit
    assert evaluation_batch(probe, 1.0, MemoryLaw(((1, 1),)), 64)[0] == 64


def test_the_evaluation_batch_is_one_that_fits_and_is_tried() -> None:
    probe = MemoryProbe(Digits(), setup())
    assert 8 <= fastest_evaluation_batch(probe, 300, 8) <= 300
    assert fastest_evaluation_batch(probe, 300, 8, limit_s=-1.0) == 8
    assert fastest_evaluation_batch(probe, 64, 64) == 64


@pytest.mark.long
@pytest.mark.parametrize("factor", [0.3, 0.5, 0.7, 1.0, 2.0])
def test_a_wrong_law_is_put_right_by_at_most_four_real_runs(factor: float) -> None:
    probe = MemoryProbe(Digits(), setup())
    limit = probe.train_peak(100).total
    law = memory_law(probe, limit, 1, 1000)
    assert law is not None
    wrong = replace(law, points=tuple((size, round(factor * peak)) for size, peak in law.points))
    sizes: list[int] = []
    honest = probe.counted

    def counted(kind: str, size: int, limit_bytes: int | None = None) -> Peak:
        sizes.append(size)
        return honest(kind, size, limit_bytes)  # type: ignore[arg-type]

    probe.counted = counted  # type: ignore[method-assign]
    usable = 0.95 * limit
    right = law.largest_micro_batch(usable)
    fixed, largest = verified(
        wrong, probe, limit, usable, wrong.largest_micro_batch(usable) or 1, limit_s=math.inf
    )
    assert len(sizes) <= 2 + 4  # the smallest is timed too
    assert right is not None
    assert 0.97 * right <= largest <= right + 1
    assert fixed.peak_bytes(largest) == pytest.approx(honest("train", largest).total, rel=0.01)


class NeverFits(LooksAtValues):
    """It cannot be traced, and above 20 samples a library of its own runs out of memory."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        if len(batch[0]) > 20:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
        return super().loss(model, batch, setup)


def test_running_out_of_memory_while_counting_is_an_answer() -> None:
    probe = MemoryProbe(NeverFits(), setup())
    law = memory_law(probe, 1e12, 1, 500)
    assert law is not None
    assert law.largest_micro_batch(1e12) == 20
    assert memory_law(MemoryProbe(NeverFits(), setup()), 1e12, 21, 500) is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error\nLast error: Cuda failure 2 'out of memory'"
        ),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
        ),
        MemoryError("Unable to allocate 8.00 GiB"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_memory_runs_out_in_many_words(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error",
    [ValueError("out of memory"), RuntimeError("CUDA error: an illegal memory access"), KeyError("x")],
)
def test_other_errors_are_none(error: Exception) -> None:
    assert not is_out_of_memory(error)


def profile(limit: int) -> DeviceProfile:
    request = ProfileRequest(setup(), Memory(limit=limit), highest=1000)
    return profile_task("bsearch.objectives.digits:Digits", request)


@pytest.mark.slow
def test_the_profile_keeps_headroom_and_remembers_why() -> None:
    tight, loose = profile(1_600_000), profile(2_000_000)
    assert tight.largest_micro_batch is not None
    assert loose.largest_micro_batch is not None
    assert tight.largest_micro_batch < loose.largest_micro_batch
    assert tight.evaluation_batch is not None
    assert tight.evaluation_batch >= tight.largest_micro_batch
    assert DeviceProfile.from_dict(json.loads(json.dumps(tight.to_dict()))) == tight
    after = loose.after_out_of_memory(loose.largest_micro_batch - 10)
    assert after.largest_micro_batch is not None
    assert after.largest_micro_batch < loose.largest_micro_batch - 10
    assert replace(loose, memory=None).after_out_of_memory(101).largest_micro_batch == 50


def test_a_model_that_does_not_fit_is_told_with_its_bytes() -> None:
    with pytest.raises(
        StudyFileError,
        match=r"memory.limit: expected room for a micro-batch of 1 sample, which peaks at 282 KiB \(param",
    ):
        profile(200_000)


def test_a_trial_over_the_limit_is_out_of_memory_and_within_it_is_not() -> None:
    probe = MemoryProbe(Digits(), setup())
    limit = round(probe.train_peak(50).total * 1.02)
    assert list(train_task(Digits(), setup(200, 4, 2000, memory_limit_bytes=limit)))[-1].samples_seen == 2000
    with pytest.raises(torch.OutOfMemoryError, match="virtual device"):
        list(train_task(Digits(), setup(200, 3, 2000, memory_limit_bytes=limit)))


def limited_study(study_file: Callable[..., Path], trials: int, limit: str = "600kB", **changes: Any) -> Path:
    """Most of this space does not fit one pass: 0.6 MB hold some 30 of up to 1,000 samples."""
    space = {
        "effective_batch": {"low": 16, "high": 1000},
        "reference_rate": {"low": 0.02, "high": 0.5, "at_batch": 64},
        "epochs": 1,
    }
    # At random: a sampler that learns would look where accumulation is small.
    more = {"sampler": "random", "training": {"evaluations": 1}}
    return study_file(space=space, memory={"limit": limit}, budget={"trials": trials}, **more, **changes)


@pytest.mark.slow
@pytest.mark.long
def test_a_study_of_forty_trials_under_a_limit_loses_none_to_memory(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    run(limited_study(study_file, 40))
    trials = as_optuna(tmp_path / "small.db").trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 40
    assert all(trial.user_attrs["attempts"] == 1 for trial in trials)
    assert sum(trial.params["effective_batch"] > trial.user_attrs["micro_batch"] for trial in trials) >= 10
    assert max(trial.user_attrs["peak_bytes"] for trial in trials) <= 600_000


@pytest.mark.long
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_wrong_law_costs_no_trial_and_is_put_right_by_the_trials_themselves(
    study_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    honest = MemoryProbe.traced

    def wrong(self: MemoryProbe, kind: str, size: int) -> Any:
        peak = honest(self, kind, size)
        return replace(peak, total=round(factor * peak.total))

    monkeypatch.setattr(MemoryProbe, "traced", wrong)
    # As if real tensors had not been tried.
    monkeypatch.setattr(
        "bsearch.objectives.profiling.memory.limit.verified",
        lambda law, probe, limit, usable, largest: (law, largest),
    )
    run(limited_study(study_file, 12, limit="900kB"))
    trials = as_optuna(tmp_path / "small.db").trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 12
    attempts = Tables(f"sqlite:///{tmp_path}/small.db").attempts("small")
    failed = [row for row in attempts if row.outcome == "out_of_memory"]
    assert len(failed) <= 4
    assert all("over the limit" in row.message for row in failed)
    for row in failed:
        rows = [other for other in attempts if other.number == row.number]
        assert len({other.setup["plan"]["effective_batch"] for other in rows}) == 1
        assert len({other.setup["optimizer"]["learning_rate"] for other in rows}) == 1
        assert rows[-1].outcome == "complete"
    # With a law that is right the cap would be this.
    monkeypatch.undo()
    right = profile_task(
        "bsearch.objectives.digits:Digits", ProfileRequest(setup(), Memory(limit=900_000), highest=1000)
    )
    caps = [row.setup["largest_micro_batch"] for row in attempts]
    assert right.largest_micro_batch is not None
    assert 0.9 * right.largest_micro_batch <= caps[-1] <= 1.1 * right.largest_micro_batch


@pytest.mark.long
def test_a_second_study_pays_nothing_for_the_profile(
    study_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(limited_study(study_file, 1))

    def never(*_: object) -> None:
        raise AssertionError("profiled again")

    monkeypatch.setattr("bsearch.search.run.serial.profile_task", never)
    assert (
        run(limited_study(study_file, 1, study="another", storage="sqlite:///small.db")).study.name
        == "another"
    )
    with pytest.raises(AssertionError, match="profiled again"):
        run(
            limited_study(
                study_file, 2, task=f"{TASKS}:AdamDigits", study="third", storage="sqlite:///small.db"
            )
        )


@pytest.mark.long
def test_each_value_that_changes_cost_has_a_profile_of_its_own(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    space = {
        "effective_batch": {"low": 200, "high": 400},
        "reference_rate": {"low": 0.02, "high": 0.5},
        "width": {"choices": [8, 1024], "changes_cost": True},
        "epochs": 1,
    }
    baseline = [{"effective_batch": 300, "reference_rate": 0.1, "width": width} for width in (8, 1024)]
    run(study_file(space=space, memory={"limit": "6MB"}, baseline=baseline, budget={"trials": 2}))
    narrow, wide = as_optuna(tmp_path / "small.db").trials
    assert narrow.user_attrs["micro_batch"] > wide.user_attrs["micro_batch"]
    assert (narrow.user_attrs["attempts"], wide.user_attrs["attempts"]) == (1, 1)


@pytest.mark.slow
def test_profile_tells_the_curve_and_what_follows(study_file: Callable[..., Path]) -> None:
    path = limited_study(study_file, 1)
    result = bsearch("profile", path)
    assert result.exit_code == 0, result.output
    assert "traced on fake tensors" in result.output
    assert "Limit 586 KiB, 5% kept free: the largest micro-batch is " in result.output
    document = json.loads(bsearch("profile", path, "--json").output)
    document = document["memory"]
    largest = document["largest_micro_batch"]
    assert document["largest_effective_batch"]["4"] == 4 * largest
    assert document["curve"][-1]["micro_batch"] == largest
    assert all(abs(row["difference"]) < 0.04 for row in document["curve"] if row["difference"] is not None)
    small = path.with_name("too-small.yaml")
    small.write_text(path.read_text().replace("600kB", "100kB"))
    for command in ("run", "check", "profile"):
        refused = bsearch(command, small, *(["--serial"] if command == "run" else []))
        assert refused.exit_code == 2
        assert (
            "too-small.yaml:20: memory.limit: expected room for a micro-batch of 1 sample, which peaks at"
            in refused.output
        )


@pytest.mark.long
def test_memory_is_predicted_for_a_card_that_is_not_here(study_file: Callable[..., Path]) -> None:
    path = study_file(
        task="bsearch.objectives.digits:Digits", memory={"limit": "10MiB"}, training={"precision": "tf32"}
    )
    shown = bsearch("profile", path, "--device-like", "a100-40gb", "--json")
    assert shown.exit_code == 0, shown.output
    document = json.loads(shown.output)
    assert (document["device"], document["speed"]) == ("A100 40GB", [])
    memory = document["memory"]
    assert (memory["source"], memory["bytes"], memory["limit_bytes"]) == ("traced", "reserved", 10 * 2**20)
    assert memory["breakdown"]["reserved but unused"] > 0
    assert all(row["measured_bytes"] is None for row in memory["curve"])
    # An allocator takes pages of 2 and of 20 MiB: a step that needs one of the latter does not fit.
    assert memory["curve"][-1]["predicted_bytes"] <= 9.5 * 2**20
    assert 100 < memory["largest_micro_batch"] < 320
    unknown = bsearch("profile", path, "--device-like", "A100")
    assert (unknown.exit_code, "device-like: expected one of T4 16GB" in unknown.output) == (2, True)
    assert "Did you mean" in unknown.output


def test_a_model_that_cannot_be_traced_is_not_predicted_for_a_card(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(
        "from bsearch import Loss\nfrom bsearch.objectives.digits import Digits\n\n\n"
        "class Mine(Digits):\n    def loss(self, model, batch, setup):\n        loss = super().loss(model, batch, setup)\n"
        "        return Loss(loss.total * (2.0 if float(batch[0].mean()) > 1e9 else 1.0), loss.denominator)\n"
    )
    path = study_file(task="tasks.py:Mine")
    shown = bsearch("profile", path, "--device-like", "A100 80GB")
    assert shown.exit_code == 2
    assert "expected a model that can be traced" in shown.output
    assert "Traceback" not in shown.output
