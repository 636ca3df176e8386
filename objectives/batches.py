"""Which samples a step sees, and how they are fetched: exact, and the same whatever the workers.

The training data is one endless stream of shuffled epochs. Position p of the stream is sample
`order(p // n)[p % n]`; a step takes the next B positions even across an epoch's end. Shuffling hangs on (seed,
epoch) and a sample's own randomness on (seed, epoch, index), never on who fetches it or in which pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

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
    """The samples of one pass: everything their order and their randomness hang on.

    Args:
        index: place in the data set, (n,) int64.
        epoch: pass over the training set it belongs to, (n,) int64.
        seed: the trial's seed.
    """

    index: np.ndarray
    epoch: np.ndarray
    seed: int

    def __len__(self) -> int:
        return len(self.index)

    def uniform(self, columns: int) -> Tensor:
        """Random numbers in [0, 1) that belong to these samples, (n, columns) float32.

        The same sample in the same epoch gets the same numbers, whatever batch it is in.
        """
        bits = mixed(self.seed, self.epoch[:, None], self.index[:, None], np.arange(columns)[None, :])
        return torch.from_numpy((bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24))


@runtime_checkable
class BatchDataset(Protocol):
    """A data set that fetches a whole pass at once, its randomness drawn from `keys.uniform`."""

    def __len__(self) -> int: ...

    def fetch(self, keys: SampleKeys) -> Any: ...


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(samples) that hangs on (seed, epoch) alone, (samples,) int64."""
    generator = torch.Generator().manual_seed(int(mixed(seed, epoch)) >> 1)
    return torch.randperm(samples, generator=generator).numpy()


class SampleStream:
    """The endless stream of shuffled epochs; `take` may be called at any position."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self.seed = seed
        self._orders: dict[int, np.ndarray] = {}

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            # One step can reach over two epochs or more; older orders are never asked again.
            self._orders = {old: order for old, order in self._orders.items() if old >= epoch - 1}
            self._orders[epoch] = epoch_order(self.samples, self.seed, epoch)
        return self._orders[epoch]

    def take(self, start: int, size: int) -> SampleKeys:
        """The samples at stream positions start ... start + size - 1."""
        parts, epochs = [], []
        while size:
            epoch, place = divmod(start, self.samples)
            part = self._order(epoch)[place : place + size]
            parts.append(part)
            epochs.append(np.full(len(part), epoch))
            start, size = start + len(part), size - len(part)
        if len(parts) == 1:
            return SampleKeys(parts[0], epochs[0], self.seed)
        return SampleKeys(np.concatenate(parts), np.concatenate(epochs), self.seed)


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """Leave the process's generators as they were, so that fetching never moves the model's dropout."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class Fetcher(Dataset[Any]):
    """Fetches the samples of one pass and collates them; works in the trial's process and in loader workers."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset = dataset
        self.collate = collate
        self._whole = isinstance(dataset, BatchDataset)  # asked once: a protocol's question costs 15 us

    def __getitems__(self, keys: SampleKeys) -> Any:
        return self.fetch(keys)

    def fetch(self, keys: SampleKeys) -> Any:
        if self._whole:
            return self.dataset.fetch(keys)  # type: ignore[attr-defined]  # a BatchDataset
        if type(self.dataset) is TensorDataset and self.collate is default_collate:
            index = torch.from_numpy(keys.index)
            return [tensor[index] for tensor in self.dataset.tensors]
        with _kept_random_state():
            return self.collate([self._one(int(i), int(e), keys.seed) for i, e in zip(keys.index, keys.epoch, strict=True)])

    def _one(self, index: int, epoch: int, seed: int) -> Any:
        own = int(mixed(seed, epoch, index))
        random.seed(own)
        np.random.seed(own & 0xFFFFFFFF)
        torch.default_generator.manual_seed(own >> 1)
        return self.dataset[index]


def batches(fetcher: Fetcher, micro_batches: Iterable[SampleKeys], workers: int, pin_memory: bool = False) -> Iterator[Any]:
    """Batches in the order of `passes`, fetched here or by `workers` processes ahead of time."""
    if workers == 0:
        for keys in micro_batches:
            yield fetcher.fetch(keys)
        return
    loader: DataLoader[Any] = DataLoader(
        fetcher,
        batch_sampler=micro_batches,  # type: ignore[arg-type]  # one "batch of indices" is one SampleKeys, which __getitems__ takes
        num_workers=workers,
        collate_fn=_as_fetched,
        pin_memory=pin_memory,
        # Its own generator: the loader would draw from the global one and move the model's dropout.
        generator=torch.Generator(),
    )
    yield from loader


def _as_fetched(batch: Any) -> Any:
    return batch


def in_order(samples: int, batch: int, seed: int) -> Sequence[SampleKeys]:
    """Keys of a data set from first to last, `batch` at a time, each sample once."""
    index = np.arange(samples)
    return [
        SampleKeys(index[start : start + batch], np.zeros(len(index[start : start + batch]), dtype=np.int64), seed)
        for start in range(0, samples, batch)
    ]


def to_device(batch: Any, device: torch.device, images: torch.memory_format | None = None) -> Any:
    """The batch with every tensor in it on the device, whatever tuples, lists and dicts it is made of.

    Args:
        images: the layout that tensors of four dimensions get.
    """
    if isinstance(batch, Tensor):
        layout = images if images is not None and batch.dim() == 4 else torch.preserve_format
        return batch.to(device, non_blocking=True, memory_format=layout)
    if isinstance(batch, dict):
        return type(batch)({key: to_device(value, device, images) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, images) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device, images) for value in batch)
    return batch.to(device) if hasattr(batch, "to") else batch
