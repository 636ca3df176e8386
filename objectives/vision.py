"""Image classification with torchvision's models and datasets.

Parameters (fixed or searched, all optional but `root`):

- `dataset`: cifar10, cifar100, fashionmnist, mnist, or folder (train/ and val/ or test/ in ImageFolder's layout).
- `root`: folder of the data, relative to the study file. `download: true` downloads torchvision's datasets.
- `model`: small_cnn, or any classification model of torchvision by name; `width` of small_cnn.
- `image_size`: pixels; images are resized (shorter side) and cropped. `augment`: none, flip or crop_flip.
- `train_samples`, `evaluation_samples`: limits on training and validation samples, drawn evenly from the classes.
- `optimizer`: sgd, adam, adamw, adafactor or muon; with bitsandbytes also adamw_8bit, lion and lion_8bit.

Images are cached as bytes in a memory-mapped file that all workers of a machine share; augmentation runs on the device.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..spaces.errors import TaskError, near_miss
from ..spaces.trial import TrialSetup
from .data.batches import SampleKeys, mixed
from .optimizers import named_optimizer
from .task import Data, Loss, Score, Task, smoothed_cross_entropy

_SETS: dict[str, Callable[..., Any]] = {
    "cifar10": torchvision.datasets.CIFAR10,
    "cifar100": torchvision.datasets.CIFAR100,
    "fashionmnist": torchvision.datasets.FashionMNIST,
    "mnist": torchvision.datasets.MNIST,
}
_AUGMENTS = ("none", "flip", "crop_flip")
_SMALL = 64  # pixels up to which a stem designed for 224 loses too much resolution


@dataclass(frozen=True, eq=False)
class Images(Dataset[tuple[Tensor, Tensor, Tensor | None]]):
    """Images as bytes with their labels; a batch is (pixels (n, 3, size, size) uint8, labels, random numbers or None).

    `pixels` may be memory-mapped. With `augmented`, each sample gets three random numbers. `resident` is a copy of pixels and
    labels on a device.
    """

    pixels: np.ndarray
    labels: np.ndarray
    classes: int
    augmented: bool = False
    resident: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, keys: SampleKeys) -> tuple[Tensor, Tensor, Tensor | None]:
        uniform = keys.uniform(3) if self.augmented else None
        if self.resident is None:
            return (
                torch.from_numpy(self.pixels[keys.index]),
                torch.from_numpy(self.labels[keys.index]),
                uniform,
            )
        pixels, labels = self.resident
        index = torch.from_numpy(keys.index).to(pixels.device, non_blocking=True)
        return pixels[index], labels[index], uniform

    @property
    def nbytes(self) -> int:
        return int(self.pixels.nbytes + self.labels.nbytes)

    def on(self, device: torch.device) -> Images:
        """The same images with a copy on the device, from which batches are taken."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mapped file cannot be written to
            pixels = torch.from_numpy(self.pixels)
        return replace(
            self, resident=(pixels.to(device, copy=True), torch.from_numpy(self.labels).to(device))
        )


class Vision(Task):
    """A torchvision model on images kept in memory."""

    def data(self, setup: TrialSetup) -> Data:
        options = setup.parameters
        augment = _augment(setup)
        dataset = str(options.get("dataset", "folder"))
        if dataset != "folder" and dataset not in _SETS:
            raise TaskError(
                f"space.dataset: expected one of folder, {', '.join(_SETS)}; got {dataset!r}.{near_miss(dataset, _SETS)}"
            )
        root = setup.path(str(options.get("root", "data")))
        size = int(options.get("image_size", 0))
        download = bool(options.get("download", False))
        limits = {
            "train": int(options.get("train_samples", 0)),
            "validation": int(options.get("evaluation_samples", 0)),
            "test": 0,
        }
        train, validation, test = (
            _images(dataset, root, part, size, download, limits[part]) for part in limits
        )
        assert train is not None and validation is not None
        return Data(replace(train, augmented=augment != "none"), validation, test)

    def model(self, setup: TrialSetup) -> nn.Module:
        data = self.data(setup).train
        assert isinstance(data, Images)
        size = data.pixels.shape[-1]
        name = str(setup.parameters.get("model", "small_cnn"))
        width = int(setup.parameters.get("width", 16))
        net = (
            small_cnn(width, data.classes)
            if name == "small_cnn"
            else _torchvision_model(name, data.classes, size)
        )
        mean, std = _statistics(data)
        return nn.Sequential(Normalize(mean, std), net)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        pixels, labels, uniform = batch
        if uniform is not None:
            pixels = augmented(pixels, uniform, crop=_augment(setup) == "crop_flip")
        return Loss(smoothed_cross_entropy(model(pixels), labels, setup), len(labels))

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return named_optimizer(model, setup)

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        pixels, labels, _ = batch
        logits = model(pixels).float()
        return {
            "accuracy": Score((logits.argmax(-1) == labels).sum(), len(labels)),
            "val_loss": Score(nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels)),
        }


class Normalize(nn.Module):
    """Normalize bytes to mean 0 and standard deviation 1 per channel, on the device."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.view(1, -1, 1, 1))
        self.register_buffer("std", std.view(1, -1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        return (pixels.float() - self.mean) / self.std


def small_cnn(width: int, classes: int) -> nn.Module:
    """Three convolutions with BatchNorm, each followed by pooling; trains in seconds on one CPU core."""

    def block(channels: int, out: int) -> list[nn.Module]:
        return [
            nn.Conv2d(channels, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]

    return nn.Sequential(
        *block(3, width),
        *block(width, 2 * width),
        *block(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


def augmented(pixels: Tensor, uniform: Tensor, *, crop: bool) -> Tensor:
    """Flip half of the images and, with `crop`, shift each by up to an eighth of its size with zero padding.

    Args:
        pixels: (n, channels, size, size).
        uniform: (n, 3) in [0, 1): flip, shift down, shift right.
    """
    size = pixels.shape[-1]
    here = torch.arange(size, device=pixels.device)
    columns = torch.where(uniform[:, :1] < 0.5, size - 1 - here, here)
    rows = here.expand(len(pixels), size)
    if crop:
        pad = size // 8
        pixels = nn.functional.pad(pixels, (pad, pad, pad, pad))
        shift = (uniform[:, 1:] * (2 * pad + 1)).long()
        rows, columns = rows + shift[:, :1], columns + shift[:, 1:]
    sample = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    return pixels[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _augment(setup: TrialSetup) -> str:
    dataset = str(setup.parameters.get("dataset", "folder"))
    chosen = str(setup.parameters.get("augment", "none" if dataset == "mnist" else "flip"))
    if chosen not in _AUGMENTS:
        raise TaskError(
            f"space.augment: expected one of {', '.join(_AUGMENTS)}; got {chosen!r}.{near_miss(chosen, _AUGMENTS)}"
        )
    return chosen


def _torchvision_model(name: str, classes: int, size: int) -> nn.Module:
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise TaskError(
            f"space.model: expected small_cnn or a torchvision model, got {name!r}.{near_miss(name, known)} "
            "`python -c 'import torchvision; print(torchvision.models.list_models())'` prints them."
        )
    options: dict[str, Any] = {"image_size": size} if name.startswith("vit") else {}
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **options)
    if size <= _SMALL:
        _fit_stem(model)
    return model


def _fit_stem(model: nn.Module) -> None:
    """Preserve the resolution of small images: stride 1 in the first convolution, and no initial pooling in ResNets."""
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    if isinstance(getattr(model, "maxpool", None), nn.MaxPool2d) and isinstance(
        getattr(model, "conv1", None), nn.Conv2d
    ):
        bias = first.bias is not None
        model.conv1 = nn.Conv2d(first.in_channels, first.out_channels, 3, stride=1, padding=1, bias=bias)
        model.maxpool = nn.Identity()
    elif first.stride == (2, 2) and first.kernel_size <= (7, 7):
        first.stride = (1, 1)


def _statistics(images: Images) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, in bytes, over the first 1,000 images."""
    pixels = np.asarray(images.pixels[:1000], dtype=np.float32)
    std = pixels.std(axis=(0, 2, 3)).clip(1.0)
    return torch.from_numpy(pixels.mean(axis=(0, 2, 3))), torch.from_numpy(std)


def _balanced_subset(labels: np.ndarray, samples: int) -> np.ndarray:
    """Indices of `samples` samples from a fixed shuffle, balanced over the classes as far as possible; 0 means all."""
    if samples == 0 or samples >= len(labels):
        return np.arange(len(labels))
    rank = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        rank[members[np.argsort(mixed(int(label), members))]] = np.arange(len(members))
    return np.sort(np.lexsort((labels, rank))[:samples])


@lru_cache(maxsize=8)
def _images(dataset: str, root: Path, part: str, size: int, download: bool, samples: int) -> Images | None:
    if dataset == "folder":
        folder = _folder_of(root, part)
        if folder is None:
            return None
        source = torchvision.datasets.ImageFolder(str(folder))
        paths = [path for path, _ in source.samples]
        labels, classes = source.targets, len(source.classes)
        stamp = f"{folder} {len(paths)} {max(os.stat(path).st_mtime_ns for path in paths[:: max(1, len(paths) // 1000)])}"

        def image(index: int) -> Any:
            return source.loader(paths[index])
    else:
        if part == "test":
            return None
        try:
            source = _SETS[dataset](str(root), train=part == "train", download=download)
        except (RuntimeError, OSError) as error:
            raise TaskError(
                f"space.root: expected {dataset} in {root}, got: {error}. Copy it there, or write download: true."
            ) from None
        labels, classes = [int(label) for label in source.targets], len(source.classes)
        stamp = f"{dataset} {root} {part} {len(labels)}"

        def image(index: int) -> Any:
            return source[index][0].convert("RGB")

    if not labels:
        raise TaskError(f"space.root: expected images in {root}, got none for {part}")
    size = size or (min(image(0).size) if min(image(0).size) <= _SMALL else 224)
    all_labels = np.asarray(labels, dtype=np.int64)
    subset = _balanced_subset(all_labels, samples)
    pixels = _cached_pixels(f"{stamp} {samples}", lambda index: image(int(subset[index])), len(subset), size)
    return Images(pixels, all_labels[subset], classes)


def _folder_of(root: Path, part: str) -> Path | None:
    """train/; val/ (or test/ if there is no val/); test/ only next to a val/."""
    names = {"train": ["train"], "validation": ["val", "valid", "validation", "test"], "test": ["test"]}[part]
    found = next((root / name for name in names if (root / name).is_dir()), None)
    if found is None and part != "test":
        raise TaskError(
            f"space.root: expected a folder {' or '.join(f'{name}/' for name in names)} in {root}, got none"
        )
    return None if part == "test" and found == _folder_of(root, "validation") else found


def _cached_pixels(stamp: str, image: Callable[[int], Any], samples: int, size: int) -> np.ndarray:
    """All images as bytes (samples, 3, size, size), decoded once and cached in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bsearch"
    path = cache / f"images-{hashlib.sha256(f'{stamp} {size}'.encode()).hexdigest()[:16]}.npy"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # Written to a temporary file and moved: two workers may decode at once, and neither reads a partial file.
        with tempfile.NamedTemporaryFile(dir=cache, suffix=".part", delete=False) as part:
            try:
                np.save(part, _decoded(image, samples, size))
            except BaseException:
                os.unlink(part.name)
                raise
        os.replace(part.name, path)
    pixels: np.ndarray = np.load(path, mmap_mode="r")
    return pixels


def _decoded(image: Callable[[int], Any], samples: int, size: int) -> np.ndarray:
    pixels = np.empty((samples, 3, size, size), dtype=np.uint8)
    for index in range(samples):
        picture: Any = image(index)
        if picture.size != (size, size):
            picture = torchvision.transforms.functional.resize(picture, size)
            picture = torchvision.transforms.functional.center_crop(picture, [size, size])
        pixels[index] = np.asarray(picture).transpose(2, 0, 1)
    return pixels
