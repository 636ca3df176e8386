"""A GAN on digits: two optimizers and two passes over each step, with the steps, rates and checkpoints of a trial."""

import torch
import torch.nn.functional as F
from bsearch import Data, Loop
from bsearch.objectives.digits import digit_images
from torch import nn
from torch.utils.data import TensorDataset

NOISE = 16


def net(inputs, width, outputs):
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


def frechet(made, real):
    """Squared Fréchet distance of two sets of images, as normal distributions of their pixels."""
    a, b = (torch.cov(images.T.double()) for images in (made, real))
    eigenvalues = torch.linalg.eigvals(a @ b).real.clamp(min=0)
    return (made.mean(0) - real.mean(0)).square().sum() + a.trace() + b.trace() - 2 * eigenvalues.sqrt().sum()


def train(setup):
    images = 2 * digit_images()[0] - 1
    data = Data(TensorDataset(images[:1500]), TensorDataset(images[1500:]))
    torch.manual_seed(setup.seed)
    width = setup.parameters["width"]
    g, d = net(NOISE, width, 64), net(64, width, 1)
    og, od = (
        torch.optim.Adam(model.parameters(), lr=setup.learning_rate, betas=(0.5, 0.999)) for model in (g, d)
    )

    loop = Loop(setup, data, models={"g": g, "d": d}, optimizers={"g": og, "d": od})
    for step in loop:
        for part in step:
            (real,) = part.batch
            made = g(torch.randn(part.samples, NOISE, device=real.device)).detach()
            (part.weight * (F.softplus(-d(real)) + F.softplus(d(made))).mean()).backward()
        od.step()
        od.zero_grad()
        for part in step:
            made = g(torch.randn(part.samples, NOISE, device=loop.device))
            (part.weight * F.softplus(-d(made)).mean()).backward()
        og.step()
        og.zero_grad()
        od.zero_grad()
        if step.evaluates:
            with torch.no_grad():
                noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(0)).to(loop.device)
                yield loop.measure(frechet=frechet(g(noise).cpu(), images[1500:]))
