"""Laws of losses that compare the samples of a batch: split, they are the loss of the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import embedding_tasks
import pytest
import torch
import yaml
from bsearch.objectives.examination.examine import examined
from bsearch.objectives.examination.step import uneven_parts
from bsearch.objectives.parallel.rank_processes import RankProcesses
from bsearch.objectives.profiling.memory.tracing import MemoryProbe, cached_law, memory_law
from bsearch.objectives.steps.two_passes import HeldStep, held
from bsearch.objectives.task import Task
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.errors import TaskError
from bsearch.spaces.plan import BatchPlan
from embedding_tasks import CLIP, TASKS, Pairs, SimCLR, gradient
from helpers import run as run_study_at
from helpers import setup
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

FILE = embedding_tasks.__file__


def twin(run: TrainingRun, sizes: list[int]) -> list[Tensor | None]:
    """The gradient of the loss of all embeddings, whose graphs are all kept."""
    parts, start = [], 0
    for size in sizes:
        keys = run.stream.take(start, size)
        parts.append(run.task.embed(run.model, run.train_fetcher.fetch(keys), run.setup))
        start += size
    if isinstance(parts[0], dict):
        whole: Any = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    else:
        whole = tuple(torch.cat(each) for each in zip(*parts, strict=True))
    run.task.batch_loss(run.model, whole, run.setup).backward()
    gradients = [None if one.grad is None else one.grad.clone() for one in run.model.parameters()]
    run.model.zero_grad(set_to_none=True)
    return gradients


def ours(run: TrainingRun, sizes: list[int]) -> list[Tensor | None]:
    keys, start = [], 0
    for size in sizes:
        keys.append(run.stream.take(start, size))
        start += size
    run.accumulate([(len(one), lambda one=one: run.train_fetcher.fetch(one)) for one in keys], start)
    gradients = [None if one.grad is None else one.grad.clone() for one in run.model.parameters()]
    run.model.zero_grad(set_to_none=True)
    return gradients


def started(task: Task, **changes: Any) -> TrainingRun:
    run = TrainingRun(task, setup(32, **changes))
    run.modes.train(run.model)
    return run


def assert_equal(found: list[Tensor | None], expected: list[Tensor | None], tolerance: float = 1e-12) -> None:
    assert [one is None for one in found] == [other is None for other in expected]
    one, other = (
        torch.cat([value.flatten() for value in values if value is not None]) for values in (found, expected)
    )
    assert float((one - other).norm()) <= tolerance * float(other.norm())


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=8)
@given(data=st.data())
def test_a_split_batch_has_the_gradient_of_all_its_embeddings(name: str, data: st.DataObject) -> None:
    """With the same micro-batches, so that dropout and BatchNorm draw and see the same."""
    samples = data.draw(st.integers(3, 61), "samples")
    fewest = 2 if name == "Normed" else 1
    sizes = [len(part) for part in uneven_parts(samples, fewest, data.draw(st.integers(0, 99), "split"))]
    run, other = (started(TASKS[name]()) for _ in range(2))
    torch.manual_seed(1)
    found, after = ours(run, sizes), torch.get_rng_state()
    torch.manual_seed(1)
    assert_equal(found, twin(other, sizes))
    assert torch.equal(after, torch.get_rng_state())  # random numbers go on as after one pass
    for buffer, expected in zip(run.model.buffers(), other.model.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["SimCLR", "BarlowTwins", "SupCon", "Triplets", "CLIP", "Queue"])
@pytest.mark.parametrize("samples", [2, 57, 257])
def test_a_split_batch_has_the_gradient_of_the_unsplit_one(name: str, samples: int) -> None:
    run = started(TASKS[name]())
    whole = ours(run, [samples])
    run = started(TASKS[name]())
    assert_equal(ours(run, [len(part) for part in uneven_parts(samples, 1, 7)]), whole)


def test_clipping_is_of_the_whole_gradient_and_a_whole_training_is_the_same() -> None:
    results = []
    for accumulation in (1, 5):
        run = started(CLIP(), plan=BatchPlan(57, accumulation), training={"clip_norm": 0.05})
        loader = run.loader([run.setup.plan] * 6)
        for _ in range(6):
            run.step(run.micro_batches(run.setup.plan, loader), 57)
        results.append([parameter.detach() for parameter in run.model.parameters()])
    assert_equal(results[1], results[0])


def test_fp16_scales_the_gradients_back() -> None:
    run = started(CLIP(), training={"precision": "fp16"})
    run.model.float()
    run.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    keys = [run.stream.take(0, 7), run.stream.take(7, 12)]

    def batch(one: Any) -> Any:
        return [
            value.float() if value.is_floating_point() else value for value in run.train_fetcher.fetch(one)
        ]

    run.accumulate([(len(one), batch(one)) for one in keys], 19)
    scaled = [parameter.grad.clone() for parameter in run.parameters if parameter.grad is not None]
    run.model.zero_grad(set_to_none=True)
    run.scaler = torch.amp.GradScaler("cpu", enabled=False)
    run.accumulate([(len(one), batch(one)) for one in keys], 19)
    plain = [parameter.grad for parameter in run.parameters if parameter.grad is not None]
    assert len(scaled) == len(plain) == 9
    for one, other in zip(scaled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SimCLR", "BarlowTwins", "SupCon", "CLIP", "Queue", "Aside"])
@pytest.mark.parametrize(("batch", "accumulation"), [(257, 5), (257, 1), (7, 3), (3, 2), (2, 1)])
def test_two_ranks_equal_one_process(ranks: RankProcesses, name: str, batch: int, accumulation: int) -> None:
    reference = f"{FILE}:{name}"
    (alone,) = gradient(reference, setup(batch).to_dict(), 4)
    (shared,) = ranks.run(
        gradient, reference, setup(batch, plan=BatchPlan(batch, accumulation, 2)).to_dict(), 4
    )
    # After four steps: of two samples, Barlow Twins' standardised ones are ill-conditioned.
    assert_equal([value.double() for value in shared], [value.double() for value in alone], 1e-11)


def test_samples_that_wait_for_another_pass_are_held_once() -> None:
    batch = torch.ones(3)
    ((_, copies),) = HeldStep(nn.Linear(1, 1), torch.device("cpu"), [(3, batch)]).micro_batches()
    assert held(copies) is batch
    assert copies().data_ptr() != batch.data_ptr()


def test_it_resumes_to_the_same_bits(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {
        "plan": BatchPlan(57, 4),
        "samples_budget": 400,
        "training": {"evaluations": 4},
    }
    uninterrupted = list(TrainingRun(TASKS["CLIPWithDropout"](), setup(**changes)).measurements())
    changes |= {"checkpoint": str(tmp_path / "it.pt"), "checkpoint_every_s": 0.0}
    first = TrainingRun(TASKS["CLIPWithDropout"](), setup(**changes)).measurements()
    next(first), next(first)
    first.close()
    resumed = list(TrainingRun(TASKS["CLIPWithDropout"](), setup(**changes)).measurements())
    assert [one.train_loss for one in resumed] == [one.train_loss for one in uninterrupted]
    assert [one.scores for one in resumed] == [one.scores for one in uninterrupted]
    assert resumed[-1].facts["resumed_at"]


class Wrong(Pairs):
    """One of the mistakes that are told."""

    def __init__(self, embed: Any = None, batch_loss: Any = None) -> None:
        self._embed, self._loss = embed, batch_loss

    def embed(self, model: nn.Module, batch: Any, setup: Any) -> Any:
        return self._embed(model, batch) if self._embed else model(batch[0])

    def batch_loss(self, model: nn.Module, embeddings: Any, setup: Any) -> Tensor:
        return self._loss(embeddings) if self._loss else embeddings.square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Wrong(lambda model, batch: 3), "Wrong.embed: expected a tensor"),
        (Wrong(lambda model, batch: None), "Wrong.embed: expected a tensor.*got None"),
        (Wrong(lambda model, batch: ()), "got nothing"),
        (Wrong(lambda model, batch: (model(batch[0]), "text")), "got str"),
        (
            Wrong(lambda model, batch: model(torch.cat(batch[:2]))),
            r"expected one row for each of 8 samples, got shape \(16, 8\)",
        ),
        (Wrong(lambda model, batch: model(batch[0]).mean()), r"got shape \(\)"),
        (
            Wrong(lambda model, batch: model(batch[0]).detach()),
            "expected embeddings that depend on the model's parameters",
        ),
        (
            Wrong(batch_loss=lambda rows: rows.square().mean(1)),
            r"expected the whole batch's loss, a scalar tensor, got shape \(8,\)",
        ),
        (Wrong(batch_loss=lambda rows: 1.0), "got float"),
        (Wrong(batch_loss=lambda rows: rows.detach().mean()), "without a graph"),
        (
            Wrong(batch_loss=lambda rows: (rows * torch.rand(8)).mean()),
            "expected a loss without random numbers",
        ),
    ],
)
def test_what_embed_and_batch_loss_return_is_checked(task: Task, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        ours(started(task), [8])


def test_rows_of_another_shape_in_each_micro_batch_are_told() -> None:
    with pytest.raises(TaskError, match="expected rows of one shape"):
        ours(started(Wrong(lambda model, batch: model(batch[0])[:, : len(batch[0])])), [5, 3])


class Both(SimCLR):
    def loss(self, model: Any, batch: Any, setup: Any) -> Any:
        return None


class Half(Pairs):
    pass


class Declared(SimCLR):
    couples_samples = True


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Both(), "expected either loss, or embed and batch_loss; got embed, batch_loss, loss"),
        (Half(), "got embed"),
        (Declared(), "expected no couples_samples beside embed and batch_loss"),
    ],
)
def test_one_loss_and_no_more_is_given(task: Task, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        started(task)


@pytest.mark.parametrize("name", ["SimCLR", "BarlowTwins", "SupCon", "CLIP", "Queue", "WithDropout"])
def test_the_examination_finds_them_exact(name: str) -> None:
    found = examined(started(TASKS[name]()), 1)
    assert found.verdict == "exact", found.lines
    assert found.samples >= 8
    assert found.difference < 1e-9


def test_the_examination_finds_an_embedding_that_depends_on_its_micro_batch() -> None:
    task = Wrong(lambda model, batch: model(batch[0]) - model(batch[0]).mean(0))
    (finding, *_) = examined(started(task), 1).refusals
    assert "expected an embedding of each sample alone" in str(finding)
    assert "Wrong.embed" in str(finding)


@pytest.mark.slow
@pytest.mark.parametrize("like_gpu", [False, True])
@pytest.mark.parametrize(
    "name", ["Queue", *(pytest.param(one, marks=pytest.mark.long) for one in ("SimCLR", "CLIPWithDropout"))]
)
def test_its_memory_is_traced(name: str, like_gpu: bool) -> None:
    """A large batch holds no more than its embeddings' gradients beside a micro-batch, and the loss over it."""
    probe = MemoryProbe(
        TASKS[name](), setup(1, smallest_micro_batch=1), like_gpu=like_gpu, embedding="cached"
    )
    peaks = [probe.train_peak(size).total for size in (1, 32, 64)]
    assert not probe.note
    assert peaks == sorted(peaks)
    # Of two views, eight numbers each, in double precision; and the batch, where the data live on the GPU.
    assert probe.held_bytes() == 2 * 8 * 8 + like_gpu * (2 * 6 * 8 + 8)
    assert probe.batch_peak(512).total > probe.batch_peak(64).total
    if not like_gpu:
        law, largest = cached_law(probe, memory_law(probe, 1 << 20, 1, 64), 1 << 20, 2, 512)  # type: ignore[arg-type]
        assert 2 < largest <= 512
        counted = probe.counted("batch", largest).total
        assert counted == pytest.approx(probe.batch_peak(largest).total, rel=0.02)
        assert counted <= 1 << 20
        assert law.held_bytes == 128


class Blocks(SimCLR):
    """With dropout in blocks that are computed again in the backward pass."""

    def model(self, setup: Any) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
        return nn.Sequential(*blocks, nn.Linear(6, 8)).double()

    def checkpoint_blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())[:3]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_changes_nothing(mode: Any) -> None:
    found = []
    for one in ("none", mode):
        run = started(Blocks(), plan=BatchPlan(32, 3, activation_checkpointing=one))
        torch.manual_seed(2)
        found.append(ours(run, [11, 11, 10]))
    assert_equal(found[1], found[0])


class Adapted(SimCLR):
    def model(self, setup: Any) -> nn.Module:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["0", "3"], lora_dropout=0.0, init_lora_weights=False)
        return peft.get_peft_model(super().model(setup), config).double()  # type: ignore[no-any-return]


def test_adapters_are_trained_alone() -> None:
    whole, split = (ours(started(Adapted()), sizes) for sizes in ([57], [23, 20, 14]))
    assert {gradient is None for gradient in whole} == {True, False}  # the frozen weights, and the adapters'
    assert_equal(split, whole)


def test_a_whole_batch_that_runs_out_of_memory_is_tried_again_in_parts(tmp_path: Path) -> None:
    """At the same batch: first in two, then in as many as it takes."""
    values = {
        "study": "small",
        "task": f"{FILE}:SmallMemory",
        "space": {"effective_batch": {"choices": [90, 157]}, "reference_rate": 0.1, "epochs": 1},
        "memory": {"largest_micro_batch": 200},
        "training": {"evaluations": 1},
        "budget": {"trials": 2, "profile_s": 0},
        "baseline": [{"effective_batch": batch, "reference_rate": 0.1, "epochs": 1} for batch in (90, 157)],
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(values))
    result = run_study_at(path)
    assert not result.failure
    found = {
        trial.facts.effective_batch: trial for trial in result.study.records if trial.outcome == "complete"
    }
    assert set(found) == {90, 157}
    assert (found[90].facts.accumulation, found[90].facts.micro_batch) == (2, 45)
    assert found[157].facts.micro_batch <= 50
    assert found[157].facts.accumulation * found[157].facts.micro_batch >= 157
