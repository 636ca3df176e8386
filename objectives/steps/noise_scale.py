"""The gradient noise scale of a training run, from gradients that it computes anyway."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..machine.accelerator import widest_float

# Measuring costs up to 7 % of a one-millisecond step (docs/log.md), so at most every fourth step is measured, and a few
# hundred steps of a long training run.
_EVERY, _MEASURED_STEPS = 4, 256

# Blocks of consecutive steps for the interval, and Student's t at 95 % with one degree of freedom fewer.
_BLOCKS, _STUDENT_T = 10, 2.262


def norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """The norm of each gradient; of sparse ones, which torch 2.11 has no norm of, that of their values."""
    return list(
        torch._foreach_norm([gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients])
    )


class NoiseScale:
    """The batch size at which the gradient's noise equals its signal: tr(Sigma) / |G|^2.

    From squared norms of the mean gradients g_b and g_B over b and B > b samples,
    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b) and tr(Sigma) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B), both unbiased, whether or not
    the larger batch contains the smaller. Each is averaged over steps before dividing, because a mean of quotients is biased.
    Source: McCandlish et al. 2018, appendix A, https://arxiv.org/abs/1812.06162. It only hints at how far larger batches pay:
    it rests on strong assumptions, and the best batch for training may differ (Merrill 2025, arXiv 2505.23971).

    g_B is a step's gradient before clipping. g_b is that of the first micro-batch, or on several devices that of each device's
    share. With one micro-batch on one device, or with a gradient scaler (fp16), nothing is measured. With batch statistics
    each micro-batch has its own, and the difference counts as noise. A step draws samples without replacement, so |G|^2 is that
    of the data distribution, not of the training set: once a set is memorised it vanishes, and nothing is reported. By weights
    it draws with replacement, and both are those of the weighted training set.

    >>> noise = NoiseScale()
    >>> for number in range(40):
    ...     noise.add(10, 3.0 + number % 2, 40, 1.5)  # |G|^2 = 1.5 - 2/3 = 5/6, tr(Sigma) = 2 / (3/40) = 80/3
    >>> round(noise.facts()["noise_scale"], 6)
    32.0
    """

    def __init__(self) -> None:
        self.active = False  # whether this step is measured
        self._small: list[Tensor] = []
        self._unread: list[_StepNorms] = []
        self._pairs: list[tuple[float, float]] = []  # estimates of tr(Sigma) and |G|^2, one pair per step

    def select(self, number: int, steps: int) -> None:
        """Set `active` for step `number` of `steps`, from 1 on; never for the first three, whose bytes may be counted."""
        self.active = number % max(_EVERY, steps // _MEASURED_STEPS) == 0

    def add_small_batch(self, gradients: list[Tensor]) -> None:
        """Record the norms of part of a small batch's gradient; the tensors may change afterwards."""
        self._small += norms_of(gradients)

    def add_step(self, small_batch: float, denominator: Tensor | float, big_batch: int, big: list[Tensor]) -> None:
        """Record a step: its small batch's gradient, as recorded (a sum divided by `big_batch`), and that of the whole step.

        Args:
            small_batch: samples in the small batch.
            denominator: the denominator of the small batch's own mean.
            big: norms of the parts of the step's mean gradient.
        """
        self._unread.append(_StepNorms(small_batch, denominator, big_batch, self._small, big))
        self._small = []

    def read(self, mean: Callable[[Tensor], Tensor] = lambda local: local) -> None:
        """Evaluate the recorded steps, averaged over devices by `mean`. Deferred, because it synchronises with the GPU."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        both = [part for step in unread for part in (step.small, step.big)]
        norms = torch.stack([norm for part in both for norm in part])
        norms = norms.to(widest_float(norms.device))
        owners = torch.tensor([index for index, part in enumerate(both) for _ in part], device=norms.device)
        squares = norms.new_zeros(len(both)).index_add_(0, owners, norms**2).view(-1, 2)
        squares[:, 0] *= torch.stack([step.mean_over_sum(norms) for step in unread]) ** 2
        for step, (small, big) in zip(unread, mean(squares).tolist(), strict=True):
            # Where every label of a micro-batch is ignored, it has no mean gradient.
            if math.isfinite(small) and math.isfinite(big):
                self.add(step.small_batch, small, step.big_batch, big)

    def add(self, small_batch: float, small: float, big_batch: float, big: float) -> None:
        """Add a step's estimates from the squared norms of its mean gradients over a small and a big batch."""
        noise = (small - big) / (1 / small_batch - 1 / big_batch)
        self._pairs.append((noise, (big_batch * big - small_batch * small) / (big_batch - small_batch)))

    def state(self) -> list[list[float]]:
        """The estimates so far, for a checkpoint, without the steps that are not read yet."""
        return [list(pair) for pair in self._pairs]

    def set_state(self, state: Sequence[Sequence[float]]) -> None:
        self._pairs = [(noise, signal) for noise, signal in state]

    def facts(self) -> dict[str, float]:
        """`noise_scale` in samples, over all but the first quarter of the steps so far, with its 95 % interval.

        The first quarter is dropped because early gradients are large with little noise. The interval is Fieller's for the
        quotient of two means, over blocks of steps because neighbouring steps are correlated. Where it is unbounded, |G|^2 is
        not significantly above zero, and nothing is reported.
        """
        length = len(self._pairs) * 3 // 4 // _BLOCKS
        if length == 0:
            return {}
        blocks = np.reshape(self._pairs[-length * _BLOCKS :], (_BLOCKS, length, 2)).mean(axis=1)
        noise, signal = blocks.mean(axis=0).tolist()
        # (noise - x signal)^2 <= t^2 Var(noise - x signal): where the parabola a x^2 - 2 b x + c is not above zero.
        (c, b), (_, a) = np.outer((noise, signal), (noise, signal)) - _STUDENT_T**2 / _BLOCKS * np.cov(blocks.T)
        if min(noise, signal, a) <= 0:
            return {}
        root = math.sqrt(max(b**2 - a * c, 0.0))
        return {
            "noise_scale": noise / signal,
            "noise_scale_low": max(float((b - root) / a), 0.0),
            "noise_scale_high": float((b + root) / a),
        }


class _StepNorms(NamedTuple):
    """Gradient norms of one measured step, of its small batch and of the whole step."""

    small_batch: float
    denominator: Tensor | float
    big_batch: int
    small: list[Tensor]
    big: list[Tensor]

    def mean_over_sum(self, like: Tensor) -> Tensor:
        return self.big_batch / torch.as_tensor(self.denominator, dtype=like.dtype, device=like.device).detach()
