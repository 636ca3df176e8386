"""Tasks whose loss compares the samples of a batch, in double precision; a module of its own, for ranks import it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from bsearch.objectives.loading import load_task
from bsearch.objectives.model.batch_norm import once_per_step
from bsearch.objectives.task import Data, Score, Task
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.trial import TrialSetup
from rank_jobs import SAM
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
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
        views = [centers[labels] + 0.3 * torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
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


class InPlace(SimCLR):
    """Scales its batch in place, as a normalisation may."""

    def embed(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        first, second, _ = batch
        return model(first.mul_(0.5)), model(second.mul_(0.5))


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
    kind.__name__: kind for kind in (SimCLR, WithDropout, BarlowTwins, SupCon, Triplets, CLIP, CLIPWithDropout, Normed, Queue)
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


class Sharp(Pairs):
    """With an optimizer that computes each step's gradient twice."""

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return SAM([one for one in model.parameters() if one.requires_grad], lr=setup.learning_rate, momentum=0.9)


class SharpCLIP(Sharp, CLIP):
    pass


class SharpCLIPWithDropout(Sharp, CLIPWithDropout):
    pass


class SharpInPlace(Sharp, InPlace, WithDropout):
    pass


class SharpBarlowTwins(Sharp, BarlowTwins):
    pass


class SharpNormed(Sharp, Normed):
    pass


class SharpQueue(Sharp, Queue):
    pass


class SharpAside(Sharp, Aside):
    pass


def sharp_steps(reference: str, setup: dict[str, Any], steps: int) -> Iterator[list[Tensor]]:
    """The losses of a few steps, and the parameters and buffers after them; each rank draws from a known generator state."""
    run = TrainingRun(load_task(reference), TrialSetup.from_dict(setup))  # type: ignore[arg-type]
    plan = run.setup.plan
    loader = run.loader([plan] * steps)
    run.modes.train(run.model)
    torch.manual_seed(100 + run.ranks.rank)
    losses = [run.step(run.micro_batches(plan, loader), plan.effective_batch) for _ in range(steps)]
    states = run.ranks.all_gathered({"states": [torch.get_rng_state()]})["states"]
    after = [value.detach().clone() for value in (*run.model.parameters(), *run.model.buffers())]
    yield [torch.stack(losses), *after, *states]


def sharp_twin(reference: str, setup: dict[str, Any], steps: int) -> list[Tensor]:
    """The same in one process, with the graphs of all micro-batches of all ranks kept, and nothing cached."""
    made = TrialSetup.from_dict(setup)
    plan = made.plan
    alone = replace(made, plan=BatchPlan(plan.effective_batch, plan.accumulation))
    run = TrainingRun(load_task(reference), alone)  # type: ignore[arg-type]
    model, optimizer = run.model, run.optimizer
    run.modes.train(model)
    states = [torch.Generator().manual_seed(100 + rank).get_state() for rank in range(plan.devices)]
    losses, start = [], 0

    def gradient(before: list[Tensor], start: int) -> tuple[Tensor, list[Tensor]]:
        """The loss at the weights as they are, its clipped gradient in `grad`, and the generators' states after it."""
        model.zero_grad()
        parts, after = [], []
        for rank in range(plan.devices):
            torch.set_rng_state(before[rank])
            for size in plan.micro_batches(rank):
                batch = run.train_fetcher.fetch(run.stream.take(start, size))
                parts.append(tree_flatten(run.task.embed(model, batch, run.setup)))
                start += size
            after.append(torch.get_rng_state())
        whole = [torch.cat(rows) for rows in zip(*(tensors for tensors, _ in parts), strict=True)]
        with once_per_step(model):
            loss = run.task.batch_loss(model, tree_unflatten(whole, parts[0][1]), run.setup)
        loss.backward()
        if made.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), made.training.clip_norm)
        return loss.detach(), after

    for _ in range(steps):
        before, buffers = states, copy.deepcopy(dict(model.named_buffers()))
        loss, states = gradient(before, start)
        moved = copy.deepcopy(dict(model.named_buffers()))

        @torch.enable_grad()
        def again(before: list[Tensor] = before, buffers: dict[str, Tensor] = buffers, start: int = start) -> Tensor:
            model.load_state_dict(buffers, strict=False)
            return gradient(before, start)[0]

        optimizer.step(again)  # type: ignore[arg-type]  # torch's stub
        model.load_state_dict(moved, strict=False)
        model.zero_grad()
        losses.append(loss)
        start += plan.effective_batch
    return [torch.stack(losses), *(value.detach() for value in (*model.parameters(), *model.buffers())), *states]
