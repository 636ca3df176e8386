"""What holds of a trial whoever's loop trains it: the laws, over Hugging Face's Trainer and over Lightning's.

A subclass names the module of its tasks and its example. All tasks train the same net on the same points, and keep a log.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from bsearch.objectives import course, trial
from bsearch.objectives.adapters.loop_task import TrainingParts, _collector
from bsearch.objectives.data.batches import SampleKeys, SampleStream
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.state import checkpoint
from bsearch.spaces.errors import TaskError
from bsearch.spaces.laws.device import ProfileRequest
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan, plan_batch
from bsearch.spaces.schedule import evaluation_points, rate_factor
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.study.training import Training
from bsearch.spaces.trial import Measurement, Outcome, TrialSetup
from helpers import setup
from rank_jobs import SAM
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

SAMPLES = 600
SLOW_EVALUATION_S = 0.25


@dataclass
class Log:
    """Every step that was taken: the samples of its micro-batches, the optimizer's rate, the gradient it moved by."""

    micro_batches: list[list[int]] = field(default_factory=list)
    steps: list[list[list[int]]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    autocast: set[bool] = field(default_factory=set)
    evaluations: int = 0
    followed: int = 0
    read: list[Any] = field(default_factory=list)

    @property
    def sizes(self) -> list[list[int]]:
        return [[len(one) for one in step] for step in self.steps]


LOG = Log()


class Points(Dataset[dict[str, torch.Tensor]]):
    """Points in five classes, some of their labels ignored, each telling its place.

    Args:
        silent: the labels of so many samples are ignored, from the first on or, with a seed, the first of its stream.
    """

    def __init__(
        self,
        samples: int = SAMPLES,
        ignores: bool = False,
        dtype: torch.dtype = torch.float64,
        views: bool = False,
        silent: int = 0,
        seed: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(samples, 6, generator=generator, dtype=dtype)
        if views:  # of ten megabytes
            self.x = torch.cat([self.x, torch.zeros(samples, 2000, dtype=dtype)], 1)[:, :6]
        self.labels = (self.x[:, :5].argmax(1) + (torch.rand(samples, generator=generator) < 0.1)) % 5
        if ignores:
            self.labels[torch.rand(samples, generator=generator) < 0.3] = -100
        if silent and ignores:
            self.labels[
                np.arange(silent) if seed is None else SampleStream(samples, seed).take(0, silent).index
            ] = -100

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index], "index": torch.tensor(index)}


class Net(nn.Module):
    """A small net that remembers what it was trained on; `drop` makes its result depend on random numbers."""

    def __init__(self, dtype: torch.dtype = torch.float64, drop: float = 0.0) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(drop), nn.Linear(16, 5))
        self.layers = layers.to(dtype)

    def logits(self, x: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
        if self.training and index is not None:
            LOG.micro_batches.append(index.tolist())
            LOG.autocast.add(torch.is_autocast_enabled("cpu"))
        return self.layers(x)  # type: ignore[no-any-return]


class Remembering(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        # Lightning's, which takes the gradient's norm down.
        found = closure() if closure is not None else None
        LOG.steps.append(LOG.micro_batches)
        LOG.micro_batches = []
        LOG.rates.append(self.param_groups[0]["lr"])
        LOG.gradients.append(
            torch.cat([one.grad.flatten() for group in self.param_groups for one in group["params"]]).clone()
        )
        super().step()
        return found


class Slow(torch.optim.Optimizer):
    """A user's own around another: the weights follow those of the one inside slowly, as Lookahead's do."""

    def __init__(self, net: nn.Module, setup: TrialSetup) -> None:
        super().__init__(net.parameters(), {"lr": setup.learning_rate})
        self.inner = torch.optim.Adam(net.parameters(), lr=setup.learning_rate)
        self.inner.param_groups = self.param_groups
        for name, value in self.inner.defaults.items():
            self.param_groups[0].setdefault(name, value)

    def step(self, closure: Any = None) -> Any:
        found = closure() if closure is not None else None
        self.inner.step()
        LOG.steps.append([])
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


def sharpness_aware(net: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
    return SAM(net.parameters(), lr=setup.learning_rate)


@torch.no_grad()
def decay(net: nn.Module, steps: int) -> None:
    """What a user's callback does that counts the steps itself."""
    for parameter in net.parameters():
        parameter.mul_(1 - 0.01 * steps)


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)


def weighted_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels, CLASS_WEIGHTS.to(logits.dtype))


def one_large_batch(made: TrialSetup, points: Points, loss: Any) -> tuple[float, torch.Tensor]:
    """The obvious twin in plain torch: loss and gradient of the first step, taken at once with the same first weights."""
    torch.manual_seed(made.seed)
    net = Net()
    index = torch.from_numpy(SampleStream(SAMPLES, made.seed).take(0, made.effective_batch).index)
    value = loss(net.logits(points.x[index]), points.labels[index])
    gradient = torch.autograd.grad(value, list(net.parameters()))
    return float(value.detach()), torch.cat([one.flatten() for one in gradient])


def embed(model: Any, batch: Any, setup: TrialSetup) -> Any:
    gives, vectors = setup.parameters.get("gives"), getattr(model, "net", model).layers(batch["x"])
    if gives == "rows":
        return vectors[1:]
    return {"vectors": vectors, "label": None} if gives == "none" else (vectors, batch["labels"])


def triplets(model: nn.Module, embeddings: Any, setup: TrialSetup) -> torch.Tensor:
    """The farthest sample of each one's class against the nearest of another."""
    vectors, labels = nn.functional.normalize(embeddings[0], dim=1), embeddings[1]
    if setup.parameters.get("gives") == "draws":
        vectors = vectors + 1e-3 * torch.randn_like(vectors)
    distances = (2 - 2 * vectors @ vectors.T).clamp(min=1e-9).sqrt()
    same = labels[:, None] == labels
    farthest, nearest = distances.masked_fill(~same, 0.0).amax(1), distances.masked_fill(same, 10.0).amin(1)
    return nn.functional.relu(farthest - nearest + 0.5).mean()


# A loss that compares the samples of a batch, for any of the adapters.
CONTRASTED = {"embed": embed, "batch_loss": triplets}


def wrongly_contrasted(setup: TrialSetup) -> dict[str, Any]:
    """The same with what the parameter `wrong` says."""
    wrong = {"alone": {"batch_loss": None}, "couples": {"couples_samples": True}}
    return {**CONTRASTED, **wrong[str(setup.parameters["wrong"])]}


def relative(gradient: torch.Tensor, expected: torch.Tensor) -> float:
    return float((gradient - expected).norm() / expected.norm())


# Of each of the points, the weight by which it is drawn.
DRAWN_BY = torch.linspace(0.1, 2, SAMPLES, dtype=torch.float64)


class OwnBatches(BatchSampler):
    """A user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from super().__iter__()


class OwnWeights(WeightedRandomSampler):
    """A user's own."""


def sampled(points: Points, sampling: str) -> DataLoader[Any]:
    """A loader of the points that draws them in some way."""
    count = len(points)
    weights = DRAWN_BY.tolist()
    weighted = WeightedRandomSampler(weights, count)
    options: dict[str, dict[str, Any]] = {
        "weighted": {"sampler": weighted, "batch_size": 32},
        "weighted_batches": {"batch_sampler": BatchSampler(weighted, 32, drop_last=False)},
        "own_batches": {"batch_sampler": OwnBatches(SequentialSampler(points), 32, drop_last=False)},
        "once": {"sampler": WeightedRandomSampler(weights, count, replacement=False), "batch_size": 32},
        "once_alike": {
            "sampler": WeightedRandomSampler([0.3] * count, count, replacement=False),
            "batch_size": 32,
        },
        "few_weighted": {"sampler": WeightedRandomSampler(weights, 100), "batch_size": 32},
        "few_weights": {"sampler": WeightedRandomSampler(weights[:100], count), "batch_size": 32},
        "negative": {"sampler": WeightedRandomSampler([-1.0] * count, count), "batch_size": 32},
        "own_weights": {"sampler": OwnWeights(weights, count), "batch_size": 32},
        "others": {
            "sampler": RandomSampler(range(100), replacement=True, num_samples=count),
            "batch_size": 32,
        },
        "replacement": {"sampler": RandomSampler(points, replacement=True), "batch_size": 32},
        "few": {"sampler": RandomSampler(points, num_samples=100), "batch_size": 32},
        "subset": {"sampler": SubsetRandomSampler(range(count)), "batch_size": 32},
        "whole_batches": {"batch_size": None},
        "random": {"shuffle": True, "batch_size": 32},
        "sequential": {"batch_size": 32},
        "random_batches": {"batch_sampler": BatchSampler(RandomSampler(points), 32, drop_last=True)},
    }
    return DataLoader(points, **options[sampling])


def sgd(net: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
    return Remembering(
        net.parameters(), lr=setup.learning_rate, momentum=0.9, weight_decay=setup.weight_decay
    )


def follow(measurements: Iterator[Measurement]) -> Iterator[Measurement]:
    """A user's own code around a library's loop, which knows nothing but measurements."""
    for measurement in measurements:
        yield replace(measurement, scores={**measurement.scores, "twice": 2 * measurement.value("accuracy")})
    LOG.followed += 1


def remember_groups(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    LOG.groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return optimizer


def troubles(setup: TrialSetup) -> None:
    """In the user's own score: whatever the trial's parameters ask for."""
    LOG.evaluations += 1
    write_error = setup.parameters.get("trouble")
    if write_error == "memory":
        raise torch.OutOfMemoryError("too large")
    if write_error == "error":
        raise ValueError("my own mistake")
    if write_error == "slow":
        time.sleep(SLOW_EVALUATION_S)


class TrainerContract:
    """Tests of an adapter; `tasks` is the module with its tasks, `example` the folder of its example."""

    tasks: ClassVar[str]
    example: ClassVar[str]

    @pytest.fixture(autouse=True)
    def clean(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """A user's folder stays as it was, and no thread is left."""
        before = set(threading.enumerate())
        (tmp_path / "mine").mkdir()
        monkeypatch.chdir(tmp_path / "mine")
        # Not below `tmp_path`: loaders' sockets lie there, whose paths may have a hundred characters.
        with tempfile.TemporaryDirectory() as temporary:
            monkeypatch.setattr("tempfile.tempdir", temporary)
            yield
            assert os.listdir(tmp_path / "mine") == []
            assert not list(Path(temporary).glob("bsearch-*"))
        assert set(threading.enumerate()) <= before

    def reports(self, task: str, made: TrialSetup) -> list[Any]:
        LOG.__init__()  # type: ignore[misc]
        return list(trial.attempt(f"{self.tasks}:{task}", made))

    def trained(self, task: str, made: TrialSetup) -> list[Measurement]:
        *measurements, outcome = self.reports(task, made)
        assert outcome == Outcome("complete"), outcome
        return measurements

    def ending(self, task: str, made: TrialSetup) -> Outcome:
        outcome = self.reports(task, made)[-1]
        assert isinstance(outcome, Outcome)
        return outcome

    @pytest.mark.parametrize(
        ("batch", "cap", "micro_batches"),
        [
            (96, 32, [32, 32, 32]),
            (50, 16, [13, 13, 12, 12]),
            (500, 167, [167, 167, 166]),
            (257, None, [257]),
            (1, None, [1]),
        ],
    )
    def test_every_step_holds_exactly_its_batch_and_the_budget_is_met_to_the_sample(
        self, batch: int, cap: int | None, micro_batches: list[int]
    ) -> None:
        budget = 1100 if batch > 1 else 40
        made = replace(
            setup(batch, budget=budget),
            plan=plan_batch(batch, largest_micro_batch=cap),
            largest_micro_batch=cap,
        )
        measurements = self.trained("train", made)
        full, rest = divmod(budget, batch)
        assert LOG.sizes[:full] == [micro_batches] * full
        assert sum(sum(step) for step in LOG.sizes) == budget == measurements[-1].samples_seen
        assert len(LOG.sizes) == full + bool(rest)
        # The stream of shuffled epochs: the same samples in the same order, whatever the micro-batches.
        seen = [index for step in LOG.steps for one in step for index in one]
        assert seen == SampleStream(SAMPLES, made.seed).take(0, budget).index.tolist()

    def test_a_last_step_that_has_no_plan_of_its_own_joins_the_one_before(self) -> None:
        made = replace(
            setup(100, budget=301, largest_micro_batch=40), plan=plan_batch(100, largest_micro_batch=40)
        )
        self.trained("train", replace(made, smallest_micro_batch=2))
        assert LOG.sizes == [[34, 33, 33], [34, 33, 33], [34, 34, 33]]

    def test_loader_processes_fetch_the_same_samples(self) -> None:
        self.trained("train", setup(50, 4, budget=620, training={"workers": 0}))
        expected = LOG.steps
        self.trained("train", setup(50, 4, budget=620, training={"workers": 1}))
        assert LOG.steps == expected

    @pytest.mark.parametrize("ignores", [False, True])
    def test_a_steps_gradient_is_that_of_the_one_large_batch(self, ignores: bool) -> None:
        made = setup(
            500,
            3,
            budget=500,
            parameters={"ignores": ignores},
            training={"schedule": "constant", "warmup": 0},
        )
        for task in self.tasks_of_gradients(ignores):
            self.trained(task, made)
            _, expected = one_large_batch(made, Points(ignores=ignores), nn.functional.cross_entropy)
            assert LOG.sizes == [[167, 167, 166]]
            assert relative(LOG.gradients[0], expected) < 1e-12, task

    def tasks_of_gradients(self, ignores: bool) -> list[str]:
        raise NotImplementedError

    @pytest.mark.parametrize("silent", [167, 250, 334])
    def test_a_micro_batch_in_which_nothing_counts_adds_nothing(self, silent: int) -> None:
        made = setup(
            500, 3, budget=500, parameters={"ignores": True, "silent": silent}, training={"evaluations": 1}
        )
        for task in self.tasks_of_gradients(ignores=True):
            [last] = self.trained(task, made)
            points = Points(ignores=True, silent=silent, seed=made.seed)
            loss, expected = one_large_batch(made, points, nn.functional.cross_entropy)
            assert relative(LOG.gradients[0], expected) < 1e-12, task
            assert last.train_loss == pytest.approx(loss, rel=1e-6), task

    def test_a_step_in_which_nothing_counts_has_gradient_and_loss_zero(self) -> None:
        for micro_batches in (1, 3):
            made = setup(300, micro_batches, budget=600, parameters={"ignores": True, "silent": 300})
            for task in self.tasks_of_gradients(ignores=True):
                first, last = self.trained(task, made)
                assert first.train_loss == 0 != last.train_loss, task
                assert not LOG.gradients[0].any() and LOG.gradients[1].any(), task

    @pytest.mark.parametrize("batch", [1, 2, 37])
    def test_a_mean_by_class_weights_is_that_of_the_one_large_batch(self, batch: int) -> None:
        made = setup(100, -(-100 // batch), budget=100)
        for task in self.weighted_tasks:
            self.trained(task, made)
            _, expected = one_large_batch(made, Points(), weighted_cross_entropy)
            assert relative(LOG.gradients[0], expected) < 1e-12, task

    weighted_tasks: ClassVar[list[str]]

    @pytest.mark.parametrize("ignores", [False, True])
    def test_a_profile_can_accumulate_a_step_as_a_trial_does(self, ignores: bool) -> None:
        made = setup(1, budget=60, parameters={"ignores": ignores, "silent": 20})
        keys = SampleStream(SAMPLES, made.seed).take(0, 60)

        def check(parts: TrainingParts) -> None:
            def batch(start: int, end: int) -> dict[str, torch.Tensor]:
                some = SampleKeys(keys.index[start:end], keys.epoch[start:end], keys.seed)
                return {**parts.data.fetch(some), "x": parts.data.fetch(some)["x"].double()}

            def gradient(sizes: list[int]) -> tuple[torch.Tensor, float]:
                ends = np.cumsum(sizes).tolist()
                parts.model.zero_grad()
                assert parts.accumulate is not None
                loss = parts.accumulate(
                    [(size, batch(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
                )
                assert loss.dim() == 0 and not loss.requires_grad
                found = [one.grad.flatten() for one in parts.model.parameters() if one.grad is not None]
                return torch.cat(found), float(loss)

            parts.model.double()
            before = [one.clone() for one in parts.model.parameters()]
            net, inputs = getattr(parts.model, "net", parts.model), batch(0, 60)
            loss = nn.functional.cross_entropy(net.layers(inputs["x"]), inputs["labels"])
            expected = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(net.parameters()))])
            for sizes in ([60], [1, 59], [20, 7, 33], [41, 3, 9, 7]):
                split, split_loss = gradient(sizes)
                assert relative(split, expected) < 1e-12, task
                assert split_loss == pytest.approx(float(loss.detach()), rel=1e-12), task
            assert all(map(torch.equal, before, parts.model.parameters()))
            assert not parts.couples_samples

        for task in [*self.tasks_of_gradients(ignores), "single"]:
            self.examined(task, made, check)
            assert not LOG.steps and not LOG.evaluations

    def examined(self, task: str, made: TrialSetup, check: Callable[[TrainingParts], None]) -> None:
        """Call `check` with a task's parts where a profile examines them."""

        class Examining(list[TrainingParts]):
            def append(self, parts: TrainingParts) -> None:
                check(parts)
                super().append(parts)

        LOG.__init__()  # type: ignore[misc]
        found = Examining()
        token = _collector.set(found)
        try:
            with closing(getattr(importlib.import_module(self.tasks), task)(made)) as training:
                next(training)
        finally:
            _collector.reset(token)
        assert len(found) == 1

    def test_a_loss_that_compares_samples_is_never_split(self) -> None:
        whole = setup(50, budget=125)
        self.trained("coupled", whole)
        assert LOG.sizes == [[50], [50], [25]]
        outcome = self.ending("coupled", setup(50, 2, budget=100))
        assert outcome.kind == "error" and LOG.steps == []
        assert "couples_samples: expected steps of one micro-batch" in outcome.message
        assert "got 50 samples as 25 + 25" in outcome.message

        def check(parts: TrainingParts) -> None:
            assert parts.couples_samples

        self.examined("coupled", whole, check)

    @pytest.mark.parametrize("micro_batches", [1, 3, 7])
    def test_a_loss_over_embeddings_is_split_exactly(self, micro_batches: int) -> None:
        made = setup(257, micro_batches, budget=771, rate=0.3, training={"clip_norm": 0.5})
        *_, last = self.trained("contrasted", made)
        assert [len(one) for one in LOG.gradients] == 3 * [sum(one.numel() for one in Net().parameters())]
        points, net = Points(), self.first_net(made)
        index = torch.from_numpy(SampleStream(SAMPLES, made.seed).take(0, 257).index)
        loss = triplets(net, (net.layers(points.x[index]), points.labels[index]), made)
        gradient = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(net.parameters()))])
        assert relative(LOG.gradients[0], gradient * min(1.0, 0.5 / (gradient.norm() + 1e-6))) < 1e-12
        assert math.isfinite(last.train_loss) and last.samples_seen == 771

    def first_net(self, made: TrialSetup) -> Net:
        torch.manual_seed(made.seed)
        return Net()

    def test_a_loss_over_embeddings_is_examined_and_its_memory_known(self) -> None:
        limit = 160_000
        request = ProfileRequest(setup(1, budget=1), Memory(limit=limit), highest=120)
        profile = profile_task(f"{self.tasks}:contrasted", request)
        assert (
            profile.examination is not None
            and not profile.examination.refusals
            and profile.examination.difference < 1e-9
        )
        whole, cached = profile.each
        assert (whole.embedding, cached.embedding) == ("whole", "cached")
        # The loss compares every pair, so that its own memory limits the batch, split or not.
        for one, batch, micro_batches in (
            (whole, whole.largest_micro_batch, 1),
            (cached, cached.largest_batch, 4),
        ):
            assert (
                one.memory is not None and one.memory.source == "traced" and batch is not None and batch < 120
            )
            made = setup(
                batch, micro_batches, budget=2 * batch, memory_limit_bytes=limit, training={"evaluations": 1}
            )
            *_, last = self.trained("contrasted", made)
            assert 0.85 * limit < last.facts["peak_bytes"] <= limit
            larger = setup(2 * batch, 2 * micro_batches, budget=2 * batch, memory_limit_bytes=limit)
            assert self.ending("contrasted", larger).kind == "out_of_memory"

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"wrong": "alone"}, "expected either neither or both of embed and batch_loss, got embed"),
            ({"wrong": "couples"}, "expected no couples_samples beside embed and batch_loss"),
        ],
    )
    def test_a_loss_over_embeddings_that_is_not_one_is_refused(
        self, wrong: dict[str, Any], message: str
    ) -> None:
        outcome = self.ending("contrasted_wrong", setup(50, 2, budget=100, parameters=wrong))
        assert outcome.kind == "error" and message in outcome.message and not LOG.steps
        outcome = self.ending("contrasted", setup(50, 2, budget=100, parameters={"gives": "rows"}))
        assert "train_with.embed: expected one row for each of 25 samples" in outcome.message
        outcome = self.ending("contrasted", setup(50, 2, budget=100, parameters={"gives": "none"}))
        assert "or a tuple, list or dict of such tensors, got None at ['label']" in outcome.message
        with pytest.raises(
            TaskError, match=r"train_with\.batch_loss: expected a loss without random numbers"
        ):
            request = ProfileRequest(
                setup(1, budget=1, parameters={"gives": "draws"}), Memory(limit=160_000), highest=120
            )
            profile_task(f"{self.tasks}:contrasted", request)

    @pytest.mark.parametrize(
        ("sampling", "got"),
        [
            ("once", "got WeightedRandomSampler(replacement=False) with unequal weights"),
            ("few_weighted", "got WeightedRandomSampler with num_samples=100 for a dataset of 600"),
            (
                "few_weights",
                "WeightedRandomSampler: weights: expected one for each of the 600 training samples, got 100",
            ),
            ("negative", "WeightedRandomSampler: weights: expected finite numbers >= 0, got -1.0 at index 0"),
            ("own_weights", "got sampler OwnWeights"),
            ("own_batches", "got batch_sampler OwnBatches"),
            ("others", "Sampler over 100 samples for a dataset of 600"),
            ("few", "Sampler with num_samples=100 for a dataset of 600"),
            ("subset", "got sampler SubsetRandomSampler"),
            ("whole_batches", "got batch_size=None"),
        ],
    )
    def test_an_order_of_ones_own_is_refused(self, sampling: str, got: str) -> None:
        for task in self.sampling_tasks:
            outcome = self.ending(task, setup(50, budget=100, parameters={"sampling": sampling}))
            assert outcome.kind == "error" and LOG.steps == []
            assert got in outcome.message, task
            if ": weights: " not in got:
                assert (
                    "expected a training loader with torch's RandomSampler, SequentialSampler or Weighted"
                    in outcome.message
                )

    @pytest.mark.parametrize("sampling", ["weighted", "weighted_batches", "replacement"])
    def test_a_loader_that_draws_by_weights_trains_on_the_draws_of_our_stream(self, sampling: str) -> None:
        made = setup(50, 4, budget=620, parameters={"sampling": sampling})
        weights = np.ones(SAMPLES) if sampling == "replacement" else DRAWN_BY.numpy()
        expected = SampleStream(SAMPLES, made.seed, weights).take(0, 620).index.tolist()
        for task in self.sampling_tasks:
            self.trained(task, made)
            assert [index for step in LOG.steps for one in step for index in one] == expected, task

            def check(parts: TrainingParts) -> None:
                assert parts.weights is not None
                assert np.array_equal(parts.weights, weights)

            self.examined(task, made, check)

    def test_a_loader_that_does_not_shuffle_keeps_its_order(self) -> None:
        for task in self.sampling_tasks:
            self.trained(task, setup(50, 4, budget=620, parameters={"sampling": "sequential"}))
            assert [index for step in LOG.steps for one in step for index in one] == [
                *range(SAMPLES),
                *range(20),
            ], task

    @pytest.mark.parametrize("sampling", ["random", "random_batches", "once_alike"])
    def test_a_loader_that_only_shuffles_trains_as_any(self, sampling: str) -> None:
        self.trained("train", setup(50, budget=100))
        expected = LOG.steps
        for task in self.sampling_tasks:
            self.trained(task, setup(50, budget=100, parameters={"sampling": sampling}))
            assert LOG.steps == expected, task

    sampling_tasks: ClassVar[list[str]]

    def test_a_scheduler_beside_the_optimizer_is_refused(self) -> None:
        outcome = self.ending("hidden_schedule", setup(50, budget=100))
        assert outcome.kind == "error" and LOG.steps == []
        assert (
            "the optimizer: expected no scheduler, because training.schedule sets the rate" in outcome.message
        )

    def test_an_optimizer_that_needs_a_closure_is_refused_by_name(self) -> None:
        outcome = self.ending("sharp", setup(50, budget=100))
        assert outcome.kind == "error" and LOG.steps == []
        assert "the optimizer: expected an optimizer that steps with the gradient" in outcome.message
        assert "got SAM with a closure" in outcome.message

    def test_training_that_ends_by_itself_is_told(self) -> None:
        made = setup(50, budget=1000, training={"evaluations": 2})
        outcome = self.ending("stops_itself", made)
        assert outcome.kind == "error"
        assert "expected to train on 1000 samples; training ended after 150, because" in outcome.message
        assert "should_" in outcome.message and "`stopping:` in study.yaml" in outcome.message
        assert LOG.evaluations == 0

    def test_the_rate_follows_the_samples_seen(self) -> None:
        training = {"schedule": "cosine", "warmup": 0.2, "evaluations": 3}
        self.trained("train", setup(70, 2, budget=1000, rate=0.3, training=training))
        ends = np.cumsum([sum(step) for step in LOG.sizes])
        middles = [(end - sum(step) / 2) / 1000 for end, step in zip(ends, LOG.sizes, strict=True)]
        assert LOG.rates == pytest.approx(
            [0.3 * rate_factor("cosine", 0.2, middle) for middle in middles], rel=1e-12
        )

    def test_the_optimizer_gets_the_studys_settings(self) -> None:
        made = replace(setup(64, budget=128), optimizer=OptimizerSettings(3e-3, (0.8, 0.97), 1e-7, 0.02))
        self.trained("adam", made)
        decays = {group["weight_decay"] for group in LOG.groups}
        assert {(group["betas"], group["eps"]) for group in LOG.groups} == {((0.8, 0.97), 1e-7)}
        assert 0.02 in decays and decays <= {0.0, 0.02}

    def test_the_whole_steps_gradient_is_clipped(self) -> None:
        free = setup(100, 3, budget=100, training={"clip_norm": None})
        self.trained("train", free)
        norm = float(LOG.gradients[0].norm())
        self.trained("train", setup(100, 3, budget=100, training={"clip_norm": norm / 2}))
        assert float(LOG.gradients[0].norm()) == pytest.approx(norm / 2, rel=1e-5)
        self.trained("train", setup(100, 3, budget=100, training={"clip_norm": norm * 2}))
        assert float(LOG.gradients[0].norm()) == pytest.approx(norm, rel=1e-12)

    def test_precision_is_the_studys(self) -> None:
        self.trained("single", setup(64, budget=128))
        assert LOG.autocast == {False}
        self.trained("single", setup(64, budget=128, training={"precision": "bf16"}))
        assert LOG.autocast == {True}

    def test_it_measures_at_fractions_of_its_budget_and_evaluation_takes_no_time(self) -> None:
        made = setup(50, budget=1000, training={"evaluations": 4}, parameters={"trouble": "slow"})
        begun = time.perf_counter()
        measurements = self.trained("train", made)
        assert tuple(one.samples_seen for one in measurements) == evaluation_points(1000, 4)
        seconds = [one.elapsed_s for one in measurements]
        assert (
            seconds == sorted(seconds)
            and 0 < seconds[-1] <= time.perf_counter() - begun - 4 * SLOW_EVALUATION_S
        )
        for one in measurements:
            assert one.train_loss is not None and math.isfinite(one.train_loss)
            assert 0 <= one.value("accuracy") <= 1 and set(one.scores) >= {"accuracy"}
        assert measurements[-1].facts["steps"] == 20
        main = json.loads(str(measurements[-1].facts["optimizer_groups"]))[0]  # as it stepped, at its peak
        assert main["lr"] == pytest.approx(made.learning_rate) and {"weight_decay", "maximize"} <= main.keys()

    def test_a_seed_repeats_and_another_differs(self) -> None:
        def losses(seed: int) -> list[float | None]:
            made = setup(64, 2, budget=900, training={"seed": seed}, parameters={"drop": 0.3})
            return [one.train_loss for one in self.trained("train", made)]

        torch.rand(7)  # whatever was drawn before
        first = losses(5)
        torch.rand(3)
        assert losses(5) == first != losses(6)

    def test_a_trial_that_is_stopped_ends_there(self) -> None:
        LOG.__init__()  # type: ignore[misc]
        made = setup(50, budget=1000, training={"evaluations": 4})
        with closing(trial.attempt(f"{self.tasks}:train", made)) as attempt:  # type: ignore[type-var]
            next(attempt)
        assert len(LOG.steps) == 5

    # Whether what it holds is all that is between two evaluations.
    leaves_between = True

    @pytest.mark.parametrize("asked", [8, 11])
    def test_an_attempt_goes_on_from_its_checkpoint_to_the_same_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int
    ) -> None:
        """Also from between two evaluations, which come after six, eleven and sixteen steps of 21."""
        made = setup(50, 2, budget=1010, training={"evaluations": 4}, parameters={"drop": 0.3})
        whole = self.trained("train", made)
        kept = replace(made, checkpoint=f"file://{tmp_path}/kept/checkpoint.pt")
        for module in checkpoint, course:
            monkeypatch.setattr(module, "asked_to_leave", lambda: len(LOG.steps) >= asked)
        *first, _ = self.reports("train", kept)
        monkeypatch.undo()
        again = self.trained("train", replace(kept, attempt=1))
        left = asked if self.leaves_between else 11
        assert len(LOG.steps) == 21 - left
        assert again[: len(first)] == first
        for one, other in zip(again, whole, strict=True):
            assert (one.samples_seen, one.train_loss, one.scores["accuracy"]) == (
                other.samples_seen,
                other.train_loss,
                other.scores["accuracy"],
            )
        assert again[-1].facts["resumed_at"] == 50 * left

    def test_what_a_callback_alone_remembers_is_refused_before_the_first_trial(self) -> None:
        request = ProfileRequest(setup(1, budget=1), Memory(), highest=100)
        message = "forgetful: expected a training that ends alike where it is saved and resumed"
        with pytest.raises(TaskError, match=message):
            profile_task(f"{self.tasks}:forgetful", request)

    def test_a_training_does_not_depend_on_when_it_is_evaluated(self) -> None:
        def gradients(evaluations: int) -> list[torch.Tensor]:
            self.trained(
                "train",
                setup(50, budget=300, training={"evaluations": evaluations}, parameters={"drop": 0.3}),
            )
            return LOG.gradients.copy()

        assert all(map(torch.equal, gradients(1), gradients(3)))

    def test_an_optimizer_inside_another_goes_on_from_a_checkpoint(self, tmp_path: Path) -> None:
        made = setup(50, 2, budget=600, rate=0.01, training={"evaluations": 4})
        whole = self.trained("wrapped", made)
        kept = replace(made, checkpoint=f"file://{tmp_path}/kept/checkpoint.pt", checkpoint_every_s=0.0)
        with closing(trial.attempt(f"{self.tasks}:wrapped", kept)) as attempt:  # type: ignore[type-var]
            next(attempt), next(attempt)
        again = self.trained("wrapped", replace(kept, attempt=1))
        assert again[-1].facts["resumed_at"] and len(LOG.steps) < 12
        assert [one.train_loss for one in again] == [one.train_loss for one in whole]

    def test_a_trained_model_is_kept_where_asked_and_nowhere_else(self, tmp_path: Path) -> None:
        before = set(tmp_path.iterdir())
        self.trained("train", setup(96, 3, budget=200))
        assert set(tmp_path.iterdir()) == before
        self.trained("train", setup(96, 3, budget=200, model_folder=str(tmp_path / "model")))
        assert self.kept_model <= {path.name for path in (tmp_path / "model").iterdir()}

    kept_model: ClassVar[set[str]]

    def test_memory_that_runs_out_in_a_pass_names_the_micro_batch(self) -> None:
        outcome = self.ending("train", setup(300, 2, budget=1200, memory_limit_bytes=20_000))
        assert (outcome.kind, outcome.micro_batch) == ("out_of_memory", 150)
        assert (
            self.ending("train", setup(300, 2, budget=1200, memory_limit_bytes=10_000_000)).kind == "complete"
        )

    def test_its_memory_is_known_before_the_first_trial(self) -> None:
        example = Path(__file__).parent.parent / "examples" / self.example / "tasks.py"
        reference, limit = f"{example}:train", 8 * 2**20
        request = ProfileRequest(
            replace(setup(1, budget=1), training=Training()), Memory(limit=limit), highest=1437
        )
        profile = profile_task(reference, request)
        law, largest = profile.memory, profile.largest_micro_batch
        assert law is not None and largest is not None and 50 < largest < 1000
        assert (law.source, profile.training_set, profile.optimizer) == ("traced", 1437, "AdamW")
        # Trials meet the same virtual device.
        for size in (1, largest):
            made = setup(2 * size, 2, budget=8 * size, memory_limit_bytes=limit, training={"evaluations": 1})
            *measurements, outcome = trial.attempt(reference, made)
            assert outcome == Outcome("complete"), outcome
            assert measurements[-1].facts["peak_bytes"] == pytest.approx(law.peak_bytes(size), rel=0.02)
        too_large = round(largest * 1.1)
        made = setup(
            2 * too_large, 2, budget=8 * too_large, memory_limit_bytes=limit, training={"evaluations": 1}
        )
        *_, outcome = trial.attempt(reference, made)
        assert (outcome.kind, outcome.micro_batch) == ("out_of_memory", too_large)

    def test_a_model_that_cannot_be_traced_is_counted(self) -> None:
        LOG.__init__()  # type: ignore[misc]
        request = ProfileRequest(setup(1, budget=1), Memory(limit=120_000), highest=600)
        profile = profile_task(f"{self.tasks}:followed", request)
        assert profile.memory is not None and profile.memory.source == "counted"
        assert profile.largest_micro_batch is not None and 100 < profile.largest_micro_batch < 600

    def test_the_data_behind_a_batch_takes_no_memory_of_the_device(self) -> None:
        made = setup(100, 2, budget=300, memory_limit_bytes=200_000, parameters={"views": True})
        assert self.ending("train", made).kind == "complete"
        request = ProfileRequest(replace(made, plan=BatchPlan(1)), Memory(limit=200_000), highest=100)
        assert profile_task(f"{self.tasks}:train", request).largest_micro_batch == 100

    def test_a_users_mistake_is_told_with_its_line(self) -> None:
        outcome = self.ending("train", setup(50, budget=100, parameters={"trouble": "error"}))
        assert outcome.kind == "error"
        assert "ValueError: my own mistake" in outcome.message and ".py:" in outcome.message
        assert "Traceback" in outcome.traceback and "troubles" in outcome.traceback

    def test_a_loss_that_overflows_is_a_diverged_trial(self) -> None:
        outcome = self.ending("train", setup(32, budget=6000, rate=1e308, training={"evaluations": 1}))
        assert outcome.kind == "diverged", outcome
        assert len(LOG.steps) < 6000 // 32

    def test_a_metric_that_nobody_measures_is_refused_with_those_there_are(self) -> None:
        outcome = self.ending("train", setup(50, budget=100, metric="recall"))
        assert "expected a metric that the training code reports (accuracy" in outcome.message
        assert "got 'recall'" in outcome.message

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"plan": plan_batch(50, devices=2)}, "got devices.per_trial"),
            ({"training": {"precision": "fp16"}}, "got training.precision: fp16"),
            ({"training": {"sync_batch_norm": True}}, "got training.sync_batch_norm"),
            (
                {"training": {"samples": 599}},
                "training.samples: expected the length of the training set, 600, got 599",
            ),
            ({"parameters": {"stream": True}}, "expected training data with a length"),
        ],
    )
    def test_what_it_cannot_do_is_refused_in_words(self, changes: dict[str, Any], message: str) -> None:
        outcome = self.ending("train", setup(50, budget=100, **changes))
        assert outcome.kind == "error"
        assert message in outcome.message


def predicted_and_measured(reference: str, made: TrialSetup, sizes: tuple[int, int]) -> None:
    """The traced law is within two percent of the peaks of trials."""
    profile = profile_task(reference, ProfileRequest(made, Memory(), highest=sizes[1], traces=True))
    assert profile.memory is not None and profile.memory.source == "traced", profile.note or profile.memory
    for size in sizes:
        training = made.training.model_copy(update={"evaluations": 1})
        split = replace(made, plan=BatchPlan(2 * size, 2), samples_budget=16 * size, training=training)
        *measurements, outcome = trial.attempt(reference, split)
        assert outcome == Outcome("complete"), outcome
        assert measurements[-1].facts["peak_bytes"] == pytest.approx(
            profile.memory.peak_bytes(size), rel=0.02
        )


def ends_with_a_front(example: str, folder: Path) -> None:
    """Run an example as a user does, and see that it leaves a front and nothing that was not asked for."""
    study = folder / "study"
    shutil.copytree(
        Path(__file__).parent.parent / "examples" / example,
        study,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    command = [sys.executable, "-m", "bsearch", "run", "study.yaml", "--serial", "--trials", "4", "--json"]
    done = subprocess.run(command, cwd=study, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    front = json.loads(done.stdout.splitlines()[-1])["front"]
    assert front and max(one["accuracy"] for one in front) > 0.5
    assert {path.name for path in study.iterdir()} - {"__pycache__"} == {
        "study.yaml",
        "tasks.py",
        "results",
        f"{example}-digits.db",
    }
