"""Images: any folder of them, torchvision's models, augmentation that belongs to the sample and not to the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from bsearch.objectives.data.batches import Fetcher, SampleStream
from bsearch.objectives.training import TrainingRun, train_task
from bsearch.objectives.vision import Vision, augmented
from bsearch.spaces.errors import TaskError
from helpers import setup
from PIL import Image


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes of 20 images, dark and light, 20 x 24 pixels, and a test folder of 6."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    generator = np.random.default_rng(0)
    for part, count in [("train", 20), ("test", 3)]:
        for label, light in [("dark", 60), ("light", 180)]:
            (tmp_path / "images" / part / label).mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(light - 60, light + 60, (24, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / part / label / f"{index}.png")
    return tmp_path / "images"


def vision_setup(folder: Path, **parameters: object):  # type: ignore[no-untyped-def]
    return setup(8, budget=160, parameters={"root": str(folder), "width": 4, **parameters})


def test_a_folder_of_images_trains(folder: Path) -> None:
    last = list(train_task(Vision(), vision_setup(folder)))[-1]
    assert last.accuracy == 1.0
    assert last.facts["ghost_batch"] == 8


def test_images_are_decoded_once_and_resized(folder: Path) -> None:
    data = Vision().data(vision_setup(folder, image_size=16))
    assert data.train.pixels.shape == (40, 3, 16, 16)
    assert isinstance(data.train.pixels, np.memmap)
    assert data.test is None
    assert len(list((folder.parent / "cache" / "bsearch").glob("*.npy"))) == 2
    assert not list((folder.parent / "cache" / "bsearch").glob("*.part"))


def test_some_of_the_samples_are_spread_over_the_classes(folder: Path) -> None:
    data = Vision().data(vision_setup(folder, train_samples=10))
    assert np.bincount(data.train.labels).tolist() == [5, 5]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vgg11_bn"])
def test_torchvisions_models_fit_small_images(folder: Path, name: str) -> None:
    run = TrainingRun(Vision(), vision_setup(folder, model=name, image_size=32))
    pixels, _, uniform = run.train_fetcher.fetch(run.stream.take(0, 4))
    assert run.model(pixels).shape == (4, 2)
    assert uniform.shape == (4, 3)
    if name == "resnet18":
        net = run.model[1]
        assert (
            net.layer1(net.maxpool(net.relu(net.bn1(net.conv1(torch.zeros(1, 3, 32, 32)))))).shape[-1] == 32
        )


@pytest.mark.parametrize(("size", "stride"), [(64, 1), (65, 2)])
def test_the_stem_of_a_model_is_that_of_small_images_where_they_are_small(
    folder: Path, size: int, stride: int
) -> None:
    net = Vision().model(vision_setup(folder, model="squeezenet1_1", image_size=size))
    first = next(module for module in net.modules() if isinstance(module, torch.nn.Conv2d))
    assert first.stride == (stride, stride)


def test_augmentation_belongs_to_the_sample(folder: Path) -> None:
    data = Vision().data(vision_setup(folder)).train
    stream = SampleStream(40, 0)
    whole = Fetcher(data).fetch(stream.take(0, 8))
    parts = [Fetcher(data).fetch(stream.take(start, 2)) for start in (0, 2, 4, 6)]
    assert torch.equal(
        augmented(whole[0], whole[2], crop=True),
        torch.cat([augmented(pixels, uniform, crop=True) for pixels, _, uniform in parts]),
    )


def test_augmentation_flips_and_shifts_and_nothing_else() -> None:
    pixels = torch.arange(1, 65).view(1, 1, 8, 8)
    same = augmented(pixels, torch.tensor([[0.9, 0.5, 0.5]]), crop=True)
    assert torch.equal(same, pixels)
    flipped = augmented(pixels, torch.tensor([[0.1, 0.0, 0.0]]), crop=False)
    assert torch.equal(flipped, pixels.flip(-1))
    shifted = augmented(pixels, torch.tensor([[0.9, 0.0, 0.5]]), crop=True)
    assert torch.equal(shifted[..., 1:, :], pixels[..., :-1, :])
    assert torch.equal(shifted[..., 0, :], torch.zeros(1, 1, 8))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"model": "resnet81"},
            "expected small_cnn or a torchvision model, got 'resnet81'. Did you mean 'resnet18'?",
        ),
        (
            {"augment": "flop"},
            "space.augment: expected one of none, flip, crop_flip; got 'flop'. Did you mean 'flip'?",
        ),
        (
            {"dataset": "cifar"},
            "space.dataset: expected one of folder, cifar10, .* got 'cifar'. Did you mean 'cifar10'?",
        ),
        ({"dataset": "cifar10"}, "space.root: expected cifar10 in .* Copy it there, or write download: true"),
        ({"root": "/nowhere"}, "space.root: expected a folder train/ in /nowhere, got none"),
        (
            {"optimizer": "sdg"},
            "adafactor, lion, lion_8bit, muon; got 'sdg'. Did you mean 'sgd'?",
        ),
    ],
)
def test_a_slip_in_the_options_is_told(folder: Path, parameters: dict[str, str], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        TrainingRun(Vision(), vision_setup(folder, **parameters))


@pytest.mark.slow
@pytest.mark.data
def test_cifar10_is_learned_from_its_images(
    cifar_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = setup(
        64, budget=2000 * 4, rate=0.1, parameters={"root": str(cifar_folder), "image_size": 16, "width": 8}
    )
    last = list(train_task(Vision(), made))[-1]
    assert last.accuracy is not None
    assert last.accuracy > 0.25  # ten classes, 2,000 images, a few seconds


def test_images_that_live_on_a_device_give_the_same_batches(folder: Path) -> None:
    """A copy on the CPU stands in for the GPU's."""
    images = Vision().data(vision_setup(folder, augment="flip")).train
    keys = SampleStream(40, seed=3).take(35, 12)
    there = images.on(torch.device("cpu"))  # type: ignore[attr-defined]
    assert there.resident[0].data_ptr() != images.pixels.ctypes.data  # type: ignore[attr-defined]
    for one, other in zip(images.fetch(keys), there.fetch(keys), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(one, other)
    run = TrainingRun(Vision(), vision_setup(folder))
    size = run.train_fetcher.nbytes + run.validation_fetcher.nbytes  # type: ignore[operator]
    assert run.resident_within(size / 0.0299) == size
    assert run.resident_within(size / 0.0301) == 0
