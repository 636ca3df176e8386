"""Learning-rate rules: how the optimizer's settings scale with the batch, kappa = B / reference_batch.

Every rule is a plain function that returns the reference settings at kappa = 1. To add one, write the
function and add it to `RATE_RULES`. docs/reference/rules.md shows the `Formula:` and `Source:` lines of the docstrings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from .errors import BsearchError, InfeasiblePlanError


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Settings of the optimizer; `learning_rate` is the peak, before the schedule."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


# What a setup has of an optimizer beside its rate.
BESIDE_RATE = ("weight_decay", "betas", "eps")


@dataclass(frozen=True, slots=True)
class RuleConstants:
    """Constants that some rules need besides kappa; None if the study does not set them.

    Args:
        exponent: of `power`.
        noise_kappa: B_noise / reference_batch; at B_noise the gradient's noise is as large as the gradient.
        samples_ratio: the trial's `samples_budget` over that of the study's longest trial.
    """

    exponent: float | None = None
    noise_kappa: float | None = None
    samples_ratio: float = 1.0

    @classmethod
    def at(
        cls,
        reference_batch: int,
        exponent: float | None,
        noise_batch: float | None,
        samples_ratio: float,
    ) -> RuleConstants:
        """The constants of a study, which gives the noise batch in samples."""
        noise_kappa = None if noise_batch is None else noise_batch / reference_batch
        return cls(exponent, noise_kappa, samples_ratio)


def constant(reference: OptimizerSettings, kappa: float, constants: RuleConstants) -> OptimizerSettings:
    """Keep the learning rate the same for every batch.

    Formula: rate = reference_rate
    Source: common practice; correct far above the critical batch, McCandlish et al. 2018, arXiv 1812.06162

    >>> constant(OptimizerSettings(0.1), 32.0, RuleConstants()).learning_rate
    0.1
    """
    return reference


def linear(reference: OptimizerSettings, kappa: float, constants: RuleConstants) -> OptimizerSettings:
    """Multiply the learning rate by kappa; meant for SGD with momentum and warm-up.

    Formula: rate = kappa * reference_rate
    Source: Goyal et al. 2017, arXiv 1706.02677 (0.1 at 256 gives 3.2 at 8192)

    >>> linear(OptimizerSettings(0.1), 8192 / 256, RuleConstants()).learning_rate
    3.2
    """
    return replace(reference, learning_rate=kappa * reference.learning_rate)


def sqrt(reference: OptimizerSettings, kappa: float, constants: RuleConstants) -> OptimizerSettings:
    """Multiply the learning rate by the square root of kappa; keeps the gradient noise per step constant.

    Formula: rate = kappa**0.5 * reference_rate
    Source: Krizhevsky 2014, arXiv 1404.5997; You et al. 2019, arXiv 1904.00962 (0.000625 at 512 gives 0.005 at 32768)

    >>> round(sqrt(OptimizerSettings(5 / (2**3 * 10**3)), 32768 / 512, RuleConstants()).learning_rate, 9)
    0.005
    """
    return replace(reference, learning_rate=kappa**0.5 * reference.learning_rate)


def power(reference: OptimizerSettings, kappa: float, constants: RuleConstants) -> OptimizerSettings:
    """Multiply the learning rate by a power of kappa; the exponent may be searched.

    Formula: rate = kappa**exponent * reference_rate
    Source: generalises linear (1), sqrt (1/2) and constant (0); Shallue et al. 2019, arXiv 1811.03600, observe all three

    >>> power(OptimizerSettings(0.1), 16.0, RuleConstants(exponent=0.25)).learning_rate
    0.2
    """
    if constants.exponent is None:
        raise BsearchError(
            "rule power: expected an exponent, got none. Write space.exponent: 0.5 or a range."
        )
    return replace(reference, learning_rate=kappa**constants.exponent * reference.learning_rate)


def adam_sde(reference: OptimizerSettings, kappa: float, constants: RuleConstants) -> OptimizerSettings:
    """Scale Adam's learning rate, betas and epsilon together, which preserves the training dynamics per sample.

    Formula: rate = kappa**0.5 * reference_rate; 1 - beta = kappa * (1 - reference beta); eps = reference eps / kappa**0.5
    Source: Malladi et al. 2022, arXiv 2205.10287, definition 5.2 ("square root scaling rule")

    Raises:
        InfeasiblePlanError: kappa * (1 - beta) >= 1: a moving average would span less than one step.

    >>> adam_sde(OptimizerSettings(1e-3), 4.0, RuleConstants())
    OptimizerSettings(learning_rate=0.002, betas=(0.6, 0.996), eps=5e-09, weight_decay=0.0)
    """
    weights = [kappa * (1 - beta) for beta in reference.betas]
    if max(weights) >= 1:
        raise InfeasiblePlanError(
            f"rule adam_sde: expected kappa * (1 - beta) below 1 for betas {reference.betas}, "
            f"got {max(weights):.4g} at kappa {kappa:.4g}; use a larger at_batch or betas closer to 1",
            violation=max(weights) - 1,
        )
    beta1, beta2 = (round(1 - weight, 12) for weight in weights)
    return OptimizerSettings(
        learning_rate=kappa**0.5 * reference.learning_rate,
        betas=(beta1, beta2),
        eps=reference.eps / kappa**0.5,
        weight_decay=reference.weight_decay,
    )


def saturating(reference: OptimizerSettings, kappa: float, constants: RuleConstants) -> OptimizerSettings:
    """Multiply the learning rate by kappa for small batches and saturate above the noise batch; meant for SGD.

    Formula: rate = (1 + noise_batch / reference_batch) / (1 + noise_batch / B) * reference_rate
    Source: McCandlish et al. 2018, arXiv 1812.06162 (half the maximum rate at B = noise_batch)

    >>> saturating(OptimizerSettings(0.1), 4.0, RuleConstants(noise_kappa=4.0)).learning_rate
    0.25
    """
    noise = _noise("saturating", constants)
    return replace(reference, learning_rate=(1 + noise) / (1 + noise / kappa) * reference.learning_rate)


def surge(reference: OptimizerSettings, kappa: float, constants: RuleConstants) -> OptimizerSettings:
    """Raise the learning rate with the square root of kappa up to the noise batch, then lower it likewise; meant for Adam.

    Formula: rate = s(B) / s(reference_batch) * reference_rate, 1 / s(B) = ((noise_batch / B)**0.5 + (B / noise_batch)**0.5) / 2
    Source: Li et al. 2024, arXiv 2405.14578, "surge phenomenon"

    >>> surge(OptimizerSettings(0.1), 4.0, RuleConstants(noise_kappa=4.0)).learning_rate
    0.125
    >>> surge(OptimizerSettings(0.1), 16.0, RuleConstants(noise_kappa=4.0)).learning_rate
    0.1
    """
    noise = _noise("surge", constants)
    at_reference, here = (math.sqrt(noise / batch) + math.sqrt(batch / noise) for batch in (1.0, kappa))
    return replace(reference, learning_rate=at_reference / here * reference.learning_rate)


def adamw_tau(reference: OptimizerSettings, kappa: float, constants: RuleConstants) -> OptimizerSettings:
    """Multiply AdamW's rate by sqrt(kappa); scale its weight decay so that tau stays.

    tau = B / (rate * weight_decay * samples) is the share of the training over which AdamW averages its updates.
    The reference is the study's longest trial: training on half as many samples doubles the decay.

    Formula: rate = kappa**0.5 * reference_rate; weight_decay = kappa**0.5 * reference decay * longest / samples
    Source: Wang & Aitchison 2024, arXiv 2405.13698; the rate as Malladi et al. 2022, arXiv 2205.10287

    >>> adamw_tau(OptimizerSettings(1e-3, weight_decay=0.1), 4.0, RuleConstants(samples_ratio=0.5))
    OptimizerSettings(learning_rate=0.002, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.4)
    """
    scaled = sqrt(reference, kappa, constants)
    # B / (rate * decay * samples) stays: decay' = decay * kappa * (rate / rate') / samples_ratio.
    return replace(scaled, weight_decay=kappa**0.5 * reference.weight_decay / constants.samples_ratio)


def with_beta2_half_life(settings: OptimizerSettings, kappa: float) -> OptimizerSettings:
    """Keep the half-life of Adam's second beta in samples, at any batch; beside any rule but adam_sde.

    Formula: beta2 = (reference beta2)**kappa
    Source: Marek et al. 2025, arXiv 2507.07101

    >>> with_beta2_half_life(OptimizerSettings(1e-3, betas=(0.9, 0.99)), 2.0).betas
    (0.9, 0.9801)
    """
    beta1, beta2 = settings.betas
    return replace(settings, betas=(beta1, min(round(beta2**kappa, 12), 1 - 1e-12)))


def average_decay(decay: float, kappa: float) -> float:
    """Keep the horizon of an average of weights in samples, at any batch.

    The decay is what the average keeps of itself in one step. A step of fewer samples, such as a training's last, or of more,
    where the batch grows, counts for as many as it has: kappa is that of the step itself.

    Formula: decay = (reference decay)**kappa
    Source: Busbridge et al. 2023, arXiv 2307.13813, "How to Scale Your EMA"

    >>> average_decay(0.99, 2.0)
    0.9801
    """
    return float(decay**kappa)


def _noise(rule: str, constants: RuleConstants) -> float:
    if constants.noise_kappa is None:
        raise BsearchError(
            f"rule {rule}: expected a noise batch, got none. Set noise_batch, in samples, such as 1000."
        )
    return constants.noise_kappa


Rule = Callable[[OptimizerSettings, float, RuleConstants], OptimizerSettings]

RATE_RULES: dict[str, Rule] = {
    "constant": constant,
    "linear": linear,
    "sqrt": sqrt,
    "power": power,
    "adam_sde": adam_sde,
    "saturating": saturating,
    "surge": surge,
    "adamw_tau": adamw_tau,
}

# What is scaled beside the rate, by the key and value of `training` that say so.
SCALINGS: dict[str, Callable[..., object]] = {
    "beta2_scaling: half_life": with_beta2_half_life,
    "ema": average_decay,
}

# Rules that scale betas; not applicable to optimizers without them (plain SGD).
RULES_FOR_ADAM = frozenset({"adam_sde"})
# Rules that scale AdamW's weight decay: decoupled from the gradient and multiplied by the rate.
RULES_FOR_DECAY = frozenset({"adamw_tau"})
RULES_WITH_NOISE_BATCH = frozenset({"saturating", "surge"})
# Lion's own, Chen et al. 2023, arXiv 2302.06675: its second is not a half-life of squares, so Adam's is no measure for it.
LION_BETAS = (0.9, 0.99)
# Exponents of the rules that are a power of kappa.
RULE_EXPONENTS = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}


def scaled_settings(
    rule: str,
    reference: OptimizerSettings,
    *,
    reference_batch: int,
    effective_batch: int,
    constants: RuleConstants | None = None,
) -> OptimizerSettings:
    """The optimizer's settings at `effective_batch`, scaled from `reference` at `reference_batch`.

    >>> scaled_settings("sqrt", OptimizerSettings(1e-3), reference_batch=64, effective_batch=256).learning_rate
    0.002
    """
    return RATE_RULES[rule](reference, effective_batch / reference_batch, constants or RuleConstants())
