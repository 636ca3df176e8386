"""Why a split step differs from the whole one: the losses of small sets of samples tell a mean from a sum, and weights from
samples that see each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ...spaces.laws.examination import Kind

Indices = np.ndarray
# Relative difference below which two losses are one.
_SAME = 1e-4
# Samples whose single losses, pairs and triples are looked at.
_LOOKED_AT = 6


@dataclass(frozen=True, slots=True)
class Cause:
    """What is wrong, and what to write instead."""

    kind: Kind
    message: str


def cause_of(
    values: Callable[[Indices], tuple[float, float]], samples: int, smallest: int, remedies: Remedies, layer: str = ""
) -> Cause:
    """The cause of a loss that does not add up.

    Args:
        values: total and denominator of the loss of some of the samples.
        remedies: what to write, for the kind of training.
        layer: the first whose output for a sample depends on the others; empty where there is none.
    """
    if layer:
        return Cause(
            "layer",
            f"expected a model that sees each sample by itself, got one whose layer {layer} sees the others of the batch. "
            f"Normalise over the sample instead, as GroupNorm and LayerNorm do; where it is meant, {remedies.coupled}",
        )
    half = samples // 2
    parts = [np.arange(half), np.arange(half, samples)]
    whole, denominator = values(np.arange(samples))
    halves = [values(part) for part in parts]
    evidence = f"{samples} samples give {whole:.4g}, their halves {halves[0][0]:.4g} and {halves[1][0]:.4g}"
    totals, denominators = (sum(column) for column in zip(*halves, strict=True))
    if _close(whole, totals) and not _close(denominator, denominators):
        each = f"{halves[0][1]:.4g} and {halves[1][1]:.4g}"
        return Cause(
            "denominator",
            f"expected a denominator that adds up over the batch, got {denominator:.4g} for {samples} samples and {each} for "
            f"their halves. {remedies.denominator}",
        )
    if _close(denominator, denominators):
        by_denominator = sum(total * part for total, part in halves) / denominator if denominator else math.nan
        by_samples = sum(total * len(part) for (total, _), part in zip(halves, parts, strict=True)) / samples
        if _close(whole, by_denominator) or _close(whole, by_samples):
            return Cause("mean", f"expected the sum over the batch's samples, got their mean ({evidence}). {remedies.mean}")
    means = [total / len(part) for (total, _), part in zip(halves, parts, strict=True)]
    if remedies.sum and _close(whole / samples, sum(means)):
        return Cause("mean", f"expected the batch's mean loss, got its sum ({evidence}, times samples). {remedies.sum}")
    if smallest == 1:
        with suppress(Exception):
            if _is_weighted_mean(values, samples):
                return Cause(
                    "weights",
                    "expected the mean's own denominator, got the number of samples: the loss is a mean weighted by something "
                    f"else, such as class weights or counted tokens ({evidence}). {remedies.weights}",
                )
            if _adds_up_by_pairs(values, samples):
                return Cause(
                    "coupled",
                    f"expected the sum over the batch's samples, got a sum over their pairs ({evidence}): either shapes are "
                    "broadcast, such as (N, 1) against (N,), or the loss compares samples. Check the shapes of outputs and "
                    f"labels; where it compares samples on purpose, {remedies.coupled}",
                )
    return Cause(
        "coupled",
        f"expected a sum over samples, got one in which the samples of a batch see each other ({evidence}), as in contrastive "
        f"losses, or in a layer that normalises over the batch. Where that is meant, {remedies.coupled}",
    )


@dataclass(frozen=True, slots=True)
class Remedies:
    """What to write instead, in the words of the kind of training."""

    mean: str
    denominator: str
    weights: str
    coupled: str
    sum: str = ""


OF_A_TASK = Remedies(
    mean="Use reduction='sum'.",
    denominator="Return the number of samples, of counted tokens, or the sum of their weights.",
    weights="Return Loss(sum of weight times loss, sum of the weights); for tokens, Loss(sum, counted tokens).",
    coupled="write couples_samples = True in the task: a batch is then never split.",
)


OF_A_LOOP = Remedies(
    mean="Return the mean.",
    denominator="Return the mean.",
    weights="Say what the mean divides by: train_with(..., denominator=...) with a Trainer, {'loss': ..., 'denominator': ...} "
    "in a LightningModule's training_step.",
    coupled="pass couples_samples=True to train_with: a batch is then never split.",
    sum="Return the mean.",
)


def _is_weighted_mean(values: Callable[[Indices], tuple[float, float]], samples: int) -> bool:
    """Whether the mean of any set is a mean of its samples' own losses with fixed weights.

    From singles l_i and pairs m_ij = (w_i l_i + w_j l_j) / (w_i + w_j) follow the ratios of weights; they have to give the
    means of larger sets.
    """

    def mean(*chosen: int) -> float:
        total, denominator = values(np.asarray(chosen))
        return total / denominator

    singles = {index: loss for index in range(min(samples, _LOOKED_AT)) if math.isfinite(loss := mean(index))}
    if len(singles) < 3:
        return False
    first, *others = sorted(singles, key=lambda index: singles[index])
    weights = {first: 1.0}
    for other in others:
        pair = mean(first, other)
        if not min(singles[first], singles[other]) < pair < max(singles[first], singles[other]):
            return False
        weights[other] = (pair - singles[first]) / (singles[other] - pair)
    for size in (3, len(weights)):
        chosen = list(weights)[:size]
        expected = sum(weights[one] * singles[one] for one in chosen) / sum(weights[one] for one in chosen)
        if not _close(mean(*chosen), expected):
            return False
    return True


def _adds_up_by_pairs(values: Callable[[Indices], tuple[float, float]], samples: int) -> bool:
    """Whether the total of three samples is that of their pairs less that of each: a sum over pairs of samples."""
    chosen: Sequence[int] = range(min(samples, 3))

    def total(*indices: int) -> float:
        return values(np.asarray(indices))[0]

    singles = sum(map(total, chosen))
    pairs = sum(total(*pair) for pair in combinations(chosen, 2))
    return len(chosen) == 3 and not _close(pairs, 2 * singles) and _close(total(*chosen), pairs - singles)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_SAME, abs_tol=1e-12)
