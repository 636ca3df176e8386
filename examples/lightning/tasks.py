"""A small convolutional network on handwritten digits as a LightningModule, trained by Lightning's Trainer."""

import lightning
import torch
from bsearch.objectives.adapters.lightning import train_with
from bsearch.objectives.digits import digit_images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(lightning.LightningDataModule):
    def setup(self, stage):
        images, labels = digit_images()
        digits = TensorDataset(images.view(-1, 1, 8, 8), labels)
        self.training, self.validation = random_split(digits, [1437, 360], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.training, batch_size=64, shuffle=True)  # the study sets the batch size

    def val_dataloader(self):
        return DataLoader(self.validation, batch_size=360)


class Net(lightning.LightningModule):
    def __init__(self, setup):
        super().__init__()
        self.trial = setup
        width = int(setup.parameters.get("width", 64))
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        correct = self.layers(images).argmax(-1) == labels
        self.log("accuracy", correct.float().mean())

    def configure_optimizers(self):
        trial = self.trial
        return torch.optim.AdamW(
            self.parameters(),
            lr=trial.learning_rate,
            betas=trial.betas,
            eps=trial.eps,
            weight_decay=trial.weight_decay,
        )


def train(setup):
    yield from train_with(setup, Net(setup), data=Digits())
