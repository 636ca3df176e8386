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
# What is derived from differences of losses agrees where it does to this share of the differences.
_NEAR = 1e-2
# Samples whose single losses, pairs and triples are looked at.
_LOOKED_AT = 6


@dataclass(frozen=True, slots=True)
class Cause:
    """What is wrong, and what to write instead."""

    kind: Kind
    message: str


def cause_of(
    values: Callable[[Indices], tuple[float, float]],
    samples: int,
    smallest: int,
    remedies: Remedies,
    *,
    layer: str = "",
    padded: bool = False,
) -> Cause:
    """The cause of a loss that does not add up.

    Args:
        values: total and denominator of the loss of some of the samples.
        remedies: what to write, for the kind of training.
        layer: the first whose output for a sample depends on the others; empty where there is none.
        padded: batches are padded to their longest sample.
    """
    if layer and not padded:
        return Cause(
            "layer",
            f"expected a model that sees each sample by itself, got one whose layer {layer} sees the others of the batch. "
            f"Normalise over the sample instead, as GroupNorm and LayerNorm do; where it is meant, {remedies.coupled}",
        )
    whole, denominator = values(np.arange(samples))
    parts = np.array_split(np.arange(samples), 2)
    halves = [values(part) for part in parts]
    evidence = f"{samples} samples give {whole:.4g}, their halves {halves[0][0]:.4g} and {halves[1][0]:.4g}"
    if (sizes := _parts_whose_denominators_differ(values, samples, smallest)) is not None:
        return Cause(
            "denominator",
            f"expected a denominator that adds up over the batch, got {sizes}, while the totals add up. {remedies.denominator}",
        )
    by_denominator = sum(total * part for total, part in halves) / denominator if denominator else math.nan
    by_samples = sum(total * len(part) for (total, _), part in zip(halves, parts, strict=True)) / samples
    if _close(whole, by_samples) or (_close(whole, by_denominator) and _close(denominator, sum(one for _, one in halves))):
        return Cause("mean", f"expected the sum over the batch's samples, got their mean ({evidence}). {remedies.mean}")
    means = [total / len(part) for (total, _), part in zip(halves, parts, strict=True)]
    if remedies.sum and _close(whole / samples, sum(means)):
        return Cause("mean", f"expected the batch's mean loss, got its sum ({evidence}, times samples). {remedies.sum}")
    if smallest == 1:
        for found in (_weighted_mean, _term_of_each_call, _sum_over_pairs):
            with suppress(Exception):
                if (cause := found(values, samples, evidence, remedies)) is not None:
                    return cause
    if padded:
        return Cause(
            "weights",
            f"expected a loss of each sample that does not depend on the batch, got one that does ({evidence}): batches are "
            "padded to their longest sample, and the padding counts. Leave it out of the sum and of the denominator; where the "
            f"samples of a batch are compared, {remedies.coupled}",
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
    term: str
    sum: str = ""


OF_A_TASK = Remedies(
    mean="Use reduction='sum'.",
    denominator="Return the number of samples, of counted tokens, or the sum of their weights.",
    weights="Return Loss(sum of weight times loss, sum of the weights); for tokens, Loss(sum, counted tokens).",
    coupled="write couples_samples = True in the task: a batch is then never split.",
    term="Multiply it by the number of samples.",
)


OF_A_LOOP = Remedies(
    mean="Return the mean.",
    denominator="Return the mean.",
    weights="Say what the mean divides by: train_with(..., denominator=...) with a Trainer, {'loss': ..., 'denominator': ...} "
    "in a LightningModule's training_step.",
    coupled="pass couples_samples=True to train_with: a batch is then never split.",
    term="A mean may have it: let it be a mean.",
    sum="Return the mean.",
)


def _parts_whose_denominators_differ(
    values: Callable[[Indices], tuple[float, float]], samples: int, smallest: int
) -> str | None:
    """Parts whose totals add up to the whole's and whose denominators do not, in words."""
    whole, denominator = values(np.arange(samples))
    for count in sorted({2, min(5, samples // smallest), samples // smallest}):
        each = [values(part) for part in np.array_split(np.arange(samples), count)]
        totals, denominators = (sum(column) for column in zip(*each, strict=True))
        if _close(whole, totals) and not _close(denominator, denominators):
            return f"{denominator:.4g} for {samples} samples and {denominators:.4g} for {count} parts of them together"
    return None


def _weighted_mean(
    values: Callable[[Indices], tuple[float, float]], samples: int, evidence: str, remedies: Remedies
) -> Cause | None:
    """Whether the mean of any set is a mean of its samples' own losses with fixed weights.

    From singles l_i and pairs m_ij = (w_i l_i + w_j l_j) / (w_i + w_j) follow the ratios of weights; they have to give the
    means of larger sets.
    """

    def mean(*chosen: int) -> float:
        total, denominator = values(np.asarray(chosen))
        return total / denominator

    singles = {index: loss for index in range(min(samples, _LOOKED_AT)) if math.isfinite(loss := mean(index))}
    weights: dict[int, float] = {}
    for other in sorted(singles, key=lambda index: singles[index]):
        if not weights:
            weights[other] = 1.0
            continue
        first = next(iter(weights))
        low, pair, high = singles[first], mean(first, other), singles[other]
        if _close(pair, high) and len(weights) == 1:
            weights = {other: 1.0}  # the first has no weight, as a sample without a counted label
        elif low < pair < high:
            weights[other] = (pair - low) / (high - pair)
        elif not _close(pair, low):
            return None
    if len(weights) < 3:
        return None
    for size in (3, len(weights)):
        chosen = list(weights)[:size]
        expected = sum(weights[one] * singles[one] for one in chosen) / sum(weights[one] for one in chosen)
        if abs(mean(*chosen) - expected) > _NEAR * (max(singles.values()) - min(singles.values())):
            return None
    return Cause(
        "weights",
        "expected the mean's own denominator, got another: the loss is a mean weighted by something, such as class weights or "
        f"counted tokens, and not by what it is divided by ({evidence}). {remedies.weights}",
    )


def _term_of_each_call(
    values: Callable[[Indices], tuple[float, float]], samples: int, evidence: str, remedies: Remedies
) -> Cause | None:
    """Whether every call adds the same term to a sum over samples, as a penalty on weights does."""
    chosen = range(min(samples, 4))
    singles = sum(values(np.asarray([one]))[0] for one in chosen)
    together = values(np.asarray(chosen))[0]
    term = (singles - together) / (len(chosen) - 1)
    pairs = [values(np.asarray(pair))[0] for pair in ((0, 1), (2, 3))]
    if len(chosen) < 4 or not term or not _close(sum(pairs), together + term):
        return None
    return Cause(
        "mean",
        f"expected a sum over samples, got one with a term of {term:.4g} that each call adds, whatever the number of samples "
        f"({evidence}), as a penalty on weights does. {remedies.term}",
    )


def _sum_over_pairs(
    values: Callable[[Indices], tuple[float, float]], samples: int, evidence: str, remedies: Remedies
) -> Cause | None:
    """Whether the total of three samples is that of their pairs less that of each: a sum over pairs of samples."""
    chosen: Sequence[int] = range(min(samples, 3))

    def total(*indices: int) -> float:
        return values(np.asarray(indices))[0]

    singles = sum(map(total, chosen))
    pairs = sum(total(*pair) for pair in combinations(chosen, 2))
    interaction = abs(pairs - 2 * singles)
    if len(chosen) < 3 or _close(pairs, 2 * singles) or abs(total(*chosen) - pairs + singles) > _NEAR * interaction:
        return None
    return Cause(
        "coupled",
        f"expected the sum over the batch's samples, got a sum over their pairs ({evidence}): either shapes are broadcast, "
        "such as (N, 1) against (N,), or the loss compares samples. Check the shapes of outputs and labels; where it compares "
        f"samples on purpose, {remedies.coupled}",
    )


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_SAME, abs_tol=1e-12)
