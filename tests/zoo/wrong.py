"""Trainings with a common fault, or with something that bsearch has to notice: each as its author had it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bsearch.objectives.task import Data, Loss, Score
from bsearch.spaces.trial import TrialSetup
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate
from torchmetrics.functional.classification import binary_auroc
from zoo.api import collated_in_training, stated
from zoo.plain import digits
from zoo.structured import Regression, Screening
from zoo.text import IGNORED, WORDS, Tagger, padded
from zoo.vision import CLASS_WEIGHTS, TRAINING, VALIDATION, Digits, penalised

# Means


class WeightedMean(Digits):
    """The mean over class weights, taken for one over samples."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        mean = F.cross_entropy(model(images), labels, weight=CLASS_WEIGHTS.to(images.device))
        return Loss(mean * len(labels), len(labels))


class TokenMean(Tagger):
    """The mean over tokens, taken for one over sentences."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        words, tags = batch
        mean = F.cross_entropy(model(words).transpose(1, 2), tags, ignore_index=IGNORED)
        return Loss(mean * len(words), len(words))


class MeanAsTotal(Digits):
    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        return Loss(F.cross_entropy(model(images), labels), len(labels))


class NoDenominator(Digits):
    """A sum is a sum: the rate was tuned for it."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        return Loss(F.cross_entropy(model(images), labels, reduction="sum"), 1.0)


class MeanOfMeans(Digits):
    """A mean is a mean."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        return Loss(F.cross_entropy(model(images), labels), 1.0)


class Broadcast(Regression):
    """(N, 1) against (N,): every output is compared with every target."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        inputs, targets = batch
        return Loss(((model(inputs) - targets) ** 2).sum(), len(targets))


class PenaltyOnce(Digits):
    """An L1 penalty for every call, not for every sample: k times a step."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        return Loss(
            F.cross_entropy(model(images), labels, reduction="sum") + 100 * penalised(model), len(labels)
        )


class ClampedDenominator(Tagger):
    """Few sentences are annotated, so the denominator is kept from being 0: a part without labels counts as one label."""

    def data(self, setup: TrialSetup) -> Data:
        def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
            annotated = [
                (words, tags if words[0] < 8 else torch.full_like(tags, IGNORED)) for words, tags in samples
            ]
            return padded(annotated)

        return replace(super().data(setup), collate=collate)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        loss = super().loss(model, batch, setup)
        return Loss(loss.total, loss.denominator.clamp(min=1))


class MeanOverPadding(Tagger):
    """A sentence is the mean of its words, and of as many zeros as the longest sentence beside it makes."""

    def data(self, setup: TrialSetup) -> Data:
        def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
            return padded(samples)[0], torch.stack([words.sum() % 3 for words, _ in samples])

        return replace(super().data(setup), collate=collate)

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.ModuleList([nn.Embedding(WORDS, 16, padding_idx=0), nn.Linear(16, 3)])

    def logits(self, model: Any, words: Tensor) -> Tensor:
        embedding, head = model
        return head(embedding(words).mean(1))

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        words, labels = batch
        return Loss(F.cross_entropy(self.logits(model, words), labels, reduction="sum"), len(labels))

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        words, labels = batch
        return {
            "val_loss": Score(
                F.cross_entropy(self.logits(model, words), labels, reduction="sum"), len(labels)
            )
        }


# Metrics


class MeanAUROC(Screening):
    """A metric of the whole set as a mean over batches."""

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        inputs, labels = batch
        return {"auroc": Score(binary_auroc(model(inputs).sigmoid(), labels) * len(labels), len(labels))}


class MeanF1(Digits):
    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        images, labels = batch
        found = model(images).argmax(1).cpu()
        return {"f1": Score(f1_score(labels.cpu(), found, average="macro") * len(labels), len(labels))}


# What is read


def mixed_up(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """MixUp as in torchvision's recipes: each sample is mixed with the one before it in the batch."""
    images, labels = default_collate(samples)
    share = float(np.random.beta(0.4, 0.4))
    targets = F.one_hot(labels, 10).float()
    return images.lerp(images.roll(1, 0), 1 - share), targets.lerp(targets.roll(1, 0), 1 - share)


class MixUp(Digits):
    """One collate for all: validation is mixed as well."""

    def data(self, setup: TrialSetup) -> Data:
        data = super().data(setup)
        return Data(data.train, data.validation, collate=mixed_up)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, targets = batch
        return Loss(F.cross_entropy(model(images), targets, reduction="sum"), len(targets))

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        images, targets = batch
        logits = model(images)
        labels = targets if targets.dim() == 1 else targets.argmax(1)
        return {
            "accuracy": Score((logits.argmax(1) == labels).sum(), len(labels)),
            "val_loss": Score(F.cross_entropy(logits, targets, reduction="sum"), len(labels)),
        }


class MixUpInTraining(MixUp):
    def data(self, setup: TrialSetup) -> Data:
        data = super().data(setup)
        return Data(data.train, data.validation, **collated_in_training(mixed_up))


class Jittered(Dataset[Any]):
    """Adds noise to every image it reads, from the generator that NumPy's documentation recommends, or from torch's."""

    def __init__(self, part: slice, own_generator: bool) -> None:
        self.images, self.labels = (values[part] for values in digits())
        self.generator = np.random.default_rng(0) if own_generator else None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.generator is not None:
            noise = torch.from_numpy(self.generator.normal(size=image.shape).astype(np.float32))
        else:
            noise = torch.randn_like(image)
        return image + 0.3 * noise, self.labels[index]


class OwnGenerator(Digits):
    def data(self, setup: TrialSetup) -> Data:
        return Data(Jittered(TRAINING, own_generator=True), super().data(setup).validation)


class JitteredValidation(Digits):
    """One dataset class for all, with its augmentation: torch's generator is the trial's, so that metrics repeat."""

    def data(self, setup: TrialSetup) -> Data:
        return Data(Jittered(TRAINING, own_generator=False), Jittered(VALIDATION, own_generator=False))


class UnrepeatableValidation(Digits):
    """Its noise is another one whenever it is read."""

    def data(self, setup: TrialSetup) -> Data:
        return Data(super().data(setup).train, Jittered(VALIDATION, own_generator=True))


class Lines(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(*digits(), strict=True))


class Unmeasured(Digits):
    """A data set without length or places, as those that are read from a tar file over the network."""

    def data(self, setup: TrialSetup) -> Data:
        return Data(Lines(), super().data(setup).validation)


class Stream(Digits):
    """The same, with its number of samples."""

    def data(self, setup: TrialSetup) -> Data:
        return Data(Lines(), super().data(setup).validation, **stated(len(digits()[0])))


# What is updated


class Averaged(nn.Module):
    """A model and the moving average of its weights, which is what is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.average = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.online(images) if self.training else self.average(images)

    @torch.no_grad()
    def update(self, decay: float = 0.9) -> None:
        for kept, new in zip(self.average.parameters(), self.online.parameters(), strict=True):
            kept.lerp_(new, 1 - decay)


class AverageInLoss(Digits):
    """`loss` is the only place that is called in every step, so it updates the average: k times a step."""

    def model(self, setup: TrialSetup) -> nn.Module:
        return Averaged()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        if model.training:
            model.update()
        return super().loss(model, batch, setup)


class OwnScheduler(Digits):
    """Brings the schedule of its script along."""

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9)
        steps = -(-setup.samples_budget // setup.effective_batch)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer


class SecondOrder(Digits):
    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=setup.learning_rate)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as its best-known implementation in PyTorch has it."""

    def __init__(
        self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **options: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def ascend(self) -> None:
        parameters = list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["old"] = parameter.clone()
            parameter.add_(parameter.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM needs a closure that computes the loss again"
        closure = torch.enable_grad()(closure)
        self.ascend()
        closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["old"])
        self.base.step()


class SharpnessAware(Digits):
    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return SAM(model.parameters(), torch.optim.SGD, lr=setup.learning_rate, momentum=0.9)
