"""Two losses that compare the samples of a batch, on folders of images: SimCLR and CLIP. Memory decides the batch.

`embed` is computed in micro-batches and `batch_loss` over the whole batch, so any batch is exact under any memory limit.
"""

import torch
import torch.nn.functional as F
from bsearch import Data, Score, WholeSet
from bsearch.objectives.vision import Vision, augmented
from pytorch_metric_learning.losses import SelfSupervisedLoss, SupConLoss
from torch import nn
from torch.utils.data import Dataset

ADJECTIVES = 20  # words of captions before those of classes


def encoder(width, outputs):
    """GroupNorm, since BatchNorm would see the micro-batch."""

    def block(channels, out):
        return [nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*block(3, width), *block(width, 2 * width), *block(2 * width, 4 * width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, outputs))


class WithDraws(Dataset):
    """Images with random numbers of their own: the same for an image in an epoch, whatever batch it is in."""

    def __init__(self, images, columns):
        self.images, self.columns = images, columns

    def __len__(self):
        return len(self.images)

    def fetch(self, keys):
        pixels, labels, _ = self.images.fetch(keys)
        return pixels, labels, keys.uniform(self.columns)


def view(pixels, draws):
    """Shifted, mirrored, and of another contrast: (n, 3, h, w) in [0, 1], from bytes and (n, 4) random numbers."""
    images = augmented(pixels, draws[:, :3], crop=True).float() / 255
    return ((images - 0.5) * (0.5 + draws[:, 3, None, None, None]) + 0.5).clamp(0, 1)


def neighbours(features, labels):
    """Accuracy of a vote of each image's ten nearest others."""
    features = F.normalize(features, dim=1)
    nearest = (features @ features.T).fill_diagonal_(-2).topk(10).indices
    return (labels[nearest].mode(dim=1).values == labels).double().mean()


class SimCLR(Vision):
    def data(self, setup):
        data = super().data(setup)
        return Data(WithDraws(data.train, 8), data.validation)

    def model(self, setup):
        head = nn.Sequential(nn.ReLU(), nn.Linear(128, 64))
        return nn.ModuleDict({"encoder": encoder(setup.parameters["width"], 128), "head": head})

    def embed(self, model, batch, setup):
        pixels, _, draws = batch
        views = torch.cat([view(pixels, draws[:, :4]), view(pixels, draws[:, 4:])])
        return model["head"](model["encoder"](views)).chunk(2)

    def batch_loss(self, model, embeddings, setup):
        return SelfSupervisedLoss(SupConLoss(temperature=0.5))(*embeddings)  # with one positive each: NT-Xent

    def score(self, model, batch, setup):
        pixels, labels, _ = batch
        return WholeSet(neighbours, model["encoder"](pixels.float() / 255), labels)


class CLIPModel(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.images = encoder(width, 64)
        self.texts = nn.Sequential(nn.EmbeddingBag(ADJECTIVES + 10, 64), nn.ReLU(), nn.Linear(64, 64))
        self.log_scale = nn.Parameter(torch.tensor(2.0))


class CLIP(Vision):
    """Images and captions of three words: two adjectives that say nothing, and the class."""

    def data(self, setup):
        data = super().data(setup)
        return Data(WithDraws(data.train, 6), data.validation)

    def model(self, setup):
        return CLIPModel(setup.parameters["width"])

    def embed(self, model, batch, setup):
        pixels, labels, draws = batch
        captions = torch.cat([(draws[:, 4:] * ADJECTIVES).long(), ADJECTIVES + labels[:, None]], dim=1)
        images, texts = model.images(view(pixels, draws)), model.texts(captions)
        return F.normalize(images, dim=1), F.normalize(texts, dim=1)

    def batch_loss(self, model, embeddings, setup):
        images, texts = embeddings
        logits = images @ texts.T * model.log_scale.exp()
        own = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    def score(self, model, batch, setup):
        """An image's class is that of the nearest caption."""
        pixels, labels, _ = batch
        captions = model.texts(ADJECTIVES + torch.arange(10, device=labels.device)[:, None])
        logits = model.images(pixels.float() / 255) @ F.normalize(captions, dim=1).T
        return Score((logits.argmax(1) == labels).sum(), len(labels))
