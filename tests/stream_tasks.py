"""Trainings whose data come as a stream, and the same samples in a list."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from bsearch.objectives.data.stream import InOrder
from bsearch.objectives.task import Data
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.trial import TrialSetup
from helpers import Net
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

SAMPLES = 600


class Rows(IterableDataset[Any]):
    """The samples of a list, as they lie there; each epoch begins elsewhere."""

    def __init__(self, samples: list[Any], yields: int | None = None) -> None:
        self.samples, self.yields, self.epoch = samples, len(samples) if yields is None else yields, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is None or worker.num_workers == 1
        for place in range(self.yields):
            yield self.at(place)

    def at(self, place: int) -> Any:
        return self.samples[(place + 7 * self.epoch) % len(self.samples)]


class Stateful(Rows):
    """Keeps its place; goes on from there whenever it is iterated, even where nobody wants that."""

    place = 0
    loaded: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.yields:
            self.place += 1
            yield self.at(self.place - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        self.loaded.append(self.place)


class Forgetful(Stateful):
    """Its state is not the whole truth, as where a shuffling buffer is not kept."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"place": state["place"] + 3})


class Drawing(Rows):
    """Draws from every global generator, before the first sample and for each."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.samples)).tolist()
        for index in order:
            inputs, label = self.samples[index]
            yield (
                inputs
                + 0.1 * torch.randn(6, dtype=inputs.dtype)
                + 0.01 * random.random()
                + 0.01 * np.random.rand(),
                label,
            )


class DrawingStateful(Drawing):
    """The same, with a state of all but the random numbers."""

    place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.yields:
            self.place += 1
            inputs, label = self.at(self.place - 1)
            yield inputs + 0.1 * torch.randn(6, dtype=inputs.dtype), label

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Unseeded(Rows):
    def __iter__(self) -> Iterator[Any]:
        yield from random.SystemRandom().sample(self.samples, len(self.samples))


class PerRank(Rows):
    """Splits itself by rank, as libraries do that know of torch.distributed."""

    def __iter__(self) -> Iterator[Any]:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        yield from self.samples[rank:] + self.samples[:rank]


class Listed:
    """The samples of a stream in a list, with the same offset an epoch: an obvious twin."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class InTurn(InOrder):
    """The order of `Rows`."""

    def take(self, start: int, size: int, stride: int = 1) -> Any:
        keys = super().take(start, size, stride)
        return type(keys)((keys.index + 7 * keys.epoch) % self.samples, keys.epoch, keys.seed)


KINDS = {
    kind.__name__: kind for kind in (Rows, Stateful, Forgetful, Drawing, DrawingStateful, Unseeded, PerRank)
}


class Streamed(Net):
    """Parameters: `stream`, one of `KINDS` or "list"; `stated` and `yields`, samples of a pass."""

    collate: Any = None

    def samples(self) -> list[Any]:
        dataset = super().data(None).train  # type: ignore[arg-type]
        return [dataset[index] for index in range(SAMPLES)]

    def data(self, setup: TrialSetup) -> Data:
        validation, kind = super().data(setup).validation, setup.parameters.get("stream", "Rows")
        if kind == "list":
            return Data(Listed(self.samples()), validation, collate=self.collate)  # type: ignore[arg-type]
        stream = KINDS[str(kind)](self.samples(), setup.parameters.get("yields"))  # type: ignore[arg-type]
        return Data(stream, validation, samples=setup.parameters.get("stated", SAMPLES), collate=self.collate)  # type: ignore[arg-type]

    def model(self, setup: TrialSetup) -> nn.Module:
        layers = (
            nn.Linear(6, 16),
            nn.Tanh(),
            nn.Dropout(float(setup.parameters.get("dropout", 0.0))),
            nn.Linear(16, 5),
        )
        return nn.Sequential(*layers).to(self.dtype)


def jittered(samples: list[Any]) -> list[Tensor]:
    """Draws random numbers while collating."""
    inputs, labels = torch.utils.data.default_collate(samples)
    return [inputs + 0.1 * torch.randn(6, dtype=inputs.dtype), labels]


class Jittered(Streamed):
    collate = staticmethod(jittered)


def run_of(task: Streamed, setup: TrialSetup) -> TrainingRun:
    """A training; of a list, in the order of `Rows`."""
    run = TrainingRun(task, setup)
    if run.live is None:
        run.stream = InTurn(SAMPLES, setup.seed)
    return run
