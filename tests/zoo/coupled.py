"""Losses and layers that compare the samples of a batch: each as written first, and as a task that says so."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from bsearch.objectives.task import Data, Loss, Score, Task
from bsearch.spaces.trial import TrialSetup
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset
from zoo.api import WholeSet
from zoo.plain import Step, digits, trained, whole
from zoo.vision import IGNORED, TRAINING, VALIDATION, Digits, nesterov, scenes


def embedder() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16))


def neighbours_agree(embedded: Tensor, labels: Tensor) -> float:
    """How often the nearest other sample is of the same class."""
    distances = torch.cdist(embedded, embedded).fill_diagonal_(torch.inf)
    return float((labels[distances.argmin(1)] == labels).double().mean())


def nearest_neighbour_metrics() -> dict[str, float]:
    images, labels = (values[VALIDATION] for values in digits())
    torch.manual_seed(0)
    embedded = F.normalize(embedder()(images), dim=1).detach().numpy()
    right = 0
    for sample in range(len(labels)):
        others = [other for other in range(len(labels)) if other != sample]
        nearest = KNeighborsClassifier(1).fit(embedded[others], labels[others]).predict(embedded[[sample]])
        right += int(nearest[0]) == int(labels[sample])
    return {"accuracy": right / len(labels)}


class Embedding(Digits):
    """Digits whose embeddings are to be close where they belong together; compared by what cannot depend on batches."""

    def model(self, setup: TrialSetup) -> nn.Module:
        return embedder()

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        images, _ = batch
        embedded = F.normalize(model(images), dim=1)
        moved = F.normalize(model(images.roll(1, dims=-1)), dim=1)
        return {"alignment": Score((embedded * moved).sum(), len(images))}


class Declared(Embedding):
    """Its batches are never split, and its metric is one of the whole set."""

    couples_samples = True

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        images, labels = batch
        return WholeSet(neighbours_agree, F.normalize(model(images), dim=1), labels)


# SimCLR


def view(images: Tensor) -> Tensor:
    """A random view of each image: shifted, brighter, with noise."""
    shifts = torch.randint(-1, 2, (len(images),), device=images.device).tolist()
    shifted = torch.stack([image.roll(shift, dims=-1) for image, shift in zip(images, shifts, strict=True)])
    return shifted * (0.7 + 0.6 * torch.rand(len(images), 1, 1, 1)) + 0.1 * torch.randn_like(images)


def nt_xent(embedded: Tensor, temperature: float = 0.5) -> Tensor:
    """The mean over 2n views; view i belongs to view (i + n) mod 2n."""
    embedded = F.normalize(embedded, dim=1)
    similarities = (embedded @ embedded.T / temperature).fill_diagonal_(-1e9)
    count = len(embedded) // 2
    return F.cross_entropy(similarities, torch.arange(2 * count).roll(count).to(embedded.device))


class SimCLR(Embedding):
    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, _ = batch
        embedded = model(torch.cat([view(images), view(images)]))
        return Loss(nt_xent(embedded) * len(images), len(images))


class DeclaredSimCLR(Declared, SimCLR):
    pass


def simclr(steps: Sequence[Step]) -> list[float]:
    images = digits()[0]
    torch.manual_seed(0)
    model = embedder()

    def loss(step: Step) -> Tensor:
        chosen = images[whole(step)]
        first, second = (F.normalize(model(each), dim=1) for each in (view(chosen), view(chosen)))
        views, count = torch.cat([first, second]), len(chosen)
        losses = []
        for place in range(2 * count):
            partner = (place + count) % (2 * count)
            others = [other for other in range(2 * count) if other != place]
            losses.append(
                torch.logsumexp(views[others] @ views[place] / 0.5, 0) - views[place] @ views[partner] / 0.5
            )
        return torch.stack(losses).mean()

    return trained(nesterov(model), steps, loss)


# Supervised contrast


class SupCon(Embedding):
    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        embedded = F.normalize(model(images), dim=1)
        itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        similarities = (embedded @ embedded.T / 0.2).masked_fill(itself, -1e9)
        log_probabilities = similarities - similarities.logsumexp(1, keepdim=True)
        positives = (labels[:, None] == labels) & ~itself
        of_anchors = -(log_probabilities * positives).sum(1) / positives.sum(1).clamp(min=1)
        return Loss(of_anchors.mean() * len(labels), len(labels))


class DeclaredSupCon(Declared, SupCon):
    pass


def supcon(steps: Sequence[Step]) -> list[float]:
    images, labels = digits()
    torch.manual_seed(0)
    model = embedder()

    def loss(step: Step) -> Tensor:
        embedded, kinds = F.normalize(model(images[whole(step)]), dim=1), labels[whole(step)].tolist()
        losses = []
        for anchor, kind in enumerate(kinds):
            others = [other for other in range(len(kinds)) if other != anchor]
            positives = [other for other in others if kinds[other] == kind]
            scale = torch.logsumexp(embedded[others] @ embedded[anchor] / 0.2, 0)
            of_positives = [scale - embedded[other] @ embedded[anchor] / 0.2 for other in positives]
            losses.append(torch.stack(of_positives).mean() if of_positives else scale * 0)
        return torch.stack(losses).mean()

    return trained(nesterov(model), steps, loss)


# Triplets


class Triplets(Embedding):
    """The farthest sample of the anchor's class and the nearest of another, of those in the batch."""

    margin = 0.5

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        embedded = F.normalize(model(images), dim=1)
        distances = (2 - 2 * embedded @ embedded.T).clamp(min=1e-9).sqrt()
        same = labels[:, None] == labels
        farthest = distances.masked_fill(~same, 0.0).amax(1)
        nearest = distances.masked_fill(same, 10.0).amin(1)
        return Loss(F.relu(farthest - nearest + self.margin).mean() * len(labels), len(labels))


class DeclaredTriplets(Declared, Triplets):
    pass


def triplets(steps: Sequence[Step]) -> list[float]:
    images, labels = digits()
    torch.manual_seed(0)
    model = embedder()

    def loss(step: Step) -> Tensor:
        embedded, kinds = F.normalize(model(images[whole(step)]), dim=1), labels[whole(step)].tolist()
        losses = []
        for anchor, kind in enumerate(kinds):
            far = [(2 - 2 * embedded[anchor] @ other).clamp(min=1e-9).sqrt() for other in embedded]
            same = [distance for distance, one in zip(far, kinds, strict=True) if one == kind]
            different = [distance for distance, one in zip(far, kinds, strict=True) if one != kind]
            losses.append(F.relu(torch.stack(same).max() - torch.stack(different).min() + 0.5))
        return torch.stack(losses).mean()

    return trained(nesterov(model), steps, loss)


# Barlow twins


class Twins(nn.Module):
    """The paper's own code: a BatchNorm without parameters standardises what is correlated."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder, self.norm = embedder(), nn.BatchNorm1d(16, affine=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.embedder(images)


class BarlowTwins(Embedding):
    def model(self, setup: TrialSetup) -> nn.Module:
        return Twins()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, _ = batch
        correlations = model.norm(model(view(images))).T @ model.norm(model(view(images))) / len(images)
        on_diagonal = (correlations.diagonal() - 1).pow(2).sum()
        off_diagonal = correlations.pow(2).sum() - correlations.diagonal().pow(2).sum()
        return Loss((on_diagonal + 0.005 * off_diagonal) * len(images), len(images))


class DeclaredBarlowTwins(Declared, BarlowTwins):
    pass


def barlow_twins(steps: Sequence[Step]) -> list[float]:
    images = digits()[0]
    torch.manual_seed(0)
    model = embedder()

    def loss(step: Step) -> Tensor:
        chosen, sides = images[whole(step)], []
        for _ in range(2):
            embedded = model(view(chosen))
            sides.append((embedded - embedded.mean(0)) / (embedded.var(0, unbiased=False) + 1e-5).sqrt())
        error = torch.zeros(())
        for row in range(16):
            for column in range(16):
                correlation = (sides[0][:, row] * sides[1][:, column]).mean()
                error = error + ((correlation - 1) ** 2 if row == column else 0.005 * correlation**2)
        return error

    return trained(nesterov(model), steps, loss)


# CLIP


@cache
def pairs() -> tuple[Tensor, Tensor]:
    """Images, and words that tell what is on them: a digit's name among others, (1797, 4)."""
    images, labels = digits()
    words = torch.randint(10, 30, (len(labels), 4), generator=torch.Generator().manual_seed(15))
    words[:, 1] = labels
    return images, words


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image_tower, self.text_tower = (
            embedder(),
            nn.Sequential(nn.EmbeddingBag(30, 32), nn.ReLU(), nn.Linear(32, 16)),
        )
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image_tower(images), dim=1), F.normalize(self.text_tower(words), dim=1)


class ImagesAndWords(Task):
    def data(self, setup: TrialSetup) -> Data:
        return Data(
            *(TensorDataset(*(values[part] for values in pairs())) for part in (TRAINING, VALIDATION))
        )

    def model(self, setup: TrialSetup) -> nn.Module:
        return CLIP()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, words = model(*batch)
        logits = images @ words.T * model.log_scale.exp()
        own = torch.arange(len(images), device=images.device)
        mean = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
        return Loss(mean * len(images), len(images))

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        """How often an image finds its own words, among those of the batch."""
        images, words = model(*batch)
        own = torch.arange(len(images), device=images.device)
        return Score(((images @ words.T).argmax(1) == own).sum(), len(images))


class DeclaredCLIP(ImagesAndWords):
    couples_samples = True

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        def recall(images: Tensor, words: Tensor) -> Tensor:
            return ((images @ words.T).argmax(1) == torch.arange(len(images))).double().mean()

        return WholeSet(recall, *model(*batch))


def clip(steps: Sequence[Step]) -> list[float]:
    images, words = pairs()
    torch.manual_seed(0)
    model = CLIP()

    def loss(step: Step) -> Tensor:
        seen, said = model(images[whole(step)], words[whole(step)])
        logits, losses = torch.exp(model.log_scale) * torch.einsum("if,jf->ij", seen, said), []
        for place in range(len(seen)):
            losses += [torch.logsumexp(row, 0) - row[place] for row in (logits[place], logits[:, place])]
        return torch.stack(losses).mean()

    return trained(nesterov(model), steps, loss)


def clip_metrics() -> dict[str, float]:
    images, words = (values[VALIDATION] for values in pairs())
    torch.manual_seed(0)
    seen, said = CLIP()(images, words)
    return {
        "accuracy": sum(int((said @ one).argmax()) == place for place, one in enumerate(seen)) / len(seen)
    }


# Whole batches in a formula


class BatchDice(Task):
    """Soft Dice over all pixels of the batch, as many segmenters have it."""

    def data(self, setup: TrialSetup) -> Data:
        images, masks = scenes()
        objects = ((masks > 0) & (masks != IGNORED)).float()
        return Data(TensorDataset(images[:400], objects[:400]), TensorDataset(images[400:], objects[400:]))

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, objects = batch
        found = model(images).sigmoid().squeeze(1)
        dice = 1 - (2 * (found * objects).sum() + 1) / (found.sum() + objects.sum() + 1)
        return Loss(dice * len(images), len(images))

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Score:
        images, objects = batch
        return Score(((model(images).squeeze(1) > 0) == objects.bool()).sum(), objects.numel())


@cache
def rollouts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, actions, their advantages, and their log probabilities when they were taken."""
    generator = torch.Generator().manual_seed(16)
    states, actions = (
        torch.randn(600, 4, generator=generator),
        torch.randint(0, 3, (600,), generator=generator),
    )
    advantages = states[:, 0] * (actions == 1) + 0.3 * torch.randn(600, generator=generator) + 2
    return states, actions, advantages, torch.full((600,), -1.1)


def deciding() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


class Policy(Task):
    """PPO: its advantages are normalised in every mini-batch."""

    def data(self, setup: TrialSetup) -> Data:
        return Data(
            *(TensorDataset(*(one[part] for one in rollouts())) for part in (slice(0, 500), slice(500, 600)))
        )

    def model(self, setup: TrialSetup) -> nn.Module:
        return deciding()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        states, actions, advantages, before = batch
        policy = torch.distributions.Categorical(logits=model(states))
        ratios = (policy.log_prob(actions) - before).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        surrogate = torch.min(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
        return Loss(-surrogate.sum() - 0.01 * policy.entropy().sum(), len(states))

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        states, actions, advantages, before = batch
        policy = torch.distributions.Categorical(logits=model(states))
        return {"gain": Score(((policy.log_prob(actions) - before).exp() * advantages).sum(), len(states))}


class DeclaredPolicy(Policy):
    couples_samples = True


def policy(steps: Sequence[Step]) -> list[float]:
    states, actions, advantages, before = rollouts()
    torch.manual_seed(0)
    model = deciding()

    def loss(step: Step) -> Tensor:
        chosen = whole(step)
        spread, losses = advantages[chosen].std(unbiased=True) + 1e-8, []
        for sample in chosen:
            advantage = (advantages[sample] - advantages[chosen].mean()) / spread
            probabilities = model(states[sample]).softmax(0)
            ratio = probabilities[actions[sample]] / before[sample].exp()
            surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            losses.append(-surrogate + 0.01 * (probabilities * probabilities.log()).sum())
        return torch.stack(losses).mean()

    return trained(nesterov(model), steps, loss)


# Layers


class Normed(Digits):
    """BatchNorm, as most of the world's classifiers have it."""

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )


class Standardised(nn.Module):
    """A layer of one's own that subtracts the batch's mean, and remembers it for later."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return inputs - self.mean
        mean = inputs.mean(0)
        self.mean.lerp_(mean.detach(), 0.1)
        return inputs - mean


class OwnNorm(Digits):
    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), Standardised(32), nn.ReLU(), nn.Linear(32, 10))


class Lipschitz(Digits):
    """Spectral normalisation: every forward pass in training improves its estimate of a matrix's norm by one iteration."""

    def model(self, setup: TrialSetup) -> nn.Module:
        first, second = (spectral_norm(nn.Linear(*sizes)) for sizes in ((64, 32), (32, 10)))
        return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second)
