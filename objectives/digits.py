"""The built-in example: 1,797 real handwritten digits of 8x8 pixels, a small network, a trial in under a second.

Parameters: `optimizer` (sgd, adam or adamw), `width` of the hidden layer, `label_smoothing`.
Data: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI 1998, as shipped by scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ..spaces.errors import TaskError
from ..spaces.study import near_miss
from ..spaces.trial import TrialSetup
from .task import Data, Task


@cache
def _digits() -> Data:
    from sklearn.datasets import load_digits  # 0.5 s, and only this task needs it

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    pixels = torch.tensor(images[order] / 16.0, dtype=torch.float32)
    classes = torch.tensor(labels[order], dtype=torch.int64)
    parts = [slice(0, 1197), slice(1197, 1497), slice(1497, None)]
    train, validation, test = (TensorDataset(pixels[part], classes[part]) for part in parts)
    return Data(train, validation, test)


def named_optimizer(parameters: Iterable[nn.Parameter], setup: TrialSetup, default: str = "sgd") -> torch.optim.Optimizer:
    """The optimizer named by the parameter `optimizer`, with the settings of the rule; on a GPU one fused kernel."""
    name = str(setup.parameters.get("optimizer", default))
    common: dict[str, Any] = {
        "lr": setup.learning_rate,
        "weight_decay": setup.weight_decay,
        "fused": setup.device == "gpu" or None,
    }
    if name == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9, nesterov=True, **common)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if name == "adafactor":  # it has neither betas nor a fused kernel
        return torch.optim.Adafactor(parameters, lr=setup.learning_rate, weight_decay=setup.weight_decay)
    if name not in kinds:
        known = ["sgd", *kinds, "adafactor"]
        raise TaskError(f"space.optimizer: expected one of {', '.join(known)}; got {name!r}.{near_miss(name, known)}")
    return kinds[name](parameters, betas=setup.betas, eps=setup.eps, **common)


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

    def optimizer(self, parameters: Iterable[nn.Parameter], setup: TrialSetup) -> torch.optim.Optimizer:
        return named_optimizer(parameters, setup)
