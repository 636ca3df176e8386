"""Training data that come as a stream: read forward only, in the stream's own order, by any number of devices.

Position p of training is the p-th sample that the stream yields, pass after pass of `Data.samples` samples. Each pass reads a
copy of the stream as `Task.data` returned it, after `set_epoch(epoch)` where it has that, with the process's random generators
seeded by (seed, epoch): a pass depends on nothing that was read before, in this trial or another.
"""

from __future__ import annotations

import copy
import hashlib
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from ...spaces.errors import TaskError
from ...spaces.plan import BatchPlan
from ...spaces.trial import Parameter
from ..parallel.data_parallel import Ranks
from ..state.checkpoint import random_state, set_random_state
from .batches import (
    Fetcher,
    Loader,
    RandomState,
    SampleKeys,
    SampleStream,
    batches,
    leaves,
    mixed,
    seed_generators,
)

# Samples that are kept for tracing memory and for the examination.
_FIRST = 512
# Samples whose digests are kept, to recognise them after a resume and on other devices.
_RECOGNISED = 256
# Bytes of a tensor that a digest reads, spread over it: all of an image would take a millisecond.
_DIGESTED_BYTES = 4096
# Samples between two snapshots of a stream's own state.
_STATE_EVERY = 64
# The share of the time that snapshots may take.
_STATE_SHARE = 0.05
# Samples after a snapshot that have to be recognised before it is used.
_VERIFIED = 8

_CPU = torch.device("cpu")


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated, such as an `IterableDataset` of torch or of `datasets`."""
    if isinstance(dataset, IterableDataset):
        return True
    return (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__") and not hasattr(dataset, "fetch")
    )


class InOrder(SampleStream):
    """The endless stream of epochs in the order of the samples, of which a device may take every n-th."""

    def take(self, start: int, size: int, stride: int = 1) -> SampleKeys:
        epoch, index = np.divmod(start + stride * np.arange(size), self.samples)
        return SampleKeys(index, epoch, self.seed)


@dataclass
class Read:
    """What is known of the samples that were read last.

    Args:
        digests: by the samples' positions in training; of at most `_RECOGNISED` samples.
        states: of the stream and its random generators, with the position of the sample that comes next.
        more: whether a pass of the stream had more samples than stated.
        skipped: samples that were read only to arrive at a position.
    """

    digests: dict[int, int] = field(default_factory=dict)
    states: list[tuple[int, bytes]] = field(default_factory=list)
    more: bool = False
    skipped: int = 0

    def add(self, later: Read) -> None:
        for number, digest in later.digests.items():
            self.add_digest(number, digest)
        # States are at least `_STATE_EVERY` samples apart, so one of two is old enough to be verified.
        self.states = [*self.states, *later.states][-2:]
        self.more |= later.more
        self.skipped += later.skipped

    def add_digest(self, number: int, digest: int) -> None:
        self.digests[number] = digest
        if len(self.digests) > _RECOGNISED:
            del self.digests[next(iter(self.digests))]

    def before(self, position: int) -> Read:
        """The part of it that precedes a position."""
        digests = {number: digest for number, digest in self.digests.items() if number < position}
        states = [
            state for state in self.states if sum(number >= state[0] for number in digests) >= _VERIFIED
        ]
        return Read(digests, states, self.more)

    def to_dict(self) -> dict[str, Any]:
        """As values that a checkpoint can hold."""
        states = [
            [number, torch.frombuffer(bytearray(state), dtype=torch.uint8)] for number, state in self.states
        ]
        return {"digests": self.digests, "states": states, "more": self.more}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Read:
        states = [(number, state.numpy().tobytes()) for number, state in values["states"]]
        return cls(dict(values["digests"]), states, values["more"])


class StreamReader:
    """Reads a stream's samples in order; the random generators that it draws from are its own.

    Args:
        start: position in training of the first sample.
        known: what was read before it, from where to resume and by which samples are verified.
        keeps_states: whether to take the stream's own states, for a later reader.
    """

    def __init__(
        self,
        stream: Any,
        samples: int,
        seed: int,
        start: int = 0,
        known: Read | None = None,
        keeps_states: bool = False,
    ) -> None:
        self._source, self._samples, self._seed, self._start = stream, samples, seed, start
        self._known = known or Read()
        self._keeps_states = keeps_states
        self._state_due_s = 0.0
        self._stream: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._random: RandomState | None = None  # the stream's; None before the first sample
        self._number = start - start % samples
        self._read = Read()

    def read(self, numbers: Sequence[int], collated: Callable[[list[Any]], Any] = list) -> Any:
        """The samples at ascending positions, collated; those in between are read over.

        Args:
            collated: may seed the process's generators, which are restored after it.

        Raises:
            TaskError: the stream ended early, or a sample is another than it was before.
        """
        process = RandomState.now()
        try:
            if self._random is None:
                self._resume()
            else:
                self._random.restore()
            samples = []
            for number in numbers:
                while self._number < number:
                    self._next()
                samples.append(self._next())
            self._random = RandomState.now()
            return collated(samples)
        finally:
            process.restore()

    def taken(self) -> Read:
        """What has been read since this was asked last."""
        read, self._read = self._read, Read()
        return read

    def _resume(self) -> None:
        """Arrive at the start: by the stream's own state if that brings back the samples, else from the pass's beginning."""
        first = self._number
        for number, state in reversed(self._known.states):
            if first < number < self._start and self._resumed_from(number, state):
                return
        self._number = first
        self._skip_to_start()

    def _resumed_from(self, number: int, content: bytes) -> bool:
        try:
            saved = io.BytesIO(content)
            state = torch.load(saved, weights_only=True)
            self._begin_pass(number // self._samples, state["stream"])
            set_random_state(state["random"], _CPU)
            self._number = number
            self._skip_to_start()
        except Exception:  # skipping samples brings them back, or tells what is wrong
            self._read = Read()
            return False
        return True

    def _skip_to_start(self) -> None:
        number = self._number
        while self._number < self._start:
            self._next()
        self._read.skipped = self._start - number

    def _begin_pass(self, epoch: int, state: Any = None) -> None:
        try:
            self._stream = copy.deepcopy(self._source)
        except Exception as error:
            raise TaskError(
                "Task.data: train: expected a stream that can be copied, because each pass reads a copy of it; got "
                f"{type(self._source).__name__}, whose copy.deepcopy failed: {type(error).__name__}: {error}. Open files and "
                "connections in __iter__."
            ) from error
        seed_generators(int(mixed(self._seed, epoch)))
        if callable(getattr(self._stream, "set_epoch", None)):
            self._stream.set_epoch(epoch)
        if state is not None:
            self._stream.load_state_dict(state)
        self._iterator = iter(self._stream)

    def _next(self) -> Any:
        number, samples = self._number, self._samples
        epoch, place = divmod(number, samples)
        if place == 0:
            self._begin_pass(epoch)
        try:
            sample = next(self._iterator)
        except StopIteration:
            raise TaskError(
                f"Task.data: samples: expected a pass of {samples} samples, as stated; the stream ended after {place} samples "
                f"of pass {epoch + 1}. State how many it yields."
            ) from None
        self._number += 1
        if number >= self._start - _RECOGNISED:
            digest = digest_of(sample)
            if number < self._start and self._known.digests.get(number, digest) != digest:
                raise TaskError(
                    "Task.data: train: expected the stream to yield the same samples in the same order when it is read again, "
                    f"to resume at sample {self._start}; got another sample {number}, sample {place} of pass {epoch + 1}, "
                    "counted from 0. Seed what shuffles it, such as in set_epoch, or by torch, np.random or Python's random."
                )
            self._read.add_digest(number, digest)
        if place + 1 == samples:
            # Reading on also lets a stream finish its pass.
            self._read.more |= next(self._iterator, self) is not self
        elif (
            self._keeps_states and self._number % _STATE_EVERY == 0 and time.monotonic() >= self._state_due_s
        ):
            self._take_state()
        return sample

    def _take_state(self) -> None:
        started, buffer = time.monotonic(), io.BytesIO()
        try:
            torch.save({"stream": self._stream.state_dict(), "random": random_state(_CPU)}, buffer)
        except Exception:  # a resumed training skips samples instead
            self._keeps_states = False
            return
        self._read.states = [*self._read.states, (self._number, buffer.getvalue())][-2:]
        now = time.monotonic()
        self._state_due_s = now + (now - started) / _STATE_SHARE


class StreamFetcher(Fetcher):
    """Fetches successive micro-batches of a stream, each with what is known of its samples and, if reading failed, why."""

    def __init__(
        self, stream: Any, reader: StreamReader, samples: int, collate: Callable[[list[Any]], Any]
    ) -> None:
        super().__init__(stream, collate)
        self._reader, self._samples = reader, samples

    def fetch(self, keys: SampleKeys) -> tuple[Any, Read, str]:
        def collated(samples: list[Any]) -> Any:
            # As for map-style data, whose collating follows the seeding of the last sample.
            seed_generators(int(mixed(keys.seed, keys.epoch[-1], keys.index[-1])))
            return self._collated(samples)

        try:
            batch = self._reader.read((keys.epoch * self._samples + keys.index).tolist(), collated)
        except TaskError as error:
            return None, Read(), str(error)  # raised where no loader process wraps it
        return batch, self._reader.taken(), ""


class FirstSamples(Dataset[Any]):
    """A stream's first samples as a map-style dataset, read when they are first asked for."""

    def __init__(self, stream: Any, samples: int, seed: int) -> None:
        self._given = stream, samples, seed
        self._reader, self._size, self._samples = (
            StreamReader(*self._given),
            min(samples, _FIRST),
            list[Any](),
        )

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        if index >= len(self._samples):
            self._samples += self._reader.read(range(len(self._samples), index + 1))
        return copy.deepcopy(self._samples[index])  # collating may change it

    def read_again(self) -> FirstSamples:
        """The same, read from the stream once more."""
        return FirstSamples(*self._given)


class TrainingStream:
    """A trial's training data where they are a stream.

    Args:
        keeps_states: whether the stream's own states are taken, for a checkpoint.
    """

    def __init__(
        self,
        stream: Any,
        samples: int,
        seed: int,
        collate: Callable[[list[Any]], Any] | None,
        keeps_states: bool,
    ) -> None:
        self.first = FirstSamples(stream, samples, seed)
        self._stream, self._order, self._keeps_states = stream, InOrder(samples, seed), keeps_states
        self._collate = collate or default_collate
        self._read = Read()

    def loader(
        self, plans: Iterable[BatchPlan], position: int, workers: int, pin_memory: bool, ranks: Ranks
    ) -> Loader:
        """This device's micro-batches for steps with these plans, from a position in training.

        Every device reads all samples and keeps every n-th.
        """
        samples, seed = self._order.samples, self._order.seed
        self._read = known = self._read.before(position)
        reader = StreamReader(self._stream, samples, seed, position, known, self._keeps_states)
        fetcher = StreamFetcher(self._stream, reader, samples, self._collate)

        def load(keys: Iterator[SampleKeys]) -> Iterator[Any]:
            # Several loader processes would each read the whole stream.
            loaded = self._noted(batches(fetcher, keys, min(workers, 1), pin_memory), known, ranks)
            # A resumed training arrives at the position before steps are timed.
            return chain(list(islice(loaded, 1)), loaded) if position else loaded

        return Loader(self._keys(plans, position, ranks), load)

    def _keys(self, plans: Iterable[BatchPlan], position: int, ranks: Ranks) -> Iterator[SampleKeys]:
        for plan in plans:
            start = position + ranks.rank
            for samples in plan.micro_batches(ranks.rank):
                if samples:
                    yield self._order.take(start, samples, ranks.count)
                    start += samples * ranks.count
            position += plan.effective_batch

    def _noted(self, fetched: Iterator[Any], read: Read, ranks: Ranks) -> Iterator[Any]:
        for number, (batch, later, error) in enumerate(fetched):
            if error:
                raise TaskError(error)
            read.add(later)
            if number == 0:
                _check_alike(read, ranks)
            yield batch

    def checked_facts(self, ranks: Ranks) -> dict[str, Parameter]:
        """What is known of the samples so far. All ranks must call it.

        Raises:
            TaskError: ranks have read different samples.
        """
        _check_alike(self._read, ranks)
        facts: dict[str, Parameter] = {}
        if self._read.more:
            facts["stream"] = (
                f"yields more than the {self._order.samples} samples stated; each pass ended there"
            )
        if self._read.skipped:
            facts["samples_skipped"] = self._read.skipped
        return facts

    def state(self, position: int) -> dict[str, Any]:
        """What a checkpoint at a position keeps."""
        return self._read.before(position).to_dict()

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._read = Read.from_dict(state)


def _check_alike(read: Read, ranks: Ranks) -> None:
    if ranks.count == 1:
        return
    # States are rank 0's own affair.
    first, *others = ranks.all_gathered({"digests": [read.digests]})["digests"]
    for rank, other in enumerate(others, start=1):
        number = next(
            (number for number, digest in first.items() if other.get(number, digest) != digest), None
        )
        if number is not None:
            raise TaskError(
                "Task.data: train: expected the stream to yield the same samples on every device, which keeps its own share; "
                f"devices 0 and {rank} read different samples {number}, counted from 0. Leave out what splits the stream by "
                "rank or node, and seed what shuffles it."
            )


def digest_of(sample: Any) -> int:
    """A number that differs between different samples, as far as `_DIGESTED_BYTES` bytes of each of their parts tell.

    >>> digest_of([torch.zeros(3), "a"]) == digest_of([torch.zeros(3), "a"]) != digest_of([torch.zeros(3), "b"])
    True
    """
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves(sample):
        kind: Any = type(leaf).__qualname__  # of other objects that alone: their repr may be an address
        content: Any = b""
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
            kind = leaf.dtype, *leaf.shape
            content = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        elif isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufcSUmM":
            kind = leaf.dtype, *leaf.shape
            content = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        elif isinstance(leaf, str):
            content = leaf.encode(errors="surrogatepass")
        elif isinstance(leaf, bytes | bytearray):
            content = leaf
        elif isinstance(leaf, bool | int | float | complex):
            kind = leaf
        elif hasattr(leaf, "tobytes") and hasattr(leaf, "size"):  # an image of Pillow
            kind, content = leaf.size, leaf.tobytes()
        size = len(content)
        digest.update(f"{kind!r} {size} ".encode())
        if size > 2 * _DIGESTED_BYTES:
            content = bytes(content[:: size // _DIGESTED_BYTES])
        digest.update(content)
    return int.from_bytes(digest.digest())
