"""The models that claims are verified with: images and sentences of random numbers, in sizes that suit a GPU or a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ....objectives.loading import load_task
from ....objectives.task import Data, Loss, Score, Task
from ....objectives.vision import small_cnn
from ....spaces.learning_rate import OptimizerSettings
from ....spaces.plan import BatchPlan
from ....spaces.study.training import Training
from ....spaces.trial import TrialSetup

IMAGES, TOKENS = f"{__name__}:Images", f"{__name__}:Tokens"
_CLASSES = 10


@cache
def _images(samples: int, size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(samples, 3, size, size, generator=generator)
    return TensorDataset(pixels, torch.randint(0, _CLASSES, (samples,), generator=generator))


class Images(Task):
    """A model of torchvision, `model`, on random images of `image_size` pixels."""

    def data(self, setup: TrialSetup) -> Data:
        size = int(setup.parameters["image_size"])
        train = _images(int(setup.parameters.get("samples", 512)), size)
        return Data(train, _images(64, size))

    def model(self, setup: TrialSetup) -> nn.Module:
        import torchvision

        name, size = str(setup.parameters["model"]), int(setup.parameters["image_size"])
        if name == "small_cnn":
            return small_cnn(16, _CLASSES)
        if name == "small_vit":
            return torchvision.models.VisionTransformer(size, size // 8, 4, 4, 128, 512, num_classes=_CLASSES)  # type: ignore[no-any-return]
        return torchvision.models.get_model(name, weights=None, num_classes=_CLASSES)  # type: ignore[no-any-return]


class Tokens(Task):
    """A language model of `layers` layers of `width`, on rows of `tokens` random tokens; every token is predicted."""

    def data(self, setup: TrialSetup) -> Data:
        tokens, words = int(setup.parameters["tokens"]), int(setup.parameters["words"])
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, words, (512, tokens + 1), generator=generator)
        train, validation = (TensorDataset(part[:, :-1], part[:, 1:]) for part in (rows, rows[:32]))
        return Data(train, validation)

    def model(self, setup: TrialSetup) -> nn.Module:
        values = setup.parameters
        return GPT(
            int(values["words"]), int(values["tokens"]), int(values["width"]), int(values["layers"]),
            float(values.get("dropout", 0.0)), encoder=values["model"] == "encoder",
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        rows, following = batch
        logits = model(rows)
        return Loss(
            nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum"),
            following.numel(),
        )

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Mapping[str, Score]:
        rows, following = batch
        logits = model(rows).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, following.flatten(), reduction="sum")
        return {
            "val_loss": Score(loss, following.numel()),
            "accuracy": Score((logits.argmax(-1) == following.flatten()).sum(), following.numel()),
        }

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            model.parameters(), lr=setup.learning_rate, fused=setup.device == "gpu" or None
        )


class GPT(nn.Module):
    """A decoder with tied embeddings, as GPT-2 has it; or PyTorch's `TransformerEncoder` as it comes."""

    def __init__(
        self, words: int, tokens: int, width: int, layers: int, dropout: float, *, encoder: bool = False
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        heads = max(width // 64, 1)
        self.encoder: nn.Module | None = None
        if encoder:
            layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(0 if encoder else layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.words(rows) + self.places.weight[: rows.shape[1]]
        hidden = self.encoder(hidden) if self.encoder is not None else hidden
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attended, self.projected = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        rows, tokens, width = hidden.shape
        parts = self.attended(self.first(hidden)).view(rows, tokens, 3, self.heads, width // self.heads)
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        dropout = self.dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=dropout
        )
        hidden = hidden + self.projected(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return hidden + self.wide(self.second(hidden))  # type: ignore[no-any-return]


def _image(model: str, size: int) -> tuple[str, dict[str, Any]]:
    return IMAGES, {"model": model, "image_size": size}


def _gpt(
    model: str, words: int, tokens: int, width: int, layers: int, dropout: float = 0.0
) -> tuple[str, dict[str, Any]]:
    return TOKENS, {
        "model": model,
        "words": words,
        "tokens": tokens,
        "width": width,
        "layers": layers,
        "dropout": dropout,
    }


# Name, (task, parameters), and three micro-batches.
GPU_MODELS = [
    ("mobilenet_v3_large at 224", _image("mobilenet_v3_large", 224), (1, 16, 128)),
    ("resnet50 at 224", _image("resnet50", 224), (1, 8, 64)),
    ("vit_b_16 at 224", _image("vit_b_16", 224), (1, 8, 32)),
    ("convnext_tiny at 224", _image("convnext_tiny", 224), (1, 8, 32)),
    ("GPT 124M, 512 tokens", _gpt("gpt", 50257, 512, 768, 12), (1, 2, 8)),
    ("GPT 124M with dropout", _gpt("gpt", 50257, 512, 768, 12, 0.1), (1, 2, 8)),
    ("TransformerEncoder", _gpt("encoder", 8192, 512, 512, 6), (1, 8, 32)),
]
CPU_MODELS = [
    ("mobilenet_v3_small at 64", _image("mobilenet_v3_small", 64), (2, 5, 12)),
    ("resnet18 at 32", _image("resnet18", 32), (2, 5, 12)),
    ("small ViT at 64", _image("small_vit", 64), (1, 4, 12)),
    ("convnext_tiny at 32", _image("convnext_tiny", 32), (1, 3, 8)),
    ("small GPT, 64 tokens", _gpt("gpt", 500, 64, 128, 4), (1, 4, 12)),
    ("small GPT with dropout", _gpt("gpt", 500, 64, 128, 4, 0.1), (1, 4, 12)),
    ("TransformerEncoder", _gpt("encoder", 500, 64, 128, 4), (1, 4, 12)),
]


def task_of(reference: str) -> Task:
    """The task of this name."""
    task = load_task(reference)
    assert isinstance(task, Task)
    return task


SMALL_GPT = _gpt("gpt", 500, 64, 128, 4)[1]
TINY_GPT = _gpt("gpt", 100, 16, 64, 2)[1]


def small_model(device: str) -> tuple[str, dict[str, Any]]:
    """A model that is quick on this kind of device, and its parameters for `Images`."""
    name, size = ("mobilenet_v3_small", 64) if device == "gpu" else ("small_cnn", 16)
    return name, {"model": name, "image_size": size}


def models(device: str) -> Sequence[tuple[str, tuple[str, dict[str, Any]], tuple[int, ...]]]:
    """The models for this kind of device."""
    return GPU_MODELS if device == "gpu" else CPU_MODELS


def setup_of(
    plan: BatchPlan, device: str, parameters: Mapping[str, Any] | None = None, **training: Any
) -> TrialSetup:
    """A setup of 2**20 samples with this plan."""
    return TrialSetup(
        study="verify",
        number=0,
        attempt=0,
        plan=plan,
        optimizer=OptimizerSettings(0.01),
        samples_budget=1 << 20,
        training=Training.model_validate({"evaluations": 1, **training}),
        epochs=1,
        device=device,  # type: ignore[arg-type]
        parameters=dict(parameters or {}),
    )
