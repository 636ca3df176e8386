"""A small vision transformer on handwritten digits of 8x8 pixels, trained by Hugging Face's Trainer."""

from functools import cache

import numpy as np
from bsearch.objectives.adapters.huggingface import train_with
from bsearch.objectives.digits import digit_images
from torch.utils.data import Dataset, Subset
from transformers import Trainer, ViTConfig, ViTForImageClassification


class Digits(Dataset):
    """1,797 real images of digits, as dicts for a Trainer."""

    def __init__(self):
        images, self.labels = digit_images()
        self.pixels = images.view(-1, 1, 8, 8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index], "labels": self.labels[index]}


@cache
def digits():
    order = np.random.default_rng(0).permutation(1797)
    return Subset(Digits(), order[:1437]), Subset(Digits(), order[1437:])


def model(setup):
    width = int(setup.parameters.get("width", 32))
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return ViTForImageClassification(config)


def accuracy(evaluated):
    return {"accuracy": float((evaluated.predictions.argmax(-1) == evaluated.label_ids).mean())}


def train(setup):
    training, validation = digits()
    yield from train_with(
        setup,
        Trainer,  # or your own subclass
        model=model(setup),
        train_dataset=training,
        eval_dataset=validation,
        compute_metrics=accuracy,
        arguments={"per_device_eval_batch_size": 360},
    )
