"""Laws of weighted sampling: draws as likely as their weights, the same however the stream is cut, each with its own noise."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import bsearch
import numpy as np
import pytest
import torch
from bsearch import Data, Task, TaskError, balanced
from bsearch.objectives.data.batches import _DRAW, Fetcher, SampleKeys, SampleStream, _drawn, mixed
from bsearch.objectives.data.sample_weights import checked_weights
from bsearch.objectives.digits import Digits
from bsearch.objectives.profiling.memory.tracing import batch_factory
from bsearch.objectives.task import checked_data
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.trial import TrialSetup
from helpers import Net, setup
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import binom, chi2
from tasks_for_tests import Noisy
from test_units import Sentences
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

SOME = st.sampled_from([0.0, 1e-300, 1e-9, 0.1, 1.0, 7.0, 1e300])
WEIGHTS = st.lists(SOME, min_size=1, max_size=60).filter(any).map(np.array)


@given(
    WEIGHTS,
    st.integers(0, 2**40),
    st.integers(0, 10**7),
    st.lists(st.integers(1, 5000), min_size=1, max_size=8),
)
def test_the_draws_are_the_same_however_they_are_cut(
    weights: np.ndarray, seed: int, start: int, sizes: list[int]
) -> None:
    whole = SampleStream(len(weights), seed, weights).take(start, sum(sizes))
    stream, position, parts = SampleStream(len(weights), seed, weights), start, list[SampleKeys]()
    for size in sizes:
        parts.append(stream.take(position, size))
        position += size
    assert np.array_equal(np.concatenate([part.index for part in parts]), whole.index)
    assert np.array_equal(np.concatenate([part.epoch for part in parts]), whole.epoch)
    assert whole.index.dtype == whole.epoch.dtype == np.int64
    assert len(set(zip(whole.epoch.tolist(), whole.index.tolist(), strict=True))) == len(whole)
    assert (weights[whole.index] > 0).all()


@given(WEIGHTS, st.integers(0, 100))
def test_draws_are_those_of_a_slow_twin(weights: np.ndarray, seed: int) -> None:
    bounds = list(accumulate((weights / weights.max()).tolist()))
    for position in range(20):
        at = int(mixed(seed, position, _DRAW)) // 2**11 / 2**53 * bounds[-1]
        drawn = next(index for index, bound in enumerate(bounds) if bound > at)
        assert SampleStream(len(weights), seed, weights).take(position, 1).index.tolist() == [drawn]


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
@pytest.mark.parametrize(
    "weights",
    [[0, 0, 3, 0], [0, 1, 0, 2, 0], [0.1] * 7 + [0.0], [1e308] * 9 + [0], [5e-324, 0], [0.3, 0.7, 0, 0]],
)
def test_at_the_edges_too_a_weight_of_zero_is_never_drawn(
    weights: list[float], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bsearch.objectives.data.batches.mixed", lambda *_: np.uint64(bits))
    index = _drawn(np.cumsum(np.array(weights) / max(weights)), 0, np.zeros(1, dtype=np.int64))
    positive = np.flatnonzero(weights)
    assert index == positive[-1 if bits else 0]


@pytest.mark.parametrize("kind", ["even", "steep", "zeros", "counts"])
def test_frequencies_are_as_the_weights_say(kind: str) -> None:
    size, draws = 50, 200_000
    weights = {
        "even": np.full(size, 0.3),
        "steep": 1.3 ** np.arange(size) * 1e-200,
        "zeros": np.arange(size) % 3.0,
        "counts": balanced(np.repeat([0, 1, 2], [1, 9, 40])),
    }[kind]
    keys = SampleStream(size, 3, weights).take(0, draws)
    expected = weights / weights.sum() * draws
    found = np.bincount(keys.index, minlength=size)
    often = expected >= 5
    found, expected = (np.append(counts[often], counts[~often].sum()) for counts in (found, expected))
    kept = expected > 0
    assert not found[~kept].any()
    statistic = float(((found - expected)[kept] ** 2 / expected[kept]).sum())
    assert chi2.sf(statistic, int(kept.sum()) - 1) > 0.001
    # Neither neighbours nor a draw and its own augmentation are correlated.
    place, noise = (
        (np.cumsum(weights) - weights / 2)[keys.index] / weights.sum(),
        keys.uniform(1).numpy()[:, 0],
    )
    assert abs(np.corrcoef(place[:-1], place[1:])[0, 1]) < 4 / draws**0.5
    assert abs(np.corrcoef(place, noise)[0, 1]) < 4 / draws**0.5


class Jittered(Dataset[Any]):
    """Samples with noise of torch, NumPy and Python, for a fetcher that reads them one by one."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.tensor([random.random(), np.random.random(), float(torch.rand(()))])


def test_two_draws_of_a_sample_in_an_epoch_are_augmented_differently() -> None:
    keys = SampleStream(3, 0, np.array([0.0, 1.0, 0.0])).take(0, 3)
    assert keys.index.tolist() == [1, 1, 1]
    assert len(keys.uniform(1).unique()) == 3
    samples = Fetcher(Jittered()).fetch(keys)
    assert all(len(column.unique()) == 3 for column in samples.T)


class Drawn(Net):
    """A net whose samples are drawn by weights, of which every fifth is 0."""

    def data(self, setup: TrialSetup) -> Data:
        data = super().data(setup).train
        return Data(data, data, weights=torch.arange(len(data)) % 5)  # type: ignore[arg-type]


@given(st.integers(1, 97), st.integers(1, 5), st.integers(1, 700))
@example(97, 1, 1500)
@settings(max_examples=15, deadline=None)
def test_the_budget_is_exact_and_what_a_step_sees_does_not_depend_on_its_split(
    batch: int, parts: int, budget: int
) -> None:
    made = setup(batch, min(parts, batch), budget=budget)
    run = TrainingRun(Drawn(), made)
    plans = [steps.plan for steps in made.steps() for _ in range(steps.count)]
    keys = list(run.stream.micro_batches(plans, 0, 0))
    index = np.concatenate([part.index for part in keys])
    assert np.array_equal(index, SampleStream(600, made.seed, np.arange(600.0) % 5).take(0, budget).index)
    assert (index % 5 != 0).all()


class DrawnNoisy(Noisy):
    """Dropout, batch statistics, momentum, random numbers of its own, and draws by weights."""

    def data(self, setup: TrialSetup) -> Data:
        data = super().data(setup)
        return Data(data.train, data.validation, weights=np.arange(len(data.train)) % 3)  # type: ignore[arg-type]


def test_it_resumes_to_the_same_bits(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"batch": 37, "accumulation": 2, "budget": 800, "training": {"evaluations": 4}}
    expected = TrainingRun(DrawnNoisy(), setup(**changes))
    uninterrupted = list(expected.measurements())
    changes |= {"checkpoint": str(tmp_path / "it.pt"), "checkpoint_every_s": 0.0}
    first = TrainingRun(DrawnNoisy(), setup(**changes)).measurements()
    next(first), next(first)
    first.close()  # type: ignore[attr-defined]
    again = TrainingRun(DrawnNoisy(), setup(**changes))
    resumed = list(again.measurements())
    assert resumed[-1].facts["resumed_at"]
    assert [one.train_loss for one in resumed] == [one.train_loss for one in uninterrupted]
    for one, other in zip(
        again.model.state_dict().values(), expected.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)


class Imbalanced(Digits):
    """Digits of which the first five classes are ten times rarer; counts the classes that it trains on."""

    def __init__(self) -> None:
        self.seen = torch.zeros(10)

    def data(self, setup: TrialSetup) -> Data:
        data = super().data(setup)
        images, labels = data.train.tensors  # type: ignore[attr-defined]
        kept = (labels >= 5) | (torch.arange(len(labels)) % 10 == 0)
        train = TensorDataset(images[kept], labels[kept])
        weights = balanced(labels[kept]) if setup.parameters.get("balanced") else None
        return Data(train, data.validation, weights=weights)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        self.seen += batch[1].bincount(minlength=10)
        return super().loss(model, batch, setup)


def test_balanced_weights_train_on_all_classes_equally_often() -> None:
    budget = 4000
    plain, even = Imbalanced(), Imbalanced()
    for task in (plain, even):
        list(
            TrainingRun(
                task,
                setup(
                    250, 3, budget=budget, parameters={"balanced": task is even}, training={"evaluations": 1}
                ),
            ).measurements()
        )
        assert task.seen.sum() == budget
    assert plain.seen[:5].sum() < 0.15 * budget
    # All ten shares within the interval that one would leave once in 10,000 times.
    low, high = binom.interval(0.9999, budget, 0.1)
    assert ((even.seen >= low) & (even.seen <= high)).all(), even.seen


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1, 0, 0],
        [True, False, True, True],
        ["b", "a", "b", "b"],
        np.array(["b", "a", "b", "b"]),
        np.array(["b", "a", "b", "b"], dtype=object),
        torch.tensor([7, -100, 7, 7]),
        [torch.tensor(3), torch.tensor(1), torch.tensor(3), torch.tensor(3)],
        np.array([9, 2, 9, 9], dtype=np.uint8),
    ],
)
def test_balanced_weights_are_one_over_the_count_of_a_class(labels: Any) -> None:
    found = bsearch.balanced(labels)
    assert found.tolist() == [1 / 3, 1, 1 / 3, 1 / 3]
    assert found.dtype == np.float64


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0.5, 1.5], "expected integers or strings, got float"),
        (torch.tensor([0.5, 1.5]), "expected integers or strings, got Tensor"),
        (np.array([0.5, 1.5]), "expected integers or strings, got float64"),
        (["a", 1], "expected integers or strings, got int and str"),
        ([None, "a"], "expected integers or strings, got NoneType and str"),
        (torch.eye(3), r"expected one for each training sample, got shape \(3, 3\). Of one-hot labels"),
        ([[1], [1, 2]], "expected one for each training sample, got a list of sequences"),
        ([], "expected one for each training sample, got shape"),
        ({"a": 1}, "expected one for each training sample, got shape"),
    ],
)
def test_labels_that_are_not_classes_are_refused(labels: Any, words: str) -> None:
    with pytest.raises(TaskError, match=f"balanced: labels: {words}"):
        balanced(labels)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (
            [1.0, 2.0],
            "expected one for each of the 600 training samples, got 2. Of weights by class, write class_weights",
        ),
        (np.ones((600, 1)), r"expected one for each of the 600 training samples, got shape \(600, 1\)"),
        (torch.tensor(1.0), r"expected one for each of the 600 training samples, got shape \(\)"),
        ([0.5] * 599 + [-1e-9], "expected finite numbers >= 0, got -1e-09 at index 599"),
        ([0.5] * 599 + [float("nan")], "expected finite numbers >= 0, got nan at index 599"),
        ([float("inf")] * 600, "expected finite numbers >= 0, got inf at index 0"),
        ([None] * 600, "expected finite numbers >= 0, got nan at index 0"),
        (np.zeros(600), "expected at least one above 0, got 600 zeros"),
        (["much"] * 600, "expected one number for each of the 600 training samples, got list"),
        (
            dict.fromkeys(range(600), 1.0),
            "expected one number for each of the 600 training samples, got dict",
        ),
        ([[1.0], [1.0, 2.0]] * 300, "expected one number for each of the 600 training samples, got list"),
    ],
)
def test_weights_that_are_none_are_refused(weights: Any, words: str) -> None:
    class Wrong(Net):
        def data(self, setup: TrialSetup) -> Data:
            data = super().data(setup).train
            return Data(data, data, weights=weights)

    with pytest.raises(TaskError, match=f"Task.data: weights: {words}"):
        TrainingRun(Wrong(), setup())


def test_weights_may_come_as_any_sequence_of_numbers() -> None:
    expected = [0.5, 0.0, 2.0]
    for weights in (
        expected,
        tuple(expected),
        np.array(expected, dtype=np.float32),
        torch.tensor(expected).bfloat16(),
    ):
        found = checked_weights("here", weights, 3)
        assert found.tolist() == expected and found.dtype == np.float64
    own = np.array(expected)
    assert not np.shares_memory(checked_weights("here", own, 3), own)


def test_a_loader_in_the_place_of_a_dataset_is_told_of_weights() -> None:
    data: Any = TensorDataset(torch.zeros(3))
    with pytest.raises(TaskError, match="instead of a weighted sampler, pass weights="):
        checked_data(Data(DataLoader(data), data))  # type: ignore[arg-type]


class DrawnSentences(Sentences):
    """Sentences of which the longest are never drawn."""

    def data(self, setup: TrialSetup) -> Data:
        data = super().data(setup)
        lengths = np.asarray(data.lengths)
        return Data(
            data.train,
            data.validation,
            collate=data.collate,
            lengths=data.lengths,
            weights=lengths * (lengths < 9),
        )


@pytest.mark.parametrize("at_a_time", [7, 1 << 20])
def test_tokens_are_counted_as_they_were_drawn(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bsearch.objectives.data.training_samples._COUNTED_DRAWS", at_a_time)
    task: Task = DrawnSentences()
    made = setup(14, 2, budget=300, training={"evaluations": 4})
    run, seen = TrainingRun(task, made), 0
    lengths = np.asarray(task.data(made).lengths)
    for measurement in run.measurements():
        seen = measurement.samples_seen
        assert measurement.facts["tokens"] == lengths[run.stream.take(0, seen).index].sum()
    assert [run._units(count) for count in (seen, 5, 0, 123)] == [
        lengths[run.stream.take(0, count).index].sum() for count in (seen, 5, 0, 123)
    ]


def test_memory_is_traced_with_the_longest_that_are_ever_drawn() -> None:
    run = TrainingRun(DrawnSentences(), setup(4))
    tokens, _ = batch_factory(run, "train")(5, lambda tensor: tensor)
    assert tokens.shape == (5, 8)
    assert np.asarray(run.data.lengths)[run.longest(200).index].max() == 8
