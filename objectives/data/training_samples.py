"""A training's data in the order in which it trains on them: shuffled epochs of map-style data, or a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...spaces.plan import BatchPlan
from ...spaces.trial import Parameter, TrialSetup
from ..parallel.data_parallel import Ranks
from .batches import Fetcher, Loader, SampleKeys, SampleStream, batches
from .stream import InOrder, TrainingStream, is_stream

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from ..task import Data

# Draws whose units are counted at a time.
_COUNTED_DRAWS = 1 << 20


class TrainingSamples:
    """What a training of ours has of its data; a base class.

    Attributes:
        live: reads the training data where they are a stream; None otherwise.
        stream: the order of what can be fetched by index; of a stream its first samples, over and over.
        train_fetcher: fetches these.
    """

    setup: TrialSetup
    ranks: Ranks
    data: Data
    live: TrainingStream | None = None
    stream: SampleStream
    train_fetcher: Fetcher

    def open_data(self, data: Data) -> None:
        """Begin with these data."""
        self.data, setup = data, self.setup
        train: Any = data.train
        self._counted = 0, 0  # samples of the stream whose units were counted, and these
        if is_stream(train):
            collate = data.train_collate or data.collate
            keeps_states = setup.checkpoint is not None
            self.live = TrainingStream(train, data.training_set, setup.seed, collate, keeps_states)
            train = self.live.first  # all that can be fetched by index
            self.stream = InOrder(len(train), setup.seed)
        else:
            self.stream = (SampleStream if data.shuffle else InOrder)(len(train), setup.seed, data.weights)  # type: ignore[arg-type]
        self.train_fetcher = self.fetcher(train, data.train_collate)

    def fetcher(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None = None) -> Fetcher:
        """Fetches samples of a dataset, collated by this function or that of the data."""
        collate = collate or self.data.collate
        return Fetcher(dataset) if collate is None else Fetcher(dataset, collate)

    def micro_batches_of(
        self, plans: Iterable[BatchPlan], position: int, workers: int, *, pin_memory: bool = False
    ) -> Loader:
        """This device's micro-batches for steps with these plans, from a position in training."""
        if self.live is not None:
            return self.live.loader(plans, position, workers, pin_memory, self.ranks)
        keys = self.stream.micro_batches(plans, position, self.ranks.rank)
        return Loader(keys, lambda noted: batches(self.train_fetcher, noted, workers, pin_memory))

    def longest(self, count: int) -> SampleKeys:
        """Samples for a batch that takes the most memory: the longest, or the stream's first where lengths are unknown."""
        keys = self.stream.take(0, count)
        if self.data.lengths is None:
            return keys
        order = np.argsort(-np.asarray(self.data.lengths), kind="stable")
        if self.data.weights is not None:
            order = order[np.asarray(self.data.weights)[order] > 0]  # the others are never drawn
        return replace(keys, index=order[np.arange(count) % len(order)])

    def _units(self, seen: int) -> int:
        """Units, such as tokens, of the first `seen` samples of the stream."""
        lengths = np.asarray(self.data.lengths)
        if self.data.weights is not None:
            counted, units = self._counted if self._counted[0] <= seen else (0, 0)
            for start in range(counted, seen, _COUNTED_DRAWS):
                units += int(lengths[self.stream.take(start, min(_COUNTED_DRAWS, seen - start)).index].sum())
            self._counted = seen, units
            return units
        epochs, rest = divmod(seen, len(lengths))
        last = self.stream.take(epochs * len(lengths), rest).index
        return int(epochs * lengths.sum() + lengths[last].sum())

    def data_facts(self, seen: int, elapsed_s: float) -> dict[str, Parameter]:
        """Units seen, such as tokens, and how many in a second, where samples are not alike; what a stream says of itself."""
        facts: dict[str, Parameter] = {} if self.live is None else self.live.checked_facts(self.ranks)
        if self.data.lengths is None:
            return facts
        units = self._units(seen)
        return {
            **facts,
            self.data.unit: units,
            f"{self.data.unit}_per_s": units / elapsed_s if elapsed_s else 0.0,
        }
