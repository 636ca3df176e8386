"""Laws of the domains: a range is the values that it lists, and what is no value of a domain is refused in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from bsearch.spaces.domain import (
    Choices,
    Domain,
    Fixed,
    Range,
    applies,
    applying,
    batches,
    bounds,
    count_of,
    epoch_numbers,
    every_value_of,
    log_by_default,
    numbers,
    numbers_from_zero,
    positive_numbers,
    real,
    searched_of,
    share,
    whole_numbers,
)
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

scalars = st.booleans() | st.integers(-50, 50) | st.floats() | st.text(max_size=3)
anything = (
    scalars
    | st.none()
    | st.lists(scalars, max_size=2)
    | st.dictionaries(st.text(max_size=2), scalars, max_size=2)
)


@given(st.integers(-40, 40), st.integers(0, 12), st.integers(1, 9), st.booleans())
def test_a_range_of_integers_contains_what_it_lists(low: int, steps: int, step: int, says_step: bool) -> None:
    step = step if says_step else 1
    domain = Range(low=low, high=low + steps * step, step=step if says_step else None)
    values = list(range(low, low + steps * step + 1, step))
    assert every_value_of(domain) == values
    assert count_of(domain) == len(values)
    assert [value for value in range(low - 10, low + steps * step + 10) if domain.contains(value)] == values
    assert not domain.contains(low + 0.5)
    assert bounds(domain) == (values[0], values[-1])
    assert (searched_of({"x": domain}) == {}) == (len(values) == 1)


@given(st.floats(-1e3, 1e3).map(lambda low: round(low, 9)), st.integers(0, 50), st.floats(1e-3, 10))
def test_a_range_in_real_steps_contains_each_step_and_nothing_between(
    low: float, steps: int, step: float
) -> None:
    domain = Range(low=low, high=low + steps * step, step=step)
    assert count_of(domain) is None
    assert all(domain.contains(min(low + place * step, domain.high)) for place in range(steps + 1))
    assert not any(domain.contains(low + (place + 0.5) * step) for place in range(-1, steps + 1))


def test_a_range_without_steps_contains_all_between_its_ends_and_them() -> None:
    domain = Range(low=0.0, high=1.0)
    assert all(map(domain.contains, (0, 0.0, 0.3, 1, 1.0)))
    assert not any(map(domain.contains, (-1e-12, 1 + 1e-12, True, math.nan)))


@given(
    st.sampled_from(
        [Range(low=1, high=9), Range(low=0.0, high=1.0), Choices(choices=(1, "a")), Fixed(value=0.5)]
    ),
    anything,
)
def test_whether_it_contains_a_value_may_be_asked_of_anything(domain: Domain, value: Any) -> None:
    assert domain.contains(value) in (True, False)


def test_a_choice_is_of_its_own_type() -> None:
    domain = Choices(choices=(1, 2.0, "3", True))
    assert [domain.contains(value) for value in (1, 2.0, "3", True)] == [True] * 4
    assert [domain.contains(value) for value in (1.0, 2, 3, False)] == [False] * 4
    assert (count_of(Choices(choices=("a", "b", "a"))), every_value_of(Choices(choices=("a", "b", "a")))) == (
        2,
        ["a", "b"],
    )


@pytest.mark.parametrize(
    ("check", "taken", "refused"),
    [
        (whole_numbers, [1, 64], [0, -1, 1.0, 2.5]),
        (positive_numbers, [1e-9, 1], [0, -0.1]),
        (epoch_numbers, [0.1, 1_000_000], [0, -1, 1_000_000.1]),
        (numbers_from_zero, [0, 0.0, 3], [-1e-9]),
        (numbers, [-1, 0, 0.5], []),
    ],
)
def test_numbers_are_checked_at_both_ends_and_truth_is_none(
    check: Callable[[Domain], Domain], taken: list[Any], refused: list[Any]
) -> None:
    for value in taken:
        assert check(Fixed(value=value)) == Fixed(value=value)
    for value in [*refused, True, "1"]:
        with pytest.raises(PydanticCustomError, match=r"^expected an? (number|integer)"):
            check(Choices(choices=(1, value)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_value_is_one_that_json_does_not_have(value: float) -> None:
    for make in (
        lambda: Choices(choices=(1, value)),
        lambda: Fixed(value=value),
        lambda: Range(low=0.0, high=value),
    ):
        with pytest.raises(ValidationError, match="expected a finite number"):
            make()


@pytest.mark.parametrize("number", [1e-320, -5e-324, 1e300, -1e200])
def test_no_number_has_a_square_or_a_quotient_that_is_none(number: float) -> None:
    for ends in (
        {"low": number, "high": 1e99},
        {"low": -1e99, "high": number},
        {"low": 0, "high": 1, "step": abs(number)},
    ):
        with pytest.raises(ValidationError, match="expected 0, or a magnitude from 1e-100 to 1e"):
            Range.model_validate(ends)
    with pytest.raises(ValidationError, match="expected at most 1e\\+12 steps from low to high"):
        Range(low=0, high=1, step=1e-13)


def test_whole_numbers_have_whole_steps() -> None:
    assert whole_numbers(Range(low=8, high=64, step=8)).step == 8
    with pytest.raises(PydanticCustomError, match=r"expected a step of whole numbers, got 0\.5"):
        whole_numbers(Range(low=8, high=64, step=0.5))


def test_a_scale_is_logarithmic_by_default_where_it_can_be() -> None:
    assert batches(Range(low=8, high=64)).log is True
    assert batches(Range(low=8, high=64, log=False)).log is False
    assert batches(Range(low=8, high=64, step=8)).log is None
    assert log_by_default(Range(low=0, high=64)).log is False
    for bad in (
        {"low": 0, "high": 1, "log": True},
        {"low": 1, "high": 9, "log": True, "step": 1},
        {"low": 2, "high": 1},
    ):
        with pytest.raises(ValidationError, match="expected"):
            Range(**bad)


def test_a_real_range_contains_what_lies_between_integers() -> None:
    domain = Range(low=0, high=1)
    assert domain.whole and not domain.contains(0.5)
    assert not real(domain).whole and real(domain).contains(0.5)


def test_a_value_applies_where_all_its_conditions_do() -> None:
    when = {"optimizer": ("sgd", "nesterov"), "rule": ("linear",)}
    assert applies(when, {"optimizer": "nesterov", "rule": "linear"})
    assert not applies(when, {"optimizer": "nesterov", "rule": "sqrt"})
    assert not applies(when, {"rule": "linear"})
    domains = {"momentum": Range(low=0.0, high=1.0, when={"optimizer": ("sgd",)})}
    assert applying(domains, {"momentum": 0.9, "optimizer": "adamw", "other": 1}) == {
        "optimizer": "adamw",
        "other": 1,
    }


@pytest.mark.parametrize(
    ("written", "meant"),
    [("5%", 0.05), (" 12.5 % ", 0.125), (".5%", 0.005), ("5.%", 0.05), (0, 0.0), (0.5, 0.5), ("0%", 0.0)],
)
def test_a_share_may_be_a_percentage(written: Any, meant: float) -> None:
    assert share(written) == meant


@pytest.mark.parametrize(
    "written",
    [1, 1.0, -0.1, "100%", "5", "half", "5%%", "5 per cent", "1.2.3%", ".%", True, False, None, math.nan],
)
def test_what_is_no_share_is_told_how_to_write_one(written: Any) -> None:
    with pytest.raises(
        PydanticCustomError, match=r"expected a share from 0 up to 1, got .*\. Write 5% or 0\.05\."
    ):
        share(written)
