"""Laws of the plan: every integer batch, in shares and micro-batches that lose no sample."""

from __future__ import annotations

import math

import pytest
from bsearch.spaces.errors import InfeasiblePlanError
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.laws.memory import MemoryLaw
from bsearch.spaces.plan import BatchPlan, accumulation_limits, even_parts, plan_batch, step_plans, step_sizes
from hypothesis import example, given
from hypothesis import strategies as st


def passes_of(plan: BatchPlan) -> list[tuple[int, ...]]:
    return [plan.micro_batches(device) for device in range(plan.devices)]


def assert_laws(plan: BatchPlan) -> None:
    batch, devices, accumulation = plan.effective_batch, plan.devices, plan.accumulation
    micro_batches = passes_of(plan)
    assert sum(map(sum, micro_batches)) == batch
    assert tuple(map(sum, micro_batches)) == plan.shares
    assert max(plan.shares) - min(plan.shares) <= 1
    sizes = {size for device in micro_batches for size in device}
    assert len(sizes) <= 2
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == plan.largest_micro_batch == math.ceil(math.ceil(batch / devices) / accumulation)
    assert min(size for size in sizes if size) == plan.smallest_micro_batch
    # Only a step's last pass synchronises: no device may miss it.
    assert all(device[-1] > 0 for device in micro_batches)


def test_every_small_plan_keeps_the_laws() -> None:
    for batch in range(1, 301):
        for devices in range(1, 9):
            if batch < devices:
                with pytest.raises(InfeasiblePlanError):
                    BatchPlan(batch, 1, devices)
                continue
            for accumulation in range(1, 9):
                assert_laws(BatchPlan(batch, accumulation, devices))


@given(st.integers(1, 2**40), st.integers(1, 2000), st.integers(1, 64))
def test_every_large_plan_keeps_the_laws(batch: int, accumulation: int, devices: int) -> None:
    if batch >= devices:
        assert_laws(BatchPlan(batch, accumulation, devices))


def test_without_a_wish_accumulation_is_the_fewest_that_fits() -> None:
    for batch in range(1, 301):
        for devices in (1, 2, 3, 8):
            for cap in (1, 2, 3, 7, 16, 33, 100, 300):
                if batch < devices:
                    continue
                plan = plan_batch(batch, devices=devices, largest_micro_batch=cap)
                assert plan.largest_micro_batch <= cap
                if plan.accumulation > 1:
                    assert BatchPlan(batch, plan.accumulation - 1, devices).largest_micro_batch > cap


@given(st.integers(1, 10**6), st.integers(1, 64), st.integers(1, 10**4), st.integers(1, 50))
def test_a_wish_below_the_minimum_is_raised_and_above_it_kept(
    batch: int, devices: int, cap: int, wish: int
) -> None:
    if batch < devices:
        return
    fewest = plan_batch(batch, devices=devices, largest_micro_batch=cap).accumulation
    made = plan_batch(batch, devices=devices, largest_micro_batch=cap, accumulation=wish)
    assert made.accumulation == max(min(wish, made.shares[0]), fewest)


def test_what_cannot_be_planned_is_told() -> None:
    with pytest.raises(InfeasiblePlanError, match="at most 4 micro-batches"):
        plan_batch(500, largest_micro_batch=100, accumulation_high=4)
    with pytest.raises(InfeasiblePlanError, match="at least 2 samples per micro-batch"):
        plan_batch(5, accumulation=3, smallest_micro_batch=2)
    with pytest.raises(InfeasiblePlanError, match="expected an integer >= 1, got 0"):
        plan_batch(0)
    with pytest.raises(InfeasiblePlanError, match="largest micro-batch: expected an integer >= 1"):
        plan_batch(5, largest_micro_batch=0)


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_parts_differ_by_at_most_one(total: int, parts: int) -> None:
    shares = even_parts(total, parts)
    assert sum(shares) == total
    assert len(shares) == parts
    assert max(shares) - min(shares) <= 1


def test_how_far_a_plan_misses_is_the_share_of_its_limit() -> None:
    assert plan_batch(500, largest_micro_batch=100, accumulation_high=5).accumulation == 5
    for refused, violation in [
        (lambda: plan_batch(500, largest_micro_batch=100, accumulation_high=4), 5 / 4 - 1),
        (lambda: plan_batch(4, devices=3, smallest_micro_batch=4), (4 - 1) / 4),
        (lambda: plan_batch(8, devices=3, accumulation=3, every_micro_batch=True), 3 / 2 - 1),
        (lambda: plan_batch(2, devices=3), (3 - 2) / 3),
    ]:
        with pytest.raises(InfeasiblePlanError) as missed:
            refused()
        assert missed.value.violation == pytest.approx(violation)


def test_where_devices_synchronise_in_each_none_skips_a_micro_batch() -> None:
    for batch in range(1, 40):
        for devices in range(1, min(batch, 5) + 1):
            for accumulation in range(1, 7):
                plan = plan_batch(batch, devices=devices, accumulation=accumulation)
                if all(map(all, passes_of(plan))):
                    assert (
                        plan_batch(batch, devices=devices, accumulation=accumulation, every_micro_batch=True)
                        == plan
                    )
                    continue
                with pytest.raises(
                    InfeasiblePlanError, match="a sample in every micro-batch of every device"
                ):
                    plan_batch(batch, devices=devices, accumulation=accumulation, every_micro_batch=True)


@given(st.integers(1, 500), st.integers(1, 60), st.integers(1, 4), st.integers(1, 3), st.integers(2, 64))
@example(budget=9, batch=4, devices=1, smallest=2, cap=8)
def test_the_steps_of_a_training_are_its_step_sizes_each_planned(
    budget: int, batch: int, devices: int, smallest: int, cap: int
) -> None:
    limits = {"devices": devices, "smallest_micro_batch": smallest, "largest_micro_batch": cap}
    try:
        plan = plan_batch(batch, **limits)
    except InfeasiblePlanError:
        return
    del limits["devices"]  # they are the plan's
    try:
        sizes = list(step_sizes(budget, batch, devices=devices, **limits))
        expected = [plan if size == batch else plan_batch(size, devices=devices, **limits) for size in sizes]
    except InfeasiblePlanError:  # the remainder has no plan, neither on its own nor joined to the step before
        with pytest.raises(InfeasiblePlanError):
            step_plans(plan, budget, **limits)
        return
    assert sum(sizes) == budget
    assert budget < batch or (set(sizes[:-1]) <= {batch} and sizes[-1] < 2 * batch)
    runs = step_plans(plan, budget, **limits)
    assert [run.plan for run in runs for _ in range(run.count)] == expected
    assert all(run.count > 0 for run in runs)


@given(st.integers(1, 400), st.integers(1, 120), st.integers(1, 4), st.integers(1, 60))
def test_cached_embeddings_are_of_several_micro_batches_each_step(
    budget: int, batch: int, devices: int, cap: int
) -> None:
    """The cap holds for what runs twice: a remainder in one micro-batch would take more."""
    limits = {"largest_micro_batch": cap, **accumulation_limits("cached", couples_samples=False)}
    if batch < devices or budget < batch:
        return
    plan = plan_batch(batch, devices=devices, **limits)
    try:
        steps = step_plans(plan, budget, **limits)
    except InfeasiblePlanError:
        return
    assert sum(run.count * run.plan.effective_batch for run in steps) == budget
    for run in steps:
        assert run.plan.accumulation >= min(2, run.plan.shares[0])
        assert run.plan.largest_micro_batch <= cap


def test_several_devices_have_room_for_a_second_copy_of_the_gradients() -> None:
    law = MemoryLaw(((1, 100), (11, 1100)))
    known = DeviceProfile(
        "gpu", "a card", 100, limit_bytes=1000, largest_micro_batch=10, memory=law, gradient_bytes=200
    )
    assert (known.usable_bytes(1), known.usable_bytes(2)) == (950, 750)
    assert tuple(known.cap_on(devices, None) for devices in (1, 2)) == (10, 7)
    assert DeviceProfile.from_dict(known.to_dict()) == known
