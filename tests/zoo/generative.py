"""Losses that draw random numbers or differentiate twice: a VAE, a diffusion model, a penalty on input gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from bsearch.objectives.task import Data, Loss, Score, Task
from bsearch.spaces.trial import TrialSetup
from sklearn.datasets import make_moons
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from zoo.plain import RATE, Step, digits, trained, whole
from zoo.vision import VALIDATION, Digits, nesterov


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32))
        self.decoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 64))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        code = mean
        if self.training:
            code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


def evidence(logits: Tensor, images: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """PyTorch's example: summed over pixels, codes and samples."""
    reconstruction = F.binary_cross_entropy_with_logits(logits, images.flatten(1), reduction="sum")
    return reconstruction - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())


class Autoencoder(Digits):
    def model(self, setup: TrialSetup) -> nn.Module:
        return VAE()

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=setup.learning_rate)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, _ = batch
        logits, mean, log_variance = model(images)
        return Loss(evidence(logits, images, mean, log_variance), len(images))

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        loss = self.loss(model, batch, setup)
        return {"elbo": Score(-loss.total.double(), loss.denominator)}


def autoencoder(steps: Sequence[Step]) -> list[float]:
    images = digits()[0]
    torch.manual_seed(0)
    model = VAE()

    def loss(step: Step) -> Tensor:
        chosen = images[whole(step)]
        mean, log_variance = model.encoder(chosen).chunk(2, 1)
        noise = torch.cat([torch.randn(len(part), 16) for part in step])
        logits = model.decoder(mean + noise * (log_variance / 2).exp())
        likelihood = logits * chosen.flatten(1) - F.softplus(logits)
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance) / 2
        return (divergence.sum(1) - likelihood.sum(1)).mean()

    return trained(torch.optim.SGD(model.parameters(), lr=RATE), steps, loss)


def autoencoder_metrics() -> dict[str, float]:
    images = digits()[0][VALIDATION]
    torch.manual_seed(0)
    model = VAE().eval()
    bounds = []
    for image in images:
        logits, mean, log_variance = (values[0].detach().double() for values in model(image[None]))
        likelihood = (logits * image.flatten() - F.softplus(logits)).sum()
        bounds.append(float(likelihood - (mean**2 + log_variance.exp() - 1 - log_variance).sum() / 2))
    return {"elbo": sum(bounds) / len(bounds)}


# Diffusion


STEPS = 50


@cache
def moons() -> Tensor:
    return torch.tensor(make_moons(800, noise=0.05, random_state=14)[0], dtype=torch.float32)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        betas = torch.linspace(1e-4, 0.1, STEPS)
        self.register_buffer("kept", torch.cumprod(1 - betas, 0))
        self.times = nn.Embedding(STEPS, 16)
        self.layers = nn.Sequential(nn.Linear(18, 32), nn.SiLU(), nn.Linear(32, 2))

    def forward(self, points: Tensor, times: Tensor) -> Tensor:
        return self.layers(torch.cat([points, self.times(times)], 1))


class Diffusion(Task):
    """A random time and noise for every sample; they are validated with a noise that stays the same."""

    def data(self, setup: TrialSetup) -> Data:
        points = moons()
        generator = torch.Generator().manual_seed(0)
        times = torch.randint(0, STEPS, (200,), generator=generator)
        noise = torch.randn(200, 2, generator=generator)
        return Data(TensorDataset(points[:600]), TensorDataset(points[600:], times, noise))

    def model(self, setup: TrialSetup) -> nn.Module:
        return Denoiser()

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9)

    def error(self, model: nn.Module, points: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        kept = model.kept[times, None]
        noisy = kept.sqrt() * points + (1 - kept).sqrt() * noise
        return F.mse_loss(model(noisy, times), noise, reduction="sum")

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        (points,) = batch
        times = torch.randint(0, STEPS, (len(points),), device=points.device)
        return Loss(self.error(model, points, times, torch.randn_like(points)), points.numel())

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        points, times, noise = batch
        return {"val_loss": Score(self.error(model, points, times, noise), points.numel())}


def denoised_mean(model: Denoiser, points: Tensor, times: Tensor, noise: Tensor) -> Tensor:
    betas = torch.linspace(1e-4, 0.1, STEPS).tolist()
    signals = []
    for time in times.tolist():
        kept = 1.0
        for beta in betas[: time + 1]:
            kept *= 1 - beta
        signals.append(kept)
    signal = torch.tensor(signals)[:, None]
    return F.mse_loss(model(signal**0.5 * points + (1 - signal) ** 0.5 * noise, times), noise)


def diffusion(steps: Sequence[Step]) -> list[float]:
    points = moons()
    torch.manual_seed(0)
    model = Denoiser()

    def loss(step: Step) -> Tensor:
        drawn = [(torch.randint(0, STEPS, (len(part),)), torch.randn(len(part), 2)) for part in step]
        times, noise = (torch.cat(values) for values in zip(*drawn, strict=True))
        return denoised_mean(model, points[whole(step)], times, noise)

    return trained(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9), steps, loss)


def diffusion_metrics() -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    times, noise = (
        torch.randint(0, STEPS, (200,), generator=generator),
        torch.randn(200, 2, generator=generator),
    )
    torch.manual_seed(0)
    return {"val_loss": float(denoised_mean(Denoiser(), moons()[600:], times, noise).detach())}


# Twice differentiated


def smooth() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))


class GradientPenalty(Digits):
    """Double backpropagation: the loss may not change fast with the image."""

    def model(self, setup: TrialSetup) -> nn.Module:
        return smooth()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        images.requires_grad_(True)
        losses = F.cross_entropy(model(images), labels, reduction="sum")
        (slopes,) = torch.autograd.grad(losses, images, create_graph=True)
        return Loss(losses + 0.5 * slopes.pow(2).sum(), len(labels))


def gradient_penalty(steps: Sequence[Step]) -> list[float]:
    images, labels = digits()
    torch.manual_seed(0)
    model = smooth()

    def of_image(image: Tensor, label: Tensor) -> Tensor:
        image = image.clone().requires_grad_()
        value = F.cross_entropy(model(image[None]), label[None])
        (slope,) = torch.autograd.grad(value, image, create_graph=True)
        return value + slope.pow(2).sum() / 2

    return trained(
        nesterov(model),
        steps,
        lambda step: torch.stack([of_image(images[sample], labels[sample]) for sample in whole(step)]).mean(),
    )
