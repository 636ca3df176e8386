"""Learning-rate rules against the numbers of their sources."""

from __future__ import annotations

import math

import pytest
from bsearch.spaces.errors import BsearchError, InfeasiblePlanError
from bsearch.spaces.learning_rate import (
    RATE_RULES,
    RULE_EXPONENTS,
    OptimizerSettings,
    RuleConstants,
    scaled_settings,
    with_beta2_half_life,
)
from bsearch.spaces.schedule import SCHEDULES, evaluation_points, rate_factor
from hypothesis import given
from hypothesis import strategies as st

HALF = RuleConstants(exponent=0.5, noise_kappa=3.0)


@pytest.mark.parametrize("rule", RATE_RULES)
@given(st.floats(1e-6, 10), st.integers(1, 10**6))
def test_every_rule_gives_the_reference_back_at_the_reference_batch(
    rule: str, rate: float, batch: int
) -> None:
    reference = OptimizerSettings(rate, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1)
    scaled = scaled_settings(rule, reference, reference_batch=batch, effective_batch=batch, constants=HALF)
    assert scaled.learning_rate == pytest.approx(rate)
    assert scaled.betas == pytest.approx(reference.betas)
    assert (scaled.eps, scaled.weight_decay) == pytest.approx((1e-7, 0.1))


@pytest.mark.parametrize("rule", RULE_EXPONENTS)
@given(st.floats(1e-6, 10), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_rule_of_an_exponent_is_that_power_of_the_batches_ratio(
    rule: str, rate: float, reference: int, batch: int
) -> None:
    # Goyal 2017 and You 2019 have it of linear and sqrt; `power` is of any exponent.
    batches, exponent = {"reference_batch": reference, "effective_batch": batch}, RULE_EXPONENTS[rule]
    scaled = scaled_settings(rule, OptimizerSettings(rate), **batches)
    assert scaled.learning_rate == pytest.approx(rate * (batch / reference) ** exponent)
    assert scaled == scaled_settings(
        "power", OptimizerSettings(rate), **batches, constants=RuleConstants(exponent)
    )


def test_power_asks_for_an_exponent() -> None:
    with pytest.raises(BsearchError, match="expected an exponent"):
        scaled_settings("power", OptimizerSettings(0.1), reference_batch=64, effective_batch=1000)


@given(st.floats(1.0, 9.9))
def test_adam_sde_keeps_the_averages_long_in_samples(kappa: float) -> None:
    # Malladi 2022: kappa-fold batches average over kappa-fold fewer steps, so over as many samples.
    reference = OptimizerSettings(1e-3)
    scaled = RATE_RULES["adam_sde"](reference, kappa, HALF)
    for before, after in zip(reference.betas, scaled.betas, strict=True):
        assert (1 - after) == pytest.approx(kappa * (1 - before), rel=1e-6)
    assert scaled.learning_rate**2 / kappa == pytest.approx(reference.learning_rate**2)
    assert scaled.eps * kappa**0.5 == pytest.approx(reference.eps)


def test_adam_sde_is_undefined_where_an_average_would_hold_less_than_a_step() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"below 1 .* at kappa 16"):
        scaled_settings("adam_sde", OptimizerSettings(1e-3), reference_batch=64, effective_batch=1024)
    with pytest.raises(InfeasiblePlanError) as just:
        # It would hold one step.
        RATE_RULES["adam_sde"](OptimizerSettings(1e-3, betas=(0.5, 0.75)), 2.0, HALF)
    with pytest.raises(InfeasiblePlanError) as far:
        RATE_RULES["adam_sde"](OptimizerSettings(1e-3, betas=(0.5, 0.75)), 3.0, HALF)
    assert (just.value.violation, far.value.violation) == pytest.approx((0.0, 0.5), abs=1e-5)


@given(st.floats(1e-2, 1e2), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_saturating_is_proportional_to_its_law(noise: float, kappa: float, other: float) -> None:
    # McCandlish 2018: rate(B) (1 + B_noise / B) is one number, the rate of very large batches.
    constants = RuleConstants(noise_kappa=noise)
    largest = [
        RATE_RULES["saturating"](OptimizerSettings(0.1), one, constants).learning_rate * (1 + noise / one)
        for one in (kappa, other)
    ]
    assert largest[0] == pytest.approx(largest[1])


@given(st.floats(1e-2, 1e2), st.floats(1.0, 1e3))
def test_surge_peaks_at_the_noise_batch_and_is_alike_on_both_sides(noise: float, away: float) -> None:
    constants = RuleConstants(noise_kappa=noise)
    below, peak, above = (
        RATE_RULES["surge"](OptimizerSettings(0.1), kappa, constants).learning_rate
        for kappa in (noise / away, noise, noise * away)
    )
    assert below == pytest.approx(above)
    assert peak >= below * (1 - 1e-12)
    # Li 2024, far below the peak: the square root.
    far = [
        RATE_RULES["surge"](OptimizerSettings(0.1), kappa, RuleConstants(noise_kappa=1e8)).learning_rate
        for kappa in (1, 4)
    ]
    assert far[1] / far[0] == pytest.approx(2, rel=1e-4)


@given(st.floats(1e-2, 1e2), st.floats(0.01, 1))
def test_adamw_tau_keeps_the_timescale_in_shares_of_the_training(kappa: float, samples_ratio: float) -> None:
    # Wang & Aitchison 2024: B / (rate x decay x samples) is one number over batches and lengths of training.
    def tau(settings: OptimizerSettings, batch: float, samples: float) -> float:
        return batch / (settings.learning_rate * settings.weight_decay * samples)

    reference = OptimizerSettings(1e-3, weight_decay=0.1)
    scaled = RATE_RULES["adamw_tau"](reference, kappa, RuleConstants(samples_ratio=samples_ratio))
    assert tau(scaled, kappa, samples_ratio) == pytest.approx(tau(reference, 1.0, 1.0))
    assert scaled.learning_rate == pytest.approx(1e-3 * kappa**0.5)


@given(st.floats(1e-2, 1e2), st.floats(0.5, 0.9999))
def test_a_second_beta_keeps_its_half_life_in_samples(kappa: float, beta2: float) -> None:
    # Marek 2025: after so many samples half of a squared gradient's weight is left, at every batch.
    scaled = with_beta2_half_life(OptimizerSettings(1e-3, betas=(0.9, beta2)), kappa)
    assert scaled.betas[0] == 0.9
    assert 0 <= scaled.betas[1] < 1
    if 1e-6 < scaled.betas[1] < 1 - 1e-6:
        assert kappa / math.log(scaled.betas[1]) == pytest.approx(1 / math.log(beta2), rel=1e-4)


def test_an_average_of_squares_forgets_however_small_the_batch() -> None:
    assert with_beta2_half_life(OptimizerSettings(1e-3, betas=(0.9, 0.9999)), 1e-12).betas[1] < 1


def test_a_study_gives_its_noise_batch_in_samples() -> None:
    assert RuleConstants.at(64, 0.5, 256.0, 0.3) == RuleConstants(0.5, 4.0, 0.3)
    assert RuleConstants.at(64, None, None, 1.0) == RuleConstants()


@pytest.mark.parametrize("rule", ["saturating", "surge"])
def test_rules_of_the_noise_batch_ask_for_it(rule: str) -> None:
    with pytest.raises(BsearchError, match=f"rule {rule}: expected a noise batch, got none"):
        scaled_settings(rule, OptimizerSettings(0.1), reference_batch=64, effective_batch=1000)


@given(st.sampled_from(sorted(SCHEDULES)), st.floats(0, 0.9), st.floats(0, 1))
def test_the_schedule_stays_between_nothing_and_the_peak(
    schedule: str, warmup: float, fraction: float
) -> None:
    assert -1e-12 <= rate_factor(schedule, warmup, fraction) <= 1 + 1e-12


@pytest.mark.parametrize("steps", [1, 3, 10, 1000])
def test_the_sum_of_rate_times_samples_does_not_hang_on_the_batch(steps: int) -> None:
    # A straight line integrates exactly at the steps' middles, so large batches get no less training.
    total = sum(rate_factor("linear", 0.0, (step + 0.5) / steps) / steps for step in range(steps))
    assert total == pytest.approx(0.5)


@given(st.integers(1, 10**6), st.integers(1, 50))
def test_evaluations_end_at_the_budget_and_never_repeat(budget: int, evaluations: int) -> None:
    points = evaluation_points(budget, evaluations)
    assert points[-1] == budget
    assert list(points) == sorted(set(points))
    assert len(points) == min(evaluations, len(points))
