"""Trainings of LightningModules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from bsearch.objectives.adapters.lightning import train_with
from bsearch.spaces.trial import Measurement, TrialSetup
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from torchmetrics.classification import MulticlassF1Score
from zoo.plain import RATE, Step, digits, trained, whole
from zoo.vision import CLASS_WEIGHTS, TRAINING, VALIDATION, convolutional


class Module(lightning.LightningModule):
    """As Lightning's documentation writes one, with a metric object that sees the whole validation set."""

    def __init__(self, setup: TrialSetup) -> None:
        super().__init__()
        self.trial = setup
        torch.manual_seed(0)
        self.net = convolutional()
        self.f1 = MulticlassF1Score(10)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.f1.update(logits, labels)
        self.log("val_f1", self.f1)
        self.log("val_loss", F.cross_entropy(logits, labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.trial.learning_rate, momentum=0.9)


def loaders(**options: Any) -> tuple[Any, Any]:
    images, labels = digits()
    return (
        DataLoader(
            TensorDataset(images[TRAINING], labels[TRAINING]), batch_size=32, **{"shuffle": True, **options}
        ),
        DataLoader(TensorDataset(images[VALIDATION], labels[VALIDATION]), batch_size=64),
    )


def classifier(setup: TrialSetup) -> Iterator[Measurement]:
    yield from train_with(setup, Module(setup), data=loaders())


def classified(steps: Sequence[Step], **options: Any) -> list[float]:
    images, labels = digits()
    torch.manual_seed(0)
    model = convolutional()
    return trained(
        torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9),
        steps,
        lambda step: F.cross_entropy(model(images[whole(step)]), labels[whole(step)], **options),
    )


def classified_with_weights(steps: Sequence[Step]) -> list[float]:
    return classified(steps, weight=CLASS_WEIGHTS)


class Weighted(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        return F.cross_entropy(self(images), labels, weight=CLASS_WEIGHTS.to(images.device))


def class_weights(setup: TrialSetup) -> Iterator[Measurement]:
    yield from train_with(setup, Weighted(setup), data=loaders())


class Declared(Weighted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {
            "loss": super().training_step(batch, batch_idx),
            "denominator": CLASS_WEIGHTS[batch[1].cpu()].sum(),
        }


def declared_weights(setup: TrialSetup) -> Iterator[Measurement]:
    yield from train_with(setup, Declared(setup), data=loaders())


def weighted_sampler(setup: TrialSetup) -> Iterator[Measurement]:
    """Rare classes are drawn more often."""
    labels = digits()[1][TRAINING]
    weights = 1.0 / labels.bincount()[labels] ** 2
    sampler = WeightedRandomSampler(weights.tolist(), len(labels))
    yield from train_with(setup, Module(setup), data=loaders(sampler=sampler, shuffle=False))
