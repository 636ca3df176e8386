"""Training code for the fake GPU: nets with what differs between devices, and faults on demand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from bsearch.objectives.data.batches import SampleKeys
from bsearch.objectives.loop import Loop
from bsearch.objectives.task import Data, Loss, Task
from bsearch.spaces.trial import Measurement, TrialSetup
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

SAMPLES, CLASSES = 400, 5


def images() -> Data:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    validation = TensorDataset(pixels[:100], labels[:100])
    return Data(TensorDataset(pixels, labels), validation)


class ConvNet(Task):
    """Convolutions and BatchNorm."""

    def data(self, setup: TrialSetup) -> Data:
        return images()

    def model(self, setup: TrialSetup) -> nn.Module:
        width = int(setup.parameters.get("width", 8))
        return nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout(float(setup.parameters.get("dropout", 0.0))),
            nn.Flatten(),
            nn.Linear(64 * width, CLASSES),
        )


class OnHost(Dataset[Any]):
    """Data that cannot live on a card: every batch is copied there."""

    def __init__(self, data: TensorDataset) -> None:
        self.tensors = data.tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def fetch(self, keys: SampleKeys) -> list[Tensor]:
        return [tensor[torch.from_numpy(keys.index)] for tensor in self.tensors]


class Copied(ConvNet):
    """The same on copied batches."""

    def data(self, setup: TrialSetup) -> Data:
        data = images()
        return Data(OnHost(data.train), OnHost(data.validation))  # type: ignore[arg-type]


def classifier(setup: TrialSetup) -> Iterator[Measurement]:
    """A loop of one's own, made of `Loop`."""
    data = images()
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9, nesterov=True)
    loop = Loop(setup, data, models={"net": model}, optimizers={"net": optimizer})
    pixels, labels = (tensor.to(loop.device) for tensor in data.validation.tensors)  # type: ignore[attr-defined]
    for step in loop:
        for part in step:
            inputs, targets = part.batch
            with loop.autocast():
                loss = F.cross_entropy(model(inputs), targets)
            (loss * part.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            with torch.no_grad():
                outputs = model(pixels)
            yield loop.measure(
                accuracy=(outputs.argmax(1) == labels).float().mean(),
                val_loss=F.cross_entropy(outputs, labels),
            )


class Faulty(ConvNet):
    """A quick training, with a fault in each step of the second trial.

    The parameter `fault` says which: `assert` (a label that no class has), or the text of an error.
    """

    def data(self, setup: TrialSetup) -> Data:
        data = images()
        return Data(
            *(
                TensorDataset(*(tensor[:100] for tensor in part.tensors))
                for part in (data.train, data.validation)
            )
        )  # type: ignore[attr-defined]

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        inputs, labels = batch
        fault = str(setup.parameters.get("fault", ""))
        if fault and setup.number == 1:
            if fault != "assert":
                raise RuntimeError(fault)
            labels = labels + CLASSES
        return Loss(F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))
