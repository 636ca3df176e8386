"""Loops of one's own, which yield measurements: what they do with a plan is theirs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from bsearch.spaces.trial import Measurement, TrialSetup
from torch import Tensor, nn
from zoo.plain import digits
from zoo.text import Bigrams, sentences
from zoo.vision import TRAINING, VALIDATION, convolutional


def samples(setup: TrialSetup, count: int) -> Iterator[Tensor]:
    """Every step's samples, shuffled anew in each epoch."""
    left, order = setup.samples_budget, torch.empty(0, dtype=torch.int64)
    while left:
        size = min(setup.effective_batch, left)
        while len(order) < size:
            order = torch.cat([order, torch.randperm(count)])
        yield order[:size]
        order, left = order[size:], left - size


def own_loop(setup: TrialSetup) -> Iterator[Measurement]:
    """As docs/own-loop.md shows it."""
    images, labels = digits()
    torch.manual_seed(setup.seed)
    model = convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9)
    seen, elapsed_s = 0, 0.0
    for chosen in samples(setup, TRAINING.stop):
        started = time.perf_counter()
        optimizer.zero_grad()
        for part in chosen.split(setup.plan.largest_micro_batch):
            loss = F.cross_entropy(model(images[part]), labels[part], reduction="sum")
            (loss / len(chosen)).backward()
        optimizer.step()
        seen += len(chosen)
        elapsed_s += time.perf_counter() - started
    with torch.no_grad():
        accuracy = (model(images[VALIDATION]).argmax(1) == labels[VALIDATION]).float().mean()
    yield Measurement(samples_seen=seen, elapsed_s=elapsed_s, accuracy=float(accuracy))


def nano_gpt(setup: TrialSetup) -> Iterator[Measurement]:
    """nanoGPT's loop: the mean of micro-batches' means, over texts of unequal length."""
    texts = nn.utils.rnn.pad_sequence(sentences()[0], batch_first=True)
    torch.manual_seed(setup.seed)
    model = Bigrams()
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.learning_rate, betas=setup.betas)

    def mean(batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)

    seen, elapsed_s = 0, 0.0
    for chosen in samples(setup, 400):
        started = time.perf_counter()
        parts = chosen.split(setup.plan.largest_micro_batch)
        for part in parts:
            loss = mean(texts[part]) / len(parts)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += len(chosen)
        elapsed_s += time.perf_counter() - started
    with torch.no_grad():
        loss = mean(texts[400:])
    yield Measurement(samples_seen=seen, elapsed_s=elapsed_s, scores={"val_loss": float(loss)})


def adversarial(setup: TrialSetup) -> Iterator[Measurement]:
    """A GAN: two optimizers that take turns, each over the whole step's batch."""
    images = digits()[0][TRAINING].flatten(1)
    torch.manual_seed(setup.seed)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Flatten(0))
    rates = {"lr": setup.learning_rate / 100, "betas": (0.5, 0.999)}
    of_generator, of_critic = (torch.optim.Adam(net.parameters(), **rates) for net in (generator, critic))
    seen, elapsed_s = 0, 0.0
    for chosen in samples(setup, len(images)):
        started = time.perf_counter()
        of_critic.zero_grad()
        for part in chosen.split(setup.plan.largest_micro_batch):
            with torch.no_grad():
                made = generator(torch.randn(len(part), 8))
            losses = F.softplus(-critic(images[part])) + F.softplus(critic(made))
            (losses.sum() / len(chosen)).backward()
        of_critic.step()
        of_generator.zero_grad()
        for part in chosen.split(setup.plan.largest_micro_batch):
            (F.softplus(-critic(generator(torch.randn(len(part), 8)))).sum() / len(chosen)).backward()
        of_generator.step()
        seen += len(chosen)
        elapsed_s += time.perf_counter() - started
    with torch.no_grad():
        made = generator(torch.randn(200, 8, generator=torch.Generator().manual_seed(0)))
        distance = torch.cdist(made, images).amin(1).mean()
    yield Measurement(samples_seen=seen, elapsed_s=elapsed_s, scores={"distance": float(distance)})
