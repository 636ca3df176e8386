"""The gradient noise scale of a training, from gradients that it makes anyway."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# A look costs up to 7 % of a step of a millisecond (docs/log.md), so at most every fourth step is looked at, and of long
# trainings some hundreds of steps.
_EVERY, _LOOKS = 4, 256

# Blocks of consecutive steps that the interval rests on, and Student's t for them: 95 %, one degree of freedom fewer.
_BLOCKS, _STUDENT_T = 10, 2.262


class NoiseScale:
    """How many samples a batch holds whose gradient is as much noise as signal: tr(Sigma) / |G|^2.

    From squared norms of the mean gradients g_b and g_B over b and B > b samples,
    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b) and tr(Sigma) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B), both unbiased whether or not
    the one batch holds the other. They are averaged over steps, each apart, and then divided, for a quotient's mean is biased.
    Source: McCandlish et al. 2018, appendix A, https://arxiv.org/abs/1812.06162. A hint how far larger batches pay, and no
    more: it takes much for granted, and the batch that trains best may be another (Merrill 2025, arXiv 2505.23971).

    g_B is a step's gradient before clipping. g_b is a device's first pass of several, or where there are several devices the
    shares of each. Nothing is found out with one pass on one device, nor under a gradient scaler (fp16). With batch statistics
    each pass sees its own, and what that adds counts as noise. A step draws its samples without replacement, so |G|^2 is that
    of all there could be, not of the training set: where a set is learnt by heart there is none left, and nothing is reported.

    >>> noise = NoiseScale()
    >>> for number in range(40):
    ...     noise.add(10, 3.0 + number % 2, 40, 1.5)  # |G|^2 = 1.5 - 2/3 = 5/6, tr(Sigma) = 2 / (3/40) = 80/3
    >>> round(noise.facts()["noise_scale"], 6)
    32.0
    """

    def __init__(self) -> None:
        self.looks = False  # whether this step's gradients are looked at
        self._seen: list[Tensor] = []
        self._unread: list[_Look] = []
        self._pairs: list[tuple[float, float]] = []  # estimates of tr(Sigma) and |G|^2, step by step

    def look_at(self, number: int, steps: int) -> None:
        """Whether step `number` of so many is looked at, from 1 on; never the first three, whose bytes may be counted."""
        self.looks = number % max(_EVERY, steps // _LOOKS) == 0

    def see(self, gradients: list[Tensor]) -> None:
        """Part of a small batch's gradient, which may change afterwards."""
        self._seen += torch._foreach_norm(gradients)

    def add_step(self, small_batch: float, denominator: Tensor | float, big_batch: int, big: list[Tensor]) -> None:
        """A step: what was seen of its small batch, as sums over `big_batch`, and norms of the parts of its mean gradient.

        Args:
            small_batch: samples in the small batch.
            denominator: what the small batch's own mean divides by.
        """
        self._unread.append(_Look(small_batch, denominator, big_batch, self._seen, big))
        self._seen = []

    def read(self, mean: Callable[[Tensor], Tensor] = lambda here: here) -> None:
        """Read the steps, by `mean` over all devices of what each saw. Kept for here, since it waits for a GPU."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        both = [part for look in unread for part in (look.small, look.big)]
        norms = torch.stack([norm for part in both for norm in part]).double()
        owners = torch.tensor([index for index, part in enumerate(both) for _ in part], device=norms.device)
        squares = norms.new_zeros(len(both)).index_add_(0, owners, norms**2).view(-1, 2)
        squares[:, 0] *= torch.stack([look.mean_over_sum(norms) for look in unread]) ** 2
        for look, (small, big) in zip(unread, mean(squares).tolist(), strict=True):
            # A pass whose every label is ignored has no mean gradient.
            if math.isfinite(small) and math.isfinite(big):
                self.add(look.small_batch, small, look.big_batch, big)

    def add(self, small_batch: float, small: float, big_batch: float, big: float) -> None:
        """A step's squared norms of mean gradients over a small and a big batch."""
        noise = (small - big) / (1 / small_batch - 1 / big_batch)
        self._pairs.append((noise, (big_batch * big - small_batch * small) / (big_batch - small_batch)))

    def state(self) -> list[list[float]]:
        """Its estimates so far, for a checkpoint; what was not read yet is not among them."""
        return [list(pair) for pair in self._pairs]

    def set_state(self, state: Sequence[Sequence[float]]) -> None:
        self._pairs = [(noise, signal) for noise, signal in state]

    def facts(self) -> dict[str, float]:
        """`noise_scale` in samples over all but the first quarter of the steps so far, and the 95 % interval about it.

        A training begins with steep slopes and little noise, which say nothing of the rest. The interval is Fieller's for the
        quotient of two means, over blocks of steps, for neighbours are alike. Nothing is told where it has no end: there |G|^2
        does not stand out of its own noise.
        """
        length = len(self._pairs) * 3 // 4 // _BLOCKS
        if length == 0:
            return {}
        blocks = np.reshape(self._pairs[-length * _BLOCKS :], (_BLOCKS, length, 2)).mean(axis=1)
        over, under = blocks.mean(axis=0).tolist()
        # (over - x under)^2 <= t^2 Var(over - x under): where the parabola a x^2 - 2 b x + c is not above zero.
        (c, b), (_, a) = np.outer((over, under), (over, under)) - _STUDENT_T**2 / _BLOCKS * np.cov(blocks.T)
        if min(over, under, a) <= 0:
            return {}
        root = math.sqrt(max(b**2 - a * c, 0.0))
        return {
            "noise_scale": over / under,
            "noise_scale_low": max(float((b - root) / a), 0.0),
            "noise_scale_high": float((b + root) / a),
        }


class _Look(NamedTuple):
    small_batch: float
    denominator: Tensor | float
    big_batch: int
    small: list[Tensor]
    big: list[Tensor]

    def mean_over_sum(self, like: Tensor) -> Tensor:
        return self.big_batch / torch.as_tensor(self.denominator, dtype=like.dtype, device=like.device).detach()
