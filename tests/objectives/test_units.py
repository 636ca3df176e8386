"""Samples of several lengths: batches by the task's own collate, counted in its own unit, traced with the longest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from bsearch.objectives.profiling.memory.tracing import batch_factory
from bsearch.objectives.task import Data, Loss, Score, Task
from bsearch.objectives.training import TrainingRun, train_task
from bsearch.spaces.errors import TaskError
from bsearch.spaces.trial import TrialSetup
from helpers import setup
from torch import nn

VOCABULARY, PAD = 7, -100


class Sentences(Task):
    """Predict the next token of sentences of 2 to 12 tokens."""

    lengths: Any = "own"
    unit = "tokens"

    def data(self, setup: TrialSetup) -> Data:
        generator = torch.Generator().manual_seed(5)
        sizes = torch.randint(2, 13, (60,), generator=generator).tolist()
        sentences = [torch.randint(0, VOCABULARY, (size,), generator=generator) for size in sizes]
        lengths = [size - 1 for size in sizes] if self.lengths == "own" else self.lengths
        return Data(sentences, sentences, collate=padded, lengths=lengths, unit=self.unit)  # type: ignore[arg-type]

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)).double()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        tokens, following = batch
        logits = model(tokens).flatten(0, 1)
        total = nn.functional.cross_entropy(logits, following.flatten(), ignore_index=PAD, reduction="sum")
        return Loss(total, (following != PAD).sum())

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Score:
        tokens, following = batch
        return Score((model(tokens).argmax(-1) == following).sum(), (following != PAD).sum())


def padded(sentences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    pad = nn.utils.rnn.pad_sequence
    return pad([one[:-1] for one in sentences], True, 0), pad([one[1:] for one in sentences], True, PAD)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 3, 7])
def test_padding_and_accumulation_change_no_result(accumulation: int, workers: int) -> None:
    """The same training step by step as with one batch, whatever the micro-batches are padded to."""
    one, other = (
        list(
            train_task(
                Sentences(), setup(14, count, budget=100, training={"evaluations": 2, "workers": workers})
            )
        )
        for count in (1, accumulation)
    )
    assert [m.train_loss for m in one] == pytest.approx([m.train_loss for m in other], rel=1e-12)
    assert one[-1].accuracy == pytest.approx(other[-1].accuracy, abs=1e-12)


def test_tokens_are_counted_as_they_were_trained_on() -> None:
    task, chosen = Sentences(), setup(14, 2, budget=100, training={"evaluations": 3})
    run = TrainingRun(task, chosen)
    for measurement in run.measurements():
        index = run.stream.take(0, measurement.samples_seen).index
        lengths = np.asarray(task.data(chosen).lengths)
        assert measurement.facts["tokens"] == sum(lengths[place] for place in index.tolist())
        assert measurement.facts["tokens_per_s"] == pytest.approx(
            measurement.facts["tokens"] / measurement.elapsed_s
        )  # type: ignore[operator]


def test_memory_is_traced_with_the_longest() -> None:
    run = TrainingRun(Sentences(), setup(4))
    tokens, following = batch_factory(run, "train")(5, lambda tensor: tensor)
    assert tokens.shape == following.shape == (5, max(run.data.lengths))  # type: ignore[arg-type]
    lengths = np.asarray(run.data.lengths)
    assert lengths[run.longest(3).index].tolist() == sorted(lengths.tolist())[::-1][:3]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lengths", [1, 2], "expected one for each of the 60 training samples, got 2"),
        ("unit", "samples", "expected a word of its own"),
    ],
)
def test_what_cannot_be_counted_is_told(key: str, value: Any, words: str) -> None:
    task = Sentences()
    setattr(task, key, value)
    with pytest.raises(TaskError, match=words):
        TrainingRun(task, setup(4))
