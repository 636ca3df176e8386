"""Images: classifiers, a segmenter, a distilled student, a frozen backbone, a detector."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bsearch.objectives.task import Data, Loss, Score, Task
from bsearch.spaces.trial import TrialSetup
from sklearn.metrics import accuracy_score, jaccard_score, log_loss
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics.classification import MulticlassJaccardIndex
from zoo.api import WholeSet
from zoo.plain import RATE, Step, digits, trained, whole

TRAINING, VALIDATION = slice(0, 600), slice(600, 800)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


class Digits(Task):
    """The first thing that anyone trains."""

    def data(self, setup: TrialSetup) -> Data:
        images, labels = digits()
        return Data(
            TensorDataset(images[TRAINING], labels[TRAINING]),
            TensorDataset(images[VALIDATION], labels[VALIDATION]),
        )

    def model(self, setup: TrialSetup) -> nn.Module:
        return convolutional()


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True)


def classifier(steps: Sequence[Step], **options: Any) -> list[float]:
    """The mean that `torch.nn.functional.cross_entropy` takes with these options."""
    images, labels = digits()
    torch.manual_seed(0)
    model = convolutional()
    return trained(
        nesterov(model),
        steps,
        lambda step: F.cross_entropy(model(images[whole(step)]), labels[whole(step)], **options),
    )


def classifier_metrics() -> dict[str, float]:
    images, labels = digits()
    torch.manual_seed(0)
    with torch.no_grad():
        logits = convolutional()(images[VALIDATION])
    right = labels[VALIDATION].numpy()
    return {
        "accuracy": accuracy_score(right, logits.argmax(1).numpy()),
        "val_loss": log_loss(right, logits.double().softmax(1).numpy(), labels=range(10)),
    }


class Smoothed(Digits):
    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        return Loss(F.cross_entropy(model(images), labels, label_smoothing=0.1, reduction="sum"), len(labels))


def smoothed(steps: Sequence[Step]) -> list[float]:
    return classifier(steps, label_smoothing=0.1)


# Rare classes count more.
CLASS_WEIGHTS = torch.tensor([1.0, 0.3, 2.0, 0.5, 5.0, 1.0, 0.2, 1.0, 3.0, 0.7])


class ClassWeights(Digits):
    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        weights = CLASS_WEIGHTS.to(images.device)
        total = F.cross_entropy(model(images), labels, weight=weights, reduction="sum")
        return Loss(total, weights[labels].sum())


def class_weights(steps: Sequence[Step]) -> list[float]:
    return classifier(steps, weight=CLASS_WEIGHTS)


def penalised(model: nn.Module) -> Tensor:
    return 1e-3 * sum(parameter.abs().sum() for parameter in model.parameters())


class SparseWeights(Digits):
    """An L1 penalty beside the mean, so for every sample in a sum."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        total = F.cross_entropy(model(images), labels, reduction="sum")
        return Loss(total + len(labels) * penalised(model), len(labels))


def sparse_weights(steps: Sequence[Step]) -> list[float]:
    images, labels = digits()
    torch.manual_seed(0)
    model = convolutional()
    norm = nn.L1Loss(reduction="sum")

    def loss(step: Step) -> Tensor:
        penalty = sum(norm(parameter, torch.zeros_like(parameter)) for parameter in model.parameters())
        return F.cross_entropy(model(images[whole(step)]), labels[whole(step)]) + penalty / 1000

    return trained(nesterov(model), steps, loss)


class Dropout(Digits):
    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))


def dropout(steps: Sequence[Step]) -> list[float]:
    images, labels = digits()
    torch.manual_seed(0)
    first, second = nn.Linear(64, 32), nn.Linear(32, 10)

    def loss(step: Step) -> Tensor:
        kept = torch.cat([torch.empty(len(part), 32).bernoulli_(0.7) / 0.7 for part in step])
        hidden = first(images[whole(step)].flatten(1)).relu() * kept
        return F.cross_entropy(second(hidden), labels[whole(step)])

    return trained(nesterov(nn.Sequential(first, second)), steps, loss)


class FetchedAtOnce(Task):
    """Reads a batch from a memory-mapped array in one go, as people do whose samples are small."""

    def data(self, setup: TrialSetup) -> Data:
        return Data(Rows(TRAINING), Rows(VALIDATION))

    def model(self, setup: TrialSetup) -> nn.Module:
        return convolutional()


class Rows(Dataset[Any]):
    def __init__(self, part: slice) -> None:
        images, labels = digits()
        self.images, self.labels = (images[part] * 16).to(torch.uint8).numpy(), labels[part].numpy()

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, keys: Any) -> tuple[Tensor, Tensor]:
        images = self.images[keys.index].astype(np.float32) / 16
        return torch.from_numpy(images), torch.from_numpy(self.labels[keys.index])


# Segmentation


IGNORED = 255


@cache
def scenes() -> tuple[Tensor, Tensor]:
    """Squares and discs on noise, (500, 1, 16, 16); classes 0, 1, 2, and 255 along the outlines, which are not annotated."""
    generator = np.random.default_rng(5)
    images, masks = generator.normal(0, 0.5, (500, 16, 16)), np.zeros((500, 16, 16), dtype=np.int64)
    rows, columns = np.mgrid[:16, :16]
    for image, mask in zip(images, masks, strict=True):
        for kind in (1, 2)[: generator.integers(0, 3)]:
            row, column, size = generator.integers(3, 13), generator.integers(3, 13), generator.integers(2, 5)
            far, high = (np.abs(rows - row), np.abs(columns - column))
            distance = np.maximum(far, high) if kind == 1 else np.hypot(far, high)
            mask[distance < size] = kind
            mask[np.abs(distance - size) < 0.5] = IGNORED
            image[distance < size] += 2 * kind
    return torch.tensor(images[:, None], dtype=torch.float32), torch.from_numpy(masks)


def segmenter() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1)
    )


class Segmentation(Task):
    def data(self, setup: TrialSetup) -> Data:
        images, masks = scenes()
        return Data(TensorDataset(images[:400], masks[:400]), TensorDataset(images[400:], masks[400:]))

    def model(self, setup: TrialSetup) -> nn.Module:
        return segmenter()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, masks = batch
        total = F.cross_entropy(model(images), masks, ignore_index=IGNORED, reduction="sum")
        return Loss(total, (masks != IGNORED).sum())

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        images, masks = batch
        classes = model(images).argmax(1)
        known = masks != IGNORED
        return {
            "pixel_accuracy": Score((classes == masks)[known].sum(), known.sum()),
            "miou": WholeSet(MulticlassJaccardIndex(3, ignore_index=IGNORED), classes, masks),
        }


def segmentation(steps: Sequence[Step]) -> list[float]:
    images, masks = scenes()
    torch.manual_seed(0)
    model = segmenter()
    return trained(
        nesterov(model),
        steps,
        lambda step: F.cross_entropy(model(images[whole(step)]), masks[whole(step)], ignore_index=IGNORED),
    )


def segmentation_metrics() -> dict[str, float]:
    images, masks = (part[400:] for part in scenes())
    torch.manual_seed(0)
    with torch.no_grad():
        classes = segmenter()(images).argmax(1)
    known = masks != IGNORED
    right, found = masks[known].numpy(), classes[known].numpy()
    return {
        "pixel_accuracy": accuracy_score(right, found),
        "miou": jaccard_score(right, found, average="macro"),
    }


# A part that does not learn


def with_batch_norm() -> nn.Module:
    """A network that someone trained before, whose BatchNorm has seen other images than ours."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )
        for _ in range(20):
            layers(digits()[0][800:1000] + torch.randn(200, 1, 8, 8))
    return layers


class Taught(nn.Module):
    """A student, and the teacher that it imitates."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = with_batch_norm().requires_grad_(False).eval()
        self.student = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.student(images)


class Distillation(Digits):
    temperature = 3.0

    def model(self, setup: TrialSetup) -> nn.Module:
        return Taught()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        logits = model(images)
        with torch.no_grad():
            soft = F.softmax(model.teacher(images) / self.temperature, dim=1)
        imitation = (
            F.kl_div(F.log_softmax(logits / self.temperature, dim=1), soft, reduction="sum")
            * self.temperature**2
        )
        return Loss(0.5 * imitation + 0.5 * F.cross_entropy(logits, labels, reduction="sum"), len(labels))


def distillation(steps: Sequence[Step]) -> list[float]:
    images, labels = digits()
    torch.manual_seed(0)
    model = Taught()

    def loss(step: Step) -> Tensor:
        logits = model.student(images[whole(step)])
        soft = (model.teacher(images[whole(step)]) / 3).softmax(1)
        imitation = F.kl_div((logits / 3).log_softmax(1), soft, reduction="batchmean") * 9
        return (imitation + F.cross_entropy(logits, labels[whole(step)])) / 2

    return trained(nesterov(model.student), steps, loss)


class FineTuned(nn.Module):
    """A new head on a backbone that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = with_batch_norm()[:-1]
        self.backbone.eval()
        for parameter in self.backbone.parameters():
            parameter.requires_grad = False
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))


class FrozenBackbone(Digits):
    def model(self, setup: TrialSetup) -> nn.Module:
        return FineTuned()


def frozen_backbone(steps: Sequence[Step]) -> list[float]:
    images, labels = digits()
    torch.manual_seed(0)
    model = FineTuned()
    features = copy.deepcopy(model.backbone)(images)  # it never changes, so neither do they
    return trained(
        nesterov(model.head),
        steps,
        lambda step: F.cross_entropy(model.head(features[whole(step)]), labels[whole(step)]),
    )


# Detection


@cache
def annotated() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images of unequal size with none to three bright squares, and their boxes as torchvision's detectors take them."""
    generator = torch.Generator().manual_seed(6)
    images, targets = [], []
    for _ in range(400):
        height, width = (4 * int(torch.randint(3, 6, (1,), generator=generator)) for _ in range(2))
        image, boxes = torch.rand(1, height, width, generator=generator), []
        for _ in range(int(torch.randint(0, 4, (1,), generator=generator))):
            left, top = (
                int(torch.randint(0, side - 5, (1,), generator=generator)) for side in (width, height)
            )
            size = int(torch.randint(3, 6, (1,), generator=generator))
            image[:, top : top + size, left : left + size] += 1
            boxes.append([left, top, left + size, top + size])
        images.append(image)
        targets.append({"boxes": torch.tensor(boxes, dtype=torch.float32).view(-1, 4)})
    return images, targets


class Scenes(Dataset[Any]):
    def __init__(self, part: slice) -> None:
        self.images, self.targets = (values[part] for values in annotated())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        return self.images[index], self.targets[index]


class Detector(nn.Module):
    """Says for every cell of 4x4 pixels whether an object's centre lies there, and its box.

    As torchvision's: losses in training, each normalised by an image's objects and averaged over images; detections else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.objectness, self.boxes = nn.Conv2d(16, 1, 1), nn.Conv2d(16, 4, 1)

    def forward(self, images: Sequence[Tensor], targets: Sequence[dict[str, Tensor]] | None = None) -> Any:
        heads = [(self.objectness(features)[0], self.boxes(features)) for features in map(self.body, images)]
        if not self.training:
            return [self.best(*head) for head in heads]
        assert targets is not None
        losses = [self.losses(*head, target["boxes"]) for head, target in zip(heads, targets, strict=True)]
        objectness, boxes = zip(*losses, strict=True)
        return {"objectness": sum(objectness) / len(images), "boxes": sum(boxes) / len(images)}

    @staticmethod
    def losses(objectness: Tensor, found: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        columns, rows = ((boxes[:, :2] + boxes[:, 2:]) / 8).long().unbind(1)
        present = torch.zeros_like(objectness)
        present[rows, columns] = 1
        objects = max(len(boxes), 1)
        of_objects = F.smooth_l1_loss(found[:, rows, columns].T, boxes / 16, reduction="sum")
        return F.binary_cross_entropy_with_logits(
            objectness, present, reduction="sum"
        ) / objects, of_objects / objects

    @staticmethod
    def best(objectness: Tensor, found: Tensor) -> dict[str, Tensor]:
        score, place = objectness.flatten().max(0)
        return {"boxes": 16 * found.flatten(1)[:, place], "scores": score.sigmoid()}


class Detection(Task):
    def data(self, setup: TrialSetup) -> Data:
        return Data(
            Scenes(slice(0, 300)),
            Scenes(slice(300, 400)),
            collate=lambda samples: tuple(zip(*samples, strict=True)),
        )

    def model(self, setup: TrialSetup) -> nn.Module:
        return Detector()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, targets = batch
        losses = model(images, targets)
        return Loss(sum(losses.values()) * len(images), len(images))

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        images, targets = batch
        errors = [
            float((found["boxes"] - target["boxes"]).abs().mean(1).min())
            for found, target in zip(model(images), targets, strict=True)
            if len(target["boxes"])
        ]
        return {"box_error": Score(sum(errors), len(errors))}


def detection(steps: Sequence[Step]) -> list[float]:
    images, targets = annotated()
    torch.manual_seed(0)
    model = Detector()

    def of_image(sample: int) -> Tensor:
        losses = model([images[sample]], [targets[sample]])
        return losses["objectness"] + losses["boxes"]

    return trained(
        nesterov(model), steps, lambda step: torch.stack([of_image(sample) for sample in whole(step)]).mean()
    )


def detection_metrics() -> dict[str, float]:
    torch.manual_seed(0)
    model = Detector().eval()
    errors = []
    for image, target in Scenes(slice(300, 400)):
        with torch.no_grad():
            box = model([image])[0]["boxes"].double().numpy()
        if len(target["boxes"]):
            errors.append(min(np.abs(box - right).mean() for right in target["boxes"].double().numpy()))
    return {"box_error": float(np.mean(errors))}
