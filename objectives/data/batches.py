"""Which samples a step sees, and how they are fetched: exactly, and the same for any number of workers.

The training data is one endless stream of shuffled epochs. Position p of the stream is sample
`order(p // n)[p % n]`; a step takes the next B positions, even across the end of an epoch. Shuffling depends on (seed,
epoch), and a sample's own randomness on (seed, epoch, index), never on the process or micro-batch that fetches it. With
weights, position p is a draw with replacement that depends on (seed, weights, p) alone, and p takes the place of the epoch.
"""

from __future__ import annotations

import copy
import operator
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from queue import Empty, Full, Queue
from types import SimpleNamespace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from ...spaces.errors import TaskError
from ...spaces.plan import BatchPlan
from ..machine import accelerator

# Micro-batches are indexed together up to this many bytes, half of a small cache: of steps of 1.3 ms, indexing each
# by itself took 4 % (docs/log.md).
_INDEXED_BYTES = 1 << 19
# And up to this many samples: a longer index may not be copied to a GPU without waiting for it.
_INDEXED_SAMPLES = 8000

# Keeps the numbers that draw samples apart from those of their augmentation: no dataset is that large.
_DRAW = 1 << 63
# Samples that are drawn at a time: drawn for each micro-batch by themselves, 32 took 200 us.
_DRAWN = 4096

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mixed(*numbers: int | np.ndarray) -> np.ndarray:
    """Hash integers to 64 well-mixed bits, elementwise: the finalizer of SplitMix64 over a running sum.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    state: Any = np.uint64(0)
    with np.errstate(over="ignore"):
        for number in numbers:
            state = (np.asarray(number).astype(np.uint64) ^ state) + _GOLDEN
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)


@dataclass(frozen=True, slots=True)
class SampleKeys:
    """The samples of one micro-batch: everything that determines their order and their randomness.

    Args:
        index: index in the dataset, (n,) int64.
        epoch: epoch that the sample belongs to, (n,) int64. Where samples are drawn by weights, the position in the stream
            instead, because one epoch may hold a sample several times: each draw has its own randomness.
        seed: the trial's seed.
    """

    index: np.ndarray
    epoch: np.ndarray
    seed: int

    def __len__(self) -> int:
        return len(self.index)

    def uniform(self, columns: int) -> Tensor:
        """Random numbers in [0, 1) for these samples, (n, columns) float32.

        The same sample in the same epoch gets the same numbers in any batch; drawn again by weights, it gets others.
        """
        bits = mixed(self.seed, self.epoch[:, None], self.index[:, None], np.arange(columns)[None, :])
        return torch.from_numpy((bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24))


@runtime_checkable
class BatchDataset(Protocol):
    """A dataset that fetches a whole micro-batch at once, with randomness drawn from `keys.uniform`."""

    def __len__(self) -> int: ...

    def fetch(self, keys: SampleKeys) -> Any: ...


@runtime_checkable
class MovableDataset(BatchDataset, Protocol):
    """A dataset that can live on a device, so that its batches are not copied there."""

    @property
    def nbytes(self) -> int: ...

    def on(self, device: torch.device) -> BatchDataset:
        """The same dataset with its samples on the device, which `fetch` then returns there."""


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(samples) that depends only on (seed, epoch), (samples,) int64."""
    generator = torch.Generator().manual_seed(int(mixed(seed, epoch)) >> 1)
    return torch.randperm(samples, generator=generator).numpy()


class SampleStream:
    """The endless stream of shuffled epochs, or of draws by weights; `take` works at any position.

    Args:
        weights: of the samples, (samples,) float64, checked by `sample_weights.checked_weights`: each position is a draw with
            replacement, with probability weight / sum. None: shuffled epochs.
    """

    def __init__(self, samples: int, seed: int, weights: np.ndarray | None = None) -> None:
        self.samples = samples
        self.seed = seed
        # Divided by the largest, so that the sum is neither infinite nor subnormal.
        self._cumulative = None if weights is None else np.cumsum(weights / weights.max())
        self._length = samples if weights is None else _DRAWN  # positions in a block
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of an epoch, or of a block of draws, in order; and of each its epoch, or its position in the stream."""
        known = self._blocks.get(block)
        if known is None:
            if self._cumulative is None:
                known = epoch_order(self.samples, self.seed, block), np.full(self.samples, block)
            else:
                positions = np.arange(block * _DRAWN, (block + 1) * _DRAWN)
                known = _drawn(self._cumulative, self.seed, positions), positions
            # A step can span several blocks; older ones are not needed again.
            self._blocks = {old: kept for old, kept in self._blocks.items() if old >= block - 1} | {
                block: known
            }
        return known

    def micro_batches(self, plans: Iterable[BatchPlan], position: int, rank: int) -> Iterator[SampleKeys]:
        """The samples of each of a rank's micro-batches in steps with these plans, which begin at a position."""
        for plan in plans:
            start = position + sum(plan.shares[:rank])
            for samples in plan.micro_batches(rank):
                if samples:
                    yield self.take(start, samples)
                    start += samples
            position += plan.effective_batch

    def take(self, start: int, size: int) -> SampleKeys:
        """The samples at stream positions start ... start + size - 1."""
        block, place = divmod(start, self._length)
        order, epochs = self._block(block)
        if place + size <= self._length:
            return SampleKeys(order[place : place + size], epochs[place : place + size], self.seed)
        parts = []
        while size:
            parts.append([of_block[place : place + size] for of_block in self._block(block)])
            block, place, size = block + 1, 0, size - len(parts[-1][0])
        index, epochs = (np.concatenate(part) for part in zip(*parts, strict=True))
        return SampleKeys(index, epochs, self.seed)


def _drawn(cumulative: np.ndarray, seed: int, positions: np.ndarray) -> np.ndarray:
    """The samples drawn at these positions: the inverse of the weights' distribution function, at a number of 53 random bits.

    Args:
        cumulative: sums of the weights, (samples,).
    """
    total = cumulative[-1]
    uniform = (mixed(seed, positions, _DRAW) >> np.uint64(11)) / float(1 << 53)
    # Sample i has the half-open interval [cumulative[i - 1], cumulative[i]), which is empty for a weight of 0. A product
    # that is rounded up to the sum would lie behind the last one.
    place = np.minimum(uniform * total, np.nextafter(total, 0.0))
    return np.asarray(np.searchsorted(cumulative, place, side="right"))


@dataclass(frozen=True, slots=True)
class RandomState:
    """The process's random generators: Python's, NumPy's, torch's, and that of a GPU."""

    python: Any
    numpy: Any
    torch: Tensor
    gpu: Tensor | None = None

    @classmethod
    def now(cls, device: Any = None) -> Self:
        """The state of the CPU's generators, and of a GPU's where the torch device `device` is one."""
        # A step that is traced for a GPU has none, nor draws.
        on_gpu = device is not None and accelerator.is_gpu(device) and detect_fake_mode() is None
        gpu = accelerator.random_state(device) if on_gpu else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.gpu is not None:
            accelerator.set_random_state(self.gpu)

    def unchanged(self) -> bool:
        """Whether no random number has been drawn since."""
        numpy: Any = np.random.get_state()
        return (
            torch.equal(self.torch, torch.get_rng_state())
            and (self.gpu is None or torch.equal(self.gpu, accelerator.random_state()))
            and np.array_equal(self.numpy[1], numpy[1])
            and self.numpy[2:] == numpy[2:]
            and self.python == random.getstate()
        )


class Fetcher(Dataset[Any]):
    """Fetches the samples of a micro-batch and collates them, in the trial's process or in loader workers.

    Attributes:
        indexed: whether a micro-batch is fetched at once and draws no global random numbers, so that a thread may fetch it.
        nbytes: what the dataset would take on a device; None where it cannot live there.
    """

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset = self._source = dataset
        self.collate = collate
        # Checked once: isinstance of a protocol takes 15 us.
        self._fetches_batches = isinstance(dataset, BatchDataset)
        self._tensors, self._places = _tensors_of(dataset) if collate is default_collate else (None, None)
        self.indexed = self._fetches_batches or self._tensors is not None
        # Whether samples depend on random numbers; None before the first. Where they do not, they are not seeded, which takes
        # 20 us for each. A micro-batch in which a sample draws after all is read once more.
        self._draws: bool | None = None
        self.nbytes: int | None = dataset.nbytes if isinstance(dataset, MovableDataset) else None
        if self._tensors is not None:
            self.nbytes = sum(tensor.nbytes for tensor in self._tensors)

    def same_data(self, other: Fetcher) -> bool:
        """Whether both fetch the same samples, as far as that can be seen without reading them."""
        (tensors, places), (others, other_places) = (
            _tensors_of(fetcher._source) for fetcher in (self, other)
        )
        if tensors is None or others is None:
            return self._source is other._source
        if len(tensors) != len(others) or not all(map(operator.is_, tensors, others)):
            return False
        if places is None or other_places is None:
            return places is other_places
        return np.array_equal(places, other_places)

    def move_to(self, device: torch.device) -> None:
        """Keep the dataset on a device: batches are indexed there."""
        if self._tensors is not None:
            self._tensors = tuple(tensor.to(device) for tensor in self._tensors)
        else:
            self.dataset = self.dataset.on(device)  # type: ignore[attr-defined]  # a MovableDataset

    def __getitems__(self, keys: SampleKeys) -> Any:
        return self.fetch(keys)

    def fetch_each(self, micro_batches: Iterable[SampleKeys]) -> Iterator[Any]:
        """The batches of `micro_batches`, in order; small ones of tensors are indexed several at a time."""
        if self._tensors is None:
            yield from map(self.fetch, micro_batches)
            return
        most = min(
            _INDEXED_BYTES // max(sum(tensor[:1].nbytes for tensor in self._tensors), 1), _INDEXED_SAMPLES
        )
        for group in _grouped(micro_batches, most):
            if len(group) == 1:
                # Nothing here holds it while it is used, so the next one takes the same memory.
                yield self._indexed(group)
                continue
            # Not views, so that a task may change a batch in place.
            parts = [
                torch.unsafe_split_with_sizes(tensor, [len(keys) for keys in group])
                for tensor in self._indexed(group)
            ]
            yield from map(list, zip(*parts, strict=True))

    def _indexed(self, group: Sequence[SampleKeys]) -> list[Tensor]:
        """The samples of several micro-batches, one after another, of a dataset of tensors."""
        tensors: Any = self._tensors
        chosen = group[0].index if len(group) == 1 else np.concatenate([keys.index for keys in group])
        index = torch.from_numpy(chosen if self._places is None else self._places[chosen])
        if accelerator.is_gpu(tensors[0].device):
            index = index.to(tensors[0].device, non_blocking=True)
        return [tensor[index] for tensor in tensors]

    def fetch(self, keys: SampleKeys) -> Any:
        if self._fetches_batches:
            return self.dataset.fetch(keys)  # type: ignore[attr-defined]  # a BatchDataset
        if self._tensors is not None:
            return self._indexed([keys])
        state = RandomState.now()
        try:
            if self._draws is None:
                self._draws = self._depends_on_seed(int(keys.index[0]))
                state.restore()
            if not self._draws:
                batch = self._collated([self.dataset[index] for index in keys.index.tolist()])
                self._draws = not state.unchanged()
                if not self._draws:
                    return batch
            seeds = mixed(keys.seed, keys.epoch, keys.index).tolist()
            return self._collated(
                [self._seeded(index, seed) for index, seed in zip(keys.index.tolist(), seeds, strict=True)]
            )
        finally:
            if self._draws:
                state.restore()  # fetching must not affect the model's dropout

    def _collated(self, samples: list[Any]) -> Any:
        try:
            return self.collate(samples)
        except (RuntimeError, TypeError) as error:
            if self.collate is not default_collate:
                raise
            raise TaskError(
                "Task.data: expected samples that torch's default_collate can stack: equal shapes and supported types. Pass "
                f"Data(collate=...), a function that turns a list of samples into a batch. Torch says: {error}"
            ) from error

    def _depends_on_seed(self, index: int) -> bool:
        """Whether a sample differs between two seeds, even where it draws nothing, as with a generator of its own."""
        first, second = (list(leaves(self._seeded(index, seed))) for seed in (1, 2))
        return len(first) != len(second) or not all(map(_equal, first, second))

    def _seeded(self, index: int, sample_seed: int) -> Any:
        seed_generators(sample_seed)
        return self.dataset[index]


def seed_generators(seed: int) -> None:
    """Seed the process's generators on the CPU with 64 bits."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 1)


def _grouped(micro_batches: Iterable[SampleKeys], most: int) -> Iterator[list[SampleKeys]]:
    """The micro-batches in groups of at most `most` samples; a larger one is a group of its own."""
    group: list[SampleKeys] = []
    samples = 0
    for keys in micro_batches:
        if group and samples + len(keys) > most:
            yield group
            group, samples = [], 0
        group.append(keys)
        samples += len(keys)
    if group:
        yield group


def _equal(leaf: Any, other: Any) -> bool:
    """Whether two leaves of a sample are certainly equal."""
    if isinstance(leaf, Tensor) and isinstance(other, Tensor):
        return leaf.dtype == other.dtype and torch.equal(leaf, other)
    try:
        return type(leaf) is type(other) and bool(np.all(leaf == other))
    except Exception:
        return False


def _tensors_of(dataset: Dataset[Any]) -> tuple[tuple[Tensor, ...] | None, np.ndarray | None]:
    """The tensors that hold a dataset, and each sample's place in them, None where that is its index; or two Nones."""
    if type(dataset) is TensorDataset:
        return dataset.tensors, None
    if type(dataset) is Subset:
        tensors, places = _tensors_of(dataset.dataset)
        chosen = np.asarray(dataset.indices, dtype=np.int64)
        return tensors, chosen if places is None else places[chosen]
    return None, None


def batches(
    fetcher: Fetcher, micro_batches: Iterable[SampleKeys], workers: int, pin_memory: bool = False
) -> Iterator[Any]:
    """Batches in the order of `micro_batches`, fetched here or prefetched by `workers` processes.

    Without workers, pinned batches are fetched by a thread, some ahead, if that needs no random state of the process.
    """
    if workers == 0:
        fetched = fetcher.fetch_each(micro_batches)
        yield from ahead(map(pinned, fetched)) if pin_memory and fetcher.indexed else fetched
        return
    loader: DataLoader[Any] = DataLoader(
        fetcher,
        batch_sampler=micro_batches,  # type: ignore[arg-type]  # one "batch of indices" is one SampleKeys, which __getitems__ takes
        num_workers=workers,
        collate_fn=_unchanged,
        pin_memory=pin_memory,
        # The default would draw from the global generator and affect the model's dropout.
        generator=torch.Generator(),
        # A rank's default would import the dataset's class anew, which a task's file does not allow.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
    )
    yield from loader


class Loader:
    """Micro-batches in the order of their plans, each asked for by its number of samples.

    Processes and threads fetch some ahead, so a plan that was decided anew meanwhile would get another's micro-batches.

    Args:
        keys: of each micro-batch.
        load: fetches the batches of such keys, in order.

    Attributes:
        waited_s: seconds in which batches were waited for.
        taken: samples so far.
    """

    def __init__(
        self, keys: Iterable[SampleKeys], load: Callable[[Iterator[SampleKeys]], Iterator[Any]]
    ) -> None:
        self._sizes: deque[int] = deque()
        self._batches = load(self._noted(keys))
        self.waited_s, self.taken = 0.0, 0

    def _noted(self, keys: Iterable[SampleKeys]) -> Iterator[SampleKeys]:
        for of_one in keys:
            self._sizes.append(len(of_one))
            yield of_one

    def take(self, samples: int) -> Any:
        """The next micro-batch.

        Raises:
            RuntimeError: it has another number of samples.
        """
        started = time.perf_counter()
        batch = next(self._batches)
        self.waited_s += time.perf_counter() - started
        if (got := self._sizes.popleft()) != samples:
            raise RuntimeError(f"expected a micro-batch of {samples} samples, as planned; got one of {got}")
        self.taken += samples
        return batch


# Seconds to wait for a thread that makes a last batch.
_JOINED_S = 10.0
# Batches that a thread makes beforehand.
AHEAD = 2


def ahead(values: Iterator[Any], count: int = AHEAD) -> Iterator[Any]:
    """The same values, up to `count` of them made ahead by a thread; its exceptions are raised here."""
    made: Queue[tuple[Any, BaseException | None]] = Queue(count)
    over = threading.Event()

    def put(value: Any, error: BaseException | None) -> None:
        while not over.is_set():
            with suppress(Full):
                made.put((value, error), timeout=0.1)
                return

    def make() -> None:
        try:
            for value in values:
                put(value, None)
                if over.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:
            put(None, error)

    thread = threading.Thread(target=make, name="bsearch-batches", daemon=True)
    thread.start()
    try:
        while True:
            value, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield value
    finally:
        over.set()
        with suppress(Empty):
            while True:
                made.get_nowait()
        if thread is not threading.current_thread():
            thread.join(_JOINED_S)  # it holds what the values are made from


def pinned(batch: Any) -> Any:
    """The batch in page-locked memory, from which copies to a GPU do not wait; batches that already lie on it stay."""
    return with_tensors(
        batch, lambda tensor: tensor if accelerator.is_gpu(tensor.device) else tensor.pin_memory()
    )


def _unchanged(batch: Any) -> Any:
    return batch


def in_order(samples: int, batch: int, seed: int) -> Sequence[SampleKeys]:
    """Keys of all samples of a dataset in order, `batch` at a time."""
    index = np.arange(samples)
    return [
        SampleKeys(
            index[start : start + batch], np.zeros(len(index[start : start + batch]), dtype=np.int64), seed
        )
        for start in range(0, samples, batch)
    ]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on the device, in the containers that `with_tensors` knows."""
    return with_tensors(
        batch,
        lambda tensor: tensor.to(device, non_blocking=True),
        lambda other: other.to(device) if hasattr(other, "to") else other,
    )


def with_tensors(
    batch: Any, function: Callable[[Tensor], Tensor], otherwise: Callable[[Any], Any] = lambda other: other
) -> Any:
    """The batch with a function applied to each tensor, inside any nesting of tuples, lists, mappings, dataclasses, namespaces
    and packed sequences; the batch itself is not changed.

    Args:
        otherwise: applied to all other leaves.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, PackedSequence):
        data, batch_sizes, *indices = batch  # the sizes have to stay on the CPU
        return PackedSequence(
            function(data), batch_sizes, *(index if index is None else function(index) for index in indices)
        )

    def inside(value: Any) -> Any:
        return with_tensors(value, function, otherwise)

    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(inside, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(inside, batch))
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)  # keeps everything else, such as a defaultdict's factory
        for key, value in batch.items():
            changed[key] = inside(value)
        return changed
    if isinstance(batch, SimpleNamespace) or (is_dataclass(batch) and not isinstance(batch, type)):
        other: Any = copy.copy(batch)
        names = vars(batch) if isinstance(batch, SimpleNamespace) else [field.name for field in fields(batch)]
        for name in names:
            object.__setattr__(other, name, inside(getattr(batch, name)))
        return other
    return otherwise(batch)


def leaves(batch: Any) -> Iterator[Any]:
    """Everything in the batch's containers, in their order, packed sequences opened; see `with_tensors`."""
    if isinstance(batch, PackedSequence):
        yield from (part for part in batch if part is not None)
    elif isinstance(batch, list | tuple):
        yield from chain.from_iterable(map(leaves, batch))
    elif isinstance(batch, Mapping):
        yield from chain.from_iterable(map(leaves, batch.values()))
    elif isinstance(batch, SimpleNamespace):
        yield from leaves(vars(batch))
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from leaves([getattr(batch, field.name) for field in fields(batch)])
    else:
        yield batch
