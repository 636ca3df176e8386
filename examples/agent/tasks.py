"""What the agent edits: a small net that reads handwritten digits."""

import torch
from bsearch import Data, Loss, Task
from bsearch.objectives.digits import digit_images
from torch import nn
from torch.utils.data import TensorDataset

WIDTH = 24


class Digits(Task):
    """897 training and 900 validation samples; a training in a few hundredths of a second."""

    def data(self, setup):
        images, labels = digit_images()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        train, validation = order[:897], order[897:]
        seen = labels[train]
        return Data(TensorDataset(images[train], seen), TensorDataset(images[validation], labels[validation]))

    def model(self, setup):
        return nn.Sequential(
            nn.Linear(64, WIDTH),
            nn.Sigmoid(),
            nn.Linear(WIDTH, 10),
        )

    def loss(self, model, batch, setup):
        images, labels = batch
        total = nn.functional.cross_entropy(model(images), labels, reduction="sum")
        return Loss(total, len(labels))

    def optimizer(self, model, setup):
        return torch.optim.SGD(model.parameters(), lr=setup.optimizer.learning_rate)
