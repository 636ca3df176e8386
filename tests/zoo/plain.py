"""The twins' own loop, in plain torch: whole batches, the mean that torch or the paper defines, one backward pass a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor

# The learning rate of every training of the zoo; bsearch's schedule is constant there.
RATE = 0.05

# A step's samples by their place in the training set, micro-batch by micro-batch. Twins with random losses draw for each
# micro-batch in turn, so that every sample gets the noise that bsearch's got; all others only see the whole.
Step = Sequence[Sequence[int]]


def whole(step: Step) -> list[int]:
    return [sample for part in step for sample in part]


def trained(
    optimizer: torch.optim.Optimizer, steps: Sequence[Step], loss: Callable[[Step], Tensor]
) -> list[float]:
    """The mean loss of every step, before its update."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        mean = loss(step)
        mean.backward()
        optimizer.step()
        losses.append(float(mean.detach()))
    return losses


@cache
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 8x8 digits: images (1797, 1, 8, 8) in [0, 1], labels (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
