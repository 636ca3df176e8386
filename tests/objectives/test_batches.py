"""Laws of the sample stream: each epoch's samples once each, exactly the budget, the same whoever fetches them."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from bsearch.objectives.data.batches import (
    Fetcher,
    SampleKeys,
    SampleStream,
    _equal,
    _grouped,
    ahead,
    batches,
    epoch_order,
    in_order,
    mixed,
    to_device,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset


@given(st.integers(1, 200), st.integers(0, 2**40), st.integers(1, 900), st.integers(1, 300))
def test_each_epoch_holds_every_sample_once(samples: int, seed: int, budget: int, step: int) -> None:
    stream = SampleStream(samples, seed)
    seen: list[tuple[int, int]] = []
    for start in range(0, budget, step):
        keys = stream.take(start, min(step, budget - start))
        seen += zip(keys.epoch.tolist(), keys.index.tolist(), strict=True)
    assert len(seen) == budget
    whole, rest = divmod(budget, samples)
    for epoch in range(whole):
        assert sorted(index for e, index in seen if e == epoch) == list(range(samples))
    assert max(Counter(seen).values()) == 1
    assert sum(e == whole for e, _ in seen) == rest


@given(st.integers(2, 100), st.integers(0, 100), st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_the_stream_is_the_same_however_it_is_cut(samples: int, seed: int, sizes: list[int]) -> None:
    whole = SampleStream(samples, seed).take(0, sum(sizes))
    stream, start, parts = SampleStream(samples, seed), 0, []
    for size in sizes:
        parts.append(stream.take(start, size))
        start += size
    assert np.array_equal(np.concatenate([part.index for part in parts]), whole.index)
    assert np.array_equal(np.concatenate([part.epoch for part in parts]), whole.epoch)


def test_epochs_and_seeds_shuffle_differently() -> None:
    orders = [tuple(epoch_order(100, seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert tuple(epoch_order(100, 1, 1)) == orders[4]


def test_a_samples_random_numbers_are_its_own_and_even() -> None:
    def keys(index: list[int], epoch: int, seed: int = 7) -> SampleKeys:
        return SampleKeys(np.array(index), np.full(len(index), epoch), seed)

    together, alone = keys([3, 5, 8], 2).uniform(4), keys([5], 2).uniform(4)
    assert torch.equal(together[1:2], alone)
    assert not torch.equal(alone, keys([5], 3).uniform(4))
    assert not torch.equal(alone, keys([5], 2, seed=8).uniform(4))
    numbers = SampleKeys(np.arange(20000), np.zeros(20000, dtype=np.int64), 0).uniform(3).numpy()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.abs(numbers.mean(0) - 0.5).max() < 0.01
    assert np.abs(np.corrcoef(numbers.T) - np.eye(3)).max() < 0.03


def test_mixing_has_no_collisions_among_neighbours() -> None:
    bits = mixed(0, np.arange(200)[:, None], np.arange(500)[None, :])
    assert len(np.unique(bits)) == 200 * 500


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4))
def test_mixing_is_the_finalizer_of_splitmix64(numbers: list[int]) -> None:
    def finalized(state: int) -> int:
        """The slow twin, in Python's own integers."""
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    state = 0
    for number in numbers:
        state = finalized(((number ^ state) + 0x9E3779B97F4A7C15) % 2**64)
    assert int(mixed(*(np.uint64(number) for number in numbers))) == state
    # The first outputs of its reference implementation from these seeds.
    assert [int(mixed(seed)) for seed in (0, 1234567)] == [0xE220A8397B1DCDAF, 6457827717110365317]


def test_the_order_of_samples_is_that_of_every_version() -> None:
    """A checkpoint that an older version wrote goes on with the samples that it has not seen."""
    assert epoch_order(8, seed=0, epoch=0).tolist() == [2, 4, 3, 5, 1, 0, 6, 7]
    assert epoch_order(8, seed=3, epoch=2).tolist() == [6, 2, 5, 4, 1, 7, 3, 0]


class Noisy(Dataset[Any]):
    """Data with randomness of its own from all three generators, as augmentation has."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, float, float, torch.Tensor]:
        return index, random.random(), float(np.random.rand()), torch.rand(2)


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_workers_change_no_bit(workers: int) -> None:
    stream = SampleStream(23, seed=5)
    micro_batches = [stream.take(start, size) for start, size in [(0, 7), (7, 1), (8, 30)]]
    here = list(batches(Fetcher(Noisy()), micro_batches, workers=0))
    before = torch.get_rng_state(), random.getstate()
    there = list(batches(Fetcher(Noisy()), micro_batches, workers=workers))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    for ours, theirs in zip(here, there, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_samples_own_randomness_hangs_not_on_its_pass() -> None:
    stream = SampleStream(23, seed=5)
    whole = Fetcher(Noisy()).fetch(stream.take(0, 20))
    parts = [Fetcher(Noisy()).fetch(stream.take(start, 5)) for start in (0, 5, 10, 15)]
    for column, tensor in enumerate(whole):
        assert torch.equal(tensor, torch.cat([part[column] for part in parts]))


class Rarely(Dataset[Any]):
    """Some samples draw, from one generator or another; it remembers under which seed each was read."""

    def __init__(self, drawing: dict[int, Callable[[], Any]]) -> None:
        self.drawing, self.seeds = drawing, list[int]()

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.seeds.append(torch.initial_seed())
        return index, float(self.drawing.get(index, lambda: 0.0)())


_DRAWS: list[Callable[[], Any]] = [
    random.random,
    np.random.rand,
    lambda: torch.rand(()),
    lambda: random.gauss(0, 1),
]


@given(
    st.dictionaries(st.integers(0, 29), st.sampled_from(_DRAWS), max_size=3),
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
)
def test_samples_are_seeded_from_the_first_that_draws_and_no_bit_changes(
    drawing: dict[int, Callable[[], Any]], sizes: list[int]
) -> None:
    torch.manual_seed(11)
    rarely, stream = Rarely(drawing), SampleStream(30, seed=3)
    fetcher, always = Fetcher(rarely), Fetcher(Rarely(drawing))
    always._draws = True  # the twin: every sample is seeded
    start = 0
    for size in sizes:
        keys = stream.take(start, size)
        for one, other in zip(fetcher.fetch(keys), always.fetch(keys), strict=True):
            assert torch.equal(one, other)
        start += size
    seen = {int(index) for index in stream.take(0, start).index}
    # The first sample is read under two seeds.
    assert rarely.seeds[:2] == [0, 1]
    assert (set(rarely.seeds[2:]) == {11}) == (not seen & drawing.keys())
    assert torch.initial_seed() == 11


class OwnGenerator(Rarely):
    """It draws nothing from the process's generators, and yet depends on their seed."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(np.random.default_rng(torch.initial_seed()).random())


class Forked(Rarely):
    def __getitem__(self, index: int) -> tuple[int, float]:
        with torch.random.fork_rng():
            return index, float(torch.rand(()))


@pytest.mark.parametrize("dataset", [OwnGenerator, Forked])
def test_samples_that_leave_no_trace_of_their_draws_are_seeded_too(dataset: Any) -> None:
    keys = SampleStream(30, seed=3).take(0, 12)
    whole = Fetcher(dataset({})).fetch(keys)
    assert len(set(whole[1].tolist())) == 12
    always = Fetcher(dataset({}))
    always._draws = True
    assert torch.equal(whole[1], always.fetch(keys)[1])


def test_a_collate_function_that_draws_is_seeded_too() -> None:
    def masked(samples: list[Any]) -> Tensor:
        return torch.rand(len(samples))

    keys = SampleStream(30, seed=3).take(0, 6)
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        drawn.append(Fetcher(Rarely({}), masked).fetch(keys))
    assert torch.equal(*drawn)


def test_data_is_read_in_order_once_for_evaluation() -> None:
    data = TensorDataset(torch.arange(10))
    fetched = [batch[0].tolist() for batch in batches(Fetcher(data), in_order(10, 4, 0), 0)]
    assert fetched == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=25),
    width=st.sampled_from([1, 3, 5000]),
    chosen=st.booleans(),
)
def test_micro_batches_indexed_together_are_those_indexed_one_by_one(
    sizes: list[int], width: int, chosen: bool
) -> None:
    """Also where one exceeds what is indexed at once (600 kB in 30 samples of the widest), and in a subset."""
    tensors = TensorDataset(torch.arange(31.0 * width).reshape(31, width), torch.arange(31))
    dataset: Dataset[Any] = Subset(tensors, list(range(30, -1, -1))) if chosen else tensors
    stream, fetcher = SampleStream(31, seed=3), Fetcher(dataset)
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    micro_batches = [stream.take(start, size) for start, size in zip(starts, sizes, strict=True)]
    together = list(fetcher.fetch_each(iter(micro_batches)))
    assert [len(labels) for _, labels in together] == sizes
    for (values, labels), keys in zip(together, micro_batches, strict=True):
        expected = fetcher.fetch(keys)
        assert torch.equal(values, expected[0]) and torch.equal(labels, expected[1])


@given(st.lists(st.integers(1, 30), max_size=25), st.integers(1, 60))
def test_groups_of_micro_batches_are_as_large_as_they_may_be(sizes: list[int], most: int) -> None:
    groups = [
        [len(keys) for keys in group]
        for group in _grouped((in_order(size, size, 0)[0] for size in sizes), most)
    ]
    assert [size for group in groups for size in group] == sizes
    assert all(sum(group) <= most or len(group) == 1 for group in groups)
    assert all(sum(group) + following[0] > most for group, following in pairwise(groups))


def test_a_batch_may_be_changed_in_place() -> None:
    """With what has a graph too: batches that are indexed together share no version and no graph."""
    weight = torch.tensor(2.0, requires_grad=True)
    for values, labels in Fetcher(TensorDataset(torch.ones(12, 2), torch.arange(12))).fetch_each(
        in_order(12, 4, 0)
    ):
        values *= weight
        values.sum().backward()
        labels.add_(1)
        assert values.tolist() == [[2.0, 2.0]] * 4
    assert weight.grad == 24


def test_a_collate_function_of_ones_own_gets_its_samples_one_by_one() -> None:
    data = TensorDataset(torch.arange(10.0))
    fetched = Fetcher(data, collate=lambda samples: {"x": torch.stack([x for (x,) in samples])}).fetch(
        in_order(10, 4, 0)[1]
    )
    assert fetched["x"].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_batches_of_any_shape_move_to_the_device() -> None:
    batch = {"a": torch.ones(2), "b": [torch.zeros(1), ("text", None, 3)]}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"].device.type == moved["b"][0].device.type == "meta"
    assert moved["b"][1] == ("text", None, 3)


class Pair(NamedTuple):
    images: Tensor
    names: Any


def test_a_named_tuple_stays_one_and_tensors_keep_their_layout() -> None:
    images, names = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), [torch.ones(2, 3)]
    moved = to_device(Pair(images, names), torch.device("meta"))
    assert isinstance(moved, Pair)
    assert moved.images.is_contiguous(memory_format=torch.channels_last)
    assert moved.names[0].is_contiguous()


@given(
    st.lists(st.integers(0, 29), min_size=1, max_size=40),
    st.lists(st.integers(0, 19), min_size=1, max_size=20),
)
def test_a_subset_of_tensors_is_indexed_as_it_would_be_read_one_by_one(
    inner: list[int], outer: list[int]
) -> None:
    """Indices of indices, repeated and in any order: the same batch as sample by sample."""
    tensors = TensorDataset(torch.arange(60.0).reshape(30, 2), torch.arange(30))
    subset: Subset[Any] = Subset(Subset(tensors, inner), [place % len(inner) for place in outer])
    fetcher = Fetcher(subset)
    assert fetcher.indexed
    keys = in_order(len(subset), len(subset), 0)[0]
    values, labels = fetcher.fetch(keys)
    one_by_one = [subset[index] for index in range(len(subset))]
    assert torch.equal(values, torch.stack([value for value, _ in one_by_one]))
    assert labels.tolist() == [int(label) for _, label in one_by_one]
    # Indices of one byte are places too, though to torch they would be a mask.
    small = Fetcher(Subset(tensors, np.array(inner, dtype=np.uint8))).fetch(
        in_order(len(inner), len(inner), 0)[0]
    )  # type: ignore[arg-type]
    assert small[1].tolist() == inner


def test_leaves_are_equal_where_their_kind_shape_and_every_value_are() -> None:
    leaves = [
        torch.zeros(2),
        torch.zeros(2).double(),
        torch.zeros(1),
        torch.ones(2),
        np.zeros(2),
        np.ones(2),
        0,
        0.0,
        "0",
        None,
    ]
    for (place, leaf), (other_place, other) in product(enumerate(leaves), enumerate(copy.deepcopy(leaves))):
        assert _equal(leaf, other) is (place == other_place)


def test_validation_on_the_training_data_is_seen() -> None:
    tensors = TensorDataset(torch.randn(20, 3), torch.arange(20))
    copied = TensorDataset(*(tensor.clone() for tensor in tensors.tensors))
    train = Fetcher(Subset(tensors, range(10)))
    assert train.same_data(Fetcher(Subset(tensors, list(range(10)))))
    assert not train.same_data(Fetcher(Subset(tensors, range(10, 20))))
    assert not train.same_data(Fetcher(tensors)) and not Fetcher(tensors).same_data(train)
    assert Fetcher(tensors).same_data(Fetcher(TensorDataset(*tensors.tensors)))
    assert not Fetcher(tensors).same_data(Fetcher(copied))
    rarely = Rarely({})
    assert not Fetcher(rarely).same_data(train) and not train.same_data(Fetcher(rarely))
    assert Fetcher(rarely).same_data(Fetcher(rarely)) and not Fetcher(rarely).same_data(Fetcher(Rarely({})))


def test_a_dataset_that_lives_on_a_device_gives_the_same_batches() -> None:
    """A copy on the CPU stands in for the GPU's."""
    tensors = TensorDataset(torch.randn(20, 3), torch.arange(20))
    here, there = Fetcher(tensors), Fetcher(Subset(tensors, list(range(19, -1, -1))))
    assert (here.nbytes, there.nbytes) == (20 * 3 * 4 + 20 * 8,) * 2
    before = there.fetch(in_order(20, 7, 0)[1])
    there.move_to(torch.device("cpu"))
    for one, other in zip(before, there.fetch(in_order(20, 7, 0)[1]), strict=True):
        assert torch.equal(one, other)
    assert Fetcher([1, 2, 3]).nbytes is None  # type: ignore[arg-type]


class _Moves:
    """A dataset that can live on a device, such as images in one tensor."""

    nbytes = 8

    def __init__(self, place: str = "disk") -> None:
        self.place = place

    def __len__(self) -> int:
        return 2

    def fetch(self, keys: SampleKeys) -> Any:
        return self.place, torch.from_numpy(keys.index)

    def on(self, device: torch.device) -> _Moves:
        return _Moves(device.type)


def test_validation_on_the_training_data_is_seen_wherever_they_live() -> None:
    both = _Moves()
    train, validation, other = (Fetcher(data) for data in (both, both, _Moves()))  # type: ignore[arg-type]
    for fetcher in (train, validation):
        assert fetcher.fetch(in_order(2, 2, 0)[0])[0] == "disk"
        fetcher.move_to(torch.device("cpu"))
        assert fetcher.fetch(in_order(2, 2, 0)[0])[0] == "cpu"
    assert train.same_data(validation) and not train.same_data(other)


@given(st.lists(st.integers(), max_size=30), st.integers(1, 4))
def test_values_made_ahead_are_the_same(values: list[int], count: int) -> None:
    assert list(ahead(iter(values), count)) == values


def test_what_is_made_ahead_is_little_and_ends_with_its_reader() -> None:
    made: list[int] = []

    def endless() -> Iterator[int]:
        while True:
            made.append(len(made))
            yield made[-1]

    values = ahead(endless(), 2)
    assert [next(values), next(values)] == [0, 1]
    time.sleep(0.3)
    assert len(made) <= 6
    values.close()  # type: ignore[attr-defined]  # a generator
    # It has waited for what makes them.
    assert "bsearch-batches" not in {thread.name for thread in threading.enumerate()}


def test_an_error_made_ahead_is_raised_after_what_came_before_it() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise RuntimeError("no third value")

    values = ahead(failing())
    assert next(values) == 1
    with pytest.raises(RuntimeError, match="no third value"):
        next(values)
