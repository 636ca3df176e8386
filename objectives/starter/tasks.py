"""Your training code. Edit `data` and `model`; uncomment the rest where the defaults do not fit."""

import torch
from bsearch import Data, Loss, Score, Task, TrialSetup  # noqa: F401
from bsearch.objectives.digits import digit_images
from torch import nn
from torch.utils.data import TensorDataset, random_split


class MyTask(Task):
    def data(self, setup: TrialSetup) -> Data:
        """Any map-style torch datasets: training data, and validation data to compare trials on."""
        images, labels = digit_images()
        train, validation = random_split(
            TensorDataset(images, labels), [0.8, 0.2], torch.Generator().manual_seed(0)
        )
        return Data(train, validation)

    def model(self, setup: TrialSetup) -> nn.Module:
        """Your model. Task parameters under `space:` in study.yaml are in `setup.parameters`."""
        width = int(setup.parameters["width"])
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    # The defaults are cross-entropy, SGD with Nesterov momentum, and accuracy. Override them as needed:
    #
    # def loss(self, model, batch, setup):  # the sum over the batch, and what the mean divides by
    #     inputs, labels = batch
    #     return Loss(nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))
    #
    # def optimizer(self, model, setup):  # setup has the values from study.yaml: space.weight_decay, training.betas
    #     # AdamW needs learning rates a hundred times smaller: reference_rate {low: 1e-4, high: 1e-2}, rule: [sqrt, adam_sde]
    #     return torch.optim.AdamW(model.parameters(), setup.learning_rate, setup.betas, weight_decay=setup.weight_decay)
    #
    # def score(self, model, batch, setup):
    #     inputs, labels = batch
    #     return Score((model(inputs).argmax(-1) == labels).sum(), len(labels))
