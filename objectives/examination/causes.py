"""Why the gradient of a split step differs, inferred from the losses of small sets of samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from ...spaces.laws.examination import Kind
from .step import Indices

# Relative difference below which two losses count as equal.
_SAME = 1e-4
# Tolerance for values derived from differences of losses, relative to those differences.
_NEAR = 1e-2
# What remains of rounding in losses of single precision, relative to their spread.
_NOISE = 1e-6
# Samples whose losses are computed alone, in pairs and in triples.
_LOOKED_AT = 6
# Where the logarithm of the ratio of two samples' denominators is looked for.
_RATIOS = (-3.0, 0.0), (0.0, 3.0)

_OF_PADDED = (
    "expected each sample's loss not to depend on the rest of the batch, got one that does ({evidence}). Either the padding to "
    "the batch's longest sample counts: mask it in the sum and in the denominator. Or the loss compares samples: {coupled}"
)


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
            f"expected a model that processes each sample independently, got one whose layer {layer} mixes the samples of a "
            f"batch. Use GroupNorm or LayerNorm, which normalise each sample; if mixing is intended, {remedies.coupled}",
        )
    whole, denominator = values(np.arange(samples))
    parts = np.array_split(np.arange(samples), 2)
    halves = [values(part) for part in parts]
    label = "loss times samples: " if remedies.sum else ""
    evidence = (
        f"{label}{samples} samples give {whole:.4g}, their halves {halves[0][0]:.4g} and {halves[1][0]:.4g}"
    )
    if (sizes := _parts_whose_denominators_differ(values, samples, smallest)) is not None:
        return Cause(
            "denominator",
            f"expected a denominator that adds up over micro-batches, as the totals do; got {sizes}. {remedies.denominator}",
        )
    by_denominator = sum(total * part for total, part in halves) / denominator if denominator else math.nan
    by_samples = sum(total * len(part) for (total, _), part in zip(halves, parts, strict=True)) / samples
    if _close(whole, by_samples) or (
        _close(whole, by_denominator) and _close(denominator, sum(part for _, part in halves))
    ):
        expected = (
            "the batch's mean loss, got it divided by the number of samples once more"
            if remedies.sum
            else "the sum over the batch's samples, got their mean"
        )
        return Cause("mean", f"expected {expected} ({evidence}). {remedies.mean}")
    means = [total / len(part) for (total, _), part in zip(halves, parts, strict=True)]
    if remedies.sum and _close(whole / samples, sum(means)):
        return Cause("mean", f"expected the batch's mean loss, got its sum ({evidence}). {remedies.sum}")
    if smallest == 1:
        for found in (_weighted_mean, _term_of_each_call, _sum_over_pairs, _sum_of_means):
            with suppress(Exception):
                if (cause := found(values, samples, evidence, remedies)) is not None:
                    return cause
    if padded:
        return Cause("weights", _OF_PADDED.format(evidence=evidence, coupled=remedies.coupled))
    return Cause(
        "coupled",
        f"expected a loss that adds up over samples, got one that depends on which samples share a batch ({evidence}), as a "
        f"contrastive loss or a layer that normalises over the batch does. If that is intended, {remedies.coupled}",
    )


def embedding_cause(layer: str) -> Cause:
    """The cause of a difference where the loss is over the whole batch's embeddings, which each sample has to have alone.

    Args:
        layer: the first whose output for a sample depends on the others; empty where there is none.
    """
    found = (
        f"one whose layer {layer} mixes them"
        if layer
        else "one that depends on which samples share a micro-batch"
    )
    return Cause(
        "layer" if layer else "coupled",
        f"expected an embedding of each sample alone, got {found}. Compare samples in batch_loss, which gets the whole batch.",
    )


def parts_cause(layer: str) -> Cause:
    """The cause of a difference in a user's own loop, whose parts have to add up to the step.

    Args:
        layer: the first whose output for a sample depends on the others; empty where there is none.
    """
    if layer:
        return Cause(
            "layer",
            f"expected models that process each sample independently, got one whose layer {layer} mixes the samples of a part.",
        )
    return Cause(
        "mean",
        "expected parts whose gradients add up to that of the whole step, got parts that do not. Weight the mean loss of each "
        "part by part.weight, or divide its sum by step.samples; and call an optimizer after the last part, never between.",
    )


@dataclass(frozen=True, slots=True)
class Remedies:
    """What to write instead, in the words of the kind of training."""

    mean: str
    denominator: str
    weights: str
    coupled: str
    term: str
    unsplit: str
    sum: str = ""


TASK_REMEDIES = Remedies(
    mean="Use reduction='sum'.",
    denominator="Return the number of samples, of counted tokens, or the sum of their weights.",
    weights="Return Loss(sum of weight times loss, sum of the weights); for tokens, Loss(sum, counted tokens).",
    coupled="write embed and batch_loss instead of loss, which are split exactly; or couples_samples = True in the task, and a "
    "batch is never split.",
    term="Multiply it by the number of samples.",
    unsplit="write couples_samples = True in the task, and a batch is never split.",
)


LOOP_REMEDIES = Remedies(
    mean="Return the mean.",
    denominator="Return the mean.",
    weights="Say what the mean divides by: train_with(..., denominator=...) with a Trainer, {'loss': ..., 'denominator': ...} "
    "in a LightningModule's training_step.",
    coupled="pass embed= and batch_loss= to train_with, which are split exactly; or couples_samples=True, and a batch is never "
    "split.",
    term="Add it to the mean loss without dividing it by the number of samples.",
    unsplit="pass couples_samples=True, and a batch is never split.",
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
            return f"{denominator:.4g} for {samples} samples, but {denominators:.4g} in total for {count} parts of them"
    return None


def _weighted_mean(
    values: Callable[[Indices], tuple[float, float]], samples: int, evidence: str, remedies: Remedies
) -> Cause | None:
    """Whether the mean of any set is a mean of its samples' own losses with fixed weights.

    From singles l_i and pairs m_ij = (w_i l_i + w_j l_j) / (w_i + w_j) follow the ratios of weights; they have to give the
    means of larger sets.
    """
    return _weighted(
        lambda total, denominator: total / denominator, values, samples, evidence, remedies
    ) or _weighted(lambda total, _: total, values, samples, evidence, remedies)


def _weighted(
    quotient: Callable[[float, float], float],
    values: Callable[[Indices], tuple[float, float]],
    samples: int,
    evidence: str,
    remedies: Remedies,
) -> Cause | None:
    """The same for a mean that is made of total and denominator in a given way."""

    def mean(*chosen: int) -> float:
        return quotient(*values(np.asarray(chosen)))

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
    spread = max(singles.values()) - min(singles.values())
    effect = 0.0
    for size in (3, len(weights)):
        chosen = list(weights)[:size]
        expected = sum(weights[index] * singles[index] for index in chosen) / sum(
            weights[index] for index in chosen
        )
        found, unweighted = mean(*chosen), sum(singles[index] for index in chosen) / size
        effect = max(effect, abs(found - unweighted))
        if abs(found - expected) > _NEAR * abs(found - unweighted) + _NOISE * spread:
            return None
    if effect <= _NOISE * spread:
        return None
    return Cause(
        "weights",
        "expected the sum of the weights as the denominator, got another: the loss is a weighted mean, such as by class "
        f"weights or counted tokens ({evidence}). {remedies.weights}",
    )


def _term_of_each_call(
    values: Callable[[Indices], tuple[float, float]], samples: int, evidence: str, remedies: Remedies
) -> Cause | None:
    """Whether every call adds the same term to a sum over samples, as a penalty on weights does."""
    chosen = range(min(samples, 4))
    singles = sum(values(np.asarray([index]))[0] for index in chosen)
    together = values(np.asarray(chosen))[0]
    term = (singles - together) / (len(chosen) - 1)
    if len(chosen) < 4 or not term:
        return None
    pairs, others = (
        sum(values(np.asarray(part))[0] for part in parts) for parts in (((0, 1), (2, 3)), ((0, 2, 3), (1,)))
    )
    if max(abs(pairs - together - term), abs(others - together - term)) > _NEAR * abs(term):
        return None
    return Cause(
        "mean",
        f"expected a loss that adds up over samples, got one with a constant term of {term:.4g} added once per call "
        f"({evidence}), such as a weight penalty. {remedies.term}",
    )


def _sum_over_pairs(
    values: Callable[[Indices], tuple[float, float]], samples: int, evidence: str, remedies: Remedies
) -> Cause | None:
    """Whether the total of three and of four samples is that of their pairs, less what these count of each sample too often."""

    def total(*indices: int) -> float:
        return values(np.asarray(indices))[0]

    if samples < 4:
        return None
    for count in (3, 4):
        singles = sum(map(total, range(count)))
        pairs = sum(total(*pair) for pair in combinations(range(count), 2))
        interaction = abs(pairs - (count - 1) * singles)
        expected = pairs - (count - 2) * singles
        if _close(pairs, (count - 1) * singles) or abs(total(*range(count)) - expected) > _NEAR * interaction:
            return None
    return Cause(
        "coupled",
        f"expected the sum over the batch's samples, got a sum over pairs of samples ({evidence}): either shapes are "
        "broadcast, such as (N, 1) against (N,), or the loss compares samples. Check the shapes of outputs and labels; if "
        f"comparing samples is intended, {remedies.coupled}",
    )


def _sum_of_means(
    values: Callable[[Indices], tuple[float, float]], samples: int, evidence: str, remedies: Remedies
) -> Cause | None:
    """Whether the loss is the sum of two means over different denominators, such as samples and counted tokens.

    Beyond the loss of one sample, m copies of it and n of another then have X n / (m + n) + R n d / (m + n d). X, R and d of
    two others, fitted to six such sets each, have to give the loss of all three together.
    """
    from scipy.optimize import minimize_scalar

    def mean(*counts: int) -> float:
        total, denominator = values(np.repeat(np.arange(len(counts)), counts))
        return total / denominator

    first, fitted = mean(1), []
    for other in (1, 2):
        sets = np.array([(8, 1), (2, 1), (1, 1), (1, 2), (1, 8), (0, 1)])
        beyond = np.array([mean(m, *[0] * (other - 1), n) for m, n in sets]) - first

        def fit(
            log_ratio: float, m: Any = sets[:, 0], n: Any = sets[:, 1], beyond: Any = beyond
        ) -> tuple[float, Any]:
            ratio = math.exp(log_ratio)
            terms = np.column_stack([n / (m + n), n * ratio / (m + n * ratio)])
            sizes = np.linalg.lstsq(terms, beyond)[0]
            return float(np.abs(terms @ sizes - beyond).max()), (*sizes, ratio)

        found = min(
            (minimize_scalar(lambda at: fit(at)[0], bounds=ends, method="bounded") for ends in _RATIOS),
            key=lambda one: one.fun,
        )
        if samples < 3 or found.fun > _NEAR * min(fit(0.0)[0], np.abs(beyond).max()):
            return None
        fitted.append(fit(found.x)[1])
    by_sample, by_weight, ratios = np.array(fitted).T
    expected = first + by_sample.sum() / 3 + (ratios @ by_weight) / (1 + ratios.sum())
    if abs(mean(1, 1, 1) - expected) > _NEAR * abs(expected - first):
        return None
    return Cause(
        "denominator",
        "expected one denominator for the whole loss, got the sum of means over different ones, such as over samples and over "
        f"counted tokens ({evidence}). Divide both terms by the same; if that is what you mean, {remedies.unsplit}",
    )


def _close(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=_SAME, abs_tol=1e-12)
