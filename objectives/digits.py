"""The built-in example: 1,797 real handwritten digits of 8x8 pixels, a small network, a trial in under a second.

Parameters: `optimizer` (sgd, adam, adamw and others), `width` of the hidden layer, `label_smoothing`.
Data: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI 1998 (CC BY 4.0), its test set.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ..spaces.trial import TrialSetup
from .optimizers import named_optimizer
from .task import Data, Task


def digit_images() -> tuple[torch.Tensor, torch.Tensor]:
    """The images, (1797, 64) from 0 to 1, and their classes, (1797,)."""
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        return torch.from_numpy(stored["images"]) / 16.0, torch.from_numpy(stored["labels"]).long()


@cache
def _digits() -> Data:
    images, labels = digit_images()
    order = np.random.default_rng(0).permutation(len(images))
    pixels, classes = images[order], labels[order]
    parts = [slice(0, 1197), slice(1197, 1497), slice(1497, None)]
    train, validation, test = (TensorDataset(pixels[part], classes[part]) for part in parts)
    return Data(train, validation, test)


class Digits(Task):
    """Handwritten digits: 1,197 training, 300 validation and 300 test samples."""

    def data(self, setup: TrialSetup) -> Data:
        return _digits()

    def model(self, setup: TrialSetup) -> nn.Module:
        width = int(setup.parameters.get("width", 64))
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return named_optimizer(model, setup)
