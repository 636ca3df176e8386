"""Tasks whose loss compares the samples of a batch, in double precision; a module of its own, for ranks import it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from bsearch.objectives.loading import load_task
from bsearch.objectives.task import Data, Score, Task
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.trial import TrialSetup
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SAMPLES = 600


def tower(inputs: int = 6, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 8)).double()


class Pairs(Task):
    """Two noisy views of each sample, and its class."""

    dropout = 0.0

    def data(self, setup: TrialSetup) -> Data:
        generator = torch.Generator().manual_seed(3)
        labels = torch.randint(0, 5, (SAMPLES,), generator=generator)
        centers = torch.randn(5, 6, generator=generator, dtype=torch.float64)
        views = [
            centers[labels] + 0.3 * torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
            for _ in range(2)
        ]
        data = TensorDataset(*views, labels)
        return Data(data, data)

    def model(self, setup: TrialSetup) -> nn.Module:
        return tower(dropout=self.dropout)

    def embed(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        first, second, _ = batch
        return model(first), model(second)

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        first, second, _ = batch
        near = F.cosine_similarity(model(first), model(second))
        return Score(near.clamp(0, 1).sum(), len(first))


def nt_xent(first: Tensor, second: Tensor, temperature: float = 0.5) -> Tensor:
    views = F.normalize(torch.cat([first, second]), dim=1)
    similarities = (views @ views.T / temperature).fill_diagonal_(-1e9)
    return F.cross_entropy(similarities, torch.arange(len(views), device=views.device).roll(len(first)))


class SimCLR(Pairs):
    def batch_loss(self, model: nn.Module, embeddings: Any, setup: TrialSetup) -> Tensor:
        return nt_xent(*embeddings)


class WithDropout(SimCLR):
    dropout = 0.3


class BarlowTwins(Pairs):
    """Standardised over the batch by a BatchNorm of the loss, whose running statistics move once a step."""

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.ModuleDict({"tower": tower(), "norm": nn.BatchNorm1d(8, affine=False).double()})

    def embed(self, model: Any, batch: Any, setup: TrialSetup) -> Any:
        return {"first": model["tower"](batch[0]), "second": model["tower"](batch[1])}

    def batch_loss(self, model: Any, embeddings: Any, setup: TrialSetup) -> Tensor:
        sides = [model["norm"](embeddings[side]) for side in ("first", "second")]
        correlations = sides[0].T @ sides[1] / len(sides[0])
        return (correlations - torch.eye(8, dtype=torch.float64)).pow(2).sum()

    def score(self, model: Any, batch: Any, setup: TrialSetup) -> Any:
        return super().score(model["tower"], batch, setup)


class SupCon(Pairs):
    """The labels travel with the embeddings."""

    def embed(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        return model(batch[0]), batch[2]

    def batch_loss(self, model: nn.Module, embeddings: Any, setup: TrialSetup) -> Tensor:
        vectors, labels = F.normalize(embeddings[0], dim=1), embeddings[1]
        itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        similarities = (vectors @ vectors.T / 0.2).masked_fill(itself, -1e9)
        log_probabilities = similarities - similarities.logsumexp(1, keepdim=True)
        positives = (labels[:, None] == labels) & ~itself
        return -((log_probabilities * positives).sum(1) / positives.sum(1).clamp(min=1)).mean()


class Triplets(SupCon):
    """The farthest sample of the anchor's class and the nearest of another."""

    def batch_loss(self, model: nn.Module, embeddings: Any, setup: TrialSetup) -> Tensor:
        vectors, labels = F.normalize(embeddings[0], dim=1), embeddings[1]
        distances = (2 - 2 * vectors @ vectors.T).clamp(min=1e-9).sqrt()
        same = labels[:, None] == labels
        farthest = distances.masked_fill(~same, 0.0).amax(1)
        nearest = distances.masked_fill(same, 10.0).amin(1)
        return F.relu(farthest - nearest + 0.5).mean()


class TwoTowers(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.images, self.texts = tower(dropout=dropout), tower(dropout=dropout)
        self.log_scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)


class CLIP(Pairs):
    """Two towers, and a temperature that only the loss uses."""

    def model(self, setup: TrialSetup) -> nn.Module:
        return TwoTowers(self.dropout)

    def embed(self, model: Any, batch: Any, setup: TrialSetup) -> Any:
        return F.normalize(model.images(batch[0]), dim=1), F.normalize(model.texts(batch[1]), dim=1)

    def batch_loss(self, model: Any, embeddings: Any, setup: TrialSetup) -> Tensor:
        images, texts = embeddings
        logits = images @ texts.T * model.log_scale.exp()
        own = torch.arange(len(images), device=images.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    def score(self, model: Any, batch: Any, setup: TrialSetup) -> Any:
        near = F.cosine_similarity(model.images(batch[0]), model.texts(batch[1]))
        return Score(near.clamp(0, 1).sum(), len(near))


class CLIPWithDropout(CLIP):
    dropout = 0.2


class Alone(nn.Module):
    """A head that may be trained with the batch's own BatchNorm, as many projection heads are."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = tower(), nn.BatchNorm1d(8).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.body(inputs))  # type: ignore[no-any-return]


class Normed(SimCLR):
    def model(self, setup: TrialSetup) -> nn.Module:
        return Alone()


class Queue(SimCLR):
    """Momentum contrast's queue: the loss keeps keys of earlier batches in a buffer, which moves once a step."""

    def model(self, setup: TrialSetup) -> nn.Module:
        model = tower()
        model.register_buffer("queue", F.normalize(torch.ones(4, 8, dtype=torch.float64), dim=1))
        return model

    def batch_loss(self, model: Any, embeddings: Any, setup: TrialSetup) -> Tensor:
        first, second = (F.normalize(each, dim=1) for each in embeddings)
        logits = torch.cat([first @ second.detach().T, first @ model.queue.T], dim=1) / 0.3
        loss = F.cross_entropy(logits, torch.arange(len(first), device=first.device))
        with torch.no_grad():
            model.queue = torch.cat([second.detach()[:1], model.queue[:-1]])
        return loss


class Aside(SimCLR):
    """Returns what its loss does not use, of parameters of its own."""

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.ModuleDict({"tower": tower(), "aside": tower()})

    def embed(self, model: Any, batch: Any, setup: TrialSetup) -> Any:
        return model["tower"](batch[0]), model["tower"](batch[1]), model["aside"](batch[0])

    def batch_loss(self, model: nn.Module, embeddings: Any, setup: TrialSetup) -> Tensor:
        return nt_xent(*embeddings[:2])


class SmallMemory(SimCLR):
    """Memory for 50 samples in a pass with its graph, which no law foresees."""

    def embed(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        if torch.is_grad_enabled() and len(batch[0]) > 50 and setup.samples_budget > 24:
            raise torch.OutOfMemoryError(f"tried to allocate {len(batch[0])} samples")
        return super().embed(model, batch, setup)


TASKS = {
    kind.__name__: kind
    for kind in (SimCLR, WithDropout, BarlowTwins, SupCon, Triplets, CLIP, CLIPWithDropout, Normed, Queue)
}


def gradient(reference: str, setup: dict[str, Any], steps: int) -> Iterator[list[Tensor]]:
    """The parameters after a few steps, for ranks; also buffers, whose values the loss may move."""
    run = TrainingRun(load_task(reference), TrialSetup.from_dict(setup))  # type: ignore[arg-type]
    plan = run.setup.plan
    loader = run.loader([plan] * steps)
    run.modes.train(run.model)
    for _ in range(steps):
        run.step(run.micro_batches(plan, loader), plan.effective_batch)
    yield [value.detach().clone() for value in (*run.model.parameters(), *run.model.buffers())]
